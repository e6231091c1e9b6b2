"""A seeded renewal simulator of a two-tier plan under failures: checks formulas, answers what-if.

Training alternates work and checkpoints; failures are a Poisson process of wall time, each served
from memory or from disk.  What is exact here and first-order in `policies.waste`: several failures
in one interval, failures while recovering, partial intervals, checkpoints that were under way.
"""

from dataclasses import dataclass

import numpy as np

from autockpt.policies.nesting import Tiers
from autockpt.policies.waste import TierCost
from autockpt.values.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulated:
    """Where the wall time of a simulated run went, in seconds; the parts sum up to `wall_s`."""

    wall_s: float
    productive_s: float
    stall_s: float
    slowdown_s: float
    lost_s: float
    """Work trained twice, with its checkpoints."""
    restart_s: float
    restore_s: float
    failures_memory: int
    failures_disk: int

    @property
    def waste(self) -> float:
        """Fraction of wall time that did not move the training on."""
        return 1.0 - self.productive_s / self.wall_s


@dataclass(slots=True)
class _Run:
    """State between two failures; boundaries are counted in memory intervals."""

    done: int = 0
    """Boundary the trainer resumed from."""
    durable: int = 0
    """Newest boundary on disk."""


def simulate(
    tiers: Tiers,
    *,
    memory_steps: int,
    disk_steps: int,
    failures: int,
    seed: int,
) -> Simulated:
    """Simulate until `failures` interruptions have happened.

    With the memory tier off `memory_steps` is 0.  Raises ConfigError without any failure rate, or
    if the disk interval is not a multiple of the memory interval.
    """
    every = memory_steps or disk_steps
    if disk_steps % every or failures < 1:
        raise ConfigError(f"{disk_steps} is no multiple of {every}, or no failure is asked for")
    served = tiers.memory.failures_per_s if tiers.memory is not None else 0.0
    total = served + tiers.disk.failures_per_s
    if total <= 0:
        raise ConfigError("without failures there is nothing to simulate; w is the checkpoint cost")
    return _Simulation(tiers, every, disk_steps // every, served / total, total, seed).run(failures)


class _Simulation:
    def __init__(
        self, tiers: Tiers, every: int, multiple: int, share: float, rate: float, seed: int
    ) -> None:
        none = TierCost(
            stall_s=0.0,
            slowdown_s=0.0,
            latency_s=0.0,
            restart_s=0.0,
            restore_s=0.0,
            failures_per_s=0.0,
        )
        self.memory, self.disk = tiers.memory or none, tiers.disk
        self.memory_on = tiers.memory is not None
        self.work_s, self.multiple = every * tiers.iteration_s, multiple
        self.share, self.rate = share, rate
        self.chance = np.random.default_rng(seed)
        self.spent = dict.fromkeys(
            ("productive", "stall", "slow", "lost", "restart", "restore"), 0.0
        )
        self.count = {True: 0, False: 0}

    def run(self, failures: int) -> Simulated:
        state = _Run()
        gaps = self.chance.exponential(1.0 / self.rate, size=failures)
        kinds = self.chance.random(size=failures) < self.share
        for gap_s, survives in zip(gaps.tolist(), kinds.tolist(), strict=True):
            self._until_failure(state, gap_s, survives=bool(survives))
            self._recover(survives=bool(survives))
        spent = self.spent
        return Simulated(
            wall_s=sum(spent.values()),
            productive_s=spent["productive"],
            stall_s=spent["stall"],
            slowdown_s=spent["slow"],
            lost_s=spent["lost"],
            restart_s=spent["restart"],
            restore_s=spent["restore"],
            failures_memory=self.count[True],
            failures_disk=self.count[False],
        )

    def _until_failure(self, state: _Run, gap_s: float, *, survives: bool) -> None:
        """Train for `gap_s`, then fall back to the newest boundary that can be restored."""
        first = state.done
        last = self._boundary_at(first, gap_s)
        memory = self._newest(first, last, gap_s, self.memory.latency_s, 1)
        durable = self._newest(first, last, gap_s, self.disk.latency_s, self.multiple)
        state.durable = max(state.durable, durable)
        back = memory if survives and self.memory_on else state.durable
        back = max(back, state.durable)
        if survives and self.memory_on:
            # The keeper lives on and finishes the persist of what is resumed from.
            state.durable = max(state.durable, back - back % self.multiple)
        kept = back - first
        if kept >= 0:
            used_s = self._offset_s(first, back)
            self._book(first, back, kept)
            self.spent["lost"] += gap_s - used_s
        else:
            # Resumed from memory beyond the durable boundary earlier: that work goes too.
            self.spent["productive"] += kept * self.work_s
            self.spent["lost"] += gap_s - kept * self.work_s
        state.done = back

    def _recover(self, *, survives: bool) -> None:
        """Detection, restart and restore; a failure meanwhile starts them again."""
        self.count[survives] += 1
        tier = self.memory if survives and self.memory_on else self.disk
        while tier.recover_s > 0:
            hit_s = float(self.chance.exponential(1.0 / self.rate))
            if hit_s >= tier.recover_s:
                break
            self.spent["restart"] += hit_s
            self.count[survives] += 1
        self.spent["restart"] += tier.restart_s
        self.spent["restore"] += tier.restore_s

    # A boundary b > first begins at its offset: all work before it, and the checkpoints taken at
    # the boundaries first + 1 .. b - 1.

    def _offset_s(self, first: int, boundary: int) -> float:
        """Wall time from resuming at `first` until the checkpoint of `boundary` begins."""
        if boundary <= first:
            return 0.0
        passed = boundary - 1 - first
        durable = (boundary - 1) // self.multiple - first // self.multiple
        checkpoints_s = passed * self.memory.exposed_s + durable * self.disk.exposed_s
        return (boundary - first) * self.work_s + checkpoints_s

    def _boundary_at(self, first: int, time_s: float) -> int:
        """The newest boundary whose checkpoint has begun `time_s` after resuming."""
        period_s = self.work_s + self.memory.exposed_s + self.disk.exposed_s / self.multiple
        boundary = max(first, first + int(time_s / period_s) - 2)
        while self._offset_s(first, boundary + 1) <= time_s:
            boundary += 1
        return boundary

    def _newest(self, first: int, last: int, time_s: float, latency_s: float, every: int) -> int:
        """The newest multiple of `every` that became recoverable before `time_s`, else `first`."""
        boundary = last - last % every
        while boundary > first and self._offset_s(first, boundary) + latency_s > time_s:
            boundary -= every
        return max(first, boundary) if every == 1 or boundary > first else 0

    def _book(self, first: int, back: int, kept: int) -> None:
        """Work kept, and the checkpoints that were taken on the way to it."""
        self.spent["productive"] += kept * self.work_s
        passed = max(0, back - 1 - first)
        durable = (back - 1) // self.multiple - first // self.multiple if passed else 0
        self.spent["stall"] += passed * self.memory.stall_s + durable * self.disk.stall_s
        self.spent["slow"] += passed * self.memory.slowdown_s + durable * self.disk.slowdown_s
