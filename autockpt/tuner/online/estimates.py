"""From a stream of observations to current estimates: short windows, and when they are outdated.

The waste is linear in the mean cost, so means are wanted, not medians; one wild sample must not
move them, so they are winsorised.  A detected jump drops the samples from before it.
"""

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

WINDOW = 8
"""Samples in a mean: with a dead-band this changes the plan 4 times in 3 days of 40 % noise."""
BLOCKS = 16
"""Blocks of iterations in a mean: they come every second, so that many cost no time."""
BESIDE = 8
"""Quiet blocks on each side of background work that it is compared with,"""
LONGEST = 64
"""and blocks of the work itself, its newest."""
CUSUM_DRIFT = 0.35
"""Slack per sample in log units: changes below 40 % are not jumps but drift."""
CUSUM_LIMIT = 2.5
"""Sum of excess log units that counts as a jump.  A factor of 4 is seen after 3.5 samples; 40 %
noise is mistaken for one in 1250 samples (simulated)."""
CUSUM_CLIP = 1.5
"""Most that one sample may add: a single outlier is no jump."""
CUSUM_DOUBT = 1.0
"""Sum from which the level is in doubt: a factor of 4 brings it there with one or two samples."""
CUSUM_REFERENCE = (4, 16)
"""Samples before the level counts, and samples that make it."""
FALL, FALL_SPREAD = 3.5, 1.5
"""Two samples in a row this much below the level, and so near to each other, are a new level where
samples are rare.  A shorter interval by mistake costs little; a wait for four costs hours."""


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
    # The spread of the rest, inflated for the samples pulled in (Tukey and McLaughlin 1963).
    return mean, _spread(ordered) / math.sqrt(n) * (n - 1) / (n - 2 * cut - 1)


@functools.lru_cache(maxsize=1024)
def _of_window(samples: tuple[float, ...]) -> tuple[float, float]:
    """`winsorised`, kept: a window is asked many times between two samples."""
    return winsorised(samples)


def _spread(samples: Sequence[float]) -> float:
    mean = sum(samples) / len(samples)
    return math.sqrt(sum((x - mean) ** 2 for x in samples) / (len(samples) - 1))


@dataclass(slots=True)
class Jumps:
    """Two-sided CUSUM of the logarithm of a positive quantity.

    Source: Page 1954; S = max(0, S + |x - level| - drift) on each side, alarm at S > limit.
    """

    reference: tuple[float, ...] = ()
    up: float = 0.0
    down: float = 0.0
    run: int = 0
    """Samples since the larger sum was last zero: the samples of a new level."""

    def observe(self, value: float) -> int:
        """0, or at a jump the number of newest samples that belong to the new level."""
        x = math.log(max(value, 1e-6))
        if len(self.reference) < CUSUM_REFERENCE[0]:
            self.reference = (*self.reference, x)
            return 0
        level = sorted(self.reference)[1:-1]
        excess = x - sum(level) / len(level)
        excess = max(-CUSUM_CLIP, min(CUSUM_CLIP, excess))
        if len(self.reference) < CUSUM_REFERENCE[1]:
            self.reference = (*self.reference, x)
        self.up = max(0.0, self.up + excess - CUSUM_DRIFT)
        self.down = max(0.0, self.down - excess - CUSUM_DRIFT)
        self.run = self.run + 1 if max(self.up, self.down) > 0 else 0
        if max(self.up, self.down) <= CUSUM_LIMIT:
            return 0
        return self.run

    def fallen(self, samples: Sequence[float]) -> int:
        """Newest of `samples` that are of a much lower level; 0: none."""
        if len(self.reference) < CUSUM_REFERENCE[0] or len(samples) < 3:
            return 0
        ordered = sorted(self.reference)[1:-1]
        level = math.exp(sum(ordered) / len(ordered))
        low, high = sorted(samples[-2:])
        return 2 if high * FALL <= level and high <= FALL_SPREAD * low else 0

    def restart(self, samples: Sequence[float]) -> None:
        """The level is that of `samples` from now on."""
        self.reference = tuple(math.log(max(value, 1e-6)) for value in samples)
        self.up, self.down, self.run = 0.0, 0.0, 0


@dataclass(slots=True)
class Window:
    """The newest samples of one quantity, back to its last jump."""

    size: int = WINDOW
    samples: tuple[float, ...] = ()
    jumps: Jumps = field(default_factory=Jumps)
    jumped: bool = False
    """A jump was seen and has not been acted on yet."""
    rare: bool = False
    """Samples come seldom, so a clear fall is believed at once (`FALL`)."""
    fell: bool = False
    """The newest jump was one of these."""

    def observe(self, value: float) -> None:
        """Add a sample; drop those from before a jump."""
        self.samples = (*self.samples, value)[-self.size :]
        new = self.jumps.fallen(self.samples) if self.rare else 0
        self.fell = bool(new) or (self.fell and self.n < CUSUM_REFERENCE[0])
        new = new or self.jumps.observe(value)
        if new:
            self.samples = self.samples[-new:]
            self.jumps.restart(self.samples)
            self.jumped = True

    @property
    def doubtful(self) -> bool:
        """The newest samples look like another level, and are too few to tell."""
        return max(self.jumps.up, self.jumps.down) > CUSUM_DOUBT

    @property
    def n(self) -> int:
        """Samples in the window."""
        return len(self.samples)

    @property
    def mean(self) -> float:
        """Winsorised mean, 0 without samples."""
        return _of_window(self.samples)[0]

    @property
    def error(self) -> float:
        """Standard error of `mean`; infinite with fewer than two samples."""
        return _of_window(self.samples)[1]

    @property
    def high(self) -> float:
        """The largest sample but one, or the largest of fewer than three: a 90th percentile."""
        ordered = sorted(self.samples)
        if not ordered:
            return 0.0
        return ordered[-2] if len(ordered) >= 3 else ordered[-1]


@dataclass(slots=True)
class Contrast:
    """Iterations with background work against quiet ones around them: 0.1 is 10 % longer.

    One sample for each stretch of work, from the blocks next to it on both sides.  Drift, and other
    jobs on the machine that come and go, are in all three and cancel.  If every block holds a save,
    the quiet iterations of a block are next to its busy ones.  Then `BESIDE` such blocks in a row
    give one sample.
    """

    before: tuple[float, ...] = ()
    """Quiet iteration times next before the work, and"""
    during: tuple[float, ...] = ()
    after: tuple[float, ...] = ()
    """next behind it."""
    window: Window = field(default_factory=Window)
    """Of busy over quiet iteration time."""
    mixed_quiet: tuple[float, ...] = ()
    """Of the newest blocks in a row that had both, quiet"""
    mixed_busy: tuple[float, ...] = ()
    """and busy iteration times."""

    def observe(self, quiet_s: float, busy_s: float) -> None:
        """Take in one block: means of its quiet and of its busy iterations, 0 where it had none."""
        if busy_s > 0 and quiet_s > 0:
            self._mix(quiet_s, busy_s)
        elif quiet_s > 0:
            self.mixed_quiet = self.mixed_busy = ()
        if busy_s > 0 and self.after:
            self._close()
        if quiet_s > 0 and not self.during:
            self.before = (*self.before, quiet_s)[-BESIDE:]
        if busy_s > 0:
            self.during = (*self.during, busy_s)[-LONGEST:]
        elif quiet_s > 0 and self.during:
            self.after = (*self.after, quiet_s)
            if len(self.after) == BESIDE:
                self._close()

    def _mix(self, quiet_s: float, busy_s: float) -> None:
        self.mixed_quiet, self.mixed_busy = (*self.mixed_quiet, quiet_s), (*self.mixed_busy, busy_s)
        if len(self.mixed_busy) == BESIDE:
            self.window.observe(_mean(self.mixed_busy) / _mean(self.mixed_quiet))
            self.forget_blocks()

    def forget_blocks(self) -> None:
        """Forget all blocks: the next ones are not beside them."""
        self.before, self.during, self.after = (), (), ()
        self.mixed_quiet, self.mixed_busy = (), ()

    def _close(self) -> None:
        if self.before:
            quiet_s = (_mean(self.before) + _mean(self.after)) / 2.0
            self.window.observe(_mean(self.during) / quiet_s)
        self.before, self.during, self.after = self.after, (), ()

    @property
    def n(self) -> int:
        """Stretches of work in the window."""
        return self.window.n

    @property
    def mean(self) -> float:
        """How much longer, >= 0."""
        return max(0.0, self.window.mean - 1.0)

    @property
    def error(self) -> float:
        """Standard error of `mean`."""
        return self.window.error


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
