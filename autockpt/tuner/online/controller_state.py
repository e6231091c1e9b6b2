"""The memory of a controller as a value: it goes through JSON, so a recording can begin anywhere.

Everything that decides is in here, in the goal and in the settings; nothing hides elsewhere.
"""

import math
from dataclasses import dataclass, field

from autockpt.tuner.online.observed import Observed
from autockpt.tuner.online.proposals import PlanProposal
from autockpt.tuner.online.turns.compare import Compared
from autockpt.tuner.online.watches.codec import CodecTrial
from autockpt.tuner.online.watches.codec_speed import CodecWatch
from autockpt.tuner.online.watches.exchange import ExchangeWatch
from autockpt.tuner.online.watches.scheme import SchemeWatch
from autockpt.tuner.online.watches.slots import SlotWatch
from autockpt.values.failure import Life
from autockpt.values.plan import CheckpointPlan, WriteWay


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """The last applied change, for the watch window."""

    before: CheckpointPlan
    sealed: int
    """Snapshots of the run when it was applied."""
    pace_s: float
    """Quiet iteration before it, and its standard error."""
    pace_error_s: float
    expected_waste: float | None


@dataclass(slots=True, kw_only=True)
class Memory:
    """The plan in force, the observations under it, and the changes made to it."""

    plan: CheckpointPlan
    seen: Observed
    offers: tuple[PlanProposal, ...] = ()
    """Proposals that may still be applied."""
    change: Change | None = None
    watching: bool = False
    """The last change may still be undone."""
    dwell_from_s: float | None = None
    """Since when the next change waits; None: since the first event."""
    dwell_from_sealed: int = 0
    patience: float = 1.0
    """Factor of the dwell; grows with every change that was undone."""
    over_budget: int = 0
    """Consecutive checkpoints that cost more than twice what is allowed."""
    hurry_until_s: float = -math.inf
    """End of a burst of failures."""
    compared: dict[str, Compared] = field(default_factory=dict)
    """By decision, its newest comparison."""
    ways: tuple[WriteWay, ...] = ()
    """Of writing: the best of their kinds in the profile."""
    hurried_from: tuple[int, int] | None = None
    """Intervals before the burst, while it lasts."""
    trial: CodecTrial | None = None
    """Bytes as they are were tried."""
    codec: CodecWatch = field(default_factory=CodecWatch)
    """The verdict of the storage's speed on encoding."""
    slots: SlotWatch = field(default_factory=SlotWatch)
    """Saves that lacked a slot, and the host's memory."""
    exchange: ExchangeWatch = field(default_factory=ExchangeWatch)
    """The speed of the link that copies to other nodes are meant for."""
    scheme: SchemeWatch = field(default_factory=SchemeWatch)
    """The scheme of these copies, and its alternatives."""
    barren: tuple[Life, ...] = ()
    """The newest lives of the run, in a row, of which nothing was kept."""
