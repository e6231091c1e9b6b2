"""A thread that stands in a collective of gloo is freed."""

import contextlib
import os
import socket
import threading
import time
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed

from autockpt.launch.in_process import process_groups

distributed: Any = torch.distributed


def pair() -> list[Any]:
    """Two ranks of one group, both in this process."""
    store: Any = distributed.HashStore()
    groups: list[Any] = [None, None]

    def make(rank: int) -> None:
        options = distributed.ProcessGroupGloo._Options()
        options._timeout = timedelta(seconds=120)
        options._devices = [distributed.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
        groups[rank] = distributed.ProcessGroupGloo(store, rank, 2, options)

    makers = [threading.Thread(target=make, args=(rank,)) for rank in (0, 1)]
    for maker in makers:
        maker.start()
    for maker in makers:
        maker.join(60)
    return groups


def test_a_collective_whose_other_rank_never_comes_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    """And a connection of the script's own, to a port that it listened at before, stays."""
    monkeypatch.setenv("MASTER_PORT", "1")
    before = socket.create_server(("127.0.0.1", 0))
    known = process_groups.own_ports()
    client = socket.create_connection(before.getsockname())
    server, _ = before.accept()
    groups, raised = pair(), []

    def stand() -> None:
        try:
            groups[0].allreduce([torch.ones(4)]).wait()
        except RuntimeError as error:
            raised.append(error)

    thread = threading.Thread(target=stand, daemon=True)
    thread.start()
    thread.join(0.2)
    assert thread.is_alive()
    process_groups.Abort(known).again()
    thread.join(60)
    assert len(raised) == 1
    client.sendall(b"alive")
    assert server.recv(5) == b"alive"
    for one in (client, server, before):
        one.close()


def test_a_rank_that_waits_for_a_dead_one_to_connect_is_freed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The dead rank has told its address, and has called nobody."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("MASTER_PORT", "1")
    known = process_groups.own_ports()
    store, ends = distributed.HashStore(), threading.Event()

    def connect() -> None:
        options = distributed.ProcessGroupGloo._Options()
        options._timeout = timedelta(seconds=120)
        options._devices = [distributed.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
        with contextlib.suppress(RuntimeError):
            distributed.ProcessGroupGloo(store, 0, 2, options)
        ends.set()

    threading.Thread(target=connect, daemon=True).start()
    store.wait(["0/0"], timedelta(seconds=60))
    told = bytearray(store.get("0/0"))
    port = 8 + int.from_bytes(told[:8], "little") + 8 + 2
    told[port : port + 2] = b"\xff\xff"  # of two ranks the one with the higher port calls
    store.set("0/1", bytes(told))
    assert not ends.wait(0.3)
    aborts = process_groups.Abort(known)
    deadline = time.monotonic() + 30
    while not ends.wait(0.05) and time.monotonic() < deadline:
        aborts.again()
    assert ends.is_set()


def test_a_connection_ends_between_two_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    """gloo does not tell a receiver whose message ends halfway.  One that never rests ends."""
    monkeypatch.setenv("MASTER_PORT", "1")
    known = process_groups.own_ports()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        sends = socket.create_connection(listener.getsockname())
        receives, _ = listener.accept()
        with sends, receives:
            receives.settimeout(60)
            monkeypatch.setattr(process_groups, "LOUD_S", 600.0)
            aborts = process_groups.Abort(known)
            for _ in range(20):
                sends.sendall(b"x")
                aborts.again()
                assert receives.recv(1) == b"x"
            monkeypatch.setattr(process_groups, "LOUD_S", 0.0)
            sends.sendall(b"x")
            aborts.again()
            assert receives.recv(2) == b"x"
            assert receives.recv(1) == b""


def test_a_group_that_was_never_whole_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its rank stands in `init_process_group` when another one dies; the next group is the first.

    Else it would have another number than that of a new process, for which it would wait.
    """
    groups: Any = distributed.distributed_c10d
    master = distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    monkeypatch.setenv("MASTER_PORT", str(master.port))
    known = process_groups.own_ports()
    waits = distributed.TCPStore("127.0.0.1", master.port, timeout=timedelta(seconds=120))
    ends = threading.Event()

    def abort() -> None:
        aborts = process_groups.Abort(known)
        while not ends.wait(0.2):
            aborts.again()

    thread = threading.Thread(target=abort, daemon=True)
    thread.start()
    try:
        with pytest.raises(RuntimeError, match=r"\w"):
            distributed.init_process_group("gloo", store=waits, rank=0, world_size=2)
    finally:
        ends.set()
        thread.join(60)
    assert not process_groups.are_there()
    assert groups._world.group_count > 0
    process_groups.forget()
    assert groups._world.group_count == 0
    assert not groups._world.pg_map
    assert not groups._world.pg_names


def test_sockets_that_are_looked_at_still_block() -> None:
    """Also where the script has set a default timeout."""
    ours, theirs = socket.socketpair()
    listener = socket.create_server(("127.0.0.1", 0))
    socket.setdefaulttimeout(5.0)
    try:
        assert listener.getsockname()[1] in process_groups.own_ports()
        assert socket.getdefaulttimeout() == 5.0
        assert listener.getblocking()
        assert os.get_blocking(listener.fileno())
    finally:
        socket.setdefaulttimeout(None)
        for one in (ours, theirs, listener):
            one.close()
