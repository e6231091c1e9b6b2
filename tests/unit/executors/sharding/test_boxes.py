"""Geometry of boxes, against counting elements one by one."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from autockpt.executors.image.layout.boxes import (
    Box,
    common_runs,
    contains,
    flat_range_boxes,
    intersect,
    overlaps,
    subtract,
    whole,
    without,
)
from autockpt.values.errors import ConfigError


def elements(box: Box, shape: tuple[int, ...]) -> list[int]:
    """Numbers of a box's elements in the whole tensor, in the order of its memory."""
    numbers = np.arange(math.prod(shape)).reshape(shape)
    return [int(n) for n in numbers[box.slices_in(whole(shape))].reshape(-1)]


@st.composite
def shapes(draw: st.DrawFn) -> tuple[int, ...]:
    """0 to 3 dimensions."""
    return tuple(draw(st.lists(st.integers(1, 6), max_size=3)))


@st.composite
def box_in(draw: st.DrawFn, shape: tuple[int, ...]) -> Box:
    """A part, perhaps empty."""
    offset, size = [], []
    for total in shape:
        offset.append(draw(st.integers(0, total)))
        size.append(draw(st.integers(0, total - offset[-1])))
    return Box(offset=tuple(offset), shape=tuple(size))


@st.composite
def two_boxes(draw: st.DrawFn) -> tuple[tuple[int, ...], Box, Box]:
    """A tensor and two parts of it."""
    shape = draw(shapes())
    return shape, draw(box_in(shape)), draw(box_in(shape))


@given(two_boxes(), st.integers(1, 20))
def test_runs_are_the_common_elements_in_the_memory_of_both(
    case: tuple[tuple[int, ...], Box, Box], most: int
) -> None:
    """In order, each once; None when there are more than may be."""
    shape, a, b = case
    both = intersect(a, b)
    if both is None:
        return
    runs = common_runs(both, a, b, most=10**6)
    assert runs is not None
    in_a, in_b = elements(a, shape), elements(b, shape)
    for first, second, count in runs:
        assert in_a[first : first + count] == in_b[second : second + count]
    found = [n for first, _, count in runs for n in in_a[first : first + count]]
    assert found == elements(both, shape)
    if common_runs(both, a, b, most=most) is None:
        assert len(runs) > most
    else:
        assert len(runs) <= most


@given(two_boxes())
def test_the_intersection_holds_what_both_hold(case: tuple[tuple[int, ...], Box, Box]) -> None:
    """None when that is nothing."""
    shape, a, b = case
    both = intersect(a, b)
    common = sorted(set(elements(a, shape)) & set(elements(b, shape)))
    assert ([] if both is None else elements(both, shape)) == common
    assert both is None or (contains(shape, both) and both.count)


@given(two_boxes())
def test_box_without_hole_is_the_rest_in_few_disjoint_boxes(
    case: tuple[tuple[int, ...], Box, Box],
) -> None:
    """At most two a dimension."""
    shape, box, hole = case
    left = subtract(box, hole)
    found = [n for part in left for n in elements(part, shape)]
    assert sorted(found) == sorted(set(elements(box, shape)) - set(elements(hole, shape)))
    assert len(left) <= max(1, 2 * len(shape))
    assert without([box], hole) == left


@st.composite
def flat_ranges(draw: st.DrawFn) -> tuple[tuple[int, ...], int, int]:
    """A range of the elements of a tensor."""
    shape = draw(shapes())
    start = draw(st.integers(0, math.prod(shape)))
    return shape, start, draw(st.integers(start, math.prod(shape)))


@given(flat_ranges())
def test_a_flat_range_is_few_boxes_in_its_own_order(case: tuple[tuple[int, ...], int, int]) -> None:
    """At most 2n-1 for n dimensions."""
    shape, start, stop = case
    boxes = flat_range_boxes(start, stop, shape)
    assert [n for box in boxes for n in elements(box, shape)] == list(range(start, stop))
    assert len(boxes) <= max(1, 2 * len(shape) - 1)


@given(st.data())
def test_overlaps_say_where_every_element_stands_in_memory(data: st.DataObject) -> None:
    """Of boxes that follow one another, and a range of their elements."""
    shape = data.draw(shapes())
    boxes = [data.draw(box_in(shape)) for _ in range(data.draw(st.integers(0, 3)))]
    memory = [n for box in boxes for n in elements(box, shape)]
    start = data.draw(st.integers(0, len(memory)))
    stop = data.draw(st.integers(start, len(memory)))
    at = start
    for part in overlaps(boxes, start, stop):
        assert part.start == at
        assert elements(part.box, shape) == memory[at : at + part.box.count]
        at += part.box.count
    assert at == stop


def test_a_part_names_itself_and_moves() -> None:
    """As an error shows it."""
    box = Box(offset=(2, 0), shape=(3, 4))
    assert str(box) == "[2:5, 0:4]"
    assert box.moved((1, 5)) == Box(offset=(3, 5), shape=(3, 4))


@pytest.mark.parametrize(
    "box",
    [
        Box(offset=(0,), shape=(3,)),
        Box(offset=(-1, 0), shape=(1, 1)),
        Box(offset=(0, 0), shape=(2, -1)),
        Box(offset=(3, 0), shape=(2, 1)),
    ],
)
def test_what_is_no_part_is_not_contained(box: Box) -> None:
    """Other dimensions, negative numbers, beyond the end."""
    assert not contains((4, 4), box)


def test_a_range_outside_the_tensor_is_refused() -> None:
    """It would be cut short in silence."""
    with pytest.raises(ConfigError, match=r"flat range \[3, 9\) does not fit a tensor of 8"):
        flat_range_boxes(3, 9, (2, 4))
