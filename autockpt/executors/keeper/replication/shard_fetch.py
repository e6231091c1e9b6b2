"""One shard or parity on its way into a guest slot: its transfers, its one ending.

What stands in the slot at the end differs (a copy, a parity, a shard that is rebuilt), how it comes
does not: chunks of sealed images are fetched from several nodes at once, each verified, and when
the last transfer has ended the slot gets its description.  One that fails ends all.
"""

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from autockpt.executors.image.container import (
    ImageIndex,
    read_trailer,
    trailer_capacity,
    write_trailer,
)
from autockpt.executors.keeper.replication.device_transfers import Exchange
from autockpt.executors.linux.memory import page_align
from autockpt.executors.network.transfer.destination import Destination, SlotDestination
from autockpt.executors.network.transfer.events import FetchEnd, TransferFailed
from autockpt.executors.network.transfer.frames import Listener, Span, Subject
from autockpt.executors.network.transfer.pool import TransferPool
from autockpt.executors.network.transfer.transfer import Transfer
from autockpt.executors.protocol import messages as p
from autockpt.values.errors import AutockptError

DEADLINE_S = 600.0
"""For one shard, however lively the other end is; a silent one is dropped far sooner."""
LEAST_BYTES_PER_S = 1e6
"""A large shard has the time that it takes at this rate, below which nothing is planned."""
FINAL = ("refused", "corrupt")
"""Faults after which asking the same node again is in vain."""


def time_for(nbytes: int) -> float:
    """Most seconds that a transfer of an image may take."""
    return max(DEADLINE_S, nbytes / LEAST_BYTES_PER_S)


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Chunks that one node sends."""

    node: int
    subject: Subject
    root: str
    spans: tuple[Span, ...]
    destination: Destination


class FetchTarget(Protocol):
    """What a guest slot is filled with."""

    image_bytes: int
    """Most that the slot has to hold, its description left out."""
    spare_bytes: int
    """Memory that is needed beside the slot meanwhile."""

    def parts(self, view: memoryview) -> list[Part]:
        """What is to be fetched to fill `view`.  Raises AutockptError."""

    def finish(self, indexes: Sequence[ImageIndex]) -> ImageIndex:
        """All parts came, of images with these indexes: completes the bytes, and describes them.

        Raises AutockptError.
        """


class Copying:
    """A shard from one node, or some chunks of it."""

    spare_bytes = 0

    def __init__(self, order: p.FetchShard, run_id: str, spans: tuple[Span, ...] = ()) -> None:
        """`spans`: empty for all chunks."""
        self._source = order.sources[0]
        self._subject = subject_of(order.shard, run_id)
        self._spans = spans or (Span(start=0, stop=self._subject.chunks),)
        self.image_bytes = page_align(order.shard.bytes)

    def parts(self, view: memoryview) -> list[Part]:
        """Every chunk in its place."""
        subject = self._subject
        image = view[: subject.image_bytes]
        return [
            Part(
                node=self._source.node, subject=subject, root=self._source.shard.root,
                spans=self._spans, destination=SlotDestination(image, subject),
            )
        ]  # fmt: skip

    def finish(self, indexes: Sequence[ImageIndex]) -> ImageIndex:
        """As its owner described it."""
        (index,) = indexes
        return index


def subject_of(shard: p.HeldShard, run_id: str) -> Subject:
    """What a sealed shard or parity is in a transfer."""
    return Subject(
        what="image" if shard.parity is None else "parity", run_id=run_id,
        generation=shard.generation, step=shard.step, rank=shard.rank,
        world_size=shard.world_size, layout_digest=shard.layout_digest,
        image_bytes=shard.bytes, chunk_bytes=shard.chunk_bytes,
    )  # fmt: skip


class _Marked:
    """Memory of a part, which tells of every chunk that it keeps."""

    def __init__(self, destination: Destination, came: Callable[[int], None]) -> None:
        self._destination, self._came = destination, came

    def place(self, number: int, nbytes: int) -> memoryview:
        """The memory of a chunk."""
        return self._destination.place(number, nbytes)

    def keep(self, number: int, chunk: memoryview) -> None:
        """It holds the chunk."""
        nbytes = len(chunk)
        self._destination.keep(number, chunk)
        self._came(nbytes)

    def drop(self, number: int, chunk: memoryview) -> None:
        """It holds rubbish."""
        self._destination.drop(number, chunk)


class _Carried:
    """An exchange, which tells of every look at it: its two trainers end it when one is silent."""

    def __init__(self, exchange: Exchange, came: Callable[[int], None]) -> None:
        self._exchange, self._came = exchange, came
        self.listener: Listener = exchange.listener

    def bring(self, transfer: Transfer, look: Callable[[], None]) -> tuple[str, ...]:
        """Digests of what came."""

        def looked() -> None:
            look()
            self._came(1)

        return self._exchange.bring(transfer, looked)


class ShardFetch:
    """One FetchShard that is being carried out."""

    def __init__(
        self,
        order: p.FetchShard,
        filling: FetchTarget,
        *,
        complete: Callable[["ShardFetch", ImageIndex], None],
        failed: Callable[["ShardFetch", str, bool], None],
        coming: Callable[["ShardFetch"], None] = lambda bringing: None,
    ) -> None:
        """`complete(self, index)` or `failed(self, reason, final)` is called once, on any thread,
        unless it was aborted before; then nothing writes into the slot any more.  `coming(self)`
        on any thread whenever `mark` has grown."""
        self.order = order
        self.filling = filling
        self.began_s = self.told_s = time.monotonic()
        """`told_s`: when its owner last told how far it has come."""
        self.nbytes = 0
        self.mark = 0
        """Grows with what came."""
        self.exchange: Exchange | None = None
        """Through the devices: its trainer may write the slot until it says that it has ended."""
        self._otherwise: Callable[[str], None] | None = None
        self._complete, self._failed, self._coming = complete, failed, coming
        self._view: memoryview | None = None
        self._transfers: list[Transfer] = []
        self._parts = 0
        self._indexes: dict[int, ImageIndex] = {}
        """Of the images that parts came of, by number of the part."""
        self._over = False
        self._lock = threading.RLock()
        self._marking = threading.Lock()
        self._writing = threading.Lock()
        """Held while the slot is completed, which takes no transfer."""

    def is_over(self) -> bool:
        """It was aborted, or has failed."""
        return self._over

    @property
    def slot_bytes(self) -> int:
        """Memory of the guest slot."""
        return self.filling.image_bytes + self._trailer_bytes

    @property
    def _trailer_bytes(self) -> int:
        return trailer_capacity(self.filling.image_bytes, self.order.shard.chunk_bytes)

    def start(
        self,
        pool: TransferPool,
        view: memoryview,
        find: Callable[[int], tuple[str, int]],
        otherwise: Callable[[str], None] | None = None,
    ) -> bool:
        """Begins all transfers into `view`, `slot_bytes` long; `find(node)`: where it serves.

        With an exchange, which fills the same memory, `otherwise(reason)` is called when that
        fails, and then it may be started once more.  False: it was over before.  Raises
        AutockptError.
        """
        parts = self.filling.parts(view[: self.filling.image_bytes])
        addresses = {part.node: find(part.node) for part in parts}
        with self._lock:  # the ends of the first ones wait until all have begun
            if self._over:
                return False
            self._view, self._parts, self._otherwise = view, len(parts), otherwise
            for number, part in enumerate(parts):
                if self.is_over():  # not even a thread was to be had
                    return False
                exchange = self.exchange
                transfer = pool.fetch(
                    part.node, addresses[part.node], part.subject, part.root,
                    _Marked(part.destination, self._came), ended=partial(self._ended, number),
                    deadline_s=time_for(part.subject.image_bytes), chunks=part.spans,
                    carrier=None if exchange is None else _Carried(exchange, self._came),
                )  # fmt: skip
                self._transfers.append(transfer)
        if not parts:
            self._finish()
        return True

    def _came(self, count: int) -> None:
        """On a thread of transfers."""
        with self._marking:
            self.mark += count
        self._coming(self)

    def _ended(self, number: int, event: FetchEnd) -> None:
        """A part is here or never will be; on a thread of transfers."""
        with self._lock:
            otherwise, self._otherwise = self._otherwise, None
        if isinstance(event, TransferFailed) and otherwise is not None and not self._over:
            otherwise(event.reason)
            return
        if isinstance(event, TransferFailed):
            self.fail(f"node {event.node}: {event.reason}", final=event.fault in FINAL)
            return
        with self._lock:
            self.nbytes += event.nbytes
            self._indexes[number] = event.index
            last = len(self._indexes) == self._parts and not self._over
        if last:
            self._finish()

    def fail(self, reason: str, *, final: bool) -> None:
        """It cannot be had; the first reason counts."""
        if self.abort(reason):
            self._failed(self, reason, final)

    def abort(self, reason: str) -> bool:
        """Nothing of it writes into the slot when this returns; False: it was over before."""
        with self._lock:
            before, self._over = self._over, True
            transfers = list(self._transfers)
        for transfer in transfers:
            transfer.abort(reason)
        with self._writing:
            return not before

    def _finish(self) -> None:
        try:
            with self._writing:
                if self._over or self._view is None:
                    return
                index = self.filling.finish([self._indexes[n] for n in range(self._parts)])
                trailer = self._view[self.filling.image_bytes :]
                if read_trailer(trailer) != index:  # else somebody may be reading it
                    write_trailer(trailer, index)
        except AutockptError as error:
            self.fail(str(error), final=True)
            return
        self._complete(self, index)
