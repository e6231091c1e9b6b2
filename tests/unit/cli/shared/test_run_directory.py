"""The files of a run: whole or absent, read back as they were written."""

import json
import os
import time
import tracemalloc
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from autockpt.cli.shared.failure_import import read_failures
from autockpt.cli.shared.plan_choice import decide, write
from autockpt.profiles.imports import own_log
from autockpt.reports.analysis.degradation import lacking
from autockpt.run_directory import (
    RunDirectory,
    RunInfo,
    control_path,
    default_path,
    new_run_id,
    utc_now,
)
from autockpt.values.errors import ConfigError, StorageError
from autockpt.values.failure import FailureRecord
from autockpt.values.generation import Generation
from autockpt.values.goal import Goal, Pins
from autockpt.values.plan import safe_default_plan
from autockpt.values.status import RunStatus
from autockpt.values.telemetry import (
    CheckpointDurable,
    Degraded,
    Event,
    FailureObserved,
    IterationsTimed,
    MemoryCommitted,
    RunEnded,
    RunStarted,
    SnapshotBegan,
    SnapshotSealed,
    event_data,
)
from tests.support.profiles import example_profile

INFO = RunInfo(
    run_id=new_run_id(),
    created=utc_now(),
    script="/home/u/train.py",
    args=("--lr", "1e-3", "a b"),
    cwd="/home/u",
    versions={"torch": "2"},
)
STATUS = RunStatus(
    state="finished",
    exit_code=0,
    restarts=2,
    last_step=100,
    last_durable="ckpt-t0001-step-00000100",
    protected=True,
    report=None,
)


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    """A new run directory."""
    return RunDirectory.create(tmp_path / "run")


def log(run: RunDirectory, name: str, *events: Event, torn: str = "") -> None:
    """An event file, with a torn last line."""
    lines = [json.dumps(event_data(event)) for event in events]
    (run.telemetry / name).write_text("\n".join(lines) + "\n" + torn)


def iterated(step: int, at_s: float, rank: int = 0) -> IterationsTimed:
    """A block of iterations that ended at `step`."""
    return IterationsTimed(
        at_s=at_s, rank=rank, step=step, count=1, total_s=1, checkpoint_s=0, quiet_s=1, busy_s=0
    )


def test_records_come_back_as_they_were_written(run: RunDirectory) -> None:
    """Every record, and None where there is none yet."""
    profile, goal = example_profile(), Goal(pins=Pins(disk_interval_steps=40))
    assert run.read_info() is None
    assert run.read_goal() is None
    assert run.read_profile() is None
    assert run.read_decision() is None
    assert run.read_plan() is None
    assert run.read_status() is None
    decision = decide(profile, goal)
    run.write_info(INFO)
    run.write_goal(goal)
    run.write_profile(profile)
    write(run, decision)
    run.write_status(STATUS)
    assert run.read_info() == INFO
    assert run.read_goal() == goal
    assert run.read_profile() == profile
    assert run.read_decision() == decision
    assert run.read_plan() == decision.plan
    assert run.read_status() == STATUS
    assert INFO.command == "/home/u/train.py --lr 1e-3 'a b'"


def test_a_bare_plan_comes_back(run: RunDirectory) -> None:
    """What the controller writes after a change, tiny floats included."""
    from dataclasses import replace

    plan = replace(safe_default_plan(), overhead_budget=1e-05)
    run.write_plan(plan)
    assert run.read_plan() == plan


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("tiers: [", "while parsing"), ("[" * 3000, "brackets are nested deeper than 100"),
        ("- " * 3000, "nested too deeply"), ("a: 2024-13-99", "month must be in"),
    ],
)  # fmt: skip
def test_a_plan_that_is_no_yaml_is_named(run: RunDirectory, text: str, why: str) -> None:
    """And what the reader stumbled over."""
    run.write_text("plan.yaml", text)
    with pytest.raises(ConfigError, match=rf"plan\.yaml: not valid YAML: {why}"):
        run.read_plan()


def test_plan_yaml_explains_itself(run: RunDirectory) -> None:
    """With a decision behind it, every choice stands beside its reason."""
    write(run, decide(example_profile(), Goal()))
    assert "# disk.interval = " in run.plan_text()


def test_a_failed_write_leaves_the_old_record(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Readers see the old or the new one, and no temporary file stays."""
    run.write_status(STATUS)

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(StorageError, match="No space left on device; free some space"):
        run.write_status(STATUS)
    assert run.read_status() == STATUS
    assert not list(run.path.glob(".status*"))


def test_a_damaged_record_names_its_file(run: RunDirectory) -> None:
    """And the field."""
    (run.path / "status.json").write_text('{"schema_version": 1, "state": "lost"}')
    with pytest.raises(ConfigError, match=r"status\.json\.state: expected 'running'"):
        run.read_status()


def test_a_damaged_failure_is_no_evidence(run: RunDirectory) -> None:
    """A time below zero, or none at all, would refuse each start with a profile."""
    died = FailureRecord(
        wall="2026-01-01T00:00:00Z", kind="process", what="trainer", node=0, step=8, exposure_s=60.0
    )
    for exposure_s in (60.0, -1.0, float("nan"), float("inf")):
        run.append_failure(replace(died, exposure_s=exposure_s))
    assert run.failures() == (died,)


def test_a_torn_failure_costs_no_other_one(run: RunDirectory) -> None:
    """A power cut tears the last record; the next process appends to the same line."""
    died = FailureRecord(
        wall="2026-01-01T00:00:00Z", kind="process", what="trainer", node=0, step=8, exposure_s=60.0
    )
    run.append_failure(died)
    path = run.path / "failures.jsonl"
    text = path.read_text()
    path.write_text(text + text[:40])
    assert run.failures() == (died,)
    assert len(read_failures(str(run.path), nodes=1).incidents) == 1
    newer = replace(died, step=16, exposure_s=30.0)
    run.append_failure(newer)
    assert run.failures() == (died, newer)
    assert len(read_failures(str(run.path), nodes=1).incidents) == 2
    path.write_text("nothing of ours\n" + text)
    with pytest.raises(ConfigError, match=r"failures\.jsonl"):
        read_failures(str(run.path), nodes=1)


def test_events_are_ordered_over_files_and_torn_lines_are_skipped(run: RunDirectory) -> None:
    """A crash tears the last line; a restart appends behind the fragment."""
    log(run, "rank-00000.jsonl", iterated(1, 1.0), iterated(3, 3.0), torn='{"event":"Iterat')
    with open(run.rank_telemetry(0), "a") as file:
        file.write(json.dumps(event_data(iterated(4, 4.0))).replace(": ", ":") + "\n")
    log(run, "rank-00001.jsonl", iterated(2, 2.0, rank=1), torn='{"event": "Run')
    assert [(event.at_s, event.rank) for event in run.events()] == [
        (1.0, 0), (2.0, 1), (3.0, 0), (4.0, 0)
    ]  # fmt: skip


def test_events_of_a_second_boot_come_after_those_of_the_first(run: RunDirectory) -> None:
    """The monotonic clock begins anew with the machine."""
    log(run, "rank-00000.jsonl", iterated(1, 5000.0), iterated(2, 30.0))
    log(run, "rank-00001.jsonl", iterated(1, 5001.0, 1), iterated(2, 31.0, 1))
    assert [event.at_s for event in run.events()] == [5000.0, 5001.0, 30.0, 31.0]


def test_reading_all_events_takes_few_bytes_for_each(run: RunDirectory) -> None:
    """Beside the events there is no second copy of the log, and of each text there is one.

    Two boots, ranks in turns, equal times: the order is that of times, then of files and lines.
    """
    written: list[tuple[int, int, Event]] = []
    for rank in range(4):
        events = list(checkpoints(rank))
        log(run, f"rank-{rank:05d}.jsonl", *events)
        written += [(number // 600, rank, event) for number, event in enumerate(events)]
    run.events()  # what is imported and cached counts once
    tracemalloc.start()
    try:
        found = run.events()
        _, most_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert most_bytes / len(found) < 260
    written.sort(key=lambda one: (one[0], one[2].at_s, one[1]))
    assert found == [event for _, _, event in written]


def checkpoints(rank: int) -> Iterator[Event]:
    """Of one rank: 600 events of the first boot, and as many of the second."""
    for boot in (0, 1):
        for step in range(300):
            at_s = 5000.0 * (1 - boot) + step
            name = f"step {step} (term {boot + 1})"
            yield SnapshotBegan(
                at_s=at_s, rank=rank, generation=name, step=step, tiers="memory+disk"
            )
            yield SnapshotSealed(
                at_s=at_s + rank % 2 * 0.5, rank=rank, generation=name, step=step, bytes=2**20,
                boundary_stall_s=0.001 * step, fence_stall_s=0.002 * step, copy_s=0.1 * step,
            )  # fmt: skip


def test_a_report_of_long_logs_lacks_routine_events_of_some_ranks(run: RunDirectory) -> None:
    """All else of them is there, in its order; of the lowest rank everything is."""
    logs = {}
    for rank in range(4):
        trouble = Degraded(at_s=5099.7, rank=rank, what="left out", reason="state.path")
        started = [run_started(rank, at_s) for at_s in (4999.0, -1.0)]
        events = [*checkpoints(rank)]
        logs[rank] = [started[0], *events[:200], trouble, *events[200:600], started[1]]
        logs[rank] += [*events[600:], iterated(300, 299.5, rank)]
        log(run, f"rank-{rank:05d}.jsonl", *logs[rank])
    nbytes = sum(path.stat().st_size for path in run.telemetry.iterdir())
    assert run.events_for_report(nbytes) == (run.events(), 0)
    events, thinned = run.events_for_report(nbytes // 2)
    assert thinned == 2
    for rank in (0, 2):
        assert [event for event in events if event.rank == rank] == logs[rank]
    for rank in (1, 3):
        kept = [type(event).__name__ for event in events if event.rank == rank]
        assert kept == [
            *("RunStarted", "SnapshotBegan", "Degraded"),
            *("SnapshotBegan", "RunStarted", "SnapshotBegan"),
        ]
    assert lacking(events) == "", "a later copy had it"
    events, thinned = run.events_for_report(1)
    assert thinned == 3
    assert [event for event in events if event.rank == 0] == logs[0]


def run_started(rank: int, at_s: float) -> RunStarted:
    """A start of one rank."""
    return RunStarted(
        at_s=at_s, rank=rank, wall=utc_now(), run_id="r", term=1, world_size=4, pid=1, plan_id="p",
        plan_version=1, state_bytes=1, restart_count=0,
    )  # fmt: skip


def test_an_unknown_event_is_refused_with_its_line(run: RunDirectory) -> None:
    """A newer autockpt wrote it."""
    (run.telemetry / "rank-00000.jsonl").write_text('{"event": "Teleported", "at_s": 1}\n')
    with pytest.raises(ConfigError, match=r"rank-00000\.jsonl:1: unknown event 'Teleported'"):
        run.events()


def test_the_newest_of_everything_is_cheap_to_know(run: RunDirectory) -> None:
    """From the tails alone; generations are compared as numbers, not as text."""
    assert (run.newest_step(), run.newest_generation(), run.newest_durable()) == (None, None, None)
    assert not run.attached
    common = {"at_s": 1.0, "rank": -1, "latency_s": 0.1}
    log(
        run,
        "keeper-000.jsonl",
        MemoryCommitted(generation="step 9 (term 1)", step=9, **common),
        MemoryCommitted(generation="step 42 (term 1)", step=42, **common),
        CheckpointDurable(
            generation="ckpt-t0001-step-00000010", step=10, bytes=1, stored_bytes=1, write_s=0.1,
            **common,
        ),
    )  # fmt: skip
    log(run, "rank-00000.jsonl", RunEnded(at_s=1, rank=0, step=50, reason="finished"))
    assert run.newest_step() == 50
    assert run.newest_generation() == Generation(term=1, step=42)
    assert run.newest_durable() == Generation(term=1, step=10)
    assert run.attached


def test_a_failure_of_an_earlier_boot_tells_no_newest_step(run: RunDirectory) -> None:
    """Its clock is another one: seconds since a start cannot be compared."""
    lost = {"rank": -1, "what": "trainer", "failed_rank": 0, "pid": 1, "detail": "d"}
    began = RunStarted(
        at_s=50.0, rank=0, wall=utc_now(), run_id="r", term=2, world_size=1, pid=1, plan_id="p",
        plan_version=1, state_bytes=1, restart_count=0, resumed="step 40 (term 1)",
    )  # fmt: skip
    log(run, "rank-00000.jsonl", began)
    old = FailureObserved(at_s=90_000.0, step=5000, **lost)
    log(run, "keeper-000.jsonl", old, FailureObserved(at_s=60.0, step=44, **lost))
    assert run.newest_step() == 44
    (run.telemetry / "keeper-000.jsonl").unlink()
    log(run, "keeper-000.jsonl", replace(old, at_s=time.monotonic() + 1e6))
    assert run.newest_step() == 40


def test_failures_append(run: RunDirectory) -> None:
    """One durable line each."""
    record = FailureRecord(
        wall=utc_now(), kind="process", what="trainer", node=0, step=7, exposure_s=12.5
    )
    assert run.failures() == ()
    run.append_failure(record)
    run.append_failure(record)
    assert run.failures() == (record, record)


def test_default_directories_are_new_and_named_after_the_script(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two runs in one second do not share one."""
    monkeypatch.chdir(tmp_path)
    first, second = (RunDirectory.create(script="/x/my train.py") for _ in range(2))
    assert first.path != second.path
    assert first.path.parent == tmp_path / "runs"
    assert first.path.name.startswith("my-train-2")
    assert default_path("pkg.sub.train").name.startswith("train-2")


def test_places_in_a_store_have_run_directories_of_their_own() -> None:
    """A slash is no dash; the name is short, and the same for each start."""
    urls = ("s3://b/a/b", "s3://b/a-b", "s3://b/" + "é" * 200, "s3://b/" + "é" * 200 + "/x")
    names = {control_path(url).name for url in urls}
    assert len(names) == len(urls)
    assert max(len(os.fsencode(name)) for name in names) <= 100
    assert control_path("s3://b/a/b/") == control_path("s3://b/a/b")


def test_checkpoints_go_where_the_goal_says(run: RunDirectory, tmp_path: Path) -> None:
    """Absolute, relative to where the job was started, or inside the run."""
    assert run.checkpoints() == str(run.path / "checkpoints")
    assert run.checkpoints(Goal(storage_path="/mnt/x")) == "/mnt/x"
    assert run.checkpoints(Goal(storage_path="s3://bucket/run/")) == "s3://bucket/run"
    run.write_info(INFO)
    run.write_goal(Goal(storage_path="ckpt"))
    assert run.checkpoints() == "/home/u/ckpt"


def test_other_directories_are_not_runs(tmp_path: Path) -> None:
    """With what to pass instead."""
    with pytest.raises(ConfigError, match="not a run directory"):
        RunDirectory.open(tmp_path)
    with pytest.raises(ConfigError, match="no such run directory"):
        RunDirectory.open(tmp_path / "x")
    (tmp_path / "checkpoints").mkdir()
    with pytest.raises(ConfigError, match="holds checkpoints alone, as `autockpt pull` makes them"):
        RunDirectory.open(tmp_path)


def test_a_log_that_is_nested_too_deeply_is_no_log_of_ours() -> None:
    """An error that names the line, and no RecursionError."""
    with pytest.raises(ConfigError, match=r"failures\.jsonl:1"):
        own_log.read("[" * 100_000 + "\n", where="failures.jsonl", nodes=1)
