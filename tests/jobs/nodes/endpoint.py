"""A keeper's end of the control plane as a process of its own: `endpoint.py DIRECTORY NODE HOST`.

Sends a numbered message to the other of two nodes ten times a second, and prints what it hears: one
JSON object per line, {"heard": number} or {"lost": node}.  Ends when stdin does.
"""

import json
import select
import sys

from autockpt.executors.network.control_plane import Peers
from autockpt.executors.protocol import messages as p


def main() -> None:
    """Take part until stdin is closed."""
    directory, node, host = sys.argv[1], int(sys.argv[2]), sys.argv[3]
    incarnation = p.Incarnation(launch_id="launch", restart_round=0)

    def heard(_: int, message: p.WireMessage) -> None:
        if isinstance(message, p.TrainerLost):
            print(json.dumps({"heard": message.rank}), flush=True)

    peers = Peers(
        directory, "run", node, received=heard,
        lost=lambda gone: print(json.dumps({"lost": gone}), flush=True),
        trouble=lambda what: print(what, file=sys.stderr, flush=True),
        log=lambda text: print(text, file=sys.stderr, flush=True),
    )  # fmt: skip
    peers.expect(incarnation, (0, 1), host)
    number = 0
    while not select.select([sys.stdin], [], [], 0.1)[0]:
        peers.send(1 - node, p.TrainerLost(incarnation=incarnation, rank=number))
        number += 1
    peers.close()


if __name__ == "__main__":
    main()
