"""The search as questions and answers: which write to measure next, and when it is enough.

        seeds   the default, and the best predicted candidate of each path x codec category
        search  Optuna, with the results of the seeds, while the budget leaves room for the final
        final   the three best so far and the default in turn, in whole rounds, until it is spent

The search reads no clock: the measuring code calls `enough` when the search has to end.
"""

import math
from collections import Counter
from dataclasses import dataclass, field

from autockpt.tuner.search.judge import Verdict, judge
from autockpt.tuner.search.model import Model, Rating
from autockpt.tuner.search.proposals import Proposer
from autockpt.tuner.search.record import EarlierTry, Stage, Trial
from autockpt.tuner.search.space import Candidate
from autockpt.values.errors import ConfigError, StorageError

FINALISTS = 3
"""Beside the default."""
ROUNDS = 4
"""At least so many rounds of the final: with fewer, a default that is half as fast again stays."""
EXPLORED = 0.6
"""At most this part of the budget before the final."""
HOPELESS = 2.0
"""Factor over the best so far: candidates expected to take longer are not proposed."""
MISTAKEN = 2.0
"""Times as fast or slow as profiled: from here on the profile's figure of the storage is wrong."""
LEAST_BUDGET = 2 * ROUNDS + 2
"""One finalist and the default in the final, and two measurements to find it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """The next measurement."""

    number: int
    stage: Stage
    candidate: Candidate

    def answered(self, *, seconds: float, cpu_s: float, stored_bytes: int = 0) -> Trial:
        """The answer of a write."""
        return Trial(
            number=self.number,
            stage=self.stage,
            candidate=self.candidate,
            seconds=seconds,
            cpu_s=cpu_s,
            stored_bytes=stored_bytes,
        )

    def failed(self, why: str) -> Trial:
        """The answer of a write that failed."""
        return Trial(
            number=self.number,
            stage=self.stage,
            candidate=self.candidate,
            seconds=0.0,
            failure=why or "failed",
        )


@dataclass(slots=True)
class Search:
    """`ask` and `tell` in turn until `ask` gives None; then `verdict`."""

    model: Model
    proposer: Proposer
    budget: int
    """Most measurements, including the final."""
    earlier: tuple[EarlierTry, ...] = ()
    """Of searches before this one: not explored again."""
    trials: list[Trial] = field(default_factory=list)
    """Every answer so far."""
    _seeds: list[Candidate] = field(init=False)
    _values: dict[Candidate, float] = field(init=False, default_factory=dict)
    _yardstick: Trial | None = field(init=False, default=None)
    _finalists: list[Candidate] | None = field(init=False, default=None)
    """None: still exploring."""
    _ended: bool = field(init=False, default=False)

    def __post_init__(self) -> None:
        require_budget(self.budget)
        default, allowed = self.model.space.default, set(self.model.space.allowed())
        known = {e.candidate: e for e in self.earlier if e.candidate in allowed - {default}}
        self.earlier = tuple(known.values())
        seeds = [seed for seed in seeds_of(self.model) if seed not in known]
        self._seeds = seeds[: self._before_final]

    def ask(self) -> Question | None:
        """The next measurement; None when the search is over."""
        if self._finalists is None:
            candidate = self._explore()
            if candidate is not None:
                stage: Stage = "seed" if len(self.trials) < len(self._seeds) else "search"
                return self._question(stage, candidate)
            self._finalists = self._choose_finalists()
        finalist = self._next_finalist(self._finalists)
        return self._question("final", finalist) if finalist is not None else None

    def tell(self, trial: Trial) -> None:
        """The answer to the last question."""
        self.trials.append(trial)
        if trial.stage == "final":
            return
        first, value = self._yardstick is None, self._value(trial)
        self._learn(trial.candidate, value)
        if first and self._yardstick is not None:
            for tried in self.earlier:
                known = self.real_model.rate(
                    tried.candidate, tried.ratio, extra_cpu=tried.extra_cpu
                )
                self._learn(tried.candidate, known.waste)

    def _learn(self, candidate: Candidate, value: float) -> None:
        self._values[candidate] = value
        self.proposer.tell(candidate, value if math.isfinite(value) else None)

    def enough(self) -> None:
        """Time is up: the final begins, or ends with the round that is under way."""
        if self._finalists is None:
            self._finalists = self._choose_finalists()
        else:
            self._ended = True

    def verdict(self) -> Verdict:
        """The winner.  Raises StorageError when nothing could be measured."""
        finals = [t for t in self.trials if t.stage == "final"]
        if all(t.failure for t in self.trials):
            why = self.trials[0].failure if self.trials else "there was no time for one"
            raise StorageError(f"not one write could be measured: {why}")
        return judge(self.real_model, finals)

    @property
    def default_times(self) -> float:
        """Mean seconds of the default's writes over what the profile predicts for the same bytes.

        1 while there is none.
        """
        space = self.model.space
        own = [t.seconds for t in self.trials if t.candidate == space.default and not t.failure]
        if not own:
            return 1.0
        return sum(own) / len(own) / self.model.predicted_s(space.default, space.sample_bytes)

    @property
    def real_model(self) -> Model:
        """Return the model, corrected if the storage measured otherwise than in the profile."""
        times = self.default_times
        known = 1.0 / MISTAKEN <= times <= MISTAKEN
        return self.model.corrected(1.0 if known else times)

    # --- exploring

    @property
    def _before_final(self) -> int:
        """Measurements that the final leaves: of a large budget it takes its share."""
        left = self.budget - ROUNDS * (self._places + 1)
        return max(2, min(left, round(EXPLORED * self.budget)))

    @property
    def _places(self) -> int:
        """Finalists beside the default that the budget has room for, with one look at each."""
        fitting = [k for k in range(1, FINALISTS + 1) if self.budget >= (ROUNDS + 1) * (k + 1)]
        return max(fitting)

    def _explore(self) -> Candidate | None:
        if len(self.trials) < len(self._seeds):
            return self._seeds[len(self.trials)]
        if len(self.trials) >= self._before_final:
            return None
        return self.proposer.propose(self._values, self.promising)

    def promising(self, candidate: Candidate) -> bool:
        """Whether the model, corrected by its category's seed, puts it near the best so far."""
        measured = {t.candidate: t.seconds for t in self.trials if not t.failure}
        if self._yardstick is not None:
            for tried in self.earlier:
                measured.setdefault(tried.candidate, tried.ratio * self._yardstick.seconds)
        seeds = (*self._seeds, *(tried.candidate for tried in self.earlier))
        seed = next((c for c in seeds if c.category == candidate.category), None)
        if seed is None or seed not in measured:
            return False
        predicted = self.model.predicted_ratio
        expected_s = measured[seed] * predicted(candidate) / predicted(seed)
        return expected_s <= HOPELESS * min(measured.values())

    def rated(self, candidate: Candidate) -> Rating | None:
        """By its one write before the final; None where that failed."""
        first = self._yardstick
        own = next((t for t in self.trials if t.candidate == candidate and not t.failure), None)
        if own is None or first is None:
            return None
        extra_cpu = (own.cpu_s - first.cpu_s) / first.seconds
        model = self.real_model
        return model.rate(candidate, own.seconds / first.seconds, extra_cpu=extra_cpu)

    def _value(self, trial: Trial) -> float:
        """Expected waste if the one write tells the truth; the first good one is the yardstick."""
        if not trial.failure:
            self._yardstick = self._yardstick or trial
        rating = self.rated(trial.candidate)
        return rating.waste if rating is not None else math.inf

    # --- final

    def _choose_finalists(self) -> list[Candidate]:
        """The best by value and the default, which stands first."""
        default = self.model.space.default
        good = [c for c, value in self._values.items() if math.isfinite(value) and c != default]
        ranked = sorted(good, key=lambda c: self._values[c])
        return [default, *ranked[: self._places]]

    def _next_finalist(self, finalists: list[Candidate]) -> Candidate | None:
        """In turn, each round from another one on; a round is begun only if all of it fits."""
        finals = [t for t in self.trials if t.stage == "final"]
        failed = {t.candidate for t in finals if t.failure}
        left = [c for c in finalists if c not in failed]
        if len(left) < 2 or self.model.space.default in failed:
            return None
        counts = Counter(t.candidate for t in finals)
        rounds = min(counts[c] for c in left)
        whole = all(counts[c] == rounds for c in left)
        if whole and (self._ended or len(self.trials) + len(left) > self.budget):
            return None
        shift = rounds % len(left)
        return next(c for c in (*left[shift:], *left[:shift]) if counts[c] == rounds)

    def _question(self, stage: Stage, candidate: Candidate) -> Question:
        return Question(number=len(self.trials), stage=stage, candidate=candidate)


def require_budget(budget: int) -> None:
    """Raises ConfigError for fewer measurements than a search can make anything of."""
    if budget < LEAST_BUDGET:
        raise ConfigError(
            f"a budget of {budget} measurements: a search needs at least {LEAST_BUDGET}, "
            f"{2 * ROUNDS} of them to compare its best with the default"
        )


def seeds_of(model: Model) -> list[Candidate]:
    """The default, then the best predicted candidate of each category, best first.

    Within a category the fastest loses least, so only those are rated.
    """
    fastest: dict[tuple[bool, str], Candidate] = {}
    ratio = model.predicted_ratio
    for way in sorted(model.space.allowed(), key=lambda c: (ratio(c), c.writers, c.chunk_bytes)):
        fastest.setdefault(way.category, way)
    ranked = sorted(fastest.values(), key=lambda c: model.rate(c, ratio(c)).waste)
    return list(dict.fromkeys([model.space.default, *ranked]))
