"""The closed forms against their sources and against a numeric minimiser."""

import itertools
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autockpt.policies.cost_model.renewal import exact_goodput
from autockpt.policies.interval.closed_forms import (
    best_period_s,
    checkfreq_steps,
    daly_interval_s,
    exact_interval_s,
    first_order_period_s,
    ordered_periods_s,
    young_interval_s,
)
from autockpt.values.errors import ConfigError

costs = st.floats(min_value=1e-6, max_value=1e3)
rates = st.floats(min_value=1e-9, max_value=1e-2)


def minimiser(function, low: float, high: float) -> float:
    """Golden-section search on the logarithm: the independent check of every formula."""
    golden = (math.sqrt(5.0) - 1.0) / 2.0
    a, b = math.log(low), math.log(high)
    for _ in range(200):
        c, d = b - golden * (b - a), a + golden * (b - a)
        if function(math.exp(c)) < function(math.exp(d)):
            b = d
        else:
            a = c
    return math.exp((a + b) / 2.0)


def test_young_gives_the_textbook_example():
    """C = 60 s and M = 1 h: sqrt(2 * 60 * 3600) = 657 s."""
    assert young_interval_s(60.0, 3600.0) == pytest.approx(657.27, abs=0.01)


@pytest.mark.parametrize(
    ("cost_s", "mtbf_s", "expected_s"), [(1.0, 3600.0, 84.2), (60.0, 3600.0, 618.0), (60, 600, 230)]
)
def test_exact_form_gives_the_checked_values(cost_s, mtbf_s, expected_s):
    """Values found numerically when the form was derived."""
    assert exact_interval_s(cost_s, mtbf_s) == pytest.approx(expected_s, rel=1e-3)


@given(st.floats(min_value=1e-5, max_value=1.0))
def test_exact_form_is_the_numeric_minimiser_within_a_thousandth(ratio):
    """Of Daly's complete wall time (e^((tau + C) / M) - 1) / tau, for C / M from 1e-5 to 1."""
    found = minimiser(lambda tau: math.expm1(tau + ratio) / tau, 1e-4, 2.0)
    assert exact_interval_s(ratio, 1.0) == pytest.approx(found, rel=1e-3)


@given(st.floats(min_value=1e-5, max_value=1.0))
def test_the_period_that_is_used_is_the_numeric_minimiser_within_a_thousandth(ratio):
    """Of the wall time per unit of work, (e^(T / M) - 1) / (T - C), for C / M from 1e-5 to 1."""
    found = ratio + minimiser(lambda tau: math.expm1(tau + ratio) / tau, 1e-4, 2.0)
    assert best_period_s(ratio, 1.0) == pytest.approx(found, rel=1e-3)


@given(costs, rates)
def test_first_order_period_is_the_numeric_minimiser_within_a_thousandth(cost_s, rate):
    """Of c / T + Lambda T / 2."""
    period_s = first_order_period_s(cost_s, rate)
    found = minimiser(lambda t: cost_s / t + rate * t / 2, period_s / 50, period_s * 50)
    assert period_s == pytest.approx(found, rel=1e-3)


@given(st.floats(min_value=1e-6, max_value=0.3))
def test_daly_is_within_half_a_percent_of_exact(ratio):
    """Up to C / M = 0.3, as its source claims."""
    assert daly_interval_s(ratio, 1.0) == pytest.approx(exact_interval_s(ratio, 1.0), rel=5e-3)


def test_exact_form_holds_at_both_ends():
    """Tiny costs lose no digits, and beyond the MTBF the work per checkpoint is the MTBF."""
    assert exact_interval_s(1e-12, 1.0) == pytest.approx(young_interval_s(1e-12, 1.0), rel=1e-5)
    assert exact_interval_s(100.0, 1.0) == pytest.approx(1.0)
    assert daly_interval_s(100.0, 1.0) == 1.0
    assert exact_interval_s(0.0, 1.0) == 0.0


def test_latency_does_not_move_the_optimum():
    """Only the part that slows training counts, not the time until durable itself."""

    def best(latency_s: float, recover_s: float) -> float:
        return minimiser(
            lambda t: (
                -exact_goodput(t, cost_s=10.0, latency_s=latency_s, recover_s=recover_s, mtbf_s=1e4)
            ),
            20.0,
            5000.0,
        )

    assert best(10.0, 0.0) == pytest.approx(best_period_s(10.0, 1e-4), rel=1e-3)
    assert best(3000.0, 900.0) == pytest.approx(best(10.0, 0.0), rel=1e-6)


@given(costs, rates, st.floats(min_value=1.0, max_value=100.0))
def test_higher_mtbf_never_shortens_the_period(cost_s, rate, factor):
    """Monotone over the whole range."""
    assert best_period_s(cost_s, rate / factor) >= best_period_s(cost_s, rate) * (1 - 1e-12)


def test_a_little_more_mtbf_never_shortens_the_period():
    """In steps of a thousandth: a switch between two forms at C / M = 0.01 once cost 1 %."""
    periods = [best_period_s(1.0, 1.0 / mtbf_s) for mtbf_s in (99.0 + 0.1 * i for i in range(20))]
    assert periods == sorted(periods)


def test_without_failures_the_period_is_unbounded():
    """Nothing to protect against: the bounds decide."""
    assert best_period_s(1.0, 0.0) == math.inf


@given(st.lists(st.tuples(costs, rates), min_size=1, max_size=5))
def test_levels_are_ordered_and_no_worse_than_any_common_period(levels):
    """Pool-adjacent-violators: nondecreasing, and at least as good as one period for all."""
    cost, rate = zip(*levels, strict=True)
    periods = ordered_periods_s(cost, rate)
    assert all(b >= a * (1 - 1e-12) for a, b in itertools.pairwise(periods))
    if sum(cost) * sum(rate) > 1e-3:
        return
    waste = sum(c / t + r * t / 2 for c, r, t in zip(cost, rate, periods, strict=True))
    # The periods minimise the wall time itself; of this first-order sum they miss 3e-5.
    assert waste <= 2 * math.sqrt(sum(cost) * sum(rate) / 2) * (1 + 1e-4)


def test_violating_levels_share_the_pooled_period():
    """Memory that fails rarely beside disk that fails often: one period for both."""
    memory_s, disk_s = ordered_periods_s((1.0, 2.0), (1e-6, 5e-6))
    assert memory_s == disk_s == best_period_s(3.0, 6e-6)
    assert memory_s == pytest.approx(math.sqrt(2 * 3.0 / 6e-6), rel=2e-3)


def test_three_levels_reach_the_sum_of_their_optima():
    """C = 2 / 20 / 120 s and MTBF 4 h / 24 h / 10 d: w* = sum sqrt(2 C Lambda) = 5.49 %."""
    cost, rate = (2.0, 20.0, 120.0), (1 / 14400, 1 / 86400, 1 / 864000)
    periods = ordered_periods_s(cost, rate)
    waste = sum(c / t + r * t / 2 for c, r, t in zip(cost, rate, periods, strict=True))
    assert waste == pytest.approx(0.0549, abs=1e-4)


@pytest.mark.parametrize(("overhead_s", "expected"), [(0.0, 6), (0.5, 100), (0.01, 6)])
def test_checkfreq_rule_takes_the_stricter_of_its_two_conditions(overhead_s, expected):
    """T_i = 0.1 s, T_c + T_s = 0.6 s, p = 5 %: the released code would take 1 for O = 0.5 s."""
    steps = checkfreq_steps(
        iteration_s=0.1, snapshot_s=0.2, persist_s=0.4, overhead_s=overhead_s, budget=0.05
    )
    assert steps == expected


@pytest.mark.parametrize("form", [young_interval_s, daly_interval_s, exact_interval_s])
def test_impossible_inputs_are_refused(form):
    """A negative cost or an MTBF of zero is a mistake upstream."""
    with pytest.raises(ConfigError, match="must be"):
        form(-1.0, 1.0)
    with pytest.raises(ConfigError, match="must be"):
        form(1.0, 0.0)


level = st.tuples(
    st.floats(min_value=1e-3, max_value=30.0), st.floats(min_value=1e-7, max_value=1e-3)
)


@settings(deadline=None)
@given(level, level)
def test_ordering_repair_is_the_numeric_minimiser_of_two_ordered_levels(first, second):
    """Of sum C_i / T_i + Lambda_i T_i / 2 over T1 <= T2, within 0.1 % of waste and periods."""
    found = ordered_periods_s(*zip(first, second, strict=True), form=first_order_period_s)

    def wasted(periods_s) -> float:
        levels = zip((first, second), periods_s, strict=True)
        return sum(cost / period + rate * period / 2 for (cost, rate), period in levels)

    def best_above(memory_s: float) -> float:
        return wasted((memory_s, max(memory_s, first_order_period_s(*second))))

    memory_s = minimiser(best_above, found[0] / 30, found[0] * 30)
    assert found[0] == pytest.approx(memory_s, rel=1e-3)
    assert wasted(found) == pytest.approx(best_above(memory_s), rel=1e-3)
