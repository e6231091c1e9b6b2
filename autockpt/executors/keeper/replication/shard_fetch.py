"""One shard or parity on its way into a replica slot: its transfers, its one ending.

The result in the slot differs (a copy, a parity, a rebuilt shard); the fetch is the same.  Chunks
of sealed images are fetched from several nodes at once, each verified.  When the last transfer has
ended, the slot gets its description.  One that fails ends all.
"""

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from autockpt.executors.image.container import (
    ImageIndex,
    chunk_digest,
    read_trailer,
    trailer_capacity,
    write_trailer,
)
from autockpt.executors.keeper.replication.device_transfers import Exchange
from autockpt.executors.keeper.replication.link_meter import LinkMeter
from autockpt.executors.linux.memory import Arena, page_align
from autockpt.executors.network.transfer.destination import Destination, SlotDestination
from autockpt.executors.network.transfer.events import FetchEnd, TransferFailed
from autockpt.executors.network.transfer.frames import (
    Listener,
    Span,
    Subject,
    spans_of,
)
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
    """The content to fill a replica slot with."""

    image_bytes: int
    """Most that the slot has to hold, its description left out."""
    spare_bytes: int
    """Memory that is needed beside the slot meanwhile."""

    def parts(self, view: memoryview) -> list[Part]:
        """The fetches that fill `view`.  Raises AutockptError."""

    def later_parts(self, index: ImageIndex, came: Callable[[int], bool]) -> list[Part]:
        """The parts to fetch once the first ones came; `index`: of the first one.

        `came(bytes)` is called for all that is filled without a fetch; False: stop.
        """

    def finish(self, indexes: Sequence[ImageIndex]) -> ImageIndex:
        """All parts came, of images with these indexes: completes the bytes, and describes them.

        Raises AutockptError.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class Twin:
    """A sealed shard of this node that holds the same parts as one that is to be copied here.

    Replicas (DDP, HSDP) are equal but for a rank's own state, which stands in few chunks.
    """

    arena: Arena
    index: ImageIndex

    def copy(self, image: memoryview, index: ImageIndex) -> Iterator[tuple[int, int]]:
        """(number, bytes) of every chunk of `index` that may be alike, copied into `image`.

        The slot may be used again meanwhile, so each chunk is compared with its digest: 0 bytes for
        one that is another by now.  Ask after each chunk whether to go on.
        """
        alike = [n for n, d in enumerate(index.digests) if d == self.index.digests[n]]
        if not alike or self.arena.fd is None:
            return
        with contextlib.suppress(OSError):  # then they are fetched
            fd = os.dup(self.arena.fd)
            try:
                for number in alike:
                    start, stop = index.chunk_range(number)
                    chunk = image[start:stop]
                    whole = os.preadv(fd, [chunk], start) == stop - start
                    same = whole and chunk_digest(chunk) == index.digests[number]
                    yield number, stop - start if same else 0
            finally:
                os.close(fd)


class Copying:
    """A shard from one node, or some chunks of it.

    With a twin the first chunk comes first, and with it the digests of all.  Only chunks that the
    twin does not have cross the network then.
    """

    spare_bytes = 0

    def __init__(
        self,
        order: p.FetchShard,
        run_id: str,
        spans: tuple[Span, ...] = (),
        *,
        twin: Twin | None = None,
    ) -> None:
        """`spans`: empty for all chunks."""
        self._source = order.sources[0]
        self._subject = subject_of(order.shard, run_id)
        self.twin = twin
        last = self._subject.chunks if twin is None else 1
        self._spans = spans or (Span(start=0, stop=last),)
        self.image_bytes = page_align(order.shard.bytes)
        self._image = memoryview(b"")

    def parts(self, view: memoryview) -> list[Part]:
        """Every chunk in its place; with a twin the first one."""
        self._image = view[: self._subject.image_bytes]
        return [self._part(self._spans)]

    def later_parts(self, index: ImageIndex, came: Callable[[int], bool]) -> list[Part]:
        """The chunks that the twin does not have."""
        if self.twin is None:
            return []
        missing = set(range(1, self._subject.chunks))
        for number, nbytes in self.twin.copy(self._image, index):
            if nbytes:
                missing.discard(number)
            if not came(nbytes):
                return []
        return [self._part(spans_of(sorted(missing)))] if missing else []

    def _part(self, spans: tuple[Span, ...]) -> Part:
        subject = self._subject
        return Part(
            node=self._source.node, subject=subject, root=self._source.shard.root,
            spans=spans, destination=SlotDestination(self._image, subject),
        )  # fmt: skip

    def finish(self, indexes: Sequence[ImageIndex]) -> ImageIndex:
        """As its owner described it."""
        return indexes[0]


def subject_of(shard: p.HeldShard, run_id: str) -> Subject:
    """The name of a sealed shard or parity in a transfer."""
    return Subject(
        what="image" if shard.parity is None else "parity", run_id=run_id,
        generation=shard.generation, step=shard.step, rank=shard.rank,
        world_size=shard.world_size, layout_digest=shard.layout_digest,
        image_bytes=shard.bytes, chunk_bytes=shard.chunk_bytes,
    )  # fmt: skip


class _Marked:
    """Memory of a part, which tells of every chunk that it keeps."""

    def __init__(
        self, destination: Destination, came: Callable[[int], None], link: LinkMeter
    ) -> None:
        self._destination, self._came, self._link = destination, came, link

    def place(self, number: int, nbytes: int) -> memoryview:
        """The memory of a chunk."""
        chunk = self._destination.place(number, nbytes)
        self._link.begin()
        return chunk

    def keep(self, number: int, chunk: memoryview) -> None:
        """It holds the chunk."""
        nbytes = len(chunk)
        self._link.end(nbytes)
        self._destination.keep(number, chunk)
        self._came(nbytes)

    def drop(self, number: int, chunk: memoryview) -> None:
        """It holds rubbish."""
        self._link.end(0)
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
        link: LinkMeter | None = None,
    ) -> None:
        """`complete(self, index)` or `failed(self, reason, final)` is called once, on any thread,
        unless it was aborted before; then nothing writes into the slot any more.  `coming(self)`
        on any thread whenever `mark` has grown.  `link`: counts what comes."""
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
        self._link = link or LinkMeter()
        self._view: memoryview | None = None
        self._transfers: list[Transfer] = []
        self._parts = 0
        self._has_rest = True
        """The parts behind the first ones are not known yet."""
        self._fetch: Callable[[int, Part], Transfer] | None = None
        self._indexes: dict[int, ImageIndex] = {}
        """Indexes of the images that the parts came from, by number of the part."""
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
        """Memory of the replica slot."""
        return self.filling.image_bytes + self._trailer_bytes

    @property
    def has_twin(self) -> bool:
        """Most of it is on this node already."""
        return isinstance(self.filling, Copying) and self.filling.twin is not None

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
            self._view, self._parts, self._otherwise = view, 0, otherwise
            self._has_rest, exchange = True, self.exchange

            def fetch(number: int, part: Part) -> Transfer:
                marked = _Marked(part.destination, self._came, self._link)
                return pool.fetch(
                    part.node, addresses[part.node], part.subject, part.root, marked,
                    ended=partial(self._end_part, number),
                    deadline_s=time_for(part.subject.image_bytes), chunks=part.spans,
                    carrier=None if exchange is None else _Carried(exchange, self._came),
                )  # fmt: skip

            self._fetch = fetch
            if not self._begin(parts):
                return False
        if not parts:
            self._finish()
        return True

    def _begin(self, parts: Sequence[Part]) -> bool:
        """Begins the transfers of these parts; with the lock held.  False: it is over."""
        assert self._fetch is not None
        first, self._parts = self._parts, self._parts + len(parts)
        for number, part in enumerate(parts, start=first):
            if self.is_over():  # not even a thread was to be had
                return False
            self._transfers.append(self._fetch(number, part))
        return True

    def _came(self, count: int) -> None:
        """On a thread of transfers."""
        with self._marking:
            self.mark += count
        self._coming(self)

    def _end_part(self, number: int, event: FetchEnd) -> None:
        """Take the end of a part, whole or failed; on a thread of transfers."""
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
            first, self._has_rest = last and self._has_rest, self._has_rest and not last
        if last and not (first and self._fetches_rest(event.index)):
            self._finish()

    def _fetches_rest(self, index: ImageIndex) -> bool:
        """Fills what can be filled here; whether more is to be fetched, or it is over."""

        def came(nbytes: int) -> bool:
            self._came(nbytes)
            return not self._over

        with self._writing:
            parts = [] if self._over else self.filling.later_parts(index, came)
        try:
            with self._lock:
                if not self._over and parts:
                    self._begin(parts)
                return self._over or bool(parts)
        except AutockptError as error:
            self.fail(str(error), final=True)
            return True

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
