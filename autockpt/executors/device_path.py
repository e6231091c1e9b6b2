"""Device -> peer device -> peer host: an image leaves by the network of the training.

Where the devices' network is faster than the hosts', a replica goes by a process group of its own
into a small buffer of the peer's device, and from there into the peer's host memory, while the next
chunk is under way (Gemini, SOSP'23, section 5.3: sub-buffers).  Both ends run in the trainers,
beside the training; what keepers fetch from each other (`transfer`) is the other path.

Two ranks, one exchange at a time and direction, in the same order at both ends.  An exchange that
fails says so by an event and gives the group up for ever: a gloo group that timed out once never
works again.  Without a device network the links are throttled by gates: `DeviceLinks.emulated`
stands wherever such figures appear.
"""

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch

from autockpt.executors.gate import Gate, OpenGate
from autockpt.executors.image import ImageIndex, chunk_digest, read_index
from autockpt.executors.transfer.destination import Destination
from autockpt.executors.transfer.events import (
    Direction,
    Fault,
    Fetched,
    Served,
    TransferFailed,
)
from autockpt.executors.transfer.frames import Subject
from autockpt.executors.transfer.lease import Lease, Revoked
from autockpt.executors.transfer.transfer import End
from autockpt.values.errors import AutockptError, CorruptCheckpointError, ProtocolError
from autockpt.values.record import to_json

BUFFERS = 2
"""Chunks in the peer's device at a time: one arrives while the other one goes on to the host."""
_CHUNKS, _WORDS, _ANSWER = 7001, 7002, 7003
"""Tags: chunks, the index behind its length, the answer."""
_SEALED, _REFUSED = 1, 2


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceLinks:
    """The two hops; gates that are not open stand for hardware that is not there."""

    to_peer: Gate = field(default_factory=OpenGate)
    to_host: Gate = field(default_factory=OpenGate)
    emulated: bool = False
    """Figures are of gates and not of a device network."""


@dataclass(slots=True)
class Exchange:
    """One image in one direction, as the owner holds it."""

    name: str
    direction: Direction
    lease: Lease
    done: threading.Event = field(default_factory=threading.Event)

    def abort(self, reason: str) -> None:
        """When this returns, the image or the destination at this end is not touched any more.

        The group is given up: what is under way in it cannot be taken back.
        """
        self.lease.revoke(reason)


class DevicePath:
    """This rank's end of the path to one other rank; nothing here waits for the training thread.

    `group`: a process group of its own, whose ranks both build a path; `peer`: the other's rank in
    it.  `ended` hears of every exchange, on the path's threads (of a refusal at once, on the
    caller's), as from a `TransferPool`; `node` is the other's.
    """

    def __init__(
        self,
        group: Any,
        *,
        peer: int,
        node: int,
        ended: Callable[[End], None],
        timeout_s: float,
        links: DeviceLinks | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        """`timeout_s`: for every message; `device`: where the buffers are."""
        self.links = links or DeviceLinks()
        self._group, self._peer, self._node = group, peer, node
        self._ended, self._timeout = ended, timedelta(seconds=timeout_s)
        self._device = torch.device(device)
        self._lock = threading.Lock()
        self._under_way: dict[Direction, Exchange] = {}
        self._given_up = ""

    @property
    def given_up(self) -> str:
        """Why the group is not used any more, "" while it is."""
        return self._given_up

    def send(
        self, name: str, image: torch.Tensor, chunk_bytes: int, index: Callable[[], ImageIndex]
    ) -> Exchange:
        """Sends `image` (bytes, on the device); Served or TransferFailed follows.

        `index` is called when all chunks are sent, on the path's thread, and may wait for the
        digests of the snapshot.
        """
        return self._start(name, "serve", lambda e: self._send(e, image, chunk_bytes, index))

    def receive(self, name: str, subject: Subject, destination: Destination) -> Exchange:
        """Takes what the peer sends; Fetched or TransferFailed follows."""
        return self._start(name, "fetch", lambda e: self._receive(e, subject, destination))

    # ------------------------------------------------------------------ threads

    def _start(self, name: str, direction: Direction, work: Callable[[Exchange], End]) -> Exchange:
        exchange = Exchange(name, direction, Lease())
        with self._lock:
            reason = self._given_up
            if direction in self._under_way:
                reason = f"exchange {self._under_way[direction].name} is still under way"
            if not reason:
                self._under_way[direction] = exchange
        if reason:  # the last aligned pair stays; the group is as good as before
            self._ended(self._failed(exchange, "refused", reason))
            exchange.done.set()
            return exchange
        threading.Thread(
            target=self._run, args=(exchange, work), name="autockpt-device-path", daemon=True
        ).start()
        return exchange

    def _run(self, exchange: Exchange, work: Callable[[Exchange], End]) -> None:
        try:
            end = work(exchange)
        except Exception as error:
            end = self._failed(exchange, _fault(error), str(error) or type(error).__name__)
        with self._lock:
            del self._under_way[exchange.direction]
            if isinstance(end, TransferFailed):
                self._given_up = self._given_up or f"given up after: {end.reason}"
        self._ended(end)
        exchange.done.set()

    def _failed(self, exchange: Exchange, fault: Fault, reason: str) -> TransferFailed:
        return TransferFailed(
            node=self._node, direction=exchange.direction, fault=fault,
            reason=reason[:500],
        )  # fmt: skip

    # ------------------------------------------------------------------ sending

    def _send(
        self,
        exchange: Exchange,
        image: torch.Tensor,
        chunk_bytes: int,
        index: Callable[[], ImageIndex],
    ) -> End:
        began_s = time.monotonic()
        flat = image.reshape(-1).view(torch.uint8)
        under_way: list[Any] = []
        buffers = self._buffers(chunk_bytes)
        for start in range(0, flat.numel(), chunk_bytes):
            buffer = next(buffers)[: min(chunk_bytes, flat.numel() - start)]
            if len(under_way) == BUFFERS:
                self._wait(under_way.pop(0))
            with exchange.lease.use():
                buffer.copy_(flat[start : start + chunk_bytes])
            self.links.to_peer.wait(buffer.numel())
            under_way.append(self._group.send([buffer], self._peer, _CHUNKS))
        for work in under_way:
            self._wait(work)
        sealed = index()
        self._say(to_json(sealed).encode())
        answer = torch.zeros(1, dtype=torch.int64)
        self._wait(self._group.recv([answer], self._peer, _ANSWER))
        if int(answer) != _SEALED:
            raise CorruptCheckpointError("the other end does not have what was sent")
        return Served(
            node=self._node, root=sealed.root, nbytes=flat.numel(),
            seconds=time.monotonic() - began_s,
        )  # fmt: skip

    def _say(self, text: bytes) -> None:
        for message in (
            torch.tensor([len(text)], dtype=torch.int64),
            torch.frombuffer(bytearray(text), dtype=torch.uint8),
        ):
            self._wait(self._group.send([message], self._peer, _WORDS))

    # ------------------------------------------------------------------ receiving

    def _receive(self, exchange: Exchange, subject: Subject, destination: Destination) -> End:
        began_s = time.monotonic()
        digests = tuple(self._chunks(exchange, subject, destination))
        index = self._hear(subject)
        fits = Subject.of(index, subject.what) == subject and index.digests == digests
        answer = torch.tensor([_SEALED if fits else _REFUSED], dtype=torch.int64)
        self._wait(self._group.send([answer], self._peer, _ANSWER))
        if not fits:
            raise CorruptCheckpointError(
                f"generation {index.generation} of rank {index.rank} came for "
                f"{subject.generation} of rank {subject.rank}, or with other digests"
            )
        return Fetched(
            node=self._node, index=index, nbytes=subject.image_bytes,
            seconds=time.monotonic() - began_s,
        )  # fmt: skip

    def _chunks(
        self, exchange: Exchange, subject: Subject, destination: Destination
    ) -> Iterator[str]:
        """Digest by digest; the next chunk is on its way while one goes to the host."""
        coming = self._expect_chunks(subject)
        following = next(coming)
        for number in range(subject.chunks):
            work, buffer = following
            self._wait(work)
            following = next(coming, following)
            self.links.to_host.wait(buffer.numel())
            with exchange.lease.use():
                digest = _to_host(destination, number, buffer)
            yield digest

    def _expect_chunks(self, subject: Subject) -> Iterator[tuple[Any, torch.Tensor]]:
        buffers = self._buffers(subject.chunk_bytes)
        for number in range(subject.chunks):
            start, stop = subject.chunk_range(number)
            buffer = next(buffers)[: stop - start]
            yield self._group.recv([buffer], self._peer, _CHUNKS), buffer

    def _hear(self, subject: Subject) -> ImageIndex:
        length = torch.zeros(1, dtype=torch.int64)
        self._wait(self._group.recv([length], self._peer, _WORDS))
        if not 0 < int(length) <= subject.index_bytes:
            raise ProtocolError(f"an index of {int(length)} bytes for {subject.chunks} chunks")
        text = torch.empty(int(length), dtype=torch.uint8)
        self._wait(self._group.recv([text], self._peer, _WORDS))
        return read_index(text.numpy().tobytes(), where=f"rank {self._peer} of the path")

    # ------------------------------------------------------------------ both

    def _buffers(self, chunk_bytes: int) -> Iterator[torch.Tensor]:
        """Device memory for chunks, in turn."""
        buffers = [
            torch.empty(chunk_bytes, dtype=torch.uint8, device=self._device) for _ in range(BUFFERS)
        ]
        while True:
            yield from buffers

    def _wait(self, work: Any) -> None:
        work.wait(self._timeout)


def _to_host(destination: Destination, number: int, buffer: torch.Tensor) -> str:
    chunk = destination.place(number, buffer.numel())
    torch.frombuffer(chunk, dtype=torch.uint8).copy_(buffer)
    digest = chunk_digest(chunk)
    destination.keep(number, chunk)
    return digest


def _fault(error: Exception) -> Fault:
    match error:
        case Revoked():
            return "aborted"
        case CorruptCheckpointError():
            return "corrupt"
        case AutockptError():
            return "protocol"
        case RuntimeError() if "imed out" in str(error):
            return "silent"
        case RuntimeError():
            return "broken"
    return "internal"
