"""The user's wishes: objective, limits, fixed decisions.  Their fields are the policy keys.

A field made by `key(...)` is a row of the table of policy keys.  It gives the key, its kind (unit
and range), its text and its default.  `policies.policy_file` reads policies by these rows.  The
JSON schema, the starter file and the table in docs/howto/policy_files.md (`make docs`) come from
them.  A new key is a row here and the code that uses the field.
"""

from dataclasses import dataclass, replace
from typing import Literal

from autockpt.values.errors import ConfigError
from autockpt.values.policy_keys.key import key
from autockpt.values.policy_keys.kinds import (
    Budget,
    Chunk,
    Count,
    Directory,
    Duration,
    Interval,
    Metric,
    Money,
    Price,
    Rate,
    Share,
    Size,
    StoreUrl,
    Switch,
    Words,
)
from autockpt.values.policy_keys.paths import is_store_url, path_problem
from autockpt.values.redundancy import Arrangement, PeerPath, PeerSchedule, Scheme

Objective = Literal["goodput", "stall", "durability"]
Retune = bool | Literal["observe"]
"""Whether the plan may change during a run; observe: a change is only written down."""
IntervalRule = Literal["waste", "checkfreq"]
Copying = Literal["lazy", "blocking", "windows"]
Persist = Literal["async", "sync"]
OnOff = Literal["on", "off"]
WritePath = Literal["host", "direct"]
SharedAmong = Literal["node", "job"]
"""The ranks that divide the state which they hold alike: each stores a part."""
Codec = Literal["none", "planes", "delta", "zstd"]
ArchiveCodec = Literal["none", "excp", "excp-published", "quantised"]
Stuck = Literal["warn", "restart"]
Rollback = Literal["off", "repeat", "skip"]
FaultyNodeWish = Literal["name", "leave"]
OnDispute = Literal["off", "mark", "restore"]

SECTIONS = {
    "": "",
    "memory": "checkpoints in this node's memory, for failures of processes",
    "disk": "durable checkpoints",
    "staging": "how bytes move from the device to storage",
    "redundancy": "checkpoints in the memory of other nodes; one node has none",
    "limits": "auto may not exceed these; auto: no limit",
    "prices": "if you pay for them, in one currency: then money decides beside time",
    "failures": "if you know them; auto: from the failure log and stated priors",
    "restart": "how ranks are started again",
    "keep": "which durable checkpoints stay",
    "archive": "a second, small copy of every good checkpoint, in archive/ of the run",
    "remote": "copies of good checkpoints in an object store",
}
"""Sections of a policy file in their order; "" are the keys at the top."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pins:
    """Decisions fixed by the user; None means `auto`."""

    interval_rule: IntervalRule | None = key(
        "rule",
        Words(IntervalRule),
        "how intervals are chosen: least expected waste, or the shortest within `limits.overhead`",
    )
    retune: Retune | None = key(
        "retune",
        Switch("observe"),
        "whether the plan may change during a run",
        more="`observe`: it stays, and changes that would have been made are written down",
    )
    memory_enabled: bool | None = key(
        "memory.enabled", Switch(), "checkpoints in this node's memory"
    )
    memory_interval_steps: int | None = key(
        "memory.interval",
        Interval("30 s", "50 steps"),
        "between checkpoints in memory; the disk interval is a multiple of it",
        part="steps",
    )
    memory_interval_s: float | None = key("memory.interval", part="seconds")
    slots: int | None = key(
        "memory.slots", Count(1, 16), "images of the state in host memory, per rank"
    )
    disk_interval_steps: int | None = key(
        "disk.interval",
        Interval("15 min", "500 steps"),
        "between durable checkpoints",
        alias="interval",
        part="steps",
    )
    disk_interval_s: float | None = key("disk.interval", part="seconds")
    writers: int | None = key("disk.writers", Count(1, 512), "writer threads per rank")
    chunk_bytes: int | None = key(
        "disk.chunk", Chunk("8 MiB"), "bytes per write, a power of two from 64 KiB to 1 GiB"
    )
    direct_io: bool | None = key(
        "disk.direct",
        Switch(),
        "O_DIRECT",
        more="Only where the file system takes it and states no alignment larger than a page",
    )
    codec: Codec | None = key(
        "disk.codec",
        Words(Codec),
        "lossless compression",
        more="See [compression](../concepts/compression.md)",
    )
    read_once: bool | None = key(
        "disk.read_once",
        Switch(),
        "of an object store, one node reads what several need, and passes it on",
        more="`auto`: unless a link between nodes was measured that is slower than the store",
    )
    schedule: Copying | None = key(
        "staging.schedule",
        Words(Copying),
        "copied under the next forward and backward, inside the boundary, or in a pipeline's gaps",
        more=(
            "Gaps are used as far as they take the copy "
            "([bubbles.md](../concepts/bubbles.md)). `auto`: the "
            "cheapest, compared again in the run where there are gaps"
        ),
    )
    persist: Persist | None = key(
        "staging.persist", Words(Persist), "sync: training waits until a checkpoint is durable"
    )
    streaming: bool | None = key(
        "staging.streaming",
        Switch(),
        "a chunk is written as soon as it is in host memory; false: after all chunks are",
    )
    preallocate: bool | None = key(
        "staging.preallocate", Switch(), "slots are allocated once; false: at every save"
    )
    in_flight: int | None = key(
        "staging.in_flight",
        Count(1, 16),
        "checkpoints on their way to storage at once",
        more=(
            "A checkpoint that comes due beyond that is skipped. Ranks that hear late of the end "
            "of one may add one more, which all write. `auto`: as many as there are slots"
        ),
    )
    device_clone: OnOff | None = key(
        "staging.device_clone",
        Words(OnOff),
        "a snapshot is cloned in device memory before it is copied to the host",
        more=(
            "`auto`: where the clone fits and the copy is not hidden. Without a GPU it changes "
            "nothing"
        ),
    )
    shares: SharedAmong | None = key(
        "staging.shares",
        Words(SharedAmong),
        "what data-parallel ranks hold alike is stored once by each node, or once by the job",
        more=(
            "`job` divides snapshot, slots and writes by the nodes that hold it. The memory of one "
            "node is then no whole checkpoint: nodes send each other shares at a restart. `auto`: "
            "`node`, and `autockpt explain` shows the bytes of both"
        ),
    )
    path: WritePath | None = key(
        "staging.path", Words(WritePath), "through a host slot, or past it"
    )
    keep_last: int | None = key("keep.last")
    """`Retention.keep_last` was written: `auto` may not keep fewer for `Limits.disk_bytes`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RedundancyWish:
    """Fixed properties of copies and parity in other nodes' memory; None means `auto`."""

    scheme: Scheme | None = key(
        "redundancy.scheme",
        Words(Scheme),
        "other nodes keep no, whole, XOR-parity or Reed-Solomon copies of checkpoints in memory",
        more=(
            "`auto`: the scheme that wastes least and fits, none without a link that was measured "
            "between nodes; `rs` only where it is asked for or the floor is above 1"
        ),
    )
    copies: int | None = key(
        "redundancy.copies", Count(2, 16), "replicas: of each shard, the own one included"
    )
    placement: Arrangement | None = key(
        "redundancy.placement",
        Words(Arrangement),
        "replicas: which nodes hold whose copies",
        more="See [redundancy.md](../concepts/redundancy.md)",
    )
    set_size: int | None = key(
        "redundancy.set_size", Count(2, 256), "xor, rs: most nodes of a parity set"
    )
    parity: int | None = key(
        "redundancy.parity", Count(1, 16), "rs: nodes that a parity set may lose"
    )
    path: PeerPath | None = key(
        "redundancy.path",
        Words(PeerPath),
        "host to peer host, or device to peer device to peer host",
        more="`device`: emulated devices, whole copies",
    )
    rate_bytes_per_s: float | None = key(
        "redundancy.rate",
        Rate("2 GB/s"),
        "most that a node sends",
        more="`auto`: such that no iteration becomes 5 % longer",
    )
    schedule: PeerSchedule | None = key(
        "redundancy.schedule",
        Words(PeerSchedule),
        "copies leave beside the training at that rate, or while its own traffic is silent",
        more=(
            "`windows` has no rate and takes as much as the gaps do "
            "([bubbles.md](../concepts/bubbles.md)). "
            "`auto`: in windows where snapshots wait for them too, or where the rate would be cut "
            "and windows take a tenth of a copy"
        ),
    )
    floor: int = key(
        "redundancy.floor",
        Count(0, 15),
        "simultaneous losses of nodes that memory must survive; a plan without that is refused",
        default=0,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Limits that `auto` may not exceed; None means no limit."""

    stall_s: float | None = key(
        "limits.stall", Duration("200 ms"), "longest stall of one checkpoint"
    )
    overhead: float | None = key(
        "limits.overhead", Budget("2 %"), "largest share of training time spent on checkpoints"
    )
    lost_time_s: float | None = key(
        "limits.lost_time", Duration("30 min"), "work that a failure of the node may cost"
    )
    host_memory_bytes: int | None = key(
        "limits.host_memory",
        Size("64 GiB"),
        "host memory on one node, for slots and for shards held for other nodes",
        more=(
            "`autockpt run` refuses to begin (exit code 78) where not even the least checkpoint "
            "fits"
        ),
    )
    disk_bytes: int | None = key(
        "limits.disk",
        Size("2 TB"),
        "quota of all checkpoints of the job, those under way included",
        more=(
            "Checkpoints that do not fit are encoded, then kept in smaller numbers where "
            "`keep.last` is `auto`, then refused"
        ),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Prices:
    """The prices of storage and time, in one currency; None: not given."""

    disk: Money | None = key(
        "prices.disk",
        Price("0.023 USD/GB-month"),
        "price of storage, also per GiB or TB",
        more="Of the ways to write that fit, the cheapest in money is taken",
    )
    node: Money | None = key(
        "prices.node",
        Price("32 USD/h"),
        "price of one node: puts the lost time beside the price of storage",
        more="Without it a smaller checkpoint may cost no time",
    )

    @property
    def disk_per_gb_month(self) -> float | None:
        """Of 10^9 bytes kept for a month of 730 h."""
        return None if self.disk is None else self.disk.amount

    @property
    def node_per_h(self) -> float | None:
        """Of one node, with all that is in it."""
        return None if self.node is None else self.node.amount

    @property
    def currency(self) -> str:
        """Three letters; "" without prices."""
        return next((one.currency for one in (self.disk, self.node) if one is not None), "")


@dataclass(frozen=True, slots=True, kw_only=True)
class FailureDeclaration:
    """Failures as the user knows them; replaces the posterior's mean."""

    mtbf_s: float | None = key(
        "failures.mtbf", Duration("8 h"), "mean time between interruptions of the whole job"
    )
    process_share: float | None = key(
        "failures.process_share",
        Share("40 %"),
        "share of them that leave the node's memory alive",
    )
    preemption_s: float | None = key(
        "failures.preemption",
        Duration("6 h"),
        "mean time between announced ends of nodes (spot, a scheduler's preemption)",
        more="Beside the interruptions of `failures.mtbf`. `auto`: there are none",
    )
    notice_s: float | None = key(
        "failures.notice",
        Duration("2 min"),
        "how long before such an end SIGTERM comes",
        more=(
            "Where the newest checkpoint in memory is durable in time, the end costs no more than "
            "a failure of a process"
        ),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Retention:
    """Which durable checkpoints are kept."""

    keep_last: int = key(
        "keep.last",
        Count(1),
        "newest verified checkpoints that are kept; 3 by default",
        more=(
            "The disk holds up to 7 states more: one being written, three that wait to be read "
            "back, three spare files (only where saves come every few seconds, and while a tenth "
            "of the disk is free)"
        ),
        default=3,
    )
    keep_every_s: float | None = key("keep.every", part="seconds")
    keep_every_steps: int | None = key(
        "keep.every",
        Interval("6 h", "1000 steps"),
        "beyond the newest, one per this time or distance",
        part="steps",
    )
    ttl_s: float | None = key(
        "keep.ttl",
        Duration("30 d"),
        "a checkpoint of `keep.every` goes when it is this much older than the third newest",
        more="The newest, the best and the pinned ones stay",
    )
    keep_best: int = key(
        "keep.best",
        Count(1),
        "beyond the newest, so many with the best value of `keep.metric`",
        more=(
            "Scripts report values by `ckpt.report` "
            "([keeping.md](../howto/keeping.md)). `auto`: none"
        ),
        default=0,
    )
    metric: str = key(
        "keep.metric",
        Metric(),
        "the value that `keep.best` compares, after `min` or `max`",
        more="`auto`: `min loss`",
        default="min loss",
    )
    weights_only: bool = key(
        "keep.weights_only",
        Switch(),
        "older checkpoints that stay hold weights only: optimizer state and random states go",
        more="The newest `keep.last`, two at least, and pinned ones stay whole",
        default=False,
    )
    reach_s: float | None = key(
        "failures.silent_latency",
        Duration("12 h"),
        "an error of the state (a loss that went wrong) is noticed within this time",
        more="One checkpoint from before it is kept, beyond `keep.last`",
    )

    def at_most(self, other: "Retention") -> "Retention":
        """As `other`, with as few of the newest as this has, if those are fewer."""
        return replace(other, keep_last=min(self.keep_last, other.keep_last))


@dataclass(frozen=True, slots=True, kw_only=True)
class RestartWish:
    """How ranks are started again; None means `auto`."""

    stuck: Stuck | None = key(
        "failures.stuck",
        Words(Stuck),
        "a rank that makes no progress is written down as an incident, or also ended",
        more=(
            "The launcher restarts an ended rank "
            "([restart.md](../concepts/restart.md)). `auto`: `warn`"
        ),
    )
    rollback: Rollback | None = key(
        "failures.rollback",
        Words(Rollback),
        "after NaN in the state or a jump of the loss, back to the last good checkpoint",
        more=(
            "`repeat` trains on the same data again, `skip` leaves out the data up to the spike "
            "([restart.md](../concepts/restart.md#going-back-after-a-spike)). `auto`: `off`"
        ),
    )
    faulty_node: FaultyNodeWish | None = key(
        "failures.faulty_node",
        Words(FaultyNodeWish),
        "a node that begins more failures than chance explains is named, or also leaves the job",
        more=(
            "It leaves where `--nnodes MIN:MAX` allows "
            "([several nodes](launch/several_nodes.md)). `auto`: `name`"
        ),
    )
    replicas: OnDispute | None = key(
        "failures.replicas",
        Words(OnDispute),
        "what ranks hold alike is compared to the bit: not at all, and what a difference leads to",
        more=(
            "`mark`: such a checkpoint is kept and not restored by itself; `restore`: the training "
            "also goes back to the last one on which all agreed "
            "([restart.md](../concepts/restart.md#replicas-that-disagree)). `auto`: `off`"
        ),
    )
    standby: OnOff | None = key(
        "restart.standby",
        Words(OnOff),
        "a parked process per rank, its imports done, takes the rank's place at a restart",
        more=(
            "See [restart.md](../concepts/restart.md). "
            "`auto`: where three times its memory is left; `on`: "
            "where it fits"
        ),
    )
    last_boundary: OnOff | None = key(
        "restart.last_boundary",
        Words(OnOff),
        "after the death of one rank of a node, the others save the boundary that they hold",
        more=(
            "Where they hold all that the dead rank held, in host memory "
            "([restart.md](../concepts/restart.md#nothing-lost-when-a-rank-dies)). `auto`: `off`"
        ),
    )
    caches: OnOff | None = key(
        "restart.caches",
        Words(OnOff),
        "compiled code of the ranks is kept in the run directory, for the next start",
        more=(
            "A variable that you have set stays "
            "([restart.md](../concepts/restart.md#compiled-code)). "
            "`auto`: where a restart may be on another machine"
        ),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Archiving:
    """A copy of every good checkpoint in an archive beside the run; None: there is none."""

    codec: ArchiveCodec | None = key(
        "archive.codec",
        Words(ArchiveCodec),
        "how the archive is encoded; all but none are LOSSY",
        more="`auto`: there is no archive",
    )
    lossy: bool = key(
        "archive.lossy",
        Switch(),
        "true: the loss is wanted; a lossy codec is refused without it",
        default=False,
    )
    full_every: int = key(
        "archive.full_every",
        Count(1, 64),
        "one of so many checkpoints in the archive is lossless; 8 by default",
        default=8,
    )

    @property
    def silent(self) -> bool:
        """The codec loses something and the policy does not say that this is wanted."""
        return self.codec not in (None, "none") and not self.lossy


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteWish:
    """Copies of good checkpoints in an object store."""

    url: str | None = key(
        "remote.url",
        StoreUrl(),
        "good checkpoints are copied there, and brought back where the directory lacks them",
        more="See [remote.md](../howto/remote.md). `auto`: there are no copies",
    )
    keep_last: int = key(
        "remote.keep", Count(1), "newest good copies that stay there; 3 by default", default=3
    )
    rate_bytes_per_s: float | None = key(
        "remote.rate", Rate("50 MB/s"), "most that is sent", more="`auto`: no limit"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Goal:
    """Objective, limits, pins: the content of a policy file.  All defaults are `auto`."""

    schema_version: int = 1
    objective: Objective = key(
        "objective",
        Words(Objective),
        "least lost time, or longer (stall) or shorter intervals (durability) than its optimum",
        default="goodput",
    )
    limits: Limits = Limits()
    prices: Prices = Prices()
    storage_path: str | None = key(
        "disk.path",
        Directory(),
        "where checkpoints go; else `checkpoints/` in the run directory",
        more="See [storage.md](../howto/storage.md)",
    )
    pins: Pins = Pins()
    redundancy: RedundancyWish = RedundancyWish()
    failures: FailureDeclaration = FailureDeclaration()
    restart: RestartWish = RestartWish()
    retention: Retention = Retention()
    archive: Archiving = Archiving()
    remote: RemoteWish = RemoteWish()
    policy: str = "builtin:auto"
    """Name of the preset or file this came from, for the report."""

    @property
    def is_in_store(self) -> bool:
        """Checkpoints go to an object store."""
        return self.storage_path is not None and is_store_url(self.storage_path)

    def __post_init__(self) -> None:
        problem = "" if self.storage_path is None else path_problem(self.storage_path)
        if problem:
            raise ConfigError(f"disk.path: {problem}")
