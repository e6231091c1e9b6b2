"""Where the time of a simulated run went, in the definitions of goodput that users meet.

They differ, and a figure without its definition says little:

* goodput: work that counts, at the pace of a quiet iteration, over wall time; 1 - waste.
* google: share of time on productive and preserved progress; a slower step is still a productive
  one.  Source: ML goodput measurement (AI-Hypercomputer), whose badput has no slow-down.
* available: not down and not waiting for nodes; work that is lost later counts.
* meta: E[ETTR] = (1 - N r (u + dt / 2)) / (1 + w / dt).  Source: Kokolis et al. 2024, for long
  runs; N r failures/s, u restart, w checkpoint write (here: the training time it costs), dt
  interval.  It knows nothing of latency, and leaves its range where the bracket is below 0.75.
* moevement: 1 / (1 + w / dt) / (1 + E[R] / MTBF), E[R] = dt / 2 for dense checkpoints.
  Source: MoEvement (NSDI'26).  It knows no restart either.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """One replay; the seconds sum up to `wall_s`."""

    wall_s: float
    productive_s: float
    """Work that counts, at the pace of a quiet iteration."""
    stall_s: float
    slowdown_s: float
    lost_s: float
    """Lost work: trained twice, with its checkpoints."""
    restart_s: float
    """Detection and restart, broken attempts included."""
    restore_s: float
    waiting_s: float
    """For nodes, when there are no spares left."""
    failures: int
    repeated: int
    """Recoveries that a further failure broke off."""
    recoveries: dict[str, int]
    """By source: memory, peer, disk; start: nothing had been saved."""

    @property
    def goodput(self) -> float:
        """Work that counts over wall time."""
        return self.productive_s / self.wall_s

    @property
    def waste(self) -> float:
        """Fraction of wall time that did not move the training on."""
        return 1.0 - self.goodput

    @property
    def google(self) -> float:
        """Productive and preserved time over wall time; slowed steps count in full."""
        return (self.productive_s + self.slowdown_s) / self.wall_s

    @property
    def available(self) -> float:
        """Wall time in which the job ran."""
        return 1.0 - (self.restart_s + self.restore_s + self.waiting_s) / self.wall_s


def meta_ettr(*, cost_s: float, period_s: float, failures_per_s: float, restart_s: float) -> float:
    """Meta's expected ETTR; negative inputs are the caller's fault, a result below 0 is 0.

    Source: Kokolis et al. 2024, (1 - N r_f (u0 + dt / 2)) / (1 + w / dt); w = cost_s, dt =
    period_s less the cost, N r_f = failures_per_s, u0 = restart_s.
    """
    work_s = period_s - cost_s
    kept = 1.0 - failures_per_s * (restart_s + work_s / 2.0)
    return max(0.0, kept) / (1.0 + cost_s / work_s)


def moevement_ettr(*, cost_s: float, period_s: float, failures_per_s: float) -> float:
    """MoEvement's ETTR for dense checkpoints.

    Source: 1 / (1 + T_ckpt / (T_iter I)) / (1 + E[R] / MTBF), E[R] = T_iter I / 2.  T_ckpt =
    cost_s, T_iter I = period_s less the cost, MTBF = 1 / failures_per_s.
    """
    work_s = period_s - cost_s
    return 1.0 / (1.0 + cost_s / work_s) / (1.0 + failures_per_s * work_s / 2.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """A mean over runs with its 95 % confidence interval (Student's t); None for a single run."""

    mean: float
    low: float | None = None
    high: float | None = None


def spread(samples: Sequence[float]) -> Spread:
    """Of independent runs."""
    n = len(samples)
    mean = math.fsum(samples) / n
    if n < 2:
        return Spread(mean=mean)
    error = math.sqrt(math.fsum((x - mean) ** 2 for x in samples) / (n - 1) / n)
    half = student_t(n - 1) * error
    return Spread(mean=mean, low=mean - half, high=mean + half)


def student_t(freedom: int) -> float:
    """97.5 % quantile of Student's t.

    Source: a table up to 4, then the Cornish-Fisher expansion (Abramowitz and Stegun 26.7.5),
    which is within 0.1 % from there.
    """
    table = {1: 12.7062, 2: 4.3027, 3: 3.1824, 4: 2.7764}
    if freedom in table:
        return table[freedom]
    z = 1.959964
    terms = (
        (z**3 + z) / 4.0,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96.0,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384.0,
    )
    return z + terms[0] / freedom + terms[1] / freedom**2 + terms[2] / freedom**3


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """One strategy over all histories."""

    name: str
    says: str
    memory_steps: int
    """0: no checkpoints there, as for the next two."""
    peer_steps: int
    disk_steps: int
    period_s: float
    """Between the most frequent checkpoints."""
    goodput: Spread
    behind: Spread
    """Goodput of the first strategy less this one's, paired by history."""
    google: float
    available: float
    meta: float
    moevement: float
    predicted: float
    """Goodput by the closed form of `policies.waste`, less the time without enough nodes."""
    lost_h_per_day: float
    """Hours of work trained twice per day."""
    parts: dict[str, float]
    """Fractions of wall time; they sum up to 1."""
    recoveries: dict[str, float]
    """By source, mean of a history."""
    failures: float
    warnings: tuple[str, ...] = field(default=())
