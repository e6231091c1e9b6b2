"""WHAT DID WE DECIDE FROM?  Costs, failure rates and recovery times, stored with the decision.

Every figure that a person sees about a plan follows from these: the promise, the what-if curve, the
risk, the explanation.  They are of the plan in force, also after it was changed in a run.
"""

from dataclasses import dataclass

from autockpt.values.profile import Estimate, FailureRates, RecoveryTimes


@dataclass(frozen=True, slots=True, kw_only=True)
class TierCost:
    """Cost of one checkpoint of a tier, and the failures it serves."""

    stall_s: float
    """s: training blocked, beyond the stall of the tier below whose snapshot it shares."""
    slowdown_s: float
    """sigma P: training time lost to interference, beyond that of the tier below."""
    latency_s: float
    """P + s: boundary until recoverable from this tier; work of that time is lost as well."""
    restart_s: float
    """D: failure until the process runs again, detection included."""
    restore_s: float
    """R: reading the state back."""
    failures_per_s: float
    """Lambda: rate of the failures whose cheapest surviving tier is this one."""
    unnoticed_s: float = 0.0
    """Work trained on a state that was wrong already, mean of those failures."""

    @property
    def exposed_s(self) -> float:
        """c: training time one checkpoint of this tier costs."""
        return self.stall_s + self.slowdown_s

    @property
    def recover_s(self) -> float:
        """D + R."""
        return self.restart_s + self.restore_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Habit:
    """A blocking save every 30 minutes, to disk only: the habit that plans are compared with."""

    disk: TierCost
    interval_steps: int
    persist_s: float
    """From the boundary until durable."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DecisionInputs:
    """The inputs of a decision, with the source of each part."""

    iteration_s: float
    """Quiet iteration, without any checkpoint work."""
    memory: TierCost | None
    """None: the memory tier is off, and `disk` serves all failures."""
    disk: TierCost
    costs: dict[str, Estimate]
    """iteration_s, stall_s, copy_s and persist_s of one checkpoint: how each is known."""
    failures: FailureRates
    """Estimated rates; `declared_mtbf_s` goes before them."""
    recovery: RecoveryTimes
    rate_shape: float
    """Shape of the Gamma that the rate of all interruptions is taken to have."""
    declared_mtbf_s: float | None = None
    """Mean time between interruptions that the policy declares and the plan reckons with."""
    boundary_s: float = 0.0
    """Training blocked at each iteration boundary, also without a checkpoint."""
    habit: Habit | None = None
    """None: nothing was measured that it could be reckoned from."""

    @property
    def failures_per_s(self) -> float:
        """Of all interruptions that the plan reckons with."""
        return self.disk.failures_per_s + (self.memory.failures_per_s if self.memory else 0.0)

    @property
    def rate_assumed(self) -> bool:
        """No MTBF is declared, and no failure is on record."""
        events = self.failures.per_node.events + self.failures.per_job.events
        return self.declared_mtbf_s is None and not events
