"""The exact model of one level: its optimum is the form that is used, and the simulator agrees."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autockpt.policies.cost_model.renewal import exact_goodput, overlap_period_s, overlap_time
from autockpt.policies.cost_model.waste import waste
from autockpt.policies.interval.closed_forms import best_period_s, first_order_period_s
from autockpt.tuner.simulation.engine import replay
from autockpt.tuner.simulation.history import World, draw
from autockpt.tuner.simulation.strategy import Level, Periodic, Strategy
from autockpt.values.decision_inputs import TierCost
from autockpt.values.errors import ConfigError
from tests.unit.policies.interval.test_closed_forms import minimiser

ratios = st.floats(min_value=1e-5, max_value=1.0)
times = st.floats(min_value=0.0, max_value=3.0)


@settings(deadline=None)
@given(ratios, times, times)
def test_neither_latency_nor_recovery_moves_the_exact_optimum(ratio, latency, recover):
    """The numeric maximiser is the Lambert form within 0.1 %, for delta / M from 1e-5 to 1."""

    def loss(work: float) -> float:
        return -exact_goodput(
            work + ratio, cost_s=ratio, latency_s=ratio + latency, recover_s=recover, mtbf_s=1.0
        )

    found = ratio + minimiser(loss, 1e-4, 3.0)
    assert best_period_s(ratio, 1.0) == pytest.approx(found, rel=1e-3)


@settings(max_examples=60, deadline=None)
@given(
    st.floats(min_value=1e-5, max_value=0.999),
    st.floats(min_value=0.0, max_value=0.9),
    st.floats(min_value=0.0, max_value=0.5),
)
def test_overlap_form_is_the_numeric_minimiser_within_a_thousandth(exposed, work_rate, recover):
    """Over (1 - w) C / M from 1e-5 up to where a failure leaves nothing of the MTBF."""
    checkpoint = exposed / (1.0 - work_rate)
    left = 1.0 - recover - work_rate * checkpoint
    found_s = math.sqrt(2.0 * exposed * left) if left > 0 else 0.0
    if left <= 1e-3 or found_s < checkpoint or exposed > 1.9 * left:
        return
    arguments = {"work_rate": work_rate, "recover_s": recover, "mtbf_s": 1.0}
    found = minimiser(
        lambda t: overlap_time(t, checkpoint, **arguments),
        exposed * (1 + 1e-9),
        2 * left * (1 - 1e-9),
    )
    assert overlap_period_s(checkpoint, **arguments) == pytest.approx(found, rel=1e-3)


def test_overlap_is_the_practical_form_for_rare_failures():
    """(1 - w) C is stall and slow-down: both forms meet where M is long."""
    overlap_s = overlap_period_s(60.0, work_rate=0.9, recover_s=300.0, mtbf_s=1e8)
    assert overlap_s == pytest.approx(first_order_period_s(0.1 * 60.0, 1e-8), rel=1e-4)


def test_one_checkpoint_at_a_time_bounds_the_overlap():
    """A copy that costs nothing is taken back to back, never faster."""
    assert overlap_period_s(60.0, work_rate=1.0, recover_s=0.0, mtbf_s=1e6) == 60.0
    assert overlap_time(60.0, 60.0, work_rate=0.0, recover_s=0.0, mtbf_s=1e6) == math.inf


def level(cost_s: float, latency_s: float, recover_s: float) -> Level:
    """Half of the cost is stall, half slow-down."""
    return Level(
        place="disk",
        every=1,
        stall_s=cost_s / 2,
        slowdown_s=cost_s / 2,
        latency_s=latency_s,
        restart_s=recover_s / 2,
        restore_s=recover_s / 2,
    )


@pytest.mark.parametrize("mtbf_s", [300.0, 1500.0, 20000.0])
@pytest.mark.parametrize("cost_s", [0.5, 20.0])
@pytest.mark.parametrize("stretch", [0.4, 1.0, 2.5])
def test_simulator_is_the_exact_form_at_any_waste(mtbf_s, cost_s, stretch):
    """Within 0.5 % of time for one level, at wastes from 2 % to 70 %."""
    steps = max(1, round((stretch * best_period_s(cost_s, 1 / mtbf_s) - cost_s) / 0.5))
    period_s, latency_s = steps * 0.5 + cost_s, cost_s + 12.0
    strategy = Strategy(
        name="one",
        iteration_s=0.5,
        calendar=Periodic(steps=steps),
        levels=(level(cost_s, latency_s, recover_s=40.0),),
    )
    world = World(nodes=4, mtbf_s=mtbf_s, process_share=0.0)
    found = replay(strategy, draw(world, length_s=20000 * mtbf_s, seed=11))
    expected = exact_goodput(
        period_s, cost_s=cost_s, latency_s=latency_s, recover_s=40.0, mtbf_s=mtbf_s
    )
    assert found.goodput == pytest.approx(expected, abs=0.005)


@settings(deadline=None)
@given(
    st.floats(min_value=1e-5, max_value=0.01),
    st.floats(min_value=0.0, max_value=1.5),
    st.floats(min_value=0.3, max_value=3.0),
)
def test_the_waste_rate_is_within_one_percent_of_time_of_the_exact_form(ratio, extra, stretch):
    """Up to 80 % lost, for checkpoints that cost at most 1 % of the MTBF."""
    period = best_period_s(ratio, 1.0) * stretch
    if period <= ratio:
        return
    tier = TierCost(
        stall_s=ratio,
        slowdown_s=0.0,
        latency_s=ratio,
        restart_s=extra,
        restore_s=0.0,
        failures_per_s=1.0,
    )
    first = waste(memory=None, disk=tier, memory_period_s=math.nan, disk_period_s=period).total
    if first > 0.8:
        return
    exact = exact_goodput(period, cost_s=ratio, latency_s=ratio, recover_s=extra, mtbf_s=1.0)
    assert 1.0 - exact == pytest.approx(first, abs=0.01)


def test_a_period_beyond_reason_brings_nothing():
    """No overflow where no checkpoint is ever reached."""
    assert exact_goodput(1e6, cost_s=1.0, latency_s=1.0, recover_s=0.0, mtbf_s=1.0) == 0.0


def test_impossible_inputs_are_refused():
    """A period shorter than its checkpoint; a recovery that takes the whole MTBF."""
    with pytest.raises(ConfigError, match="cost < period"):
        exact_goodput(1.0, cost_s=2.0, latency_s=2.0, recover_s=0.0, mtbf_s=9.0)
    with pytest.raises(ConfigError, match="no interval gets the job on"):
        overlap_period_s(60.0, work_rate=0.5, recover_s=100.0, mtbf_s=130.0)
    with pytest.raises(ConfigError, match="between 0 and 1"):
        overlap_period_s(60.0, work_rate=1.5, recover_s=0.0, mtbf_s=1000.0)
