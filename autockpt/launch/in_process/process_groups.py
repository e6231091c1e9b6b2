"""Frees a thread that stands in a collective, and forgets the process groups.

NCCL: `abort` ends the kernels.  `destroy` would wait for them, and is never called.

gloo: `abort` does nothing (torch 2.13).  A collective fails when a connection ends, so connections
are shut down here.  Of two ranks that are connected, one has accepted the connection at a port
where it listens.  Each rank shuts down what it has accepted.  These are all connections between
survivors; the kernel has ended the dead rank's connections.  A rank may also wait for a key of the
store, torch's at MASTER_PORT or the launcher's.
"""

import contextlib
import os
import socket
import sys
from collections.abc import Iterator
from typing import Any

from autockpt.launch.in_process import kept_store


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


def abort(known: frozenset[int]) -> None:
    """Collectives under way fail, on whichever thread; callable from any thread.

    `known`: ports at which this process listened before the function began; these are no groups'.
    """
    groups: Any = sys.modules.get("torch.distributed.distributed_c10d")
    if groups is not None:
        _abort_backends(groups)
    _shut_down(own_ports() - known)


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


def _shut_down(ports: frozenset[int]) -> None:
    stores = {os.environ.get("MASTER_PORT", "")}
    if (kept := kept_store.ports(os.environ)) is not None:
        stores.add(str(kept.kept))
    for sock in _tcp_sockets():
        with contextlib.suppress(OSError):
            theirs = _port(sock.getpeername())  # raises for one that listens
            if _port(sock.getsockname()) in ports or str(theirs) in stores:
                sock.shutdown(socket.SHUT_RDWR)


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
