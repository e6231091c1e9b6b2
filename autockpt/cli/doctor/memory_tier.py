"""Which process deaths the memory tier survives here: tried on real processes, not looked up.

A small tree is built as `autockpt run` builds it: launcher -> trainer -> (double fork, new session)
keeper, with one sealed memfd written by the trainer.  Then processes are killed, and the process
that should still hold the memory has to return its content.
"""

import contextlib
import hashlib
import mmap
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Callable
from typing import NoReturn

from autockpt.cli.doctor.finding import Finding
from autockpt.executors.linux.memory import create_memfd, seal
from autockpt.profiles.probes.host import read_text

PATTERN = hashlib.sha256(b"autockpt doctor").digest() * 4096
"""128 KiB that no other process has in memory."""
PATIENCE_S = 10.0


def check() -> list[Finding]:
    """All findings about the memory tier."""
    findings: list[Finding | None] = [_memfd(), _pidfd()]
    if findings[0] is not None and findings[0].status == "ok":
        findings += [
            _death("trainer_killed", "the trainer is killed (SIGKILL)", _kill_trainer),
            _death(
                "group_killed",
                "torchelastic kills the trainer's process group",
                _kill_trainer_group,
            ),
            _death("launcher_killed", "the launcher is killed (SIGKILL)", _kill_launcher),
            _death("keeper_killed", "the keeper is killed and a trainer lives", _kill_keeper),
        ]
    findings += [_container(), _oom_group(), _logout()]
    return [finding for finding in findings if finding is not None]


def _memfd() -> Finding:
    try:
        descriptor = create_memfd("autockpt-doctor")
    except (OSError, AttributeError) as error:
        return Finding(
            id="memory.memfd",
            status="broken",
            what=f"memory that outlives a process (memfd) cannot be made here: {error}",
            fix="allow memfd_create in the container's seccomp profile; until then checkpoints go "
            "to disk only",
        )
    try:
        os.ftruncate(descriptor, 4096)
        seal(descriptor)
        os.ftruncate(descriptor, 0)
    except OSError as error:
        if "not permitted" in str(error):
            return Finding(id="memory.memfd", status="ok", what="sealed memfd works")
        what = f"sealing a memfd fails: {error}"
    else:
        what = "a sealed memfd could be shrunk: seals have no effect here"
    finally:
        os.close(descriptor)
    return Finding(
        id="memory.memfd",
        status="broken",
        what=what,
        fix="use a kernel with memfd seals (Linux 3.17 and later; gVisor lacks them)",
    )


def _pidfd() -> Finding:
    child = os.fork()
    if child == 0:
        time.sleep(PATIENCE_S)
        os._exit(0)
    try:
        descriptor = os.pidfd_open(child)
    except (OSError, AttributeError) as error:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        return Finding(
            id="memory.pidfd",
            status="warning",
            what=f"pidfd is not available ({error}): a death is noticed by the closed socket alone",
            fix="use Linux 5.3 or later and a Python that was built for it (those of conda and uv "
            "may not be), and allow pidfd_open in the container's seccomp profile",
        )
    began = time.monotonic()
    os.kill(child, signal.SIGKILL)
    ready, _, _ = select.select([descriptor], [], [], PATIENCE_S)
    took_ms = (time.monotonic() - began) * 1e3
    os.waitpid(child, 0)
    os.close(descriptor)
    if not ready:
        return Finding(
            id="memory.pidfd",
            status="warning",
            what="a pidfd did not report a death: processes do not share a pid namespace",
            fix="run trainer and keeper in one container (or with a shared pid namespace)",
        )
    return Finding(
        id="memory.pidfd", status="ok", what=f"a death is noticed at once ({took_ms:.1f} ms)"
    )


class _Tree:
    """launcher -> trainer -> keeper, and a line to the keeper and to the trainer."""

    def __init__(self) -> None:
        self._to_keeper, keeper_end = socket.socketpair()
        self._to_trainer, trainer_end = socket.socketpair()
        read, write = os.pipe()
        sys.stdout.flush()
        sys.stderr.flush()
        self.launcher = os.fork()
        if self.launcher == 0:
            _become_launcher(keeper_end, trainer_end, write)
        keeper_end.close()
        trainer_end.close()
        os.close(write)
        self.trainer, self.keeper = _numbers(read)
        os.close(read)

    def keeper_holds(self) -> bool:
        """Whether the keeper is alive and its memory equals the trainer's bytes."""
        return _ask(self._to_keeper)

    def trainer_holds(self) -> bool:
        """Whether the trainer is alive and still holds the memory."""
        return _ask(self._to_trainer)

    def close(self) -> None:
        """End what is left of it."""
        for pid in (self.keeper, self.trainer, self.launcher):
            with contextlib.suppress(OSError):
                if pid:
                    os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(OSError):
            os.waitpid(self.launcher, 0)
        self._to_keeper.close()
        self._to_trainer.close()


def _become_launcher(keeper: socket.socket, trainer: socket.socket, tell: int) -> NoReturn:
    try:
        pid = os.fork()
        if pid == 0:
            _become_trainer(keeper, trainer, tell)
        keeper.close()
        trainer.close()
        os.close(tell)
        os.waitpid(pid, 0)
        time.sleep(PATIENCE_S)
    finally:
        os._exit(0)


def _become_trainer(keeper: socket.socket, mine: socket.socket, tell: int) -> NoReturn:
    try:
        os.setsid()  # as torchelastic starts its workers
        descriptor = create_memfd("autockpt-doctor")
        os.ftruncate(descriptor, len(PATTERN))
        with mmap.mmap(descriptor, len(PATTERN)) as memory:
            memory[:] = PATTERN
        seal(descriptor)
        trainer = os.getpid()
        middle = os.fork()
        if middle == 0:
            os.setsid()
            if os.fork():
                os._exit(0)
            mine.close()
            os.write(tell, f"{trainer} {os.getpid()}\n".encode())
            os.close(tell)
            _serve(keeper, descriptor)
        os.waitpid(middle, 0)
        keeper.close()
        os.close(tell)
        _serve(mine, descriptor)
    finally:
        os._exit(0)


def _serve(line: socket.socket, descriptor: int) -> None:
    """Answer every byte with whether the memory is intact; end with the line."""
    line.settimeout(PATIENCE_S)
    while line.recv(1):
        with mmap.mmap(descriptor, len(PATTERN), prot=mmap.PROT_READ) as memory:
            line.send(b"y" if memory[:] == PATTERN else b"n")


def _numbers(read: int) -> tuple[int, int]:
    ready, _, _ = select.select([read], [], [], PATIENCE_S)
    words = os.read(read, 100).split() if ready else []
    return (int(words[0]), int(words[1])) if len(words) == 2 else (0, 0)


def _ask(line: socket.socket) -> bool:
    line.settimeout(PATIENCE_S)
    try:
        line.send(b"?")
        return line.recv(1) == b"y"
    except OSError:
        return False


def _kill_trainer(tree: _Tree) -> bool:
    os.kill(tree.trainer, signal.SIGKILL)
    return tree.keeper_holds()


def _kill_trainer_group(tree: _Tree) -> bool:
    os.killpg(tree.trainer, signal.SIGKILL)
    return tree.keeper_holds()


def _kill_launcher(tree: _Tree) -> bool:
    os.kill(tree.launcher, signal.SIGKILL)
    os.waitpid(tree.launcher, 0)
    return tree.keeper_holds()


def _kill_keeper(tree: _Tree) -> bool:
    os.kill(tree.keeper, signal.SIGKILL)
    return tree.trainer_holds()


def _death(name: str, event: str, kill: Callable[[_Tree], bool]) -> Finding:
    try:
        tree = _Tree()
        try:
            survived = tree.keeper > 0 and kill(tree)
        finally:
            tree.close()
    except OSError as error:
        return Finding(
            id=f"memory.{name}",
            status="warning",
            what=f"could not try what happens when {event}: {error}",
            fix="see whether the process limit (ulimit -u, pids.max) allows a few processes",
        )
    if survived:
        return Finding(
            id=f"memory.{name}", status="ok", what=f"the memory tier survives when {event}"
        )
    return Finding(
        id=f"memory.{name}",
        status="warning",
        what=f"the memory tier is lost when {event}: something ends the keeper with it",
        fix="count this as a node failure (failures.process_share in the policy); look for a "
        "supervisor that kills whole process trees (systemd KillMode, Slurm, bwrap)",
    )


def _container() -> Finding | None:
    name = (read_text("/proc/1/comm") or "?").strip()
    ancestors = _ancestors()
    if 1 in ancestors[:2] or os.getpid() == 1:
        return Finding(
            id="memory.pid1",
            status="warning",
            what="this shell (or the launcher) is process 1: when it ends, the kernel ends the "
            "keeper with it",
            fix="start the container with an init process (docker run --init), or count on disk",
        )
    return Finding(
        id="memory.pid1",
        status="note",
        what=f"memory is lost with the node or container (process 1 is {name}); disk is for that",
    )


def _ancestors() -> list[int]:
    pids: list[int] = []
    pid = os.getpid()
    while pid > 1 and len(pids) < 64:
        stat = read_text(f"/proc/{pid}/stat") or ""
        fields = stat.rpartition(")")[2].split()
        pid = int(fields[1]) if len(fields) > 1 else 0
        pids.append(pid)
    return pids


def _oom_group() -> Finding | None:
    for line in (read_text("/proc/self/cgroup") or "").splitlines():
        number, _, path = line.split(":", 2)
        if number != "0":
            continue
        value = read_text(f"/sys/fs/cgroup{path}/memory.oom.group")
        if value is not None and value.strip() == "1":
            return Finding(
                id="memory.oom_group",
                status="warning",
                what="memory.oom.group is 1: running out of memory ends the keeper too",
                fix="set memory.oom.group to 0 for the job's cgroup, or leave more headroom",
            )
    return None


def _logout() -> Finding | None:
    settings = read_text("/etc/systemd/logind.conf") or ""
    for line in settings.splitlines():
        if line.replace(" ", "").lower() == "killuserprocesses=yes" and os.getuid():
            return Finding(
                id="memory.logout",
                status="warning",
                what="logind ends all processes of a user at logout, the keeper too",
                fix="loginctl enable-linger, or start the job in a service",
            )
    return None
