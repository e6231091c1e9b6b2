"""Telemetry: append-only events in the past tense, one JSON object per line and rank.

Times are seconds of the monotonic clock of the machine's boot (comparable between processes of one
boot); `wall` is UTC for people only.
"""

from collections.abc import Collection, Iterator
from dataclasses import dataclass, fields
from typing import Any, BinaryIO, TypeGuard

from autockpt.values.errors import ConfigError
from autockpt.values.record import from_data, to_data

NO_SLOT = "no slot may be overwritten"
"""End of the reason of a save that was skipped because each slot was still needed."""
PASSED = "went on to"
"""In the reason of a save that another rank left behind for a later one."""
WITHDRAWN = "the checkpoint had not begun"
"""End of the reason of a save that its rank gave back before the snapshot began."""
LOST = "was lost"
"""End of the reason of what ended with a rank: a failure of the job, not of memory or storage."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """Base of all events."""

    at_s: float
    """CLOCK_MONOTONIC, seconds."""
    rank: int
    """-1: the keeper or the launcher."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunStarted(Event):
    """A trainer attached."""

    wall: str
    run_id: str
    term: int
    world_size: int
    pid: int
    plan_id: str
    plan_version: int
    state_bytes: int
    restart_count: int
    launch_s: float | None = None
    """From the launcher's decision to restart to the birth of the process.  This and the following
    parts end at `at_s`, one after the other.  None: not separated; interpreter, torch and process
    group are contained in `script_s` then."""
    interpreter_s: float | None = None
    """From birth to the script's first line."""
    torch_import_s: float | None = None
    process_group_s: float | None = None
    """In torch.distributed.init_process_group."""
    script_s: float | None = None
    """The rest until attach: other imports, the model, the data."""
    wait_s: float | None = None
    """In attach, for keepers and other ranks."""
    read_s: float | None = None
    """Verifying and copying the checkpoint's bytes into place."""
    apply_s: float | None = None
    """Putting the state together from them."""
    non_temporal_bytes: int = 0
    """From which size on memcpy passes the caches, where the environment says; 0: glibc's rule."""
    process: str = ""
    """"new", "parked" (it had imported the libraries before) or "same" (that of the last start)."""
    new_process_reason: str = ""
    """Why a rank that survived another one's death has a new process.  "": it has none, it died
    itself, or the script has no restartable function."""
    resumed: str = ""
    """The checkpoint that it goes on from; "scratch": none.  "": an older version did not say."""
    discards: bool = False
    """It leaves newer iterations on purpose: `--fresh`, or a checkpoint of `--resume-from`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstIterationEnded(Event):
    """The first iteration of a process ended: the training is back."""

    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RandomMarked(Event):
    """The iteration behind a checkpoint ended: the random state that it left.

    A process that resumes the checkpoint compares its own (`ReplayChecked`).
    """

    generation: str
    """The checkpoint."""
    step: int
    """Behind the iteration."""
    world_size: int
    digest: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayChecked(Event):
    """The first iteration behind a resume was compared with the one before the failure."""

    step: int
    """Behind the iteration."""
    equal: bool | None
    """It left the same random state; None: there was nothing to compare."""
    reason: str = ""
    """Why it was not compared."""


@dataclass(frozen=True, slots=True, kw_only=True)
class IterationsTimed(Event):
    """A block of iterations ended (one event per block, not per step)."""

    step: int
    count: int
    total_s: float
    """Wall time of the block, stalls excluded."""
    checkpoint_s: float
    """Part of wall time that was stall, not in total_s."""
    quiet_s: float
    """Mean seconds of the block's iterations without background work; 0 if there was none."""
    busy_s: float
    """Mean seconds of the block's iterations with background work; 0 if there was none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotBegan(Event):
    """A copy began at an iteration boundary."""

    generation: str
    step: int
    tiers: str
    """"memory" or "memory+disk"."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotSealed(Event):
    """All bytes of this rank are in its slot and proven unchanged."""

    generation: str
    step: int
    bytes: int
    boundary_stall_s: float
    fence_stall_s: float
    copy_s: float
    """From the boundary to the last byte."""


@dataclass(frozen=True, slots=True, kw_only=True)
class IdleWindowsUsed(Event):
    """How the bytes of a snapshot under `staging.schedule: windows` moved."""

    generation: str
    step: int
    window_bytes: int
    """While this rank's iteration idled."""
    overlap_bytes: int
    """Beside compute, because the windows did not take them."""
    fence_bytes: int
    """While the training waited for them."""
    chunk_bytes: int
    held_s: float
    """How long chunks were held back, together."""
    reason: str = ""
    """Why windows were not used, "" if they were."""
    refused: str = ""
    """Why the windows of the profile were not used."""
    windows_s: str = ""
    """Of some snapshots only, in seconds since the boundary: "begin end begin end ..." of the
    windows,"""
    moved_s: str = ""
    """of the chunks that moved in them,"""
    beside_s: str = ""
    """and of the others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SettingMeasured(Event):
    """A checkpoint that tried a setting of a comparison has ended, with its times.

    Decision "schedule" (`staging.compare`) ends when the snapshot is copied, decision "write"
    (`staging.compare_writes`) when the checkpoint is durable.
    """

    generation: str
    step: int
    decision: str
    """schedule, write."""
    setting: str
    """In words, as the plan's settings are written."""
    iterations: int
    """From the checkpoint's boundary to the first one after its end."""
    total_s: float
    """Wall time of these iterations; of a schedule with the stalls of its snapshot."""
    durable_s: float = 0.0
    """From the boundary until durable; 0 for a schedule."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotDiscarded(Event):
    """State changed behind the fence; the tensor is copied at the boundary from now on."""

    generation: str
    step: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveSkipped(Event):
    """A checkpoint that was due did not start."""

    step: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class HostMemoryNoted(Event):
    """The host's memory beside the slots, when it changed much or was little."""

    available_bytes: int
    """That the host, or the control group, has left."""
    reserve_bytes: int
    """That the training may need at any time."""
    room_bytes: int
    """Of the available bytes what more slots may take."""
    slots: int
    """Of this rank."""
    slot_bytes: int
    ranks: int
    """Of this node."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryCommitted(Event):
    """Every rank sealed the generation: a process failure loses nothing before it."""

    generation: str
    step: int
    latency_s: float
    """Since the snapshot began on the reporting node."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationReplicated(Event):
    """Other nodes hold copies of every shard: the loss of a node loses nothing before it."""

    generation: str
    step: int
    latency_s: float
    """Since the snapshot began on the reporting node."""
    bytes: int = 0
    """That came to the reporting node since the one before,"""
    moving_s: float = 0.0
    """and how long some of them were on their way.  Pauses that the plan's rate makes do not count:
    together they are the speed of the link."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicationLost(Event):
    """Copies on other nodes are not what the plan wants: the loss of a node may cost more."""

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaFetched(Event):
    """A keeper fetched a shard from the memory of another node, and has verified it."""

    generation: str
    step: int
    shard_rank: int
    from_node: int
    """-1: several, for a parity or what was rebuilt from one."""
    to_node: int
    bytes: int
    copy_s: float
    purpose: str
    """protect, restore."""
    path: str = "host"
    """host: from host memory to host memory; emulated device: through devices that are emulated, so
    that `copy_s` is a figure of gates."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaSent(Event):
    """Shards left for other nodes, those at one time together, where the network's windows count
    (`redundancy.schedule: windows`)."""

    from_node: int
    bytes: int
    window_bytes: int
    """While the training's own traffic was silent."""
    chunk_bytes: int
    held_s: float
    """How long pieces waited for windows, together."""
    send_s: float
    """From the first byte until the last one was acknowledged."""
    reason: str = ""
    """Why windows were not used, or not to the end; "" if they were."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointDurable(Event):
    """The generation is durable on disk."""

    generation: str
    step: int
    bytes: int
    stored_bytes: int
    latency_s: float
    """Since the snapshot began on the reporting node."""
    write_s: float
    """First byte to last fsync of the slowest rank."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PersistFailed(Event):
    """A generation did not become durable; older ones are untouched.

    Where the reason ends with LOST, it was under way when a rank was lost.  With WITHDRAWN, no copy
    had begun.
    """

    generation: str
    step: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteCopied(Event):
    """A durable generation is in the object store, too."""

    generation: str
    step: int
    bytes: int
    """That were sent for it; 0: a process that was started again found it there."""
    latency_s: float
    """Since it was committed to disk."""
    copy_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Scrubbed(Event):
    """A durable generation was read back and compared, in the background."""

    generation: str
    verdict: str
    """whole, suspect (NaN), damaged, or unread: the storage did not answer."""
    bytes: int
    """That matched."""
    scrub_s: float
    detail: str
    """Its defect; empty if there was none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointDeleted(Event):
    """A durable generation was deleted by the retention policy."""

    generation: str
    step: int
    bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerStateDropped(Event):
    """A durable generation was written again and holds weights only (`keep.weights_only`)."""

    generation: str
    step: int
    bytes: int
    """Of its new shards."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FailureObserved(Event):
    """A trainer, keeper or node was lost."""

    what: str
    """trainer, keeper, node."""
    failed_rank: int
    pid: int
    step: int
    """Newest step known to have ended."""
    detail: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Restored(Event):
    """A rank resumed."""

    generation: str
    step: int
    source: str
    """memory, peer (fetched from another node's), parity (rebuilt from several nodes) or disk."""
    bytes: int
    restore_s: float
    lost_steps: int
    """Iterations trained before the failure and not in the generation."""
    lost_s: float
    """Their time."""
    down_s: float
    """Failure to resumed, 0 when unknown."""
    detect_s: float | None = None
    """Part of it until the launcher decided to restart; None: not told apart."""


def shows_durable(event: Event) -> TypeGuard[CheckpointDurable | Restored]:
    """A checkpoint became durable, or a rank has read it from storage."""
    return isinstance(event, CheckpointDurable) or (
        isinstance(event, Restored) and event.source == "disk"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class LossyRestored(Event):
    """A rank resumed from a state that differs from the trained one."""

    generation: str
    step: int
    lost: str
    """The codec, the archived generation and the known difference."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanChanged(Event):
    """All ranks apply a new version of the plan from this step."""

    plan_version: int
    step: int
    memory_interval_steps: int
    disk_interval_steps: int
    reason: str
    plan_digest: str = ""
    """Of the whole plan: plans of one version may differ; "": not known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanChangeWithheld(Event):
    """A change that was not applied, because the policy only observes (`retune: observe`)."""

    step: int
    kind: str
    """first, retune, rollback, back-off, hurry, calm, codec."""
    memory_interval_steps: int
    disk_interval_steps: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Degraded(Event):
    """Something of autockpt failed; the training goes on."""

    what: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicasDisagreed(Event):
    """Ranks that held the same state to the bit do not any more; its checkpoint is suspect."""

    generation: str
    step: int
    ranks: str
    """Numbers, "2, 3": the outvoted ranks; without a vote of three or more all that differ."""
    nodes: str
    named: bool
    """A majority decided."""
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LastBoundarySealed(Event):
    """A rank died, and the others sealed the boundary that they held; or there is a reason."""

    generation: str
    """Empty where no boundary was chosen."""
    step: int
    dead: str
    """Numbers of the dead ranks, "1, 3"."""
    took_s: float
    reason: str
    """Why it was not sealed; empty: it was, and no iteration before it is lost."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerFailed(Event):
    """An exception, or an exit with an error, ended the script on this rank."""

    step: int
    """Newest step that ended."""
    error: str
    """Type and message, as a traceback ends."""
    origin: str
    """mistake, script, machine: see `values.script_errors`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunEnded(Event):
    """The training loop ended by itself, by a signal or with an error."""

    step: int
    reason: str
    """finished, signal, error."""


EVENTS: dict[str, type[Event]] = {
    kind.__name__: kind
    for kind in (
        RunStarted,
        FirstIterationEnded,
        RandomMarked,
        ReplayChecked,
        IterationsTimed,
        SnapshotBegan,
        SnapshotSealed,
        IdleWindowsUsed,
        SettingMeasured,
        SnapshotDiscarded,
        SaveSkipped,
        HostMemoryNoted,
        MemoryCommitted,
        GenerationReplicated,
        ReplicationLost,
        ReplicaFetched,
        ReplicaSent,
        CheckpointDurable,
        PersistFailed,
        RemoteCopied,
        Scrubbed,
        CheckpointDeleted,
        OptimizerStateDropped,
        FailureObserved,
        Restored,
        LossyRestored,
        PlanChanged,
        PlanChangeWithheld,
        Degraded,
        ReplicasDisagreed,
        LastBoundarySealed,
        TrainerFailed,
        RunEnded,
    )
}


def event_data(event: Event) -> dict[str, Any]:
    """JSON data of an event, with its kind under "event"."""
    data: dict[str, Any] = {"event": type(event).__name__}
    data.update(to_data(event))
    return data


def event_from_data(data: dict[str, Any], *, where: str = "telemetry") -> Event:
    """The event written by `event_data`.  Raises ConfigError for an unknown kind or field."""
    rest = dict(data)
    name = rest.pop("event", None)
    if not isinstance(name, str) or name not in EVENTS:
        raise ConfigError(
            f"{where}: unknown event {name!r}: another version of autockpt wrote it; read the run "
            "with that version"
        )
    return from_data(EVENTS[name], rest, where=where)


PIECE_BYTES = 2**18
"""A log is read from its end in pieces of this size."""


def newest_lines(
    file: BinaryIO, *, most_bytes: int, begin: int = 0, naming: Collection[str] = ()
) -> Iterator[bytes]:
    """Yield the whole lines at the end of a log, the newest first.

    Only its last `most_bytes` are read, and nothing before `begin`.  With `naming` only lines that
    hold one of these names of events, which costs a search of the bytes and no parsing.
    """
    names = [f'"{name}"'.encode() for name in naming]
    at = file.seek(0, 2)
    least = max(begin, at - most_bytes)
    cut = b""
    while at > least:
        start = max(least, at - PIECE_BYTES)
        file.seek(start)
        text = file.read(at - start) + cut
        at, cut = start, b""
        if start > begin:
            cut, newline, text = text.partition(b"\n")
            if not newline:
                continue
        if names and not any(name in text for name in names):
            continue
        for line in reversed(text.split(b"\n")):
            if line and (not names or any(name in line for name in names)):
                yield line


def columns() -> tuple[str, ...]:
    """Every field of every event, in a stable order: the columns of the CSV."""
    names: dict[str, None] = {"event": None}
    for kind in EVENTS.values():
        names.update((f.name, None) for f in fields(kind))
    return tuple(names)
