"""Frees a thread that stands in a collective, and forgets the process groups.

NCCL: `abort` ends the kernels.  `destroy` would wait for them, and is never called.

gloo: `abort` does nothing (torch 2.13).  A collective fails when a connection ends, so connections
are shut down here.  Of two ranks that are connected, one has accepted the connection at a port
where it listens.  Each rank shuts down what it has accepted.  These are all connections between
survivors; the kernel has ended the dead rank's connections.  A rank may also wait for a key of the
store, torch's at MASTER_PORT or the launcher's.

Two places of gloo need more care:

* A connection that ends within a message leaves the receiver waiting (`Pair::signalException` does
  not know the message under way).  So it is shut down when nothing has moved for a moment.
* A rank that connects waits for others to call it.  It is called from here, in their place.
"""

import contextlib
import fcntl
import os
import socket
import struct
import sys
import termios
import time
from collections.abc import Iterator
from typing import Any

from autockpt.launch.in_process import kept_store
from autockpt.launch.rank_env import number

QUIET_S = 0.01
"""A connection on which nothing has moved for so long holds no part of a message."""
LOUD_S = 1.0
"""After so long it is shut down all the same."""
CALLS_S = 1.0
"""Calls in place of other ranks take no longer; thousands of ranks are called within it."""


def are_there() -> bool:
    """Whether this process is in a process group."""
    dist: Any = sys.modules.get("torch.distributed")
    return bool(dist is not None and dist.is_available() and dist.is_initialized())


def can_be_aborted() -> bool:
    """Whether this version of torch has what is called here."""
    groups: Any = sys.modules.get("torch.distributed.distributed_c10d")
    return groups is None or hasattr(groups, "_abort_process_group")


def own_ports() -> frozenset[int]:
    """Ports at which this process listens, TCP."""
    return frozenset(_port(sock.getsockname()) for sock in _tcp_sockets() if _listens(sock))


class Abort:
    """Ends the collectives of this process, on whichever thread; callable from any thread."""

    def __init__(self, known: frozenset[int]) -> None:
        """`known`: ports at which this process listened before; these are no groups'."""
        self._known = known
        self._began_s: float | None = None
        self._calls = 0
        self._moved: dict[Any, tuple[bytes, float]] = {}
        """Counters of each connection, and since when they are so, CLOCK_MONOTONIC."""

    def again(self) -> None:
        """Collectives under way fail; a later one needs another call."""
        now_s = time.monotonic()
        self._began_s = now_s if self._began_s is None else self._began_s
        self._abort_backends()
        ports = own_ports() - self._known
        if self._shut_down(ports) and not self._calls:
            time.sleep(QUIET_S)
            self._shut_down(ports)
        if self._calls and not self._calls & self._calls - 1:
            _call(ports)
        self._calls += 1

    def end(self) -> None:
        """The function is left: nothing waits any more."""
        self._abort_backends()
        self._began_s = float("-inf")
        self._shut_down(own_ports() - self._known)

    @staticmethod
    def _abort_backends() -> None:
        groups: Any = sys.modules.get("torch.distributed.distributed_c10d")
        if groups is not None:
            _abort_backends(groups)

    def _shut_down(self, ports: frozenset[int]) -> bool:
        """Shuts down what is quiet; whether that was not all."""
        left, stores = False, {os.environ.get("MASTER_PORT", "")}
        if (kept := kept_store.ports(os.environ)) is not None:
            stores.add(str(kept.kept))
        for sock in _tcp_sockets():
            with contextlib.suppress(OSError):
                theirs, ours = sock.getpeername(), sock.getsockname()  # raises if it listens
                if str(_port(theirs)) in stores:
                    sock.shutdown(socket.SHUT_RDWR)
                elif _port(ours) in ports:
                    if self._is_quiet((ours, theirs), sock):
                        sock.shutdown(socket.SHUT_RDWR)
                    else:
                        left = True
        return left

    def _is_quiet(self, name: Any, sock: socket.socket) -> bool:
        now_s, waiting = time.monotonic(), bytearray(4)
        fcntl.ioctl(sock, termios.FIONREAD, waiting)
        counters = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 136)[120:]
        before, since_s = self._moved.get(name, (b"", now_s))
        if before != counters or any(waiting):
            self._moved[name] = counters, now_s
            since_s = now_s
        assert self._began_s is not None
        return now_s >= since_s + QUIET_S or now_s >= self._began_s + LOUD_S


def _call(ports: frozenset[int]) -> None:
    """Connects to gloo's ports of this process, as other ranks would, and hangs up."""
    ranks = number(os.environ, "WORLD_SIZE") or 1
    until_s = time.monotonic() + CALLS_S
    for sock in _tcp_sockets():
        if not _listens(sock) or _port(sock.getsockname()) not in ports:
            continue
        for pair in range(ranks):
            if time.monotonic() > until_s:
                return
            with contextlib.suppress(OSError), socket.socket(sock.family) as caller:
                caller.settimeout(QUIET_S)
                caller.connect(sock.getsockname())
                caller.sendall(struct.pack("=q", pair))


def _abort_backends(groups: Any) -> None:
    """As `_abort_process_group` does; the lists of groups stay as they are."""
    names = dict(groups._world.pg_names)
    with contextlib.ExitStack() as ends:
        for group in names:
            backend = _nccl_backend(groups, group)
            if backend is not None:
                # Aborts of several communicators wait for one another outside of a group call.
                backend._group_start()
                ends.callback(backend._group_end)
                break
        for group in sorted(names, key=lambda one: names[one], reverse=True):
            with contextlib.suppress(Exception):  # one that is aborted already
                group.abort()


def _nccl_backend(groups: Any, group: Any) -> Any:
    kind = getattr(groups, "ProcessGroupNCCL", None)
    with contextlib.suppress(RuntimeError):  # it has none for this device
        backend = group._get_backend(sys.modules["torch"].device("cuda"))
        if kind is not None and isinstance(backend, kind):
            return backend
    return None


def forget() -> None:
    """The next `init_process_group` is the first one.  Raises RuntimeError where that fails."""
    groups: Any = sys.modules.get("torch.distributed.distributed_c10d")
    if groups is None:
        return
    if are_there():
        groups._abort_process_group()
    else:
        _clear_tables(groups)
    random: Any = sys.modules.get("torch.distributed.tensor._random")
    if random is not None:  # of a mesh that is gone
        random._rng_tracker = None


def _clear_tables(groups: Any) -> None:
    """As `_abort_process_group` does, where the first group was not made to its end.

    The next group would else have another number than that of a new process, and the two would wait
    for each other.
    """
    world = groups._world
    for table in (world.pg_map, world.pg_names, world.pg_group_ranks, world.pg_backend_config,
                  world.pg_to_tag, world.tags_to_pg, world.pg_coalesce_state):  # fmt: skip
        table.clear()
    groups._unregister_all_process_groups()
    world.group_count = 0


def _tcp_sockets() -> Iterator[socket.socket]:
    """Every one of this process, under a number that is open during its turn only."""
    before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(None)  # else the sockets would stop blocking
    try:
        for name in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):  # closed meanwhile
                if not os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                    continue
                with socket.socket(fileno=os.dup(int(name))) as sock:
                    internet = sock.family in (socket.AF_INET, socket.AF_INET6)
                    if internet and sock.type == socket.SOCK_STREAM:
                        yield sock
    finally:
        socket.setdefaulttimeout(before)


def _listens(sock: socket.socket) -> bool:
    return bool(sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))


def _port(address: Any) -> int:
    return int(address[1])
