"""A failing disk is said at once, again at growing pauses, and when it is over."""

import itertools

from autockpt.executors.keeper.standing.run_standing import is_protected
from autockpt.executors.keeper.standing.storage_standing import (
    FIRST_PAUSE_S,
    LONGEST_PAUSE_S,
    Standing,
)

WALL = "2026-01-01T00:00:00Z"


def test_a_resumed_run_is_protected_before_its_first_checkpoint() -> None:
    """By the checkpoint that it began from; a start from scratch has nothing."""
    assert is_protected("running", durable=None, in_memory=False, resumed=True)
    assert not is_protected("running", durable=None, in_memory=False, resumed=False)
    assert not is_protected("finished", durable=None, in_memory=True, resumed=True)


def test_the_first_failure_is_said_at_once() -> None:
    """With its cause and what is left."""
    standing = Standing()
    said = standing.failed(5.0, WALL, "disk full")
    assert "disk full" in said
    assert "nothing of it is durable" in said
    assert standing.degraded[0].because == "disk full"
    assert standing.degraded[0].since == WALL


def test_later_ones_are_said_at_growing_pauses() -> None:
    """A day of failures is some thirty lines and not one per save."""
    standing, said = Standing(), []
    standing.failed(0.0, WALL, "disk full")
    for now in range(1, 86_400):
        text = standing.failed(float(now), WALL, "disk full")
        said += [now] if text else []
    pauses = [b - a for a, b in itertools.pairwise(said)]
    assert said[0] == FIRST_PAUSE_S
    assert pauses == sorted(pauses)
    assert max(pauses) == LONGEST_PAUSE_S
    assert len(said) < 40


def test_it_is_said_again_though_no_save_is_due() -> None:
    """Time alone is enough."""
    standing = Standing()
    assert standing.still(1e9) == ""
    standing.failed(0.0, WALL, "disk full")
    assert standing.still(FIRST_PAUSE_S - 1) == ""
    assert f"since {WALL} (1 failed): disk full" in standing.still(FIRST_PAUSE_S)


def test_the_end_of_it_is_said_once() -> None:
    """And the next failure is a first one again."""
    standing = Standing()
    assert standing.committed("step 5 (term 1)") == ""
    standing.failed(0.0, WALL, "disk full")
    standing.failed(1.0, WALL, "disk full")
    assert "after 2 that failed" in standing.committed("step 9 (term 1)")
    assert standing.degraded == ()
    assert "newest durable: step 9 (term 1)" in standing.failed(2.0, WALL, "disk full")
