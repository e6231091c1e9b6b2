"""Messages between a launcher and the functions of its ranks: lines of JSON, with descriptors.

The socket's name is in the abstract namespace: there is no file to clean up, and no path that is
too long.  Each end asks the kernel for the process of the other one.
"""

import contextlib
import json
import os
import select
import socket
import struct
from collections.abc import Mapping
from typing import Any

from autockpt import new_files
from autockpt.launch import environment

LINE_BYTES = 65536
"""Of one read; a line may need several."""


class Channel:
    """One end of a connection."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._pending = bytearray()
        self._descriptors: list[int] = []

    def fileno(self) -> int:
        """For select."""
        return self._sock.fileno()

    def peer(self) -> int:
        """Process of the other end."""
        size = struct.calcsize("3i")
        return int(struct.unpack("3i", self._sock.getsockopt(
            socket.SOL_SOCKET, socket.SO_PEERCRED, size))[0])  # fmt: skip

    def send(self, message: Mapping[str, Any], descriptors: tuple[int, ...] = ()) -> bool:
        """False: the other end has gone."""
        data = json.dumps(message).encode() + b"\n"
        try:
            sent = socket.send_fds(self._sock, [data], descriptors)
            self._sock.sendall(data[sent:])
        except OSError:
            return False
        return True

    def receive(self) -> tuple[list[dict[str, Any]], list[int]] | None:
        """Whole messages of one read, with the descriptors of the last; None: the end.

        Waits where the socket does.
        """
        try:
            data, descriptors, _, _ = socket.recv_fds(self._sock, LINE_BYTES, 2)
        except BlockingIOError:
            return [], []
        except OSError:
            return None
        if not data:
            return None
        self._descriptors += descriptors
        self._pending += data
        *lines, rest = bytes(self._pending).split(b"\n")
        self._pending = bytearray(rest)
        messages = [json.loads(line) for line in lines]
        taken, self._descriptors = (self._descriptors, []) if lines else ([], self._descriptors)
        return messages, taken

    def is_ready(self, wait_s: float) -> bool:
        """Whether `receive` would not wait, now or within so long."""
        poll = select.poll()
        try:
            poll.register(self._sock, select.POLLIN)
            return bool(poll.poll(wait_s * 1000))
        except (OSError, ValueError):  # it is closed
            return True

    def close(self) -> None:
        """The other end reads the end, and so does a thread that waits here."""
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        self._sock.close()


def listen(variables: Mapping[str, str]) -> socket.socket:
    """The launcher's socket.  Raises OSError."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.bind(_name(variables))
        sock.listen(128)
        sock.setblocking(False)
    except BaseException:
        sock.close()
        raise
    return sock


def accept(listener: socket.socket) -> Channel | None:
    """The next connection; None: there is none."""
    try:
        sock, _ = listener.accept()
    except OSError:
        return None
    sock.setblocking(False)
    return Channel(sock)


def connect(variables: Mapping[str, str]) -> Channel | None:
    """The rank's end; None: the parent of this process is no launcher that restarts so."""
    launcher = variables.get(environment.LAUNCHER_PID, "")
    if not launcher.isdecimal() or int(launcher) != os.getppid():
        return None
    sock = new_files.socket_clear_of_scripts(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
    channel = Channel(sock)
    try:
        sock.connect(_name(variables))
        if channel.peer() == int(launcher):
            return channel
    except OSError:
        pass
    sock.close()
    return None


def _name(variables: Mapping[str, str]) -> str:
    launch, launcher = variables[environment.LAUNCH_ID], variables[environment.LAUNCHER_PID]
    return f"\0autockpt-restarts-{launch}-{launcher}"
