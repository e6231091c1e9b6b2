"""What the user wants: objective, limits, and decisions taken out of our hands."""

from dataclasses import dataclass, replace
from typing import Literal

from autockpt.values.errors import ConfigError
from autockpt.values.paths import path_problem
from autockpt.values.redundancy import Arrangement, PeerPath, PeerSchedule, Scheme

Retune = bool | Literal["observe"]
"""Whether the plan may change during a run; observe: what would change is only written down."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What `auto` may not exceed; None means no limit."""

    stall_s: float | None = None
    """Longest acceptable stall of one checkpoint."""
    host_memory_bytes: int | None = None
    """Host memory for slots and buffers on one node."""
    overhead: float | None = None
    """Largest acceptable fraction of training time spent on checkpoints (CheckFreq's p)."""
    lost_time_s: float | None = None
    """RPO: work that may be lost in a failure that takes the memory tier with it."""
    disk_bytes: int | None = None
    """Quota: what the job's checkpoints may take on storage, those under way included."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pins:
    """Decisions fixed by the user; None means `auto`."""

    memory_interval_steps: int | None = None
    memory_interval_s: float | None = None
    disk_interval_steps: int | None = None
    disk_interval_s: float | None = None
    memory_enabled: bool | None = None
    schedule: Literal["lazy", "blocking", "windows"] | None = None
    persist: Literal["async", "sync"] | None = None
    """sync: the training waits until the checkpoint is durable."""
    streaming: bool | None = None
    """False: the first byte is written only when the whole snapshot is in host memory."""
    preallocate: bool | None = None
    """False: slots are allocated at every save and freed after it (for comparison)."""
    in_flight: int | None = None
    """Checkpoints that may be on their way to storage at once, >= 1."""
    device_clone: Literal["on", "off"] | None = None
    """on: a snapshot is cloned in device memory before it is copied to the host."""
    path: Literal["host", "direct"] | None = None
    codec: Literal["none", "planes", "delta", "zstd"] | None = None
    chunk_bytes: int | None = None
    writers: int | None = None
    slots: int | None = None
    direct_io: bool | None = None
    retune: Retune | None = None
    interval_rule: Literal["waste", "checkfreq"] | None = None
    """waste: minimise the waste rate; checkfreq: shortest interval within the overhead budget."""
    keep_last: int | None = None
    """`Retention.keep_last` was written: `auto` may not keep fewer for `Limits.disk_bytes`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RedundancyWish:
    """What is fixed about copies and parity in other nodes' memory; None means `auto`."""

    scheme: Scheme | None = None
    copies: int | None = None
    """Of each shard, the own one included, >= 2."""
    placement: Arrangement | None = None
    set_size: int | None = None
    parity: int | None = None
    """Nodes that a parity set may lose, >= 1."""
    path: PeerPath | None = None
    rate_bytes_per_s: float | None = None
    """Most that a node sends."""
    schedule: PeerSchedule | None = None
    floor: int = 0
    """Simultaneous node losses that memory must survive; a plan without that is refused."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FailureDeclaration:
    """Failures as the user knows them; replaces the posterior's mean."""

    mtbf_s: float | None = None
    """Mean time between interruptions of the whole job."""
    process_share: float | None = None
    """Fraction of them that leave this node's memory alive, 0..1."""
    preemption_s: float | None = None
    """Mean time between announced ends of nodes (spot, a scheduler's preemption), beside the
    interruptions above; None: there are none."""
    notice_s: float | None = None
    """From the announcement, a SIGTERM, to the end; None: ends come unannounced."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Retention:
    """Which durable checkpoints are kept."""

    keep_last: int = 3
    """Newest verified generations; >= 1."""
    keep_every_s: float | None = None
    """Beyond those, one per this time."""
    keep_every_steps: int | None = None
    reach_s: float | None = None
    """An error of the state is noticed within this time: one checkpoint from before it is kept."""

    def at_most(self, other: "Retention") -> "Retention":
        """As `other`, with as few of the newest as this has, if those are fewer."""
        return replace(other, keep_last=min(self.keep_last, other.keep_last))


@dataclass(frozen=True, slots=True, kw_only=True)
class Prices:
    """What storage and time cost, all in one currency; None means that nobody said."""

    disk_per_gb_month: float | None = None
    """Of 10^9 bytes kept for a month of 730 h."""
    node_per_h: float | None = None
    """Of one node, with all that is in it."""
    currency: str = ""
    """Three letters; "" without prices."""


ArchiveCodec = Literal["none", "excp", "excp-published", "quantised"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Archiving:
    """A copy of every good checkpoint in an archive beside the run; None: there is none."""

    codec: ArchiveCodec | None = None
    """All but `none` are lossy, which `lossy` must say as well."""
    lossy: bool = False
    full_every: int = 8
    """One of so many generations is lossless."""

    @property
    def silent(self) -> bool:
        """The codec loses something and nobody said that this is wanted."""
        return self.codec not in (None, "none") and not self.lossy


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteWish:
    """Copies of good checkpoints in an object store."""

    url: str | None = None
    """s3://, gs://, az:// or file://, with a prefix of this run's own; None: there are none."""
    keep_last: int = 3
    """Newest copies that stay; >= 1."""
    rate_bytes_per_s: float | None = None
    """Most that is sent; None: as fast as it goes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RestartWish:
    """How ranks are started again; None means `auto`."""

    standby: Literal["on", "off"] | None = None
    """Whether a parked process per rank has imported what the next incarnation will."""
    stuck: Literal["warn", "restart"] | None = None
    """What is done about a rank that makes no progress; None: warn."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Goal:
    """Objective, limits, pins: what a policy file says.  All defaults are `auto`."""

    schema_version: int = 1
    objective: Literal["goodput", "stall", "durability"] = "goodput"
    limits: Limits = Limits()
    prices: Prices = Prices()
    pins: Pins = Pins()
    redundancy: RedundancyWish = RedundancyWish()
    failures: FailureDeclaration = FailureDeclaration()
    restart: RestartWish = RestartWish()
    retention: Retention = Retention()
    archive: Archiving = Archiving()
    remote: RemoteWish = RemoteWish()
    storage_path: str | None = None
    """Where checkpoints go; None: `checkpoints/` in the run directory."""
    policy: str = "builtin:auto"
    """Name of the preset or file this came from, for the report."""

    def __post_init__(self) -> None:
        problem = "" if self.storage_path is None else path_problem(self.storage_path)
        if problem:
            raise ConfigError(f"disk.path: {problem}")
