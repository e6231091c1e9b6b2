"""Averages of weights, other models and scalers of the script that no checkpoint contains.

A module that changes between two boundaries, and is in nothing that was attached, begins anew at a
restart.  A scaler of gradients changes rarely, and is named at once.
"""

import contextlib
import types
import weakref
from collections.abc import Collection, Iterator
from typing import Any

import torch

from autockpt.session.place.script.frames import script_frames
from autockpt.session.place.script.objects import inside

_MOST_PARAMETERS = 64
"""Of a module, that are compared."""


class UnattachedState:
    """Compares the script's modules at a boundary with the same modules earlier."""

    def __init__(self) -> None:
        self._before = weakref.WeakKeyDictionary[torch.nn.Module, tuple[Any, ...]]()
        self._named = weakref.WeakSet[Any]()

    def look(self, frame: types.FrameType | None, attached: Collection[Any]) -> str:
        """A sentence about objects that are not in `attached`, each once; else "".

        Raises nothing.
        """
        with contextlib.suppress(Exception):
            found = [
                (name, one) for name, one in self._changed(frame, attached)
                if one not in self._named
            ]  # fmt: skip
            self._named.update(one for _, one in found)
            return _sentence(found) if found else ""
        return ""

    def _changed(
        self, frame: types.FrameType | None, attached: Collection[Any]
    ) -> Iterator[tuple[str, Any]]:
        known, parameters = _parts_of(attached)
        seen: set[int] = set()
        for name, one in inside(_variables(frame)):
            if id(one) in seen | known:
                continue
            if isinstance(one, torch.amp.GradScaler):
                seen.add(id(one))
                if one.is_enabled():
                    yield name, one
            elif isinstance(one, torch.nn.Module):
                seen |= {id(part) for part in one.modules()}
                own = [each for each in one.parameters() if id(each) not in parameters]
                mark = tuple((each._version, each.data_ptr()) for each in own[:_MOST_PARAMETERS])
                if own and self._before.setdefault(one, mark) != mark:
                    yield name, one


def _variables(frame: types.FrameType | None) -> Iterator[tuple[str, Any]]:
    for each in script_frames(frame):
        yield from list(each.f_locals.items())
        if each.f_locals is not each.f_globals:
            yield from list(each.f_globals.items())


def _parts_of(attached: Collection[Any]) -> tuple[set[int], set[int]]:
    """(ids of the objects and of modules in them, ids of their parameters)."""
    known, parameters = set[int](), set[int]()
    for one in attached:
        known.add(id(one))
        held = list(getattr(one, "__dict__", {}).values())
        for each in (one, *held):
            if isinstance(each, torch.nn.Module):
                known |= {id(part) for part in each.modules()}
                parameters |= {id(value) for value in each.parameters()}
            elif isinstance(each, torch.amp.GradScaler):
                known.add(id(each))
    return known, parameters


def _sentence(found: list[tuple[str, Any]]) -> str:
    shown = ", ".join(f"{name} ({type(one).__name__})" for name, one in found)
    path, is_one = found[0][0], len(found) == 1
    name = next(part for part in reversed(path.split(".")) if part.isidentifier())
    change, them = ("changes", "it") if is_one else ("change", "them")
    return (
        f"{shown} {change} in the training and {'is' if is_one else 'are'} not attached, so a "
        f"restart begins {them} anew; add {them}: autockpt.attach(..., {name}={path})"
    )
