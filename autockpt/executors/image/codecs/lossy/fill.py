"""The stand-in for a pruned second moment: never zero where Adam has seen a gradient.

With v = 0 and a late step counter, an entry's next Adam step is lr (1 - b1) / sqrt(1 - b2) for any
gradient.  That is 3.2 lr with (0.9, 0.999), for all such entries at once.  So a pruned v comes back
as the product of the means of its row and its column.  This costs rows + columns numbers instead of
rows x columns.  The mean of a skewed quantity is above its typical value.  So most first steps are
shorter than they would have been, and never longer than with v = 0.

Source: the factored second moment of Adafactor (Shazeer and Stern, 2018), here over pruned entries.
"""

import torch

KEEP_BITS = 12
"""Bits kept of a float32's 16 upper bits: sign, 8 of exponent, 3 of mantissa.  Rounding is up, so
by at most an eighth."""


def factors(second: torch.Tensor, pruned: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(rows, columns) as int16 [rows] and [columns], the upper halves of float32 numbers.

    `second` is float32 [rows, columns], finite and not negative; `pruned` is the mask of entries to
    fill.  A row or column has 0 only if all that it has to fill is 0.
    """
    lost = torch.where(pruned, second, 0.0).double()
    rows = lost.sum(1) / pruned.sum(1).clamp(min=1)
    columns = lost.sum(0) / pruned.sum(0).clamp(min=1)
    mean = lost.sum() / pruned.sum().clamp(min=1)
    return _rounded_up(rows), _rounded_up(columns / mean.clamp(min=1e-300))


def filled(rows: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
    """float32 [rows, columns]: one product per entry, the same on every machine."""
    product = _wide(rows)[:, None] * _wide(columns)[None, :]
    live = (rows != 0)[:, None] & (columns != 0)[None, :]
    smallest = torch.finfo(torch.float32).tiny  # a product may underflow
    return torch.where(live, product.clamp(min=smallest, max=_LARGEST), 0.0)


_LARGEST = 2.0**127


def _rounded_up(values: torch.Tensor) -> torch.Tensor:
    narrow = values.clamp(max=_LARGEST).float()
    narrow = torch.where(values > 0, narrow.clamp(min=torch.finfo(torch.float32).tiny), 0.0)
    drop = 32 - KEEP_BITS
    bits = narrow.view(torch.int32)
    up = (bits + ((1 << drop) - 1)) >> drop << drop
    return (up >> 16).to(torch.int16)


def _wide(upper: torch.Tensor) -> torch.Tensor:
    return (upper.to(torch.int32) << 16).view(torch.float32)
