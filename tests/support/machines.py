"""A seeded job on a machine that others use too: its storage speeds up and slows down.

Unlike `FakeJob` it runs iteration by iteration: a persist takes its time in the background, slows
the iterations that it meets, and a disk checkpoint that comes due meanwhile is skipped.
"""

import random
from dataclasses import dataclass, field

from autockpt.tuner.online.controller import Controller
from autockpt.tuner.online.proposals import PlanProposal, intervals_of
from autockpt.values.telemetry import (
    CheckpointDurable,
    Event,
    IterationsTimed,
    PlanChanged,
    PlanChangeWithheld,
    SnapshotBegan,
    SnapshotSealed,
)

BLOCK_S = 4.0
"""Coarser than the session reports, for speed."""


@dataclass(kw_only=True)
class SharedMachine:
    """Times in seconds, `noise` the relative spread of each; factors may be changed at any time."""

    iteration_s: float = 0.5
    stall_s: float = 0.02
    persist_s: float = 20.0
    slower: float = 0.10
    """Relative slow-down of an iteration that meets a persist."""
    noise: float = 0.2
    seed: int = 0
    storage: float = 1.0
    """Times as slow as at first."""
    crowd: float = 1.0
    """Times as slow everything is, because another job runs on the same machine."""
    now_s: float = 1000.0
    step: int = 0
    persists: int = 0
    """Disk checkpoints that became durable."""
    skipped: int = 0
    paid_s: float = 0.0
    """Training time that checkpoints have cost so far, stall and slow-down."""
    log: list[Event] = field(default_factory=list)
    proposals: list[PlanProposal] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.chance = random.Random(self.seed)
        self._landing: tuple[float, float, str] | None = None
        self._block: list[tuple[float, bool]] = []
        self._stalled_s = 0.0

    @property
    def cost_s(self) -> float:
        """What one disk checkpoint truly costs the training, snapshot included."""
        persist_s = self.persist_s * self.storage * self.crowd
        return self.stall_s * self.crowd + persist_s * self.slower / (1.0 + self.slower)

    def overhead(self, controller: Controller) -> float:
        """What the plan in force truly costs, as a fraction of time; of one tier's plan."""
        period_s = intervals_of(controller.plan)[1] * self.iteration_s * self.crowd + self.cost_s
        return self.cost_s / period_s

    def run(self, controller: Controller, *, checkpoints: int = 0, seconds: float = 0.0) -> None:
        """Train until so many more disk checkpoints are durable, and for so long."""
        enough, until_s = self.persists + checkpoints, self.now_s + seconds
        while self.persists < enough or self.now_s < until_s:
            self._iterate(controller)
            self._checkpoint(controller)

    def _iterate(self, controller: Controller) -> None:
        busy = self._landing is not None
        took_s = self._noisy(self.iteration_s * self.crowd, self.noise / 4.0)
        if busy:
            self.paid_s += took_s * self.slower
            took_s *= 1.0 + self.slower
        self.now_s += took_s
        self.step += 1
        self._block.append((took_s, busy))
        if self._landing is not None and self.now_s >= self._landing[0]:
            _, latency_s, name = self._landing
            self._landing = None
            self.persists += 1
            durable = CheckpointDurable(
                at_s=self.now_s, rank=-1, generation=name, step=self.step, bytes=1, stored_bytes=1,
                latency_s=latency_s, write_s=latency_s,
            )  # fmt: skip
            self._tell(controller, durable)
        if sum(took for took, _ in self._block) >= BLOCK_S:
            self._report(controller)
            self._ask(controller)

    def _report(self, controller: Controller) -> None:
        quiet = [took for took, busy in self._block if not busy]
        busy = [took for took, busy in self._block if busy]
        self._tell(
            controller,
            IterationsTimed(
                at_s=self.now_s, rank=0, step=self.step, count=len(self._block),
                total_s=sum(took for took, _ in self._block), checkpoint_s=self._stalled_s,
                quiet_s=sum(quiet) / len(quiet) if quiet else 0.0,
                busy_s=sum(busy) / len(busy) if busy else 0.0,
            ),
        )  # fmt: skip
        self._block, self._stalled_s = [], 0.0

    def _checkpoint(self, controller: Controller) -> None:
        memory, disk = intervals_of(controller.plan)
        durable = self.step % disk == 0
        if not durable and not (memory and self.step % memory == 0):
            return
        if durable and self._landing is not None:
            self.skipped += 1
            return
        name = f"gen-{self.step}"
        tiers = "memory+disk" if durable else "memory"
        began = SnapshotBegan(at_s=self.now_s, rank=0, generation=name, step=self.step, tiers=tiers)
        self._tell(controller, began)
        stall_s = self._noisy(self.stall_s * self.crowd, self.noise)
        self.now_s += stall_s
        self.paid_s += stall_s
        self._stalled_s += stall_s
        sealed = SnapshotSealed(
            at_s=self.now_s, rank=0, generation=name, step=self.step, bytes=1,
            boundary_stall_s=stall_s, fence_stall_s=0.0, copy_s=2.0 * stall_s,
        )  # fmt: skip
        self._tell(controller, sealed)
        if durable:
            latency_s = self._noisy(self.persist_s * self.storage * self.crowd, self.noise)
            self._landing = (self.now_s + latency_s, latency_s, name)

    def _ask(self, controller: Controller) -> None:
        found = controller.propose(self.now_s, self.step)
        if found is None:
            return
        self.proposals.append(found)
        memory, disk = intervals_of(found.plan)
        fields = {
            "at_s": self.now_s, "rank": 0, "step": self.step, "reason": found.reason,
            "memory_interval_steps": memory, "disk_interval_steps": disk,
        }  # fmt: skip
        if controller.mode == "observe":
            self._tell(controller, PlanChangeWithheld(kind=found.kind, **fields))
        else:
            self._tell(controller, PlanChanged(plan_version=found.plan.version, **fields))

    def _noisy(self, value: float, noise: float) -> float:
        return value * max(0.2, self.chance.gauss(1.0, noise)) if noise else value

    def _tell(self, controller: Controller, event: Event) -> None:
        self.log.append(event)
        controller.observe(event)
