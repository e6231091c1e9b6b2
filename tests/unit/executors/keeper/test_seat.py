"""Where a keeper is found: its lock, its socket, and the note of them in the run directory."""

import errno
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import pytest

from autockpt.executors.keeper import __main__ as keeper_main
from autockpt.executors.keeper import launch
from autockpt.executors.keeper.__main__ import Seat
from autockpt.executors.keeper.launch import connect
from autockpt.executors.keeper.server import LINGER_S, Keeper
from autockpt.executors.keeper.wire import WIRE_VERSION, Status
from autockpt.executors.storage import runtime_paths
from autockpt.executors.storage.directory.directory import CheckpointDirectory
from autockpt.values.errors import AutockptError, DirectoryBusyError


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run directory, and two places for temporary files; the first is in force."""
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    for name in ("first", "second", "run/logs"):
        (tmp_path / name).mkdir(parents=True)
    monkeypatch.setenv("TMPDIR", str(tmp_path / "first"))
    return tmp_path / "run"


def noted(run: Path) -> None:
    """Waits for the note, which a thread writes."""
    deadline = time.monotonic() + 60
    while not list((run / "logs").glob("*.at")):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_start_with_another_tmpdir_finds_the_keeper(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So does a list of keepers; a copy of the run has none."""
    seat = Seat(str(run), 2)
    assert seat.take()
    with seat.listen():
        noted(run)
        mine = runtime_paths.keeper_directory(str(run), 2)
        monkeypatch.setenv("TMPDIR", str(run.parent / "second"))
        assert runtime_paths.keeper_directory(str(run), 2) == mine
        assert runtime_paths.keeper_directories(str(run)) == {2: mine}
        connect(str(run), 2).close()
        assert not Seat(str(run), 2).take()
        shutil.copytree(run, run.parent / "copy")
        assert runtime_paths.keeper_directory(str(run.parent / "copy"), 2) != mine
    seat.leave()


def test_a_keeper_whose_directory_was_removed_is_found_again(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the end of a session or of a batch job does with its temporary files."""
    seat = Seat(str(run), 0)
    assert seat.take()
    with seat.listen():
        noted(run)
        assert seat.renew() is None
        former = runtime_paths.keeper_directory(str(run), 0)
        shutil.rmtree(os.path.dirname(former))
        again = seat.renew()
        assert again is not None
        with again:
            connect(str(run), 0).close()
            assert seat.renew() is None
    seat.leave()


@pytest.mark.parametrize("renews", [True, False])
def test_a_keeper_that_lost_its_place_leaves_the_other_one_alone(
    run: Path, monkeypatch: pytest.MonkeyPatch, renews: bool
) -> None:
    """It neither waits for the place nor removes the socket of the one who has it."""
    seat, other = Seat(str(run), 0), Seat(str(run), 0)
    assert seat.take()
    with seat.listen():
        noted(run)
        shutil.rmtree(os.path.dirname(runtime_paths.keeper_directory(str(run), 0)))
        assert other.take()
        monkeypatch.setattr(keeper_main, "time", NoWait())
        if renews:
            assert seat.renew() is None
        with other.listen():
            assert seat.renew() is None
            seat.leave()
            connect(str(run), 0).close()
    other.leave()


class NoWait:
    """A clock for those who must not wait."""

    monotonic = staticmethod(time.monotonic)

    def sleep(self, seconds: float) -> None:
        """Nobody may."""
        raise AssertionError(f"waits {seconds} s")


def test_a_directory_in_the_run_is_not_looked_at(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may be on a network file system that hangs, and the keeper with it."""
    os.mkdir(runtime_paths.keepers_directory(), 0o755)  # others may write there, as far as is known
    seat = Seat(str(run), 0)
    assert seat.take()
    with seat.listen() as listener:
        noted(run)
        assert Path(runtime_paths.keeper_directory(str(run), 0)).parent == run
        os.unlink(listener.getsockname())
        assert seat.renew() is None
    seat.leave()


def test_a_note_that_names_a_strange_directory_is_passed_over(run: Path) -> None:
    """It is of another run, or others may write there."""
    own = runtime_paths.keeper_directory(str(run), 0)
    other = runtime_paths.keeper_directory(str(run / "other"), 0)
    Path(runtime_paths._note_of(str(run), 0)).write_text(other)
    assert runtime_paths.keeper_directory(str(run), 0) == own
    Path(runtime_paths._note_of(str(run), 0)).write_text("/tmp/" + os.path.basename(own))
    assert runtime_paths.keeper_directory(str(run), 0) == own


def test_a_keeper_that_does_not_start_is_an_error_of_ours(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A machine so loaded that its start takes too long: said with the log, no bare exception."""

    def never(command: list[str], *, timeout: float, **how: object) -> None:
        time.sleep(timeout)
        raise subprocess.TimeoutExpired(command, timeout)

    monkeypatch.setattr(launch, "START_TIMEOUT_S", 0.05)
    monkeypatch.setattr(subprocess, "run", never)
    with pytest.raises(AutockptError, match=r"did not start within .*; its log is "):
        launch.ensure_keeper(str(run), 0, checkpoints=str(run / "checkpoints"))


def test_a_keeper_of_another_place_in_a_store_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """It leaves, where it has no training; else the start ends."""
    released: list[int] = []
    status = Status(
        pid=1, term=1, trainers=(), memory_committed="", durable="", draining=False,
        slots_bytes=0, checkpoints="s3://bucket/old", wire_version=WIRE_VERSION,
    )  # fmt: skip
    monkeypatch.setattr(launch, "_answers", lambda *_: True)
    monkeypatch.setattr(launch, "keeper_status", lambda *_: status)
    monkeypatch.setattr(launch, "release_keeper", lambda _, node: not released.append(node))
    launch.ensure_keeper("run", 0, checkpoints="s3://bucket/old/")
    assert released == []
    launch.ensure_keeper("run", 0, checkpoints="s3://bucket/new")
    assert released == [0]
    status = replace(status, trainers=(0,))
    with pytest.raises(DirectoryBusyError, match=r"s3://bucket/old, expected s3://bucket/new"):
        launch.ensure_keeper("run", 0, checkpoints="s3://bucket/new")


def test_a_keeper_of_another_version_gives_its_place_to_one_of_ours(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """autockpt was installed anew while it lived: the next start goes on with a new keeper.

    While its training lives, the start is refused with the reason, and nothing is ended.
    """
    checkpoints = str(run / "checkpoints")
    launch.ensure_keeper(str(run), 0, checkpoints=checkpoints)
    first = launch.keeper_status(str(run), 0)
    assert first is not None
    monkeypatch.setattr(launch, "WIRE_VERSION", WIRE_VERSION + 1)
    with monkeypatch.context() as living:
        status = replace(first, trainers=(0,))
        living.setattr(launch, "keeper_status", lambda *_: status)
        with pytest.raises(DirectoryBusyError, match=r"another version of autockpt .* ranks 0;"):
            launch.ensure_keeper(str(run), 0, checkpoints=checkpoints)
    launch.ensure_keeper(str(run), 0, checkpoints=checkpoints)
    second = launch.keeper_status(str(run), 0)
    assert second is not None
    assert second.pid != first.pid
    assert launch.release_keeper(str(run), 0)


class Removal(NamedTuple):
    """What happens to the directories of a run, and whether they count as removed then."""

    change: Callable[[Path], object]
    is_removed: bool
    store: str = ""


def renamed(run: Path) -> None:
    """Another directory stands at its path; this one lives on, and so does its number."""
    run.rename(run.with_name("elsewhere"))
    shutil.copytree(run.with_name("elsewhere"), run)


def of_another_job(run: Path) -> None:
    """It has a RUN of its own."""
    renamed(run)
    (run / "checkpoints" / "RUN").unlink()
    CheckpointDirectory(str(run / "checkpoints")).open()


@pytest.mark.parametrize(
    "case",
    [
        Removal(lambda run: None, is_removed=False),
        Removal(shutil.rmtree, is_removed=True),
        Removal(shutil.rmtree, is_removed=False, store="s3://bucket/run"),
        Removal(renamed, is_removed=False),
        Removal(of_another_job, is_removed=True),
        Removal(lambda run: shutil.rmtree(run / "checkpoints"), is_removed=False),
        Removal(lambda run: (run / "checkpoints" / "RUN").write_bytes(b"?"), is_removed=False),
        Removal(lambda run: loop_of_links(run / "checkpoints"), is_removed=False),
    ],
)
def test_only_absence_says_that_a_run_was_removed(run: Path, case: Removal) -> None:
    """An error of its storage does not, and where its RUN is, nothing was removed."""
    checkpoints = str(run / "checkpoints")
    run_id = CheckpointDirectory(checkpoints).open()
    runtime_paths.note_directory(str(run), 0)
    found = run.stat()
    case.change(run)
    is_removed = runtime_paths.is_removed(
        str(run), 0, checkpoints=case.store or checkpoints, run_id=run_id,
        inode=(found.st_dev, found.st_ino),
    )  # fmt: skip
    assert is_removed is case.is_removed


def loop_of_links(path: Path) -> None:
    """What is asked for there is an error (ELOOP), for root, too."""
    shutil.rmtree(path)
    path.symlink_to(path)


@pytest.mark.parametrize(
    ("code", "launcher", "leaves"),
    [
        (errno.ENOENT, "none", True),
        (errno.ENOTDIR, "dead", True),
        (errno.ENOENT, "alive", False),
        *[(code, "none", False) for code in (errno.EIO, errno.ESTALE, errno.ENOTCONN)],
    ],
)
def test_a_keeper_leaves_a_run_that_was_removed_and_no_other(
    run: Path, monkeypatch: pytest.MonkeyPatch, code: int, launcher: str, leaves: bool
) -> None:
    """Not at the first look, and not while a launcher may start ranks again."""
    keeper = Keeper(str(run), 0, str(run / "checkpoints"))
    starter = subprocess.Popen(["sleep", "60"])
    if launcher == "dead":
        keeper._connections.await_launcher(starter.pid)
        starter.kill()
        starter.wait()
    elif launcher == "alive":
        keeper._connections.await_launcher(starter.pid)

    def fails(*_: object, **__: object) -> None:
        raise OSError(code, os.strerror(code))

    with monkeypatch.context() as failing:
        failing.setattr(runtime_paths, "read_small", fails)
        failing.setattr(os, "stat", fails)
        keeper._look_for_run()
        assert not keeper._finished()
        keeper._look_for_run()
    assert keeper._finished() is leaves
    keeper._had_trainers, keeper._lonely_since = True, time.monotonic() - LINGER_S - 1
    assert keeper._finished() is (launcher != "alive")
    starter.kill()
    starter.wait()


@pytest.mark.parametrize("can_start", [True, False])
def test_another_process_may_be_the_parent_of_a_keeper(run: Path, can_start: bool) -> None:
    """It waits for its child then; where it cannot start one, the keeper is a daemon."""
    children: list[subprocess.Popen[bytes]] = []

    def start_child(start: launch.KeeperStart) -> bool:
        assert (start.run_directory, start.node) == (str(run), 0)
        if can_start and not children:
            command = [*start.command, "--child"]
            children.append(subprocess.Popen(command, env=start.environment, cwd="/"))
        return can_start

    launch.start_keepers_by(start_child)
    try:
        launch.ensure_keeper(str(run), 0, checkpoints=str(run / "checkpoints"))
    finally:
        launch.start_keepers_by(None)
    status = launch.keeper_status(str(run), 0)
    assert status is not None
    assert (status.pid in [child.pid for child in children]) is can_start
    assert launch.release_keeper(str(run), 0)
    for child in children:
        assert child.wait(timeout=60) == 0


@pytest.mark.root
@pytest.mark.skipif(shutil.which("setpriv") is None, reason="needs setpriv (util-linux)")
def test_a_keeper_without_rights_is_not_the_first_to_be_killed() -> None:
    """Its parent may be, as a worker of Ray is: with all checkpoints in memory it must not."""
    code = (
        "from pathlib import Path; score = Path('/proc/self/oom_score_adj'); "
        "score.write_text('1000'); "
        "from autockpt.executors.keeper.__main__ import avoid_oom_kills; avoid_oom_kills(); "
        "print(score.read_text())"
    )
    done = subprocess.run(
        ["setpriv", "--bounding-set=-sys_resource", sys.executable, "-c", code],
        check=True, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.stdout.strip() == "0"
