"""A seeded job that trains under a plan and emits the telemetry a controller listens to."""

import random
from collections.abc import Callable
from dataclasses import dataclass, field

from autockpt.tuner.online.controller import Controller
from autockpt.tuner.online.proposals import PlanProposal
from autockpt.values.plan import CheckpointPlan, WriteWay
from autockpt.values.telemetry import (
    NO_SLOT,
    CheckpointDurable,
    Event,
    GenerationReplicated,
    HostMemoryNoted,
    IterationsTimed,
    PlanChanged,
    SaveSkipped,
    SettingMeasured,
    SnapshotBegan,
    SnapshotSealed,
)

RESERVE_BYTES = 512 * 2**20
BLOCKS = 4
"""Blocks of iterations between two snapshots."""


@dataclass(kw_only=True)
class FakeJob:
    """Times in seconds; `noise` is the relative spread of every measured cost."""

    iteration_s: float = 1.0
    stall_s: float = 0.5
    persist_s: float = 5.0
    slower: float = 0.05
    """Relative slow-down of an iteration while a persist runs."""
    noise: float = 0.0
    seed: int = 0
    stall_of: Callable[[CheckpointPlan], float] | None = None
    """Stall as a function of the plan, for changes that backfire."""
    persist_of: Callable[[CheckpointPlan], float] | None = None
    """The same of the time until durable."""
    durable_of: Callable[[WriteWay], float] | None = None
    """The same by the way of writing, which checkpoints may take in turn."""
    exchange_of: Callable[[CheckpointPlan], tuple[float, float] | None] | None = None
    """(seconds from the snapshot until other nodes hold it, seconds that its bytes moved); None: it
    does not end."""
    host_of: Callable[[CheckpointPlan], tuple[bool, int]] | None = None
    """(whether every other save lacks a slot, bytes that the host has left)."""
    now_s: float = 0.0
    step: int = 0
    log: list[Event] = field(default_factory=list)
    proposals: list[PlanProposal] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.chance = random.Random(self.seed)
        self._starved = False

    def run(self, controller: Controller, *, until_s: float, apply: bool = True) -> None:
        """Train until `until_s`, asking the controller after every snapshot interval."""
        while self.now_s < until_s:
            plan = controller.plan
            every = plan.snapshot_interval_steps
            self._iterate(controller, every)
            self._checkpoint(controller, plan)
            found = controller.propose(self.now_s, self.step)
            if found is not None:
                assert found == controller.propose(self.now_s, self.step), "asking changes nothing"
                self.proposals.append(found)
                if apply:
                    self.apply(controller, found)

    def apply(self, controller: Controller, found: PlanProposal) -> None:
        """All ranks agreed."""
        self._tell(
            controller,
            PlanChanged(
                at_s=self.now_s,
                rank=0,
                plan_version=found.plan.version,
                step=self.step,
                memory_interval_steps=found.plan.tier("memory").interval_steps,
                disk_interval_steps=found.plan.tier("disk").interval_steps,
                reason=found.reason,
            ),
        )

    def _iterate(self, controller: Controller, count: int) -> None:
        """In blocks, the first with the work of the checkpoint before it."""
        blocks = min(BLOCKS, count)
        for block in range(blocks):
            quiet = self._noisy(self.iteration_s, self.noise / 10)
            busy = quiet * (1.0 + self.slower)
            steps = count * (block + 1) // blocks - count * block // blocks
            self.now_s += quiet * steps
            self.step += steps
            self._tell(
                controller,
                IterationsTimed(
                    at_s=self.now_s, rank=0, step=self.step, count=steps, total_s=quiet * steps,
                    checkpoint_s=0.0, quiet_s=quiet, busy_s=busy if not block else 0.0,
                ),
            )  # fmt: skip

    def _checkpoint(self, controller: Controller, plan: CheckpointPlan) -> None:
        name = f"gen-{self.step}"
        if self.host_of is not None and self._lacks_slot(controller, plan, self.host_of(plan)):
            return
        every, disk = plan.snapshot_interval_steps, plan.tier("disk").interval_steps
        durable = self.step // disk > (self.step - every) // disk
        tiers = "memory+disk" if durable else "memory"
        self._tell(
            controller,
            SnapshotBegan(at_s=self.now_s, rank=0, generation=name, step=self.step, tiers=tiers),
        )
        stall_s = self._noisy(self.stall_of(plan) if self.stall_of else self.stall_s, self.noise)
        self.now_s += stall_s
        self._tell(
            controller,
            SnapshotSealed(
                at_s=self.now_s, rank=0, generation=name, step=self.step, bytes=10**9,
                boundary_stall_s=stall_s / 2, fence_stall_s=stall_s / 2, copy_s=stall_s,
            ),
        )  # fmt: skip
        exchange = self.exchange_of(plan) if self.exchange_of is not None else None
        if exchange is not None:
            send_s, moving_s = exchange
            self._tell(
                controller,
                GenerationReplicated(
                    at_s=self.now_s, rank=-1, generation=name, step=self.step,
                    latency_s=stall_s + self._noisy(send_s, self.noise), bytes=10**9,
                    moving_s=self._noisy(moving_s, self.noise),
                ),
            )  # fmt: skip
        if durable:
            way = plan.staging.write_way_of(self.step // plan.tier("disk").interval_steps)
            persist_s = self.persist_of(plan) if self.persist_of else self.persist_s
            persist_s = self.durable_of(way) if self.durable_of else persist_s
            durable_s = self._noisy(persist_s, self.noise)
            self._tell(
                controller,
                CheckpointDurable(
                    at_s=self.now_s, rank=-1, generation=name, step=self.step, bytes=10**9,
                    stored_bytes=10**9, latency_s=durable_s, write_s=persist_s,
                ),
            )  # fmt: skip
            if plan.staging.compare_writes:
                count = max(1, round(durable_s / self.iteration_s))
                self._tell(
                    controller,
                    SettingMeasured(
                        at_s=self.now_s, rank=0, generation=name, step=self.step,
                        decision="write", setting=str(way), iterations=count,
                        total_s=count * self.iteration_s * (1 + self.slower), durable_s=durable_s,
                    ),
                )  # fmt: skip

    def _lacks_slot(
        self, controller: Controller, plan: CheckpointPlan, host: tuple[bool, int]
    ) -> bool:
        """Tells of the host's memory, and of a save that is skipped where it is."""
        starves, free_bytes = host
        self._tell(
            controller,
            HostMemoryNoted(
                at_s=self.now_s, rank=0, available_bytes=free_bytes, reserve_bytes=RESERVE_BYTES,
                room_bytes=max(0, free_bytes - RESERVE_BYTES), slots=plan.slots,
                slot_bytes=10**9, ranks=1,
            ),
        )  # fmt: skip
        self._starved = starves and not self._starved
        if self._starved:
            reason = f"rank 0: {NO_SLOT}"
            self._tell(
                controller, SaveSkipped(at_s=self.now_s, rank=0, step=self.step, reason=reason)
            )
        return self._starved

    def _noisy(self, value: float, noise: float) -> float:
        return value * max(0.1, self.chance.gauss(1.0, noise)) if noise else value

    def _tell(self, controller: Controller, event: Event) -> None:
        self.log.append(event)
        controller.observe(event)
