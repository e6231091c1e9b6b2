"""A checkpoint directory that is emptied, unmounted or made again while a run holds it."""

import os
import shutil
import threading
from pathlib import Path

import pytest

from autockpt.executors.keeper.storage_worker import DiskWorker
from autockpt.executors.linux import mounts
from autockpt.executors.protocol import messages as p
from autockpt.executors.storage.directory import identity as identity_module
from autockpt.executors.storage.directory.directory import CheckpointDirectory
from autockpt.values.errors import GuardError, StorageError
from autockpt.values.generation import Generation

FIRST = Generation(term=1, step=5)


@pytest.fixture
def held(tmp_path: Path) -> tuple[CheckpointDirectory, str]:
    """A directory under claim 1, with its decision, and the run."""
    directory = CheckpointDirectory(str(tmp_path / "checkpoints"))
    run_id = directory.open()
    assert directory.claim(run_id, "launch", 0, force=False) == 1
    directory.write_decision(1, 1, None, "the first start")
    return directory, run_id


def empty(directory: CheckpointDirectory) -> None:
    """What `rm -rf DIR/*` leaves, and an unmounted disk."""
    shutil.rmtree(directory.path)
    os.mkdir(directory.path)


def commit(directory: CheckpointDirectory, run_id: str) -> None:
    """A commit of one empty shard."""
    directory.create_generation(FIRST)
    directory.write_commit(
        run_id, FIRST, step=5, world_size=1, parent=None, records=({"rank": 0},), health="good"
    )


@pytest.mark.parametrize("how", ["emptied", "removed"])
def test_it_is_made_again_under_the_same_claim(
    held: tuple[CheckpointDirectory, str], how: str
) -> None:
    """Run, claim and lineage stand as before, so later starts go on from what is saved now."""
    directory, run_id = held
    shutil.rmtree(directory.path)
    if how == "emptied":
        os.mkdir(directory.path)
    assert directory.renew(1)
    assert not directory.renew(1)
    commit(directory, run_id)
    after = CheckpointDirectory(directory.path)
    assert after.open() == run_id
    assert [entry.generation for entry in after.catalogue(run_id)] == [FIRST]
    assert after.parents() == (p.TermParent(term=1, parent=None),)


def test_a_missing_claim_is_not_a_newer_one(held: tuple[CheckpointDirectory, str]) -> None:
    """Nothing is written into what may be a bare mount point, and nobody is fenced."""
    directory, run_id = held
    empty(directory)
    with pytest.raises(StorageError, match="emptied, unmounted or made again"):
        commit(directory, run_id)
    assert os.listdir(directory.path) == []


def test_a_newer_claim_still_fences(held: tuple[CheckpointDirectory, str]) -> None:
    """Also one of the same number, by another start in a directory that was made again."""
    directory, run_id = held
    other = CheckpointDirectory(directory.path)
    other.open()
    other.claim(run_id, "another", 0, force=True)
    with pytest.raises(GuardError, match="fenced"):
        directory.renew(1)
    empty(directory)
    late = CheckpointDirectory(directory.path)
    late.open()
    late.claim(run_id, "another", 0, force=True)
    with pytest.raises(GuardError, match="fenced"):
        commit(directory, run_id)


def test_a_bare_mount_point_is_left_alone(
    held: tuple[CheckpointDirectory, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk comes back under its name; writing there meanwhile would fill another one."""
    directory, run_id = held
    empty(directory)
    points = mounts.mount_points()
    monkeypatch.setattr(directory._identity, "_mount", directory.path)
    monkeypatch.setattr(mounts, "mount_points", lambda: points)
    with pytest.raises(StorageError, match=f"nothing is mounted at {directory.path}"):
        directory.renew(1)
    assert os.listdir(directory.path) == []
    monkeypatch.setattr(mounts, "mount_points", lambda: points | {directory.path})
    assert directory.renew(1)
    commit(directory, run_id)


def test_a_table_that_cannot_be_read_is_no_unmount(
    held: tuple[CheckpointDirectory, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error is said as it is."""
    directory, _ = held
    empty(directory)

    def fail(point: str) -> bool:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(identity_module, "is_mounted", fail)
    with pytest.raises(StorageError, match="look for the mount point of: Input/output error"):
        directory.renew(1)


def test_the_directory_of_another_run_stays_his(held: tuple[CheckpointDirectory, str]) -> None:
    """Somebody began another run there meanwhile."""
    directory, _ = held
    empty(directory)
    theirs = CheckpointDirectory(directory.path).open()
    with pytest.raises(StorageError, match=f"belongs to run {theirs} now"):
        directory.renew(1)


def test_the_number_of_a_claim_never_falls(held: tuple[CheckpointDirectory, str]) -> None:
    """A keeper that knows term 1 asks for a newer one in a directory that has forgotten it."""
    directory, run_id = held
    empty(directory)
    assert directory.claim(run_id, "launch", 1, force=False, after=1) == 2


def test_no_commit_stands_on_a_base_that_is_gone(held: tuple[CheckpointDirectory, str]) -> None:
    """It could not be restored."""
    directory, run_id = held
    directory.create_generation(FIRST)
    base = Generation(term=1, step=1).name
    with pytest.raises(StorageError, match=r"COMMIT: is gone, and a shard is a difference to it"):
        directory.write_commit(
            run_id, FIRST, step=5, world_size=1, parent=None,
            records=({"rank": 0, "base": base},), health="good",
        )  # fmt: skip


def test_the_mount_point_of_a_path_is_the_nearest(tmp_path: Path) -> None:
    """It is one of the table, and a parent of the path."""
    point = mounts.mount_point_of(str(tmp_path / "not" / "there"))
    assert point in mounts.mount_points()
    assert os.path.commonpath([point, os.path.realpath(tmp_path)]) == point
    assert mounts.is_mounted(point)


def test_the_heartbeat_makes_it_again_and_says_so(held: tuple[CheckpointDirectory, str]) -> None:
    """Nothing else looks at the directory between two checkpoints."""
    directory, run_id = held
    heard: list[object] = []
    worker = DiskWorker(directory, run_id, lambda work: work(), heard.append, lambda *_: None)
    empty(directory)
    worker.beat(1)
    done = threading.Event()
    worker.submit(done.set)
    assert done.wait(60)
    assert heard == [p.DirectoryRenewed(term=1)]
