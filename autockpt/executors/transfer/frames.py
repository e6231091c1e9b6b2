"""Frames of a transfer connection: a header of 36 bytes, then a chunk or a short text.

Behind the keepers' handshake (purpose "transfer") the caller says what it wants:

    push    Offer  ->  Accepted, then chunks on every stream, the ImageIndex  ->  Sealed
            (further streams: Join -> Accepted)
    fetch   Want   ->  ImageIndex, then chunks  <-  Sealed

Any of these may be answered by `Refused`.  A length is compared with what was announced before
anything is received: a chunk has exactly the bytes of its place in the image, a text at most
`MAX_TEXT_BYTES`, an index at most what its number of chunks allows.  Nothing is unpickled.
"""

import json
import struct
from dataclasses import dataclass
from typing import Any, Literal

from autockpt.executors.image import MAX_CHUNK_BYTES, ImageIndex, trailer_capacity
from autockpt.values.errors import ConfigError, ProtocolError
from autockpt.values.generation import Generation
from autockpt.values.record import from_data, parse_json, to_data

MAX_TEXT_BYTES = 64 * 2**10
MAX_CHUNKS = 2**20
"""Of an image: bounds the table a receiver keeps, 100 bytes a chunk."""
MAX_STREAMS = 16
DIGEST_BYTES = 16

_HEADER = struct.Struct("!4sB3xIQ16s")
_MAGIC = b"ackf"
HEADER_BYTES = _HEADER.size

CHUNK, TEXT, HOLD, END = 1, 2, 3, 4
"""A chunk of the image; a text; a sign of life while the source has nothing to send yet; the last
frame of a further stream."""

What = Literal["image", "parity"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Header:
    """What follows in the connection."""

    kind: int
    number: int = 0
    """Of the chunk."""
    length: int = 0
    """Bytes that follow."""
    digest: bytes = bytes(DIGEST_BYTES)
    """xxh3-128 of the chunk, as taken when it arrived in the source's slot."""

    def pack(self) -> bytes:
        """The bytes of the header."""
        return _HEADER.pack(_MAGIC, self.kind, self.number, self.length, self.digest)


def read_header(data: bytes | bytearray | memoryview) -> Header:
    """The header in HEADER_BYTES of `data`.  Raises ProtocolError for everything else."""
    magic, kind, number, length, digest = _HEADER.unpack(data)
    header = Header(kind=kind, number=number, length=length, digest=digest)
    if magic != _MAGIC or header.pack() != bytes(data):
        raise ProtocolError("not a frame of a transfer")
    if kind not in (CHUNK, TEXT, HOLD, END):
        raise ProtocolError(f"a frame of unknown kind {kind}")
    empty = not length or kind == TEXT
    if kind != CHUNK and (number or digest != bytes(DIGEST_BYTES) or not empty):
        raise ProtocolError("a header with fields that its kind does not have")
    return header


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """Chunks [start, stop)."""

    start: int
    stop: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """What an image is, known before its first byte is."""

    what: What = "image"
    """Of a rank's state, or of a parity segment (`rank` holds it)."""
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

    def covering(self, start: int, stop: int) -> Span:
        """The chunks that bytes [start, stop) of the image stand in."""
        return Span(start=start // self.chunk_bytes, stop=-(-stop // self.chunk_bytes))

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
class Offer:
    """The caller has an image, or is about to have it."""

    transfer: str
    subject: Subject
    chunks: tuple[Span, ...]
    streams: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Join:
    """A further stream of an accepted offer."""

    transfer: str
    stream: int
    """1 ... streams - 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Want:
    """The caller wants chunks of a sealed image."""

    transfer: str
    what: What = "image"
    generation: Generation
    rank: int
    root: str
    chunks: tuple[Span, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Accepted:
    """Go on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Refused:
    """Not now, not this, or given up half-way."""

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Sealed:
    """Every chunk is there and verified; the memory at this end is described by `root`."""

    root: str


Text = Offer | Join | Want | Accepted | Refused | Sealed | ImageIndex
_KINDS: dict[str, type] = {
    kind.__name__: kind for kind in (Offer, Join, Want, Accepted, Refused, Sealed, ImageIndex)
}


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
