"""Announced ends: in time they cost what a process costs, too late they are lost nodes."""

import random
from dataclasses import replace

import pytest

from autockpt.policies.decide import decide
from autockpt.policies.interval.choose import Rates, tiers_of
from autockpt.policies.interval.preemption import in_time
from autockpt.values.goal import FailureDeclaration, Goal, Pins
from autockpt.values.plan import Choice, Decision
from tests.support.profiles import example_failures, example_profile
from tests.unit.policies.interval.test_choose import costs

PROFILE = example_profile(failures=example_failures(mtbf_s=86400.0))


def decided(notice_s: float | None, *, every_s: float = 3600.0, pins: Pins | None = None):
    """The decision under announced ends, durable within 0.6 s."""
    declared = FailureDeclaration(preemption_s=every_s, notice_s=notice_s)
    return decide(PROFILE, Goal(failures=declared, pins=pins or Pins()))


def chosen(decision: Decision) -> Choice:
    choice = decision.choice("preemption")
    assert choice is not None
    return choice


def test_only_a_notice_that_is_long_enough_helps() -> None:
    """A write of 100 s fits into 120 s, one of 116 s leaves less than the margin."""
    assert in_time(120.0, 100.0)
    assert not in_time(120.0, 116.0)
    assert chosen(decided(30.0)).chosen == "written at the announcement"
    late = chosen(decided(5.2))
    assert (late.chosen, late.binding) == ("a lost node", "failures.notice")
    assert "only from 5.6 s on" in late.reason


def test_answered_ends_lengthen_the_disk_interval_and_shorten_the_other() -> None:
    """The disk is chosen for the rest, and the memory tier serves more."""
    heard, deaf = decided(30.0), decided(None)
    assert heard.plan.tier("disk").interval_steps > 3 * deaf.plan.tier("disk").interval_steps
    assert heard.plan.tier("memory").interval_steps <= deaf.plan.tier("memory").interval_steps
    assert heard.expected.waste < deaf.expected.waste
    choice = chosen(heard)
    assert choice.runner_up_waste == pytest.approx(deaf.expected.waste)
    assert choice.chosen_waste == heard.expected.waste


def test_without_the_memory_tier_an_announcement_is_worth_nothing() -> None:
    """Nothing is newer than what is on disk."""
    pins = Pins(memory_enabled=False)
    heard, deaf = decided(30.0, pins=pins), decided(None, pins=pins)
    assert chosen(heard).binding == "memory tier off"
    assert heard.plan.tiers == deaf.plan.tiers
    assert heard.expected.waste == deaf.expected.waste


def test_without_announced_ends_nothing_is_said() -> None:
    """A policy that does not declare them has no such choice, and the rates have no such part."""
    assert decide(PROFILE, Goal()).choice("preemption") is None


def simulated(memory_s: float, disk_s: float, rates: Rates, *, events: int) -> float:
    """Waste of two tiers of `costs`, walked event by event; announced ends wait for the write."""
    c, chance = costs(), random.Random(3)
    exposed_s = (c.stall_s + c.copy_slowdown_s) / memory_s + c.persist_slowdown_s / disk_s
    kinds = ("process", "node", "announced")
    weights = (rates.memory_per_s, rates.disk_per_s, rates.preempted_per_s)
    wall_s = work_s = 0.0
    for kind in chance.choices(kinds, weights, k=events):
        up_s = chance.expovariate(rates.total_per_s)
        every_s, latency_s = (disk_s, c.persist_s) if kind == "node" else (memory_s, c.copy_s)
        saved_s = max(0.0, (up_s - latency_s) // every_s * every_s)
        restore_s = c.restore_memory_s if kind == "process" else c.restore_disk_s
        drain_s = c.persist_s if kind == "announced" else 0.0
        wall_s += up_s + drain_s + c.restart_s + restore_s
        work_s += saved_s * (1.0 - exposed_s)
    return 1.0 - work_s / wall_s


def test_waste_of_preemptions_agrees_with_a_simulation() -> None:
    """Within 1 % of time, heard or not."""
    rates = Rates(memory_per_s=1e-4, disk_per_s=1e-4, preempted_per_s=4e-4, notice_s=30.0)
    tiers = tiers_of(costs(), rates, memory_on=True)
    memory_s, disk_s = tiers.periods_s(40, 320)
    found = simulated(memory_s, disk_s, rates, events=60_000)
    assert found == pytest.approx(tiers.waste(40, 320).total, abs=0.01)
    deaf = tiers_of(costs(), replace(rates, notice_s=0.0), memory_on=True)
    unheard = replace(rates, disk_per_s=5e-4, preempted_per_s=0.0)
    found = simulated(memory_s, disk_s, unheard, events=60_000)
    assert found == pytest.approx(deaf.waste(40, 320).total, abs=0.01)
