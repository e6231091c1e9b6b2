"""GF(16): 16 elements as 4 bits, addition is XOR; the Cauchy matrix and its inverses.  Pure."""

from collections.abc import Sequence
from functools import cache

BITS = 4
SIZE = 1 << BITS
_POLYNOMIAL = 0b10011  # x^4 + x + 1, primitive

Matrix = tuple[tuple[int, ...], ...]


def multiply(a: int, b: int) -> int:
    """The product of two elements."""
    product = 0
    while b:
        if b & 1:
            product ^= a
        a <<= 1
        if a & SIZE:
            a ^= _POLYNOMIAL
        b >>= 1
    return product


def inverse(a: int) -> int:
    """The element whose product with `a` is 1; a != 0."""
    return next(b for b in range(1, SIZE) if multiply(a, b) == 1)


@cache
def bit_rows(a: int) -> tuple[tuple[int, ...], ...]:
    """For every bit of a * x the bits of x whose XOR it is."""
    columns = [multiply(a, 1 << bit) for bit in range(BITS)]
    return tuple(
        tuple(bit for bit in range(BITS) if columns[bit] >> row & 1) for row in range(BITS)
    )


@cache
def parity_matrix(losses: int, data: int) -> Matrix:
    """[losses][data]: every square part of it has an inverse, and the first row is all ones.

    A Cauchy matrix 1 / (x_j + y_i).  Columns are divided by their first entry, the cheapest ones
    are taken, and further rows are scaled to be cheap.  All of that keeps the inverses.  For one
    loss any number of data symbols goes, for more `losses + data` <= 16.
    """
    if losses == 1:
        return ((1,) * data,)
    assert losses + data <= SIZE
    columns = [_scaled([inverse(j ^ y) for j in range(losses)], by=y) for y in range(losses, SIZE)]
    rows = zip(*sorted(columns, key=_cost)[:data], strict=True)
    return tuple(
        min((_scaled(row, by=scale) for scale in range(1, SIZE)), key=_cost) for row in rows
    )


def _scaled(elements: Sequence[int], *, by: int) -> tuple[int, ...]:
    return tuple(multiply(element, by) for element in elements)


def _cost(elements: Sequence[int]) -> int:
    """XORs of packets that multiplications by these take."""
    return sum(len(bits) for element in elements for bits in bit_rows(element))


def inverse_matrix(matrix: Sequence[Sequence[int]]) -> Matrix:
    """The inverse of a square matrix that has one (Gauss-Jordan)."""
    size = len(matrix)
    rows = [[*row, *(int(i == j) for j in range(size))] for i, row in enumerate(matrix)]
    for at in range(size):
        pivot = next(i for i in range(at, size) if rows[i][at])
        rows[at], rows[pivot] = rows[pivot], rows[at]
        scale = inverse(rows[at][at])
        rows[at] = [multiply(entry, scale) for entry in rows[at]]
        for i in range(size):
            if i != at and (factor := rows[i][at]):
                rows[i] = [
                    entry ^ multiply(factor, other)
                    for entry, other in zip(rows[i], rows[at], strict=True)
                ]
    return tuple(tuple(row[size:]) for row in rows)
