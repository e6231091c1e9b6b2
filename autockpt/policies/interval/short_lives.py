"""A job that dies before its first checkpoint: only the length of its life is known.

A failure rate is credible only after some failures.  Until then the plan may be for a job that
lives ten times as long, and every start begins where the previous one did.  So intervals are at
most a part of the shortest life of which nothing was kept.
"""

from collections.abc import Sequence

from autockpt.values.failure import Life

PART = 3
"""An interval is at most this part of the shortest such life: two more checkpoints may be late."""
SURE = 3
"""So many lives in a row without one iteration, and every iteration is saved; fewer say nothing."""


def within_lives(pair: tuple[int, int], lives: Sequence[Life]) -> tuple[int, int]:
    """(memory, disk) in iterations, shortened and nested; a tier that is off stays off.

    `lives`: the newest in a row of which nothing was kept.
    """
    trained = [life.steps for life in lives if life.steps]
    if not trained and len(lives) < SURE:
        return pair
    most = max(1, min(trained, default=0) // PART)
    memory, disk = pair
    memory = min(memory, most)
    if not disk or not memory:
        return memory, min(disk, most)
    return memory, min(disk, max(1, most // memory) * memory)
