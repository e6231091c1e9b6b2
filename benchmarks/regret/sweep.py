"""`tuner.simulation.engine` for many intervals at once: a loop over failures, not over intervals.

Column i is one candidate: a job with two tiers and its intervals.  All columns of a scenario meet
the same failures.  The arithmetic is the engine's (`tests/benchmarks/test_sweep.py` compares them),
only turned around, so that a search over every interval takes minutes instead of days.
"""

from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import numpy.typing as npt

from autockpt.policies.interval.nesting import Tiers

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True, kw_only=True)
class Columns:
    """Candidates side by side; every array has one entry for each."""

    scenario: Ints
    """Which failures it meets."""
    base: Ints
    """Iterations between checkpoints of the lower tier that is on."""
    every: Ints
    """Every how many of them one goes to disk."""
    memory: Bools
    """Whether the lower tier is memory."""
    iteration_s: Floats
    memory_cost_s: Floats
    memory_latency_s: Floats
    memory_recover_s: Floats
    disk_cost_s: Floats
    disk_latency_s: Floats
    restart_s: Floats
    disk_restore_s: Floats

    def __len__(self) -> int:
        return len(self.base)


def column(scenario: int, tiers: Tiers, memory_steps: int, disk_steps: int) -> dict[str, float]:
    """One candidate as `Columns` has it; `memory_steps` 0: the memory tier is off."""
    memory, disk, base = tiers.memory, tiers.disk, memory_steps or disk_steps
    return {
        "scenario": scenario,
        "base": base,
        "every": disk_steps // base,
        "memory": memory is not None,
        "iteration_s": tiers.iteration_s,
        "memory_cost_s": memory.exposed_s if memory else 0.0,
        "memory_latency_s": memory.latency_s if memory else 0.0,
        "memory_recover_s": memory.recover_s if memory else 0.0,
        "disk_cost_s": disk.exposed_s,
        "disk_latency_s": disk.latency_s,
        "restart_s": disk.restart_s,
        "disk_restore_s": disk.restore_s,
    }


def columns(rows: list[dict[str, float]]) -> Columns:
    """All candidates."""
    whole = {"scenario": np.int64, "base": np.int64, "every": np.int64, "memory": np.bool_}
    arrays: dict[str, Any] = {
        field.name: np.array([row[field.name] for row in rows], whole.get(field.name, np.float64))
        for field in fields(Columns)
    }
    return Columns(**arrays)


def waste(candidates: Columns, gaps_s: Floats, alive: Bools) -> Floats:
    """Fraction of time lost by each candidate up to the last failure.

    `gaps_s` [scenarios, failures]: time from one failure to the next; `alive`: whether memory
    survives it.
    """
    state = _State(candidates)
    at_s = np.zeros(gaps_s.shape[0])
    for i in range(gaps_s.shape[1]):
        at_s = at_s + gaps_s[:, i]
        state.fail(at_s[candidates.scenario], alive[:, i][candidates.scenario])
    done_s = state.first * candidates.iteration_s
    return np.asarray(1.0 - done_s / at_s[candidates.scenario])


class _State:
    """Where every column is: resumed from, what each tier can restore, when it trains again."""

    def __init__(self, candidates: Columns) -> None:
        n = len(candidates)
        self.c = candidates
        self.first = np.zeros(n, np.int64)
        self.held_memory = np.zeros(n, np.int64)
        self.held_disk = np.zeros(n, np.int64)
        self.now_s = np.zeros(n)
        self.step_s = candidates.base * candidates.iteration_s
        self.period_s = self.step_s + candidates.memory_cost_s
        self.cycle_s = self.period_s * candidates.every + candidates.disk_cost_s

    def fail(self, at_s: Floats, alive: Bools) -> None:
        """Train until `at_s` where training had begun, fall back, recover."""
        c = self.c
        elapsed_s = at_s - self.now_s
        self._train(np.maximum(elapsed_s, 0.0))
        self.held_memory[~alive] = 0
        self.first = np.maximum(self.held_memory, self.held_disk)
        from_memory = (self.held_memory == self.first) & (self.first > 0)
        # A living memory goes on writing: what came back from it reaches the disk.
        drained = self.first - self.first % (c.base * c.every)
        self.held_disk = np.where(from_memory, np.maximum(self.held_disk, drained), self.held_disk)
        restore_s = np.where(from_memory, c.memory_recover_s, c.restart_s + c.disk_restore_s)
        self.now_s = at_s + np.where(self.first > 0, restore_s, c.restart_s)

    def _train(self, elapsed_s: Floats) -> None:
        c, zero = self.c, self.first // self.c.base
        last = self._last(elapsed_s, zero)
        newest = self._ready(last, zero, np.int64(1), c.memory_latency_s, elapsed_s)
        taken = c.memory & (newest > 0)
        self.held_memory = np.where(taken, (zero + newest) * c.base, self.held_memory)
        to_disk = last - (zero + last) % c.every
        newest = self._ready(to_disk, zero, c.every, c.disk_latency_s, elapsed_s)
        self.held_disk = np.where(newest > 0, (zero + newest) * c.base, self.held_disk)

    def _last(self, elapsed_s: Floats, zero: Ints) -> Ints:
        """The newest checkpoint that has begun by then; 0: none.

        Checkpoint `to_disk` is the first that goes to disk; from there on cycles of `every`, in
        which the i-th begins a disk checkpoint and i periods after the cycle did.
        """
        c = self.c
        to_disk = c.every - zero % c.every
        since_s = elapsed_s - self._begin_s(to_disk, zero)
        cycles = np.floor(since_s / self.cycle_s)
        inside_s = since_s - cycles * self.cycle_s - c.disk_cost_s
        inside = np.clip(np.floor(inside_s / self.period_s), 0, c.every - 1)
        before = np.floor((elapsed_s + c.memory_cost_s) / self.period_s)
        last = np.where(since_s >= 0, to_disk + cycles * c.every + inside, before)
        return last.astype(np.int64)

    def _begin_s(self, j: Ints, zero: Ints) -> Floats:
        """Seconds from the resumption until checkpoint j >= 1 begins."""
        c = self.c
        disks = (zero + j - 1) // c.every - zero // c.every
        return np.asarray(j * self.step_s + (j - 1) * c.memory_cost_s + disks * c.disk_cost_s)

    def _ready(
        self, j: Ints, zero: Ints, every: Ints | np.int64, latency_s: Floats, elapsed_s: Floats
    ) -> Ints:
        """The newest of the checkpoints j, j - every, ... that can be restored by then."""
        while True:
            late = (j > 0) & (self._begin_s(j, zero) + latency_s > elapsed_s)
            if not late.any():
                return np.maximum(j, 0)
            j = np.where(late, j - every, j)
