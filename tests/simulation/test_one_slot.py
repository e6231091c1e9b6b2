"""One slot and a disk that refuses everything for a while: saving goes on when it does no more."""

import pytest

from tests.simulation.actors import Rules
from tests.simulation.mutants import MUTANTS
from tests.simulation.oracle import Violation
from tests.simulation.simulation import Simulation, run_seed

SEEDS = 100


class BrokenDisk(Simulation):
    """No other fault happens."""

    def __init__(self, seed: int, rules: Rules | None = None) -> None:
        super().__init__(seed, rules, slots=1)
        self.flaky = self.torn = self.sick = self.late = self.elastic = self.silent = 0.0

    def run(self) -> None:
        """Nobody is started again: the disk alone changes."""
        self.interval, self.disk_every = 4, 1
        self.start_launch()
        self.check_saving(1)
        self.flaky = 1.0
        before = self.oracle.commits
        self.round_until(lambda: False, 100)
        assert self.oracle.commits <= before + 1, "what was fsynced already may be told"
        self.flaky = 0.0
        self.check_saving(3)


def play(rules: Rules | None = None) -> None:
    """All seeds, under rules of which one may be missing."""
    for seed in range(SEEDS):
        BrokenDisk(seed, rules).run()


def test_saving_goes_on_when_the_disk_does() -> None:
    """Whatever it refused: files, the fsync of a COMMIT."""
    play()


def test_without_giving_up_it_would_never_go_on() -> None:
    """So the world above is one in which the slot is stuck."""
    with pytest.raises(Violation, match="no save became durable"):
        play(MUTANTS["keep-undurable"].rules())


def test_one_slot_in_the_hostile_world() -> None:
    """Crashes, zombies, partitions, rot and power cuts, with one slot for every rank."""
    broken = [text for seed in range(SEEDS) if (text := run_seed(seed, slots=1))]
    assert not broken, broken[:3]
