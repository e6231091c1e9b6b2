"""When a plan has a checkpoint due."""

from dataclasses import replace

import pytest

from autockpt.policies.default_plan import plan_while_measured, plan_without_profile
from autockpt.values.goal import Goal, Pins
from autockpt.values.plan import CheckpointPlan, Choice


def due(plan: CheckpointPlan, last: int, *, window: int = 1, tier: str = "disk") -> list[int]:
    """Steps with a checkpoint up to `last`, where each `window`-th step can be saved."""
    return [s for s in range(window, last + 1, window) if plan.is_due(tier, s, since=s - window)]


def test_without_a_profile_the_first_checkpoints_are_early() -> None:
    """At doubling steps, of both tiers: steps may last minutes before anything is known."""
    plan = plan_without_profile(Goal())
    assert due(plan, 320) == [1, 2, 4, 8, 16, 32, 64, 100, 200, 300]
    assert due(plan, 320, tier="memory") == due(plan, 320)


def test_accumulated_steps_lose_no_early_checkpoint() -> None:
    """It waits for the boundary that can be saved; several that wait are one."""
    plan = plan_without_profile(Goal())
    assert due(plan, 210, window=3) == [3, 6, 9, 18, 33, 66, 102, 201]


def test_a_shorter_interval_ends_the_early_ones() -> None:
    """As after a change of the plan."""
    plan = plan_without_profile(Goal())
    tiers = tuple(replace(tier, interval_steps=10) for tier in plan.tiers)
    assert due(replace(plan, tiers=tiers), 30) == [1, 2, 4, 8, 10, 20, 30]


@pytest.mark.parametrize("pins", [Pins(disk_interval_steps=40), Pins(memory_interval_steps=40)])
def test_a_pinned_interval_has_no_early_checkpoints(pins: Pins) -> None:
    """The user has said when."""
    assert due(plan_without_profile(Goal(pins=pins)), 200, tier="memory")[0] == 40


def test_a_run_that_measures_itself_is_protected_at_once() -> None:
    """Its steps may last an hour; samples of one kind come at its own interval."""
    assert due(plan_while_measured(Goal()), 24) == [1, 2, 4, 8, 16, 24]


def test_a_tier_that_is_off_has_none() -> None:
    """Whatever is early."""
    plan = plan_without_profile(Goal(pins=Pins(memory_enabled=False)))
    assert due(plan, 200, tier="memory") == []


def test_a_runner_up_that_costs_the_same_shows_no_two_equal_figures() -> None:
    """Figures are rounded: "0.859 % against 0.859 %" tells nobody anything."""
    choice = Choice(
        name="disk.interval", chosen="89 steps", reason="r", runner_up="88 steps",
        runner_up_waste=0.00859002, chosen_waste=0.00859001,
    )  # fmt: skip
    assert choice.runner_up_text == "88 steps (the same lost time)"
    worse = replace(choice, runner_up_waste=0.0101)
    assert worse.runner_up_text == "88 steps (lost time 1.01 % against 0.859 %)"
    assert replace(choice, runner_up_waste=None).runner_up_text == "88 steps"


@pytest.mark.parametrize("early", [0, 2, 3])
@pytest.mark.parametrize("interval", [0, 1, 7, 12])
def test_the_next_checkpoint_is_the_first_that_is_due(interval: int, early: int) -> None:
    """Behind every step; none comes before it."""
    plan = plan_without_profile(Goal())
    tiers = tuple(replace(tier, interval_steps=interval) for tier in plan.tiers)
    plan = replace(plan, tiers=tiers, early_step=early)
    for since in range(40):
        following = [s for s in range(since + 1, 80) if _is_step_of(interval, early, s)]
        assert plan.next_due("disk", since=since) == (following[0] if following else None)


def _is_step_of(interval: int, early: int, step: int) -> bool:
    if interval and step % interval == 0:
        return True
    doubled = early > 0 and step % early == 0 and (step // early).bit_count() == 1
    return doubled and step < interval
