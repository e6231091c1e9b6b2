"""Keepers forked from a process that has imported everything: a start in milliseconds.

What a trainer calls is the product's own `ensure_keeper`; only the `subprocess.run` in it asks the
zygote instead of the system, with the same command, environment and log.
"""

import contextlib
import ctypes
import json
import os
import socket
import traceback
from typing import Any

from autockpt.executors.keeper import launch

FORKED_KEEPERS = {"TEST_FORKED_KEEPERS": "1"}
"""In the environment of a trainer that is to have them."""
ROOM = 2048
"""Bytes that the command line of a zygote leaves for that of a keeper."""
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

    def __init__(self, name: str) -> None:
        self._name = name

    def run(self, command: list[str], *, stdout: Any, env: dict[str, str], **_: Any) -> None:
        """The keeper of this command; returns when it has left its parent."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as asking:
            asking.connect("\0" + self._name)
            text = json.dumps({"command": command, "environment": env}).encode()
            socket.send_fds(asking, [text], [stdout.fileno()])
            asking.recv(16)
