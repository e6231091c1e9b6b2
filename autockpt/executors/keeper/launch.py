"""Starts a keeper beside a run, finds the one that is there, and lets it go.

The keeper is a session of its own: torchelastic kills the process groups of its workers, and the
launcher may die as well.  A lock decides races; the socket answering is what counts as alive.
"""

import contextlib
import fcntl
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from autockpt import new_files
from autockpt.executors.keeper.wire import (
    WIRE_VERSION,
    Connection,
    Status,
    StatusWanted,
)
from autockpt.executors.storage.event_log import newest_bytes
from autockpt.executors.storage.runtime_paths import (
    is_removed,
    keeper_directories,
    keeper_directory,
)
from autockpt.values.errors import AutockptError, DirectoryBusyError, ProtocolError
from autockpt.values.policy_keys.paths import is_store_url

START_TIMEOUT_S = 60.0
"""A keeper imports little; on a machine with many more processes than cores it took over 20 s."""
MAX_ADDRESS_BYTES = 107
ANSWER_S = 2.0
_TOLD_BYTES = 2000
"""Of the log of a keeper that did not start."""
RESPAWN_S = 1.0
"""A keeper answers 10 ms after its fork; one that does not by then died on the way.  A second one
that was not needed finds the lock taken and leaves."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KeeperStart:
    """How to start a keeper."""

    run_directory: str
    node: int
    command: tuple[str, ...]
    """With `--child` behind it the keeper stays its parent's child."""
    environment: dict[str, str]
    log_path: str


_starter: Callable[[KeeperStart], bool] | None = None


def start_keepers_by(starter: Callable[[KeeperStart], bool] | None) -> None:
    """From now on `starter` starts the keepers of this process, for a framework that does it.

    It returns False where it could not, and says why: then they are started as without it.
    """
    global _starter
    _starter = starter


def socket_path(run_directory: str, node: int) -> str:
    """Path of the keeper's socket."""
    return os.path.join(keeper_directory(run_directory, node), "socket")


@contextlib.contextmanager
def socket_address(path: str) -> Iterator[str]:
    """Yield a socket address for a path: it has at most 107 bytes, a path may have more."""
    if len(os.fsencode(path)) <= MAX_ADDRESS_BYTES:
        yield path
        return
    fd = os.open(os.path.dirname(path), os.O_PATH | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{fd}/{os.path.basename(path)}"
    finally:
        os.close(fd)


def connect(run_directory: str, node: int, *, timeout_s: float = 5.0) -> Connection:
    """A connection to the keeper.  Raises OSError when there is none."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    try:
        sock.settimeout(timeout_s)
        with socket_address(socket_path(run_directory, node)) as address:
            sock.connect(address)
        sock.settimeout(None)
    except OSError:
        sock.close()
        raise
    return Connection(new_files.socket_clear_of_scripts(sock))


def ensure_keeper(run_directory: str, node: int, *, checkpoints: str, run_id: str = "") -> None:
    """Starts the keeper of this node unless one answers.  Raises AutockptError with its log.

    `run_id`: the run that lives, which the keeper keeps where the directory has lost its own.
    Raises DirectoryBusyError where one keeps checkpoints elsewhere, or is of another version of
    autockpt, and does not leave.
    """
    _end_removed(run_directory, node)
    if is_store_url(checkpoints):
        _require_place(run_directory, node, checkpoints)
    if _answers(run_directory, node) and _other_version(run_directory, node) is None:
        return
    folder = keeper_directory(run_directory, node)
    with open(os.path.join(folder, "start.lock"), "w", opener=new_files.private) as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        _require_version(run_directory, node)
        if _answers(run_directory, node):
            return
        start = _start_of(run_directory, node, checkpoints, run_id)
        begin: Callable[[KeeperStart], object]
        begin = _spawn if _starter is None or not _starter(start) else _starter
        deadline = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < deadline:
            begin(start)
            respawn = min(deadline, time.monotonic() + RESPAWN_S)
            while time.monotonic() < respawn:
                if _answers(run_directory, node):
                    return
                time.sleep(0.005)
    raise AutockptError(
        f"the keeper of node {node} did not start within {START_TIMEOUT_S:.0f} s; its log is "
        f"{start.log_path}: {_tail(start.log_path)}"
    )


def _end_removed(run_directory: str, node: int) -> None:
    """A keeper whose run was removed leaves first: its memory is no memory of the run here now.

    Raises DirectoryBusyError when it does not.
    """
    if _is_stale(run_directory, node) and not release_keeper(run_directory, node):
        raise DirectoryBusyError(
            f"{run_directory}: the keeper of node {node} of a run that was removed from here does "
            "not leave; end it, or use another --run-dir"
        )


def _is_stale(run_directory: str, node: int) -> bool:
    status = _status(run_directory, node)
    return status is not None and _is_of_removed(run_directory, node, status)


def _is_of_removed(run_directory: str, node: int, status: Status) -> bool:
    """Whether the run of a keeper was removed, and none of its ranks will come again."""
    if not status.is_orphan or status.inode is None:
        return False
    with contextlib.suppress(OSError):
        return is_removed(
            run_directory, node, checkpoints=status.checkpoints, run_id=status.run_id,
            inode=status.inode,
        )  # fmt: skip
    return False


def _require_place(run_directory: str, node: int, checkpoints: str) -> None:
    """A keeper of another place leaves first.  Raises DirectoryBusyError when it does not."""
    status = keeper_status(run_directory, node)
    if status is None or status.checkpoints in ("", checkpoints.rstrip("/")):
        return
    if status.trainers or not release_keeper(run_directory, node):
        raise DirectoryBusyError(
            f"{run_directory}: the keeper of node {node} (pid {status.pid}) keeps checkpoints in "
            f"{status.checkpoints}, expected {checkpoints}; wait for its training to end, or use "
            "another --run-dir"
        )


def _require_version(run_directory: str, node: int) -> None:
    """A keeper of another version leaves first: autockpt was installed anew while it lived.

    Raises DirectoryBusyError when it does not.
    """
    other = _other_version(run_directory, node)
    if other is None:
        return
    if other.trainers or not release_keeper(run_directory, node):
        serves = ", ".join(map(str, other.trainers))
        raise DirectoryBusyError(
            f"{run_directory}: the keeper of node {node} (pid {other.pid}) is of "
            + (
                f"another version of autockpt (messages of version {other.wire_version}, expected "
                f"{WIRE_VERSION}) and "
                if other.wire_version
                else "an older version of autockpt and "
            )
            + (f"serves ranks {serves}" if serves else "does not leave")
            + "; wait for its training to end, or use another --run-dir"
        )


def _other_version(run_directory: str, node: int) -> Status | None:
    """The status of a keeper that does not speak as we do; None: there is none."""
    status = keeper_status(run_directory, node)
    return None if status is None or status.wire_version == WIRE_VERSION else status


def release_keeper(run_directory: str, node: int, *, wait_s: float = 60.0) -> bool:
    """Tells the keeper to leave when everything is written; False: after `wait_s` it is there yet.

    One that does not answer in time is at work, on a machine that may have stood still.
    """
    deadline = time.monotonic() + wait_s
    while time.monotonic() < deadline:
        try:
            connection = connect(run_directory, node, timeout_s=ANSWER_S)
        except (BlockingIOError, TimeoutError):
            pass
        except OSError:
            return True
        else:
            _ask(connection, leave=True)
        time.sleep(0.05)
    return False


def keeper_status(run_directory: str, node: int, *, answer_s: float = ANSWER_S) -> Status | None:
    """Return the keeper's status; None without an answer, and of a run that was removed."""
    status = _status(run_directory, node, answer_s=answer_s)
    if status is not None and _is_of_removed(run_directory, node, status):
        return None
    return status


def _status(run_directory: str, node: int, *, answer_s: float = ANSWER_S) -> Status | None:
    try:
        connection = connect(run_directory, node, timeout_s=answer_s)
    except OSError:
        return None
    return _ask(connection, leave=False, answer_s=answer_s)


def _ask(connection: Connection, *, leave: bool, answer_s: float = ANSWER_S) -> Status | None:
    try:
        connection.sock.settimeout(answer_s)
        connection.send(StatusWanted(leave_when_drained=leave))
        for message, _ in connection.receive():
            if isinstance(message, Status):
                return message
    except (OSError, EOFError, ProtocolError):
        return None
    finally:
        connection.close()
    return None


def keepers_here(run_directory: str) -> tuple[int, ...]:
    """Nodes whose keepers of this run answer on this machine, ascending."""
    return tuple(
        node for node in keeper_directories(run_directory)
        if _answers(run_directory, node) and not _is_stale(run_directory, node)
    )  # fmt: skip


def launches_here(run_directory: str, *, in_memory: bool = False) -> frozenset[str]:
    """Ids of the launches that hold the run, as its keepers on this machine say.

    `in_memory`: only of keepers that have slots, where no storage is needed for a restart.
    """
    found = (keeper_status(run_directory, node) for node in keeper_directories(run_directory))
    return frozenset(
        status.claimed_by.launch_id
        for status in found
        if status is not None and status.claimed_by and (status.slots_bytes or not in_memory)
    )


def other_trainers(run_directory: str, launch_id: str, *, within_s: float) -> str:
    """A launch other than this one whose ranks train in the run on this machine; "": there is none.

    Ranks that have lost their launcher make a last checkpoint: they may take `within_s` to end.
    """
    deadline = time.monotonic() + within_s
    while True:
        found = (keeper_status(run_directory, node) for node in keeper_directories(run_directory))
        others = [
            status.claimed_by.launch_id
            for status in found
            if status is not None and status.trainers and status.claimed_by is not None
            and status.claimed_by.launch_id != launch_id
        ]  # fmt: skip
        if not others or time.monotonic() >= deadline:
            return others[0] if others else ""
        time.sleep(0.1)


def _answers(run_directory: str, node: int) -> bool:
    try:
        connect(run_directory, node, timeout_s=ANSWER_S).close()
    except OSError:
        return False
    return True


def _start_of(run_directory: str, node: int, checkpoints: str, run_id: str) -> KeeperStart:
    folder = os.path.join(run_directory, "logs")
    new_files.make_directory(folder, new_files.PRIVATE_DIRECTORY)
    command = (
        sys.executable, "-m", "autockpt.executors.keeper", "--run-directory", run_directory,
        "--node", str(node), "--checkpoints", checkpoints, "--run-id", run_id,
    )  # fmt: skip
    environment = dict(os.environ)
    # In front of the user's own: that may be relative (we run in /) or know nothing of us.
    path = [_package_root(), *filter(None, [environment.get("PYTHONPATH")])]
    environment["PYTHONPATH"] = os.pathsep.join(path)
    return KeeperStart(
        run_directory=run_directory, node=node, command=command, environment=environment,
        log_path=os.path.join(folder, f"keeper-{node:03d}.log"),
    )  # fmt: skip


def _spawn(start: KeeperStart) -> None:
    with (
        _log_of(start) as log,
        open(os.devnull, "rb") as nothing,
        contextlib.suppress(subprocess.TimeoutExpired),  # the caller says it, with this log
    ):
        # The keeper daemonises itself (double fork): this child is gone in a moment.
        subprocess.run(
            list(start.command), stdin=nothing, stdout=log, stderr=log, start_new_session=True,
            check=False, timeout=START_TIMEOUT_S, env=start.environment, cwd="/",
        )  # fmt: skip


def _log_of(start: KeeperStart) -> BinaryIO:
    """Its log, or nowhere: a directory that became read-only must not keep a restart's keeper."""
    try:
        return open(start.log_path, "ab", opener=new_files.private)
    except OSError:
        return open(os.devnull, "ab")


def _package_root() -> str:
    here = os.path.abspath(__file__)
    for _ in range(4):
        here = os.path.dirname(here)
    return here


def _tail(path: str) -> str:
    text = newest_bytes(Path(path), _TOLD_BYTES).decode(errors="replace")
    return text.strip() or "(empty)"
