"""Random generators that the script holds itself: found by name, saved and put back.

A script may draw from a `torch.Generator`, a `random.Random` or numpy's beside the global ones.
They stand in variables, in objects of its own, in modules of a model.  They are looked for until
the loop begins, because a script may build them, and draw its data from them, behind `attach`.
Attached loaders keep theirs by themselves (`executors/state/data/shuffle_rng.py`).
"""

import os
import random
import sys
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import torch

from autockpt.executors.linux.signal_errors import is_from_handler
from autockpt.executors.state import state_tree
from autockpt.executors.state.data.shuffle_rng import (
    GENERATORS,
    generator_state,
    set_generator_state,
)
from autockpt.executors.state.rng import generator_mark
from autockpt.session.place.script.frames import is_script_file
from autockpt.session.place.script.objects import inside


class ScriptGenerators:
    """The generators by name, and the states of the checkpoint that was resumed."""

    def __init__(self, say: Callable[[str], None]) -> None:
        """`say` gives the user a sentence."""
        self._say = say
        self._found: dict[str, Any] = {}
        self._unreadable: dict[int, Any] = {}
        """By id; kept, so that no other object gets the id."""
        self._saved: dict[str, Any] = {}
        self._unfit: set[str] = set()
        """Names whose generator does not take the saved state."""
        self.has_drawn = False
        """A batch of the training was asked for: a generator with its state has drawn since."""
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
        *,
        again: bool = False,
    ) -> None:
        """Finds them from `frame` outwards, and puts their states back before training begins.

        The script may have drawn from them meanwhile, as it does at every start.  After the first
        batch, or with `again`, only generators that were not found before get their states.
        `known`: generators that a loader's position saves, so their states here are not needed.
        """
        before, theirs = set(self._found), {id(one) for one in known}
        every = list(_found(frame, models))
        self._take([(path, one) for path, one in every if id(one) not in theirs], theirs)
        for path, one in every:
            if id(one) in theirs and path not in self._found:
                self._saved.pop(path, None)
        coming = [name for name in self._saved if name in self._found]
        if self.has_drawn or again:
            coming = [name for name in coming if name not in before]
        for name in coming:
            self._put_back(name)
        late = ", ".join(name for name in coming if name not in self._unfit)
        if self.has_drawn and late:
            self._say(
                f"the random generator {late} got the state of the checkpoint within "
                "the first iteration: numbers that this iteration drew before may differ. Build "
                "it before attach"
            )

    def _take(self, found: list[tuple[str, Any]], theirs: set[int]) -> None:
        """Each keeps its first name; of several with one path the later ones get a mark."""
        here = {id(one) for _, one in found}
        taken = {name: one for name, one in self._found.items() if id(one) not in theirs}
        named = {id(one) for one in taken.values()}
        for path, one in found:
            if id(one) in named or id(one) in self._unreadable or not self._is_readable(path, one):
                continue
            while path in taken and id(taken[path]) in here:
                path += "'"
            taken[path] = one
        self._found = taken

    def _is_readable(self, name: str, one: Any) -> bool:
        try:
            generator_mark(one)
            state_tree.encode(generator_state(one), name, {})
        except Exception as error:
            self._leave_out(name, one, error)
            return False
        return True

    def _leave_out(self, name: str, one: Any, error: Exception) -> None:
        """A generator that cannot be read ends no training."""
        if is_from_handler(error):
            raise error
        self._unreadable[id(one)] = one
        self._say(
            f"the random generator {name} ({type(one).__qualname__}) is not saved, because its "
            f"state cannot be read: {error!r:.200}. A restart begins it anew"
        )

    def _put_back(self, name: str) -> None:
        self._unfit.discard(name)
        try:
            set_generator_state(self._found[name], self._saved[name])
        except Exception as error:
            if is_from_handler(error):
                raise
            self._unfit.add(name)

    def put_back(self, states: Mapping[str, Any]) -> None:
        """Put back states that `states` gave."""
        for name in self._found.keys() & states.keys():
            set_generator_state(self._found[name], states[name])

    def begin(self) -> None:
        """The training begins; the user reads where a generator is missing."""
        self.has_begun = True
        saved, self._saved = self._saved, {}
        lost = [name for name in saved if name not in self._found or name in self._unfit]
        if lost:
            self._say(
                f"the checkpoint has the state of the random generator {', '.join(lost)}. Where "
                "its loop begins, the script has none of that name and kind, so its numbers differ "
                "from a training without a restart"
            )

    def states(self) -> dict[str, Any]:
        """As of now; until the training begins, as of the checkpoint."""
        return {**self._read(generator_state), **self._saved}

    def mark(self) -> list[Any]:
        """Another one when the script has drawn from one of them meanwhile."""
        return [*self._read(generator_mark).values()]

    def _read(self, read: Callable[[Any], Any]) -> dict[str, Any]:
        result: dict[str, Any] = {}
        for name, one in list(self._found.items()):
            try:
                result[name] = read(one)
            except Exception as error:
                self._leave_out(name, one, error)
                del self._found[name]
        return result


def _found(
    frame: types.FrameType | None, models: Mapping[str, torch.nn.Module]
) -> Iterator[tuple[str, Any]]:
    """(name, generator), each once."""
    known = set[int]()
    for path, one in inside(_roots(frame, models)):
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
        if is_script_file(frame.f_code.co_filename) and frame.f_code.co_name != "<module>":
            for name, value in list(frame.f_locals.items()):
                yield f"{frame.f_code.co_name}.{name}", value
        frame = frame.f_back
    main = sys.modules.get("__main__")
    beside = os.path.dirname(os.path.abspath(getattr(main, "__file__", None) or "x"))
    for module_name, module in sorted(sys.modules.copy().items()):
        file = getattr(module, "__file__", None)
        here = file is not None and os.path.abspath(file).startswith(beside + os.sep)
        if module is main or (here and is_script_file(str(file))):
            prefix = "" if module is main else f"{module_name}."
            for name, value in list(vars(module).items()):
                yield f"{prefix}{name}", value
    for name, model in models.items():
        for path, part in model.named_modules():
            for key, value in list(vars(part).items()):
                if isinstance(value, GENERATORS):
                    yield ".".join(filter(None, (name, path, key))), value
