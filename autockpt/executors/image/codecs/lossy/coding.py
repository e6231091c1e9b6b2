"""Choose the stored form of a group of tensors, and keep errors from adding up.

A group is a block of a parameter with its two Adam moments, or any tensor alone.  The encoder
decodes every result with the code that a restore runs, and takes the next residual against that.
The error of one checkpoint is thus part of the next residual, so errors never add up.

    excp        matrices of `SMALL` elements or more: pruned; smaller groups: 8-bit residuals and
                moments
    quantised   weights lossless, moments 8-bit

Everything else is lossless: other optimizer state, buffers, and dtypes other than 16- or 32-bit
floats.  So are tensors with non-finite values and second moments below 0.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from autockpt.executors.image.codecs.lossy import blocks, entropy, frame, pruned
from autockpt.executors.image.codecs.lossy.frame import Form
from autockpt.executors.image.codecs.lossy.thresholds import Thresholds
from autockpt.values.errors import CorruptCheckpointError

Method = Literal["none", "excp", "quantised"]
LOSSY_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SMALL = 4096
"""In groups with fewer elements, centres and factors would take as many bytes as they save."""
LOSSLESS_LEVEL = 3


@dataclass(frozen=True, slots=True)
class Coded:
    """Frames of a group, and what comes out of them."""

    frames: tuple[bytes, ...]
    tensors: tuple[torch.Tensor, ...]
    lossy: bool


def form_of(tensor: torch.Tensor) -> Form:
    """Return the form of a tensor, which a decoder needs."""
    return Form(dtype=tensor.dtype, shape=tuple(tensor.shape))


def encode_group(
    weight: torch.Tensor, first: torch.Tensor, second: torch.Tensor,
    base: torch.Tensor | None, method: Method, by: Thresholds,
) -> Coded:  # fmt: skip
    """A block of a parameter with its moments; `base`: the block as its predecessor restores it."""
    tensors = (weight, first, second)
    usable = all(map(_usable, tensors)) and not bool((second < 0).any()) and weight.numel() > 0
    same_shapes = weight.shape == first.shape == second.shape
    if method == "none" or not usable or not same_shapes:
        return _joined([encode_lossless(weight, base), *map(encode_lossless, (first, second))])
    moments = [_eight_bit(first, "signed8"), _eight_bit(second, "unsigned8")]
    if method == "quantised":
        return _joined([encode_lossless(weight, base), *moments])
    if base is None or form_of(base) != form_of(weight) or not _usable(weight.float() - base):
        return _joined([encode_lossless(weight), *moments])
    if weight.ndim < 2 or weight.numel() < SMALL:
        return _joined([_residual(weight, base), *moments])
    symbols = pruned.analysed(weight, first, second, base, by)
    made = pruned.rebuilt(symbols, base, tuple(map(form_of, tensors)))
    against = frame.tensor_digest(base)
    data = frame.pack("pruned", made, pruned.to_streams(symbols), against)
    return Coded((data,), made, lossy=True)


def encode_lossless(tensor: torch.Tensor, base: torch.Tensor | None = None) -> Coded:
    """Any tensor; one that is its predecessor, to the bit, costs nothing."""
    if base is not None and form_of(base) == form_of(tensor):
        digest = frame.tensor_digest(base)
        if digest == frame.tensor_digest(tensor):
            return Coded((frame.pack("same", [tensor], [], digest),), (tensor,), lossy=False)
    streams = [entropy.squeezed(_raw(tensor), LOSSLESS_LEVEL)]
    return Coded((frame.pack("lossless", [tensor], streams),), (tensor,), lossy=False)


def _usable(tensor: torch.Tensor) -> bool:
    return tensor.dtype in LOSSY_DTYPES and bool(torch.isfinite(tensor).all())


def _joined(parts: Sequence[Coded]) -> Coded:
    return Coded(
        tuple(data for part in parts for data in part.frames),
        tuple(tensor for part in parts for tensor in part.tensors),
        lossy=any(part.lossy for part in parts),
    )


def _eight_bit(tensor: torch.Tensor, kind: Literal["signed8", "unsigned8"]) -> Coded:
    signed = kind == "signed8"
    codes, scales = blocks.quantised(tensor.float().flatten(), signed=signed)
    values = blocks.restored(codes, scales, signed=signed)
    made = pruned.narrowed(values, form_of(tensor), positive=not signed)
    data = frame.pack(kind, [made], blocks.to_streams(codes, scales))
    return Coded((data,), (made,), lossy=True)


def _residual(weight: torch.Tensor, base: torch.Tensor) -> Coded:
    delta = (weight.float() - base.float()).flatten()
    codes, scales = blocks.quantised(delta, signed=True)
    made = _moved(base, codes, scales)
    streams, against = blocks.to_streams(codes, scales), frame.tensor_digest(base)
    return Coded((frame.pack("residual8", [made], streams, against),), (made,), lossy=True)


def _moved(base: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    step = blocks.restored(codes, scales, signed=True)
    return pruned.narrowed(base.float().flatten() + step, form_of(base))


def decode(
    data: bytes | memoryview, forms: Sequence[Form], base: torch.Tensor | None
) -> tuple[torch.Tensor, ...]:
    """The tensors of a frame, of these forms and to the bit as when it was made.

    `base`: the first one as the predecessor restores it; None if there is none.  Raises
    CorruptCheckpointError for any other frame, a wrong base and anything malformed.
    """
    parsed = frame.parse(data)
    frame.require_forms(parsed, forms)
    if parsed.base != frame.NO_BASE:
        if base is None or frame.tensor_digest(base) != parsed.base or form_of(base) != forms[0]:
            raise CorruptCheckpointError(
                f"{parsed.kind} frame: was made against another tensor than its predecessor holds"
            )
        tensors = _against(parsed, tuple(forms), base)
    else:
        tensors = (_alone(parsed, forms[0]),)
    frame.require_digests(parsed, tensors)
    return tensors


def _against(
    parsed: frame.Frame, forms: tuple[Form, ...], base: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    match parsed.kind, len(forms):
        case "same", 1:
            return (base,)
        case "residual8", 1:
            return (_moved(base, *blocks.from_streams(parsed.streams, forms[0].count)),)
        case "pruned", 3 if len({form.shape for form in forms}) == 1:
            symbols = pruned.from_streams(parsed.streams, forms[0])
            return pruned.rebuilt(symbols, base, forms)
    raise CorruptCheckpointError(f"frame: a {parsed.kind} of {len(forms)} tensors with a base")


def _alone(parsed: frame.Frame, form: Form) -> torch.Tensor:
    if len(parsed.digests) == 1 and parsed.kind == "lossless" and len(parsed.streams) == 1:
        raw = bytearray(entropy.unsqueezed(parsed.streams[0], form.nbytes))
        empty = torch.empty(0, dtype=torch.uint8, device="cpu")
        flat = torch.frombuffer(raw, dtype=torch.uint8) if raw else empty
        return flat.view(form.dtype).reshape(form.shape)
    if len(parsed.digests) == 1 and parsed.kind in ("signed8", "unsigned8"):
        signed = parsed.kind == "signed8"
        codes, scales = blocks.from_streams(parsed.streams, form.count)
        values = blocks.restored(codes, scales, signed=signed)
        return pruned.narrowed(values, form, positive=not signed)
    raise CorruptCheckpointError(f"frame: a {parsed.kind} of {len(parsed.digests)} without base")


def _raw(tensor: torch.Tensor) -> bytes:
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return pruned.bytes_of(flat.view(torch.uint8)) if flat.numel() else b""
