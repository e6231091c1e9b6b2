"""An end of a transfer as a process: `carrier.py take HOST` or `carrier.py give HOST PEER PORT`.

Prints one JSON object per line: {"port": n} first, then {"event": name, "reason": text} for every
last event.  The giver pushes an image of 64 MiB, paced to take ten seconds.  Ends when stdin does.
"""

import json
import sys
from typing import Any

from autockpt.executors.gate import PacedGate
from tests.executors.transfer.ends import CHUNK, PATIENCE_S, End, Image

IMAGE_BYTES = 2**26
SILENCE_S = 2.0


def main() -> None:
    """Take part until stdin is closed."""
    role, host, *peer = sys.argv[1:]
    end = Told(1 if role == "take" else 0, host=host, silence_s=SILENCE_S)
    print(json.dumps({"port": end.port}), flush=True)
    if role == "give":
        image = Image(IMAGE_BYTES).seal()
        end.pool.push(
            1, (peer[0], int(peer[1])), image.source, deadline_s=10 * PATIENCE_S, streams=2,
            gate=PacedGate(IMAGE_BYTES / 10),
        )  # fmt: skip
    sys.stdin.read()
    end.close()


class Told(End):
    """Says what it is told."""

    def _note(self, event: Any) -> None:
        super()._note(event)
        if type(event).__name__ != "ChunkReceived":
            print(
                json.dumps({"event": type(event).__name__, "reason": getattr(event, "reason", "")}),
                flush=True,
            )
        elif event.number % 100 == 0:
            print(json.dumps({"chunk": event.number * CHUNK}), flush=True)


if __name__ == "__main__":
    main()
