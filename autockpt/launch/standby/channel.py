"""Messages between a launcher and its ranks: lines of JSON, with descriptors.

Parked processes have their orders over it, and functions that are called again.
"""

import contextlib
import json
import select
import socket
import struct
import time
from collections.abc import Mapping
from typing import Any

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

    def next_message(self, wait_s: float) -> dict[str, Any] | None:
        """The next one alone; None: the end, or none within so long."""
        until_s = time.monotonic() + wait_s
        while self.is_ready(max(0.0, until_s - time.monotonic())):
            heard = self.receive()
            if heard is None:
                return None
            if heard[0]:
                return heard[0][-1]
        return None

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

    def leave(self) -> None:
        """Another process has this end, too, and keeps it."""
        self._sock.close()
