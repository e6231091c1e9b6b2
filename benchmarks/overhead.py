"""`make bench-overhead`: `bench-engine` beside torch alone, in minutes.

What a disk checkpoint every few iterations costs the training: the same processes, rounds, pairing
and figures as benchmarks/engine.py, fewer contestants, no restores.
"""

import sys

from benchmarks import engine

DEFAULTS = {
    "only": ["torch.save", "DCP", "DCP async thread"], "rounds": 10, "peer_rounds": 5,
    "no_install": True,
}  # fmt: skip


def main() -> None:
    """Measures and publishes; options of `bench-engine` may follow."""
    engine.run("overhead", engine.arguments(sys.argv[1:], **DEFAULTS), engine.contest)


if __name__ == "__main__":
    main()
