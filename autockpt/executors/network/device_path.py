"""Device -> peer device -> peer host: an image travels by the network of the training.

The path is for a devices' network that is faster than the hosts'.  A sealed image goes chunk by
chunk from its slot into a buffer of the own device.  A separate process group sends it into a
buffer of the peer's device, and from there it goes into the peer's host memory.  Meanwhile the next
chunk is under way (sub-buffers, Gemini, SOSP'23, section 5.3).  Both ends run in the trainers,
beside the training.  Their keepers decide which image goes and use the result (`device_transfers`).

Devices are emulated: host memory is the device, and throttles hold its links to a rate.  There is
no path through NCCL: an operation that times out there ends the process, and with it a training.
"""

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from autockpt.executors.image.container import chunk_digest
from autockpt.executors.network.transfer.frames import MAX_CHUNKS
from autockpt.executors.network.transfer.lease import Lease
from autockpt.executors.throttle.rate_limit import RateLimiter, Throttle
from autockpt.values.errors import ConfigError
from autockpt.values.units import parse_rate_bytes_per_s

c10d: Any = dist
"""Untyped: the stubs of torch lack most functions used here."""
SETTING = "AUTOCKPT_EMULATED_DEVICE_LINK"
"""Environment: INTERFACE=RATE, e.g. eth1=2 GB/s, equal on all nodes."""
BUFFERS = 2
"""Chunks in a device at a time: one is on its way while the other one comes or goes on."""
TIMEOUT_S = 15.0
"""For every message, and for the other end to come."""
RECEIVER, SENDER = 0, 1
"""Ranks of the group."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceLinks:
    """Links of an emulated device; measurements of them are figures of these throttles."""

    interface: str
    """Network interface that plays the devices' network."""
    bytes_per_s: float
    """The rate of both hops: device to peer device, and device to host."""

    def gate(self, limit_bytes_per_s: float = 0.0) -> Throttle:
        """A new link, no faster than a limit; 0: none."""
        rate = min(self.bytes_per_s, limit_bytes_per_s or self.bytes_per_s)
        return RateLimiter(rate, longest_wait_s=TIMEOUT_S / 2)


def emulated_links(environment: Mapping[str, str] = os.environ) -> DeviceLinks | None:
    """The links that the environment asks for; None: there is no device path.

    Raises ConfigError.
    """
    text = environment.get(SETTING, "")
    if not text:
        return None
    interface, _, rate = text.partition("=")
    links = DeviceLinks(
        interface=interface, bytes_per_s=parse_rate_bytes_per_s(rate) if rate else 0.0
    )
    if not interface or links.bytes_per_s <= 0:
        raise ConfigError(f"{SETTING}={text!r}: expected INTERFACE=RATE, e.g. eth1=2 GB/s")
    return links


def listening_store(host: str) -> tuple[Any, str]:
    """A store of our own for one pair, and its address, HOST:PORT.  Raises RuntimeError."""
    store = c10d.TCPStore(
        host, 0, 2, True, timeout=timedelta(seconds=TIMEOUT_S), wait_for_workers=False
    )
    return store, f"{host}:{store.port}"


def store_at(address: str) -> Any:
    """Connect to the store of the other end.  Raises RuntimeError when it does not listen."""
    host, _, port = address.rpartition(":")
    return c10d.TCPStore(
        host, int(port), 2, False, timeout=timedelta(seconds=TIMEOUT_S), wait_for_workers=False
    )


class DevicePath:
    """One end of a one-way path between two ranks; used by one thread at a time.

    Do not use the group after an exchange that raised: a gloo group that timed out once never works
    again.  Messages of an incomplete exchange would be taken for messages of the next.
    """

    def __init__(
        self, store: Any, role: int, links: DeviceLinks, *, timeout_s: float = TIMEOUT_S
    ) -> None:
        """Waits for the other end.  Raises RuntimeError when it does not come."""
        self._links, self._peer = links, 1 - role
        self._timeout = timedelta(seconds=timeout_s)
        options = c10d.ProcessGroupGloo._Options()
        options._timeout = self._timeout
        options._devices = [c10d.ProcessGroupGloo.create_device(interface=links.interface)]
        self._store = store
        self._group = c10d.ProcessGroupGloo(store, role, 2, options)

    def send(
        self, image: memoryview, chunk_bytes: int, lease: Lease, *, bytes_per_s: float = 0.0
    ) -> None:
        """Sends `image`; returns when its last chunk has left.

        Raises Revoked when the lease is; RuntimeError when the other end takes nothing.
        """
        gate, buffers = self._links.gate(bytes_per_s), _buffers(chunk_bytes)
        under_way: list[Any] = []
        for number, start in enumerate(range(0, len(image), chunk_bytes)):
            if len(under_way) == BUFFERS:
                under_way.pop(0).wait(self._timeout)
            piece = image[start : start + chunk_bytes]
            buffer = next(buffers)[: len(piece)]
            with lease.use():
                buffer.copy_(torch.frombuffer(piece, dtype=torch.uint8))
            gate.wait(len(piece))
            under_way.append(self._group.send([buffer], self._peer, number))
        for work in under_way:
            work.wait(self._timeout)
        gate.wait(1)  # the last chunk takes its time, too

    def receive(self, image: memoryview, chunk_bytes: int, lease: Lease) -> tuple[str, ...]:
        """Fill `image` with the bytes of the other end; return the digest of every chunk.

        Raises as `send`.
        """
        gate, coming = self._links.gate(), self._expect(len(image), chunk_bytes)
        digests: list[str] = []
        following = next(coming, None)
        while following is not None:
            work, buffer, start = following
            work.wait(self._timeout)
            following = next(coming, None)
            gate.wait(buffer.numel())
            with lease.use():
                chunk = image[start : start + buffer.numel()]
                torch.frombuffer(chunk, dtype=torch.uint8).copy_(buffer)
                digests.append(chunk_digest(chunk))
        gate.wait(1)
        return tuple(digests)

    def ask(self, nbytes: int) -> None:
        """Tells the sender how much to send; 0: nothing more.  Raises RuntimeError."""
        word = torch.tensor([nbytes], dtype=torch.int64, device="cpu")
        self._group.send([word], self._peer, MAX_CHUNKS).wait(self._timeout)

    def asked(self) -> int:
        """Wait for the receiver's request.  Raises RuntimeError when the receiver is gone."""
        word = torch.zeros(1, dtype=torch.int64, device="cpu")
        self._group.recv([word], self._peer, MAX_CHUNKS).wait(timedelta(days=1))
        return int(word)

    def _expect(self, nbytes: int, chunk_bytes: int) -> Iterator[tuple[Any, torch.Tensor, int]]:
        buffers = _buffers(chunk_bytes)
        for number, start in enumerate(range(0, nbytes, chunk_bytes)):
            buffer = next(buffers)[: min(chunk_bytes, nbytes - start)]
            yield self._group.recv([buffer], self._peer, number), buffer, start


def _buffers(chunk_bytes: int) -> Iterator[torch.Tensor]:
    """Device memory for chunks, in turn."""
    buffers = [torch.empty(chunk_bytes, dtype=torch.uint8, device="cpu") for _ in range(BUFFERS)]
    while True:
        yield from buffers
