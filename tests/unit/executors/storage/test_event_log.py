"""A log that takes no more events says so when it takes them again, or at its end."""

import subprocess
import sys
from pathlib import Path

from autockpt.run_directory import RunDirectory
from autockpt.values.telemetry import Degraded, FirstIterationEnded

WRITES = """
import resource, sys
from autockpt.executors.storage.event_log import TelemetryWriter
from autockpt.values.telemetry import FirstIterationEnded

_, most = resource.getrlimit(resource.RLIMIT_FSIZE)
writer = TelemetryWriter(sys.argv[1])
for step in range(12):
    if step == 5:
        resource.setrlimit(resource.RLIMIT_FSIZE, (350, most))  # within a line
    if step == int(sys.argv[2]):
        resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))
    writer.emit(FirstIterationEnded(at_s=float(step), rank=3, step=step))
    writer.flush()
writer.close()
print(writer.gap)
"""


def written(run: RunDirectory, *, again_at: int) -> tuple[list[int], list[str], str]:
    """Steps in the log, what it says of itself, and the writer's last word."""
    path = run.rank_telemetry(3)
    told = subprocess.run(
        [sys.executable, "-c", WRITES, path, str(again_at)], capture_output=True, text=True,
        timeout=60, check=True,
    ).stdout.strip()  # fmt: skip
    events = run.events()
    steps = [event.step for event in events if isinstance(event, FirstIterationEnded)]
    return steps, [event.reason for event in events if isinstance(event, Degraded)], told


def test_events_that_did_not_fit_are_counted_when_the_file_grows_again(tmp_path: Path) -> None:
    """The one that was cut short is among them, and spoils none behind it."""
    steps, said, told = written(RunDirectory(tmp_path), again_at=9)
    missing = 12 - len(steps)
    assert 9 > missing > 2
    assert steps == [*range(9 - missing), 9, 10, 11]
    assert said == [f"before this one {missing} events did not fit: File too large"]
    assert told == ""


def test_events_that_never_fit_are_counted_at_the_end(tmp_path: Path) -> None:
    """There is no place in the log for it: the process says it."""
    run = RunDirectory(tmp_path)
    steps, said, told = written(run, again_at=99)
    assert steps == list(range(len(steps)))
    assert said == []
    missing = f"{12 - len(steps)} events: File too large"
    assert told == f"{run.rank_telemetry(3)} lacks {missing}; the report lacks them"
