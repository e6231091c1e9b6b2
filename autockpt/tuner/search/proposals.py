"""Where new candidates come from: Optuna, or a record that is played again."""

import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from autockpt.tuner.search.record import Trial
from autockpt.tuner.search.space import Candidate

if TYPE_CHECKING:
    import optuna

STUDY = "autockpt tune"
"""Name of the study in its file."""
MOST_TRIES = 30
"""Proposals that were measured already or may not be chosen, before a neighbour is taken."""


class Proposer(Protocol):
    """Told of every measured candidate in turn, asked for new ones."""

    def tell(self, candidate: Candidate, value: float | None) -> None:
        """Take a measured candidate and its value (smaller is better); None: it failed."""

    def propose(
        self, known: Mapping[Candidate, float], promising: Callable[[Candidate], bool]
    ) -> Candidate | None:
        """A candidate to measure that is promising and not `known`; None when there is none."""


class Replayed:
    """The candidates of a record, in its order."""

    def __init__(self, trials: Iterable[Trial]) -> None:
        self._rest = deque(t.candidate for t in trials if t.stage == "search")

    def tell(self, candidate: Candidate, value: float | None) -> None:
        """Nothing is learnt: what follows is known."""

    def propose(
        self, known: Mapping[Candidate, float], promising: Callable[[Candidate], bool]
    ) -> Candidate | None:
        """The next one."""
        return self._rest.popleft() if self._rest else None


class OptunaProposer:
    """Multivariate TPE over the axes, seeded."""

    def __init__(
        self,
        allowed: Sequence[Candidate],
        *,
        seed: int,
        seeds: int,
        fallback: Callable[[Candidate], float],
    ) -> None:
        """`seeds`: number of results given before the first question.

        `fallback` ranks the remaining candidates when the sampler only repeats itself, smallest
        first.
        """
        import optuna

        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self.name = f"optuna {optuna.__version__} TPE"
        self._allowed, self._fallback = list(allowed), fallback
        self._choices = _choices(self._allowed)
        sampler = optuna.samplers.TPESampler(
            seed=seed, n_startup_trials=seeds, multivariate=True, constant_liar=False
        )
        self._study = optuna.create_study(sampler=sampler, direction="minimize")
        self._open: dict[Candidate, Any] = {}

    def tell(self, candidate: Candidate, value: float | None) -> None:
        """Closes the trial of a candidate; one that was not proposed here is enqueued first."""
        trial = self._open.pop(candidate, None)
        if trial is None:
            self._study.enqueue_trial(self._params(candidate))
            trial = self._study.ask(self._distributions())
        self._answer(trial, value)

    def propose(
        self, known: Mapping[Candidate, float], promising: Callable[[Candidate], bool]
    ) -> Candidate | None:
        """Return the sampler's next candidate; answer known and hopeless ones without measuring."""
        rest = {c for c in self._allowed if c not in known and promising(c)}
        for _ in range(MOST_TRIES if rest else 0):
            trial = self._study.ask(self._distributions())
            candidate = Candidate(**trial.params)
            if candidate in rest:
                self._open[candidate] = trial
                return candidate
            self._answer(trial, known.get(candidate))
        return min(rest, key=lambda c: (self._fallback(c), str(c)), default=None)

    def save(self, journal: str) -> None:
        """Writes the study to a new file that `optuna-dashboard` opens.

        Only at the end: a journal syncs at every step, which would disturb what is measured.
        """
        import optuna
        from optuna.storages.journal import JournalFileBackend, JournalStorage

        study = optuna.create_study(
            storage=JournalStorage(JournalFileBackend(journal)),
            direction="minimize",
            study_name=STUDY,
        )
        study.add_trials(self._study.get_trials())

    def _answer(self, trial: "optuna.trial.Trial", value: float | None) -> None:
        import optuna

        if value is None or not math.isfinite(value):
            self._study.tell(trial, state=optuna.trial.TrialState.FAIL)
        else:
            self._study.tell(trial, value)

    def _distributions(self) -> dict[str, "optuna.distributions.BaseDistribution"]:
        import optuna

        return {
            name: optuna.distributions.CategoricalDistribution(values)
            for name, values in self._choices.items()
        }

    def _params(self, candidate: Candidate) -> dict[str, Any]:
        return {name: getattr(candidate, name) for name in self._choices}


def _choices(allowed: Sequence[Candidate]) -> dict[str, tuple[Any, ...]]:
    names = ("chunk_bytes", "writers", "direct_io", "codec")
    return {name: tuple(sorted({getattr(c, name) for c in allowed})) for name in names}
