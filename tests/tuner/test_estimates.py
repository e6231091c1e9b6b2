"""Winsorised means and jump detection."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autockpt.tuner.estimates import WINDOW, Window, winsorised


def test_one_wild_sample_does_not_move_the_mean():
    """A cold first save of 100 times the usual."""
    mean, error = winsorised([1.0, 1.1, 0.9, 100.0, 1.0, 1.0, 1.05, 0.95])
    assert mean == pytest.approx(1.01, abs=0.03)
    assert error < 0.1


@given(st.lists(st.floats(min_value=0.0, max_value=1e6), min_size=1, max_size=20))
def test_the_mean_lies_among_the_samples(samples):
    """Whatever the count."""
    mean, error = winsorised(samples)
    assert min(samples) - 1e-6 <= mean <= max(samples) * (1 + 1e-9) + 1e-6
    assert error >= 0


def test_a_factor_of_four_is_found_at_once_and_drops_the_past():
    """Within three samples, and the mean is then of the new level only."""
    window = Window()
    for value in [1.0] * 10 + [4.0] * 3:
        window.observe(value)
    assert window.jumped
    assert window.mean == pytest.approx(4.0)
    assert window.n <= 3


def test_noise_of_forty_percent_rarely_looks_like_a_jump():
    """Fewer than one alarm in 200 samples on average."""
    alarms = 0
    for seed in range(20):
        chance, window = random.Random(seed), Window()
        for _ in range(500):
            window.observe(max(0.05, chance.gauss(1.0, 0.4)))
            alarms += window.jumped
            window.jumped = False
    assert alarms <= 50


def test_a_window_forgets_what_is_older_than_itself():
    """The newest eight."""
    window = Window()
    for value in range(1, 30):
        window.observe(1.0 + value * 1e-3)
    assert window.n == WINDOW
    assert window.mean == pytest.approx(1.0255, abs=1e-3)
