"""Bits that flip in sealed slots: no keeper sees them, and what they hid behind may be gone."""

import pytest

from autockpt.values.generation import Generation
from tests.simulation.actors import Content, Rules
from tests.simulation.mutants import MUTANTS
from tests.simulation.oracle import Oracle, Violation
from tests.simulation.simulation import Simulation

SEEDS = 60
OLD, NEW = Generation(term=1, step=1), Generation(term=1, step=2)


class DecayingMemory(Simulation):
    """Training goes on, and bits flip in snapshots that are not committed yet; nothing is read."""

    def __init__(self, seed: int, rules: Rules | None = None) -> None:
        super().__init__(seed, rules, slots=2 + seed % 2)
        self.flaky = self.torn = self.sick = self.late = self.elastic = 0.0

    def run(self) -> None:
        """Every third round one of the newest shards decays, before the others are sealed."""
        self.start_launch()
        for number in range(90):
            self.calm_round()
            if number % 3 == 0 and (fresh := self.fresh_shards()):
                self.decay(self.rng.choice(fresh))

    def fresh_shards(self) -> list[Content]:
        """Sealed, and nobody was told that all ranks have it."""
        contents = (content for node in self.nodes for content in node.slots.values())
        return [
            content
            for content in contents
            if content is not None
            and content.sealed
            and not content.corrupt
            and content.generation not in self.oracle.announced
        ]

    def decay(self, content: Content) -> None:
        """What was promised before stays promised: only something newer decays."""
        content.corrupt = True
        self.oracle.decayed.add(content.generation)
        self.losses += 1


def play(rules: Rules | None = None) -> int:
    """How many generations that had decayed were called memory-committed in all seeds."""
    seeming = 0
    for seed in range(SEEDS):
        world = DecayingMemory(seed, rules)
        world.run()
        seeming += len(world.oracle.decayed & world.oracle.announced)
    return seeming


def test_what_decayed_before_its_commit_may_free_older_slots() -> None:
    """Every rank sealed it, so it is memory-committed (rule 3), and older slots go for it."""
    assert play() > SEEDS


@pytest.mark.parametrize("name", ["overwrite-any-slot", "overwrite-when-sealed-here"])
def test_decay_excuses_no_other_overwriting(name: str) -> None:
    """A rule that is missing is still seen where memory decays."""
    with pytest.raises(Violation, match="is the newest in memory, and is overwritten"):
        play(MUTANTS[name].rules())


def after(decayed: set[Generation], announced: set[Generation]) -> Oracle:
    """Of the two generations the older one was promised and is whole."""
    oracle = Oracle()
    oracle.decided[1], oracle.memory = None, {OLD}
    oracle.decayed, oracle.announced = decayed, {OLD} | announced
    return oracle


def test_a_newer_one_that_decayed_lifts_the_older_promise() -> None:
    """From the first slot that goes for it: until then the older one can be restored."""
    oracle = after({NEW}, {NEW})
    assert oracle.memory == {OLD}
    oracle.overwritten(OLD, 1, {NEW})
    assert not oracle.memory


@pytest.mark.parametrize(
    ("decayed", "announced", "held"),
    [
        (set(), {NEW}, {NEW}),
        ({NEW}, set(), {NEW}),
        ({NEW}, {NEW}, set()),
        ({OLD}, {NEW}, {OLD, NEW}),
    ],
    ids=["nothing decayed", "not memory-committed", "not held by this rank", "the older decayed"],
)
def test_without_it_the_older_promise_stands(
    decayed: set[Generation], announced: set[Generation], held: set[Generation]
) -> None:
    """Rule 1, whatever else decays."""
    with pytest.raises(Violation, match="newest in memory"):
        after(decayed, announced).overwritten(OLD, 1, held)


def test_a_suspect_one_that_decayed_frees_nothing() -> None:
    """Rule 16: it displaces no sound one."""
    oracle = after({NEW}, {NEW})
    oracle.seen_nan.add(NEW)
    with pytest.raises(Violation, match="newest in memory"):
        oracle.overwritten(OLD, 1, {NEW})
