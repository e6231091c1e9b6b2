"""Announced ends (a signal, a preemption notice): which work still fits before the end.

        grace       time from announcement to end, by policy, Slurm and launcher
        leave       grace less a margin; the ranks are gone by then
        checkpoint  of the coming boundary, if iteration + stall + time until durable fit before it
        give up     without that checkpoint by then, the newest one in memory is written instead

An announcement costs at most the work that does not fit: the iteration that is under way.
"""

from dataclasses import dataclass
from typing import Literal

from autockpt.values.units import format_duration

DEFAULT_GRACE_S = 30.0
"""Default time of Kubernetes, Slurm (KillWait) and torchrun between SIGTERM and SIGKILL."""
NEAR_S = 900.0
"""A signal announces an allocation end that is nearer than this.  A later end is unrelated, and at
the end itself Slurm grants its KillWait."""
AT_THE_END_S = 5.0
FLUSH_SHARE = 0.1
"""Fraction of the time that is reserved for writing the checkpoint in memory."""
MARGIN_S, MARGIN_SHARE = 5.0, 0.2
"""Kept back of a grace: to say how it ended, and for a machine that goes a little early."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LauncherTimes:
    """The steps of a launcher after an announcement and their times; seconds, ascending."""

    ranks_s: float
    """Ranks that have not left are killed; they leave by themselves before (`leave_s`)."""
    keeper_s: float
    """The keeper, which writes what the ranks left in memory, is waited for no longer."""
    over_s: float
    """The time by which the launcher has exited, even if a process hangs: the announced time."""


def launcher_times(grace_s: float) -> LauncherTimes:
    """How a launcher divides the margin that its ranks leave."""
    margin_s = grace_s - leave_s(grace_s)
    return LauncherTimes(
        ranks_s=grace_s - 0.7 * margin_s, keeper_s=grace_s - 0.4 * margin_s, over_s=grace_s
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """Measurements of this run, seconds; None: not yet."""

    iteration_s: float | None = None
    stall_s: float | None = None
    """Training blocked by the newest snapshot."""
    durable_s: float | None = None
    """From a boundary until its checkpoint is durable, 95th percentile."""

    @property
    def needed_s(self) -> float:
        """From now until a checkpoint of the coming boundary is durable; unknown parts are 0."""
        return (self.iteration_s or 0.0) + (self.stall_s or 0.0) + (self.durable_s or 0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The response to an announcement.  Times in seconds from the announcement."""

    saves: Literal["boundary", "memory"]
    """The coming boundary's checkpoint, or the newest one that is in memory."""
    give_up_s: float
    """Time from which the checkpoint in memory is written instead of a new one; 0: at once."""
    leave_s: float
    """The process has left by then."""
    reason: str


def grace_s(
    *, notice_s: float | None, allocation_left_s: float | None, launcher_s: float | None
) -> float:
    """Seconds from an announcement to the end, > 0.

    `notice_s`: as the policy says (`failures.notice`).  `allocation_left_s`: until Slurm's
    allocation ends.  `launcher_s`: how long a launcher waits for its ranks.  None: not known.
    """
    left = allocation_left_s
    near = left is not None and AT_THE_END_S < left <= NEAR_S
    known = [notice_s, left if near else None, launcher_s]
    if left is not None and left <= AT_THE_END_S:
        known.append(DEFAULT_GRACE_S)
    return min((value for value in known if value is not None), default=DEFAULT_GRACE_S)


def leave_s(grace_s: float) -> float:
    """When ranks have left, seconds from the announcement."""
    return grace_s - min(MARGIN_S, MARGIN_SHARE * grace_s)


def answer(grace_s: float, pace: Pace) -> Answer:
    """Return how a grace of `grace_s` seconds is used."""
    leave = leave_s(grace_s)
    durable_s = pace.durable_s
    if pace.needed_s > leave:
        reason = (
            f"one of the coming step takes {format_duration(pace.needed_s)}, and there are "
            f"{format_duration(leave)}"
        )
        return Answer(saves="memory", give_up_s=0.0, leave_s=leave, reason=reason)
    give_up = leave / 2.0
    if durable_s is not None:
        give_up = max(0.0, leave - max(durable_s, FLUSH_SHARE * leave))
    needed = "an unknown time" if durable_s is None else format_duration(pace.needed_s)
    reason = f"a checkpoint of the coming step takes {needed}; there are {format_duration(leave)}"
    return Answer(saves="boundary", give_up_s=give_up, leave_s=leave, reason=reason)
