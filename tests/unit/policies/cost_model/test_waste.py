"""The waste function, its accounting identity, and the Gamma band."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autockpt.policies.cost_model.gamma import gamma_cdf, gamma_quantile
from autockpt.policies.cost_model.waste import gain, step_periods_s, waste
from autockpt.values.decision_inputs import TierCost
from autockpt.values.errors import ConfigError

small = st.floats(min_value=0.0, max_value=10.0)


def tier(**changes: float) -> TierCost:
    """One checkpoint with round numbers."""
    values = {
        "stall_s": 1.0,
        "slowdown_s": 0.5,
        "latency_s": 4.0,
        "restart_s": 20.0,
        "restore_s": 5.0,
        "failures_per_s": 1e-4,
    }
    return TierCost(**{**values, **changes})


def test_waste_of_a_worked_example():
    """Memory every 100 s, disk every 1000 s; computed by hand from the formula."""
    parts = waste(
        memory=tier(),
        disk=tier(stall_s=0.0, latency_s=30.0, failures_per_s=2e-5),
        memory_period_s=100.0,
        disk_period_s=1000.0,
    )
    assert parts.stall == pytest.approx(1 / 100)
    assert parts.slowdown == pytest.approx(0.5 / 100 + 0.5 / 1000)
    assert parts.lost_memory == pytest.approx(1e-4 * (50 + 4))
    assert parts.lost_disk == pytest.approx(2e-5 * (500 + 30))
    assert parts.restart == pytest.approx(1.2e-4 * 20)
    assert parts.restore == pytest.approx(1.2e-4 * 5)
    checkpoint, failure = 0.01 + 0.005 + 0.0005, 0.0054 + 0.0106 + 0.0024 + 0.0006
    assert parts.total == pytest.approx(1 - (1 - checkpoint) * math.exp(-failure))


@given(small, small, small, st.floats(min_value=1.0, max_value=1e5), st.floats(0.0, 10.0))
def test_the_loss_is_a_fraction_and_what_is_left_is_productive(
    stall_s, slowdown_s, latency_s, period_s, rate_per_s
):
    """For any costs and rates; the sum of the parts where both are small, and never more."""
    one = tier(
        stall_s=stall_s, slowdown_s=slowdown_s, latency_s=latency_s, failures_per_s=rate_per_s
    )
    parts = waste(memory=one, disk=one, memory_period_s=period_s, disk_period_s=period_s)
    assert 0.0 <= parts.total <= 1.0
    assert parts.productive + parts.total == pytest.approx(1.0, abs=1e-12)
    lost = parts.stall + parts.slowdown + parts.lost_memory + parts.lost_disk
    lost += parts.restart + parts.restore
    assert parts.total <= lost * (1 + 1e-12) + 1e-12
    if lost <= 1.0:
        assert lost - lost**2 - 1e-12 <= parts.total


def test_without_memory_tier_disk_carries_everything():
    """No memory term appears."""
    parts = waste(memory=None, disk=tier(), memory_period_s=math.nan, disk_period_s=100.0)
    assert parts.lost_memory == 0.0
    lost = 1e-4 * (50 + 4 + 25)
    assert parts.total == pytest.approx(1 - (1 - 1.5 / 100) * math.exp(-lost))


def test_periods_include_the_checkpoints_themselves():
    """10 iterations of 2 s, two snapshots of 1.5 s and one persist of 0.5 s."""
    memory_s, disk_s = step_periods_s(
        memory=tier(), disk=tier(stall_s=0.0), iteration_s=2.0, memory_steps=5, disk_steps=10
    )
    assert disk_s == pytest.approx(20 + 2 * 1.5 + 0.5)
    assert memory_s == pytest.approx(disk_s / 2)


@pytest.mark.parametrize(
    ("probability", "shape", "expected"),
    [
        (0.95, 1.0, -math.log(0.05)),
        (0.05, 1.0, -math.log(0.95)),
        (0.5, 10.0, 9.668714614714128),
        (0.05, 10.0, 5.425405697091293),
        (0.95, 10.0, 15.705216422115653),
        (0.05, 0.5, 0.0019660700),
    ],
)
def test_gamma_quantiles_match_tables(probability, shape, expected):
    """Exponential quantiles in closed form, the rest from chi-square tables."""
    assert gamma_quantile(probability, shape, 1.0) == pytest.approx(expected, rel=1e-6)


@given(st.floats(min_value=0.01, max_value=0.99), st.floats(min_value=0.2, max_value=500.0))
def test_quantile_inverts_the_distribution(probability, shape):
    """P(X <= quantile(p)) = p."""
    assert gamma_cdf(shape, gamma_quantile(probability, shape, 1.0)) == pytest.approx(
        probability, abs=1e-9
    )


def test_impossible_quantile_is_refused():
    """Probability 0 has no quantile."""
    with pytest.raises(ConfigError, match="quantile"):
        gamma_quantile(0.0, 1.0, 1.0)


@given(small, small, st.floats(min_value=20.0, max_value=1e4), st.floats(1e-6, 10.0))
def test_the_gain_is_what_more_is_trained(stall_s, latency_s, period_s, rate_per_s):
    """Of the productive time; 0 between equals; told apart also where both lose nearly all."""
    one = tier(stall_s=stall_s, latency_s=latency_s, failures_per_s=rate_per_s)
    now, then = (
        waste(memory=None, disk=one, memory_period_s=every, disk_period_s=every)
        for every in (2.0 * period_s, period_s)
    )
    assert gain(now, now) == 0.0
    shorter_s = now.lost_disk - then.lost_disk
    kept = (1.0 - now.checkpoint) / (1.0 - then.checkpoint) * math.exp(-shorter_s)
    assert gain(now, then) == pytest.approx(1.0 - kept, rel=1e-6, abs=1e-9)
    if then.total < 0.99:
        assert gain(now, then) == pytest.approx(
            (now.total - then.total) / then.productive, abs=1e-9
        )


def test_training_that_only_checkpoints_gains_everything_and_nothing():
    """Checkpoints take all time of one, or of both."""
    never, some = (
        waste(memory=None, disk=tier(stall_s=s), memory_period_s=10.0, disk_period_s=10.0)
        for s in (20.0, 1.0)
    )
    assert (gain(never, some), gain(some, never), gain(never, never)) == (1.0, -1.0, 0.0)
