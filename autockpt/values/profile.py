"""WHAT DID WE MEASURE?  The Profile: one job on one machine, with spreads and sample counts.

Every figure here was measured, or says that it was assumed and from where.
"""

import hashlib
from dataclasses import dataclass, field, replace
from typing import Literal

from autockpt.values.placement import UNKNOWN_DOMAINS, FailureDomains
from autockpt.values.record import to_json


@dataclass(frozen=True, slots=True, kw_only=True)
class Distribution:
    """Samples of one quantity; the unit is in the name of the field that holds it."""

    n: int
    mean: float
    p10: float
    p50: float
    p90: float
    p95: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkMeasure:
    """Seconds for S bytes over a link: alpha_s + S / bytes_per_s, least squares over sizes."""

    link: str
    """host_copy, host_to_peer, device_to_peer, device_to_host_pinned, device_to_host_pageable,
    device_clone."""
    alpha_s: float
    bytes_per_s: float
    relative_spread: float
    """Standard deviation of the residuals over the mean time."""
    n: int
    note: str = ""
    between_nodes: bool = False
    """Of a link to a peer: between two nodes; False: within one, which bounds the network only."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkTraffic:
    """Traffic of a device while the job trained without any checkpoint, from its own counters.

    The counters include the bytes of other jobs on the same device.
    """

    link: Literal["network", "pcie"]
    device: str
    """Interface (eth0), RDMA port (mlx5_0/1) or GPU (GPU 0), of one node."""
    sent_bytes_per_s: float
    """Mean over the time it was counted; by a GPU: to the host."""
    received_bytes_per_s: float
    capacity_bytes_per_s: float | None
    """Each way, as the driver tells; None where it does not."""
    seconds: float
    """So long it was counted."""

    @property
    def sent_share(self) -> float | None:
        """Fraction of the capacity that is taken on the way out, 0..1; None: unknown."""
        if not self.capacity_bytes_per_s:
            return None
        return min(1.0, self.sent_bytes_per_s / self.capacity_bytes_per_s)

    @property
    def received_share(self) -> float | None:
        """The same on the way in."""
        if not self.capacity_bytes_per_s:
            return None
        return min(1.0, self.received_bytes_per_s / self.capacity_bytes_per_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class StorageMeasure:
    """Throughput of the target directory in one configuration, fsync included for writes."""

    operation: Literal["write", "read"]
    direct: bool
    """True: O_DIRECT; False: through the page cache (with fsync, cache dropped before a read)."""
    writers: int
    chunk_bytes: int
    alpha_s: float
    """Fixed time of an operation (open, fsync, close)."""
    bytes_per_s: Distribution


@dataclass(frozen=True, slots=True, kw_only=True)
class InterferenceMeasure:
    """Slow-down of an iteration while background work runs, from interleaved iterations."""

    work: str
    """snapshot_copy, snapshot_windows and snapshot_blocking: a snapshot in each iteration, copied
    lazily, in windows, at the boundary. storage_write; persist: copy and write together. encode: a
    codec on as many threads as a save has writers. peer_host and peer_device: sending to peers and
    receiving from them on that path."""
    slowdown: Distribution
    """(iteration with the work / quiet iteration) - 1, fraction."""
    busy_s: float
    """How long the background work ran in an iteration, seconds, mean."""
    stall_s: Distribution | None = None
    """Blocked time of each of its snapshots, not in the slow-down; None: it takes none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StateClass:
    """Bytes of one class of state on this rank."""

    name: Literal["parameters", "moments", "other"]
    tensors: int
    bytes: int
    dtypes: dict[str, int]
    """Bytes by dtype."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldElsewhere:
    """Bytes of a rank's state that the ranks of other nodes hold as well (DDP, HSDP)."""

    nodes: tuple[int, ...]
    """Which: so many nodes further on, counted around; ascending."""
    bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StateInventory:
    """Contents of a checkpoint of one rank."""

    total_bytes: int
    layout_digest: str
    """Structural fingerprint of names, shapes, dtypes and boxes."""
    lazy_bytes: int
    """Bytes proven to stay constant from the boundary to the fence (copied under compute)."""
    boundary_bytes: int
    """Bytes copied inside the stall."""
    classes: tuple[StateClass, ...]
    elsewhere: tuple[HeldElsewhere, ...] = ()
    """Empty: no other node is known to hold any of it, or the job stores it once."""
    restored_bytes: int = 0
    """Bytes that a restore puts in place for each rank of a node; 0: as many as it saves."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CodecMeasure:
    """A codec on samples of this job's own tensors of one class."""

    codec: str
    tensor_class: Literal["parameters", "moments", "other"]
    ratio: float
    """Raw bytes over encoded bytes; > 1 shrinks."""
    encode_bytes_per_s: float
    decode_bytes_per_s: float
    sample_bytes: int
    gap_steps: int = 0
    """Iterations between the samples and their base; more of them shrink less.  0: no base."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderMeasure:
    """Throughput of encoders while the job trains."""

    threads: int
    """So many encoded at once, as a save's writers do."""
    worth: Distribution
    """All of them together, in encoders that each have an idle core: at most `threads`, and less
    where the training leaves them less."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryHeadroom:
    """Memory that may still be allocated; None where the limit does not exist or cannot be read."""

    host_total_bytes: int
    host_available_bytes: int
    cgroup_limit_bytes: int | None = None
    cgroup_available_bytes: int | None = None
    shm_available_bytes: int | None = None
    memlock_limit_bytes: int | None = None
    device_total_bytes: int | None = None
    device_available_bytes: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RatePosterior:
    """Gamma posterior of a failure rate per day: mean shape / exposure_days.

    Source: conjugate update of Gamma(a, b) by n events in E days: a + n, b + E.
    """

    shape: float
    exposure_days: float
    events: int
    """Events observed beside the prior."""
    source: str
    """Where prior and events come from, in words."""

    @property
    def mean_per_day(self) -> float:
        """Posterior mean, the Bayes action for the first-order waste."""
        return self.shape / self.exposure_days

    def updated(self, *, events: int, exposure_days: float) -> "RatePosterior":
        """The posterior after `events` more in `exposure_days` more."""
        return RatePosterior(
            shape=self.shape + events,
            exposure_days=self.exposure_days + exposure_days,
            events=self.events + events,
            source=self.source,
        )


MemoryEnd = Literal["node", "step", "rank"]
"""The memory of a node is lost with that node, with any node of the job, or with any rank."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FailureRates:
    """How often the job is interrupted, and what survives."""

    per_node: RatePosterior
    """Of one node; the job's share is this times the nodes."""
    per_job: RatePosterior
    """Independent of the size of the job (software, storage, control plane)."""
    process_share: float
    """Fraction of interruptions in which the memory tier of the node survives, 0..1."""
    nodes: int
    classes: dict[str, float] = field(default_factory=dict)
    """Dirichlet weights of process, node, nodes, storage and silent: the prior's and one for each
    (faded) event; shares are weights over their sum.  Empty: not estimated."""
    together: tuple[float, ...] = ()
    """The same of 1, 2, 3 and at least 4 nodes that are lost together."""
    memory_ends_with: MemoryEnd = "node"
    """A scheduler that ends all processes of a job step ends its keepers, and their memory."""

    @property
    def interruptions_per_s(self) -> float:
        """All interruptions of the job, per second."""
        per_day = self.per_node.mean_per_day * self.nodes + self.per_job.mean_per_day
        return per_day / 86400.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """A duration that was measured in earlier runs, or assumed and said so."""

    value_s: float
    source: Literal["measured", "derived", "assumed"]
    n: int = 0
    note: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecoveryTimes:
    """From the failure to the first new iteration, in parts."""

    detect: Estimate
    restart: Estimate
    """Process start, imports, rendezvous."""
    restore_memory: Estimate
    restore_disk: Estimate
    restore_peer: Estimate | None = None
    """From the memory of other nodes, where it was seen."""

    def like_saves(self, *, copy_s: float, persist_s: float, n: int) -> "RecoveryTimes":
        """Return these times, with assumed restores taken from `n` saves, if there are any.

        A restore copies as many bytes as a snapshot, and reads as many as a save writes.
        """

        def derived(before: Estimate, value_s: float, note: str) -> Estimate:
            if before.source != "assumed" or not n:
                return before
            return Estimate(value_s=value_s, source="derived", n=n, note=note)

        return replace(
            self,
            restore_memory=derived(self.restore_memory, copy_s, "as long as a snapshot"),
            restore_disk=derived(
                self.restore_disk, copy_s + persist_s, "as long as a snapshot and its write"
            ),
        )

    def outage_s(self, memory_share: float) -> float:
        """Mean time without training at a failure; `memory_share`: restored from memory."""
        down_s = self.detect.value_s + self.restart.value_s
        return (
            down_s
            + memory_share * self.restore_memory.value_s
            + (1.0 - memory_share) * self.restore_disk.value_s
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Bubble:
    """A window of an iteration in which something of a rank idles."""

    rank: int
    offset_s: Distribution
    """From the boundary: the end of the optimizer's step."""
    length_s: Distribution
    after: int = -1
    """Chunks of a pipeline that ended before it; 0: it begins at the boundary. -1: it begins at its
    offset and not with a chunk's end (windows between collectives)."""
    what: Literal["device", "network", "data_wait"] = "device"
    """What idles: the device (between chunks), the network (between collectives), or both while
    the training waits for its data."""

    @property
    def stability(self) -> float:
        """p10 over p50 of the length, 0..1: how much of a window can be counted on."""
        return self.length_s.p10 / self.length_s.p50 if self.length_s.p50 > 0 else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class IterationTrace:
    """An iteration as one rank runs it: what its bubbles belong to."""

    rank: int
    schedule: str
    """torch's name of the pipeline schedule; "" without one."""
    fingerprint: str
    """Digest of the order of chunks or collectives (`pipeline.order_digest`): windows of another
    order are refused."""
    iteration_s: Distribution
    chunk_s: dict[str, Distribution]
    """Chunks by stage and kind (0F, 0B), or collectives by name."""
    odd: int = 0
    """Iterations with another order (an evaluation between), left out."""
    overhead: float = 0.0
    """Time of the probe itself, fraction of the iteration."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuCounters:
    """One GPU as NVML sees it; None where the driver does not tell."""

    name: str
    pcie_generation: int | None
    pcie_width: int | None
    ecc_uncorrected: int | None
    temperature_c: int | None
    xid_events: int | None
    utilisation: float | None = None
    """Fraction of the last sample period in which a kernel ran, 0..1."""
    memory_utilisation: float | None = None
    """The same of reads and writes of device memory."""
    pcie_tx_bytes_per_s: float | None = None
    """Sent by the GPU, over NVML's last 20 ms."""
    pcie_rx_bytes_per_s: float | None = None
    rows_remapped: int | None = None
    """Rows of device memory (pages on older GPUs) replaced after errors that were not corrected."""
    remapping_failed: bool | None = None
    """No spare row was left: the GPU should be replaced."""
    sm_clock_hz: float | None = None
    sm_clock_most_hz: float | None = None
    slowed_by: tuple[str, ...] | None = None
    """Why clocks are held back now, in words; empty: they are not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fingerprint:
    """Everything that makes a profile another profile."""

    host: str
    """Digest of the machine's identity, not its name."""
    cpu: str
    cores: int
    gpus: tuple[str, ...]
    world_size: int
    nodes: int
    torch_version: str
    layout_digest: str
    storage: str
    """File-system type and device of the checkpoint directory."""
    autockpt_version: str

    @property
    def digest(self) -> str:
        """Short digest of all fields, the key of caches and plans."""
        return hashlib.sha256(to_json(self).encode()).hexdigest()[:16]

    @property
    def ranks_per_node(self) -> int:
        """Ranks that share one node's storage and memory."""
        return -(-self.world_size // max(1, self.nodes))


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """A measured job on a measured machine.  Written as profile.json."""

    schema_version: int = 1
    fingerprint: Fingerprint
    created: str
    """UTC time in ISO 8601, for people; no decision reads it."""
    command: str
    iteration_s: Distribution
    phases_s: dict[str, Distribution]
    """forward, backward, optimizer, data_wait, other."""
    state: StateInventory
    memory: MemoryHeadroom
    failures: FailureRates
    recovery: RecoveryTimes
    links: tuple[LinkMeasure, ...] = ()
    traffic: tuple[LinkTraffic, ...] = ()
    """Of the training itself, on one node; empty where nothing counts it."""
    storage: tuple[StorageMeasure, ...] = ()
    interference: tuple[InterferenceMeasure, ...] = ()
    codecs: tuple[CodecMeasure, ...] = ()
    encoders: EncoderMeasure | None = None
    """Beside the training; its slow-down meanwhile is that under `encode`."""
    bubbles: tuple[Bubble, ...] = ()
    traces: tuple[IterationTrace, ...] = ()
    """One a rank whose bubbles were measured."""
    gpus: tuple[GpuCounters, ...] = ()
    domains: FailureDomains = UNKNOWN_DOMAINS
    """Failure domains that nodes share and lose together."""
    stall_s: Distribution | None = None
    """Stall of a snapshot on this job (boundary copy + wait at the fence)."""
    snapshot_s: Distribution | None = None
    """From the boundary until every byte is in host memory."""
    persist_s: Distribution | None = None
    """From the boundary until durable on disk, while training goes on."""
    warnings: tuple[str, ...] = ()
    """Unstable, refused or missing measurements, in sentences."""
    samples: dict[str, tuple[float, ...]] = field(default_factory=dict)
    """Raw samples by name, so that estimates can be replayed."""

    def under(self, work: str) -> InterferenceMeasure | None:
        """The slow-down under one kind of work, or None when it was not measured."""
        return next((measure for measure in self.interference if measure.work == work), None)

    def used(self, link: Literal["network", "pcie"]) -> float | None:
        """Fraction of its rate that training sends over the busiest device of a kind, 0..1.

        None where that was not counted, or no capacity is known.
        """
        shares = [t.sent_share for t in self.traffic if t.link == link]
        return max((share for share in shares if share is not None), default=None)

    def link(self, name: str) -> LinkMeasure | None:
        """The measure of one link, or None when it was not measured."""
        return next((link for link in self.links if link.link == name), None)
