"""Several levels: limits on all of them, and whole nested iterations."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autockpt.policies.interval import first_order_period_s, ordered_periods_s
from autockpt.policies.levels import (
    budget_periods_s,
    levels_waste,
    longest_disk_period_s,
    nested_steps,
)
from autockpt.values.errors import ConfigError
from tests.policies.test_interval import minimiser

level = st.tuples(
    st.floats(min_value=1e-3, max_value=30.0), st.floats(min_value=1e-7, max_value=1e-3)
)
levels = st.lists(level, min_size=1, max_size=4)
frequent = st.tuples(
    st.floats(min_value=0.05, max_value=20.0), st.floats(min_value=1e-5, max_value=1e-3)
)


@settings(deadline=None)
@given(level, level)
def test_ordering_repair_is_the_numeric_minimiser_of_two_ordered_levels(first, second):
    """Of the first-order sum over T1 <= T2, within 0.1 % of its waste and of the periods."""
    costs, rates = zip(first, second, strict=True)
    found = ordered_periods_s(costs, rates, form=first_order_period_s)

    def best_above(memory_s: float) -> float:
        disk_s = max(memory_s, first_order_period_s(*second))
        return levels_waste(costs, rates, (memory_s, disk_s))

    memory_s = minimiser(best_above, found[0] / 30, found[0] * 30)
    assert found[0] == pytest.approx(memory_s, rel=1e-3)
    assert levels_waste(costs, rates, found) == pytest.approx(best_above(memory_s), rel=1e-3)


@settings(deadline=None)
@given(level, level, st.floats(min_value=1e-4, max_value=0.5))
def test_budget_form_is_the_numeric_minimiser_within_the_budget(first, second, budget):
    """Lagrange against a search along the budget, within 0.1 % of the waste."""
    costs, rates = zip(first, second, strict=True)
    free = [first_order_period_s(*one) for one in (first, second)]
    found = budget_periods_s(costs, rates, budget=budget)
    spent = sum(c / t for c, t in zip(costs, found, strict=True))
    assert spent <= budget * (1 + 1e-9)
    if free[0] > free[1] or sum(c / t for c, t in zip(costs, free, strict=True)) <= budget:
        return

    def along(memory_s: float) -> float:
        """Disk takes what memory leaves of the budget."""
        left = budget - costs[0] / memory_s
        return levels_waste(costs, rates, (memory_s, costs[1] / left)) if left > 0 else 1e9

    memory_s = minimiser(along, costs[0] / budget * (1 + 1e-6), found[0] * 1e3)
    assert levels_waste(costs, rates, found) <= along(memory_s) * (1 + 1e-3)
    assert levels_waste(costs, rates, found) >= along(memory_s) * (1 - 1e-3)


@given(levels, st.floats(min_value=1e-4, max_value=0.5))
def test_a_budget_stretches_all_levels_alike_and_never_shortens(pairs, budget):
    """One factor for all, so that the order stays; none where the budget is not reached."""
    costs, rates = zip(*pairs, strict=True)
    free = ordered_periods_s(costs, rates, form=first_order_period_s)
    found = budget_periods_s(costs, rates, budget=budget)
    factors = [b / a for a, b in zip(free, found, strict=True)]
    assert min(factors) >= 1.0
    assert max(factors) == pytest.approx(min(factors))


def test_the_worst_moment_of_a_failure_decides_the_longest_period():
    """RPO 10 min and durable after 40 s: 560 s, and not 600."""
    assert longest_disk_period_s(600.0, 40.0) == 560.0
    with pytest.raises(ConfigError, match="nearest: more than 40"):
        longest_disk_period_s(30.0, 40.0)


@settings(max_examples=40, deadline=None)
@given(st.lists(frequent, min_size=2, max_size=3))
def test_nested_steps_are_within_two_percent_of_the_best_nested_ones(pairs):
    """Against every nested combination up to 120 iterations and multiples of 12."""
    costs, rates = zip(*pairs, strict=True)
    found = nested_steps(costs, rates, iteration_s=5.0)
    assert all(b % a == 0 for a, b in itertools.pairwise(found))
    if found[0] > 120 or any(b > 12 * a for a, b in itertools.pairwise(found)):
        return

    def of(steps) -> float:
        shared = sum(c * steps[0] / k for c, k in zip(costs, steps, strict=True))
        base_s = steps[0] * 5.0 + shared
        return levels_waste(costs, rates, [base_s * k / steps[0] for k in steps])

    factors = list(itertools.product(range(1, 13), repeat=len(pairs) - 1))
    best = min(
        of(tuple(k * n for n in itertools.accumulate((1, *some), int.__mul__)))
        for k in range(1, 121)
        for some in factors
    )
    assert of(found) <= best * 1.02


def test_three_levels_of_the_reference_nest():
    """C = 2 / 20 / 120 s, MTBF 4 h / 24 h / 10 d at 1 s an iteration: near 240, 1860, 14400 s."""
    steps = nested_steps((2.0, 20.0, 120.0), (1 / 14400, 1 / 86400, 1 / 864000), iteration_s=1.0)
    for found, formula in zip(steps, (240.0, 1859.0, 14400.0), strict=True):
        assert found == pytest.approx(formula, rel=0.15)


def test_impossible_levels_are_refused():
    """Nothing to nest, nothing that fails, no budget."""
    with pytest.raises(ConfigError, match="need levels"):
        nested_steps((1.0,), (0.0,), iteration_s=1.0)
    with pytest.raises(ConfigError, match="must be positive"):
        budget_periods_s((1.0,), (1e-4,), budget=0.0)
