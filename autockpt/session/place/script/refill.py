"""A saved container comes back as the same object, which other objects of the script may hold."""

from collections import deque
from typing import Any


def refilled(former: Any, value: Any) -> Any:
    """`former` with the content of `value`, where both hold alike; else `value`.

    A list, a deque and a set take the content of any sequence, a dict that of a dict.
    """
    holds_pairs = isinstance(former, dict)
    if former is value or not isinstance(former, list | deque | set | dict):
        return value
    if holds_pairs != isinstance(value, dict) or isinstance(value, str | bytes):
        return value
    try:
        content = value if holds_pairs else list(value)
    except TypeError:  # a number in its place
        return value
    former.clear()
    (former.extend if isinstance(former, list | deque) else former.update)(content)
    return former
