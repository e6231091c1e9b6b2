"""Silent errors: the verified pattern against its minimiser and a simulation, and what to keep."""

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autockpt.policies.silent import checkpoints_to_keep, verified_waste, verified_work_s
from autockpt.values.errors import ConfigError
from tests.policies.test_interval import minimiser


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
    st.floats(min_value=0.0, max_value=50.0),
    st.floats(min_value=0.1, max_value=10.0),
    st.floats(min_value=0.0, max_value=1.0),
)
def test_enough_checkpoints_are_kept_to_reach_behind_the_error(latency_s, period_s, phase):
    """Wherever in the period the error falls, a kept checkpoint is older than it."""
    error_s = 1000.0 * period_s + phase * period_s
    noticed = math.floor((error_s + latency_s) / period_s)
    oldest_s = (noticed - checkpoints_to_keep(latency_s, period_s) + 1) * period_s
    assert oldest_s <= error_s + 1e-9


def test_impossible_inputs_are_refused():
    """Negative times and a period of nothing."""
    with pytest.raises(ConfigError, match="must not be negative"):
        verified_work_s(-1.0, 0.0, silent_per_s=0.0, failures_per_s=1.0)
    with pytest.raises(ConfigError, match=">= 0 and > 0"):
        checkpoints_to_keep(1.0, 0.0)
