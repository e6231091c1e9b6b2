"""The outcome of a fault, read from the job's telemetry, beside the plan's promise.

Pure: events and a decision in, an outcome out.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from autockpt.cli.drill.fault import Fault
from autockpt.values.plan import CheckpointPlan, Decision
from autockpt.values.telemetry import (
    CheckpointDurable,
    Degraded,
    Event,
    FirstIterationEnded,
    IterationsTimed,
    MemoryCommitted,
    PersistFailed,
    Restored,
    RunStarted,
)

Verdict = Literal["kept", "broken", "no promise"]
FACTOR = 1.5
"""As the report judges: a promise is broken when the observation is this many times larger."""
NEWEST = 10
"""Blocks of iterations by which an interval is turned into time."""
SLACK_S = 1.0
"""A single event differs from a mean."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Promise:
    """The plan in force, on one fault."""

    lost_steps: int | None
    """At most so many iterations; None: nothing was promised."""
    recovery_s: float | None
    """Lost work and down time, mean; None: nothing was promised, or training does not stop."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """One fault on one job."""

    fault: str
    promised: Promise
    lost_steps: int | None
    """Iterations trained again; None: the job did not come back."""
    recovery_s: float | None
    """Lost work and down time; 0 where training did not stop."""
    source: str
    """memory, peer, parity, disk; "": nothing was restored."""
    verdict: Verdict
    note: str
    """The observation, in one sentence."""


def promise(
    fault: Fault, plan: CheckpointPlan, decision: Decision | None, *, restarts: bool
) -> Promise:
    """Of the plan in force; the time comes from the decision, where there is one.

    `restarts`: the policy ends a stuck rank, so that it is lost like a killed one.
    """
    if fault.name in ("keeper", "disk-full", "end") or (fault.name == "stuck" and not restarts):
        return Promise(lost_steps=0, recovery_s=None)
    expected = None if decision is None else decision.expected
    in_memory = not fault.loses_memory and plan.tier("memory").interval_steps > 0
    interval = plan.tier("memory" if in_memory else "disk").interval_steps
    mean_s = None
    if expected is not None:
        mean_s = expected.recovery_memory_s if in_memory else expected.recovery_disk_s
    return Promise(
        # A checkpoint under way at the failure does not count: up to two intervals can be lost.
        lost_steps=2 * interval if interval else None,
        recovery_s=mean_s,
    )


def interval_s(events: Sequence[Event], plan: CheckpointPlan, iteration_s: float) -> float:
    """The longest interval of the plan, by the newest iterations, else by `iteration_s`."""
    blocks = [event for event in events if isinstance(event, IterationsTimed) and event.count]
    if blocks:
        newest = blocks[-NEWEST:]
        iteration_s = sum(b.total_s for b in newest) / sum(b.count for b in newest)
    return max(tier.interval_steps for tier in plan.tiers) * iteration_s


def is_ready(fault: Fault, events: Sequence[Event], since_s: float, plan: CheckpointPlan) -> bool:
    """Whether the job trains and holds what the fault is about, since `since_s`."""
    seen = [event for event in events if event.at_s >= since_s]
    kinds = {type(event) for event in seen}
    trains = IterationsTimed in kinds or FirstIterationEnded in kinds
    memory = MemoryCommitted in kinds or not plan.tier("memory").interval_steps
    return trains and (CheckpointDurable in kinds if fault.needs_durable else memory)


def is_over(fault: Fault, events: Sequence[Event], at_s: float, restarts: bool) -> bool:
    """Whether what follows a fault at `at_s` has been seen; `restarts`: ranks started again."""
    after = [event for event in events if event.at_s >= at_s]
    if fault.name == "keeper":
        return any(isinstance(event, MemoryCommitted | CheckpointDurable) for event in after)
    if fault.name == "disk-full":
        failed = [e.at_s for e in after if isinstance(e, PersistFailed | Degraded)]
        return bool(failed)
    if fault.name == "stuck" and not restarts:
        return any(isinstance(event, IterationsTimed) for event in after)
    started = {e.rank: e.at_s for e in after if isinstance(e, RunStarted)}
    back = {e.rank for e in after if isinstance(e, FirstIterationEnded)}
    return bool(started) and back >= set(started)


def outcome(
    fault: Fault, promised: Promise, events: Sequence[Event], at_s: float, *, note: str = ""
) -> Outcome:
    """Judge what followed a fault at `at_s` that was seen to its end."""
    after = [event for event in events if event.at_s >= at_s]
    restored = [event for event in after if isinstance(event, Restored)]
    lost = max((event.lost_steps for event in restored), default=0)
    seconds = max((event.lost_s + event.down_s for event in restored), default=0.0)
    source = restored[-1].source if restored else ""
    steps_kept = promised.lost_steps is None or lost <= promised.lost_steps
    time_kept = promised.recovery_s is None or seconds <= promised.recovery_s * FACTOR + SLACK_S
    verdict: Verdict = "kept" if steps_kept and time_kept else "broken"
    if promised.lost_steps is None and promised.recovery_s is None:
        verdict = "no promise"
    if not note and restored:
        note = f"went on at step {restored[-1].step}, from {source}"
    return Outcome(
        fault=fault.name, promised=promised, lost_steps=lost, recovery_s=seconds, source=source,
        verdict=verdict, note=note or "training went on",
    )  # fmt: skip


def failed(fault: Fault, promised: Promise, note: str) -> Outcome:
    """The job did not come back as it has to."""
    return Outcome(
        fault=fault.name, promised=promised, lost_steps=None, recovery_s=None, source="",
        verdict="broken", note=note,
    )  # fmt: skip
