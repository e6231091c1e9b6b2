"""The report as a value: everything the page, the terminal and the JSON show, computed once.

`build` takes what was found on disk and computes; renderers only lay out.  The model goes through
JSON and back, so a report can be read again and compared.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from autockpt.reports.analysis.accounting import (
    Accounting,
    Restore,
    account,
    since_begun_anew,
    span,
    witness_of,
)
from autockpt.reports.analysis.clock import align
from autockpt.reports.analysis.degradation import failing_disk
from autockpt.reports.analysis.ending import RunEnding, ending, newest_step
from autockpt.reports.analysis.idle_windows import Windows, windows
from autockpt.reports.analysis.promises import Promise, in_force, promises
from autockpt.reports.analysis.replication import Protection, protection
from autockpt.reports.analysis.restarts import (
    Gain,
    Restart,
    cheapest_gain,
    restarts,
    usual_iteration_s,
    with_replays,
    with_unseen_deaths,
)
from autockpt.reports.analysis.risk import Risk
from autockpt.reports.analysis.saves import Age, Change, Saves, ages, changes, saves, waits
from autockpt.reports.analysis.search import SearchHistory
from autockpt.reports.analysis.timeline import Timeline, timeline
from autockpt.reports.analysis.what_if import WhatIfCurve, waste
from autockpt.reports.data import RunData
from autockpt.reports.findings import Facts, Finding, findings
from autockpt.reports.remarks import grouped
from autockpt.reports.tiles import Tile, profile_tiles, run_tiles
from autockpt.reports.verdict import (
    Verdict,
    advised,
    is_early,
    losses,
    profile_verdict,
    run_verdict,
    without_disk,
)
from autockpt.values.plan import Decision
from autockpt.values.profile import Profile
from autockpt.values.telemetry import (
    Degraded,
    Event,
    IterationsTimed,
    ReplicasDisagreed,
    RunStarted,
    SnapshotSealed,
)
from autockpt.values.units import format_bytes, format_duration, format_fraction

ATTACH_LINES = (
    "import autockpt",
    "ckpt = autockpt.attach(model=model, optimizer=optimizer, data=loader)",
    "for step, batch in ckpt.batches(total_steps):  # no DataLoader: ckpt.steps(total_steps)",
)
"""The missing lines of an unprotected script, with the usual names."""
AGREEMENT = 1e-6
"""Relative difference from which the page's waste formula and the policy's disagree in the
report."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fact:
    """One line of the header."""

    label: str
    value: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportModel:
    """One report.  Written by the JSON renderer, embedded in the page."""

    schema_version: int = 1
    kind: Literal["profile", "run"]
    title: str
    command: str
    created: str
    protected: bool
    verdict: Verdict
    facts: tuple[Fact, ...]
    tiles: tuple[Tile, ...]
    findings: tuple[Finding, ...]
    versions: dict[str, str]
    status: dict[str, str]
    plan_yaml: str
    policy_diff: str
    warnings: tuple[str, ...]
    """From the profile, the decision and this report."""
    profile: Profile | None = None
    decision: Decision | None = None
    what_if: WhatIfCurve | None = None
    risk: Risk | None = None
    search: SearchHistory | None = None
    accounting: Accounting | None = None
    saves: Saves | None = None
    protection: Protection | None = None
    restores: tuple[Restore, ...] = ()
    restarts: tuple[Restart, ...] = ()
    next_gain: Gain | None = None
    """The cheapest remedy that shortens the newest restart; None: none is worth it."""
    promises: tuple[Promise, ...] = ()
    ages: tuple[Age, ...] = ()
    changes: tuple[Change, ...] = ()
    timeline: Timeline | None = None
    windows: Windows | None = None
    begins: bool = False
    """It may call `attach` yet."""
    ending: RunEnding | None = None
    """How the run ended; None: it goes on, or its end is not known."""
    disk_failing: bool = False
    """In the end no checkpoint reached the disk."""
    disputed_count: int = 0
    """Checkpoints on which replicas of the state disagreed."""

    @property
    def attach_missing(self) -> bool:
        """It runs or has finished without `attach`; one that failed before may well call it."""
        ended = self.ending is not None and self.ending.state != "finished"
        return not self.protected and not self.begins and not ended

    @property
    def losses(self) -> str:
        """What failures and the end cost; "": nothing."""
        ended = self.ending
        last = ended.loss if ended is not None and ended.state != "finished" else ""
        return " ".join(s for s in (last, losses(self.restores, (), nothing=False)) if s)


def build(data: RunData) -> ReportModel:
    """The report of a run, or of a profile when there are no events."""
    return _run_report(data) if data.events else _profile_report(data)


def _profile_report(data: RunData) -> ReportModel:
    facts = Facts(data=data, accounting=None, restores=(), saves=None, promises=())
    ended = ending((), data.status)
    found = findings(facts)
    return ReportModel(
        kind="profile" if data.protected else "run",
        title=data.title,
        command=data.command or " ".join(data.argv),
        created=data.created,
        protected=data.protected,
        begins=data.begins,
        ending=ended,
        verdict=advised(profile_verdict(data, ended), data, ended, found),
        facts=_facts(data, (), ended),
        tiles=profile_tiles(data),
        findings=found,
        versions=dict(data.versions),
        status=_status(data),
        plan_yaml=data.plan_yaml,
        policy_diff=data.policy_diff,
        warnings=_warnings(data, None),
        profile=data.profile,
        decision=data.decision,
        what_if=data.what_if,
        risk=data.risk,
        search=data.search,
        windows=windows((), data.profile, data.decision),
    )


def _run_report(data: RunData) -> ReportModel:
    every = with_unseen_deaths(align(data.events))
    events = tuple(since_begun_anew(every))
    profile, decision = data.profile, data.decision
    ended = ending(events, data.status)
    accounting, restores = account(
        events,
        data.failures,
        iteration_s=profile.iteration_s.p50 if profile else None,
        unkept_s=ended.lost_s if ended else 0.0,
    )
    saved, aged = saves(events, sync=waits(decision)), ages(events)
    compared: tuple[Promise, ...] = ()
    if decision is not None:
        compared = _compared(events, data, decision)
    start_s, _ = span(events)
    restores = with_replays(restores, events, start_s)
    witness = witness_of(events)
    found_restarts = restarts(events, witness, start_s)
    usual_s = profile.iteration_s.p50 if profile else usual_iteration_s(events, witness)
    copies = protection(events, data.redundancy)
    failing = failing_disk(data.events)
    verdict = run_verdict(
        data, accounting, restores, aged, ended, compared, step=newest_step(events)
    )
    if failing is not None:
        well = ended is None or ended.state == "finished"
        verdict = without_disk(verdict, failing, opens=well)
    facts = Facts(
        data=data, accounting=accounting, restores=restores, saves=saved, promises=compared,
        protection=copies,
    )  # fmt: skip
    found = findings(facts)
    return ReportModel(
        kind="run",
        title=data.title,
        command=data.command or " ".join(data.argv),
        created=data.created,
        protected=data.protected,
        ending=ended,
        verdict=advised(verdict, data, ended, found),
        facts=(
            *_facts(data, events, ended),
            *_begun_anew(every, events),
        ),
        tiles=run_tiles(data, accounting, saved, restores, ended, early=is_early(compared)),
        findings=found,
        versions=dict(data.versions),
        status=_status(data),
        plan_yaml=data.plan_yaml,
        policy_diff=data.policy_diff,
        warnings=(*_warnings(data, accounting), *_gaps(events)),
        profile=profile,
        decision=decision,
        what_if=data.what_if,
        risk=data.risk,
        search=data.search,
        accounting=accounting,
        saves=saved,
        protection=copies,
        restores=restores,
        restarts=found_restarts,
        next_gain=cheapest_gain(found_restarts[-1], data.goal.restart, usual_s)
        if found_restarts
        else None,
        promises=compared,
        ages=aged,
        changes=changes(events, start_s),
        timeline=timeline(events, restores, start_s),
        windows=windows(events, profile, data.decision),
        disk_failing=failing is not None,
        disputed_count=sum(isinstance(event, ReplicasDisagreed) for event in events),
    )


def _compared(events: tuple[Event, ...], data: RunData, decision: Decision) -> tuple[Promise, ...]:
    """The promises of the plan in force against what happened since it is."""
    profile = data.profile
    since = in_force(events, decision.plan.version)
    earlier = [e for e in events[: len(events) - len(since)] if isinstance(e, RunStarted)]
    accounting, restores = account(
        since,
        data.failures,
        iteration_s=profile.iteration_s.p50 if profile else None,
        run_id=earlier[-1].run_id if earlier else "",
    )
    return promises(
        decision.expected,
        accounting,
        saves(since, sync=waits(decision)),
        restores,
        interruptions_per_s=data.interruptions_per_s,
        rate_shape=decision.inputs.rate_shape if decision.inputs is not None else None,
    )


def _facts(data: RunData, events: tuple[Event, ...], ended: RunEnding | None) -> tuple[Fact, ...]:
    """Who ran what where, and how it ended."""
    facts: list[Fact] = []
    if ended is not None:
        facts.append(Fact(label="Ended", value=_ended(ended)))
    profile = data.profile
    started = next((e for e in reversed(events) if isinstance(e, RunStarted)), None)
    if started is not None:
        facts.append(Fact(label="Run", value=started.run_id))
    if profile is not None:
        mark = profile.fingerprint
        ranks = f"{mark.world_size} on {mark.nodes} node" + ("s" if mark.nodes != 1 else "")
        facts.append(Fact(label="Ranks", value=ranks))
        facts.append(Fact(label="Hardware", value=", ".join(_counted(mark.gpus)) or mark.cpu))
        per_rank = format_bytes(profile.state.total_bytes)
        facts.append(Fact(label="State", value=f"{per_rank} per rank"))
        facts.append(Fact(label="Storage", value=mark.storage))
    elif started is not None:
        facts.append(Fact(label="Ranks", value=str(started.world_size)))
        # At its start an optimizer has no state yet.
        copied = (e for e in events if isinstance(e, SnapshotSealed) and e.rank == started.rank)
        state_bytes = max([started.state_bytes, *(event.bytes for event in copied)])
        if state_bytes:
            size = f"{format_bytes(state_bytes)} per rank"
            facts.append(Fact(label="State", value=size))
    if data.decision is not None:
        plan = data.decision.plan
        facts.append(Fact(label="Plan", value=f"{plan.plan_id}, version {plan.version}"))
    if started is not None and started.non_temporal_bytes:
        size = format_bytes(started.non_temporal_bytes)
        facts.append(Fact(label="Copies", value=f"past the caches from {size} on"))
    if data.created:
        facts.append(Fact(label="Written", value=data.created))
    if "autockpt" in data.versions:
        facts.append(Fact(label="autockpt", value=data.versions["autockpt"]))
    return tuple(facts)


def _begun_anew(every: Sequence[Event], events: Sequence[Event]) -> tuple[Fact, ...]:
    """When a training was left as a whole, which no figure of the report counts."""
    left = every[: len(every) - len(events)]
    started = next((e for e in events if isinstance(e, RunStarted)), None)
    if started is None or not any(isinstance(e, IterationsTimed) for e in left):
        return ()
    value = f"{started.wall}, with --fresh; the training before is not counted"
    return (Fact(label="Begun anew", value=value),)


def _ended(ended: RunEnding) -> str:
    code = "" if ended.exit_code is None else f", exit code {ended.exit_code}"
    return f"{ended.state}{code}"


def _counted(names: tuple[str, ...]) -> list[str]:
    """Equal names once, with their number."""
    counts = {name: names.count(name) for name in dict.fromkeys(names)}
    return [f"{count} x {name}" if count > 1 else name for name, count in counts.items()]


def _status(data: RunData) -> dict[str, str]:
    """The scalars of status.json, as text."""
    return {
        str(key): str(value)
        for key, value in data.status.items()
        if isinstance(value, str | int | float | bool)
    }


def _gaps(events: Sequence[Event]) -> list[str]:
    """A sentence about each gap of the telemetry."""
    found = []
    for event in events:
        if isinstance(event, Degraded) and event.what == "telemetry":
            log = "the keeper" if event.rank < 0 else f"rank {event.rank}"
            found.append(
                f"The telemetry of {log} has a gap, so figures may be too small: {event.reason}."
            )
    return found


def _warnings(data: RunData, accounting: Accounting | None) -> tuple[str, ...]:
    """Warnings that a reader must know before believing the rest."""
    found: list[str] = []
    if data.thinned_ranks:
        ranks = f"{data.thinned_ranks} rank{'s' * (data.thinned_ranks > 1)}"
        found.append(
            f"Times of iterations and copies lack those of {ranks}: the logs of all are too long "
            "for one report. telemetry/ has them."
        )
    if accounting is not None and accounting.other_s < -1e-6 * max(1.0, accounting.wall_s):
        found.append(
            f"The events explain {format_duration(-accounting.other_s)} more than the wall time: "
            "telemetry of several boots or runs may be mixed."
        )
    curve, decision = data.what_if, data.decision
    if curve is not None:
        mine = waste(curve.point)
        if abs(mine - curve.waste) > AGREEMENT * max(mine, curve.waste):
            found.append(
                f"The what-if formula gives {format_fraction(mine)} where the policy says "
                f"{format_fraction(curve.waste)}; trust the policy."
            )
        if (
            decision is not None
            and abs(decision.expected.waste - curve.waste) > AGREEMENT * curve.waste
        ):
            found.append(
                f"The what-if stands at {format_fraction(curve.waste)}, the decision promised "
                f"{format_fraction(decision.expected.waste)}."
            )
    if data.profile is not None:
        found += data.profile.warnings
    if decision is not None:
        found += decision.warnings
    return grouped(found)
