"""The first thing anyone reads: one sentence, what it is worth, how sure we are, key figures.

Every number comes from the Decision or the Accounting that the rest of the page shows; nothing is
computed a second way.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from autockpt.reports.analysis.accounting import Accounting, Restore
from autockpt.reports.analysis.ending import RunEnding
from autockpt.reports.analysis.promises import Promise
from autockpt.reports.analysis.saves import Age, Saves
from autockpt.reports.analysis.what_if import terms
from autockpt.reports.data import RunData, reckoned_with
from autockpt.reports.findings import SPREAD
from autockpt.values.degradation import DegradedTier
from autockpt.values.plan import CheckpointPlan, Decision
from autockpt.values.profile import Profile
from autockpt.values.units import format_duration, format_fraction

FEW_ITERATIONS = 20
"""Fewer measured iterations than this lower the confidence."""

COSTS = {
    "stall": "checkpoint stall",
    "slowdown": "slow-down while writing",
    "lost": "lost work",
    "down": "down time",
}
"""What can be lost, in words."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What to tell your boss."""

    headline: str
    """One sentence: do this, or this happened."""
    detail: str
    """What it is worth and against what."""
    confidence: Literal["high", "medium", "low"]
    confidence_reason: str
    tone: Literal["good", "warn", "bad"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Tile:
    """One key figure."""

    label: str
    value: str
    note: str
    """Today's value, a promise, or a second figure."""


def without_disk(verdict: Verdict, disk: DegradedTier, *, opens: bool) -> Verdict:
    """The same with the news that checkpoints did not reach the disk in the end; `opens`: first."""
    news = f"No checkpoint has reached the disk{f' since {disk.since}' if disk.since else ''}."
    return replace(
        verdict,
        headline=f"{news} {verdict.headline}" if opens else f"{verdict.headline} {news}",
        detail=f"The last error: {disk.because}. {verdict.detail}",
        tone="bad",
    )


def profile_verdict(data: RunData, ended: RunEnding | None = None) -> Verdict:
    """What the plan will do, before any run; or how a run ended that never trained."""
    if ended is not None and ended.state != "finished":
        return _unfinished(ended, None)
    decision, profile = data.decision, data.profile
    level, reason = confidence(profile, decision=decision)
    if not data.protected:
        return Verdict(
            headline="This run was not protected.",
            detail="No checkpoint was taken, because the script never attached. "
            "A failure would have cost all of it.",
            confidence="high",
            confidence_reason="no telemetry was written",
            tone="bad",
        )
    if decision is None:
        return Verdict(
            headline="Measured, not decided yet." if profile else "Nothing was measured.",
            detail="Run autockpt plan to turn this profile into a plan."
            if profile
            else "Run autockpt profile with your training script.",
            confidence=level,
            confidence_reason=reason,
            tone="warn",
        )
    expected, current = decision.expected, decision.current
    headline = f"Checkpoint {_intervals(decision.plan, profile)}."
    band = f"{format_fraction(expected.waste_low)} to {format_fraction(expected.waste_high)}"
    if current is None:
        headline += f" Expect to lose {format_fraction(expected.waste)} of the time."
        detail = f"90 % band: {band}."
    else:
        verb = "falls" if expected.waste < current.waste else "goes"
        headline += (
            f" Lost time {verb} from {format_fraction(current.waste)} "
            f"to {format_fraction(expected.waste)}."
        )
        detail = (
            f"{worth(current.waste - expected.waste, profile)} Compared with a blocking checkpoint "
            f"every 30 minutes, which stalls training for {format_duration(current.stall_s)}. "
            f"90 % band of the new loss: {band}."
        )
    return Verdict(headline=headline, detail=detail.strip(), confidence=level,
                   confidence_reason=reason, tone="good")  # fmt: skip


def run_verdict(
    data: RunData,
    accounting: Accounting,
    restores: Sequence[Restore],
    ages: Sequence[Age],
    ended: RunEnding | None = None,
    promises: Sequence[Promise] = (),
) -> Verdict:
    """What a run achieved; one that did not finish opens with how it ended and what was lost."""
    ended = None if ended is None or ended.state == "finished" else ended
    said = _achieved(data, accounting, restores, ages, ended, promises)
    return said if ended is None else _unfinished(ended, said)


def _unfinished(ended: RunEnding, achieved: Verdict | None) -> Verdict:
    """How it ended first; what was achieved until then after it."""
    parts = [ended.circumstances]
    if achieved is not None:
        parts += [achieved.headline, achieved.detail]
    return Verdict(
        headline=f"{ended.headline} {ended.loss}",
        detail=" ".join(part for part in parts if part),
        confidence=achieved.confidence if achieved else "high",
        confidence_reason=achieved.confidence_reason if achieved else "said by the launcher",
        tone="warn" if ended.state == "interrupted" and not ended.lost_steps else "bad",
    )


def _achieved(
    data: RunData,
    accounting: Accounting,
    restores: Sequence[Restore],
    ages: Sequence[Age],
    ended: RunEnding | None,
    promises: Sequence[Promise],
) -> Verdict:
    level, reason = confidence(data.profile, accounting)
    failures = [restore for restore in restores if restore.failed_at_s is not None]
    wall = format_duration(accounting.wall_s)
    if not data.protected:
        return Verdict(
            headline=f"This run trained {wall} unprotected.",
            detail="No checkpoint was taken, because the script never attached. "
            "A failure would have cost all of it.",
            confidence=level,
            confidence_reason=reason,
            tone="bad",
        )
    headline = f"{format_fraction(accounting.goodput)} of {wall} went into training that counts."
    unkept = [r for r in restores if r.failed_at_s is None and r.lost_steps]
    if failures:
        cost_s = sum(restore.lost_s + restore.down_s for restore in failures)
        deaths = sum(restore.deaths for restore in failures)
        times = "One failure" if deaths == 1 else f"{deaths} failures"
        headline += f" {times} cost {format_duration(cost_s)} in all."
    if unkept:
        steps, lost_s = sum(r.lost_steps for r in unkept), sum(r.lost_s for r in unkept)
        headline += (
            f" {steps} steps ({format_duration(lost_s)}) were trained before an end and not kept."
        )
    if not failures and not unkept and ended is None:
        headline += " No failure."
    parts = [
        f"Checkpoints cost {format_fraction(_share(accounting, 'stall', 'slowdown'))} of the time, "
        f"lost work {format_fraction(_share(accounting, 'lost'))}, "
        f"down time {format_fraction(_share(accounting, 'down'))}."
    ]
    if data.decision is not None:
        expects = (
            f"The plan in force expects to lose {format_fraction(data.decision.expected.waste)}"
        )
        seen = next((p.observed for p in promises if p.name == "waste"), None)
        since = f"; since it applies {format_fraction(seen)} was lost" if seen is not None else ""
        parts.append(f"{expects}{since}.")
    if ages:
        *others, last = (
            f"{format_duration(a.worst_s)} from {'the ' * (a.tier == 'object store')}{a.tier}"
            for a in ages
        )
        at_stake = f"{', '.join(others)} and {last}" if others else last
        parts.append(f"Work not yet recoverable was at most {at_stake}.")
    return Verdict(headline=headline, detail=" ".join(parts), confidence=level,
                   confidence_reason=reason, tone="good" if accounting.goodput >= 0.9 else "warn",
                   )  # fmt: skip


def profile_tiles(data: RunData) -> tuple[Tile, ...]:
    """The promise in figures, each with today's."""
    decision, profile = data.decision, data.profile
    if decision is None or not data.protected:
        return _measured_tiles(profile)
    expected, current = decision.expected, decision.current
    return (
        Tile(label="Goodput", value=format_fraction(expected.goodput),
             note=f"today {format_fraction(current.goodput)}" if current else ""),
        Tile(label="Stall", value=format_duration(expected.stall_s),
             note=f"each, today {format_duration(current.stall_s)}" if current else "each"),
        Tile(label="Time to durable", value=format_duration(expected.persist_s),
             note=f"today {format_duration(current.persist_s)}" if current else "on disk"),
        *_loss_tile(decision, profile),
        Tile(label="Recovery", value=format_duration(expected.recovery_memory_s),
             note=f"from disk: {format_duration(expected.recovery_disk_s)}"),
        _bottleneck_tile(data),
    )  # fmt: skip


def run_tiles(
    data: RunData,
    accounting: Accounting,
    saves: Saves,
    restores: Sequence[Restore],
    ended: RunEnding | None = None,
) -> tuple[Tile, ...]:
    """The outcome in figures, each with what was promised."""
    expected = data.decision.expected if data.decision else None
    stall, durable = saves.stall, saves.durable
    failures = [r for r in restores if r.failed_at_s is not None or r.lost_steps]
    lost = [*((r.lost_s, r.lost_steps, f"{r.what or 'unknown'} lost") for r in failures)]
    if ended is not None and ended.lost_steps:
        lost.append((ended.lost_s, ended.lost_steps, f"{ended.state} at the end"))
    if not data.protected:
        return (
            Tile(label="At stake", value=format_duration(accounting.wall_s), note="all of the run"),
            Tile(label="Checkpoints", value="none", note="the script never attached"),
            Tile(label="Steps", value=str(accounting.steps), note=""),
        )
    worst = max(lost, default=None)
    sources = ", ".join(sorted({r.source or "scratch" for r in failures}))
    return (
        Tile(label="Goodput", value=format_fraction(accounting.goodput),
             note=f"promised {format_fraction(expected.goodput)}" if expected else ""),
        Tile(label="Stall", value=format_duration(stall.p50_s) if stall else "none",
             note=f"each, p95 {format_duration(stall.p95_s)}" if stall else "no checkpoint"),
        Tile(label="Time to durable", value=format_duration(durable.p50_s) if durable else "never",
             note=f"p95 {format_duration(durable.p95_s)}" if durable else "nothing on disk"),
        Tile(label="Worst loss", value=format_duration(worst[0]) if worst else "none",
             note=f"{worst[1]} steps, {worst[2]}" if worst else "no failure"),
        Tile(label="Restores", value=str(len(failures)), note=f"from {sources}" if sources
             else "none needed"),
        _largest_tile(accounting),
    )  # fmt: skip


def confidence(
    profile: Profile | None,
    accounting: Accounting | None = None,
    *,
    decision: Decision | None = None,
) -> tuple[Literal["high", "medium", "low"], str]:
    """How far to trust the figures, and why not further."""
    if accounting is not None and accounting.other_s < -1e-6 * max(1.0, accounting.wall_s):
        return "low", "the telemetry contradicts itself"
    if accounting is not None:
        return "high", "measured"
    if profile is None:
        return "low", "no profile"
    doubts = []
    if profile.iteration_s.n < FEW_ITERATIONS:
        doubts.append(f"only {profile.iteration_s.n} iterations measured")
    if profile.iteration_s.p10 > 0 and profile.iteration_s.p90 > SPREAD * profile.iteration_s.p10:
        doubts.append("iteration times vary")
    rates, recovery = reckoned_with(profile, decision) or (profile.failures, profile.recovery)
    if not rates.per_node.events + rates.per_job.events:
        doubts.append("the failure rate is assumed")
    if recovery.restart.source == "assumed":
        doubts.append("the restart time is assumed")
    if not doubts:
        return "high", f"{profile.iteration_s.n} iterations and past failures measured"
    return ("medium" if len(doubts) < 3 else "low"), ", ".join(doubts)


def worth(saved: float, profile: Profile | None) -> str:
    """A saved fraction of time in the user's unit, as a sentence; "" when nothing is saved."""
    if saved <= 0 or profile is None:
        return ""
    fingerprint = profile.fingerprint
    if fingerprint.gpus:
        count, unit, machine = fingerprint.world_size, "GPU-hours", "GPUs"
    else:
        count, unit, machine = fingerprint.nodes, "machine-hours", "machines"
    on = f"on {count} {machine}" if count != 1 else f"on one {machine[:-1]}"
    hours = saved * 24.0 * count
    if hours < 1.0:
        return f"Saves {hours * 60:.2g} {unit.replace('hours', 'minutes')} a day {on}."
    return f"Saves {hours:.3g} {unit} a day {on}."


def interval_text(steps: int, iteration_s: float | None) -> str:
    """An interval for people, as time where it is known: steps mean little to most."""
    if iteration_s is None or iteration_s <= 0:
        return "every step" if steps == 1 else f"every {steps} steps"
    return f"every {format_duration(steps * iteration_s)}"


def _intervals(plan: CheckpointPlan, profile: Profile | None) -> str:
    """Where to and how often; tiers of one interval share it."""
    iteration_s = profile.iteration_s.p50 if profile else None
    tiers: dict[int, list[str]] = {}
    for tier in plan.tiers:
        if tier.interval_steps:
            tiers.setdefault(tier.interval_steps, []).append(tier.tier)
    parts = [
        f"to {' and '.join(names)} {interval_text(steps, iteration_s)}"
        for steps, names in tiers.items()
    ]
    return " and ".join(parts) if parts else "nothing: all tiers are off"


def _share(accounting: Accounting, *names: str) -> float:
    parts = accounting.parts()
    total = sum(parts[name] for name in names)
    return total / accounting.wall_s if accounting.wall_s > 0 else 0.0


def _largest_tile(accounting: Accounting) -> Tile:
    parts = {name: s for name, s in accounting.parts().items() if name in COSTS}
    name = max(parts, key=lambda part: parts[part])
    if parts[name] <= 0:
        return Tile(label="Largest loss", value="none", note="")
    return Tile(label="Largest loss", value=COSTS[name], note=format_duration(parts[name]))


def _bottleneck_tile(data: RunData) -> Tile:
    if data.what_if is None:
        return Tile(label="Largest loss", value="unknown", note="")
    parts = terms(data.what_if.point)
    name = max(parts, key=lambda part: parts[part])
    note = f"{format_fraction(parts[name])} of the time"
    return Tile(label="Largest loss", value=COSTS[name], note=note)


def _loss_tile(decision: Decision, profile: Profile | None) -> tuple[Tile, ...]:
    """Most work a failure can take, with and without the memory of the node."""
    if profile is None:
        return ()
    iteration_s = profile.iteration_s.p50
    memory, disk = (decision.plan.tier(name).interval_steps for name in ("memory", "disk"))
    disk_s = disk * iteration_s + decision.expected.persist_s
    if not disk:
        return ()
    if not memory:
        return (Tile(label="Worst loss", value=format_duration(disk_s), note="any failure"),)
    snapshot_s = profile.snapshot_s.p50 if profile.snapshot_s else 0.0
    return (
        Tile(
            label="Worst loss",
            value=format_duration(memory * iteration_s + snapshot_s),
            note=f"node dies: {format_duration(disk_s)}",
        ),
    )


def _measured_tiles(profile: Profile | None) -> tuple[Tile, ...]:
    if profile is None:
        return ()
    times = {
        "Iteration": profile.iteration_s,
        "Stall": profile.stall_s,
        "Time to durable": profile.persist_s,
    }
    return tuple(
        Tile(label=label, value=format_duration(times_s.p50),
             note=f"p95 {format_duration(times_s.p95)}")
        for label, times_s in times.items()
        if times_s is not None
    )  # fmt: skip
