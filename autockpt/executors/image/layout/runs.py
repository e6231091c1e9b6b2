"""The runs of equal elements in a chunk, so that a codec can take elements apart.

A chunk of an image holds pieces of several tensors.  A codec that ignores them sees bytes.  One
that knows the width of an element can group bytes of equal meaning, and bytes of equal origin (all
second moments, say).
"""

import itertools
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from autockpt.values.errors import ConfigError

WIDTHS = (1, 2, 4, 8)
_FLOATING, _DELTA = 16, 32


@dataclass(frozen=True, slots=True)
class Kind:
    """How the elements of a run are taken apart."""

    width: int = 1
    """Bytes of an element: 1, 2, 4 or 8."""
    floating: bool = False
    """Sign, exponent, mantissa from the top bit down, as IEEE 754 and bfloat16 have them."""
    delta: bool = False
    """Elements are stored as differences to the elements of a base."""

    def __post_init__(self) -> None:
        if self.width not in WIDTHS:
            raise ConfigError(f"elements of {self.width} bytes; expected one of {WIDTHS}")

    @property
    def code(self) -> int:
        """As one byte; see `kind_of`."""
        return self.width | _FLOATING * self.floating | _DELTA * self.delta


def kind_of(code: int) -> Kind:
    """The kind of a code.  Raises ConfigError when there is none."""
    if code & ~(15 | _FLOATING | _DELTA):
        raise ConfigError(f"no kind of element has the code {code}")
    return Kind(code & 15, bool(code & _FLOATING), bool(code & _DELTA))


BYTES = Kind()
"""The kind of undescribed bytes."""


@dataclass(frozen=True, slots=True)
class Run:
    """Successive elements of one kind and origin."""

    nbytes: int
    """A multiple of the kind's width."""
    kind: Kind = BYTES
    group: int = 0
    """Runs of one group and kind are encoded together: they hold values that are alike."""


def runs_of(ranges: Sequence[Sequence[int]], start: int, stop: int) -> list[Run]:
    """The runs of the chunk [start, stop) of an image: as long as it, or none that touches it.

    `ranges`: ascending rows (start, stop, kind code, group) of the image; what lies between them,
    or is not whole elements, is bytes.
    """
    runs: list[Run] = []
    at = start
    first = bisect_right(ranges, start, key=lambda row: row[1])
    for low, high, code, group in itertools.islice(ranges, first, None):
        if low >= stop:
            break
        low, high = max(low, at), min(high, stop)
        kind = kind_of(code)
        high -= (high - low) % kind.width
        if high <= low:
            continue
        if low > at:
            runs.append(Run(low - at))
        runs.append(Run(high - low, kind, group))
        at = high
    if runs and stop > at:
        runs.append(Run(stop - at))
    return runs
