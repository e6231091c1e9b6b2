"""Messages between a launcher and its ranks: lines of JSON, with descriptors.

Parked processes have their orders over it, and functions that are called again.  A process that is
stopped, or slow, reads nothing: no end waits for the other one without a limit.
"""

import contextlib
import json
import select
import socket
import struct
import time
from array import array
from collections import deque
from collections.abc import Mapping
from typing import Any

LINE_BYTES = 65536
"""Of one read; a line may need several."""
TAKE_S = 5.0
"""The other end reads a message within so long, or is given up."""


class Channel:
    """One end of a connection."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._pending = bytearray()
        self._descriptors: list[int] = []
        self._unsent: deque[tuple[memoryview, tuple[int, ...]]] = deque()

    def fileno(self) -> int:
        """For select."""
        return self._sock.fileno()

    def peer(self) -> int:
        """Process of the other end."""
        size = struct.calcsize("3i")
        return int(struct.unpack("3i", self._sock.getsockopt(
            socket.SOL_SOCKET, socket.SO_PEERCRED, size))[0])  # fmt: skip

    def send(
        self,
        message: Mapping[str, Any],
        descriptors: tuple[int, ...] = (),
        *,
        wait_s: float = TAKE_S,
    ) -> bool:
        """False: the other end has gone, or reads nothing; then no further message is for it."""
        self.post(message, descriptors)
        if self.flush(wait_s):
            return True
        self._unsent.clear()  # the descriptors may be closed by now
        with contextlib.suppress(OSError):  # it would take the next message for the rest of this
            self._sock.shutdown(socket.SHUT_WR)
        return False

    def post(self, message: Mapping[str, Any], descriptors: tuple[int, ...] = ()) -> None:
        """A message that `flush` sends."""
        data = memoryview(json.dumps(message).encode() + b"\n")
        self._unsent.append((data, descriptors))

    def flush(self, wait_s: float = 0.0) -> bool:
        """Whether all messages are sent; of one that is not read at once a part may be."""
        until_s = time.monotonic() + wait_s
        poll = select.poll()
        try:
            poll.register(self._sock, select.POLLOUT)
            while self._unsent:
                data, descriptors = self._unsent[0]
                try:
                    # `socket.send_fds` of Python 3.11 passes its flags over.
                    rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", descriptors))
                    sent = self._sock.sendmsg(
                        [data], [rights] if descriptors else [], socket.MSG_DONTWAIT
                    )
                except BlockingIOError:
                    left_s = until_s - time.monotonic()
                    if left_s <= 0.0 or not poll.poll(left_s * 1000):
                        return False
                    continue
                self._unsent.popleft()
                if sent < len(data):
                    self._unsent.appendleft((data[sent:], ()))
        except (OSError, ValueError):  # the other end has gone, or this one is closed
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
