"""What the two ends of a transfer say, in order; one function or method a thread.

Each runs on a thread of the pool, for one stream, and raises what went wrong: the transfer then
ends for all of its threads.
"""

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import Any, TypeVar

from autockpt.executors.gate import Gate, OpenGate
from autockpt.executors.image import ImageIndex
from autockpt.executors.transfer.destination import Destination
from autockpt.executors.transfer.events import (
    ChunkReceived,
    Event,
    Fetched,
    ReplicaReceived,
    ReplicaSealed,
    Served,
)
from autockpt.executors.transfer.frames import (
    END,
    MAX_STREAMS,
    Accepted,
    Join,
    Offer,
    Sealed,
    Span,
    Subject,
    Want,
)
from autockpt.executors.transfer.reception import Reception, take_chunks
from autockpt.executors.transfer.sender import Cursor, send_chunks, send_index
from autockpt.executors.transfer.source import ImageSource
from autockpt.executors.transfer.stream import RefusedByPeer, Stream
from autockpt.executors.transfer.transfer import Transfer
from autockpt.values.errors import ProtocolError

T = TypeVar("T")

FINISH_SILENCES = 2
"""Silences within which the other streams bring the chunk that each of them may still have."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Acceptance:
    """The owner takes an offered image."""

    destination: Destination
    deadline_s: float
    """For the whole transfer, however lively the other end is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Loan:
    """The owner lets a sealed image be fetched."""

    source: ImageSource
    deadline_s: float
    gate: Gate = field(default_factory=OpenGate)


def split_spans(spans: tuple[Span, ...], parts: int) -> list[tuple[Span, ...]]:
    """The chunks of `spans` in up to `parts` runs of like size, none empty."""
    numbers = [number for span in spans for number in range(span.start, span.stop)]
    parts = min(parts, len(numbers))
    bounds = [len(numbers) * part // parts for part in range(parts + 1)]
    return [spans_of(numbers[start:stop]) for start, stop in pairwise(bounds)]


def spans_of(numbers: Iterable[int]) -> tuple[Span, ...]:
    """Chunks in ascending order as runs."""
    spans: list[Span] = []
    for number in numbers:
        if spans and spans[-1].stop == number:
            spans[-1] = Span(start=spans[-1].start, stop=number + 1)
        else:
            spans.append(Span(start=number, stop=number + 1))
    return tuple(spans)


def expect(kind: type[T], text: Any) -> T:
    """`text` if it is of this kind.  Raises ProtocolError."""
    if not isinstance(text, kind):
        raise ProtocolError(f"{type(text).__name__} where {kind.__name__} was to come")
    return text


# --------------------------------------------------------------------------- push


class Push:
    """The end that has the image."""

    def __init__(
        self,
        transfer: Transfer,
        source: ImageSource,
        spans: tuple[Span, ...],
        *,
        streams: int,
        gate: Gate,
        dial: Callable[[Transfer], Stream],
        spawn: Callable[[Transfer, Callable[[], object]], None],
    ) -> None:
        self._transfer, self._source, self._spans = transfer, source, spans
        self._streams, self._gate = streams, gate
        self._dial, self._spawn = dial, spawn
        self._cursor = Cursor(spans)
        self._news = threading.Condition()
        self._joining = streams - 1
        """Further streams that are not at their end."""
        self._sent, self._held_s = 0, 0.0

    def run(self) -> None:
        """The first stream: offers, sends, seals."""
        transfer = self._transfer
        transfer.hold(self._source)
        stream = self._dial(transfer)
        stream.tell(
            Offer(
                transfer=transfer.name, subject=self._source.subject, chunks=self._spans,
                streams=self._streams,
            )
        )  # fmt: skip
        expect(Accepted, stream.hear())
        for number in range(1, self._streams):
            self._spawn(transfer, partial(self._join, number))
        self._send(stream)
        with last_words(stream):
            self._await_others(stream)
            root = send_index(stream, self._source, transfer.lease)
            sealed = expect(Sealed, stream.hear(within_s=(FINISH_SILENCES + 1) * stream.silence_s))
        if sealed.root != root:
            raise ProtocolError(f"sealed as {sealed.root[:16]}, expected {root[:16]}")
        transfer.outcome = ReplicaSealed(
            transfer=transfer.name, node=transfer.node, root=root, nbytes=self._sent,
            seconds=transfer.seconds, held_s=self._held_s / self._streams,
        )  # fmt: skip

    def _join(self, number: int) -> None:
        """A further stream."""
        try:
            stream = self._dial(self._transfer)
            stream.tell(Join(transfer=self._transfer.name, stream=number))
            expect(Accepted, stream.hear())
            self._send(stream)
            stream.end()
        finally:
            with self._news:
                self._joining -= 1
                self._news.notify_all()

    def _await_others(self, stream: Stream) -> None:
        """The index is the last word of all streams.  When one failed, ours is shut."""
        while True:
            with self._news:
                if self._news.wait_for(lambda: not self._joining, stream.silence_s / 3):
                    return
            stream.hold()

    def _send(self, stream: Stream) -> None:
        with last_words(stream):
            sent, held_s = send_chunks(
                stream, self._source, self._cursor, self._transfer.lease, self._gate
            )
        with self._news:
            self._sent += sent
            self._held_s += held_s


@contextmanager
def last_words(stream: Stream) -> Iterator[None]:
    """A connection that broke may have said why: then RefusedByPeer is raised instead."""
    try:
        yield
    except (OSError, EOFError):
        if reason := stream.heard_refusal():
            raise RefusedByPeer(reason) from None
        raise


class Receive:
    """The end that gets a pushed image: one object for all of its streams."""

    def __init__(
        self,
        transfer: Transfer,
        offer: Offer,
        destination: Destination,
        emit: Callable[[Event], None],
    ) -> None:
        self.transfer = transfer
        self._offer = offer
        self._awaited = set(range(1, offer.streams))
        self._lock = threading.Lock()
        self._reception = reception_of(transfer, offer.subject, offer.chunks, destination, emit)

    def run(self, stream: Stream) -> None:
        """The first stream, after the offer was accepted."""
        transfer, subject = self.transfer, self._offer.subject
        stream.tell(Accepted())
        header = take_chunks(stream, self._reception, until_s=transfer.until_s)
        index = expect(ImageIndex, stream.read_text(header, limit=subject.index_bytes))
        self._reception.finish(index, within_s=FINISH_SILENCES * stream.silence_s)
        # It stands sealed: whether the other end still hears that changes nothing here.
        transfer.outcome = ReplicaReceived(
            transfer=transfer.name, node=transfer.node, subject=subject, index=index,
            nbytes=self._reception.nbytes, seconds=transfer.seconds,
        )  # fmt: skip
        stream.tell(Sealed(root=index.root))

    def join(self, stream: Stream, number: int) -> None:
        """A further stream.  Raises ProtocolError for one that was not announced or came before."""
        with self._lock:
            if number not in self._awaited:
                raise ProtocolError(f"stream {number} of {self._offer.streams} is not awaited")
            self._awaited.remove(number)
        stream.tell(Accepted())
        header = take_chunks(stream, self._reception, until_s=self.transfer.until_s)
        if header.kind != END:
            raise ProtocolError(f"a frame of kind {header.kind} on a further stream")


def reception_of(
    transfer: Transfer,
    subject: Subject,
    spans: tuple[Span, ...],
    destination: Destination,
    emit: Callable[[Event], None],
) -> Reception:
    """A reception that tells the owner of every chunk."""
    return Reception(
        subject, spans, destination, lease=transfer.lease,
        received=lambda number, nbytes: emit(
            ChunkReceived(transfer=transfer.name, node=transfer.node, number=number, nbytes=nbytes)
        ),
    )  # fmt: skip


# --------------------------------------------------------------------------- fetch


class Fetch:
    """The end that wants chunks of a sealed image."""

    def __init__(
        self,
        transfer: Transfer,
        subject: Subject,
        root: str,
        spans: tuple[Span, ...],
        destination: Destination,
        *,
        streams: int,
        dial: Callable[[Transfer], Stream],
        spawn: Callable[[Transfer, Callable[[], object]], None],
        emit: Callable[[Event], None],
    ) -> None:
        self._transfer, self._subject, self._root = transfer, subject, root
        self._parts = split_spans(spans, streams)
        self._dial, self._spawn = dial, spawn
        self._reception = reception_of(transfer, subject, spans, destination, emit)

    def run(self) -> None:
        """The first stream; ends when all have brought their part."""
        for part in self._parts[1:]:
            self._spawn(self._transfer, partial(self._bring, part))
        stream = self._bring(self._parts[0])
        transfer, index = self._transfer, self._reception.index
        assert index is not None
        self._reception.finish(index, within_s=max(0.0, transfer.until_s - transfer.began_s))
        transfer.outcome = Fetched(
            transfer=transfer.name, node=transfer.node, index=index,
            nbytes=self._reception.nbytes, seconds=transfer.seconds,
        )  # fmt: skip
        stream.tell(Sealed(root=self._root))

    def _bring(self, part: tuple[Span, ...]) -> Stream:
        stream = self._dial(self._transfer)
        subject = self._subject
        stream.tell(
            Want(
                transfer=self._transfer.name, what=subject.what, generation=subject.generation,
                rank=subject.rank, root=self._root, chunks=part,
            )
        )  # fmt: skip
        index = expect(ImageIndex, stream.hear(limit=subject.index_bytes))
        if index.root != self._root or Subject.of(index, subject.what) != subject:
            raise ProtocolError(
                f"asked for root {self._root[:16]} of generation {subject.generation}, got "
                f"{index.root[:16]} of generation {index.generation}"
            )
        self._reception.index = index
        header = take_chunks(stream, self._reception, until_s=self._transfer.until_s)
        if header.kind != END:
            raise ProtocolError(f"a frame of kind {header.kind} among chunks")
        self._reception.require(part)
        if part is not self._parts[0]:
            stream.tell(Sealed(root=self._root))
        return stream


def serve(transfer: Transfer, stream: Stream, want: Want, loan: Loan) -> None:
    """The end that lends chunks of a sealed image, for one stream of a fetch."""
    source = loan.source
    index = source.index
    if index is None or index.root != want.root:
        raise RefusedByPeer(f"no image with root {want.root[:16]} is sealed here")
    source.subject.require_spans(want.chunks)
    transfer.hold(source)
    stream.tell(index)
    with last_words(stream):
        sent, _ = send_chunks(stream, source, Cursor(want.chunks), transfer.lease, loan.gate)
        stream.end()
        expect(Sealed, stream.hear())
    transfer.outcome = Served(
        transfer=transfer.name, node=transfer.node, root=index.root, nbytes=sent,
        seconds=transfer.seconds,
    )  # fmt: skip


def require_offer(offer: Offer, run_id: str) -> None:
    """Raises ProtocolError for an offer that cannot be meant."""
    if offer.subject.run_id != run_id:
        raise ProtocolError(f"an image of run {offer.subject.run_id}, this is {run_id}")
    if not 1 <= offer.streams <= MAX_STREAMS:
        raise ProtocolError(f"{offer.streams} streams; at most {MAX_STREAMS}")
    offer.subject.require_spans(offer.chunks)
