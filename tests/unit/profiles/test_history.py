"""Failure logs of the runs beside this one feed the rates; runs that ended well count too."""

from pathlib import Path

import pytest

from autockpt.profiles.failures import estimate_rates
from autockpt.profiling.facts.failure_history import READ_BYTES, failure_history
from autockpt.run_directory import RunDirectory
from autockpt.values.failure import FailureRecord


def run_with(parent: Path, name: str, *, trained_s: float, failures: int = 0) -> RunDirectory:
    """A run directory with telemetry, and failures after 100 s of training each."""
    run = RunDirectory.create(parent / name)
    line = f'{{"event":"IterationsTimed","total_s":{trained_s - 1.0},"checkpoint_s":1.0}}\n'
    run.rank_telemetry(0).write_text(line + '{"event":"Iter')
    for number in range(failures):
        run.append_failure(
            FailureRecord(
                wall=f"2026-01-0{number + 1}T00:00:00Z",
                kind="process",
                what="trainer",
                node=0,
                step=1,
                exposure_s=100.0,
                detect_s=0.5,
                restart_s=4.0,
                restore_s=0.25,
                source="memory",
            )
        )
    return run


def test_without_history_the_priors_stand(tmp_path: Path) -> None:
    """A first profile: no events, everything assumed."""
    rates, recovery = failure_history(str(tmp_path / "runs" / "new"), nodes=3)

    assert rates.nodes == 3
    assert rates.per_job.events == 0
    assert recovery.detect.source == "assumed"


def test_failures_and_exposure_of_siblings_count(tmp_path: Path) -> None:
    """Two failures in 200 s, and 800 + 1000 s of training that nothing ended."""
    failing = run_with(tmp_path, "a", trained_s=1000.0, failures=2)
    run_with(tmp_path, "b", trained_s=1000.0)
    rates, recovery = failure_history(str(tmp_path / "c"), nodes=1)

    assert rates.per_job.events == 2
    assert rates == estimate_rates(failing.failures(), nodes=1, tail_exposure_s=1800.0)
    assert (recovery.detect.value_s, recovery.detect.source) == (0.5, "measured")
    assert recovery.restore_memory.value_s == 0.25
    assert recovery.restore_disk.source == "assumed"


def test_a_damaged_log_is_passed_over(tmp_path: Path) -> None:
    """A foreign failures.jsonl is no reason to refuse a profile."""
    run = run_with(tmp_path, "a", trained_s=10.0)
    (run.path / "failures.jsonl").write_text('{"kind": "meteor"}\n')
    rates, _ = failure_history(str(tmp_path / "b"), nodes=1)

    assert rates.per_job.events == 0


def test_a_long_quiet_run_is_exposure_too(tmp_path: Path) -> None:
    """Four days in blocks of a second, with saves between that became rarer: too much to read."""
    run = run_with(tmp_path, "a", trained_s=1.0)
    block = '{"event":"IterationsTimed","total_s":0.99,"checkpoint_s":0.01,"at_s":%d}\n'
    save = '{"event":"SnapshotBegan","generation":"step %d (term 1)"}\n'
    blocks = 4 * 86400
    with run.rank_telemetry(0).open("w") as file:
        for second in range(blocks):
            file.write(block % second)
            if second % (5 if second < 3600 else 50) == 0:
                file.write(save % second)
    assert run.rank_telemetry(0).stat().st_size > 20 * READ_BYTES
    rates, _ = failure_history(str(tmp_path / "b"), nodes=1)
    exact = estimate_rates([], nodes=1, tail_exposure_s=float(blocks))
    assert rates.per_job.mean_per_day == pytest.approx(exact.per_job.mean_per_day, rel=0.01)
    assert rates.per_job.mean_per_day < 0.8 * estimate_rates([], nodes=1).per_job.mean_per_day
