"""The sockets of the keeper's loop: connections of trainers, the ends of processes, posted work.

One thread runs `turn`.  Every other thread only calls `post`.
"""

import contextlib
import os
import select
import selectors
import socket
import struct
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

from autockpt.executors.keeper import wire
from autockpt.executors.storage.directory.claims import pid_start
from autockpt.values.errors import ProtocolError


class Receiver(Protocol):
    """Takes the messages of connections."""

    def receive(self, connection: wire.Connection, message: Any, descriptors: list[int]) -> None:
        """Handles a message; owns its descriptors from now on."""

    def connection_closed(self, connection: wire.Connection) -> None:
        """Handles the end of a connection, or of the process behind it."""


class Connections:
    """Accepts, reads and closes connections, and wakes the loop for posted work."""

    def __init__(self, receiver: Receiver, log: Callable[[str], None]) -> None:
        self._receiver = receiver
        self._log = log
        self._posted: deque[Callable[[], None]] = deque()
        self._wake_read, self._wake_write = socket.socketpair()
        self._wake_read.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._launchers: dict[int, int | None] = {}
        """By process the descriptor of each launcher, readable when that has ended; None where the
        system has none."""
        self._selector.register(self._wake_read, selectors.EVENT_READ, self._woken)

    def post(self, work: Callable[[], None]) -> None:
        """Runs `work` in the loop's thread; callable from any thread."""
        self._posted.append(work)
        with contextlib.suppress(OSError):
            self._wake_write.send(b"x")

    def listen(self, listener: socket.socket) -> None:
        """Accepts connections of this user at a socket."""
        listener.setblocking(False)
        self._selector.register(listener, selectors.EVENT_READ, self._accept)

    def turn(self, wait_s: float) -> None:
        """Waits for messages, at most `wait_s`; handles them, then the posted work."""
        for key, _ in self._selector.select(timeout=wait_s):
            key.data(key.fileobj)
        while self._posted:
            self._posted.popleft()()

    def watch(self, connection: wire.Connection) -> int | None:
        """Watch the process behind a connection; its descriptor, None where the system has none.

        Its end is seen at once: processes that it forked may hold its connection for long.
        """
        try:
            process = os.pidfd_open(peer_of(connection.sock)[0])
        except ProcessLookupError:
            self.post(lambda: self.drain(connection))
        except (OSError, AttributeError):
            # An old kernel, a Python built for one, a process we cannot see: the connection tells.
            pass
        else:
            self._selector.register(process, selectors.EVENT_READ, lambda _: self.drain(connection))
            return process
        return None

    def await_launcher(self, pid: int) -> None:
        """From now on a launcher counts that may start ranks again, while it lives."""
        if pid in self._launchers:
            return
        try:
            self._launchers[pid] = os.pidfd_open(pid)
        except ProcessLookupError:
            return
        except (OSError, AttributeError):
            self._launchers[pid] = None

    @property
    def is_awaiting(self) -> bool:
        """Whether such a launcher lives."""
        for pid, process in list(self._launchers.items()):
            if is_readable(process) if process is not None else not pid_start(pid):
                del self._launchers[pid]
                if process is not None:
                    os.close(process)
        return bool(self._launchers)

    def unwatch(self, process: int) -> None:
        """Ends `watch`, and closes the descriptor."""
        self._selector.unregister(process)
        os.close(process)

    def drain(self, connection: wire.Connection) -> None:
        """Reads the last messages of a process that is gone, then closes its connection."""
        while connection.sock.fileno() >= 0 and is_readable(connection.sock.fileno()):
            self._read(connection)
        self._close(connection)

    def _woken(self, sock: Any) -> None:
        with contextlib.suppress(BlockingIOError):
            sock.recv(4096)

    def _accept(self, listener: Any) -> None:
        sock, _ = listener.accept()
        _, uid = peer_of(sock)
        if uid != os.getuid():
            self._log(f"refused a connection of uid {uid}")
            sock.close()
            return
        connection = wire.Connection(sock)
        self._selector.register(sock, selectors.EVENT_READ, lambda _: self._read(connection))

    def _read(self, connection: wire.Connection) -> None:
        try:
            received = connection.receive()
        except (EOFError, OSError):
            self._close(connection)
            return
        except ProtocolError as error:
            self._log(f"closed a connection: {error}")
            self._close(connection)
            return
        for message, descriptors in received:
            self._receiver.receive(connection, message, descriptors)

    def _close(self, connection: wire.Connection) -> None:
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(connection.sock)
        connection.close()
        self._receiver.connection_closed(connection)


def peer_of(sock: socket.socket) -> tuple[int, int]:
    """(process, user) at the other end, as of its `connect`."""
    credentials = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
    pid, uid, _ = struct.unpack("3i", credentials)
    return pid, uid


def is_readable(fd: int) -> bool:
    """Whether there is something to read."""
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    return bool(poll.poll(0))
