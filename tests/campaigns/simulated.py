"""The protocol in its simulated world (`tests.protocol.simulation`), with and without its rules."""

import dataclasses
import gc
import random
from pathlib import Path
from typing import Any

from autockpt.executors.protocol import messages
from autockpt.values.generation import Generation
from tests.campaigns.framework import require
from tests.protocol.mutants import MUTANTS, first_seed
from tests.protocol.simulation import replay_line, run_seed

COLLECT_AFTER = 100_000
"""Objects.  Worlds are short-lived: to look for their cycles more often costs a tenth."""


class Simulated:
    """Seeds in their order."""

    claim = "no seed of a hostile world of ranks, nodes, network and disks breaks the protocol"
    distinct: int | None = None

    def __init__(self, scratch: Path) -> None:
        gc.set_threshold(COLLECT_AFTER)
        thaw()

    def run(self, number: int, rng: random.Random) -> str:
        """One seed: its number."""
        broken = run_seed(number)
        require(broken is None, broken, "\n ", replay_line(number))
        return "held"

    def close(self) -> None:
        """Nothing stays open."""


class Mutants:
    """Every rule taken away once."""

    claim = "the simulation notices each rule of the protocol that is taken away"

    def __init__(self, scratch: Path) -> None:
        gc.set_threshold(COLLECT_AFTER)
        thaw()
        self._names = sorted(MUTANTS)
        self.distinct: int | None = len(self._names)

    def run(self, number: int, rng: random.Random) -> str:
        """Seeds from 0 until one breaks, within the budget of the mutant."""
        name = self._names[number % len(self._names)]
        found = first_seed(name, run_seed) is not None
        require(found, f"{name} survives {MUTANTS[name].budget} seeds")
        return name

    def close(self) -> None:
        """Nothing stays open."""


def thaw() -> None:
    """Lets constructors of messages assign, as those of dataclasses do that are not frozen.

    A fifth of the time of a seed went into `object.__setattr__`.  That no machine changes a message
    is seen by the seeds of `make test`, where they stay frozen.
    """
    there = (kind for kind in vars(messages).values() if dataclasses.is_dataclass(kind))
    own = [kind for kind in there if kind.__module__ == messages.__name__]
    for kind in (*own, Generation):
        if "__setattr__" in vars(kind):
            _thaw(kind)


def _thaw(kind: Any) -> None:
    fields = dataclasses.fields(kind)
    assert all(one.kw_only and one.default_factory is dataclasses.MISSING for one in fields), kind
    defaults = {one.name: one.default for one in fields if one.default is not dataclasses.MISSING}
    names = [one.name for one in fields]
    arguments = (f"{name}=_[{name!r}]" if name in defaults else name for name in names)
    lines = [f"def __init__(self, *, {', '.join(arguments)}):"]
    lines += [f" self.{name} = {name}" for name in names]
    lines += [" self.__post_init__()"] if hasattr(kind, "__post_init__") else []
    made: dict[str, Any] = {"_": defaults}
    exec("\n".join(lines), made)
    kind.__init__ = made["__init__"]
    del kind.__setattr__, kind.__delattr__
