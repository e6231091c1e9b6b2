"""Directories that cannot be written or belong to somebody else: said, and nothing is lost."""

import os
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from autockpt.executors.storage.catalogue import verify_generation
from autockpt.session.job import current_job
from autockpt.values.errors import ConfigError, DirectoryBusyError, StorageError
from autockpt.values.goal import Goal
from autockpt.values.telemetry import Degraded, PersistFailed
from tests.conftest import end_keeper
from tests.jobs.kill.zygote import Zygote
from tests.support import trainings
from tests.support.live import Live, granted

SPEC = trainings.JobSpec(steps=14, width=128)
"""About 0.4 MB of state."""
PLAN = trainings.plan(memory=4, disk=4)


def fill(place: Path) -> Path:
    """A file that leaves no page free."""
    filler = place / "filler"
    with filler.open("wb") as file:
        try:
            while True:
                file.write(bytes(2**16))
                file.flush()
        except OSError:
            pass
    return filler


@pytest.mark.root
def test_a_full_directory_costs_checkpoints_and_not_the_training(
    live: Live, small_disk: Path
) -> None:
    """From step 5 on nothing can be written; step 4 is what a restart resumes."""
    whole = trainings.bare(trainings.build(SPEC))
    goal = Goal(storage_path=str(small_disk / "checkpoints"))
    job, ckpt = live.attach(SPEC, PLAN, goal)
    began = 0.0
    for step, batch in ckpt.batches(SPEC.steps):
        trainings.train_step(job, step, batch)
        if step == 4:
            assert ckpt.wait_durable(30) > 0
            filler = fill(small_disk)
        granted(ckpt)
        began = time.monotonic()
    assert time.monotonic() - began < 20, "the end does not wait for space that never comes"
    assert trainings.digest(job) == whole
    live.leave()
    failed, degraded = live.events(PersistFailed), live.events(Degraded)
    assert {event.step for event in failed} | {event.what for event in degraded}
    assert any("No space left on device" in event.reason for event in (*failed, *degraded))
    assert any("free space or lower keep.last" in event.reason for event in (*failed, *degraded))
    with pytest.raises(StorageError, match="cannot be written: No space left on device") as caught:
        live.attach(SPEC, goal=goal)
    assert caught.value.exit_code == 74
    filler.unlink()
    (name,) = [
        path.name for path in small_disk.glob("checkpoints/ckpt-*") if (path / "COMMIT").exists()
    ]
    assert verify_generation(str(small_disk / "checkpoints"), name).ok
    job, ckpt = live.attach(SPEC, goal=goal)
    assert ckpt.step_count == 4
    for step, batch in ckpt.batches(SPEC.steps):
        trainings.train_step(job, step, batch)
    assert trainings.digest(job) == whole


@pytest.mark.root
def test_a_read_only_directory_is_said_at_once_and_its_checkpoints_load_later(
    live: Live, small_disk: Path
) -> None:
    """A new one at attach; one that held a run before, too, and it is untouched."""
    goal = Goal(storage_path=str(small_disk / "checkpoints"))
    remount(small_disk, "ro")
    with pytest.raises(StorageError, match=r"checkpoints: cannot be used .*Read-only") as caught:
        live.attach(SPEC, PLAN, goal)
    assert caught.value.exit_code == 74
    remount(small_disk, "rw")
    job, ckpt = live.attach(SPEC, PLAN, goal)
    for step, batch in ckpt.batches(SPEC.steps):
        trainings.train_step(job, step, batch)
    live.leave()
    remount(small_disk, "ro")
    with pytest.raises(StorageError, match=r"checkpoints: cannot be written: Read-only"):
        live.attach(SPEC, goal=goal)
    remount(small_disk, "rw")
    _, ckpt = live.attach(SPEC, goal=goal)
    assert ckpt.step_count == SPEC.steps


def remount(place: Path, how: str) -> None:
    """Read-only or not; a process that was killed may have files open for a moment yet."""
    command, deadline_s = ["mount", "-o", f"remount,{how}", str(place)], time.monotonic() + 60
    while subprocess.run(command, check=False).returncode and time.monotonic() < deadline_s:
        time.sleep(0.05)
    subprocess.run(command, check=True)


def test_a_directory_that_is_a_file_is_said(live: Live, tmp_path: Path) -> None:
    """Without root: what stands in the way is named."""
    (tmp_path / "file").write_text("")
    goal = Goal(storage_path=str(tmp_path / "file" / "checkpoints"))
    with pytest.raises(StorageError, match=r"file/checkpoints: .*Not a directory; name another"):
        live.attach(SPEC, PLAN, goal)


@pytest.mark.parametrize(
    ("path", "message"),
    [
        (b"r", r"got b'r' \(bytes\); expected a path as text"),
        (7, r"got 7 \(int\); expected"),
        ("a\udce9b", r"a.udce9b' is no UTF-8 text"),
    ],
)
def test_a_name_that_is_no_text_is_refused(
    path: Any, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At once, and nothing is made."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=message):
        current_job(run_dir=path)
    assert list(tmp_path.iterdir()) == []


def test_a_run_that_lives_keeps_its_directory(live: Live, zygote: Zygote, tmp_path: Path) -> None:
    """A second process on the same run directory is refused by name; the first trains on."""
    whole = trainings.bare(trainings.build(SPEC))
    job, ckpt = live.attach(SPEC, PLAN)
    out = tmp_path / "second"
    out.mkdir()
    status: int | None = None
    for step, batch in ckpt.batches(SPEC.steps):
        trainings.train_step(job, step, batch)
        granted(ckpt)
        if step == 6:
            second = zygote.start(trainings.spec_data(SPEC), live.run_dir, out)
            status = zygote.finish(second, out / "log")
    log = (out / "log").read_text()
    assert status == DirectoryBusyError.exit_code, log
    assert f"DirectoryBusyError: {live.checkpoints}: " in log
    assert f"pid {os.getpid()}" in log
    assert "stop that run first, or use another --run-dir" in log
    assert trainings.digest(job) == whole
    assert max(live.durable_steps()) == SPEC.steps


def test_two_runs_cannot_share_a_checkpoint_directory(live: Live, tmp_path: Path) -> None:
    """Another run directory, the same place for checkpoints: the lease names its holder."""
    goal = Goal(storage_path=str(tmp_path / "shared"))
    job, ckpt = live.attach(SPEC, PLAN, goal)
    keeper = ckpt.keeper_pid
    first = live.run_dir
    live.run_dir = str(tmp_path / "other")
    try:
        with pytest.raises(DirectoryBusyError, match="owned by another live run") as caught:
            live.attach(SPEC, PLAN, goal)
    finally:
        end_keeper(live.run_dir)
        live.run_dir = first
    assert caught.value.exit_code == 73
    assert str(tmp_path / "shared") in str(caught.value)
    assert f"keeper pid {keeper}" in str(caught.value)
    for step, batch in ckpt.batches(SPEC.steps):
        trainings.train_step(job, step, batch)
    assert ckpt.step_count == SPEC.steps
