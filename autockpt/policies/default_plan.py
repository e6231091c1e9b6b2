"""The plan of a job without a profile: the safe defaults under the user's pins."""

from dataclasses import replace

from autockpt.policies.codec import LONGEST_CHAIN
from autockpt.policies.staging.slots import slots_for
from autockpt.values.goal import Goal
from autockpt.values.plan import CheckpointPlan, TierPlan, safe_default_plan
from autockpt.values.redundancy import NO_REDUNDANCY, Redundancy

PROFILING_INTERVAL_STEPS = 8
"""While a run profiles itself: often enough to be measured within its first dozens of steps."""
EARLY_STEP = 1
"""Without a profile, steps may last hours: one failure costs at most half of the training so far.
A job of quick steps is saved at its second: there are no slots before it."""
SET_SIZE = 4
"""Default size of a parity set: a third of an image on every node."""


def plan_without_profile(goal: Goal) -> CheckpointPlan:
    """The safe defaults under the goal's pins; intervals in seconds wait for the first measures."""
    plan = safe_default_plan(retention=goal.retention)
    pins = goal.pins
    pinned = pins.memory_interval_steps is not None or pins.disk_interval_steps is not None
    memory, disk = plan.tier("memory"), plan.tier("disk")
    if pins.disk_interval_steps is not None:
        disk = replace(disk, interval_steps=pins.disk_interval_steps)
        memory = replace(memory, interval_steps=pins.disk_interval_steps)
    if pins.memory_interval_steps is not None:
        memory = replace(memory, interval_steps=pins.memory_interval_steps)
        if pins.disk_interval_steps is None:
            disk = replace(disk, interval_steps=_multiple(100, pins.memory_interval_steps))
    if pins.memory_enabled is False:
        memory = TierPlan(tier="memory", interval_steps=0)
    if pins.codec is not None and pins.codec != "none":
        classes = ("parameters", "moments", "other")
        chain = LONGEST_CHAIN if pins.codec == "delta" else 0
        disk = replace(disk, codec=dict.fromkeys(classes, pins.codec), chain=chain)
    names = (
        *("schedule", "persist", "streaming", "preallocate", "chunk_bytes", "writers"),
        *("direct_io", "in_flight", "device_clone", "shares"),
    )
    chosen = {name: getattr(pins, name) for name in names if getattr(pins, name) is not None}
    if goal.is_in_store:
        chosen["direct_io"] = False
    return replace(
        plan,
        tiers=(memory, disk),
        staging=replace(plan.staging, **chosen),
        slots=pins.slots or max(plan.slots, slots_for(pins)),
        retune=plan.retune if pins.retune is None else pins.retune,
        overhead_budget=goal.limits.overhead,
        read_once=pins.read_once is not False,
        early_step=0 if pinned else EARLY_STEP,
        redundancy=_wished(goal),
    )


def plan_while_measured(goal: Goal) -> CheckpointPlan:
    """Return the plan of a self-profiling run: frequent saves, unless intervals are pinned."""
    plan, pins = plan_without_profile(goal), goal.pins
    if pins.memory_interval_steps is not None or pins.disk_interval_steps is not None:
        return plan
    tiers = tuple(
        replace(tier, interval_steps=PROFILING_INTERVAL_STEPS) if tier.interval_steps else tier
        for tier in plan.tiers
    )
    return replace(plan, tiers=tiers, early_step=EARLY_STEP)


def _wished(goal: Goal) -> Redundancy:
    """Return the requested redundancy at its smallest; none by default, for no link is known."""
    wish, staged = goal.redundancy, goal.pins.schedule == "windows"
    schedule = wish.schedule or ("windows" if staged else "paced")
    rate_bytes_per_s = wish.rate_bytes_per_s or 0.0
    path = wish.path or "host"
    if wish.scheme == "replicas":
        return Redundancy(
            scheme="replicas",
            copies=wish.copies or max(2, wish.floor + 1),
            placement=wish.placement or "mixed",
            path=path,
            rate_bytes_per_s=rate_bytes_per_s,
            schedule=schedule,
            floor=wish.floor,
        )
    if wish.scheme in ("xor", "rs"):
        parity = 1 if wish.scheme == "xor" else wish.parity or max(2, wish.floor)
        return Redundancy(
            scheme=wish.scheme,
            set_size=wish.set_size or max(SET_SIZE, parity + 1),
            parity=parity,
            path=path,
            rate_bytes_per_s=rate_bytes_per_s,
            schedule=schedule,
            floor=wish.floor,
        )
    return NO_REDUNDANCY


def _multiple(at_least: int, of: int) -> int:
    """The smallest multiple of `of` that is not below `at_least`."""
    return of * -(-at_least // of)
