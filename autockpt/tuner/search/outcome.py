"""A header to a search, a record to its outcome: the live search and the replay go the same way."""

from collections.abc import Sequence
from dataclasses import dataclass

from autockpt.policies.decide import decide
from autockpt.policies.staging.shares import as_stored
from autockpt.tuner.search.importance import Importances, importances
from autockpt.tuner.search.judge import Verdict
from autockpt.tuner.search.model import Model, Rating
from autockpt.tuner.search.proposals import Replayed
from autockpt.tuner.search.record import Record, Trial
from autockpt.tuner.search.sanity import require_sane
from autockpt.tuner.search.search import MISTAKEN, Search
from autockpt.tuner.search.space import Candidate, Space, candidate_of
from autockpt.values.errors import ConfigError
from autockpt.values.goal import Goal
from autockpt.values.plan import Decision
from autockpt.values.profile import Profile
from autockpt.values.units import format_duration


@dataclass(frozen=True, slots=True, kw_only=True)
class Tried:
    """A candidate with its prediction and its measurement."""

    candidate: Candidate
    predicted_s: float
    """Seconds of one of its writes, by the profile."""
    measured_s: float | None
    """The same measured: their mean, of the final where it came so far; None: none succeeded."""
    waste: float | None
    """Lost time of the plan by the measured writes."""
    writes: int
    final: bool
    failure: str = ""
    """Why it has no figure, or which limit a plan with it cannot keep."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The result of a search."""

    schema_version: int = 1
    verdict: Verdict
    default: Candidate
    default_slots: int
    predicted: Rating
    """Of the winner, before anything was measured."""
    tried: tuple[Tried, ...]
    """Best measured first."""
    ways: int
    """Candidates in the space, refused ones among them."""
    refused: dict[str, int]
    """How many of them each reason took out."""
    importances: Importances
    """Which knob explains the measured times."""
    default_times: float = 1.0
    """Times as long as the profile predicts that the default's writes took."""
    warnings: tuple[str, ...] = ()
    """Errors of the profile, in sentences."""


def model_of(profile: Profile, goal: Goal, *, sample_bytes: int) -> Model:
    """The space and its cost model.

    Raises ConfigError for a profile without meaning and for limits that cannot hold together.
    """
    require_sane(profile, goal)
    decision = decide(profile, goal)
    space, plan = space_of(profile, goal, decision, sample_bytes), decision.plan
    return Model(space, plan.staging, plan.redundancy)


def space_of(profile: Profile, goal: Goal, decision: Decision, sample_bytes: int) -> Space:
    """Return the candidates beside the choice of `decide`."""
    return Space(
        profile=as_stored(profile, goal),
        goal=goal,
        default=candidate_of(decision.plan),
        default_slots=decision.plan.slots,
        sample_bytes=sample_bytes,
    )


def replay(record: Record, *, where: str) -> Outcome:
    """The decision of a record, taken again from its samples alone.

    Ranking, seeds, finalists and verdict are computed anew; only what Optuna proposed is taken from
    the record.  Raises ConfigError when the record does not follow from itself.
    """
    header = record.header
    model = model_of(header.profile, header.goal, sample_bytes=header.sample_bytes)
    search = Search(model, Replayed(record.trials), header.budget, earlier=header.earlier)
    for trial in record.trials:
        question = search.ask()
        if trial.stage == "final" and (question is None or question.stage != "final"):
            search.enough()
            question = search.ask()
        asked = (question.stage, question.candidate) if question is not None else None
        if asked != (trial.stage, trial.candidate):
            raise ConfigError(
                f"{where}: trial {trial.number} is {trial.stage} of {trial.candidate}, and by the "
                f"samples before it {_said(asked)} comes next. The file was changed, or another "
                "version of autockpt wrote it"
            )
        search.tell(trial)
    return outcome_of(search)


def outcome_of(search: Search) -> Outcome:
    """Return the result of a finished search.

    Raises StorageError when nothing could be measured.
    """
    model, verdict = search.model, search.verdict()
    names = dict.fromkeys(trial.candidate for trial in search.trials)
    tried = [_tried(search, name) for name in names]
    infinite = float("inf")
    return Outcome(
        verdict=verdict,
        default=model.space.default,
        default_slots=model.space.default_slots,
        predicted=model.rate(verdict.winner, model.predicted_ratio(verdict.winner)),
        tried=tuple(sorted(tried, key=lambda t: infinite if t.waste is None else t.waste)),
        ways=len(model.space.candidates()),
        refused=dict(model.space.refusals()),
        importances=importances(model.space.allowed(), search.trials),
        default_times=search.default_times,
        warnings=_warnings(search),
    )


def _warnings(search: Search) -> tuple[str, ...]:
    times = search.default_times
    if 1.0 / MISTAKEN <= times <= MISTAKEN:
        return ()
    space = search.model.space
    expected_s = search.model.predicted_s(space.default, space.sample_bytes)
    return (
        f"the default's writes took {format_duration(times * expected_s)} each, and by the profile "
        f"they take {format_duration(expected_s)}: lost time is reckoned with what was measured; "
        "run `autockpt profile` again",
    )


def _tried(search: Search, candidate: Candidate) -> Tried:
    """By the final where a candidate came so far, else by its one write."""
    model = search.model
    size = model.space.sample_bytes
    own = [t for t in search.trials if t.candidate == candidate]
    final = next((c for c in search.verdict().contenders if c.candidate == candidate), None)
    rating = final.rating if final is not None else search.rated(candidate)
    return Tried(
        candidate=candidate,
        predicted_s=model.predicted_s(candidate, size),
        measured_s=_measured_s(own, final=final is not None),
        waste=rating.waste if rating is not None else None,
        writes=sum(not t.failure for t in own),
        final=final is not None,
        failure=next((t.failure for t in own if t.failure), rating.obstacle if rating else ""),
    )


def _measured_s(trials: Sequence[Trial], *, final: bool) -> float | None:
    """Mean seconds of the successful trials, of the final only if `final`."""
    good = [t.seconds for t in trials if not t.failure and (t.stage == "final" or not final)]
    return sum(good) / len(good) if good else None


def _said(asked: Sequence[object] | None) -> str:
    return "nothing" if asked is None else f"{asked[0]} of {asked[1]}"
