"""How far the world must move before a decision turns, and that it does turn there."""

from dataclasses import replace
from functools import cache

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autockpt.policies.cost_model.cost_curve import tiers_of_plan
from autockpt.policies.cost_model.expectation import rates_of
from autockpt.policies.cost_model.sensitivity import BAND, INPUTS, Flip, even_failures, flips
from autockpt.policies.decide import decide
from autockpt.policies.interval.nesting import Tiers
from autockpt.values.decision_inputs import TierCost
from autockpt.values.goal import Goal, Limits, Pins
from autockpt.values.plan import Decision
from tests.support.profiles import example_profile

PROFILE = example_profile()
GOAL = Goal()


@cache
def todays() -> tuple[Decision, tuple[Flip, ...]]:
    """The decision and what turns it."""
    decision = decide(PROFILE, GOAL)
    return decision, flips(PROFILE, GOAL, decision, decide)


def pair(decision: Decision) -> tuple[int, int]:
    """(memory, disk)."""
    plan = decision.plan
    return plan.tier("memory").interval_steps, plan.tier("disk").interval_steps


def test_every_flip_turns_its_choice_and_nothing_before_it_does() -> None:
    """A little short of the factor the choice stands, or its intervals are good enough."""
    decision, found = todays()
    assert {flip.choice for flip in found} >= {"memory.interval", "disk.interval", "staging"}
    for flip in found:
        beyond = decide(*INPUTS[flip.input](PROFILE, GOAL, flip.factor))
        choice = beyond.choice(flip.choice)
        assert choice is not None
        assert choice.chosen == flip.becomes
        shy = decide(*INPUTS[flip.input](PROFILE, GOAL, flip.factor**0.98))
        standing, before = shy.choice(flip.choice), decision.choice(flip.choice)
        assert standing is not None
        assert before is not None
        if not flip.choice.endswith("interval"):
            assert standing.chosen == before.chosen


@pytest.mark.parametrize("name", ["failures", "storage time"])
def test_intervals_flip_where_keeping_them_costs_the_band(name: str) -> None:
    """On each side of today's value, at 2.5 % more tunable waste than the best."""
    decision, turned = todays()
    found = [flip for flip in turned if (flip.choice, flip.input) == ("disk.interval", name)]
    assert sorted(flip.factor > 1.0 for flip in found) == [False, True]
    for flip in found:
        profile, goal = INPUTS[name](PROFILE, GOAL, flip.factor)
        best = decide(profile, goal)
        tiers = tiers_of_plan(profile, goal, best.plan)
        worse = tiers.tunable(*pair(decision)) / tiers.tunable(*pair(best))
        assert worse == pytest.approx(BAND, abs=0.01)


def test_an_input_times_one_is_the_input() -> None:
    """Scaling by one turns nothing."""
    decision, _ = todays()
    for scale in INPUTS.values():
        same = scale(PROFILE, GOAL, 1.0)
        assert rates_of(*same).total_per_s == pytest.approx(rates_of(PROFILE, GOAL).total_per_s)
        assert [c.chosen for c in decide(*same).choices] == [c.chosen for c in decision.choices]


def test_a_pinned_choice_is_turned_by_nothing() -> None:
    """What the user said does not depend on the world."""
    goal = Goal(pins=Pins(disk_interval_steps=500, memory_interval_steps=50, schedule="blocking"))
    found = flips(PROFILE, goal, decide(PROFILE, goal), decide)
    assert not [flip for flip in found if flip.choice in ("disk.interval", "memory.interval")]


def test_worlds_without_any_plan_are_passed_over() -> None:
    """A limit that forbids everything beyond a factor is no flip and no failure."""
    goal = Goal(limits=Limits(lost_time_s=60.0))
    found = flips(PROFILE, goal, decide(PROFILE, goal), decide)
    assert all(flip.becomes for flip in found)


costs = st.floats(min_value=0.01, max_value=20.0)
rates = st.floats(min_value=1e-6, max_value=1e-3)
steps = st.integers(min_value=1, max_value=2000)


@given(costs, rates, steps, steps)
def test_at_even_failures_both_intervals_waste_the_same(
    cost_s: float, rate: float, chosen: int, other: int
) -> None:
    """By the waste function itself, with the rate scaled by the factor."""

    def tiers(factor: float) -> Tiers:
        disk = TierCost(
            stall_s=cost_s, slowdown_s=0.0, latency_s=1.0, restart_s=30.0, restore_s=5.0,
            failures_per_s=rate * factor,
        )  # fmt: skip
        return Tiers(iteration_s=1.0, memory=None, disk=disk)

    even = even_failures(tiers(1.0), (0, chosen), (0, other))
    if chosen == other:
        assert even is None
        return
    assert even is not None
    mine, theirs = (tiers(even).tunable(0, n) for n in (chosen, other))
    assert mine == pytest.approx(theirs, rel=1e-9)


def test_intervals_that_are_better_either_way_are_never_even() -> None:
    """One pair pays less and loses less than the other, however often failures come."""
    disk = TierCost(
        stall_s=1.0, slowdown_s=0.0, latency_s=1.0, restart_s=0.0, restore_s=0.0,
        failures_per_s=1e-7,
    )  # fmt: skip
    tiers = Tiers(iteration_s=1.0, memory=replace(disk, failures_per_s=1e-3), disk=disk)
    assert even_failures(tiers, (150, 1500), (200, 200)) is None
