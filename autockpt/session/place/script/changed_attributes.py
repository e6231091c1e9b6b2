"""Plain values that callbacks and other objects of the script's keep in a framework's loop.

No framework asks them for a state.  An adapter knows these objects, and its checkpoints contain the
values.  Loops of the script's own get a notice instead (`carried_attributes`).
"""

import ast
import contextlib
import functools
import inspect
import os
import sys
import textwrap
from collections import deque
from collections.abc import Mapping
from typing import Any

from autockpt.session.place.script.carried_values import asks_clock
from autockpt.session.place.script.frames import is_script_file
from autockpt.session.place.script.refill import refilled

_MOST_VALUES = 10_000
"""In one attribute; a longer history is the script's to keep."""


class ChangedAttributes:
    """Plain values in attributes of the script's objects that the training changes.

    A callback counts, or remembers a best value, and nothing asks it for a state.  A class of the
    script assigns the attribute, and its value differs from a first look.  Arguments of a
    constructor do not change, and come from this start.  Times of a clock are left out.
    """

    def __init__(self, owners: Mapping[str, Any]) -> None:
        """`owners`: by their names in the checkpoint."""
        self._owners = dict(owners)
        self._first = {name: _plain_attributes(one) for name, one in self._owners.items()}

    def state(self) -> dict[str, dict[str, Any]]:
        """By owner, as JSON can hold it."""
        found = {}
        for name, owner in self._owners.items():
            first, now = self._first[name], _plain_attributes(owner)
            if changed := {k: v for k, v in now.items() if k not in first or first[k] != v}:
                found[name] = changed
        return found

    def load(self, state: Mapping[str, Mapping[str, Any]]) -> None:
        """Takes it back.  A list, deque, set or dict that is there stays the same object."""
        for name, values in state.items():
            for key, value in values.items() if name in self._owners else ():
                with contextlib.suppress(Exception):  # a class may have another attribute by now
                    _put_back(self._owners[name], key, value)


def _plain_attributes(owner: Any) -> dict[str, Any]:
    """By name what can be kept of the attributes that classes of the script assign."""
    names = {name for each in type(owner).__mro__ for name in _assigned_by(each)}
    found = {}
    for name in names & getattr(owner, "__dict__", {}).keys():
        with contextlib.suppress(TypeError):
            found[name] = _written(vars(owner)[name], [_MOST_VALUES])
    return found


@functools.cache
def _assigned_by(kind: type) -> frozenset[str]:
    """Attributes of `self` that a class of the script assigns or changes, without clock's times."""
    module = sys.modules.get(kind.__module__)
    if not is_script_file(getattr(module, "__file__", None) or os.__file__):
        return frozenset()
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(kind)))
    except (OSError, SyntaxError, TypeError):
        return frozenset()
    names, times = set[str](), set[str]()
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign | ast.AnnAssign | ast.AugAssign) and node.value is not None:
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            of_self = {
                each.attr for target in targets for each in ast.walk(target)
                if isinstance(each, ast.Attribute) and ast.unparse(each.value) == "self"
            }  # fmt: skip
            names |= of_self
            if not isinstance(node, ast.AugAssign) and asks_clock(node.value):
                times |= of_self
    return frozenset(names - times)


def _written(value: Any, left: list[int]) -> Any:
    """As JSON can hold it.  Raises TypeError for other kinds, and for too many."""
    left[0] -= 1
    if left[0] < 0:
        raise TypeError
    if value is None or type(value) in (bool, int, float, str):
        return value
    if type(value) in (list, tuple, deque, set):
        return [_written(one, left) for one in (sorted(value) if type(value) is set else value)]
    if type(value) is dict:
        return {"pairs": [[_written(k, left), _written(v, left)] for k, v in value.items()]}
    raise TypeError


def _read(value: Any) -> Any:
    if isinstance(value, list):
        return [_read(one) for one in value]
    if isinstance(value, Mapping):
        return {k: _read(v) for k, v in value["pairs"]}
    return value


def _put_back(owner: Any, name: str, written: Any) -> None:
    live, value = getattr(owner, name, None), _read(written)
    value = tuple(value) if isinstance(live, tuple) and isinstance(value, list) else value
    setattr(owner, name, refilled(live, value))
