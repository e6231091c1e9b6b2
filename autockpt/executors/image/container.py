"""One image of one rank: what stands in a slot, in a shard file, in a peer's memory.

`layout` places the bytes; this module describes them.  The digest of every chunk is taken once, as
the chunk arrives in host memory.  The root binds the digests to (run, generation, rank, layout,
length), so that an intact chunk at the wrong place or of another generation fails.  The description
travels as the trailer of a slot and as the index file beside a shard.
"""

import hashlib
import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import xxhash

from autockpt.executors.image.layout.boxes import MAX_BOXES, Box, contains, intersect
from autockpt.executors.image.layout.plan import ELEMENT_BYTES
from autockpt.values.errors import ConfigError, CorruptCheckpointError
from autockpt.values.generation import Generation
from autockpt.values.plan import MAX_CHUNK_BYTES
from autockpt.values.record import from_json, parse_json, to_json

MAX_INDEX_BYTES = 64 * 2**20
PIECE_BYTES = 2**19
"""A piece that fits a core's own cache."""
MAX_DIMENSIONS = 64
HEAD_BYTES = 4 * 2**20
"""The largest boundary group that gets a digest of its own (0.2 ms in the keeper's loop)."""
MAX_HEAD_BYTES = 64 * 2**20
"""The most bytes of a header and a boundary group that get a second digest of their own."""
_TRAILER_MAGIC = b"ACKPTTR1"
_TRAILER_HEAD = len(_TRAILER_MAGIC) + 8 + 32


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredChunk:
    """Where an encoded chunk stands in a shard file."""

    offset: int
    length: int
    digest: str
    """Digest of the stored bytes."""
    base: str = ""
    """Digest of the base's chunk of the same number, which decoding needs; "": it stands alone.
    A chunk of length 0 is that chunk."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageIndex:
    """Description of one sealed image."""

    schema_version: int = 1
    run_id: str
    generation: Generation
    step: int
    rank: int
    world_size: int
    layout_digest: str
    image_bytes: int
    chunk_bytes: int
    digests: tuple[str, ...]
    """xxh3-128 of each chunk's raw bytes, hex; chunk i is [i, i+1) x chunk_bytes."""
    head_bytes: int = 0
    """The first bytes, header and boundary group, which have a digest of their own; 0: they have
    none."""
    head_digest: str = ""
    """xxh3-128, hex.  A reader that only lists the contents of a shard checks these bytes alone."""
    codec: str = "none"
    stored: tuple[StoredChunk, ...] = ()
    """The chunks of an encoded shard file, one per chunk; empty for a plain image."""
    across_nodes: bool = False
    """Ranks of several nodes divide what they hold alike, so that no node has all of its state."""
    base: Generation | None = None
    """Whose shard of the same rank holds the bases of chunks that have one."""

    def __post_init__(self) -> None:
        sound = 0 < self.chunk_bytes <= MAX_CHUNK_BYTES and self.image_bytes > 0
        chunks = -(-self.image_bytes // self.chunk_bytes) if sound else -1
        if self.base is not None and not self.base < self.generation:
            raise ConfigError(f"index of rank {self.rank}: {self.base} is no older generation")
        if self.base is None and any(chunk.base for chunk in self.stored):
            raise ConfigError(f"index of rank {self.rank}: chunks need a base and none is named")
        if not 0 <= self.head_bytes <= min(self.image_bytes, MAX_HEAD_BYTES):
            raise ConfigError(f"index of rank {self.rank}: a head of {self.head_bytes} bytes")
        if chunks != len(self.digests) or (self.stored and len(self.stored) != chunks):
            raise ConfigError(
                f"index of rank {self.rank}: {self.image_bytes} bytes in chunks of "
                f"{self.chunk_bytes} need {chunks} digests, got {len(self.digests)}"
            )

    @property
    def root(self) -> str:
        """Binds every digest to this run, generation, rank and layout."""
        parts = [
            "autockpt-image-1", self.run_id, self.generation.name, str(self.rank),
            str(self.world_size), self.layout_digest, str(self.image_bytes),
            str(self.chunk_bytes), *self.digests, str(self.head_bytes), self.head_digest,
        ]  # fmt: skip
        return hashlib.sha256("\n".join(parts).encode()).hexdigest()

    def chunk_range(self, index: int) -> tuple[int, int]:
        """[start, stop) of a chunk in the raw image."""
        start = index * self.chunk_bytes
        return start, min(start + self.chunk_bytes, self.image_bytes)

    def check(
        self, index: int, data: memoryview, *, source: str,
        look: Callable[[int, memoryview], None] | None = None,
    ) -> None:  # fmt: skip
        """Raises CorruptCheckpointError unless `data` is chunk `index`.

        `look(offset, piece)` sees all of it on the way, before anything is known of it.
        """
        got = chunk_digest(data) if look is None else _digest_beside(data, look)
        if got != self.digests[index]:
            raise CorruptCheckpointError(
                f"{source}: rank {self.rank}, chunk {index} of checkpoint {self.generation}: "
                f"expected digest {self.digests[index]}, got {got}"
            )

    def check_head(self, data: memoryview, *, source: str) -> None:
        """Raises CorruptCheckpointError unless `data` is the head."""
        got = chunk_digest(data)
        if got != self.head_digest:
            raise CorruptCheckpointError(
                f"{source}: rank {self.rank}, head of checkpoint {self.generation}: expected "
                f"digest {self.head_digest}, got {got}"
            )


def chunk_digest(data: memoryview) -> str:
    """xxh3-128 of the bytes, hex: 20-30 GB/s in place, cheaper than the copy before it."""
    return xxhash.xxh3_128_hexdigest(data)


def _digest_beside(data: memoryview, look: Callable[[int, memoryview], None]) -> str:
    """Digest in pieces and pass each to `look`, so that both reads find it in the core's cache."""
    digest = xxhash.xxh3_128()
    for offset in range(0, len(data), PIECE_BYTES):
        piece = data[offset : offset + PIECE_BYTES]
        digest.update(piece)
        look(offset, piece)
    return digest.hexdigest()


def read_index(data: bytes, *, where: str) -> ImageIndex:
    """The index in `data`.  Raises CorruptCheckpointError for anything malformed."""
    if len(data) > MAX_INDEX_BYTES:
        raise CorruptCheckpointError(f"{where}: an index of {len(data)} bytes is not plausible")
    try:
        return from_json(ImageIndex, data, where=where)
    except ConfigError as error:
        raise CorruptCheckpointError(str(error)) from None


def trailer_capacity(image_bytes: int, chunk_bytes: int) -> int:
    """Bytes reserved behind the image of a slot for its description."""
    chunks = -(-image_bytes // chunk_bytes)
    return -(-(_TRAILER_HEAD + 4096 + 40 * chunks) // 4096) * 4096


def write_trailer(region: memoryview, index: ImageIndex) -> None:
    """Makes a slot self-describing; the magic is written last."""
    text = to_json(index).encode()
    if _TRAILER_HEAD + len(text) > len(region):
        raise ConfigError(f"trailer of {len(text)} bytes does not fit {len(region)}")
    region[: len(_TRAILER_MAGIC)] = bytes(len(_TRAILER_MAGIC))
    region[8:16] = len(text).to_bytes(8, "little")
    region[16:48] = hashlib.sha256(text).digest()
    region[_TRAILER_HEAD : _TRAILER_HEAD + len(text)] = text
    region[: len(_TRAILER_MAGIC)] = _TRAILER_MAGIC


def clear_trailer(region: memoryview) -> None:
    """Makes a slot garbage before it is overwritten."""
    region[: len(_TRAILER_MAGIC)] = bytes(len(_TRAILER_MAGIC))


def read_trailer(region: memoryview) -> ImageIndex | None:
    """The description of a sealed slot, or None when there is none or it is damaged."""
    if bytes(region[:8]) != _TRAILER_MAGIC:
        return None
    length = int.from_bytes(region[8:16], "little")
    if length > len(region) - _TRAILER_HEAD:
        return None
    text = bytes(region[_TRAILER_HEAD : _TRAILER_HEAD + length])
    if hashlib.sha256(text).digest() != bytes(region[16:48]):
        return None
    try:
        return read_index(text, where="slot trailer")
    except CorruptCheckpointError:
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorPlace:
    """A tensor in the header of an image."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    """From the start of the image."""
    stop: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredPart:
    """The part of a global tensor that a tensor of an image is."""

    global_shape: tuple[int, ...]
    boxes: tuple[Box, ...]
    """They follow one another in the bytes of the tensor."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageHeader:
    """The header of an image, checked against the image's length."""

    tensors: dict[str, TensorPlace]
    """Without pads."""
    aliases: dict[str, str]
    true_dtypes: dict[str, str]
    """torch dtype names where they differ from the stored one."""
    parts: dict[str, StoredPart]
    """The parts of divided tensors; the others are whole."""
    known_nan: frozenset[str] = frozenset()
    """Tensors in which NaN stood before the training."""


def header_bytes(first: memoryview, image_bytes: int) -> int:
    """Length of the header region.  Raises CorruptCheckpointError when it cannot be one."""
    length = int.from_bytes(first[:8], "little")
    if not 2 <= length <= min(image_bytes - 8, MAX_INDEX_BYTES):
        raise CorruptCheckpointError(f"image header claims {length} of {image_bytes} bytes")
    return 8 + length


def find_header(chunk: Callable[[int], memoryview], image_bytes: int) -> ImageHeader:
    """The header of an image whose chunks are read by number; it may go on behind the first."""
    data = bytearray()
    needed, number = 1, 0
    while len(data) < needed:
        piece = chunk(number)
        if not number:
            needed = header_bytes(piece, image_bytes)
        data += piece[: needed - len(data)]
        number += 1
    return read_header(bytes(data), image_bytes)


def read_header(data: bytes, image_bytes: int) -> ImageHeader:
    """The header (with its 8 length bytes) of an image of `image_bytes`.

    Every offset is checked against the image, and no two tensors may share a byte, before a caller
    allocates by it.  Raises CorruptCheckpointError.
    """
    try:
        table = parse_json(bytes(data[8:]))
        meta = _strings(table.pop("__metadata__", {}))
        places = {name: _place(name, row, len(data), image_bytes) for name, row in table.items()}
        _require_disjoint(places)
        tensors = {name: p for name, p in places.items() if not name.startswith("__pad")}
        aliases = _strings(parse_json(meta.get("aliases", "{}")))
        stray = sorted(set(aliases.values()) - set(tensors))
        if stray or set(aliases) & set(tensors):
            raise ValueError(f"aliases do not fit the tensors, first {stray[:1]}")
        named = {key[5:]: text for key, text in meta.items() if key.startswith("part:")}
        # Layers repeat, and moments are divided as parameters are: hundreds of texts, few kinds.
        kinds = {text: _stored_part(text) for text in set(named.values())}
        parts = {name: kinds[text] for name, text in named.items()}
        for name, part in parts.items():
            _require_elements(name, tensors[name], part)
        nan = parse_json(meta.get("nan", "[]"))
        if not isinstance(nan, list) or not set(nan) <= set(tensors):
            raise ValueError("tensors with NaN are named that are not there")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CorruptCheckpointError(f"image header is malformed: {error!r:.200}") from None
    views = {key[5:]: value for key, value in meta.items() if key.startswith("view:")}
    return ImageHeader(
        tensors=tensors, aliases=aliases, true_dtypes=views, parts=parts, known_nan=frozenset(nan)
    )


def _stored_part(text: str) -> StoredPart:
    data = parse_json(text)
    of, rows = data["of"], data["at"]
    numbers = [*of, *(n for offset, shape in rows for n in (*offset, *shape))]
    if any(type(n) is not int or not 0 <= n < 2**63 for n in numbers) or len(of) > MAX_DIMENSIONS:
        raise ValueError(f"{text:.200}: no part of a tensor")
    boxes = tuple(Box(offset=tuple(offset), shape=tuple(shape)) for offset, shape in rows)
    if not all(contains(of, box) for box in boxes):
        raise ValueError(f"{text:.200}: its boxes do not fit {tuple(of)}")
    if len(boxes) > MAX_BOXES or any(intersect(a, b) for a, b in combinations(boxes, 2)):
        raise ValueError(f"{text:.200}: its boxes overlap, or are more than {MAX_BOXES}")
    return StoredPart(global_shape=tuple(of), boxes=boxes)


def _require_elements(name: str, place: TensorPlace, part: StoredPart) -> None:
    # A stored shape may have one dimension more than the true one (complex numbers as pairs).
    elements = sum(box.count for box in part.boxes)
    stored = math.prod(place.shape)
    if stored not in (elements, 2 * elements):
        raise ValueError(f"{name}: its boxes do not fit its {stored} elements")


def _place(name: str, row: dict[str, Any], base: int, image_bytes: int) -> TensorPlace:
    (start, stop), sizes = row["data_offsets"], row["shape"]
    for number in (start, stop, *sizes):  # thousands of tensors: a generator takes twice as long
        if type(number) is not int or number < 0:
            raise ValueError(f"{name}: offsets and sizes must be integers of at least 0")
    if not isinstance(sizes, list) or len(sizes) > MAX_DIMENSIONS:
        raise ValueError(f"{name}: no shape of at most {MAX_DIMENSIONS} dimensions")
    width = ELEMENT_BYTES[row["dtype"]]
    count = 0 if 0 in sizes else width
    for size in sizes:
        count = min(count * size, image_bytes + 1)  # bounded: a size may have 4,000 digits
    if not start <= stop <= image_bytes - base or stop - start != count:
        raise ValueError(f"{name}: its place does not fit its shape or the image")
    return TensorPlace(dtype=row["dtype"], shape=tuple(sizes), start=base + start, stop=base + stop)


def _require_disjoint(places: dict[str, TensorPlace]) -> None:
    end = 0
    for place in sorted(places.values(), key=lambda place: (place.start, place.stop)):
        if place.stop > place.start:
            if place.start < end:
                raise ValueError(f"two tensors share the byte at {place.start}")
            end = place.stop


def _strings(data: Any) -> dict[str, str]:
    if not isinstance(data, dict) or not all(isinstance(value, str) for value in data.values()):
        raise ValueError("expected an object of strings")
    return data
