"""Made-up storage: seconds of a write from its way, and searches that ask it."""

import math
import random
from dataclasses import dataclass, field, replace
from typing import Any

from autockpt.tuner.search.model import Model
from autockpt.tuner.search.outcome import model_of
from autockpt.tuner.search.proposals import OptunaProposer
from autockpt.tuner.search.record import Header, Record, Trial
from autockpt.tuner.search.search import Question, Search, seeds_of
from autockpt.tuner.search.space import MIB, Candidate
from autockpt.values.goal import Goal, Pins
from autockpt.values.profile import Profile
from tests.support.profiles import example_failures, example_profile

SAMPLE_BYTES = 128 * MIB


def job(**fields: Any) -> Profile:
    """A job that fails often enough for its writes to matter."""
    return example_profile(**{"failures": example_failures(mtbf_s=20_000.0), **fields})


def model(profile: Profile | None = None, **pins: Any) -> Model:
    """The model of a job under pins."""
    goal = Goal(pins=Pins(**pins))
    return model_of(profile or job(), goal, sample_bytes=SAMPLE_BYTES)


@dataclass(slots=True)
class Machine:
    """Fastest at `best`; every step away from it costs a quarter, a codec three times the time."""

    best: Candidate
    noise: float = 0.0
    """Standard deviation of the logarithm of a time, its own for each write."""
    seed: int = 0
    broken: tuple[Candidate, ...] = ()
    scale: float = 1.0
    """Times as slow as that."""
    _draw: random.Random = field(init=False)

    def __post_init__(self) -> None:
        self._draw = random.Random(self.seed)

    def seconds(self, way: Candidate) -> float:
        """Of a quiet write."""
        best = self.best
        steps = abs(math.log2(way.writers / best.writers))
        steps += abs(math.log2(way.chunk_bytes / best.chunk_bytes))
        steps += 2.0 * (way.direct_io != best.direct_io)
        return float(self.scale * 0.1 * 1.25**steps * (1.0 if way.codec == best.codec else 3.0))

    def answer(self, question: Question) -> Trial:
        """A noisy write, or a failed one."""
        way = question.candidate
        if way in self.broken:
            return question.failed("no such device")
        seconds = self.seconds(way) * math.exp(self._draw.gauss(0.0, self.noise))
        return question.answered(seconds=seconds, cpu_s=0.01)


def search_for(model: Model, *, budget: int = 25, seed: int = 0) -> Search:
    """A search with Optuna behind it."""
    return Search(model, proposer(model, seed=seed), budget)


def proposer(model: Model, *, seed: int = 0) -> OptunaProposer:
    """Optuna, as `autockpt tune` starts it."""
    return OptunaProposer(
        model.space.allowed(),
        seed=seed,
        seeds=len(seeds_of(model)),
        fallback=model.predicted_ratio,
    )


def carried_out(search: Search, machine: Machine, *, enough_after: int | None = None) -> Search:
    """The search, asked to its end; told that time is up after so many answers."""
    while (question := search.ask()) is not None:
        search.tell(machine.answer(question))
        if enough_after is not None and len(search.trials) >= enough_after:
            search.enough()
    return search


def record_of(search: Search, *, seed: int = 0) -> Record:
    """What its trials.jsonl would hold."""
    space = search.model.space
    header = Header(
        profile=space.profile, goal=space.goal, budget=search.budget, seed=seed,
        sample_bytes=space.sample_bytes, content="made up", directory="nowhere",
        created="2026-01-01T00:00:00Z", earlier=search.earlier,
    )  # fmt: skip
    return Record(header=header, trials=tuple(search.trials))


def changed(way: Candidate, **fields: Any) -> Candidate:
    """The same way but for some fields."""
    return replace(way, **fields)
