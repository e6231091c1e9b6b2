"""WHAT SHALL WE DO?  The CheckpointPlan executors follow, and the Decision that explains it."""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeVar

from autockpt.values.decision_inputs import DecisionInputs
from autockpt.values.errors import ConfigError
from autockpt.values.goal import Retention, Retune, SharedAmong
from autockpt.values.redundancy import NO_REDUNDANCY, Redundancy
from autockpt.values.units import format_fraction

CHUNK_BYTES = 8 * 2**20
"""Default chunk of the pipeline: within 10 % of the best size measured on NVMe and virtio."""
MAX_CHUNK_BYTES = 2**30
"""A reader allocates one chunk per thread: no image has larger ones."""
WRITERS = 2
"""Default writer threads: one overlaps the digest of a chunk with the other's write."""
MOST_IN_FLIGHT = 16
"""As many as there may be slots: a checkpoint keeps its slot until it is durable."""


def is_chunk(nbytes: int) -> bool:
    """A power of two from 64 KiB to MAX_CHUNK_BYTES."""
    return 2**16 <= nbytes <= MAX_CHUNK_BYTES and not nbytes & (nbytes - 1)


Schedule = Literal["lazy", "blocking", "windows"]
"""When a snapshot is copied."""

T = TypeVar("T")


def in_turn(settings: Sequence[T], number: int) -> T:
    """The setting that the checkpoint with this number (>= 0) tries; the same on all ranks.

    Settings take turns in rounds, and the orders of a round do so too.  Periodic work therefore
    never meets the same setting each time.
    """
    size = len(settings)
    orders = itertools.permutations(settings)
    order = next(itertools.islice(orders, number // size % math.factorial(size), None))
    return order[number % size]


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteWay:
    """How the bytes of one checkpoint are written to storage."""

    writers: int = WRITERS
    """Threads that write."""
    chunk_bytes: int = CHUNK_BYTES
    direct_io: bool = True
    """O_DIRECT where the file system takes it."""

    def __post_init__(self) -> None:
        if not is_chunk(self.chunk_bytes):
            raise ConfigError(
                f"chunk of {self.chunk_bytes} bytes: must be a power of two from 64 KiB to 1 GiB"
            )
        if not 1 <= self.writers <= 512:
            raise ConfigError(f"{self.writers} writers: must be between 1 and 512")

    def __str__(self) -> str:
        how = "O_DIRECT" if self.direct_io else "buffered"
        return f"{self.writers} x {self.chunk_bytes / 2**20:g} MiB {how}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Staging:
    """How bytes move from the live state through host memory to storage."""

    schedule: Schedule = "lazy"
    """lazy: copied under the next forward and backward; blocking: copied inside the boundary.
    windows: lazily, in the gaps in which the training idles, as far as they suffice."""
    compare: tuple[Schedule, ...] = ()
    """Schedules that snapshots take in turn instead, the one with the least expected cost first,
    until the run has measured which costs least. (): there is nothing to measure."""
    compare_writes: tuple[WriteWay, ...] = ()
    """Ways of writing that checkpoints to disk take in turn in the same manner."""
    window_margin: float = 0.2
    """Part of a chunk's time that a window must last longer than it, for `windows`."""
    persist: Literal["async", "sync"] = "async"
    """async: the training goes on while the checkpoint becomes durable."""
    streaming: bool = True
    """A chunk is written as soon as it is in host memory; False: after the snapshot is sealed."""
    preallocate: bool = True
    """Slots are allocated and faulted once; False: at every save."""
    chunk_bytes: int = CHUNK_BYTES
    writers: int = WRITERS
    direct_io: bool = True
    """O_DIRECT where the file system takes it."""
    in_flight: int = 0
    """Checkpoints that may be on their way to storage at once; one that comes due beyond that is
    skipped.  0: as many as there are slots."""
    device_clone: Literal["auto", "on", "off"] = "auto"
    """Whether a snapshot is cloned in device memory first, and copied to the host from the clone.
    auto: where the clone fits into free device memory; without a device it changes nothing."""
    shares: SharedAmong = "node"
    """node: each node stores what data-parallel ranks hold alike.  job: the job stores it once, and
    the memory of one node is no whole checkpoint.  In force from the next start on."""

    def __post_init__(self) -> None:
        _ = self.write_way  # refuses what cannot be written
        if not 0 <= self.window_margin <= 1:
            raise ConfigError(f"window margin of {self.window_margin}: must be between 0 and 1")
        if not 0 <= self.in_flight <= MOST_IN_FLIGHT:
            raise ConfigError(
                f"{self.in_flight} checkpoints in flight: must be between 0 and {MOST_IN_FLIGHT}"
            )
        if len(self.compare) == 1 or len(set(self.compare)) < len(self.compare):
            raise ConfigError(
                f"schedules compared: {', '.join(self.compare)}; must be none or at least two"
            )
        ways = self.compare_writes
        if len(ways) == 1 or len(set(ways)) < len(ways):
            raise ConfigError(
                f"ways of writing compared: {', '.join(map(str, ways))}; must be none or at least "
                "two"
            )

    @property
    def write_way(self) -> WriteWay:
        """How checkpoints are written while no ways are compared."""
        return WriteWay(
            writers=self.writers, chunk_bytes=self.chunk_bytes, direct_io=self.direct_io
        )

    def schedule_of(self, number: int) -> Schedule:
        """The schedule of the snapshot with this number, >= 0; the same on all ranks."""
        return in_turn(self.compare, number) if self.compare else self.schedule

    def write_way_of(self, number: int) -> WriteWay:
        """The way of writing of the checkpoint to disk with this number, >= 0."""
        return in_turn(self.compare_writes, number) if self.compare_writes else self.write_way


def interval_conflict(memory_steps: int, disk_steps: int) -> str:
    """Why these intervals of the two tiers do not go together; "": they do.  0: the tier is off."""
    if not memory_steps or not disk_steps % memory_steps:
        return ""
    nearest = max(1, round(disk_steps / memory_steps)) * memory_steps
    return (
        f"disk.interval {disk_steps} steps is not a multiple of memory.interval {memory_steps} "
        f"steps, and a disk checkpoint persists a snapshot; nearest: disk.interval {nearest} steps"
    )


LONGEST_CHAIN = 16
"""Generations that a reader opens for one, at most."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TierPlan:
    """One tier: how often, over which path."""

    tier: Literal["memory", "disk"]
    interval_steps: int
    """Iterations between checkpoints; 0 switches the tier off; disk is a multiple of memory."""
    path: Literal["host", "direct"] = "host"
    """host: device -> pinned host slot -> storage; direct: without the slot (GPUDirect)."""
    codec: dict[str, str] = field(default_factory=dict)
    """Codec by tensor class (parameters, moments, other); a missing class is `none`."""
    chain: int = 0
    """Where the codec is `delta`: older generations that a restore may have to read beside one;
    0: every save stands alone."""
    copies: int = 1
    """Replicas of each shard, the own one included."""

    def __post_init__(self) -> None:
        if self.interval_steps < 0:
            raise ConfigError(f"{self.tier} interval of {self.interval_steps} steps: must be >= 0")
        if not 0 <= self.chain <= LONGEST_CHAIN:
            raise ConfigError(f"a chain of {self.chain}: must be between 0 and {LONGEST_CHAIN}")


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointPlan:
    """Everything executors need to know.  Written as plan.yaml."""

    schema_version: int = 1
    plan_id: str
    version: int
    """+1 for every change in a run; all ranks apply a version at the same step."""
    fingerprint: str
    """Digest of the profile's fingerprint, "" for the safe defaults."""
    tiers: tuple[TierPlan, ...]
    staging: Staging = Staging()
    slots: int = 3
    """Images of the state in host memory per rank."""
    retention: Retention = field(default_factory=Retention)
    restore_order: tuple[str, ...] = ("memory", "disk")
    redundancy: Redundancy = NO_REDUNDANCY
    """Of every checkpoint in memory, in the memory of other nodes."""
    retune: Retune = True
    overhead_budget: float | None = None
    read_once: bool = True
    """One node reads from an object store what several need, and passes it on; False: each reads
    it."""
    early_step: int = 0
    """Below the interval, checkpoints are of this step and of twice as many each; 0: of none."""

    def tier(self, name: str) -> TierPlan:
        """The plan of one tier; an absent tier is off."""
        for tier in self.tiers:
            if tier.tier == name:
                return tier
        return TierPlan(tier="memory" if name == "memory" else "disk", interval_steps=0)

    @property
    def snapshot_interval_steps(self) -> int:
        """Iterations between snapshots: the shortest interval of a tier that is on, 0 if none."""
        return min((t.interval_steps for t in self.tiers if t.interval_steps), default=0)

    def is_due(self, name: str, step: int, *, since: int) -> bool:
        """Whether a tier has a checkpoint of a step behind `since`, up to `step`."""
        due = self.next_due(name, since=since)
        return due is not None and due <= step

    def next_due(self, name: str, *, since: int) -> int | None:
        """The first step behind `since` of which a tier has a checkpoint; None: it is off."""
        interval, early = self.tier(name).interval_steps, self.early_step
        if not interval:
            return None
        if early > 0:
            doublings = max(since // early, 0).bit_length()
            if early << doublings < interval:
                return early << doublings
        return (since // interval + 1) * interval


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """The promise of a plan; compared with the observations."""

    stall_s: float
    """Per snapshot; where training waits for the disk, per checkpoint to disk, with the wait."""
    waste: float
    """Fraction of time lost to checkpoints and failures."""
    waste_low: float
    waste_high: float
    """90 % band over the failure-rate posterior."""
    checkpoint_waste: float
    """Part of the waste paid without any failure (stall and slow-down)."""
    persist_s: float
    """From the boundary until durable."""
    recovery_memory_s: float
    """Lost work and restart after a failure that leaves the memory tier alive, mean."""
    recovery_disk_s: float
    recovery_peer_s: float | None = None
    """The same after a loss of nodes that the memory of others survives; None: no redundancy."""
    survived: float = 0.0
    """Fraction of the failures that take a node's memory which the memory of others survives."""

    @property
    def goodput(self) -> float:
        """1 - waste, not below 0."""
        return max(0.0, 1.0 - self.waste)


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """One decision with its reason, the numbers behind it and the runner-up."""

    name: str
    """memory.interval, disk.interval, staging, path, codec, retention, slots, redundancy."""
    chosen: str
    reason: str
    """One sentence with numbers."""
    numbers: dict[str, float] = field(default_factory=dict)
    """Inputs and outcome, units in the names."""
    runner_up: str = ""
    runner_up_waste: float | None = None
    chosen_waste: float | None = None
    binding: str = ""
    """The constraint that decided, "" if the optimum was free."""

    def __post_init__(self) -> None:
        if not self.reason:
            raise ConfigError(f"choice {self.name!r} has no reason; every decision carries one")

    @property
    def runner_up_text(self) -> str:
        """The runner-up with its lost time, in words; "" where there is none."""
        if not self.runner_up or self.runner_up_waste is None or self.chosen_waste is None:
            return self.runner_up
        theirs, ours = (format_fraction(w) for w in (self.runner_up_waste, self.chosen_waste))
        if theirs == ours:
            return f"{self.runner_up} (the same lost time)"
        return f"{self.runner_up} (lost time {theirs} against {ours})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """A plan, its reasons, and its promise."""

    schema_version: int = 1
    plan: CheckpointPlan
    choices: tuple[Choice, ...]
    expected: Expected
    inputs: DecisionInputs | None = None
    """Inputs of the decision; every figure about the plan follows from them.  None: not known."""
    current: Expected | None = None
    """The usual habit without autockpt: a blocking save every 30 minutes."""
    warnings: tuple[str, ...] = ()

    def choice(self, name: str) -> Choice | None:
        """The choice of one name, or None."""
        return next((choice for choice in self.choices if choice.name == name), None)


def safe_default_plan(*, retention: Retention | None = None) -> CheckpointPlan:
    """The plan used before anything is measured: rare, lazy, harmless.

    100 iterations are rare enough to cost little for any job and often enough to be measured soon.
    """
    return CheckpointPlan(
        plan_id="default",
        version=0,
        fingerprint="",
        tiers=(
            TierPlan(tier="memory", interval_steps=100),
            TierPlan(tier="disk", interval_steps=100),
        ),
        retention=retention or Retention(),
    )
