"""The objects of a script, and the objects in them.  No code of the script runs for it."""

import sys
import types
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from autockpt.session.place.script.frames import is_script_file

MOST_OBJECTS, MOST_ITEMS, DEPTH = 2000, 100, 3
"""Objects of the script that are looked into, items of a list or dict, and objects in objects."""


def inside(roots: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
    """The roots and their parts, breadth first; nothing of libraries, tensors and models."""
    row, seen = list(roots), set[int]()
    for _ in range(DEPTH + 1):
        coming = []
        for path, one in row:
            yield path, one
            if id(one) not in seen and len(seen) < MOST_OBJECTS:
                own = parts(one)
                if own:
                    seen.add(id(one))
                    coming += [(f"{path}.{key}", part) for key, part in own]
        row = coming


def parts(one: Any) -> list[tuple[str, Any]]:
    """(name, part) of each part; no code of the script runs for it."""
    if type(one) is dict:
        items = list(one.items()) if len(one) <= MOST_ITEMS else []
        return [(str(key), item) for key, item in items]
    if type(one) in (list, tuple):
        return [(str(i), item) for i, item in enumerate(one)] if len(one) <= MOST_ITEMS else []
    kinds = (type, types.ModuleType, types.FunctionType, torch.nn.Module, torch.optim.Optimizer)
    if isinstance(one, kinds) or not is_own(type(one)):
        return []
    own = getattr(one, "__dict__", None)
    return list(own.items()) if type(own) is dict else []


def is_own(kind: type) -> bool:
    """A class of the script, or of a module beside it."""
    module = sys.modules.get(kind.__module__)
    if module is None or kind.__module__ == "builtins":
        return False
    file = getattr(module, "__file__", None)
    return kind.__module__ == "__main__" or (file is not None and is_script_file(file))
