"""Keepers forked from a process that has imported everything: a start in milliseconds.

What a trainer calls is the product's own `ensure_keeper`; only the `subprocess.run` in it asks the
zygote instead of the system, with the same command, environment and log.  Tests that attach in
their own process ask one that has imported the keeper and nothing else (`nursery`).
"""

import contextlib
import ctypes
import gc
import json
import os
import select
import signal
import socket
import subprocess
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from autockpt.executors.keeper import launch

FORKED_KEEPERS = {"TEST_FORKED_KEEPERS": "1"}
"""In the environment of a trainer that is to have them."""
ROOM = 2048
"""Bytes that the command line of a zygote leaves for that of a keeper."""
ROOT = Path(__file__).resolve().parents[3]
_MOST = 2**16


class Nursery:
    """The zygote's end."""

    def __init__(self) -> None:
        self.name = f"autockpt-zygote-{os.getpid()}"
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.bind("\0" + self.name)
        self._listener.listen(64)
        self._listener.setblocking(False)

    def fileno(self) -> int:
        """Readable when somebody asks."""
        return self._listener.fileno()

    def serve(self) -> None:
        """Carries out all orders that have come."""
        while True:
            try:
                asking, _ = self._listener.accept()
            except BlockingIOError:
                return
            with asking, contextlib.suppress(OSError):  # who asked may be dead
                asking.setblocking(True)
                text, fds, _, _ = socket.recv_fds(asking, _MOST, 1)
                if text:
                    self._carry_out(asking, json.loads(text), fds[0])
                    asking.send(b"done")

    def forget(self) -> None:
        """In a process that closes its descriptors by number: the listener holds none any more."""
        self._listener.detach()

    def leave(self) -> None:
        """In a trainer: its keepers come from here, if its environment says so."""
        self._listener.close()
        if FORKED_KEEPERS.items() <= os.environ.items():
            launch.subprocess = Forking(self.name)  # type: ignore[attr-defined, assignment]

    def _carry_out(self, asking: socket.socket, order: dict[str, Any], log: int) -> None:
        pid = os.fork()
        if not pid:
            self._listener.close()
            asking.close()
            _be_the_keeper(order["command"], order["environment"], log)
        os.close(log)
        os.waitpid(pid, 0)  # at once: a keeper leaves its parent


def _be_the_keeper(command: list[str], environment: dict[str, str], log: int) -> None:
    from autockpt.executors.keeper.__main__ import main

    status = 1
    try:
        os.setsid()
        _call_it(command)
        nothing = os.open(os.devnull, os.O_RDONLY)
        for source, target in ((nothing, 0), (log, 1), (log, 2)):
            os.dup2(source, target)
        os.closerange(3, max(nothing, log) + 1)
        os.environ.clear()
        os.environ.update(environment)
        os.chdir("/")
        status = main(command[3:])
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)


def _call_it(command: list[str]) -> None:
    """Its command line is what the process table shows, and what tests find keepers by."""
    with open("/proc/self/stat") as file:
        start, stop = map(int, file.read().rsplit(")", 1)[1].split()[45:47])
    text = b"\0".join(os.fsencode(word) for word in command) + b"\0"
    ctypes.memmove(start, text.ljust(stop - start, b"\0"), stop - start)


class Forking:
    """In a trainer, what `launch` sees as the module `subprocess`."""

    TimeoutExpired = subprocess.TimeoutExpired

    def __init__(self, name: str, path: str | None = None) -> None:
        """`path`: a keeper with another PYTHONPATH is started, for it may import something else."""
        self._name, self._path = name, path

    def run(self, command: list[str], *, stdout: Any, env: dict[str, str], **started: Any) -> None:
        """The keeper of this command; returns when it has left its parent."""
        if self._path not in (None, env.get("PYTHONPATH")):
            subprocess.run(command, stdout=stdout, env=env, **started)
            return
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as asking:
            asking.connect("\0" + self._name)
            text = json.dumps({"command": command, "environment": env}).encode()
            socket.send_fds(asking, [text], [stdout.fileno()])
            asking.recv(16)


# --- a process of its own ------------------------------------------------------------------------


@contextlib.contextmanager
def nursery() -> Iterator[Forking]:
    """A process that forks keepers for this one, until the block ends."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    command = [sys.executable, "-m", "tests.jobs.kill.forked_keepers", " " * ROOM]
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT
    )
    with process:
        assert process.stdin is not None
        assert process.stdout is not None
        yield Forking(process.stdout.readline().strip(), path)
        process.stdin.close()
        process.wait(timeout=60)


def main() -> None:
    """Import, tell the name, then fork on demand; ends when stdin does."""
    import autockpt.executors.keeper.__main__  # noqa: F401

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    serving = Nursery()
    print(serving.name, flush=True)
    gc.collect()
    gc.freeze()
    while 0 not in select.select([0, serving], [], [])[0]:
        serving.serve()


if __name__ == "__main__":
    main()
