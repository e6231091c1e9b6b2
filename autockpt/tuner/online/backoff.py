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
    costs, snapshots = outlook.costs, max(1, disk // every) if every else 1
    to_disk_s = (costs.blocked_s + costs.persist_slowdown_s) / snapshots
    to_peers_s = costs.peers.slowdown_s if costs.peers is not None and every else 0.0
    cost_s = memory.seen.stall.samples[-1] + costs.copy_slowdown_s + to_peers_s + to_disk_s
    return cost_s / (times[-1] - times[-2]) > EXCESS * budget(memory, outlook, settings)
