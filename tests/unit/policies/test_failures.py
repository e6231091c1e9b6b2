"""Failure rates and recovery times from priors and history."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autockpt.profiles.evidence import DAY_S, faded_s
from autockpt.profiles.failures import ASSUMED_RESTART_S, estimate_rates, estimate_recovery
from autockpt.values.errors import ConfigError
from autockpt.values.failure import FailureRecord


def record(kind: str = "process", exposure_days: float = 1.0, **changes) -> FailureRecord:
    values = {
        "wall": "2026-01-01T00:00:00Z",
        "kind": kind,
        "what": "trainer",
        "node": 0,
        "step": 1,
        "exposure_s": exposure_days * DAY_S,
    }
    return FailureRecord(**{**values, **changes})


def test_without_history_the_prior_stands():
    """4 per 1000 node-days and one in 10 days; 35 % of failures spare the memory."""
    rates = estimate_rates([], nodes=8)
    assert rates.per_node.mean_per_day == pytest.approx(0.004)
    assert rates.per_job.mean_per_day == pytest.approx(0.1)
    assert rates.process_share == pytest.approx(0.35)
    assert rates.interruptions_per_s == pytest.approx((0.032 + 0.1) / DAY_S)
    assert rates.per_node.source.startswith("prior")


def test_conjugate_update_counts_events_and_node_days():
    """Two process failures and one node loss in 62 days of 4 nodes, as the prior expects."""
    history = [record(exposure_days=10.0), record("node", 40.0), record(exposure_days=10.0)]
    rates = estimate_rates(history, nodes=4, tail_exposure_s=2 * DAY_S, half_life_s=None)
    assert (rates.per_node.shape, rates.per_job.shape) == (2.0, 3.0)
    assert rates.per_node.exposure_days == pytest.approx(250.0 + 248.0, rel=0.06)
    assert rates.per_job.exposure_days == pytest.approx(72.0, rel=0.06)
    assert (rates.per_node.events, rates.per_job.events) == (1, 2)
    assert rates.process_share == pytest.approx((3.5 + 2) / 13)


def test_a_quiet_run_lowers_the_rate():
    """Censored exposure counts."""
    quiet = estimate_rates([], nodes=1, tail_exposure_s=30 * DAY_S)
    assert quiet.per_job.mean_per_day < 0.1


def test_a_job_that_fails_every_twenty_minutes_is_soon_believed():
    """Four failures in 80 minutes: the prior of 10 days gives way to within a factor of two."""
    often = [record(exposure_days=20 / 1440) for _ in range(4)]
    rates = estimate_rates(often, nodes=1)
    assert 36.0 < rates.per_job.mean_per_day < 100.0
    one = estimate_rates(often[:1], nodes=1).per_job.mean_per_day
    assert 0.2 < one < 10.0


@pytest.mark.parametrize(("apart_s", "events"), [(10.0, 3), (25.0, 3), (25.0, 10), (60.0, 5)])
def test_three_failures_in_a_minute_are_believed(apart_s: float, events: int) -> None:
    """A rate within a fifth of what is on record, and one failure alone does not make it."""
    killed = [record(exposure_days=apart_s / DAY_S) for _ in range(events)]
    found = estimate_rates(killed, nodes=1).per_job.mean_per_day / (DAY_S / apart_s)
    assert 0.8 < found < 1.2
    assert estimate_rates(killed[:1], nodes=1).per_job.mean_per_day < 0.1 * DAY_S / apart_s


def test_old_evidence_fades_to_the_prior():
    """A burst three years of training ago no longer matters."""
    burst = [record(exposure_days=0.1) for _ in range(50)]
    recent = estimate_rates(burst, nodes=1)
    old = estimate_rates(burst, nodes=1, tail_exposure_s=1000 * DAY_S)
    never = estimate_rates(burst, nodes=1, tail_exposure_s=1000 * DAY_S, half_life_s=None)
    assert recent.per_job.mean_per_day > 1.0
    assert old.process_share == pytest.approx(0.35, abs=1e-6)
    assert never.process_share > 0.8


@given(st.lists(st.floats(min_value=0.0, max_value=100.0), max_size=20))
def test_fading_never_invents_evidence(exposures):
    """Faded shape and exposure lie between the prior and the full count."""
    history = [record(exposure_days=days) for days in exposures]
    faded = estimate_rates(history, nodes=1).per_job
    full = estimate_rates(history, nodes=1, half_life_s=None).per_job
    assert 1.0 <= faded.shape <= full.shape + 1e-9
    assert faded.exposure_days > 0


def test_splitting_a_quiet_stretch_changes_nothing():
    """The fading integral is additive: 10 days weigh as much as their first 4 and last 6."""
    half_life_s = 21 * DAY_S
    parts = faded_s(DAY_S, 4 * DAY_S, half_life_s) + faded_s(5 * DAY_S, 6 * DAY_S, half_life_s)
    assert faded_s(DAY_S, 10 * DAY_S, half_life_s) == pytest.approx(parts)


def test_recovery_is_measured_where_history_has_it_and_assumed_elsewhere():
    """Each part says where it is from."""
    history = [
        record(detect_s=0.2, restart_s=12.0, restore_s=0.4, source="memory"),
        record(detect_s=0.4, restore_s=0.6, source="memory"),
    ]
    times = estimate_recovery(history, restore_memory_s=9.0, restore_disk_s=3.0)
    assert times.detect.value_s == pytest.approx(0.3)
    assert (times.detect.source, times.detect.n) == ("measured", 2)
    assert (times.restart.value_s, times.restart.n) == (12.0, 1)
    assert (times.restore_memory.value_s, times.restore_memory.source) == (0.5, "measured")
    assert (times.restore_disk.value_s, times.restore_disk.source) == (3.0, "derived")
    nothing = estimate_recovery([])
    assert (nothing.restart.value_s, nothing.restart.source) == (ASSUMED_RESTART_S, "assumed")
    assert nothing.restore_disk.source == "assumed"


def test_impossible_history_is_refused():
    """Negative time and no nodes are mistakes of the caller."""
    with pytest.raises(ConfigError, match="must be"):
        estimate_rates([], nodes=0)
    with pytest.raises(ConfigError, match="must be"):
        estimate_rates([record(exposure_days=-1.0)], nodes=1)
