"""How long a profile takes: never endless, never too short, the same on every rank."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autockpt.profiles.schedule import (
    WORKS,
    ProfileSettings,
    interference_units,
    persist_fits,
    quiet_iterations,
)
from autockpt.values.errors import ConfigError

SETTINGS = ProfileSettings()
iteration = st.floats(1e-4, 60.0)


@given(iteration)
def test_quiet_stage_is_neither_endless_nor_empty(iteration_s: float) -> None:
    """At least three iterations; more than `quiet_limit_s` only where three take longer."""
    count = quiet_iterations(iteration_s, SETTINGS)

    assert count >= 3
    assert count <= 60
    assert count * iteration_s <= SETTINGS.quiet_limit_s or count == 3


@given(iteration, st.floats(0.001, 8.9))
def test_rounds_hold_each_work_once_and_stay_within_twice_the_budget(
    iteration_s: float, persist_s: float
) -> None:
    """Every round compares all kinds of work with one quiet unit."""
    units = interference_units(iteration_s, persist_s=persist_s, works=WORKS, settings=SETTINGS)
    rounds = 1 + max(unit.round for unit in units)

    assert Counter(unit.work for unit in units) == dict.fromkeys(("quiet", *WORKS), rounds)
    assert 2 <= rounds <= SETTINGS.rounds_max
    total_s = sum(unit.iterations for unit in units) * iteration_s
    assert total_s <= 2 * SETTINGS.interference_s or rounds == 2
    persists = [u for u in units if u.work == "persist"]
    assert all(unit.iterations * iteration_s >= persist_s for unit in persists)


def test_order_is_random_and_reproducible() -> None:
    """Ranks that compute it apart get the same list, and not always quiet first."""
    make = [
        interference_units(0.1, persist_s=0.1, works=WORKS, settings=SETTINGS) for _ in range(2)
    ]

    assert make[0] == make[1]
    assert len({unit.work for unit in make[0][::4]}) > 1


@given(iteration, st.integers(1, 2000))
def test_a_short_script_gets_a_short_plan(iteration_s: float, steps_left: int) -> None:
    """Both stages fit into the steps that are left, down to two rounds of single iterations."""
    quiet = quiet_iterations(iteration_s, SETTINGS, steps_left=steps_left)
    units = interference_units(
        iteration_s, persist_s=0.0, works=WORKS, settings=SETTINGS, steps_left=steps_left
    )

    assert quiet <= max(3, steps_left // 4)
    assert sum(unit.iterations for unit in units) <= max(2 * 4, steps_left)


def test_a_long_persist_is_left_out() -> None:
    """What would take the whole budget for one sample is predicted instead."""
    assert persist_fits(0.5, 0.3, SETTINGS)
    assert not persist_fits(0.5, 30.0, SETTINGS)


def test_impossible_settings_are_refused() -> None:
    """The optimizer's state exists after the first step only."""
    with pytest.raises(ConfigError, match="at least 2"):
        ProfileSettings(warmup_steps=1)
    with pytest.raises(ConfigError, match="rounds_min"):
        ProfileSettings(rounds_min=5, rounds_max=2)
    with pytest.raises(ConfigError, match="cannot be planned"):
        quiet_iterations(0.0, SETTINGS)
