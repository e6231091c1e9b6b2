"""An end of a transfer as a process: `carrier.py lend HOST` or `carrier.py fetch HOST PEER PORT`.

Prints one JSON object per line: {"port": n} first, then {"event": name, "reason": text} for every
end of a transfer, and {"chunk": n} for every hundredth chunk that comes.  What is lent is an image
of 64 MiB, paced to take ten seconds.  Ends when stdin does.
"""

import json
import sys
from typing import Any

from autockpt.executors.throttle.rate_limit import RateLimiter
from tests.unit.executors.network.transfer.ends import PATIENCE_S, End, Image

IMAGE_BYTES = 2**26
SILENCE_S = 2.0


class Peer:
    """Where the other process lends."""

    node = 0

    def __init__(self, host: str, port: str) -> None:
        self.address = (host, int(port))


def main() -> None:
    """Take part until stdin is closed."""
    role, host, *peer = sys.argv[1:]
    end = Told(0 if role == "lend" else 1, host=host, silence_s=SILENCE_S)
    image = Image(IMAGE_BYTES)
    say(port=end.port)
    if role == "lend":
        end.gate, end.deadline_s = RateLimiter(IMAGE_BYTES / 10), 10 * PATIENCE_S
        end.lend(image)
    else:
        end.placing = lambda number: say(chunk=number) if number % 100 == 0 else None
        end.fetch(Peer(*peer), image, deadline_s=10 * PATIENCE_S, streams=2)
    sys.stdin.read()
    end.close()


def say(**fact: object) -> None:
    """A line."""
    print(json.dumps(fact), flush=True)


class Told(End):
    """Says what it is told."""

    def _note(self, event: Any) -> None:
        super()._note(event)
        say(event=type(event).__name__, reason=getattr(event, "reason", ""))


if __name__ == "__main__":
    main()
