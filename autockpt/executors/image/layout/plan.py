"""Where every byte of the state stands in an image.  Pure: names, shapes and offsets, no tensors.

An image is a header of whole pages (safetensors JSON, padded with blanks) followed by the data.
Tensors that are copied at the iteration boundary come first, lazily copied ones after them.  The
copied part of an image is therefore always a prefix, and one counter tells the pipeline how far it
may read.  Tensors of a page or more start on a page; smaller ones are packed in descending element
size.  Gaps are declared as `__pad.N` tensors because safetensors refuses holes.

A shard is described by boxes in global coordinates: a tensor that one rank holds whole is one box.
"""

import hashlib
import json
from collections.abc import Collection
from dataclasses import dataclass

from autockpt.executors.image.layout.boxes import Box
from autockpt.executors.image.layout.runs import Kind
from autockpt.values.errors import ConfigError

PAGE_BYTES = 4096
EXTRA = "__extra"
"""Name of the U8 tensor that holds the skeleton of the state as JSON, padded with blanks."""

ELEMENT_BYTES = {
    "F64": 8, "I64": 8, "U64": 8, "C64": 8, "F32": 4, "I32": 4, "U32": 4, "F16": 2, "BF16": 2,
    "I16": 2, "U16": 2, "F8_E4M3": 1, "F8_E5M2": 1, "I8": 1, "U8": 1, "BOOL": 1,
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSpec:
    """One tensor of this rank's state."""

    name: str
    dtype: str
    """safetensors name of the stored dtype."""
    shape: tuple[int, ...]
    """Stored shape (the true one, except for dtypes that safetensors lacks)."""
    true_dtype: str
    """torch name of the dtype, e.g. "float32" or "complex128"."""
    lazy: bool
    """True: constant from the boundary to the fence, copied under compute."""
    tensor_class: str
    """parameters, moments or other."""
    global_shape: tuple[int, ...] | None = None
    """None: this rank holds the tensor whole."""
    boxes: tuple[Box, ...] = ()
    part: str = ""
    """Optimizer that changes it; tensors of one part stand together."""

    @property
    def nbytes(self) -> int:
        """Stored bytes."""
        count = ELEMENT_BYTES[self.dtype]
        for size in self.shape:
            count *= size
        return count


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A tensor at its place in the image."""

    spec: TensorSpec
    offset: int
    """From the start of the image, bytes."""

    @property
    def end(self) -> int:
        """One past the last byte."""
        return self.offset + self.spec.nbytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """The places of all tensors of one rank, cached until the structure changes."""

    entries: tuple[Entry, ...]
    """In image order: boundary tensors first."""
    aliases: tuple[tuple[str, str], ...]
    """(name, name of the entry that holds its bytes): tied tensors are stored once."""
    header: bytes
    """The first pages of the image."""
    boundary_end: int
    """Everything before this offset is copied at the boundary."""
    image_bytes: int
    extra_bytes: int
    """Capacity of the EXTRA tensor."""
    digest: str
    """Structural fingerprint: names, shapes, dtypes, boxes, aliases; not the sizes of EXTRA."""

    def entry(self, name: str) -> Entry:
        """The entry of a name, aliases resolved.  Raises KeyError."""
        target = dict(self.aliases).get(name, name)
        return {entry.spec.name: entry for entry in self.entries}[target]

    def codec_ranges(self, by_class: dict[str, str]) -> tuple[str, tuple[tuple[int, ...], ...]]:
        """Return a plan's codec and the (start, stop, kind code, group) ranges it applies to.

        A shard file has one codec: `delta` is `planes` that may use a base, and goes before others.
        """
        codecs = sorted({codec for codec in by_class.values() if codec != "none"})
        if not codecs:
            return "none", ()
        family = [codecs[0], *(c for c in codecs if {c, codecs[0]} == {"delta", "planes"})]
        groups: dict[str, int] = {}
        ranges: list[tuple[int, ...]] = []
        for entry in self.entries:
            codec = by_class.get(entry.spec.tensor_class)
            if codec not in family or not entry.spec.nbytes:
                continue
            row = (entry.offset, entry.end, *_alike(entry.spec, str(codec), groups))
            # Pads between are encoded along, as elements of the same kind.
            if ranges and entry.offset - ranges[-1][1] < PAGE_BYTES and row[2:] == ranges[-1][2:]:
                row = (ranges.pop()[0], *row[1:])
            ranges.append(row)
        name = "planes" if codecs[0] == "delta" else codecs[0]
        # No ranges would mean everything: a class that this state lacks encodes nothing.
        return (name, tuple(ranges)) if ranges else ("none", ())


_FLOATING = ("F64", "F32", "F16", "BF16", "C64")


def _alike(spec: TensorSpec, codec: str, groups: dict[str, int]) -> tuple[int, int]:
    """(kind code, group): tensors of one kind and role hold values of one distribution."""
    if codec not in ("delta", "planes"):
        return Kind().code, 0
    kind = element_kind(spec.dtype, delta=codec == "delta")
    role = spec.name.rpartition(".")[2] if spec.tensor_class == "moments" else spec.tensor_class
    return kind.code, groups.setdefault(role, len(groups))


def element_kind(dtype: str, *, delta: bool = False) -> Kind:
    """How elements of a stored dtype are taken apart; complex numbers are two floats."""
    width = 4 if dtype == "C64" else ELEMENT_BYTES[dtype]
    return Kind(width, dtype in _FLOATING, delta)


def plan_layout(
    specs: list[TensorSpec],
    *,
    aliases: dict[str, str],
    extra_bytes: int,
    owner: int | None = None,
    known_nan: Collection[str] = (),
) -> Layout:
    """The layout of `specs` and an EXTRA tensor of `extra_bytes` capacity.

    `owner`: the rank, if it has tensors that are not known to be a part or replica of anything.
    Equal digests of layouts mean that shards hold the same parts of the same tensors.  `known_nan`:
    names of tensors whose NaN says nothing of the state.

    Raises ConfigError for names that stand twice or dtypes without a stored form.
    """
    _check(specs)
    extra = TensorSpec(
        name=EXTRA, dtype="U8", shape=(extra_bytes,), true_dtype="uint8", lazy=False,
        tensor_class="other",
    )  # fmt: skip
    boundary = _ordered([extra, *(spec for spec in specs if not spec.lazy)])
    lazy = _in_parts([spec for spec in specs if spec.lazy])
    pads_bound = 2 * (len(boundary) + len(lazy)) + 2
    nan = json.dumps(sorted({spec.name for spec in specs} & {*known_nan}), separators=(",", ":"))
    header_bytes = _header_capacity([*boundary, *lazy], pads_bound, aliases, nan)
    entries, table, end = _place(boundary, header_bytes, [], 0)
    lazy_start = _align(end)
    lazy_entries, table, end = _place(lazy, lazy_start, table, end)
    image_bytes = _align(end)
    _pad(table, end, image_bytes)
    return Layout(
        entries=(*entries, *lazy_entries),
        aliases=tuple(sorted(aliases.items())),
        header=_header(table, header_bytes, aliases, [*boundary, *lazy], nan),
        boundary_end=lazy_start,
        image_bytes=image_bytes,
        extra_bytes=extra_bytes,
        digest=_digest(specs, aliases, owner),
    )


def _check(specs: list[TensorSpec]) -> None:
    seen: set[str] = set()
    for spec in specs:
        if spec.name in seen or spec.name.startswith("__"):
            raise ConfigError(
                f"state: the name {spec.name!r} stands twice or is reserved; rename the entry"
            )
        seen.add(spec.name)
        _require_text(spec.name)
        if spec.dtype not in ELEMENT_BYTES:
            raise ConfigError(f"state: {spec.name}: dtype {spec.dtype} has no stored form")


def _require_text(name: str) -> None:
    """No other reader opens a file in which one name is no Unicode text."""
    try:
        name.encode()
    except UnicodeEncodeError:
        raise ConfigError(f"state: the name {name!r} is no Unicode text; rename it") from None


def _in_parts(specs: list[TensorSpec]) -> list[TensorSpec]:
    """Part after part, so that an optimizer waits for a prefix of the image only."""
    parts: dict[str, list[TensorSpec]] = {}
    for spec in specs:
        parts.setdefault(spec.part, []).append(spec)
    return [spec for part in parts.values() for spec in _ordered(part)]


def _ordered(specs: list[TensorSpec]) -> list[TensorSpec]:
    """Large tensors in the order given (the optimizer's), then small ones, packed without gaps."""
    large = [spec for spec in specs if spec.nbytes >= PAGE_BYTES]
    small = [spec for spec in specs if spec.nbytes < PAGE_BYTES]
    return [*large, *sorted(small, key=lambda spec: -_unit(spec))]


def _unit(spec: TensorSpec) -> int:
    """Alignment: of the true element, because torch moves complex numbers as one (SIGSEGV else)."""
    if spec.nbytes >= PAGE_BYTES:
        return PAGE_BYTES
    pairs = 2 if spec.true_dtype in ("complex128", "complex32") else 1
    return pairs * ELEMENT_BYTES[spec.dtype]


def _place(
    specs: list[TensorSpec],
    offset: int,
    table: list[tuple[str, str, list[int], int, int]],
    end: int,
) -> tuple[list[Entry], list[tuple[str, str, list[int], int, int]], int]:
    """Entries from `offset` on; `table` rows are (name, dtype, shape, start, stop)."""
    entries: list[Entry] = []
    for spec in specs:
        unit = _unit(spec)
        offset = -(-offset // unit) * unit
        if end:
            _pad(table, end, offset)
        entries.append(Entry(spec=spec, offset=offset))
        table.append((spec.name, spec.dtype, list(spec.shape), offset, offset + spec.nbytes))
        offset += spec.nbytes
        end = offset
    return entries, table, end


def _pad(table: list[tuple[str, str, list[int], int, int]], start: int, stop: int) -> None:
    if stop > start:
        table.append((f"__pad.{start:x}", "U8", [stop - start], start, stop))


def _align(offset: int) -> int:
    return -(-offset // PAGE_BYTES) * PAGE_BYTES


def _header_capacity(specs: list[TensorSpec], pads: int, aliases: dict[str, str], nan: str) -> int:
    """An upper bound in whole pages: sizes and offsets have at most 16 digits."""
    rows = sum(len(json.dumps(spec.name)) + 17 * len(spec.shape) + 140 for spec in specs)
    views = sum(len(json.dumps(spec.name)) + 60 for spec in specs)
    known = [spec for spec in specs if spec.global_shape is not None]
    parts = sum(len(json.dumps(f"part:{s.name}")) + 2 * len(_part(s)) for s in known)
    ties = len(json.dumps(json.dumps(aliases))) + len(json.dumps(nan))
    return _align(8 + rows + views + parts + ties + 140 * pads + 4096)


def _part(spec: TensorSpec) -> str:
    """Return its part of the global tensor, as text."""
    of = list(spec.global_shape or ())
    at = [[list(box.offset), list(box.shape)] for box in spec.boxes]
    return json.dumps({"of": of, "at": at}, separators=(",", ":"))


def _header(
    table: list[tuple[str, str, list[int], int, int]],
    header_bytes: int,
    aliases: dict[str, str],
    specs: list[TensorSpec],
    nan: str,
) -> bytes:
    meta = {"format": "autockpt-image-1"}
    if nan != "[]":
        meta["nan"] = nan
    if aliases:
        meta["aliases"] = json.dumps(aliases, separators=(",", ":"))
    for spec in specs:
        if spec.true_dtype != NATURAL_DTYPE.get(spec.dtype):
            meta[f"view:{spec.name}"] = spec.true_dtype
        if spec.global_shape is not None:
            meta[f"part:{spec.name}"] = _part(spec)
    data: dict[str, object] = {"__metadata__": meta}
    for name, dtype, shape, start, stop in table:
        data[name] = {
            "dtype": dtype,
            "shape": shape,
            "data_offsets": [start - header_bytes, stop - header_bytes],
        }
    text = json.dumps(data, separators=(",", ":")).encode()
    room = header_bytes - 8
    if len(text) > room:
        raise ConfigError(f"header of {len(text)} bytes exceeds its bound of {room}")
    return room.to_bytes(8, "little") + text + b" " * (room - len(text))


NATURAL_DTYPE = {
    "F64": "float64", "I64": "int64", "U64": "uint64", "C64": "complex64", "F32": "float32",
    "I32": "int32", "U32": "uint32", "F16": "float16", "BF16": "bfloat16", "I16": "int16",
    "U16": "uint16", "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2", "I8": "int8",
    "U8": "uint8", "BOOL": "bool",
}  # fmt: skip


def _digest(specs: list[TensorSpec], aliases: dict[str, str], owner: int | None) -> str:
    rows = [
        [s.name, s.dtype, list(s.shape), s.true_dtype, list(s.global_shape or ()),
         [[list(box.offset), list(box.shape)] for box in s.boxes]]
        for s in sorted(specs, key=lambda spec: spec.name)
    ]  # fmt: skip
    text = json.dumps([rows, sorted(aliases.items()), owner], separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:32]
