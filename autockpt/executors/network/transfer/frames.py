"""Frames of a transfer connection: a header of 20 bytes, then a chunk or a short text.

Behind the keepers' handshake (purpose "transfer") a connection has one conversation:

    who wants   Want   ->                      Verified  ->
    who has              <-  ImageIndex, chunks

Both may say `Refused` instead.  Each length is compared with the request before anything is
received.  A chunk has exactly the bytes of its place in the image, and a text has at most
`MAX_TEXT_BYTES`.  The image's number of chunks limits its index.  Nothing is unpickled.
"""

import json
import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

from autockpt.executors.image.container import ImageIndex, trailer_capacity
from autockpt.values.errors import ConfigError, ProtocolError
from autockpt.values.generation import Generation
from autockpt.values.plan import MAX_CHUNK_BYTES
from autockpt.values.record import from_data, parse_json, to_data

MAX_TEXT_BYTES = 64 * 2**10
MAX_CHUNKS = 2**20
"""The most chunks of an image: bounds the index, and the records of the chunks to come."""
MAX_STREAMS = 16

_HEADER = struct.Struct("!4sB3xIQ")
_MAGIC = b"ackf"
HEADER_BYTES = _HEADER.size

CHUNK, TEXT = 1, 2
"""A chunk of the image, or a text."""

What = Literal["image", "parity", "stored"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Header:
    """What follows in the connection."""

    kind: int
    number: int = 0
    """The number of the chunk."""
    length: int = 0
    """Bytes that follow."""

    def pack(self) -> bytes:
        """The bytes of the header."""
        return _HEADER.pack(_MAGIC, self.kind, self.number, self.length)


def read_header(data: bytes | bytearray | memoryview) -> Header:
    """The header in HEADER_BYTES of `data`.  Raises ProtocolError for everything else."""
    magic, kind, number, length = _HEADER.unpack(data)
    header = Header(kind=kind, number=number, length=length)
    if magic != _MAGIC or header.pack() != bytes(data):
        raise ProtocolError("not a frame of a transfer")
    if kind not in (CHUNK, TEXT):
        raise ProtocolError(f"a frame of unknown kind {kind}")
    if kind == TEXT and number:
        raise ProtocolError("a text with a field that only a chunk has")
    return header


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """Chunks [start, stop)."""

    start: int
    stop: int


def spans_of(numbers: Iterable[int]) -> tuple[Span, ...]:
    """Chunks in ascending order as runs."""
    spans: list[Span] = []
    for number in numbers:
        if spans and spans[-1].stop == number:
            spans[-1] = Span(start=spans[-1].start, stop=number + 1)
        else:
            spans.append(Span(start=number, stop=number + 1))
    return tuple(spans)


def numbers_of(spans: Iterable[Span]) -> Iterator[int]:
    """Every chunk of `spans`, in order."""
    for span in spans:
        yield from range(span.start, span.stop)


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """The identity of an image, known before its first byte comes."""

    what: What = "image"
    """A rank's state, a parity segment (`rank` holds it), or a shard that is read from a store."""
    run_id: str
    generation: Generation
    step: int
    rank: int
    world_size: int
    layout_digest: str
    image_bytes: int
    chunk_bytes: int

    def __post_init__(self) -> None:
        sound = 0 < self.chunk_bytes <= MAX_CHUNK_BYTES and self.image_bytes > 0
        if not sound or self.chunks > MAX_CHUNKS:
            raise ConfigError(
                f"an image of {self.image_bytes} bytes in chunks of {self.chunk_bytes}: expected "
                f"up to {MAX_CHUNKS} chunks of up to {MAX_CHUNK_BYTES} bytes"
            )

    @classmethod
    def of(cls, index: ImageIndex, what: What = "image") -> "Subject":
        """The subject that a sealed image has."""
        return cls(
            what=what, run_id=index.run_id, generation=index.generation, step=index.step,
            rank=index.rank, world_size=index.world_size, layout_digest=index.layout_digest,
            image_bytes=index.image_bytes, chunk_bytes=index.chunk_bytes,
        )  # fmt: skip

    @property
    def chunks(self) -> int:
        """Chunks of the whole image."""
        return -(-self.image_bytes // self.chunk_bytes)

    @property
    def index_bytes(self) -> int:
        """Upper bound of the text of its index."""
        return trailer_capacity(self.image_bytes, self.chunk_bytes)

    def chunk_range(self, number: int) -> tuple[int, int]:
        """[start, stop) of a chunk in the image."""
        start = number * self.chunk_bytes
        return start, min(start + self.chunk_bytes, self.image_bytes)

    def require_spans(self, spans: tuple[Span, ...]) -> None:
        """Raises ProtocolError unless `spans` are chunks of the image, in order, each once."""
        end = 0
        for span in spans:
            if not end <= span.start < span.stop <= self.chunks:
                raise ProtocolError(f"chunks {span.start} to {span.stop} of {self.chunks}")
            end = span.stop
        if not spans:
            raise ProtocolError("no chunk at all")


@dataclass(frozen=True, slots=True, kw_only=True)
class Listener:
    """A trainer of the caller's node that awaits the image through the devices."""

    rank: int
    address: str
    """The address of its store."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Want:
    """The caller wants chunks of a sealed image."""

    what: What = "image"
    generation: Generation
    rank: int
    root: str
    chunks: tuple[Span, ...]
    listener: Listener | None = None
    """Set: no chunk comes on this connection, all of them go there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verified:
    """Every chunk that was wanted is there, and is that of the image with this root."""

    root: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Refused:
    """Not now, not this, or given up half-way."""

    reason: str


Text = Want | Verified | Refused | ImageIndex
_KINDS: dict[str, type] = {kind.__name__: kind for kind in (Want, Verified, Refused, ImageIndex)}


def pack_text(text: Text) -> bytes:
    """Header and body."""
    data = {"type": type(text).__name__, "body": to_data(text)}
    body = json.dumps(data, separators=(",", ":")).encode()
    return Header(kind=TEXT, length=len(body)).pack() + body


def read_text(body: bytes) -> Any:
    """The text in a frame.  Raises ProtocolError."""
    try:
        data = parse_json(body)
        return from_data(_KINDS[data["type"]], data["body"], where=data["type"])
    except (ValueError, KeyError, TypeError, ConfigError) as error:
        raise ProtocolError(f"malformed text: {str(error)[:200]}") from None
