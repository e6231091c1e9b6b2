"""Formula against simulation inside the stated envelope, and the simulator's own accounts."""

import pytest

from autockpt.policies.frequency import Rates, choose_intervals, tiers_of
from autockpt.policies.waste import ENVELOPE
from autockpt.tuner.simulator import simulate
from autockpt.values.errors import ConfigError
from autockpt.values.goal import Goal
from tests.policies.test_frequency import costs


def tiers(mtbf_s: float, share: float, *, memory_on: bool = True, **changes: float):
    rates = Rates(memory_per_s=share / mtbf_s, disk_per_s=(1 - share) / mtbf_s)
    return rates, tiers_of(costs(**changes), rates, memory_on=memory_on)


@pytest.mark.parametrize("mtbf_s", [600.0, 2000.0, 20000.0])
@pytest.mark.parametrize("share", [0.1, 0.5, 0.9])
@pytest.mark.parametrize("stretch", [0.5, 1.0, 3.0])
def test_formula_is_within_one_percent_of_time(mtbf_s, share, stretch):
    """Three MTBFs, three mixes, half to three times the best intervals."""
    rates, both = tiers(mtbf_s, share)
    best = choose_intervals(costs(), rates, Goal(), memory_on=True, slots=3, sync=False)
    memory = max(1, round(best.memory_steps * stretch))
    disk = memory * max(1, best.disk_steps // best.memory_steps)
    expected = both.waste(memory, disk).total
    if expected > ENVELOPE:
        return
    found = simulate(both, memory_steps=memory, disk_steps=disk, failures=20000, seed=1)
    assert found.waste == pytest.approx(expected, abs=0.01)


def test_disk_alone_agrees_too():
    """The memory tier off."""
    _, one = tiers(3000.0, 0.5, memory_on=False)
    found = simulate(one, memory_steps=0, disk_steps=250, failures=20000, seed=2)
    assert found.waste == pytest.approx(one.waste(0, 250).total, abs=0.01)
    assert found.failures_memory == 0


def test_formula_finds_the_best_interval_of_the_simulation():
    """Of a scan of periods with common random numbers, the formula's is within 3 % of the best."""
    rates, one = tiers(3000.0, 0.5, memory_on=False)
    best = choose_intervals(costs(), rates, Goal(), memory_on=False, slots=1, sync=False)
    scan = {
        steps: simulate(one, memory_steps=0, disk_steps=steps, failures=30000, seed=3).waste
        for steps in (best.disk_steps, *(round(best.disk_steps * f) for f in (0.4, 0.7, 1.4, 2.5)))
    }
    assert scan[best.disk_steps] <= min(scan.values()) * 1.03


def test_parts_sum_to_wall_time_and_seeds_repeat():
    """Accounting identity and determinism."""
    _, both = tiers(900.0, 0.6)
    first = simulate(both, memory_steps=10, disk_steps=100, failures=500, seed=7)
    parts = first.productive_s + first.stall_s + first.slowdown_s + first.lost_s
    assert parts + first.restart_s + first.restore_s == pytest.approx(first.wall_s, rel=1e-12)
    assert first == simulate(both, memory_steps=10, disk_steps=100, failures=500, seed=7)
    assert first != simulate(both, memory_steps=10, disk_steps=100, failures=500, seed=8)


def test_memory_tier_pays_in_the_simulation():
    """With most failures served from memory the same disk interval wastes less."""
    _, both = tiers(900.0, 0.8)
    _, alone = tiers(900.0, 0.8, memory_on=False)
    with_memory = simulate(both, memory_steps=20, disk_steps=200, failures=5000, seed=5)
    without = simulate(alone, memory_steps=0, disk_steps=200, failures=5000, seed=5)
    assert with_memory.waste < without.waste


def test_impossible_questions_are_refused():
    """Not nested, or nothing ever fails."""
    _, both = tiers(900.0, 0.6)
    with pytest.raises(ConfigError, match="no multiple"):
        simulate(both, memory_steps=7, disk_steps=50, failures=10, seed=0)
    never = tiers_of(costs(), Rates(memory_per_s=0.0, disk_per_s=0.0), memory_on=True)
    with pytest.raises(ConfigError, match="without failures"):
        simulate(never, memory_steps=5, disk_steps=50, failures=10, seed=0)
