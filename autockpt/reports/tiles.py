"""The key figures under the verdict, each with the promise or today's figure beside it.

Every figure comes from the Decision or the Accounting that the rest of the page shows.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from autockpt.reports.analysis.accounting import Accounting, Restore
from autockpt.reports.analysis.ending import RunEnding
from autockpt.reports.analysis.saves import Saves
from autockpt.reports.analysis.what_if import terms
from autockpt.reports.data import RunData
from autockpt.values.plan import Decision
from autockpt.values.profile import Profile
from autockpt.values.units import format_duration, format_fraction

COSTS = {
    "stall": "checkpoint stall",
    "slowdown": "slow-down while writing",
    "lost": "lost work",
    "down": "down time",
}
"""The ways to lose time, in words."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tile:
    """One key figure."""

    label: str
    value: str
    note: str
    """Today's value, a promise, or a second figure."""


def profile_tiles(data: RunData) -> tuple[Tile, ...]:
    """The promise in figures, each with today's."""
    decision, profile = data.decision, data.profile
    if decision is None or not data.protected:
        return _measured_tiles(profile)
    expected, current = decision.expected, decision.current
    return (
        Tile(label="Goodput", value=format_fraction(expected.goodput),
             note=f"{format_fraction(current.goodput)} with blocking saves" if current else ""),
        Tile(label="Stall", value=format_duration(expected.stall_s),
             note=f"each, {format_duration(current.stall_s)} if blocking" if current else "each"),
        Tile(label="Time to durable", value=format_duration(expected.persist_s),
             note=f"{format_duration(current.persist_s)} if blocking" if current else "on disk"),
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
    *,
    early: bool = False,
) -> tuple[Tile, ...]:
    """The outcome in figures, each with its promise; `early`: no promise can be judged yet."""
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
    note = "nothing lost"
    if worst is not None:
        note = f"{worst[1]} {'step' if worst[1] == 1 else 'steps'}, {worst[2]}"
    promised = f"promised {format_fraction(expected.goodput)}" if expected else ""
    sources = ", ".join(sorted({r.source or "scratch" for r in restores}))
    return (
        Tile(label="Goodput", value=format_fraction(accounting.goodput),
             note="too early for the promise" if promised and early else promised),
        Tile(label="Stall", value=format_duration(stall.p50_s) if stall else "none",
             note=f"each, p95 {format_duration(stall.p95_s)}" if stall else "no checkpoint"),
        Tile(label="Time to durable", value=format_duration(durable.p50_s) if durable else "never",
             note=f"p95 {format_duration(durable.p95_s)}" if durable else "nothing on disk"),
        Tile(label="Worst loss", value=format_duration(worst[0]) if worst else "none",
             note=note),
        Tile(label="Restores", value=str(len(restores)), note=f"from {sources}" if sources
             else "none needed"),
        _largest_tile(accounting),
    )  # fmt: skip


def _largest_tile(accounting: Accounting) -> Tile:
    parts = {name: s for name, s in accounting.parts().items() if name in COSTS}
    name = max(parts, key=lambda part: parts[part])
    if parts[name] <= 0:
        return Tile(label="Most time lost to", value="none", note="")
    return Tile(label="Most time lost to", value=COSTS[name], note=format_duration(parts[name]))


def _bottleneck_tile(data: RunData) -> Tile:
    if data.what_if is None:
        return Tile(label="Most time lost to", value="unknown", note="")
    parts = terms(data.what_if.point)
    name = max(parts, key=lambda part: parts[part])
    note = f"{format_fraction(parts[name])} of the time"
    return Tile(label="Most time lost to", value=COSTS[name], note=note)


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
