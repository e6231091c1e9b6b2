"""Ratio and speed of codecs on pieces of the job's own tensors, by class, one thread.

A codec that does not give the bytes back is left out and named: a fast wrong one is no candidate.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, Protocol

from autockpt.profiles.samples import CodecSample


class Codec(Protocol):
    """Encodes and decodes one chunk of elements of one dtype."""

    def encode(
        self, raw: memoryview, dtype: str, base: memoryview | None, /
    ) -> memoryview | bytes: ...

    def decode(
        self, frame: memoryview | bytes, raw_bytes: int, base: memoryview | None, /
    ) -> memoryview | bytes: ...


LEAST_CLASS_BYTES = 64 * 2**10


@dataclass(frozen=True, slots=True)
class Piece:
    """Contiguous bytes of one tensor."""

    tensor_class: Literal["parameters", "moments", "other"]
    data: memoryview
    dtype: str = "U8"
    """Of its elements, as safetensors calls it."""
    base: memoryview | None = None
    """The same bytes, `gap_steps` iterations ago."""
    gap_steps: int = 0
    role: str = ""
    """Pieces of one role hold values that are alike: they are encoded together, as in a chunk."""


def spread_pieces(
    regions: Sequence[Piece], *, piece_bytes: int, bytes_per_class: int
) -> list[Piece]:
    """At most `bytes_per_class` of every class, in pieces spread evenly over its regions.

    Classes of a few numbers are left out: their ratio would say something about frame headers.
    """
    pieces: list[Piece] = []
    for tensor_class in ("parameters", "moments", "other"):
        whole = [
            replace(region, data=region.data[start : start + piece_bytes])
            for region in regions
            if region.tensor_class == tensor_class
            for start in range(0, len(region.data), piece_bytes)
        ]
        total = sum(len(piece.data) for piece in whole)
        if total < LEAST_CLASS_BYTES:
            continue
        step = max(1, -(-total // bytes_per_class))
        pieces += whole[::step]
    return pieces


def joined(pieces: Sequence[Piece], *, piece_bytes: int) -> list[Piece]:
    """Small pieces of one kind and role copied into larger ones of about `piece_bytes`.

    A chunk of a checkpoint holds many small tensors; measured one by one they would look slow.
    """
    waiting: dict[tuple[object, ...], list[Piece]] = {}
    done: list[Piece] = []
    for piece in pieces:
        key = (piece.tensor_class, piece.dtype, piece.role, piece.gap_steps, piece.base is None)
        group = waiting.setdefault(key, [])
        group.append(piece)
        if sum(len(one.data) for one in group) >= piece_bytes:
            done.append(_one_piece(waiting.pop(key)))
    return done + [_one_piece(group) for group in waiting.values()]


def _one_piece(group: list[Piece]) -> Piece:
    if len(group) == 1:
        return group[0]
    data = memoryview(b"".join(one.data for one in group))
    bases = [one.base for one in group if one.base is not None]
    return replace(group[0], data=data, base=memoryview(b"".join(bases)) if bases else None)


def measure_codecs(
    codecs: Mapping[str, Codec], pieces: Sequence[Piece], *, budget_s: float = 4.0
) -> tuple[list[CodecSample], list[str]]:
    """(samples, warnings); codecs take turns piece by piece until the budget is used up."""
    samples: list[CodecSample] = []
    warnings: list[str] = []
    live = dict(codecs)
    began = time.perf_counter()
    for number, piece in enumerate(_alternate(pieces)):
        if number and time.perf_counter() - began > budget_s:
            break
        for name in list(live):
            sample = _round_trip(name, live[name], piece)
            if isinstance(sample, CodecSample):
                samples.append(sample)
            else:
                del live[name]
                samples = [s for s in samples if s.codec != name]
                warnings.append(sample)
    return samples, warnings


def _alternate(pieces: Sequence[Piece]) -> list[Piece]:
    """One of each class in turn, so that a short budget still sees all classes."""
    by_class: dict[str, list[Piece]] = {}
    for piece in pieces:
        by_class.setdefault(piece.tensor_class, []).append(piece)
    longest = max((len(group) for group in by_class.values()), default=0)
    return [group[i] for i in range(longest) for group in by_class.values() if i < len(group)]


def _round_trip(name: str, codec: Codec, piece: Piece) -> CodecSample | str:
    try:
        began = time.perf_counter()
        encoded = codec.encode(piece.data, piece.dtype, piece.base)
        encoded_at = time.perf_counter()
        decoded = codec.decode(encoded, len(piece.data), piece.base)
        decoded_at = time.perf_counter()
        faithful = memoryview(decoded) == piece.data
    except Exception as error:  # a codec is foreign code; any error excludes it
        return f"codec {name}: failed on {piece.tensor_class}: {error!r}; it is not offered"
    if not faithful:
        return f"codec {name}: does not give back the {piece.tensor_class}; it is not offered"
    return CodecSample(
        codec=name,
        tensor_class=piece.tensor_class,
        raw_bytes=len(piece.data),
        encoded_bytes=len(encoded),
        encode_s=encoded_at - began,
        decode_s=decoded_at - encoded_at,
        gap_steps=piece.gap_steps,
    )
