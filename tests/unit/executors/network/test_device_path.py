"""The path through emulated devices, both ends in one process: bytes arrive, failures end it."""

import threading
import time
from concurrent.futures import Future
from typing import Any

import pytest

from autockpt.executors.image.container import chunk_digest
from autockpt.executors.network.device_path import (
    RECEIVER,
    SENDER,
    SETTING,
    DeviceLinks,
    DevicePath,
    emulated_links,
    listening_store,
    store_at,
)
from autockpt.executors.network.transfer.lease import Lease, Revoked
from autockpt.values.errors import ConfigError
from tests.unit.executors.network.transfer.ends import pattern

CHUNK = 2**16
FAST = DeviceLinks(interface="lo", bytes_per_s=1e9)


def later(work: Any, *arguments: Any, **settings: Any) -> "Future[Any]":
    """The result of `work` on a thread of its own."""
    result: Future[Any] = Future()

    def run() -> None:
        try:
            result.set_result(work(*arguments, **settings))
        except BaseException as error:
            result.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return result


def pair(links: DeviceLinks = FAST, timeout_s: float = 5.0) -> tuple[DevicePath, DevicePath]:
    """(receiver, sender)

    The store is joined before the receiver's time runs: it asks for the name of its address, and a
    name server that does not answer costs 5 s.
    """
    store, address = listening_store("127.0.0.1")
    joined = store_at(address)
    receiver = later(DevicePath, store, RECEIVER, links, timeout_s=timeout_s)
    sender = DevicePath(joined, SENDER, links, timeout_s=timeout_s)
    return receiver.result(5.0), sender


@pytest.mark.parametrize("nbytes", [1, CHUNK, 9 * CHUNK + 5])
def test_an_image_arrives_in_the_peers_host_memory(nbytes: int) -> None:
    """Twice by one path, with the digest of every chunk."""
    receiver, sender = pair()
    for seed in range(2):
        image, memory = bytearray(pattern(nbytes, seed)), bytearray(nbytes)
        came = later(receiver.receive, memoryview(memory), CHUNK, Lease())
        sender.send(memoryview(image), CHUNK, Lease())
        starts = range(0, nbytes, CHUNK)
        digests = tuple(chunk_digest(memoryview(image)[at : at + CHUNK]) for at in starts)
        assert came.result(5.0) == digests
        assert memory == image


@pytest.mark.parametrize("limit", [0.0, 100 * CHUNK])
def test_emulated_links_are_as_slow_as_they_say(limit: float) -> None:
    """40 chunks at 200 a second, or slower where the plan limits the rate."""
    receiver, sender = pair(DeviceLinks(interface="lo", bytes_per_s=200 * CHUNK))
    memory = bytearray(40 * CHUNK)
    began = time.monotonic()
    came = later(receiver.receive, memoryview(memory), CHUNK, Lease())
    sender.send(memoryview(bytearray(40 * CHUNK)), CHUNK, Lease(), bytes_per_s=limit)
    came.result(5.0)
    expected_s = 40 * CHUNK / (limit or 200 * CHUNK)
    assert 0.9 * expected_s < time.monotonic() - began < 20.0 * expected_s


def test_a_peer_that_does_not_come_costs_a_timeout() -> None:
    """To make the path, and for a chunk."""
    store, _ = listening_store("127.0.0.1")
    with pytest.raises(RuntimeError, match="timeout"):
        DevicePath(store, RECEIVER, FAST, timeout_s=0.3)
    receiver, _sender = pair(timeout_s=0.3)
    began = time.monotonic()
    with pytest.raises(RuntimeError, match=r"[Tt]imed out"):
        receiver.receive(memoryview(bytearray(CHUNK)), CHUNK, Lease())
    assert time.monotonic() - began < 3.0


def test_after_revoke_neither_image_nor_memory_is_touched() -> None:
    """At either end; what is under way ends by its timeout."""
    slow = DeviceLinks(interface="lo", bytes_per_s=100 * CHUNK)
    receiver, sender = pair(slow, timeout_s=0.5)
    memory, leases = bytearray(100 * CHUNK), (Lease(), Lease())
    came = later(receiver.receive, memoryview(memory), CHUNK, leases[0])
    image = memoryview(bytearray(pattern(100 * CHUNK)))
    left = later(sender.send, image, CHUNK, leases[1])
    time.sleep(0.2)
    for lease in leases:
        lease.revoke("needed")
    before = bytes(memory)
    for end in (came, left):
        with pytest.raises((Revoked, RuntimeError)):
            end.result(5.0)
    assert memory == before


@pytest.mark.parametrize("text", ["eth1", "=1 GB/s", "eth1=0 GB/s", "eth1=fast", "eth1=100"])
def test_a_setting_that_says_no_link_is_refused(text: str) -> None:
    """Interface and rate; without the setting there is no device path."""
    assert emulated_links({}) is None
    assert emulated_links({SETTING: "eth1=2 GB/s"}) == DeviceLinks(
        interface="eth1", bytes_per_s=2e9
    )
    with pytest.raises(ConfigError, match=r"expected|rate|unit|write"):
        emulated_links({SETTING: text})
