"""When to act at once: checkpoints far beyond what they may cost."""

from autockpt.tuner.online.controller_state import Memory
from autockpt.tuner.online.outlook import Outlook
from autockpt.tuner.online.settings import ControllerSettings

EXCESS = 2.0
"""Times the budget that one checkpoint must cost to count,"""
IN_A_ROW = 3
"""and how many such make an emergency."""


def budget(memory: Memory, outlook: Outlook, settings: ControllerSettings) -> float:
    """Fraction of time that checkpoints may take: the limit, or what the plan was meant to cost."""
    limit = outlook.goal.limits.overhead or memory.plan.overhead_budget
    if limit is not None:
        return limit
    meant = memory.change.expected_waste if memory.change is not None else None
    return max(settings.budget, meant or 0.0)


def too_dear(memory: Memory, outlook: Outlook, settings: ControllerSettings) -> bool:
    """Whether the newest checkpoint cost more than twice the budget of its interval."""
    times, (every, disk) = memory.seen.seals_s, outlook.intervals
    if len(times) < 2 or times[-1] <= times[-2]:
        return False
    mean_s = outlook.tiers.cost_s(max(1, disk // every) if every else 1)
    cost_s = mean_s - outlook.costs.stall_s + memory.seen.stall.samples[-1]
    return cost_s / (times[-1] - times[-2]) > EXCESS * budget(memory, outlook, settings)
