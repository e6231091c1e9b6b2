"""The container of a block of tensors: its kind, the digests of its base and of its output.

1. magic, kind, number of tensors and streams, digest of the base's bytes
2. per tensor: dtype, digest of the decoded bytes
3. per stream: length
4. the streams
5. the digest of all before it

The decoder passes the dtypes and shapes that it expects.  The frame decides no allocation, and a
frame of other tensors is refused.
"""

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import xxhash

from autockpt.executors.image.dtypes import dtype_name, true_dtype
from autockpt.values.errors import ConfigError, CorruptCheckpointError

MAGIC = b"ACLF1"
KINDS = ("lossless", "same", "residual8", "signed8", "unsigned8", "pruned")
MAX_TENSORS, MAX_STREAMS = 3, 12
DIGEST_BYTES = 16
NO_BASE = bytes(DIGEST_BYTES)
_HEAD = struct.Struct(f"<5sBBB{DIGEST_BYTES}s")
_TENSOR = struct.Struct(f"<16s{DIGEST_BYTES}s")
_LENGTH = struct.Struct("<Q")


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """The dtype and shape that a decoded tensor must have."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def count(self) -> int:
        """Elements."""
        count = 1
        for size in self.shape:
            count *= size
        return count

    @property
    def nbytes(self) -> int:
        """Of the decoded tensor."""
        return self.count * self.dtype.itemsize


@dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
    """A parsed frame."""

    kind: str
    base: bytes
    """Digest of the tensor it was made against, NO_BASE for none."""
    dtypes: tuple[str, ...]
    digests: tuple[bytes, ...]
    """Digests of the decoded tensors."""
    streams: tuple[bytes, ...]


def tensor_digest(tensor: torch.Tensor) -> bytes:
    """xxh3-128 of a tensor's bytes in its own order."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    raw: Any = flat.view(torch.uint8).numpy() if flat.numel() else b""
    return xxhash.xxh3_128_digest(raw)


def pack(
    kind: str, tensors: Sequence[torch.Tensor], streams: Sequence[bytes], base: bytes = NO_BASE
) -> bytes:
    """The frame from which `tensors` come out."""
    body = [_HEAD.pack(MAGIC, KINDS.index(kind), len(tensors), len(streams), base)]
    for tensor in tensors:
        body.append(_TENSOR.pack(dtype_name(tensor.dtype).encode(), tensor_digest(tensor)))
    body += [_LENGTH.pack(len(stream)) for stream in streams]
    data = b"".join([*body, *streams])
    return data + xxhash.xxh3_128_digest(data)


def has_base(data: bytes | memoryview) -> bool:
    """Whether a frame was made against another tensor; it may be anything still."""
    return len(data) >= _HEAD.size and _HEAD.unpack_from(data)[4] != NO_BASE


def parse(data: bytes | memoryview) -> Frame:
    """The frame in `data`.  Raises CorruptCheckpointError for anything else."""
    raw, digest = bytes(data[:-DIGEST_BYTES]), bytes(data[-DIGEST_BYTES:])
    if len(raw) < _HEAD.size or xxhash.xxh3_128_digest(raw) != digest:
        raise CorruptCheckpointError(f"frame of {len(data)} bytes: does not match its own digest")
    magic, kind, tensors, streams, base = _HEAD.unpack_from(raw)
    if magic != MAGIC or kind >= len(KINDS) or tensors > MAX_TENSORS or streams > MAX_STREAMS:
        raise CorruptCheckpointError(
            f"frame: {magic!r}, kind {kind}, {tensors} tensors, {streams} streams: not of this "
            "format; use the version that wrote it"
        )
    at = _HEAD.size
    try:
        rows = [_TENSOR.unpack_from(raw, at + i * _TENSOR.size) for i in range(tensors)]
        at += tensors * _TENSOR.size
        lengths = [_LENGTH.unpack_from(raw, at + i * _LENGTH.size)[0] for i in range(streams)]
        names = tuple(name.rstrip(b"\0").decode("ascii") for name, _ in rows)
    except (struct.error, UnicodeDecodeError) as error:
        raise CorruptCheckpointError(f"frame: its head is malformed: {error!r:.100}") from None
    at += streams * _LENGTH.size
    if at + sum(lengths) != len(raw):
        raise CorruptCheckpointError(f"frame: {len(raw)} bytes, its streams say otherwise")
    cut = []
    for length in lengths:
        cut.append(raw[at : at + length])
        at += length
    return Frame(
        kind=KINDS[kind], base=base, dtypes=names, digests=tuple(digest for _, digest in rows),
        streams=tuple(cut),
    )  # fmt: skip


def require_forms(frame: Frame, forms: Sequence[Form]) -> None:
    """Raises CorruptCheckpointError unless the frame is of these tensors."""
    try:
        found = [true_dtype(name) for name in frame.dtypes]
    except ConfigError as error:
        raise CorruptCheckpointError(f"frame: {error}") from None
    if found != [form.dtype for form in forms]:
        raise CorruptCheckpointError(
            f"frame: holds {', '.join(frame.dtypes)}, expected "
            f"{', '.join(dtype_name(form.dtype) for form in forms)}"
        )


def require_digests(frame: Frame, tensors: Sequence[torch.Tensor]) -> None:
    """Raises CorruptCheckpointError unless these came out when the frame was made."""
    for number, (tensor, digest) in enumerate(zip(tensors, frame.digests, strict=True)):
        if tensor_digest(tensor) != digest:
            raise CorruptCheckpointError(
                f"frame: tensor {number} of a {frame.kind} frame came out as other bytes than when "
                "it was made"
            )
