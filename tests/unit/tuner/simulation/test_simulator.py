"""Formula against simulation inside the stated envelope, and the simulator's own accounts."""

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autockpt.policies.cost_model.waste import ENVELOPE
from autockpt.policies.interval.choose import Rates, choose_intervals, tiers_of
from autockpt.tuner.simulation.compare import compare, predicted_waste
from autockpt.tuner.simulation.engine import replay
from autockpt.tuner.simulation.history import Failure, History, World, draw
from autockpt.tuner.simulation.outcome import Outcome
from autockpt.tuner.simulation.rules import neighbours, two_tiers
from autockpt.tuner.simulation.strategy import Climbing, Level, Periodic, Strategy
from autockpt.values.errors import ConfigError
from autockpt.values.goal import Goal
from tests.unit.policies.interval.test_choose import costs


def tiers(mtbf_s: float, share: float, *, memory_on: bool = True, **changes: float):
    rates = Rates(memory_per_s=share / mtbf_s, disk_per_s=(1 - share) / mtbf_s)
    return rates, tiers_of(costs(**changes), rates, memory_on=memory_on)


def simulate(both, *, memory_steps: int, disk_steps: int, failures: int, seed: int) -> Outcome:
    """About that many failures at the rates of the tiers."""
    memory = both.memory.failures_per_s if both.memory is not None else 0.0
    rate = memory + both.disk.failures_per_s
    world = World(nodes=8, mtbf_s=1.0 / rate, process_share=memory / rate)
    history = draw(world, length_s=failures / rate, seed=seed)
    return replay(two_tiers("it", both, memory_steps, disk_steps), history)


# --- against the closed form ------------------------------------------------------------------


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
    found = simulate(both, memory_steps=memory, disk_steps=disk, failures=6000, seed=1)
    assert found.waste == pytest.approx(expected, abs=0.01)


def test_disk_alone_agrees_too():
    """The memory tier off."""
    _, one = tiers(3000.0, 0.5, memory_on=False)
    found = simulate(one, memory_steps=0, disk_steps=250, failures=6000, seed=2)
    assert found.waste == pytest.approx(one.waste(0, 250).total, abs=0.01)
    assert set(found.recoveries) == {"disk", "start"}


def test_three_levels_agree_as_well():
    """Memory, peer and disk, with bursts that take both nodes of a pair."""
    history = draw(
        World(nodes=64, mtbf_s=4000.0, process_share=0.4, domain_nodes=4, burst_share=0.3),
        length_s=4e7,
        seed=3,
    )
    one = three_levels(every=50)
    assert predicted_waste(one, [history]) < ENVELOPE
    assert replay(one, history).waste == pytest.approx(predicted_waste(one, [history]), abs=0.01)


def test_formula_finds_the_best_interval_of_the_simulation():
    """Of a scan of periods with common random numbers, the formula's is within 3 % of the best."""
    rates, one = tiers(3000.0, 0.5, memory_on=False)
    best = choose_intervals(costs(), rates, Goal(), memory_on=False, slots=1, sync=False)
    scan = {
        steps: simulate(one, memory_steps=0, disk_steps=steps, failures=12000, seed=3).waste
        for steps in (best.disk_steps, *(round(best.disk_steps * f) for f in (0.4, 0.7, 1.4, 2.5)))
    }
    assert scan[best.disk_steps] <= min(scan.values()) * 1.03


def test_memory_tier_pays_in_the_simulation():
    """With most failures served from memory the same disk interval wastes less."""
    _, both = tiers(900.0, 0.8)
    _, alone = tiers(900.0, 0.8, memory_on=False)
    with_memory = simulate(both, memory_steps=20, disk_steps=200, failures=5000, seed=5)
    without = simulate(alone, memory_steps=0, disk_steps=200, failures=5000, seed=5)
    assert with_memory.waste < without.waste


# --- against a simulator that walks -----------------------------------------------------------


def level(place, every: int, **changes: float) -> Level:
    values = {"stall_s": 0.4, "slowdown_s": 0.3, "latency_s": 2.2, "restart_s": 9.0}
    return Level(place=place, every=every, **{**values, "restore_s": 3.1, **changes})


def three_levels(every: int = 6, *, steps: int = 5, latency_s: float = 17.0) -> Strategy:
    return Strategy(
        name="three",
        iteration_s=1.0,
        calendar=Periodic(steps=steps),
        levels=(
            level("memory", 1, stall_s=0.05, slowdown_s=0.0),
            level("peer", 1, stall_s=0.0, slowdown_s=0.1, latency_s=3.3, restore_s=4.7),
            level("disk", every, latency_s=latency_s, restore_s=8.0),
        ),
        placement=neighbours(64),
    )


def walked(strategy: Strategy, history: History) -> tuple[float, int]:
    """Work that counts and recoveries: iteration by iteration, with no formula of the engine's.

    Knows no failure during recovery: the histories below have none.
    """
    now_s, done, saved, recoveries = 0.0, 0, [], 0
    last = [failure.at_s for failure in history.failures] + [history.length_s]
    for i, stop_s in enumerate(last):
        resumed, taken_s = done, 0.0
        while now_s + taken_s + strategy.iteration_s <= stop_s:
            now_s, taken_s = now_s + taken_s + strategy.iteration_s, 0.0
            done += 1
            if done % strategy.calendar.steps == 0 and done > resumed:
                number = done // strategy.calendar.steps
                for one in strategy.levels:
                    if number % one.every == 0:
                        saved.append((now_s + one.latency_s, done, one))
                        taken_s += one.exposed_s
        if i == len(history.failures):
            partial_s = max(0.0, stop_s - now_s - taken_s)
            return done * strategy.iteration_s + partial_s, recoveries
        alive = strategy.serves(history.failures[i].nodes)
        ready = [entry for entry in saved if entry[2] in alive and entry[0] <= stop_s]
        best = max((step for _, step, _ in ready), default=0)
        source = next((one for one in alive if any(e[1:] == (best, one) for e in ready)), None)
        finished = source is not None and source.place != "disk"
        saved = [
            entry
            for entry in saved
            if entry in ready or (finished and entry[2] in alive and entry[1] <= best)
        ]
        saved = [(0.0, step, one) for _, step, one in saved]
        back = source or strategy.levels[-1]
        now_s = stop_s + back.restart_s + (back.restore_s if source is not None else 0.0)
        done, recoveries = best, recoveries + 1
    raise AssertionError


@settings(max_examples=150, deadline=None)
@given(
    gaps=st.lists(st.floats(min_value=25.0, max_value=300.0), min_size=1, max_size=8),
    hits=st.lists(st.sampled_from([(), (0,), (3,), (0, 1), (2, 5)]), min_size=8, max_size=8),
    every=st.integers(min_value=1, max_value=7),
    steps=st.integers(min_value=1, max_value=9),
    latency_s=st.floats(min_value=0.5, max_value=40.0),
)
def test_jumping_from_failure_to_failure_is_walking_every_iteration(
    gaps, hits, every, steps, latency_s
):
    """The work that counts is the same to the last digits, whatever fails when."""
    # Random digits keep a failure from falling on the very instant in which something is ready.
    at_s, failures = 0.0, []
    for gap_s, nodes in zip(gaps, hits, strict=False):
        at_s += gap_s + 0.0123456789
        failures.append(Failure(at_s=at_s, nodes=nodes))
    history = History(length_s=at_s + 77.7071, nodes=8, failures=tuple(failures))
    strategy = three_levels(every, steps=steps, latency_s=latency_s + 0.00987)
    found = replay(strategy, history)
    work_s, recoveries = walked(strategy, history)
    assert found.productive_s == pytest.approx(work_s, abs=1e-6)
    assert sum(found.recoveries.values()) == recoveries


# --- accounts ---------------------------------------------------------------------------------


def accounted(found: Outcome) -> float:
    """All parts of the wall time."""
    parts = found.productive_s + found.stall_s + found.slowdown_s + found.lost_s
    return parts + found.restart_s + found.restore_s + found.waiting_s


@settings(max_examples=60, deadline=None)
@given(
    mtbf_s=st.floats(min_value=15.0, max_value=3000.0),
    share=st.floats(min_value=0.0, max_value=1.0),
    burst=st.floats(min_value=0.0, max_value=1.0),
    every=st.integers(min_value=1, max_value=9),
    seed=st.integers(min_value=0, max_value=999),
)
def test_the_parts_sum_up_to_the_wall_time(mtbf_s, share, burst, every, seed):
    """Failures during recovery and jobs that get nowhere included."""
    world = World(nodes=16, mtbf_s=mtbf_s, process_share=share, domain_nodes=4, burst_share=burst)
    history = draw(world, length_s=4000.0, seed=seed)
    climbing = Strategy(
        name="climb",
        iteration_s=1.0,
        calendar=Climbing(start=2, end=30),
        levels=(level("disk", 1),),
    )
    for strategy in (three_levels(every), climbing):
        found = replay(strategy, history)
        assert accounted(found) == pytest.approx(found.wall_s, rel=1e-9)
        assert 0.0 <= found.productive_s <= found.wall_s
        ends = sum(found.recoveries.values()) + found.repeated
        assert ends == len(history.failures)


def test_a_seed_repeats_and_another_does_not():
    """Determinism, to the bit."""
    _, both = tiers(900.0, 0.6)
    first = simulate(both, memory_steps=10, disk_steps=100, failures=500, seed=7)
    assert first == simulate(both, memory_steps=10, disk_steps=100, failures=500, seed=7)
    assert first != simulate(both, memory_steps=10, disk_steps=100, failures=500, seed=8)


def test_the_interval_of_the_released_checkfreq_only_grows():
    """2, 4, 6 iterations and so on up to 10; after a failure it goes on where it was."""
    calendar = Climbing(start=2, end=10)
    assert [calendar.step(0, 0, j) for j in range(8)] == [0, 2, 6, 12, 20, 30, 40, 50]
    assert [calendar.step(12, 3, j) for j in range(4)] == [12, 20, 30, 40]
    for taken in (0, 3, 9):
        for j in range(12):
            steps = calendar.step(0, taken, j)
            assert calendar.guess(taken, steps) <= j + 1
            assert calendar.guess(taken, steps) + 2 > j


def test_without_failures_only_checkpoints_are_paid():
    """Nothing is lost and nothing restarts."""
    history = History(length_s=1000.0, nodes=8, failures=())
    found = replay(three_levels(), history)
    assert found.lost_s == found.restart_s == found.restore_s == 0.0
    assert found.google > found.goodput > 0.9
    assert found.available == 1.0


def test_a_job_that_never_saves_begins_again():
    """Every failure before the first checkpoint costs everything."""
    history = History(length_s=100.0, nodes=8, failures=(Failure(at_s=50.0),))
    found = replay(three_levels(steps=1000), history)
    assert found.recoveries["start"] == 1
    assert found.lost_s == 50.0


def test_all_of_this_is_fast():
    """2,048 nodes over 54 days with 420 failures: ten runs well within five seconds."""
    began = time.process_time()
    world = World(nodes=2048, mtbf_s=11100.0, process_share=0.35, burst_share=0.1)
    histories = [draw(world, length_s=54 * 86400.0, seed=0, run=run) for run in range(10)]
    strategy = three_levels(every=2000, steps=1)
    compare([strategy, strategy], histories)
    assert time.process_time() - began < 5.0


def test_impossible_questions_are_refused():
    """Not nested, nothing to compare."""
    _, both = tiers(900.0, 0.6)
    with pytest.raises(ConfigError, match="no multiple"):
        two_tiers("it", both, 7, 50)
    with pytest.raises(ConfigError, match="no strategy"):
        compare([], [])
    with pytest.raises(ConfigError, match="at least 1"):
        Periodic(steps=0)
    with pytest.raises(ConfigError, match="a climb"):
        Climbing(start=4, end=2)
