"""The whole protocol in a hostile world: no seed breaks it, and every missing rule is seen."""

import gc
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from random import Random

import pytest

from autockpt.executors.protocol.coordinator import replicating
from autockpt.executors.protocol.coordinator import state as coordinator_state
from autockpt.executors.protocol.coordinator.machine import CoordinatorProtocol
from autockpt.executors.protocol.node import slots
from autockpt.executors.protocol.node import state as node_state
from autockpt.executors.protocol.node.machine import NodeProtocol
from autockpt.executors.protocol.transitions import TRANSITIONS
from tests.simulation.mutants import MUTANTS, first_seed
from tests.simulation.simulation import Simulation, replay_line, run_seed

SEEDS = 20_000
PARTS = 20
"""Tests the seeds are spread over, so that one stays far below the time limit of a test.  The first
of them is in `make test`."""
QUICK_SEEDS = 400
"""Mutants that may need more are hunted by `make test-all`."""
CHUNK = 250
WORKERS = 2


def broken_seeds(first: int) -> list[str]:
    """What broke in one chunk of seeds, each with the line that replays it."""
    gc.set_threshold(100_000)  # short-lived worlds; collecting them often costs a tenth of the time
    found = ((seed, run_seed(seed)) for seed in range(first, first + CHUNK))
    return [f"seed {seed}: {text}\n{replay_line(seed)}" for seed, text in found if text]


@pytest.mark.parametrize(
    "part",
    [pytest.param(part, marks=[pytest.mark.slow] * (part > 0)) for part in range(PARTS)],
)
def test_twenty_thousand_seeds_break_nothing(part: int) -> None:
    """No oracle is broken in 20,000 runs with crashes, zombies, partitions, rot and power cuts."""
    chunks = range(part * SEEDS // PARTS, (part + 1) * SEEDS // PARTS, CHUNK)
    with ProcessPoolExecutor(WORKERS, mp_context=get_context("spawn")) as pool:
        broken = [line for lines in pool.map(broken_seeds, chunks) for line in lines]
    assert not broken, "\n".join(broken[:5])


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.slow] if mutant.budget > QUICK_SEEDS else [])
        for name, mutant in sorted(MUTANTS.items())
    ],
)
def test_every_missing_rule_is_noticed(name: str) -> None:
    """The simulator finds each mutant within its budget of seeds."""
    seed = first_seed(name, run_seed)
    assert seed is not None, f"{name} survived {MUTANTS[name].budget} seeds"


def test_a_seed_is_the_same_run_every_time() -> None:
    """One seed is one run, or a replay line would be worth nothing."""
    for seed in range(5):
        runs = [Simulation(seed), Simulation(seed)]
        for run in runs:
            run.run()
        assert runs[0].oracle.history == runs[1].oracle.history
        assert runs[0].disk.decisions == runs[1].disk.decisions
        assert runs[0].rng.random() == runs[1].rng.random()


@pytest.mark.slow
def test_every_transition_is_walked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every row of the table happens in some run: no row is decoration."""
    walked = set()

    def moved(actor: str, source: str, target: str) -> None:
        walked.add((actor, source, target))

    for module in (coordinator_state, node_state, replicating, slots):
        monkeypatch.setattr(module, "moved", moved)
    for seed in range(600):
        run_seed(seed)
    missing = [
        f"{row.actor}: {row.sources} -> {row.target}"
        for row in TRANSITIONS
        if not any((row.actor, source, row.target) in walked for source in row.sources)
    ]
    allowed = {(r.actor, source, r.target) for r in TRANSITIONS for source in r.sources}
    assert not missing
    assert walked <= allowed


@pytest.mark.parametrize("disorder", ["shuffled", "doubled", "jostled"])
def test_no_order_of_events_raises(disorder: str) -> None:
    """The events of whole runs, in an order no network would produce, are tolerated."""
    for seed in range(25):
        events = disordered(recorded(seed), Random(seed), disorder)
        node, coordinator = NodeProtocol(), CoordinatorProtocol()
        for target, event in events:
            machine = node if target == "node" else coordinator
            machine.handle(event)  # type: ignore[attr-defined]


def recorded(seed: int) -> list[tuple[str, object]]:
    """All events of one run, of all keepers, in the order they were handled."""
    events: list[tuple[str, object]] = []

    class Recorder(Simulation):
        def to_node(self, keeper: object, event: object) -> None:
            events.append(("node", event))
            super().to_node(keeper, event)  # type: ignore[arg-type]

        def to_coordinator(self, keeper: object, event: object) -> None:
            events.append(("coordinator", event))
            super().to_coordinator(keeper, event)  # type: ignore[arg-type]

    Recorder(seed).run()
    return events


def disordered(
    events: list[tuple[str, object]], rng: Random, disorder: str
) -> list[tuple[str, object]]:
    """The same events, out of order, repeated, or displaced and with gaps."""
    if disorder == "shuffled":
        rng.shuffle(events)
    elif disorder == "doubled":
        return [event for event in events for _ in range(rng.choice((1, 1, 2)))]
    else:
        for i in range(len(events) - 8):
            j = i + rng.randrange(8)
            events[i], events[j] = events[j], events[i]
        return [event for event in events if rng.random() < 0.9]
    return events
