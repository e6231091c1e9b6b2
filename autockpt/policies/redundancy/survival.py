"""How likely memory survives when nodes are lost: exact, for any placement.

Cells are disjoint, so patterns of losses multiply.  Let a_j(c) be the number of ways in which a
cell c survives the loss of j of its members.  The number of survived patterns of k lost nodes is

    [x^k] prod_c sum_j a_j(c) x^j         and        P(k) = that / C(N, k).

    group, parity   a_j = C(s, j) for j <= t              s members, t tolerated
    ring            a_j = s / (s - j) [x^j] (1 + x + .. + x^t)^(s - j)

Integers until the last division, and equal cells are one power: 4,096 nodes take milliseconds.

Source for groups: Gemini (SOSP'23), corollary 1, is this product cut after its first two terms.
Rings: place j losses into the s - j gaps between survivors, at most t in each.
"""

import math
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from fractions import Fraction
from functools import lru_cache
from itertools import groupby

from autockpt.values.errors import ConfigError
from autockpt.values.placement import Cell, FailureDomains, Placement

TAIL = 0.5
"""The last figure of a distribution stands for itself and more; each further loss is this often."""
LONGEST_TAIL = 8
"""Losses beyond that many more are counted as that many."""

Shape = tuple[str, int, int]
"""The inputs of a_j: set, circle or row; members; tolerated."""


def survived(placement: Placement, lost: int, *, within: Collection[int] | None = None) -> float:
    """P that all shards can still be had after `lost` nodes are lost at once, each set as likely.

    `within`: only these nodes can be lost (a rack); None: all.
    Raises ConfigError where there are not so many.
    """
    population = len(placement.nodes) if within is None else len(within)
    if not 0 <= lost <= population:
        raise ConfigError(f"{lost} of {population} nodes lost: there are not so many")
    return float(Fraction(patterns(placement, lost, within)[lost], math.comb(population, lost)))


def survived_mix(
    placement: Placement, shares: Sequence[float], *, within: Collection[int] | None = None
) -> float:
    """The same under a distribution: `shares` (or weights) of losses of 1, 2, ...
    and at least len(shares).

    The last share is spread over more losses, each half as often as the one before.  With 4 % of
    "at least 4" that is 2 % of 4, 1 % of 5, and so on.
    """
    population = len(placement.nodes) if within is None else len(within)
    spread = list(shares)
    if min(spread, default=-1.0) < 0 or not sum(spread):
        raise ConfigError(f"shares of simultaneous losses {spread}: must be >= 0 and not all 0")
    last = spread.pop()
    spread += [last * TAIL ** (k + 1) for k in range(LONGEST_TAIL)]
    spread[-1] += last * TAIL**LONGEST_TAIL
    found = patterns(placement, min(len(spread), population), within)
    return math.fsum(
        share * found[k] / math.comb(population, k)
        for share, k in ((s, min(k, population)) for k, s in enumerate(spread, start=1))
    ) / math.fsum(spread)


def survived_alone(placement: Placement, probability: float) -> float:
    """P under independent losses, each node with this `probability` (within the same window)."""
    if not 0.0 <= probability <= 1.0:
        raise ConfigError(f"a loss probability of {probability:g}: must be between 0 and 1")
    shapes = Counter(shape for cell in placement.cells for shape in _shapes(cell, None))
    failed = 0.0
    for shape, count in shapes.items():
        lost = _lost_alone(shape, probability)
        if lost >= 1.0:
            return 0.0
        failed += count * math.log1p(-lost)
    return math.exp(failed)


def survived_domains(placement: Placement, domains: FailureDomains, level: str) -> float:
    """Share of the domains of a level whose loss as a whole, all nodes at once, is survived."""
    members = domains.members(level).values()
    placed = frozenset(placement.nodes)
    return sum(placement.survives(placed.intersection(m)) for m in members) / max(1, len(members))


def patterns(
    placement: Placement, most: int, within: Collection[int] | None = None
) -> tuple[int, ...]:
    """By number of lost nodes, 0 to `most`, how many sets of nodes can be lost and are survived."""
    chosen = None if within is None else frozenset(within)
    shapes = Counter(shape for cell in placement.cells for shape in _shapes(cell, chosen))
    return _product(tuple(sorted(shapes.items())), most)


# --- cells to polynomials -------------------------------------------------------------------------


def _shapes(cell: Cell, within: frozenset[int] | None) -> Iterator[Shape]:
    """Yield the parts of a cell that can be lost: the rows of a ring, else the members."""
    hit = [within is None or node in within for node in cell.members]
    if cell.kind != "ring":
        yield "set", sum(hit), cell.tolerates
    elif all(hit):
        yield "circle", len(hit), cell.tolerates
    else:
        start = hit.index(False)
        for is_hit, row in groupby(hit[start:] + hit[:start]):
            if is_hit:
                yield "row", len(list(row)), cell.tolerates


@lru_cache(maxsize=256)
def _product(shapes: tuple[tuple[Shape, int], ...], most: int) -> tuple[int, ...]:
    total = [1]
    for shape, count in shapes:
        total = _times(total, _power(_counts(shape, most), count, most), most)
    return tuple(total + [0] * (most + 1 - len(total)))


def _counts(shape: Shape, most: int) -> list[int]:
    """a_j for j = 0 .. `most`."""
    kind, size, tolerates = shape
    if kind == "set":
        return [math.comb(size, j) for j in range(min(size, tolerates, most) + 1)]
    if kind == "row":
        return [_filled(j, size - j + 1, tolerates) for j in range(min(size, most) + 1)]
    # Circle: of all gaps between survivors together s rotations, each counted s - j times.
    return [
        size * _filled(j, size - j, tolerates) // (size - j) for j in range(min(size - 1, most) + 1)
    ]


def _filled(balls: int, bins: int, most: int) -> int:
    """Ways to put `balls` into `bins`, at most `most` in each: [x^balls] (1 + .. + x^most)^bins."""
    if bins == 0:
        return int(balls == 0)
    return sum(
        (-1) ** i * math.comb(bins, i) * math.comb(balls - i * (most + 1) + bins - 1, bins - 1)
        for i in range(min(bins, balls // (most + 1)) + 1)
    )


def _times(left: Sequence[int], right: Sequence[int], most: int) -> list[int]:
    product = [0] * min(most + 1, len(left) + len(right) - 1)
    for i, a in enumerate(left):
        for j, b in enumerate(right[: len(product) - i]):
            product[i + j] += a * b
    return product


def _power(base: Sequence[int], exponent: int, most: int) -> list[int]:
    result, square = [1], list(base)
    while exponent:
        if exponent & 1:
            result = _times(result, square, most)
        exponent >>= 1
        if exponent:
            square = _times(square, square, most)
    return result


def _lost_alone(shape: Shape, p: float) -> float:
    """P that a cell is lost, its members being lost independently."""
    kind, size, tolerates = shape
    q = 1.0 - p
    if kind == "set":
        return math.fsum(
            math.comb(size, j) * p**j * q ** (size - j) for j in range(tolerates + 1, size + 1)
        )
    # A circle: cut it at a survivor.  `row[n]`: P that n in a row hold no run of more than t.
    row = [1.0] * (size + 1)
    for n in range(tolerates + 1, size + 1):
        begun = math.fsum(p**i * q * row[n - i - 1] for i in range(tolerates + 1))
        row[n] = begun
    around = math.fsum(
        (i + 1) * p**i * q * q * row[size - i - 2] for i in range(min(tolerates, size - 2) + 1)
    )
    if size - 1 <= tolerates:  # all but one
        around += size * p ** (size - 1) * q
    return max(0.0, 1.0 - around)
