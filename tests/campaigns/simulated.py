"""The protocol in its simulated world, with and without its rules."""

import gc
import random
from pathlib import Path

from tests.campaigns.framework import require
from tests.simulation.mutants import MUTANTS, first_seed
from tests.simulation.simulation import replay_line, run_seed

COLLECT_AFTER = 100_000
"""Objects.  Worlds are short-lived: to look for their cycles more often costs a tenth."""


class Simulated:
    """Seeds in their order."""

    claim = "no seed of a hostile world of ranks, nodes, network and disks breaks the protocol"
    distinct: int | None = None

    def __init__(self, scratch: Path) -> None:
        gc.set_threshold(COLLECT_AFTER)

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
