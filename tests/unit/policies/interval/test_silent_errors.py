"""Silent errors: the verified pattern against its minimiser and a simulation, late notice."""

import math
import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autockpt.policies.decide import decide
from autockpt.policies.interval.silent_errors import (
    affordable_check_s,
    silent_share,
    verified_work_s,
)
from autockpt.values.errors import ConfigError
from autockpt.values.goal import Goal, Retention
from tests.support.profiles import example_failures, example_profile
from tests.unit.policies.interval.test_closed_forms import minimiser


def verified_waste(
    work_s: float,
    checkpoint_s: float,
    verification_s: float,
    *,
    silent_per_s: float,
    failures_per_s: float,
    recover_s: float = 0.0,
) -> float:
    """First-order waste rate of the verified pattern: h(W) + (Lambda_s + Lambda_f) R."""
    tuned = (verification_s + checkpoint_s) / work_s
    tuned += (silent_per_s + failures_per_s / 2.0) * work_s
    return tuned + (silent_per_s + failures_per_s) * recover_s


@given(
    st.floats(min_value=1e-5, max_value=1.0),
    st.floats(min_value=0.0, max_value=1.0),
    st.floats(min_value=0.0, max_value=1.0),
)
def test_verified_form_is_the_numeric_minimiser_within_a_thousandth(cost, verified, silent):
    """Over (V + C) / M from 1e-5 to 1, any split of cost and of errors."""
    arguments = {"silent_per_s": silent, "failures_per_s": 1.0 - silent}
    split = (cost * (1 - verified), cost * verified)
    found_s = verified_work_s(*split, **arguments)
    found = minimiser(lambda w: verified_waste(w, *split, **arguments), found_s / 50, found_s * 50)
    assert found_s == pytest.approx(found, rel=1e-3)


def test_without_silent_errors_it_is_young():
    """V = 0 and Lambda_s = 0: sqrt(2 C M)."""
    work_s = verified_work_s(60.0, 0.0, silent_per_s=0.0, failures_per_s=1 / 3600)
    assert work_s == pytest.approx(math.sqrt(2 * 60 * 3600))
    assert verified_work_s(60.0, 0.0, silent_per_s=0.0, failures_per_s=0.0) == math.inf


def simulated(work_s: float, *, silent: float, failures: float, patterns: int, seed: int) -> float:
    """Waste of patterns of work, 4 s of verification and 6 s of checkpoint; recovery 20 s."""
    chance, wall_s = random.Random(seed), 0.0
    for _ in range(patterns):
        while True:
            fails_s = chance.expovariate(failures)
            wrong = chance.random() < -math.expm1(-silent * work_s)
            if fails_s < work_s + 4.0:
                wall_s += fails_s + 20.0
            elif wrong:
                wall_s += work_s + 4.0 + 20.0
            elif fails_s < work_s + 10.0:  # the checkpoint of verified work is lost as well
                wall_s += fails_s + 20.0
            else:
                wall_s += work_s + 10.0
                break
    return 1.0 - patterns * work_s / wall_s


@pytest.mark.parametrize(
    ("silent", "failures"), [(2e-5, 1e-5), (5e-5, 5e-5), (1e-5, 1e-4), (1e-4, 1e-6)]
)
@pytest.mark.parametrize("stretch", [0.5, 1.0, 2.0])
def test_the_verified_form_agrees_with_a_simulation(silent, failures, stretch):
    """Within 1 % of time while the waste is at most 10 %."""
    rates = {"silent_per_s": silent, "failures_per_s": failures}
    work_s = verified_work_s(6.0, 4.0, **rates) * stretch
    expected = verified_waste(work_s, 6.0, 4.0, **rates, recover_s=20.0)
    assert expected <= 0.10, "outside the envelope that the form states"
    found = simulated(work_s, silent=silent, failures=failures, patterns=30000, seed=5)
    assert found == pytest.approx(expected, abs=0.01)


@given(
    st.floats(min_value=0.1, max_value=60.0),
    st.floats(min_value=100.0, max_value=5000.0),
    st.floats(min_value=0.0, max_value=1e5),
    st.floats(min_value=1e-9, max_value=1e-5),
)
def test_an_affordable_check_breaks_even(cost_s, period_s, latency_s, silent):
    """With exactly that check, verified checkpoints waste as much as unverified ones do."""
    rates = {"silent_per_s": silent, "failures_per_s": 1e-5}
    check_s = affordable_check_s(cost_s, period_s, latency_s, **rates)
    without = cost_s / period_s + (silent + 1e-5) * period_s / 2 + silent * latency_s
    work_s = verified_work_s(cost_s, check_s, **rates)
    verified = verified_waste(work_s, cost_s, check_s, **rates)
    assert verified >= without * (1 - 1e-9)
    if check_s > 0:
        assert verified == pytest.approx(without)


def test_no_check_pays_where_errors_are_noticed_at_once_or_never_happen():
    """At its best interval; a check of no time breaks even at best."""
    best_s = math.sqrt(2 * 10.0 / 1e-4)
    rates = {"silent_per_s": 1e-5, "failures_per_s": 9e-5}
    assert affordable_check_s(10.0, best_s, 0.0, **rates) == 0.0
    assert affordable_check_s(10.0, best_s, 1e6, silent_per_s=0.0, failures_per_s=1e-4) == 0.0


def decided(late_s: float | None):
    """A decision with one silent error in fifty interruptions, of one every hour."""
    failures = example_failures(mtbf_s=3600.0)
    classes = {"process": 20.0, "node": 29.0, "silent": 1.0}
    profile = example_profile(failures=replace(failures, classes=classes))
    return decide(profile, Goal(retention=Retention(reach_s=late_s)))


def test_late_notice_costs_its_latency_and_moves_no_interval():
    """Lambda_s L more waste; the choice says what a check might take."""
    at_once, late = decided(None), decided(7200.0)
    assert late.plan.tiers == at_once.plan.tiers
    kept = (1.0 - late.expected.waste) / (1.0 - at_once.expected.waste)
    assert kept == pytest.approx(math.exp(-7200.0 / 3600.0 / 50.0))
    choice = late.choice("verification")
    assert choice is not None
    assert choice.numbers["affordable_check_s"] > 0
    assert "come every 2.08 d" in choice.reason
    retention = late.choice("retention")
    assert retention is not None
    assert "noticed within 2 h" in retention.reason
    assert at_once.choice("verification") is None


def test_rates_without_classes_know_no_silent_errors():
    """Nothing was estimated, so nothing is claimed."""
    assert silent_share(example_failures()) == 0.0


def test_impossible_inputs_are_refused():
    """Negative times and a period of nothing."""
    with pytest.raises(ConfigError, match="must not be negative"):
        verified_work_s(-1.0, 0.0, silent_per_s=0.0, failures_per_s=1.0)
    with pytest.raises(ConfigError, match="must be more than 0"):
        affordable_check_s(1.0, 0.0, 1.0, silent_per_s=0.0, failures_per_s=1.0)
