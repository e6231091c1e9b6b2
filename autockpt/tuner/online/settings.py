"""Constants of the online controller."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ControllerSettings:
    """Constants of the control loop.  Simulation chose the defaults (docs/concepts/policy.md)."""

    observe_only_checkpoints: int = 3
    """Real checkpoints before the first proposal."""
    gain_floor: float = 0.001
    """A change must save this fraction of the productive time,"""
    gain_sigmas: float = 3.0
    """and this many standard errors of the gain: the question is asked again and again,"""
    jump_sigmas: float = 1.0
    """but these where a jump has shown already that something is different."""
    dead_band: float = 1.25
    """A plan stays while it wastes no more than intervals this factor off the best: 2.5 %."""
    dwell_s: float = 3600.0
    """Least time between changes,"""
    run_s: float | None = None
    """or, when the length of the run is known,"""
    dwell_fraction: float = 0.05
    """this part of it if that is shorter;"""
    dwell_mtbf: float = 1.0
    """or this many times the mean time between failures: a job must live to see its change;"""
    dwell_checkpoints: int = 8
    """and never fewer checkpoints than these."""
    jump_checkpoints: int = 5
    """After a jump of a cost, samples of its new level before it is answered."""
    watch_checkpoints: int = 8
    """A change is judged after this many."""
    rollback_sigmas: float = 4.0
    """Standard errors of eight samples: 3 would undo one good change in 25 by chance."""
    rollback_slowdown: float = 0.02
    """A quiet iteration longer by this fraction after a change undoes it."""
    compare_checkpoints: int = 100
    """Schedules that were compared are not compared again before so many more snapshots,"""
    compare_change: float = 1.25
    """and only when a quiet iteration takes this factor more or less than it did then."""
    overhead_aim: float = 0.75
    """New intervals aim at this part of limits.overhead.  Two standard errors of a mean of five
    samples with 40 % noise are 36 %.  An aim at the limit itself would miss it half the time."""
    budget: float = 0.05
    """Overhead that counts as meant when neither goal nor plan has a limit."""
    back_off: float = 1.5
    """Factor of the emergency steps."""
    hurry_s: float = 3600.0
    """How long a burst of failures keeps the intervals short."""
