"""Profile + Goal -> Decision: every choice with its reason, its numbers and its runner-up.

Pure: the same inputs give the same decision, byte for byte, so a decision can be replayed.
"""

import hashlib
import math
from collections.abc import Iterator
from dataclasses import replace
from functools import partial

from autockpt.policies.codec import CodecChoice, choose_codec, choose_writing
from autockpt.policies.cost_model.costs import Costs, profile_costs
from autockpt.policies.cost_model.expectation import (
    expected_of,
    habit_promise,
    rate_band,
    rates_of,
    todays_habit,
)
from autockpt.policies.cost_model.inputs import doubts, inputs_of
from autockpt.policies.explained import staging_choice
from autockpt.policies.interval.choose import Intervals, Rates, choose_intervals, tiers_of
from autockpt.policies.interval.preemption import preemption_choice
from autockpt.policies.interval.silent_errors import verification_choice
from autockpt.policies.redundancy.choose import RedundancyChoice, choose_redundancy
from autockpt.policies.redundancy.network_windows import scheduled
from autockpt.policies.staging.copy_schedule import choose_schedule, longest_stall_s
from autockpt.policies.staging.device_clone import CloneChoice, choose_device_clone
from autockpt.policies.staging.quota import Way, choose_room, storage_matters
from autockpt.policies.staging.read_once import choose_read_once
from autockpt.policies.staging.shares import choose_shares
from autockpt.policies.staging.slots import SlotChoice, choose_slots
from autockpt.policies.staging.write_path import WriteChoice, choose_path, of_this_store
from autockpt.values.errors import ConfigError
from autockpt.values.goal import Goal
from autockpt.values.plan import (
    CheckpointPlan,
    Choice,
    Decision,
    Staging,
    TierPlan,
)
from autockpt.values.profile import Profile
from autockpt.values.record import to_json
from autockpt.values.units import format_duration


def decide(profile: Profile, goal: Goal) -> Decision:
    """The plan that minimises the waste rate under the goal's limits and pins, explained.

    Raises ConfigError where limits and pins cannot hold together, naming the nearest way out.
    """
    profile, unfit = of_this_store(profile, goal)
    shares = choose_shares(profile, goal)
    habit = todays_habit(profile, goal)
    profile = shares.profile
    write, codec = choose_writing(profile, goal)
    clone = choose_device_clone(profile, goal)
    staging, _, schedule = choose_schedule(profile, goal, _base(goal, write, clone), write.measure)
    costs = profile_costs(profile, staging, write=write.measure, encoding=codec.encoding)
    _check_stall(costs, goal, staging)
    slots = choose_slots(profile, goal)
    path = choose_path(profile, goal, write.measure)
    rates = rates_of(profile, goal)
    sync = staging.persist == "sync"
    solve = partial(choose_intervals, memory_on=slots.memory_on, slots=slots.slots, sync=sync)

    def waste_of(costs: Costs) -> float:
        try:
            return solve(costs, rates, goal).waste.total
        except ConfigError:
            return math.inf

    def encoded(codec: CodecChoice, costs: Costs) -> Costs:
        own = profile_costs(profile, staging, write=write.measure, encoding=codec.encoding)
        return replace(own, peers=costs.peers, notes=costs.notes)

    shared = choose_redundancy(profile, goal, slots, costs, rates, waste_of)
    costs = replace(costs, peers=shared.peers, notes=(*costs.notes, *shared.notes))
    intervals = solve(costs, rates, goal)
    if base_stays(intervals, slots):
        steps = intervals.disk_steps
        deltas = choose_codec(
            profile, goal, write=write.measure, writers=write.writers, delta_steps=steps
        )
        if "delta" in deltas.codec.values():
            # The interval stays: a shorter one would be another base, a longer one other figures.
            codec, costs = deltas, encoded(deltas, costs)
    ways = [Way(codec=codec, costs=costs, intervals=intervals)]
    if storage_matters(goal):
        small = choose_codec(
            profile, goal, write=write.measure, writers=write.writers, smallest=True
        )
        other = encoded(small, costs)
        if small.codec != codec.codec and waste_of(other) < math.inf:
            ways.append(Way(codec=small, costs=other, intervals=solve(other, rates, goal)))
    room = choose_room(profile, goal, ways)
    codec, costs, intervals = room.way.codec, room.way.costs, room.way.intervals
    shared = scheduled(profile, goal, shared, staging, intervals.memory_steps)
    reading = choose_read_once(profile, goal)
    plan = replace(
        _plan(profile, goal, staging, codec, slots, shared, intervals, path=path.chosen),
        retention=room.retention,
        read_once=goal.pins.read_once is not False if reading is None else reading.chosen == "once",
    )
    choices = (
        *_interval_choices(costs, rates, intervals, profile),
        staging_choice(schedule, write, clone, goal, costs),
        path,
        codec.choice,
        room.choice,
        _slot_choice(slots, costs, rates, goal, sync=sync, taken=intervals),
        *(choice for choice in (shared.choice, shares.choice, reading) if choice is not None),
        *_declared_choices(costs, rates, goal, slots, sync=sync, taken=intervals),
    )
    return Decision(
        plan=plan,
        choices=choices,
        expected=expected_of(costs, profile, goal, intervals, memory_on=slots.memory_on),
        inputs=inputs_of(
            costs,
            profile.failures,
            profile.recovery,
            goal,
            memory_on=slots.memory_on,
            habit=habit,
        ),
        current=habit_promise(habit, costs.iteration_s, rate_band(profile.failures, goal)),
        warnings=(*([unfit] if unfit else []), *_warnings(profile, goal, costs, intervals)),
    )


def base_stays(intervals: Intervals, slots: SlotChoice) -> bool:
    """Whether the save before is still in its slot: every save goes to disk, and there is room."""
    return slots.slots >= 3 and intervals.memory_steps == intervals.disk_steps > 0


def _base(goal: Goal, write: WriteChoice, clone: CloneChoice) -> Staging:
    pins = goal.pins
    return Staging(
        persist=pins.persist or "async",
        streaming=True if pins.streaming is None else pins.streaming,
        preallocate=True if pins.preallocate is None else pins.preallocate,
        chunk_bytes=write.chunk_bytes,
        writers=write.writers,
        direct_io=write.direct_io,
        in_flight=pins.in_flight or 0,
        device_clone=clone.chosen,
        shares=pins.shares or "node",
    )


def _check_stall(costs: Costs, goal: Goal, staging: Staging) -> None:
    limit = goal.limits.stall_s
    stall_s = longest_stall_s(costs)
    if limit is None or stall_s <= limit:
        return
    pinned = [
        name
        for name, pin in (
            ("staging.persist: sync", staging.persist == "sync"),
            ("staging.schedule: blocking", goal.pins.schedule == "blocking"),
        )
        if pin
    ]
    way = f" or without {' and '.join(pinned)}" if pinned else ""
    raise ConfigError(
        f"limits.stall is {format_duration(limit)}, and a checkpoint stalls training for "
        f"{format_duration(stall_s)} ({staging.schedule}, {staging.persist}, 95th percentile); "
        f"nearest: limits.stall {format_duration(stall_s * 1.01)}{way}"
    )


def _plan(
    profile: Profile,
    goal: Goal,
    staging: Staging,
    codec: CodecChoice,
    slots: SlotChoice,
    shared: RedundancyChoice,
    intervals: Intervals,
    *,
    path: str,
) -> CheckpointPlan:
    digest = profile.fingerprint.digest
    inputs = to_json(profile) + to_json(goal)
    return CheckpointPlan(
        plan_id="plan-" + hashlib.sha256(inputs.encode()).hexdigest()[:12],
        version=1,
        fingerprint=digest,
        tiers=(
            TierPlan(tier="memory", interval_steps=intervals.memory_steps),
            TierPlan(
                tier="disk",
                interval_steps=intervals.disk_steps,
                path="direct" if path == "direct" else "host",
                codec=codec.codec,
                chain=codec.chain,
            ),
        ),
        staging=staging,
        slots=slots.slots,
        retention=goal.retention,
        restore_order=tuple(_sources(slots, shared)),
        redundancy=shared.redundancy,
        retune=True if goal.pins.retune is None else goal.pins.retune,
        overhead_budget=goal.limits.overhead,
    )


def _sources(slots: SlotChoice, shared: RedundancyChoice) -> Iterator[str]:
    """Where a restore looks, cheapest first."""
    if slots.memory_on:
        yield "memory"
    if shared.redundancy.scheme != "none":
        yield "peer"
    yield "disk"


def _interval_choices(
    costs: Costs, rates: Rates, intervals: Intervals, profile: Profile
) -> tuple[Choice, Choice]:
    tiers = tiers_of(costs, rates, memory_on=intervals.memory_steps > 0)
    shared = {"waste": intervals.waste.total, "iteration_s": costs.iteration_s}
    memory = _interval_choice(
        "memory.interval",
        intervals.memory_steps,
        intervals.memory_period_s,
        intervals.optimum_memory_s,
        cost_s=tiers.memory.exposed_s if tiers.memory else 0.0,
        rate_per_s=tiers.memory.failures_per_s if tiers.memory else 0.0,
        intervals=intervals,
        runner_up_steps=intervals.runner_up[0] if intervals.runner_up else 0,
        numbers=shared,
    )
    disk = _interval_choice(
        "disk.interval",
        intervals.disk_steps,
        intervals.disk_period_s,
        intervals.optimum_disk_s,
        cost_s=tiers.disk.exposed_s,
        rate_per_s=tiers.disk.failures_per_s,
        intervals=intervals,
        runner_up_steps=intervals.runner_up[1] if intervals.runner_up else 0,
        numbers={**shared, "persist_s": costs.persist_s, "nodes": float(profile.failures.nodes)},
    )
    return memory, disk


def _interval_choice(
    name: str,
    steps: int,
    period_s: float,
    optimum_s: float,
    *,
    cost_s: float,
    rate_per_s: float,
    intervals: Intervals,
    runner_up_steps: int,
    numbers: dict[str, float],
) -> Choice:
    if steps == 0:
        return Choice(
            name=name, chosen="off", reason="the memory tier is off; see the choice of slots"
        )
    every = format_duration(1 / rate_per_s) if rate_per_s else ""
    often = f"come every {every} on average" if every else "never come"
    free = "the best period" if not intervals.binding else "the unbounded optimum"
    reason = (
        f"a checkpoint costs {format_duration(cost_s)} of training and the failures it serves "
        f"{often}, so {free} is "
        f"{format_duration(optimum_s) if optimum_s < float('inf') else 'unbounded'}"
    )
    if intervals.binding:
        reason += f"; {intervals.binding} decides"
    elif format_duration(period_s) != format_duration(optimum_s):
        reason += f", rounded to {format_duration(period_s)} in whole iterations"
    return Choice(
        name=name,
        chosen=f"{steps} steps ({format_duration(period_s)})",
        reason=reason,
        numbers={
            **numbers,
            "cost_s": cost_s,
            "failures_per_s": rate_per_s,
            "optimum_s": optimum_s,
            "period_s": period_s,
        },
        runner_up=f"{runner_up_steps} steps" if runner_up_steps else "",
        runner_up_waste=intervals.runner_up_waste,
        chosen_waste=intervals.waste.total,
        binding=intervals.binding,
    )


def _slot_choice(
    slots: SlotChoice, costs: Costs, rates: Rates, goal: Goal, *, sync: bool, taken: Intervals
) -> Choice:
    """The slots' choice, with the waste of doing without the memory tier beside it."""
    if not slots.memory_on:
        return replace(slots.choice, chosen_waste=taken.waste.total)
    pins = replace(goal.pins, memory_interval_steps=None, memory_interval_s=None)
    try:
        alone = choose_intervals(
            costs, rates, replace(goal, pins=pins), memory_on=False, slots=1, sync=sync
        )
    except ConfigError:
        return replace(slots.choice, chosen_waste=taken.waste.total)
    return replace(
        slots.choice,
        runner_up="1, memory tier off",
        chosen_waste=taken.waste.total,
        runner_up_waste=alone.waste.total,
    )


def _declared_choices(
    costs: Costs, rates: Rates, goal: Goal, slots: SlotChoice, *, sync: bool, taken: Intervals
) -> tuple[Choice, ...]:
    """Return the choices for announced ends and silent errors, where the policy declares them."""
    choices: list[Choice] = []
    declared, memory_on = goal.failures, slots.memory_on
    if declared.preemption_s is not None:
        deaf = choose_intervals(
            costs,
            replace(rates, notice_s=0.0),
            goal,
            memory_on=memory_on,
            slots=slots.slots,
            sync=sync,
        )
        choices.append(
            preemption_choice(
                every_s=declared.preemption_s,
                notice_s=rates.notice_s,
                costs=costs,
                memory=memory_on,
                waste=taken.waste.total,
                ignored=deaf.waste.total,
            )
        )
    if goal.retention.reach_s is not None:
        disk = tiers_of(costs, rates, memory_on=memory_on).disk
        reach_s = goal.retention.reach_s
        choices.append(verification_choice(disk, taken.disk_period_s, reach_s, rates.silent_per_s))
    return tuple(choices)


def _warnings(profile: Profile, goal: Goal, costs: Costs, intervals: Intervals) -> tuple[str, ...]:
    warnings = [*costs.notes]
    warnings += doubts(profile.failures, profile.recovery, goal, intervals.waste.total)
    least_s = costs.persist_high_s / (goal.pins.in_flight or 1)
    if goal.pins.persist != "sync" and intervals.disk_period_s < least_s:
        several = f" / {goal.pins.in_flight} in flight" if (goal.pins.in_flight or 1) > 1 else ""
        warnings.append(
            f"disk.interval of {format_duration(intervals.disk_period_s)} is shorter than the "
            f"{format_duration(costs.persist_high_s)} until durable{several}; saves will be "
            "skipped"
        )
    return tuple(warnings)
