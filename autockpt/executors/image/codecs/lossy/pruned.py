"""One parameter with its moments, pruned together and quantised: the symbols, and back.

* Symbols of dW: one per element, 0: pruned.
* Symbols of m: one per kept weight, 0: pruned.
* Symbols of v: one per kept moment.
* Centres of dW, m and v.  The centres of v are found in the domain of logarithms, so that small
  ones stay small and none is 0.
* Rows, columns: the factors from which pruned second moments come back (`fill`).

Restoring takes one rounded operation per element.  It is therefore the same, to the bit, on every
machine and device.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from autockpt.executors.image.codecs.lossy import entropy
from autockpt.executors.image.codecs.lossy.codebook import centres_of, nearest
from autockpt.executors.image.codecs.lossy.fill import factors, filled
from autockpt.executors.image.codecs.lossy.frame import Form
from autockpt.executors.image.codecs.lossy.thresholds import CENTRES, Thresholds, kept
from autockpt.values.errors import CorruptCheckpointError

STREAMS = 5
_TABLE = CENTRES + 1
"""The number of values that a symbol of four bits can name."""
_TINY = torch.finfo(torch.float32).tiny


@dataclass(frozen=True, slots=True, kw_only=True)
class Symbols:
    """The stored form of a group."""

    weights: torch.Tensor
    """uint8 [elements]."""
    first: torch.Tensor
    second: torch.Tensor
    tables: torch.Tensor
    """float32 [3, 16]: the values of the symbols of weights, first and second moments."""
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
    mask, moments = kept(delta, m, v, by)
    weights, of_weights = _symbols(delta, mask, by.centres)
    strong, of_first = _symbols(m, moments & (weights > 0), CENTRES)
    moments = strong > 0
    logs = v[moments].clamp(min=_TINY).log2()
    of_second = centres_of(logs, CENTRES)
    rows, columns = factors(v, ~moments)
    return Symbols(
        weights=weights.flatten(), first=strong[weights > 0], second=nearest(logs, of_second),
        tables=torch.stack([
            _table(of_weights, first=1), _table(of_first, first=1),
            _table(of_second.exp2().clamp(min=_TINY), first=0),
        ]),
        rows=rows, columns=columns,
    )  # fmt: skip


def _symbols(
    values: torch.Tensor, mask: torch.Tensor, count: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """(symbols of the shape of `values`: 0 or one more than the centre's number, centres).

    Values nearer to 0 than to their centre are pruned: no element is further from its true value
    than if nothing had been stored.
    """
    survivors = values[mask]
    centres = centres_of(survivors, count)
    symbols = torch.zeros(values.shape, dtype=torch.uint8, device=values.device)
    if len(survivors):
        number = nearest(survivors, centres)
        better = (survivors - centres[number.long()]).abs() <= survivors.abs()
        symbols[mask] = torch.where(better, number + 1, 0)
    return symbols, centres


def _table(centres: torch.Tensor, *, first: int) -> torch.Tensor:
    table = centres.new_zeros(_TABLE)
    table[first : first + len(centres)] = centres
    return table


def rebuilt(
    symbols: Symbols, base: torch.Tensor, forms: tuple[Form, ...]
) -> tuple[torch.Tensor, ...]:
    """Return (weight, m, v) in these forms, as a restore gets them."""
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
    """Return `values` in `form`, without infinities; `positive`: none above 0 becomes 0."""
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
