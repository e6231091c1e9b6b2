"""Ends that are announced: a spot instance that is taken back, a scheduler that preempts.

On SIGTERM the keeper makes the newest checkpoint in memory durable.  If the write ends before the
node is gone, the end costs a process failure, the write, and a restore from disk on another node.
Otherwise it is a lost node like any other.  Announced ends are declared, because failure records do
not contain them.  They add to the rates that evidence gives.

Source: ends that are answered leave the rate that the disk's interval is chosen for.  Aupy, Robert,
Vivien, Zaidouni 2014, with the newest checkpoint in memory in place of a proactive one.
"""

from dataclasses import replace

from autockpt.policies.cost_model.costs import Costs
from autockpt.values.decision_inputs import TierCost
from autockpt.values.plan import Choice
from autockpt.values.units import format_duration

MARGIN_S = 5.0
"""Left over of a notice: a slow last flush, a machine that goes a little early."""


def in_time(notice_s: float, durable_s: float) -> bool:
    """Whether a write begun at the announcement is durable before the end, seconds both."""
    return notice_s - MARGIN_S >= durable_s


def answered_per_s(preempted_per_s: float, notice_s: float, costs: Costs, *, memory: bool) -> float:
    """Announced ends per second that the newest checkpoint in memory survives.

    0 without the memory tier: then the disk has the newest checkpoint.
    """
    return preempted_per_s if memory and in_time(notice_s, costs.persist_high_s) else 0.0


def with_answered(tier: TierCost, answered: float, costs: Costs) -> TierCost:
    """The memory tier serving `answered` announced ends per second as well.

    Each is written first (`persist_s`) and read from disk; the tier's restore is the mean of both.
    """
    if not answered:
        return tier
    rate = tier.failures_per_s + answered
    away_s = costs.persist_s + costs.restore_disk_s
    restore_s = (tier.failures_per_s * tier.restore_s + answered * away_s) / rate
    return replace(tier, failures_per_s=rate, restore_s=restore_s)


def preemption_choice(
    *, every_s: float, notice_s: float, costs: Costs, memory: bool, waste: float, ignored: float
) -> Choice:
    """Return the value of announcements; `ignored`: the waste if none were answered."""
    answered = bool(answered_per_s(1.0 / every_s, notice_s, costs, memory=memory))
    durable = f"durable within {format_duration(costs.persist_high_s)} (95th percentile)"
    told = f"ends are announced {format_duration(notice_s)} ahead"
    if answered:
        reason = (
            f"{told}, and the newest checkpoint in memory is {durable}, so an end every "
            f"{format_duration(every_s)} costs what a failure of a process does, and a restore "
            "from disk; the disk's interval is chosen for the rest"
        )
    elif not memory:
        reason = f"{told}, and the memory tier is off: nothing is newer than what is on disk"
    else:
        reason = (
            f"{told}, and a checkpoint is {durable} with {format_duration(MARGIN_S)} to spare only "
            f"from {format_duration(costs.persist_high_s + MARGIN_S)} on: an end is a lost node"
        )
    return Choice(
        name="preemption",
        chosen="written at the announcement" if answered else "a lost node",
        reason=reason,
        numbers={
            "preemption_s": every_s,
            "notice_s": notice_s,
            "persist_high_s": costs.persist_high_s,
        },
        runner_up="a lost node" if answered else "",
        chosen_waste=waste,
        runner_up_waste=ignored if answered else None,
        binding="" if answered else "failures.notice" if memory else "memory tier off",
    )
