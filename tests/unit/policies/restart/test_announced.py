"""What there is time for when an end is announced."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autockpt.policies.restart.announced import (
    DEFAULT_GRACE_S,
    Pace,
    answer,
    grace_s,
    launcher_times,
    leave_s,
)

SECONDS = st.floats(0.01, 10_000)
MAYBE = st.none() | SECONDS


@pytest.mark.parametrize(
    ("notice_s", "left_s", "launcher_s", "expected_s"),
    [
        (None, None, None, DEFAULT_GRACE_S),
        (120.0, None, None, 120.0),
        (120.0, None, 30.0, 30.0),  # torchrun kills its ranks before the notice is over
        (None, 60.0, None, 60.0),  # --signal=USR1@60
        (None, 7200.0, None, DEFAULT_GRACE_S),  # preempted long before its limit
        (None, 0.4, None, DEFAULT_GRACE_S),  # at the limit Slurm grants its KillWait
        (120.0, -2.0, None, DEFAULT_GRACE_S),
        (10.0, 60.0, None, 10.0),
    ],
)
def test_the_grace_is_the_least_of_what_is_known(
    notice_s: float | None, left_s: float | None, launcher_s: float | None, expected_s: float
) -> None:
    """Policy, Slurm and launcher."""
    assert grace_s(notice_s=notice_s, allocation_left_s=left_s, launcher_s=launcher_s) == expected_s


@given(SECONDS, MAYBE, MAYBE, MAYBE)
def test_all_of_an_answer_is_over_before_the_grace_is(
    grace: float, iteration_s: float | None, stall_s: float | None, durable_s: float | None
) -> None:
    """Whatever was measured."""
    what = answer(grace, Pace(iteration_s=iteration_s, stall_s=stall_s, durable_s=durable_s))
    assert 0.0 <= what.give_up_s <= what.leave_s == leave_s(grace) < grace
    assert what.reason


@given(SECONDS, SECONDS, SECONDS, SECONDS)
def test_the_coming_boundary_is_saved_exactly_where_it_fits(
    grace: float, iteration_s: float, stall_s: float, durable_s: float
) -> None:
    """Iteration, stall and time until durable in front of the margin; else what is in memory."""
    what = answer(grace, Pace(iteration_s=iteration_s, stall_s=stall_s, durable_s=durable_s))
    fits = iteration_s + stall_s + durable_s <= leave_s(grace)
    assert (what.saves == "boundary") == fits
    if fits:  # what is in memory can still be made durable when the boundary does not come
        assert what.give_up_s + durable_s <= what.leave_s * 1.000001
        assert what.give_up_s <= what.leave_s * 0.900001


def test_what_was_never_measured_is_tried() -> None:
    """Before the first checkpoint nothing is in memory that could be lost by it."""
    assert answer(30.0, Pace()).saves == "boundary"


@given(SECONDS)
def test_a_launcher_is_gone_when_it_has_said(grace: float) -> None:
    """Ranks leave by themselves first, then the keeper is waited for, then it ends."""
    times = launcher_times(grace)
    assert leave_s(grace) < times.ranks_s < times.keeper_s < times.over_s == grace
