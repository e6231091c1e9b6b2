"""Containers come back as the same objects."""

from collections import deque
from typing import Any

import pytest

from autockpt.session.place.script.refill import refilled


@pytest.mark.parametrize(
    ("former", "value", "expected"),
    [([1], [2, 3], [2, 3]), (deque([1], maxlen=2), [2, 3], deque([2, 3])), ({1}, [2, 3], {2, 3}),
     ({"a": 1}, {"b": 2}, {"b": 2})],
)  # fmt: skip
def test_a_container_keeps_its_identity(former: Any, value: Any, expected: Any) -> None:
    """Other objects of the script may hold it; a deque keeps its length."""
    found = refilled(former, value)
    assert found is former
    assert found == expected
    assert getattr(found, "maxlen", 2) == 2


@pytest.mark.parametrize(
    ("former", "value"), [([1], {"a": 2}), ({"a": 1}, [2]), ([1], "text"), ({1}, 7), (3, [4])]
)
def test_a_value_of_another_kind_takes_its_place(former: Any, value: Any) -> None:
    """And nothing of the former one is lost on the way."""
    before = former.copy() if hasattr(former, "copy") else former
    assert refilled(former, value) is value
    assert former == before
