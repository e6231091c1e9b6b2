"""Prints `examples/failures.csv`, a made-up trace of failures for `autockpt simulate --trace`.

    python examples/failures.py > examples/failures.csv

There are 64 nodes over 30 days.  Processes die, single nodes fail and are repaired, one node fails
again and again, and a power supply takes four neighbours at once.  No cluster ever wrote this.
"""

import random

NODES, DAYS, SEED = 64, 30, 2026
NODE_DAYS = 150.0
"""Mean time between failures of one node."""
PROCESS_DAYS = 2.5
"""Mean time between deaths of processes, anywhere in the job."""
REPAIR_H = 9.0


def lines() -> list[str]:
    """The file, comments first."""
    chance = random.Random(SEED)
    found: list[tuple[float, str]] = []

    def outage(node: int | None, start_h: float, repair_h: float) -> None:
        name = "" if node is None else str(node)
        found.append((start_h, f"{name},{start_h:.2f},{start_h + repair_h:.2f}"))

    for node in range(NODES):
        start_h = chance.expovariate(1 / (24 * NODE_DAYS))
        while start_h < 24 * DAYS:
            repair_h = chance.expovariate(1 / REPAIR_H)
            outage(node, start_h, repair_h)
            start_h += repair_h + chance.expovariate(1 / (24 * NODE_DAYS))
    start_h = chance.expovariate(1 / (24 * PROCESS_DAYS))
    while start_h < 24 * DAYS:
        outage(None, start_h, 0.0)
        start_h += chance.expovariate(1 / (24 * PROCESS_DAYS))
    for start_h in (200.0, 216.5, 251.0):
        outage(17, start_h, 4.0)
    for node in (40, 41, 42, 43):
        outage(node, 500.0, 6.0)
    comments = [
        "# Made up by examples/failures.py (seed 2026): 64 nodes, 30 days. Times in hours.",
        "# A line without a node: processes died, and no node's memory was lost.",
    ]
    return [*comments, "node,start_h,end_h", *(line for _, line in sorted(found))]


if __name__ == "__main__":
    print("\n".join(lines()))
