"""From a stream of observations to current estimates: short windows, and when they are outdated.

The waste is linear in the mean cost, so means are wanted, not medians; one wild sample must not
move them, so they are winsorised.  A detected jump drops the samples from before it.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

WINDOW = 8
"""Samples in a mean: with a dead-band this changes the plan 4 times in 3 days of 40 % noise."""
CUSUM_DRIFT = 0.35
"""Slack per sample in log units: changes below 40 % are not jumps but drift."""
CUSUM_LIMIT = 2.5
"""Sum of excess log units that counts as a jump: a factor of 4 is seen after 3.5 samples, 40 %
noise is mistaken for one in 1250 samples (simulated)."""
CUSUM_CLIP = 1.5
"""Most that one sample may add: a single outlier is no jump."""
CUSUM_REFERENCE = (4, 16)
"""Samples before the level counts, and samples that make it."""


def winsorised(samples: Sequence[float]) -> tuple[float, float]:
    """Mean and its standard error with the largest and the smallest sample pulled in by one place.

    From three samples on; fewer are averaged as they are, with an infinite error for one.
    """
    n = len(samples)
    if n == 0:
        return 0.0, math.inf
    ordered = sorted(samples)
    cut = 1 if n >= 3 else 0
    if cut:
        ordered[0], ordered[-1] = ordered[1], ordered[-2]
    mean = sum(ordered) / n
    if n - 2 * cut < 2:
        return mean, math.inf if n == 1 else _spread(samples) / math.sqrt(n)
    # The spread of what is left, inflated for the samples pulled in (Tukey and McLaughlin 1963).
    return mean, _spread(ordered) / math.sqrt(n) * (n - 1) / (n - 2 * cut - 1)


def _spread(samples: Sequence[float]) -> float:
    mean = sum(samples) / len(samples)
    return math.sqrt(sum((x - mean) ** 2 for x in samples) / (len(samples) - 1))


@dataclass(slots=True)
class Jumps:
    """Two-sided CUSUM of the logarithm of a positive quantity.

    Source: Page 1954; S = max(0, S + |x - level| - drift) on each side, alarm at S > limit.
    """

    reference: list[float] = field(default_factory=list)
    up: float = 0.0
    down: float = 0.0
    run: int = 0
    """Samples since the larger sum was last zero: those that belong to a new level."""

    def observe(self, value: float) -> int:
        """0, or at a jump the number of newest samples that belong to the new level."""
        x = math.log(max(value, 1e-6))
        if len(self.reference) < CUSUM_REFERENCE[0]:
            self.reference.append(x)
            return 0
        level = sorted(self.reference)[1:-1]
        excess = x - sum(level) / len(level)
        excess = max(-CUSUM_CLIP, min(CUSUM_CLIP, excess))
        if len(self.reference) < CUSUM_REFERENCE[1]:
            self.reference.append(x)
        self.up = max(0.0, self.up + excess - CUSUM_DRIFT)
        self.down = max(0.0, self.down - excess - CUSUM_DRIFT)
        self.run = self.run + 1 if max(self.up, self.down) > 0 else 0
        if max(self.up, self.down) <= CUSUM_LIMIT:
            return 0
        found = self.run
        self.reference, self.up, self.down, self.run = [], 0.0, 0.0, 0
        return found


@dataclass(slots=True)
class Window:
    """The newest samples of one quantity, back to its last jump."""

    samples: list[float] = field(default_factory=list)
    jumps: Jumps = field(default_factory=Jumps)
    jumped: bool = False
    """A jump was seen and nobody has acted on it yet."""

    def observe(self, value: float) -> None:
        """Add a sample; drop those from before a jump."""
        self.samples = [*self.samples, value][-WINDOW:]
        new = self.jumps.observe(value)
        if new:
            self.samples = self.samples[-new:]
            self.jumped = True

    @property
    def n(self) -> int:
        """Samples in the window."""
        return len(self.samples)

    @property
    def mean(self) -> float:
        """Winsorised mean, 0 without samples."""
        return winsorised(self.samples)[0]

    @property
    def error(self) -> float:
        """Standard error of `mean`; infinite with fewer than two samples."""
        return winsorised(self.samples)[1]

    @property
    def high(self) -> float:
        """The largest sample but one, or the largest of fewer than three: a 90th percentile."""
        ordered = sorted(self.samples)
        if not ordered:
            return 0.0
        return ordered[-2] if len(ordered) >= 3 else ordered[-1]
