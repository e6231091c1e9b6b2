"""Whole, nested intervals: optimal among all pairs, inside every bound, monotone in the MTBF."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autockpt.policies.cost_model.costs import Costs
from autockpt.policies.interval.choose import Rates, bounds_of, choose_intervals, divisors, tiers_of
from autockpt.values.errors import ConfigError
from autockpt.values.goal import Goal, Limits, Pins


def costs(**changes: float) -> Costs:
    """A snapshot of 0.2 s and a persist of 2 s on a 0.5 s iteration."""
    values = {
        "iteration_s": 0.5,
        "stall_s": 0.1,
        "stall_high_s": 0.12,
        "copy_s": 0.3,
        "copy_high_s": 0.3,
        "persist_s": 4.0,
        "persist_high_s": 5.0,
        "copy_slowdown_s": 0.1,
        "persist_slowdown_s": 2.0,
        "restart_s": 30.0,
        "restore_memory_s": 1.0,
        "restore_disk_s": 5.0,
    }
    return Costs(**{**values, **changes})


def rates(mtbf_s: float = 7200.0, share: float = 0.6) -> Rates:
    return Rates(memory_per_s=share / mtbf_s, disk_per_s=(1 - share) / mtbf_s)


def choose(c: Costs | None = None, r: Rates | None = None, goal: Goal | None = None, **more):
    options = {"memory_on": True, "slots": 3, "sync": False, **more}
    return choose_intervals(c or costs(), r or rates(), goal or Goal(), **options)


@settings(max_examples=12, deadline=None)
@given(
    st.floats(min_value=0.05, max_value=1.0),
    st.floats(min_value=0.1, max_value=20.0),
    st.floats(min_value=0.1, max_value=0.9),
    st.floats(min_value=0.005, max_value=0.05),
)
def test_under_a_budget_the_pair_is_within_three_percent_of_the_best_allowed(
    stall_s, persist_cost_s, share, budget
):
    """Failures every 10 minutes ask for more than the budget: against every allowed pair."""
    c = costs(stall_s=stall_s, persist_slowdown_s=persist_cost_s, copy_slowdown_s=0.0)
    tiers = tiers_of(c, rates(600.0, share), memory_on=True)
    goal = Goal(limits=Limits(overhead=budget))
    found = choose(c, rates(600.0, share), goal)
    pairs = ((k, k * n) for k in range(1, 401) for n in range(1, 61) if k * n >= 10)
    allowed = (p for p in pairs if tiers.waste(*p).checkpoint <= budget)
    best = min((tiers.tunable(*pair) for pair in allowed), default=None)
    if best is None or found.memory_steps > 400 or found.disk_steps > 60 * found.memory_steps:
        return
    assert found.waste.checkpoint <= budget * (1 + 1e-9)
    assert tiers.tunable(found.memory_steps, found.disk_steps) <= best * 1.03


@settings(max_examples=60, deadline=None)
@given(
    st.floats(min_value=0.01, max_value=1.0),
    st.floats(min_value=0.01, max_value=20.0),
    st.floats(min_value=0.05, max_value=0.95),
    st.floats(min_value=300.0, max_value=20000.0),
)
def test_chosen_pair_is_within_two_percent_of_the_best_pair(stall_s, persist_cost_s, share, mtbf_s):
    """Against every nested pair up to 400 snapshots steps and a ratio of 60."""
    c = costs(stall_s=stall_s, persist_slowdown_s=persist_cost_s, copy_slowdown_s=0.0)
    tiers = tiers_of(c, rates(mtbf_s, share), memory_on=True)
    found = choose(c, rates(mtbf_s, share))
    least = 10  # persist_high_s / iteration_s
    best = min(
        tiers.tunable(k, k * n) for k in range(1, 401) for n in range(1, 61) if k * n >= least
    )
    if found.memory_steps > 400 or found.disk_steps > 60 * found.memory_steps:
        return
    assert tiers.tunable(found.memory_steps, found.disk_steps) <= best * 1.02


@settings(deadline=None)
@given(st.floats(min_value=60.0, max_value=1e7), st.floats(min_value=1.0, max_value=50.0))
def test_higher_mtbf_never_shortens_the_disk_interval_alone(mtbf_s, factor):
    """One tier: strictly monotone, rounding included."""
    before = choose(r=rates(mtbf_s), memory_on=False).disk_steps
    assert choose(r=rates(mtbf_s * factor), memory_on=False).disk_steps >= before


@settings(deadline=None)
@given(
    st.floats(min_value=60.0, max_value=1e7),
    st.floats(min_value=1.0, max_value=50.0),
    st.floats(min_value=0.05, max_value=0.95),
)
def test_higher_mtbf_shortens_no_nested_interval_beyond_its_rounding(mtbf_s, factor, share):
    """Two tiers: the disk interval is a multiple, so it may give back one memory interval."""
    before = choose(r=rates(mtbf_s, share))
    after = choose(r=rates(mtbf_s * factor, share))
    assert after.memory_steps >= before.memory_steps - 1
    assert after.disk_steps >= before.disk_steps - after.memory_steps


@settings(deadline=None)
@given(
    st.floats(min_value=100.0, max_value=1e6),
    st.floats(min_value=0.002, max_value=0.2),
    st.sampled_from(["goodput", "stall", "durability"]),
)
def test_every_limit_is_kept(mtbf_s, overhead, objective):
    """Overhead budget, lost time, persist latency and nesting at once, for every objective."""
    goal = Goal(objective=objective, limits=Limits(overhead=overhead, lost_time_s=3600.0))
    found = choose(r=rates(mtbf_s), goal=goal)
    assert found.disk_steps % found.memory_steps == 0
    assert found.waste.checkpoint <= overhead * (1 + 1e-9)
    assert found.disk_period_s + 4.0 <= 3600.0 + 1e-6
    assert found.disk_period_s >= 5.0


def test_disk_is_never_faster_than_one_persist():
    """With failures every 5 s the time until durable decides."""
    found = choose(costs(persist_high_s=60.0), rates(5.0, 0.0), memory_on=False)
    assert found.disk_period_s >= 60.0
    assert found.binding == "time until durable (one in flight)"


@pytest.mark.parametrize("in_flight", [1, 2, 4])
def test_several_in_flight_shorten_the_bound_by_their_number(in_flight):
    """PCcheck: N checkpoints under way may come N times as often as one is durable."""
    goal = Goal(pins=Pins(in_flight=in_flight))
    found = choose(costs(persist_high_s=60.0), rates(5.0, 0.0), goal=goal, memory_on=False)
    assert 60.0 / in_flight <= found.disk_period_s <= 60.0 / in_flight + 1.0
    said = "one" if in_flight == 1 else in_flight
    assert found.binding == f"time until durable ({said} in flight)"


def test_two_slots_hold_snapshots_back_to_the_persist():
    """Without a third image a snapshot waits for the disk."""
    assert choose(slots=2, r=rates(10.0)).memory_period_s >= 5.0


def test_free_copies_are_taken_every_iteration():
    """No cost: the clamp is the optimum, Gemini's regime."""
    free = costs(stall_s=0.0, copy_slowdown_s=0.0, copy_s=0.0, copy_high_s=0.0)
    assert choose(free).memory_steps == 1


def test_memory_that_serves_nothing_shares_the_disk_interval():
    """Process share 0: the levels are pooled."""
    found = choose(r=rates(7200.0, 0.0))
    assert found.memory_steps == found.disk_steps


def test_ties_go_to_the_longer_interval():
    """Among candidates within a thousandth of the tunable waste the longest is taken."""
    tiers = tiers_of(costs(), rates(1e6), memory_on=False)
    found = choose(r=rates(1e6), memory_on=False)
    longer = tiers.tunable(0, found.disk_steps + 1)
    assert longer >= tiers.tunable(0, found.disk_steps)


def test_objectives_spend_ten_percent_on_longer_or_shorter_intervals():
    """stall > goodput > durability, each within 12 % of the optimum's tunable waste."""
    tiers = tiers_of(costs(), rates(), memory_on=True)
    found = {name: choose(goal=Goal(objective=name)) for name in ("stall", "goodput", "durability")}
    disk = {name: value.disk_steps for name, value in found.items()}
    assert disk["stall"] > disk["goodput"] > disk["durability"]
    wastes = {n: tiers.tunable(f.memory_steps, f.disk_steps) for n, f in found.items()}
    assert max(wastes.values()) <= wastes["goodput"] * 1.12


def test_pins_are_respected_and_the_free_tier_follows():
    """Disk 500 steps pinned: memory takes a divisor; memory 7 pinned: disk takes a multiple."""
    found = choose(goal=Goal(pins=Pins(disk_interval_steps=500)))
    assert found.disk_steps == 500
    assert found.memory_steps in divisors(500)
    found = choose(goal=Goal(pins=Pins(memory_interval_steps=7)))
    assert found.memory_steps == 7
    assert found.disk_steps % 7 == 0
    assert found.binding == "memory.interval"


@pytest.mark.parametrize("steps", [1783, 1800, 2 * 997, 9001])
def test_a_disk_interval_in_seconds_leaves_memory_its_best_interval(steps: int) -> None:
    """Also where these seconds are a prime number of iterations: 1 % more or less is the same."""
    found = choose(goal=Goal(pins=Pins(disk_interval_s=0.5 * steps)))
    assert abs(found.disk_steps / steps - 1.0) <= 0.01
    assert found.disk_steps % found.memory_steps == 0
    tiers = tiers_of(costs(), rates(), memory_on=True)
    best = min(tiers.tunable(k, steps) for k in range(1, steps + 1))
    assert tiers.tunable(found.memory_steps, found.disk_steps) <= 1.02 * best
    exact = choose(goal=Goal(pins=Pins(disk_interval_steps=steps)))
    assert exact.disk_steps == steps


def test_pins_in_seconds_become_whole_nested_steps():
    """1 min and 15 min at 0.5 s: 120 and 1800 steps."""
    found = choose(goal=Goal(pins=Pins(memory_interval_s=60.0, disk_interval_s=900.0)))
    assert (found.memory_steps, found.disk_steps) == (120, 1800)
    found = choose(goal=Goal(pins=Pins(memory_interval_s=49.0, disk_interval_steps=1000)))
    assert (found.memory_steps, found.disk_steps) == (100, 1000)


def test_checkfreq_rule_ignores_failures():
    """The same interval at any MTBF, within the budget."""
    goal = Goal(pins=Pins(interval_rule="checkfreq"), limits=Limits(overhead=0.02))
    often, rarely = choose(r=rates(100.0), goal=goal), choose(r=rates(1e6), goal=goal)
    assert often.disk_steps == rarely.disk_steps == often.memory_steps
    assert often.waste.checkpoint <= 0.02
    assert often.binding == "rule checkfreq"


@pytest.mark.parametrize(
    ("goal", "message"),
    [
        (
            Goal(limits=Limits(lost_time_s=3.0)),
            r"no interval fits: .* durable 4 s after .* nearest: limits.lost_time 10 s",
        ),
        (
            Goal(limits=Limits(lost_time_s=20.0, overhead=0.01)),
            r"limits.overhead asks for .* nearest: limits.lost_time .* or limits.overhead 14.2 %",
        ),
        (
            Goal(limits=Limits(lost_time_s=60.0), pins=Pins(disk_interval_steps=1000)),
            r"disk.interval \(.*1000 steps to disk\) may lose .* nearest: limits.lost_time .* or "
            r"disk.interval \d+ steps",
        ),
        (
            Goal(limits=Limits(overhead=0.01), pins=Pins(disk_interval_steps=20)),
            r"costs .* of training time, and limits.overhead is 1 %; nearest: limits.overhead",
        ),
        (
            Goal(pins=Pins(memory_interval_steps=7, disk_interval_steps=50)),
            r"disk.interval 50 steps is not a multiple of memory.interval 7 steps.* 49 steps",
        ),
    ],
)
def test_contradictions_name_the_limits_and_the_nearest_way_out(goal, message):
    """Refused before training, with values that can be pasted."""
    with pytest.raises(ConfigError, match=message):
        choose(goal=goal)


def test_the_named_way_out_is_one():
    """Following the advice of a refusal gives a plan."""
    goal = Goal(limits=Limits(lost_time_s=20.0, overhead=0.01))
    with pytest.raises(ConfigError, match="nearest"):
        choose(goal=goal)
    choose(goal=replace(goal, limits=Limits(lost_time_s=20.0, overhead=0.142)))


def test_exact_form_lengthens_expensive_checkpoints():
    """cost * rate > 0.01: the optimum is longer than Young's and still inside the bounds."""
    c = costs(stall_s=30.0, copy_slowdown_s=0.0, persist_slowdown_s=0.0)
    found = choose(c, rates(600.0), memory_on=False)
    young_s = (2 * 30.0 * 600.0) ** 0.5
    assert young_s < found.optimum_disk_s < 1.3 * young_s


def test_bounds_name_what_sets_them():
    """Each bound carries its reason for the explanation."""
    bounds = bounds_of(costs(), Goal(limits=Limits(lost_time_s=100.0)), slots=3, sync=False)
    assert bounds.disk_max_s == (96.0, "limits.lost_time")
    assert bounds_of(costs(), Goal(), slots=3, sync=True).disk_min_s[1] == "one iteration"
