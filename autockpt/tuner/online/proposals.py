"""A change of the plan as a value: the new plan, the reason, and its expected effect."""

import hashlib
import math
from dataclasses import dataclass, field, replace
from typing import Literal

from autockpt.values.decision_inputs import DecisionInputs
from autockpt.values.plan import CheckpointPlan, Expected
from autockpt.values.record import to_json

Kind = Literal[
    "start",
    "first",
    "retune",
    "rollback",
    "back-off",
    "hurry",
    "calm",
    "schedule",
    "write",
    "compare",
    "codec",
    "redundancy",
    "scheme",
    "slots",
    "foreign",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanProposal:
    """Applied by all ranks at one step, or not at all."""

    plan: CheckpointPlan
    """Version + 1 of the plan in force."""
    kind: Kind
    reason: str
    """One sentence with numbers."""
    numbers: dict[str, float] = field(default_factory=dict)
    """Inputs and outcome, units in the names."""
    binding: str = ""
    """The constraint that decided, "" if the optimum was free."""
    expected: Expected | None = None
    """The promise of the new plan; None: the plan was decided elsewhere."""
    inputs: DecisionInputs | None = None
    """The inputs of that promise."""

    @property
    def expected_waste(self) -> float | None:
        """Waste rate the new plan is expected to have."""
        return None if self.expected is None else self.expected.waste


def digest_of(plan: CheckpointPlan) -> str:
    """Tells plans of one version apart; the same on all ranks."""
    return hashlib.sha256(to_json(plan).encode()).hexdigest()[:16]


def with_intervals(plan: CheckpointPlan, memory_steps: int, disk_steps: int) -> CheckpointPlan:
    """The next version of a plan, with other intervals; a tier that is off stays off."""
    steps = {"memory": memory_steps, "disk": disk_steps}
    tiers = tuple(
        replace(tier, interval_steps=steps[tier.tier]) if tier.interval_steps else tier
        for tier in plan.tiers
    )
    return replace(plan, version=plan.version + 1, tiers=tiers, early_step=0)


def with_codec(plan: CheckpointPlan, codec: dict[str, str], *, chain: int = 0) -> CheckpointPlan:
    """The next version of a plan, with another codec on disk."""
    tiers = tuple(
        replace(tier, codec=codec, chain=chain) if tier.tier == "disk" else tier
        for tier in plan.tiers
    )
    return replace(plan, version=plan.version + 1, tiers=tiers)


def intervals_of(plan: CheckpointPlan) -> tuple[int, int]:
    """(memory, disk) in iterations, 0 for a tier that is off."""
    return plan.tier("memory").interval_steps, plan.tier("disk").interval_steps


def scaled(intervals: tuple[int, int], factor: float) -> tuple[int, int]:
    """Both intervals times `factor`, nested, each at least one and rounded away from no change."""
    memory, disk = intervals
    rounding = math.ceil if factor > 1 else math.floor
    if not memory:
        return 0, max(1, rounding(disk * factor))
    new_memory = max(1, rounding(memory * factor))
    return new_memory, new_memory * max(1, round(disk * factor / new_memory))


def apart(one: tuple[int, int], other: tuple[int, int]) -> float:
    """The larger ratio, at least 1, of two pairs' intervals; tiers that are off do not count."""
    ratios = [a / b for a, b in zip(one, other, strict=True) if a and b]
    return max((max(ratio, 1.0 / ratio) for ratio in ratios), default=1.0)


def written(intervals: tuple[int, int]) -> str:
    """`50 / 500 steps`: memory and disk."""
    memory, disk = intervals
    return f"{memory or 'off'} / {disk or 'off'} steps"
