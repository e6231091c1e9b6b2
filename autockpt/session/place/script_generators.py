"""Random generators that the script holds itself: found by name, saved and put back.

A script may draw from a `torch.Generator`, a `random.Random` or numpy's beside the global ones.
They stand in variables, in objects of its own, in modules of a model.  They are looked for until
the loop begins, because a script may build them, and draw its data from them, behind `attach`.
Attached loaders keep theirs by themselves (`executors/state/shuffle_rng.py`).
"""

import contextlib
import os
import random
import sys
import types
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import torch

from autockpt.executors.state.rng import generator_mark
from autockpt.executors.state.shuffle_rng import GENERATORS, generator_state, set_generator_state

MOST_OBJECTS, MOST_ITEMS, DEPTH = 2000, 100, 3
"""Objects of the script that are looked into, items of a list or dict, and objects in objects."""

_FOREIGN = ("site-packages", "dist-packages", os.path.dirname(os.__file__))


class ScriptGenerators:
    """The generators by name, and the states of the checkpoint that was resumed."""

    def __init__(self) -> None:
        self._found: dict[str, Any] = {}
        self._saved: dict[str, Any] = {}
        self.has_looked = False
        """They were looked for, and the found ones have their states."""
        self.has_begun = False
        """The script trains, so nothing is put back any more."""

    def expect(self, states: Mapping[str, Any]) -> None:
        """The states of the checkpoint that was resumed."""
        self._saved = dict(states)

    def look(
        self,
        frame: types.FrameType | None,
        models: Mapping[str, torch.nn.Module],
        known: Iterable[Any],
    ) -> None:
        """Find them from `frame` outwards, and put their states back.

        The script is about to train, and may meanwhile have repeated the draws of every start.
        `known`: generators that are saved otherwise.
        """
        self.has_looked = True
        self._found = dict(_found(frame, models, {id(one) for one in known}))
        for name in [*self._saved]:
            with contextlib.suppress(KeyError, TypeError, ValueError, RuntimeError, AttributeError):
                set_generator_state(self._found[name], self._saved[name])

    def begin(self) -> list[str]:
        """The training begins; a sentence for the user where a generator is missing."""
        self.has_begun = True
        saved, self._saved = self._saved, {}
        lost = [name for name in saved if name not in self._found]
        if not lost:
            return []
        return [
            f"the checkpoint has the state of the random generator {', '.join(lost)}, and the "
            "script has none of that name where its loop begins: its numbers differ from a "
            "training without a restart"
        ]

    def states(self) -> dict[str, Any]:
        """As of now; until the training begins, as of the checkpoint."""
        found = {name: generator_state(one) for name, one in self._found.items()}
        return {**found, **self._saved}

    def mark(self) -> list[Any]:
        """Another one when the script has drawn from one of them meanwhile."""
        return [generator_mark(one) for one in self._found.values()]


def _found(
    frame: types.FrameType | None, models: Mapping[str, torch.nn.Module], known: set[int]
) -> Iterator[tuple[str, Any]]:
    """(name, generator), each once."""
    for path, one in _inside(_roots(frame, models)):
        is_drawn = isinstance(one, GENERATORS) and not isinstance(one, random.SystemRandom)
        if is_drawn and id(one) not in known | _GLOBAL:
            known.add(id(one))
            yield path, one


_PYTHONS: Any = random.getstate
_GLOBAL = {id(torch.default_generator), id(_PYTHONS.__self__), id(np.random.mtrand._rand)}
"""The generators that `rng_state` reads."""


def _roots(
    frame: types.FrameType | None, models: Mapping[str, torch.nn.Module]
) -> Iterator[tuple[str, Any]]:
    """Variables of the script: of its functions that run now, of its modules; modules of models."""
    while frame is not None:
        if _is_script(frame.f_code.co_filename) and frame.f_code.co_name != "<module>":
            for name, value in list(frame.f_locals.items()):
                yield f"{frame.f_code.co_name}.{name}", value
        frame = frame.f_back
    main = sys.modules.get("__main__")
    beside = os.path.dirname(os.path.abspath(getattr(main, "__file__", None) or "x"))
    for module_name, module in sorted(sys.modules.copy().items()):
        file = getattr(module, "__file__", None)
        here = file is not None and os.path.abspath(file).startswith(beside + os.sep)
        if module is main or (here and _is_script(str(file))):
            prefix = "" if module is main else f"{module_name}."
            for name, value in list(vars(module).items()):
                yield f"{prefix}{name}", value
    for name, model in models.items():
        for path, part in model.named_modules():
            for key, value in list(vars(part).items()):
                if isinstance(value, GENERATORS):
                    yield ".".join(filter(None, (name, path, key))), value


def _inside(roots: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
    """The roots and their parts, breadth first; nothing of libraries, tensors and models."""
    row, seen = list(roots), set[int]()
    for _ in range(DEPTH + 1):
        coming = []
        for path, one in row:
            yield path, one
            if id(one) not in seen and len(seen) < MOST_OBJECTS:
                parts = _parts(one)
                if parts:
                    seen.add(id(one))
                    coming += [(f"{path}.{key}", part) for key, part in parts]
        row = coming


def _parts(one: Any) -> list[tuple[str, Any]]:
    if type(one) is dict:
        items = list(one.items()) if len(one) <= MOST_ITEMS else []
        return [(str(key), item) for key, item in items]
    if type(one) in (list, tuple):
        return [(str(i), item) for i, item in enumerate(one)] if len(one) <= MOST_ITEMS else []
    kinds = (type, types.ModuleType, types.FunctionType, torch.nn.Module, torch.optim.Optimizer)
    if isinstance(one, kinds) or not _is_own(type(one)):
        return []
    own = getattr(one, "__dict__", None)
    return list(own.items()) if type(own) is dict else []


def _is_own(kind: type) -> bool:
    """A class of the script, or of a module beside it."""
    module = sys.modules.get(kind.__module__)
    if module is None or kind.__module__ == "builtins":
        return False
    file = getattr(module, "__file__", None)
    return kind.__module__ == "__main__" or (file is not None and _is_script(file))


def _is_script(file: str) -> bool:
    """No file of Python, of an installed package, or of ours."""
    path = os.path.abspath(file)
    return not path.startswith(_OURS) and not any(part in path for part in _FOREIGN)


_OURS = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))) + os.sep
