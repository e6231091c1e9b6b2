"""A report's additions to a run's own files: the forecast of a month, and the newest search."""

import contextlib
from pathlib import Path
from typing import TYPE_CHECKING

from autockpt.run_directory import RunDirectory
from autockpt.values.errors import AutockptError
from autockpt.values.plan import Decision

if TYPE_CHECKING:
    from autockpt.reports.analysis.risk import Risk
    from autockpt.reports.analysis.search import SearchedWay, SearchHistory
    from autockpt.tuner.search.outcome import Outcome, Tried

SEED = 0
"""Of the worlds: the same profile and plan give the same band."""


def risk_of(decision: Decision | None) -> "Risk | None":
    """The plan and a blocking save every 30 minutes in the same simulated worlds.

    Both by the inputs that are stored with the decision; None: they are not known.
    """
    if decision is None or decision.inputs is None or not decision.inputs.failures_per_s:
        return None
    plan, inputs = decision.plan, decision.inputs
    memory, disk = plan.tier("memory").interval_steps, plan.tier("disk").interval_steps
    if not disk:
        return None
    from autockpt.policies.cost_model.expectation import habit_tiers
    from autockpt.policies.cost_model.inputs import tiers_from
    from autockpt.reports.analysis.risk import Luck, Risk
    from autockpt.tuner.simulation import risk
    from autockpt.tuner.simulation.rules import reckoned, two_tiers

    tiers, habit = tiers_from(inputs), inputs.habit
    ways = [reckoned("this plan", tiers, plan)]
    promised = [tiers.waste(memory, disk).total]
    if habit is not None:
        usual, steps = habit_tiers(habit, inputs.iteration_s), habit.interval_steps
        ways.append(two_tiers("a save every 30 min", usual, 0, steps))
        promised.append(usual.waste(0, steps).total)
    # The worlds have checkpoints and failures; time at boundaries is lost beside them.
    parts = tiers.waste(memory, disk)
    beside = {"this plan": (1.0 - parts.paid) / max(1e-9, 1.0 - parts.checkpoint)}
    found = risk.risk(
        ways,
        memory_per_s=tiers.memory.failures_per_s if tiers.memory else 0.0,
        disk_per_s=tiers.disk.failures_per_s,
        shape=inputs.rate_shape,
        nodes=inputs.failures.nodes,
        seed=SEED,
    )
    return Risk(
        length_s=found.length_s,
        seed=SEED,
        mtbf_s=risk.quantiles(found.mtbf_s),
        failures=risk.quantiles(found.failures),
        ways=tuple(
            Luck(
                name=name,
                promised=promise,
                lost=tuple(1.0 - x * beside.get(name, 1.0) for x in goodputs),
            )
            for (name, goodputs), promise in zip(found.goodputs.items(), promised, strict=True)
        ),
    )


def search_of(run: RunDirectory) -> "SearchHistory | None":
    """The newest search under a run directory that can still be read, decided again."""
    files = sorted(run.path.glob("tune-*/trials.jsonl"), reverse=True)
    for path in files:
        # Of another version, or a search that is under way: an older one may do.
        with contextlib.suppress(AutockptError, OSError, UnicodeDecodeError):
            return _history(path, others=len(files) - 1)
    return None


def _history(path: Path, *, others: int) -> "SearchHistory":
    from autockpt.reports.analysis.search import SearchedWrite, SearchHistory
    from autockpt.tuner.search.outcome import replay
    from autockpt.tuner.search.record import parse

    with path.open(encoding="utf-8") as file:
        record = parse(file, where=str(path))
    outcome = replay(record, where=str(path))
    header, verdict = record.header, outcome.verdict
    return SearchHistory(
        created=header.created,
        directory=header.directory,
        content=header.content,
        sample_bytes=header.sample_bytes,
        budget=header.budget,
        seed=header.seed,
        proposer=header.proposer,
        default=str(outcome.default),
        winner=str(verdict.winner),
        kept_default=verdict.kept_default,
        reason=verdict.reason,
        writes=tuple(
            SearchedWrite(
                number=trial.number,
                stage=trial.stage,
                way=str(trial.candidate),
                seconds=None if trial.failure else trial.seconds,
                failure=trial.failure,
            )
            for trial in record.trials
        ),
        ways=tuple(_way(outcome, tried) for tried in outcome.tried),
        space=outcome.ways,
        refused=outcome.refused,
        importances=outcome.importances.shares,
        explained=outcome.importances.explained,
        others=others,
    )


def _way(outcome: "Outcome", tried: "Tried") -> "SearchedWay":
    from autockpt.reports.analysis.search import SearchedWay

    verdict, notes = outcome.verdict, []
    if tried.candidate == verdict.winner:
        notes.append("chosen")
    if tried.candidate == outcome.default:
        notes.append("default")
    if tried.candidate in verdict.tied:
        notes.append("tied")
    return SearchedWay(
        way=str(tried.candidate),
        predicted_s=tried.predicted_s,
        measured_s=tried.measured_s,
        waste=tried.waste,
        writes=tried.writes,
        note=", ".join(notes) or tried.failure,
    )
