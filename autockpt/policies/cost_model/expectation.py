"""The promise of a plan: waste with a 90 % band over the failure rate, stall, recovery.

The rate of all interruptions is the sum of two Gamma posteriors: nodes times the rate per node, and
the job's own rate.  Its band takes the Gamma with the same mean and variance, which is exact when
one of the two dominates.  The plan is the same over the whole band; only the failure rate varies.
"""

import math
from dataclasses import replace

from autockpt.policies.cost_model.costs import Costs, copy_link, link_time_s, profile_costs
from autockpt.policies.cost_model.gamma import gamma_quantile
from autockpt.policies.interval.choose import Intervals, Rates, tiers_of
from autockpt.policies.interval.nesting import Tiers
from autockpt.policies.interval.silent_errors import silent_share
from autockpt.values.decision_inputs import Habit
from autockpt.values.goal import Goal
from autockpt.values.plan import Expected, Staging
from autockpt.values.profile import FailureRates, Profile, RecoveryTimes, StorageMeasure
from autockpt.values.units import format_duration

BASELINE_INTERVAL_S = 1800.0
"""The usual habit without autockpt: a blocking save every 30 minutes."""
DECLARED_SHAPE = 10.0
"""A declared MTBF counts like ten observed failures: a band of 0.54 to 1.57 times the rate."""
BAND = (0.05, 0.95)
DOUBT = 0.01
"""Chance that a declared MTBF must still have by the record,"""
CONTRADICTING_EVENTS = 2
"""which says nothing against it with fewer failures."""


def rates_of(profile: Profile, goal: Goal) -> Rates:
    """Interruptions by the tier that serves them; the user's declaration beats the posterior."""
    return split_rates(profile.failures, goal, profile.recovery)


def split_rates(failures: FailureRates, goal: Goal, recovery: RecoveryTimes) -> Rates:
    """The same without a profile, for the controller."""
    share = 0.0 if failures.memory_ends_with == "rank" else failures.process_share
    if goal.failures.process_share is not None:
        share = goal.failures.process_share
    total, declared_s = failures.interruptions_per_s, declared_mtbf_s(failures, goal)
    if declared_s is not None:
        total = 1.0 / declared_s
    elif failures.per_node.events + failures.per_job.events:
        total = per_wall_s(total, recovery.outage_s(share))
    declared, disk = goal.failures, total * (1.0 - share)
    late_s = goal.retention.reach_s
    return Rates(
        memory_per_s=total * share,
        disk_per_s=disk,
        preempted_per_s=1.0 / declared.preemption_s if declared.preemption_s else 0.0,
        notice_s=declared.notice_s or 0.0,
        silent_per_s=min(disk, total * silent_share(failures)) if late_s is not None else 0.0,
        noticed_after_s=late_s or 0.0,
    )


def per_wall_s(per_training_s: float, outage_s: float) -> float:
    """The rate per second of all time, of failures that are recorded per second of training.

    A record has n failures in E seconds of training, and n outages of d seconds.  The job trains
    1 / (1 + n d / E) of the time, where the waste rate has e^(-Lambda d).
    """
    down = per_training_s * outage_s
    return per_training_s * math.log1p(down) / down if down > 0 else per_training_s


def rate_band(failures: FailureRates, goal: Goal) -> tuple[float, float]:
    """5 % and 95 % quantiles of the interruption rate, as multiples of its mean."""
    shape = rate_shape(failures, goal)
    low, high = (gamma_quantile(p, shape, shape) for p in BAND)
    return low, high


def rate_shape(failures: FailureRates, goal: Goal) -> float:
    """Shape of the Gamma that the interruption rate is taken to have, its mean apart."""
    declared = declared_mtbf_s(failures, goal) is not None
    return DECLARED_SHAPE if declared else _shape(failures)


def declared_mtbf_s(failures: FailureRates, goal: Goal) -> float | None:
    """The declared MTBF that is reckoned with; None: none was, or the record contradicts it."""
    return None if contradicted(failures, goal) else goal.failures.mtbf_s


def contradicted(failures: FailureRates, goal: Goal) -> str:
    """Why the declared MTBF is not reckoned with; "" where it is, or there is none.

    The record wins if it has two failures or more and 99 % of its posterior are rates above the
    declared one.  A job that is killed every half minute does not live for eight hours.
    """
    declared_s, events = goal.failures.mtbf_s, failures.per_node.events + failures.per_job.events
    if declared_s is None or events < CONTRADICTING_EVENTS:
        return ""
    shape, rate = _shape(failures), failures.interruptions_per_s
    if rate * gamma_quantile(DOUBT, shape, shape) <= 1.0 / declared_s:
        return ""
    return (
        f"failures.mtbf says {format_duration(declared_s)}, and {events} failures on record say "
        f"{format_duration(1.0 / rate)} (more than 99 % sure that it is less than declared): the "
        "record is reckoned with"
    )


def expected_of(
    costs: Costs, profile: Profile, goal: Goal, intervals: Intervals, *, memory_on: bool
) -> Expected:
    """The promise of a plan with these intervals."""
    return promise(costs, profile.failures, profile.recovery, goal, intervals, memory_on=memory_on)


def promise(
    costs: Costs,
    failures: FailureRates,
    recovery: RecoveryTimes,
    goal: Goal,
    intervals: Intervals,
    *,
    memory_on: bool,
) -> Expected:
    """The same without a profile, for the controller."""
    rates = split_rates(failures, goal, recovery)
    pair = (intervals.memory_steps, intervals.disk_steps)
    low, high = (
        tiers_of(costs, rates.scaled(factor), memory_on=memory_on).waste(*pair).total
        for factor in rate_band(failures, goal)
    )
    tiers = tiers_of(costs, rates, memory_on=memory_on)
    disk_s = intervals.disk_period_s / 2 + tiers.disk.latency_s + tiers.disk.recover_s
    memory_s = disk_s
    peer_s, peers = None, costs.peers
    if tiers.memory is not None:
        begun_s = intervals.memory_period_s / 2 + costs.copy_s
        memory_s = begun_s + (costs.restart_s + costs.restore_memory_s)
        if peers is not None:
            peer_s = begun_s + peers.send_s + costs.restart_s + peers.restore_s
    return Expected(
        stall_s=costs.stall_s + costs.blocked_s,
        waste=intervals.waste.total,
        waste_low=low,
        waste_high=high,
        checkpoint_waste=intervals.waste.paid,
        persist_s=costs.persist_s,
        recovery_memory_s=memory_s,
        recovery_disk_s=disk_s,
        recovery_peer_s=peer_s,
        survived=peers.served if peers is not None and peer_s is not None else 0.0,
    )


def todays_habit(profile: Profile, goal: Goal) -> Habit:
    """A blocking save every 30 minutes, one buffered writer, disk only: the usual habit."""
    costs = _habit_costs(profile)
    tiers = tiers_of(costs, rates_of(profile, goal), memory_on=False)
    return Habit(
        disk=tiers.disk,
        interval_steps=habit_steps(costs.iteration_s),
        persist_s=costs.persist_s,
    )


def habit_steps(iteration_s: float) -> int:
    """Iterations in 30 minutes, at least one."""
    return max(1, round(BASELINE_INTERVAL_S / iteration_s))


def habit_tiers(habit: Habit, iteration_s: float) -> Tiers:
    """The waste function of the habit."""
    return Tiers(iteration_s=iteration_s, memory=None, disk=habit.disk)


def habit_promise(habit: Habit, iteration_s: float, band: tuple[float, float]) -> Expected:
    """The promise of the habit; `band`: the failure rate as multiples of its mean."""
    tiers, steps = habit_tiers(habit, iteration_s), habit.interval_steps
    parts, period_s = tiers.waste(0, steps), tiers.periods_s(0, steps)[1]
    rate = tiers.disk.failures_per_s
    low, high = (
        replace(tiers, disk=replace(tiers.disk, failures_per_s=rate * factor)).waste(0, steps).total
        for factor in band
    )
    recovery_s = period_s / 2 + tiers.disk.latency_s + tiers.disk.recover_s
    return Expected(
        stall_s=tiers.disk.stall_s,
        waste=parts.total,
        waste_low=low,
        waste_high=high,
        checkpoint_waste=parts.paid,
        persist_s=habit.persist_s,
        recovery_memory_s=recovery_s,
        recovery_disk_s=recovery_s,
    )


def _habit_costs(profile: Profile) -> Costs:
    staging = Staging(schedule="blocking", persist="sync", streaming=False)
    costs = profile_costs(profile, staging, write=_plain_write(profile))
    link = copy_link(profile, pinned=False) or copy_link(profile)
    if link is None:
        return costs
    copy_s = link_time_s(link, profile.state.total_bytes)
    return replace(costs, blocked_s=max(0.0, costs.persist_s - copy_s), stall_s=copy_s)


def _plain_write(profile: Profile) -> StorageMeasure | None:
    """One buffered writer: the nearest measured thing to `torch.save`."""
    writes = [m for m in profile.storage if m.operation == "write"]
    return min(
        writes,
        key=lambda m: (m.direct, m.writers, abs(math.log(m.chunk_bytes / 2**20))),
        default=None,
    )


def _shape(failures: FailureRates) -> float:
    """Shape of the Gamma with the mean and variance of nodes * per_node + per_job."""
    mean = variance = 0.0
    for posterior, count in ((failures.per_node, failures.nodes), (failures.per_job, 1)):
        mean += count * posterior.mean_per_day
        variance += count**2 * posterior.shape / posterior.exposure_days**2
    return mean * mean / variance
