"""One parameter with its moments, pruned together and quantised: the symbols, and back.

    symbols of dW   one per element, 0: pruned
    symbols of m    one per kept weight, 0: pruned
    symbols of v    one per kept moment
    centres         of dW, m and v; those of v are found in the domain of logarithms, so that small
                    ones stay small and none is 0
    rows, columns   what pruned second moments come back as (`fill`)

Restoring takes one rounded operation per element and is
therefore the same, to the bit, on every machine and device.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from autockpt.executors.lossy import entropy
from autockpt.executors.lossy.codebook import CENTRES, centres_of, nearest
from autockpt.executors.lossy.fill import factors, filled
from autockpt.executors.lossy.frame import Form
from autockpt.executors.lossy.thresholds import Thresholds, kept
from autockpt.values.errors import CorruptCheckpointError

STREAMS = 8


STREAMS = 5
_TABLE = CENTRES + 1
"""As many as a symbol of four bits can name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Symbols:
    """What is stored of a group."""

    weights: torch.Tensor
    """uint8 [elements]."""
    first: torch.Tensor
    second: torch.Tensor
    tables: torch.Tensor
    """float32 [3, 16]: what the symbols of weights, first and second moments stand for."""
    rows: torch.Tensor
    """int16, as `fill` has them."""
    columns: torch.Tensor


def matrix(tensor: torch.Tensor) -> torch.Tensor:
    """float32 [first dimension, the rest]."""
    return tensor.float().reshape(tensor.shape[0], -1)


def analysed(
    weight: torch.Tensor, first: torch.Tensor, second: torch.Tensor,
    base: torch.Tensor, by: Thresholds,
) -> Symbols:  # fmt: skip
    """Prunes and quantises; tensors of one shape, at least two dimensions, finite, v >= 0."""
    delta, m, v = matrix(weight) - matrix(base), matrix(first), matrix(second)
    keep, keep_moments = kept(delta, m, v, by)
    weights, weight_centres = _symbols(delta, keep)
    strong, first_centres = _symbols(m, keep_moments)
    tiny = torch.finfo(torch.float32).tiny
    logs = v[keep_moments].clamp(min=tiny).log2()
    log_centres = centres_of(logs)
    tables = delta.new_zeros(3, _TABLE)
    tables[0, 1 : 1 + len(weight_centres)] = weight_centres
    tables[1, 1 : 1 + len(first_centres)] = first_centres
    tables[2, : len(log_centres)] = log_centres.exp2().clamp(min=tiny)
    rows, columns = factors(v, ~keep_moments)
    return Symbols(
        weights=weights.flatten(), first=strong[keep], second=nearest(logs, log_centres),
        tables=tables, rows=rows, columns=columns,
    )  # fmt: skip


def _symbols(values: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(symbols of the shape of `values`: 0 or one more than the centre's number, centres)."""
    survivors = values[mask]
    centres = centres_of(survivors)
    symbols = torch.zeros(values.shape, dtype=torch.uint8, device=values.device)
    symbols[mask] = nearest(survivors, centres) + 1
    return symbols, centres


def rebuilt(
    symbols: Symbols, base: torch.Tensor, forms: tuple[Form, ...]
) -> tuple[torch.Tensor, ...]:
    """(weight, m, v) of these forms: what a restore gets."""
    weight = base.float().flatten() + symbols.tables[0][symbols.weights.long()]
    keep = symbols.weights > 0
    first = torch.zeros_like(weight)
    first[keep] = symbols.tables[1][symbols.first.long()]
    second = filled(symbols.rows, symbols.columns).flatten()
    keep_moments = torch.zeros_like(keep)
    keep_moments[keep] = symbols.first > 0
    second[keep_moments] = symbols.tables[2][symbols.second.long()]
    return (
        narrowed(weight, forms[0]), narrowed(first, forms[1]),
        narrowed(second, forms[2], positive=True),
    )  # fmt: skip


def narrowed(values: torch.Tensor, form: Form, *, positive: bool = False) -> torch.Tensor:
    """float32 in the form of a tensor, without infinities; `positive`: what is not 0 stays so."""
    if form.dtype != torch.float32:
        of = torch.finfo(form.dtype)
        values = values.clamp(min=-of.max, max=of.max)
        if positive:
            values = torch.where(values > 0, values.clamp(min=of.smallest_normal), values)
    return values.to(form.dtype).reshape(form.shape)


def to_streams(symbols: Symbols) -> list[bytes]:
    """Compressed."""
    factor = torch.cat([symbols.rows, symbols.columns])
    return [
        *(entropy.pack_nibbles(part) for part in (symbols.weights, symbols.first, symbols.second)),
        *(entropy.squeezed(bytes_of(table)) for table in (symbols.tables, factor)),
    ]


def from_streams(streams: tuple[bytes, ...], form: Form) -> Symbols:
    """Of a group whose tensors have this form.  Raises CorruptCheckpointError."""
    if len(streams) != STREAMS or len(form.shape) < 2 or not form.count:
        raise CorruptCheckpointError(f"pruned frame: {len(streams)} streams of {form.shape}")
    rows = form.shape[0]
    weights = entropy.unpack_nibbles(streams[0], form.count)
    first = entropy.unpack_nibbles(streams[1], int((weights > 0).sum()))
    second = entropy.unpack_nibbles(streams[2], int((first > 0).sum()))
    tables = entropy.unsqueezed(streams[3], 4 * 3 * _TABLE)
    factor = tensor_of(entropy.unsqueezed(streams[4], 2 * (rows + form.count // rows)), "<i2")
    return Symbols(
        weights=weights, first=first, second=second,
        tables=tensor_of(tables, "<f4").view(3, _TABLE), rows=factor[:rows], columns=factor[rows:],
    )  # fmt: skip


def bytes_of(tensor: torch.Tensor) -> bytes:
    """Of its elements."""
    array: Any = tensor.cpu().contiguous().numpy()
    return bytes(array.tobytes())


def tensor_of(raw: bytes, dtype: str) -> torch.Tensor:
    """Elements that `bytes_of` wrote, in new memory."""
    return torch.from_numpy(np.frombuffer(bytearray(raw), dtype=dtype))
