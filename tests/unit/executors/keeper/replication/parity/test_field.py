"""Arithmetic of 16 elements, checked whole."""

from itertools import combinations, product

import pytest

from autockpt.executors.keeper.replication.parity.field import (
    BITS,
    SIZE,
    bit_rows,
    inverse,
    inverse_matrix,
    multiply,
    parity_matrix,
)

ELEMENTS = range(SIZE)


def test_sixteen_elements_are_a_field() -> None:
    """Every law on every element."""
    for a, b, c in product(ELEMENTS, repeat=3):
        assert multiply(a, b) == multiply(b, a)
        assert multiply(a, multiply(b, c)) == multiply(multiply(a, b), c)
        assert multiply(a, b ^ c) == multiply(a, b) ^ multiply(a, c)
    for a in ELEMENTS[1:]:
        assert multiply(a, inverse(a)) == 1
        assert multiply(a, 1) == a


def test_bit_rows_multiply() -> None:
    """A constant is a matrix over the bits."""
    for a, x in product(ELEMENTS, repeat=2):
        bits = [sum(x >> bit & 1 for bit in row) % 2 for row in bit_rows(a)]
        assert sum(bits[i] << i for i in range(BITS)) == multiply(a, x)


@pytest.mark.parametrize(("losses", "data"), [(1, 40), (2, 6), (3, 5), (2, 14), (4, 12), (8, 8)])
def test_every_square_part_has_an_inverse(losses: int, data: int) -> None:
    """That is what makes any `losses` symbols come back."""
    matrix = parity_matrix(losses, data)
    assert set(matrix[0]) == {1}
    for size in range(1, min(losses, 3) + 1):
        for rows in combinations(range(losses), size):
            for columns in combinations(range(min(data, 8)), size):
                part = [[matrix[r][c] for c in columns] for r in rows]
                assert _product(part, inverse_matrix(part)) == [
                    [int(i == j) for j in range(size)] for i in range(size)
                ]


def _product(a: list[list[int]], b: tuple[tuple[int, ...], ...]) -> list[list[int]]:
    def entry(i: int, j: int) -> int:
        total = 0
        for k in range(len(b)):
            total ^= multiply(a[i][k], b[k][j])
        return total

    return [[entry(i, j) for j in range(len(b))] for i in range(len(a))]
