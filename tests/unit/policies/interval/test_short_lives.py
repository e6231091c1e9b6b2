"""Intervals of a job of which nothing was kept: at most a third of the shortest life."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autockpt.policies.interval.short_lives import within_lives
from autockpt.values.failure import FailureRecord, Life, lives_of, without_progress


def life(steps: int, *, kept: bool = False) -> Life:
    return Life(trained_s=float(steps), steps=steps, kept=kept)


@pytest.mark.parametrize(
    ("pair", "steps", "then"),
    [
        ((567, 1134), [600, 900, 1200], (200, 200)),
        ((50, 500), [600, 900, 1200], (50, 200)),
        ((0, 567), [90], (0, 30)),
        ((20, 0), [30], (10, 0)),
        ((20, 40), [0, 0], (20, 40)),
        ((20, 40), [0, 0, 0], (1, 1)),
        ((20, 40), [0, 2, 0], (1, 1)),
        ((20, 40), [], (20, 40)),
    ],
)
def test_an_interval_is_a_third_of_the_shortest_life(
    pair: tuple[int, int], steps: list[int], then: tuple[int, int]
) -> None:
    """Nested; lives without an iteration say something only when there are three of them."""
    assert within_lives(pair, [life(n) for n in steps]) == then


@given(
    memory=st.integers(1, 1000), snapshots=st.integers(1, 20),
    steps=st.lists(st.integers(1, 10_000), min_size=1, max_size=5),
)  # fmt: skip
def test_it_only_shortens_and_stays_nested(memory: int, snapshots: int, steps: list[int]) -> None:
    """For every plan and every life."""
    before = (memory, memory * snapshots)
    now = within_lives(before, [life(n) for n in steps])
    assert now[1] % now[0] == 0
    assert 1 <= now[0] <= before[0]
    assert now[1] <= before[1]
    assert now[1] <= max(1, min(steps) // 3)


def test_lives_are_read_from_the_log() -> None:
    """A life is kept where the next start went on from what it had trained."""

    def ended(step: int, lost: int) -> FailureRecord:
        return FailureRecord(
            wall="", kind="process", what="trainer", node=0, step=step, exposure_s=9.0,
            lost_steps=lost,
        )  # fmt: skip

    found = lives_of([ended(30, 30), ended(50, 10), ended(60, 20), ended(45, 5), ended(41, 1)])
    assert [(one.steps, one.kept) for one in found] == [
        (30, False), (50, True), (20, False), (5, False), (1, False)
    ]  # fmt: skip
    assert [one.steps for one in without_progress(found)] == [20, 5, 1]
