"""Failures that are announced: a spot instance that is taken back, a scheduler that preempts.

If the state can be made safe on storage that survives before the node is gone, the event loses no
work: it costs the saving and a recovery, and leaves the rate that intervals are chosen for.
"""

from dataclasses import dataclass

from autockpt.policies.interval import best_period_s
from autockpt.values.errors import ConfigError

MARGIN_S = 5.0
"""Left over of a notice: a step that is not at its boundary yet, a slow last flush."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Notice:
    """How an end is announced, and how long a last save takes."""

    notice_s: float
    """From the announcement to the end: 120 s on AWS spot, 30 s on GCP, GraceTime in Slurm."""
    poll_s: float = 0.0
    """How late the announcement is seen; 0 where it comes as a signal (SIGTERM)."""
    drain_s: float
    """To the next boundary and durable: 95th percentile."""
    recall: float = 1.0
    """Fraction of the preemptions that are announced."""

    def __post_init__(self) -> None:
        times = (self.notice_s, self.poll_s, self.drain_s)
        if min(times) < 0 or not 0 <= self.recall <= 1:
            raise ConfigError(
                f"notice {self.notice_s} s, poll {self.poll_s} s, drain {self.drain_s} s must not "
                f"be negative, and a recall of {self.recall} must be between 0 and 1"
            )

    @property
    def suffices(self) -> bool:
        """Whether a save begun at the announcement is durable in time."""
        return self.notice_s - self.poll_s - MARGIN_S >= self.drain_s

    @property
    def answered(self) -> float:
        """Fraction of the preemptions that lose no work."""
        return self.recall if self.suffices else 0.0


def preempted_period_s(
    cost_s: float, *, failures_per_s: float, preemptions_per_s: float, notice: Notice
) -> float:
    """Best period (s) where some of the failures are announced in time.

    Source: those leave the rate; with all failures preemptions, sqrt(2 C M / (1 - r)) for small C
    (Aupy, Robert, Vivien, Zaidouni 2014, perfect precision); r = `Notice.answered`.
    """
    rate = failures_per_s + preemptions_per_s * (1.0 - notice.answered)
    return best_period_s(cost_s, rate)


def preemption_waste(preemptions_per_s: float, *, recover_s: float, notice: Notice) -> float:
    """Waste of those that are answered in time: a last save and a recovery each, no lost work."""
    return preemptions_per_s * notice.answered * (notice.drain_s + recover_s)
