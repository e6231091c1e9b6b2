"""Which survivors go on in their own process."""

import pytest

from autockpt.launch.in_process.decision import MOST_RESTARTS, Survivor, judge, obstacle


@pytest.mark.parametrize(
    ("survivor", "in_process", "reason"),
    [
        (Survivor(rank=0, is_restartable=True, answer=""), True, ""),
        (Survivor(rank=0, is_restartable=False, answer=""), False, ""),
        (Survivor(rank=0, is_restartable=True, answer="a thread"), False, "a thread"),
        (Survivor(rank=0, is_restartable=True), False, "did not end within"),
        (Survivor(rank=0, is_restartable=True, place="in f (a:3)"), False, "10 s: in f (a:3)"),
        (Survivor(rank=0, is_restartable=True, unfit="ValueError: twice"), False, "twice"),
        (
            Survivor(rank=0, is_restartable=True, restarts=MOST_RESTARTS, answer=""),
            False, f"restarted {MOST_RESTARTS} times",
        ),
    ],
)  # fmt: skip
def test_a_survivor_goes_on_only_where_nothing_is_left(
    survivor: Survivor, in_process: bool, reason: str
) -> None:
    """A script that did not ask for it hears no reason."""
    verdict = judge(survivor)
    assert verdict.in_process is in_process
    assert reason in verdict.reason
    assert bool(verdict.reason) is bool(reason)


def test_a_survivor_that_has_not_asked_for_it_is_not_asked() -> None:
    """Nor one whose process is old."""
    assert obstacle(Survivor(rank=0, is_restartable=True)) is None
    assert obstacle(Survivor(rank=0, is_restartable=False)) == ""
    assert obstacle(Survivor(rank=0, is_restartable=True, restarts=MOST_RESTARTS))
