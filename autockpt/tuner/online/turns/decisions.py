"""The decisions that are compared while a job trains, and when a comparison begins and ends.

Each is one value: its settings, the watched cost, and the worth of a second.  All share these
rules.

A comparison begins when the watched cost is twice or half of the expected one, and counts.  Each
checkpoint then tries the next setting (`turns.compare`).  The expected best stays unless another
setting is better by more than noise.  No new comparison begins before `AGAIN` checkpoints.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from autockpt.tuner.online.controller_state import Memory
from autockpt.tuner.online.estimates import WINDOW, Window
from autockpt.tuner.online.observed import Observed
from autockpt.tuner.online.outlook import Outlook
from autockpt.tuner.online.proposals import Kind
from autockpt.tuner.online.settings import ControllerSettings
from autockpt.tuner.online.turns.compare import (
    AGAIN,
    ROUNDS,
    WORTH,
    Compared,
    compare,
    is_doubted,
)
from autockpt.values.goal import Goal, Pins
from autockpt.values.plan import CheckpointPlan, Schedule, Staging, WriteWay
from autockpt.values.units import format_duration

WRITE_ROUNDS = 5
"""Checkpoints to disk of each way of writing: they come less often than snapshots."""
MOST_WRITERS = 16
WAYS = 3
"""Ways of writing in one comparison."""
BOUND = 1.5
"""A checkpoint that is durable a second later also comes half a second later, where the time until
durable decides the interval."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnedDecision:
    """A decision whose settings checkpoints try in turn."""

    name: str
    kind: Kind
    """Of the proposal that ends a comparison."""
    subject: str
    verb: str
    rounds: int
    early: bool
    """Its checkpoints are rare: few of them show a clear difference."""
    compared: Callable[[Staging], tuple[str, ...]]
    """Settings that take turns now, the expected best first."""
    in_force: Callable[[Staging], str]
    """The setting outside comparisons."""
    begin: Callable[[Memory, Goal], Staging | None]
    """The staging under which settings take turns; None where they may not change."""
    end: Callable[[Staging, str], Staging]
    """The staging with the winner."""
    watched: Callable[[Observed], Window]
    count: Callable[[Observed], int]
    """Checkpoints of the kind so far."""
    meant_s: Callable[[CheckpointPlan, Observed], float]
    """The watched cost as it was expected before any comparison; 0: not known."""
    weight: Callable[[Outlook], float]
    """Seconds of training that a second until durable is worth."""
    least_s: Callable[[Outlook], float]
    """Least watched cost that is worth a comparison."""
    paced: bool
    """It depends on how long iterations take, so another pace asks for a comparison as well."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """A comparison should begin, or has ended."""

    plan: CheckpointPlan
    kind: Kind
    why: str
    numbers: dict[str, float]


def next_turn(
    decision: TurnedDecision, memory: Memory, outlook: Outlook, settings: ControllerSettings
) -> Turn | None:
    """The next change of one decision; None: nothing is due."""
    plan, seen = memory.plan, memory.seen
    rivals = decision.compared(plan.staging)
    if rivals:
        found = compare(
            rivals, seen.tried, seen.quiet.mean,
            weight=decision.weight(outlook), rounds=decision.rounds, early=decision.early,
        )  # fmt: skip
        if found is None:
            return None
        then = _with_staging(plan, decision.end(plan.staging, found.winner))
        why = found.sentence(decision.subject)
        return Turn(plan=then, kind=decision.kind, why=why, numbers=found.numbers)
    if any(other.compared(plan.staging) for other in TURNED):
        return None  # one comparison at a time
    before = memory.compared.get(decision.name)
    turn = _other_pace(decision, memory, before, outlook, settings) if decision.paced else None
    return turn or _other_cost(decision, memory, before, outlook)


def note_cost(decision: TurnedDecision, memory: Memory) -> None:
    """Take the cost of the last winner from its first checkpoints on its own."""
    before, cost = memory.compared.get(decision.name), decision.watched(memory.seen)
    if before is None or before.cost_s or decision.compared(memory.plan.staging):
        return
    rested = decision.count(memory.seen) - before.checkpoints >= cost.size
    if rested and cost.n == cost.size and not cost.doubtful:
        memory.compared = {**memory.compared, decision.name: replace(before, cost_s=cost.mean)}


def note_switch(memory: Memory, before: Staging, now: Staging) -> None:
    """A plan is in force that begins a comparison, or ends one."""
    for decision in TURNED:
        rivals, coming = decision.compared(before), decision.compared(now)
        if coming and coming != rivals:
            memory.seen.tried = ()
        elif rivals and not coming:
            _end(decision, memory, rivals, decision.in_force(now))


def _end(decision: TurnedDecision, memory: Memory, rivals: tuple[str, ...], winner: str) -> None:
    seen = memory.seen
    losers = tuple(name for name in rivals if name != winner)
    ended = Compared(
        settings=(winner, *losers), checkpoints=decision.count(seen), quiet_s=seen.quiet.mean
    )
    memory.compared = {**memory.compared, decision.name: ended}
    durable = tuple(t.durable_s for t in seen.tried if t.setting == winner and t.durable_s)
    if durable:  # what the others took says nothing of the plan
        window = Window(samples=durable[-WINDOW:], rare=True)
        window.jumps.restart(window.samples)
        seen.persist = window


def _other_pace(
    decision: TurnedDecision,
    memory: Memory,
    before: Compared | None,
    outlook: Outlook,
    settings: ControllerSettings,
) -> Turn | None:
    """Iterations are not what they were in the last comparison."""
    quiet, count = memory.seen.quiet, decision.count(memory.seen)
    if before is None or not quiet.n or not before.quiet_s:
        return None
    changed = max(quiet.mean, before.quiet_s) / max(min(quiet.mean, before.quiet_s), 1e-9)
    rested = count - before.checkpoints >= settings.compare_checkpoints
    if not rested or changed < settings.compare_change:
        return None
    why = (
        f"iterations take {format_duration(quiet.mean)}, and took "
        f"{format_duration(before.quiet_s)} when {', '.join(before.settings)} were compared: "
        "once more"
    )
    return _begin(memory, decision.begin(memory, outlook.goal), why, {})


def _other_cost(
    decision: TurnedDecision, memory: Memory, before: Compared | None, outlook: Outlook
) -> Turn | None:
    """A checkpoint takes much more than it was meant to, or much less."""
    plan, seen = memory.plan, memory.seen
    if before is not None and decision.count(seen) - before.checkpoints < AGAIN:
        return None
    cost, meant_s = decision.watched(seen), decision.meant_s(plan, seen)
    if before is not None:
        meant_s = before.cost_s
    if not is_doubted(cost, meant_s, least_s=decision.least_s(outlook)):
        return None
    staging = decision.begin(memory, outlook.goal)
    if staging is None:
        return None
    why = (
        f"{decision.subject} {decision.verb} {format_duration(cost.mean)} (mean of {cost.n}) "
        f"where {format_duration(meant_s)} was expected: "
        f"{' and '.join(decision.compared(staging))} take turns"
    )
    return _begin(memory, staging, why, {"seen_s": cost.mean, "meant_s": meant_s})


def _begin(
    memory: Memory, staging: Staging | None, why: str, numbers: dict[str, float]
) -> Turn | None:
    if staging is None:
        return None
    return Turn(plan=_with_staging(memory.plan, staging), kind="compare", why=why, numbers=numbers)


def _with_staging(plan: CheckpointPlan, staging: Staging) -> CheckpointPlan:
    return replace(plan, version=plan.version + 1, staging=staging)


# --- the schedule of copying ----------------------------------------------------------------------


def _begin_schedules(memory: Memory, goal: Goal) -> Staging | None:
    """The schedules that were compared before, or the two that any job can use."""
    staging, before = memory.plan.staging, memory.compared.get("schedule")
    if before is not None:
        return replace(staging, compare=_named(before.settings))
    fixed = goal.pins.schedule is not None or goal.objective == "stall"
    if fixed or staging.persist == "sync" or staging.schedule == "windows":
        return None
    other: Schedule = "blocking" if staging.schedule == "lazy" else "lazy"
    return replace(staging, compare=(staging.schedule, other))


def _named(names: Sequence[str]) -> tuple[Schedule, ...]:
    every: tuple[Schedule, ...] = ("lazy", "blocking", "windows")
    return tuple(each for name in names for each in every if each == name)


SCHEDULE = TurnedDecision(
    name="schedule",
    kind="schedule",
    subject="a snapshot",
    verb="stalls",
    rounds=ROUNDS,
    early=False,
    compared=lambda staging: staging.compare,
    in_force=lambda staging: staging.schedule,
    begin=_begin_schedules,
    end=lambda staging, winner: replace(staging, schedule=_named([winner])[0], compare=()),
    watched=lambda seen: seen.stall,
    count=lambda seen: seen.sealed,
    meant_s=lambda plan, seen: seen.prior.stall_s if seen.prior is not None else 0.0,
    weight=lambda outlook: 0.0,
    least_s=lambda outlook: WORTH * outlook.periods_s[0],
    paced=True,
)


# --- the way of writing ---------------------------------------------------------------------------


def _begin_writes(memory: Memory, goal: Goal) -> Staging | None:
    """The way of the plan, the best that were measured of other kinds, and its neighbours."""
    staging, ways = memory.plan.staging, [memory.plan.staging.write_way]
    now = ways[0]
    more = now.writers * 2 if now.writers * 2 <= MOST_WRITERS else now.writers // 2
    neighbours = (replace(now, direct_io=not now.direct_io), replace(now, writers=more))
    delta = "delta" in memory.plan.tier("disk").codec.values()
    for way in (*memory.ways, *neighbours):
        if way not in ways and len(ways) < WAYS and _is_open(way, now, goal.pins, delta=delta):
            ways.append(way)
    return replace(staging, compare_writes=tuple(ways)) if len(ways) > 1 else None


def _is_open(way: WriteWay, now: WriteWay, pins: Pins, *, delta: bool) -> bool:
    """Whether a way may be tried in the place of another.

    Slots are made for the digests of the plan's chunks, so chunks do not become smaller.  A
    difference needs the chunks of the checkpoint that it is one to.
    """
    fits = way.chunk_bytes == now.chunk_bytes if delta else way.chunk_bytes >= now.chunk_bytes
    return (
        fits
        and (pins.writers is None or way.writers == now.writers)
        and (pins.direct_io is None or way.direct_io == now.direct_io)
        and (pins.chunk_bytes is None or way.chunk_bytes == now.chunk_bytes)
    )


def _end_writes(staging: Staging, winner: str) -> Staging:
    way = next(way for way in staging.compare_writes if str(way) == winner)
    return replace(
        staging, writers=way.writers, chunk_bytes=way.chunk_bytes, direct_io=way.direct_io,
        compare_writes=(),
    )  # fmt: skip


def _durable_s(plan: CheckpointPlan, seen: Observed) -> float:
    """By the profile, which measured no codec together with the storage."""
    encoded = bool(plan.tier("disk").codec)
    return seen.prior.persist_s if seen.prior is not None and not encoded else 0.0


def _durable_weight(outlook: Outlook) -> float:
    """A checkpoint that is durable a second later loses a second more in each failure it serves."""
    if outlook.sync:
        return 1.0
    failures = outlook.tiers.disk.failures_per_s * outlook.periods_s[1]
    return failures * (BOUND if outlook.crowded else 1.0)


def _least_durable_s(outlook: Outlook) -> float:
    """So long until durable that it costs a thousandth of the time."""
    costs, period_s = outlook.costs, outlook.periods_s[1]
    slows = costs.persist_slowdown_s / costs.persist_s if costs.persist_s else 0.0
    worth = _durable_weight(outlook) + slows
    return WORTH * period_s / worth if worth > 0 else math.inf


WRITE = TurnedDecision(
    name="write",
    kind="write",
    subject="a checkpoint to disk",
    verb="is durable after",
    rounds=WRITE_ROUNDS,
    early=True,
    compared=lambda staging: tuple(map(str, staging.compare_writes)),
    in_force=lambda staging: str(staging.write_way),
    begin=_begin_writes,
    end=_end_writes,
    watched=lambda seen: seen.persist,
    count=lambda seen: seen.persisted,
    meant_s=_durable_s,
    weight=_durable_weight,
    least_s=_least_durable_s,
    paced=False,
)

TURNED = (SCHEDULE, WRITE)
"""Every decision whose settings take turns."""
