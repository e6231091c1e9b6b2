"""The messages of a transfer's two ends, in order; one function or method a thread.

Each runs on a thread of the pool, for one stream, and raises what went wrong: the transfer then
ends for all of its threads.  The stream's own thread takes digests, without the interpreter's lock,
while the chunk is still in cache.  Meanwhile the kernel and the other streams go on receiving.
"""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import Any, Protocol, TypeVar

from autockpt.executors.image.container import ImageIndex, chunk_digest
from autockpt.executors.network.transfer.destination import Destination
from autockpt.executors.network.transfer.events import Fetched, Served
from autockpt.executors.network.transfer.frames import (
    CHUNK,
    Header,
    Listener,
    Span,
    Subject,
    Verified,
    Want,
    numbers_of,
    spans_of,
)
from autockpt.executors.network.transfer.source import ImageSource
from autockpt.executors.network.transfer.stream import RefusedByPeer, Silent, Stream
from autockpt.executors.network.transfer.transfer import Transfer
from autockpt.executors.throttle.rate_limit import Throttle, Unlimited, Windows
from autockpt.values.errors import (
    ConfigError,
    CorruptCheckpointError,
    GuardError,
    ProtocolError,
)

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Loan:
    """The owner lets a sealed image be fetched."""

    source: ImageSource
    deadline_s: float
    """For the whole transfer, however lively the other end is."""
    gate: Throttle = field(default_factory=Unlimited)
    windows: Windows | None = None
    """In which the chunks leave, in place of the gate."""
    carry: Callable[[Want, Transfer], None] | None = None
    """Sends the image to the listener of a want, and returns when it has left; None: no way."""


class Carrier(Protocol):
    """Brings a whole image another way than by the connection that asks for it."""

    listener: Listener

    def bring(self, transfer: Transfer, look: Callable[[], None]) -> tuple[str, ...]:
        """Digests of the chunks that came; calls `look`, which may raise, while it waits.

        Raises AutockptError when it fails or the transfer is over.
        """


def split_spans(spans: tuple[Span, ...], parts: int) -> list[tuple[Span, ...]]:
    """The chunks of `spans` in up to `parts` runs of like size, none empty."""
    numbers = list(numbers_of(spans))
    parts = min(parts, len(numbers))
    bounds = [len(numbers) * part // parts for part in range(parts + 1)]
    return [spans_of(numbers[start:stop]) for start, stop in pairwise(bounds)]


def expect(kind: type[T], text: Any) -> T:
    """`text` if it is of this kind.  Raises ProtocolError."""
    if not isinstance(text, kind):
        raise ProtocolError(f"{type(text).__name__} where {kind.__name__} was to come")
    return text


class Fetch:
    """The end that wants chunks of a sealed image: one object for all of its streams."""

    def __init__(
        self,
        transfer: Transfer,
        subject: Subject,
        root: str,
        spans: tuple[Span, ...],
        destination: Destination,
        *,
        streams: int,
        carrier: Carrier | None,
        dial: Callable[[Transfer], Stream],
        spawn: Callable[[Transfer, Callable[[], object]], None],
    ) -> None:
        self._transfer, self._subject, self._root = transfer, subject, root
        self._destination, self._dial, self._spawn = destination, dial, spawn
        self._carrier = carrier
        self._parts = split_spans(spans, streams)
        self._missing = len(self._parts)
        self._nbytes = 0
        self._lock = threading.Lock()

    def run(self) -> None:
        """The first stream, which starts the others."""
        for part in self._parts[1:]:
            self._spawn(self._transfer, partial(self._bring, part))
        self._bring(self._parts[0])

    def _bring(self, part: tuple[Span, ...]) -> None:
        stream = self._dial(self._transfer)
        try:
            self._end(*self._chunks(stream, part))
        except BaseException as error:
            stream.refuse(str(error))
            raise
        with suppress(OSError, Silent):  # it is here, whether the other end hears that or not
            stream.tell(Verified(root=self._root))

    def _chunks(self, stream: Stream, part: tuple[Span, ...]) -> tuple[ImageIndex, int]:
        """Brings a part into place; the index of the image, and the bytes of the part."""
        subject = self._subject
        stream.tell(
            Want(
                what=subject.what, generation=subject.generation, rank=subject.rank,
                root=self._root, chunks=part,
                listener=self._carrier.listener if self._carrier is not None else None,
            )
        )  # fmt: skip
        index = expect(ImageIndex, stream.hear(limit=subject.index_bytes))
        if index.root != self._root or Subject.of(index, subject.what) != subject:
            raise ProtocolError(
                f"asked for root {self._root[:16]} of checkpoint {subject.generation} of rank "
                f"{subject.rank}, got {index.root[:16]} of {index.generation} of {index.rank}"
            )
        if self._carrier is not None:
            self._carried(stream, self._carrier, index)
            return index, index.image_bytes
        missing, nbytes = set(numbers_of(part)), 0
        while missing:
            header = stream.read_header()
            if header.kind != CHUNK:
                raise ProtocolError(f"{type(stream.read_text(header)).__name__} among chunks")
            self._require(header, missing)
            missing.remove(header.number)
            with self._transfer.lease.use():
                self._take(stream, header, index.digests[header.number])
            nbytes += header.length
        return index, nbytes

    def _carried(self, stream: Stream, carrier: Carrier, index: ImageIndex) -> None:
        def look() -> None:
            if stream.has_news():
                raise ProtocolError(f"{type(stream.hear()).__name__} while an image comes")

        digests = carrier.bring(self._transfer, look)
        if digests != index.digests:
            raise CorruptCheckpointError(
                f"{len(digests)} chunks of checkpoint {self._subject.generation} came, expected "
                f"{len(index.digests)}, or some have other digests"
            )

    def _require(self, header: Header, missing: set[int]) -> None:
        if header.number not in missing:
            raise ProtocolError(f"chunk {header.number} was not asked for, or came twice")
        start, stop = self._subject.chunk_range(header.number)
        if header.length != stop - start:
            raise ProtocolError(
                f"chunk {header.number} of {header.length} bytes, expected {stop - start}"
            )

    def _take(self, stream: Stream, header: Header, expected: str) -> None:
        """Receives a chunk into the destination and compares it."""
        number = header.number
        chunk = self._destination.place(number, header.length)
        try:
            if len(chunk) != header.length:
                raise GuardError(f"{len(chunk)} bytes for chunk {number} of {header.length}")
            stream.read(chunk)
            if (got := chunk_digest(chunk)) != expected:
                raise CorruptCheckpointError(
                    f"chunk {number} of checkpoint {self._subject.generation}: expected digest "
                    f"{expected}, got {got}"
                )
        except BaseException:
            self._destination.drop(number, chunk)
            raise
        self._destination.keep(number, chunk)

    def _end(self, index: ImageIndex, nbytes: int) -> None:
        """A part is here; with the last one all is."""
        with self._lock:
            self._nbytes += nbytes
            self._missing -= 1
            if self._missing:
                return
        self._transfer.outcome = Fetched(
            node=self._transfer.node, index=index, nbytes=self._nbytes,
            seconds=self._transfer.seconds,
        )  # fmt: skip


def serve(transfer: Transfer, stream: Stream, want: Want, loan: Loan) -> None:
    """The end that lends, for one stream of a fetch: chunks from the slot's own pages."""
    source, gate = loan.source, loan.gate
    root, subject = source.index.root, source.subject
    if (root, subject.what, subject.generation, subject.rank) != (
        want.root, want.what, want.generation, want.rank,
    ):  # fmt: skip
        raise RefusedByPeer(
            f"no {want.what} of rank {want.rank} of {want.generation} with root {want.root[:16]} "
            "is sealed here"
        )
    subject.require_spans(want.chunks)
    if gate.longest_wait_s > stream.silence_s / 2:
        raise ConfigError(
            f"a gate that holds a chunk for up to {gate.longest_wait_s:g} s: the other end takes "
            f"{stream.silence_s:g} s for a loss; at most half of that"
        )
    transfer.hold(source)
    stream.tell(source.index)
    with _last_words(stream):
        if want.listener is not None:
            nbytes = _carry(transfer, want, loan)
        elif loan.windows is not None:
            nbytes = _send_in_windows(transfer, stream, want, source, loan.windows)
        else:
            nbytes = _send(transfer, stream, want, source, gate)
        verified = expect(Verified, stream.hear())
    if verified.root != root:
        raise ProtocolError(f"verified as {verified.root[:16]}, lent was {root[:16]}")
    transfer.outcome = Served(
        node=transfer.node, root=root, nbytes=nbytes, seconds=transfer.seconds
    )


def _send(
    transfer: Transfer, stream: Stream, want: Want, source: ImageSource, gate: Throttle
) -> int:
    """Whole chunks, when the gate lets them; bytes sent."""
    nbytes = 0
    for number in numbers_of(want.chunks):
        start, stop = source.subject.chunk_range(number)
        source.await_chunk(number)
        gate.wait(stop - start)
        with transfer.lease.use():
            stream.send_chunk(number, source.fd, source.image, start, stop)
        nbytes += stop - start
    return nbytes


def _send_in_windows(
    transfer: Transfer, stream: Stream, want: Want, source: ImageSource, windows: Windows
) -> int:
    """Pieces of chunks, each acknowledged before the next is asked for; bytes sent.

    A chunk that windows have held back for half of the time that the other end grants it goes on
    without them.
    """
    ranges = [(n, *source.subject.chunk_range(n)) for n in numbers_of(want.chunks)]
    total = sum(stop - start for _, start, stop in ranges)
    with windows.begin(total) as gate:
        for number, start, stop in ranges:
            at, hurried_s = start, time.monotonic() + stream.silence_s / 2
            while at < stop:
                late = time.monotonic() > hurried_s
                end = stop if late else at + gate.take(stop - at)
                with transfer.lease.use():
                    if at == start:
                        stream.begin_chunk(number, stop - start)
                    stream.send_piece(source.fd, source.image, at, end)
                stream.drain()
                at = end
    return total


def _carry(transfer: Transfer, want: Want, loan: Loan) -> int:
    if loan.carry is None:
        raise RefusedByPeer("nothing goes through the devices from here")
    loan.carry(want, transfer)
    return loan.source.index.image_bytes


@contextmanager
def _last_words(stream: Stream) -> Iterator[None]:
    """A connection that broke may have said why: then RefusedByPeer is raised instead."""
    try:
        yield
    except (OSError, EOFError):
        if reason := stream.heard_refusal():
            raise RefusedByPeer(reason) from None
        raise
