"""Failures and recoveries of this run and of the runs beside it, turned into rates and times.

Beside the runs may stand what others have recorded (`autockpt failures --save`): it counts as well.
"""

import contextlib
import json
import os
from dataclasses import dataclass, replace
from pathlib import Path

from autockpt.profiles.failures import estimate_rates, estimate_recovery
from autockpt.profiling.facts.job_step import memory_end_here
from autockpt.profiling.facts.last_life import unrecorded_failure
from autockpt.run_directory import FAILURES, RunDirectory
from autockpt.values.errors import AutockptError
from autockpt.values.failure import FailureHistory, FailureRecord, Life, lives_of
from autockpt.values.profile import FailureRates, RecoveryTimes
from autockpt.values.record import from_json

NEWEST_RUNS = 50
"""Older runs have faded out of the posterior and cost time to read."""
READ_BYTES = 2**19
"""Of one run's telemetry: 10 ms.  Of a longer file as much is read in PIECES, evenly apart."""
PIECES = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class FailureEvidence:
    """Evidence from the logs of a run and of the runs beside it."""

    rates: FailureRates
    recovery: RecoveryTimes
    lives: tuple[Life, ...] = ()
    """Of this run alone, oldest first."""


def failure_history(run_dir: str, *, nodes: int) -> tuple[FailureRates, RecoveryTimes]:
    """Posterior rates and recovery times from the failure logs beside `run_dir` and in it."""
    found = failure_evidence(run_dir, nodes=nodes)
    return found.rates, found.recovery


def failure_evidence(run_dir: str, *, nodes: int, starting: bool = False) -> FailureEvidence:
    """Rates, recovery times and lives from the failure logs beside `run_dir` and in it.

    Runs that ended well count as exposure: their training time is the tail that no failure ended.
    `starting`: no process of the run trains now, so the newest one may have died unrecorded.
    """
    records: list[FailureRecord] = []
    lives: tuple[Life, ...] = ()
    tail_s = 0.0
    for run in _runs_beside(Path(run_dir)):
        with contextlib.suppress(AutockptError, OSError):  # a foreign or damaged log says nothing
            own = run.failures()
            if run.path == Path(run_dir).absolute():
                newest = unrecorded_failure(run) if starting else None
                own = own if newest is None else (*own, newest)
                lives = lives_of(own)
            records += own
            tail_s += max(0.0, _trained_s(run) - sum(record.exposure_s for record in own))
    records.sort(key=lambda record: record.wall)
    rates = estimate_rates(
        records, nodes=nodes, tail_exposure_s=tail_s, histories=_kept_beside(Path(run_dir))
    )
    rates = replace(rates, memory_ends_with=memory_end_here())
    return FailureEvidence(rates=rates, recovery=estimate_recovery(records), lives=lives)


def _kept_beside(run_dir: Path) -> list[FailureHistory]:
    """Histories of others, in the order of their names; one that cannot be read says nothing."""
    found = []
    for path in sorted((run_dir.absolute().parent / FAILURES).glob("*.json")):
        with contextlib.suppress(AutockptError, OSError, UnicodeDecodeError):
            text = path.read_text(encoding="utf-8")
            found.append(from_json(FailureHistory, text, where=str(path)))
    return found


def _runs_beside(run_dir: Path) -> list[RunDirectory]:
    """This run and its siblings, newest first."""
    with contextlib.suppress(OSError):
        siblings = [path for path in run_dir.absolute().parent.iterdir() if path.is_dir()]
        siblings = [path for path in siblings if (path / "telemetry").is_dir()]
        siblings.sort(key=lambda path: path.stat().st_mtime, reverse=True)
        return [RunDirectory(path) for path in siblings[:NEWEST_RUNS]]
    return []


def _trained_s(run: RunDirectory) -> float:
    """Training time that rank 0 reported, stalls included; of a long run by extrapolation."""
    path = run.rank_telemetry(0)
    if not path.exists():
        return 0.0
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        if size <= READ_BYTES:
            return _reported_s(file.read())
        total_s, read, piece = 0.0, 0, READ_BYTES // PIECES
        for number in range(PIECES):
            file.seek(number * (size - piece) // (PIECES - 1))
            text = file.read(piece)
            lines = text[text.find(b"\n") + 1 : text.rfind(b"\n") + 1]  # whole ones
            total_s, read = total_s + _reported_s(lines), read + len(lines)
    return total_s * size / read if read else 0.0


def _reported_s(lines: bytes) -> float:
    total_s = 0.0
    for line in lines.splitlines():
        if b'"IterationsTimed"' in line:
            with contextlib.suppress(ValueError, KeyError, TypeError):
                event = json.loads(line)
                total_s += float(event["total_s"]) + float(event["checkpoint_s"])
    return total_s
