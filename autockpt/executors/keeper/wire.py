"""Small framed messages over a Unix socket, with file descriptors where memory is handed over.

Trainer and keeper share nothing but memory and this: 4 bytes of length, then JSON {"type", "body"}
of a frozen dataclass.  No pickle; unknown types are refused; a frame is at most 16 MiB.  Protocol
events and instructions travel as they are, so the state machine sees what was sent.
"""

import array
import contextlib
import dataclasses
import json
import os
import socket
import struct
from dataclasses import dataclass
from typing import Any

from autockpt import new_files
from autockpt.executors.protocol import messages as protocol
from autockpt.values.errors import ConfigError, CorruptCheckpointError, ProtocolError
from autockpt.values.generation import Generation
from autockpt.values.record import from_data, parse_json, to_data

MAX_FRAME_BYTES = 16 * 2**20
MAX_DESCRIPTORS = 64
WIRE_VERSION = 21


@dataclass(frozen=True, slots=True, kw_only=True)
class Hello:
    """First message of a trainer; carries the descriptor of its board and of slots it holds."""

    wire_version: int
    pid: int
    rank: int
    attach: protocol.TrainerAttached
    launcher_pid: int
    """The process that started it; its own pid if no launcher did."""
    slots_held: int
    """Slot descriptors that come with this message, behind the board's; 0 at the first start."""
    slot_chunk_bytes: int
    slot_image_bytes: int
    """Image capacity of the slots held."""
    control_host: str = ""
    """Address where the keeper listens for the keepers of other nodes; empty: there are none."""
    launched: bool = False
    """By `autockpt run`, which writes itself how the run ended."""
    awaits: bool = False
    """Its launcher ends with the job: while that lives, this rank may come again."""
    account: tuple[tuple[str, str], ...] | None = None
    """Variables of the environment that name the account of an object store: the keeper asks the
    store with them from now on.  None: the checkpoints are in no store."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotsWanted:
    """The layout is known: allocate `slots` images of this size (replaces smaller ones)."""

    rank: int
    image_bytes: int
    chunk_bytes: int
    slots: int
    limit_bytes: int | None = None
    may_stream: bool = False
    """Where no image fits, it may go to storage through a window."""
    swing_bytes: int = 0
    """By so much the trainer has used more memory than now."""
    more: bool = False
    """It has slots of this size and keeps them; one more is wanted if the host has room by now."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotsGiven:
    """Comes with one descriptor per slot."""

    rank: int
    image_bytes: int
    slots: int
    chunk_bytes: int
    """Chunk size of the digests; a trainer hands it back when a new keeper adopts the slots."""
    window_bytes: int = 0
    """The one slot is a window: so much of an image may be in memory; 0: images are held whole."""
    blocking: bool = False
    """The window is so small that the training waits until an image is through."""
    note: str = ""
    """Why it is less than was asked for; empty: it is not."""
    run_id: str = ""
    """The run whose checkpoints they take; a keeper in an emptied directory learns it so."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NeighbourSlots:
    """Slots of the node's other ranks, of a generation about to be restored from memory.

    Comes with one descriptor per rank, ahead of the order to restore.
    """

    rank: int
    generation: Generation
    ranks: tuple[int, ...]
    image_bytes: tuple[int, ...]
    """Image capacity of each slot."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadingMemory:
    """Comes with the descriptor of memory in which the readers of an attempt read together.

    Ahead of the order to restore; not at all when there is no memory for it.
    """

    rank: int
    term: int
    attempt: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GatheringBegan:
    """The shards to gather; sent ahead of the order to restore."""

    rank: int
    layouts: tuple[str, ...]
    """By shard its layout digest, [ranks that wrote it]; empty where only its file has it."""
    near: tuple[int, ...]
    """Shards in the memory of this node."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunksWanted:
    """Bring chunks of a shard that is gathered into memory of this node; answer: ChunksLent."""

    rank: int
    term: int
    attempt: int
    shard: int
    chunks: tuple[int, ...]
    number: int
    """The number of this request of the rank."""
    elsewhere: bool = False
    """Not from where they came before: that is damaged."""
    stored: bool = False
    """Of the shard in the object store, which one node reads for all."""
    alone: bool = False
    """This node reads them: no other one needs them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunksLent:
    """They are in the memory that comes with it, behind whose image a trailer describes it."""

    rank: int
    number: int
    image_bytes: int = 0
    """Capacity of the image in that memory."""
    node: int = 0
    """Whose memory they were in."""
    refusal: str = ""
    """Why there are none; then no descriptor comes."""
    lost: int | None = None
    """The rank of a refused shard that no memory has whole: another request would be in vain."""


class LostShardError(CorruptCheckpointError):
    """No memory has a shard whole."""

    def __init__(self, message: str, shard: int) -> None:
        super().__init__(message)
        self.shard = shard


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotsRefused:
    """There is not enough memory; the reason names the binding limit."""

    rank: int
    reason: str
    passing: bool = False
    """The host has no room now; else the policy would have to allow more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotBegan:
    """The copy into the granted slot has begun: poll the board and follow it."""

    rank: int
    generation: Generation
    step: int
    slot: int
    image_bytes: int
    boundary_end: int
    layout_digest: str
    writers: int
    chunk_bytes: int
    direct_io: bool
    streaming: bool
    codec: str
    class_ranges: str = "[]"
    """[[start, stop, kind code, group], ...] that the codec applies to; empty: everything.  As
    text: hundreds of them are the same at every boundary, where the training waits."""
    chain: int = 0
    """Generations that a reader may need beside this one; 0: the save stands alone."""
    at_s: float = 0.0
    metrics: str = ""
    """Reported values by name, as the text of a JSON object; "": there are none."""
    across_nodes: bool = False
    """Ranks of other nodes store a part of what this rank holds."""

    @property
    def ranges(self) -> tuple[tuple[int, ...], ...]:
        """`class_ranges` as numbers.  Raises ValueError; a received message has sound ones."""
        rows = parse_json(self.class_ranges)
        if not isinstance(rows, list) or not all(_is_range(row) for row in rows):
            raise ValueError(f"class_ranges: expected rows of four counts, got {rows!r:.100}")
        return tuple(tuple(row) for row in rows)


def _is_range(row: Any) -> bool:
    return isinstance(row, list) and len(row) == 4 and all(type(n) is int and n >= 0 for n in row)


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotCopied:
    """Every byte is in the slot and proven unchanged."""

    rank: int
    generation: Generation
    replicas: tuple[protocol.ReplicaProof, ...] = ()
    """The state its rank shares with others of the node, to be compared with their reports."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotTorn:
    """The snapshot is worthless (state changed, copy failed, plan changed before it began)."""

    rank: int
    generation: Generation
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordsGiven:
    """Comes with one descriptor per record of boundaries, as in `saving.boundary_record`."""

    rank: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SealBoundary:
    """Other ranks are dead: save the boundary whose state this rank has, and theirs.

    Comes with one descriptor per rank in `ranks`: its slot, which holds its boundary group.
    """

    rank: int
    generation: Generation
    ranks: tuple[int, ...]
    """Dead ranks; a survivor that holds all that one stored writes it."""
    replicas: tuple[str, ...]
    """By dead rank, the digest of its shared tensors, as in its record."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BoundarySealed:
    """Answer to SealBoundary, behind the messages of the rank's own snapshot."""

    rank: int
    generation: Generation
    ranks: tuple[int, ...] = ()
    """Dead ranks whose shards this one wrote."""
    replicas: tuple[protocol.ReplicaProof, ...] = ()
    """For these shards, as in SnapshotCopied."""
    refusal: str = ""
    """Why nothing was sealed; empty: it was."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerResumed:
    """The restored state is in place; for telemetry and the failure log."""

    rank: int
    term: int
    """That goes on now."""
    generation: Generation | None
    step: int
    source: str
    bytes: int
    restore_s: float
    came_s: float | None = None
    """From the launcher's decision to restart until the state was in place; None: not known.
    Where it `begins_launch`: from the birth of the process."""
    begins_launch: bool = False
    """A person or a scheduler started the job anew, and nothing here timed their part."""
    discards: bool = False
    """It leaves newer iterations on purpose: none of them is lost."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerFailing:
    """The script's own exception is ending this trainer: a failure, and none of a machine."""

    rank: int
    error: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerLeaving:
    """The training ended by itself or on a signal: no failure."""

    rank: int
    step: int
    reason: str
    note: str = ""
    """The note about it in status.json, beside the reason."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReceiveShard:
    """Receive the image of rank `sender` through the devices; comes with the memory's descriptor.

    Answers: ReceiverListens, then ExchangeEnded.
    """

    rank: int
    exchange: str
    sender: int
    image_bytes: int
    chunk_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ReceiverListens:
    """The trainer can be called."""

    rank: int
    exchange: str
    address: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SendShard:
    """Send the image in a slot to the trainer that listens there.  Answer: ExchangeEnded."""

    rank: int
    exchange: str
    receiver: int
    """Its rank."""
    address: str
    slot: int
    image_bytes: int
    chunk_bytes: int
    bytes_per_s: float
    """Most that may leave; 0: no limit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AbandonExchange:
    """The exchange is not needed any more: stop reading the slot, or writing the memory."""

    rank: int
    exchange: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ExchangeEnded:
    """All chunks have left, or have come."""

    rank: int
    exchange: str
    reason: str = ""
    """Why not; empty: they have."""
    digests: tuple[str, ...] = ()
    """Digests of the chunks that came, as they stand in memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CopiesArrived:
    """Keeper to trainers of its node: other nodes hold copies of every shard of a checkpoint."""

    generation: Generation
    bytes: int
    """That came to this node since the message before,"""
    moving_s: float
    """and how long some of them were on their way."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RateWanted:
    """The plan in force lets so many bytes a second leave for other nodes; 0: no limit."""

    rank: int
    bytes_per_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StateSuspect:
    """Keeper to trainers of its node: a generation holds NaN."""

    reason: str
    """The generation, the rank and tensor, and the consequence."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StorageStands:
    """A sentence for a person: checkpoints do not reach the disk, or do so again; a rank is
    stuck."""

    rank: int
    text: str
    launcher_tells: bool = False
    """A launcher of ours says it as well."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StatusWanted:
    """A launcher or tool asks how things stand."""

    leave_when_drained: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Status:
    """Answer to StatusWanted."""

    pid: int
    term: int
    trainers: tuple[int, ...]
    memory_committed: str
    durable: str
    draining: bool
    slots_bytes: int
    protected: str = ""
    """Newest generation that survives the loss of a node."""
    run_id: str = ""
    """As in `SlotsGiven`."""
    peers: tuple[int, ...] = ()
    """Nodes whose keepers are connected to this one."""
    lost_peers: tuple[int, ...] = ()
    """Nodes whose keepers were connected, and have not come again for half a second."""
    claimed_by: protocol.Incarnation | None = None
    """Start of the job that the directory is claimed for; None: this keeper has not claimed it."""
    sealing: bool = False
    """A rank died, and the others are to live until their last boundary is sealed."""
    checkpoints: str = ""
    """Where this keeper's checkpoints go."""
    wire_version: int = 0
    """Of its messages; 0: of a keeper that did not say it yet."""
    is_orphan: bool = False
    """No trainer is connected, and no launcher lives that would start one."""
    inode: tuple[int, int] | None = None
    """Device and inode of its run directory; None: it does not know."""


_OWN = (
    Hello, SlotsWanted, SlotsGiven, NeighbourSlots, ReadingMemory, GatheringBegan, ChunksWanted,
    ChunksLent, SlotsRefused, SnapshotBegan, SnapshotCopied, SnapshotTorn, TrainerResumed,
    RecordsGiven, SealBoundary, BoundarySealed,
    TrainerFailing, TrainerLeaving, ReceiveShard, ReceiverListens, SendShard, AbandonExchange,
    ExchangeEnded, CopiesArrived, RateWanted, StateSuspect, StatusWanted, StorageStands, Status,
)  # fmt: skip
_PROTOCOL = (
    protocol.SaveRequested, protocol.ShardVerified, protocol.ShardBad,
    protocol.BreakpointRequested, protocol.PlanPrepared, protocol.PlanLate, protocol.PlanProposed,
    protocol.GrantSlot, protocol.StartPersist, protocol.SkipSave, protocol.DiscardSnapshot,
    protocol.AnnounceDispute, protocol.AnnounceMemoryCommitted, protocol.AnnounceDurable,
    protocol.AnnounceDropped,
    protocol.AttachRefused, protocol.FenceTrainer, protocol.RestoreShard, protocol.RestoreRefused,
    protocol.StartFresh, protocol.Resume, protocol.PreparePlan, protocol.ApplyPlan,
    protocol.AbortPlan,
)  # fmt: skip
_KINDS: dict[str, type] = {kind.__name__: kind for kind in (*_OWN, *_PROTOCOL)}

_LENGTH = struct.Struct("!I")
_to_text = json.JSONEncoder(separators=(",", ":")).encode


class Connection:
    """One end of a trainer-keeper socket; `send` is thread safe only behind the caller's lock."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self._received = bytearray()
        self._descriptors: list[int] = []

    def send(self, message: Any, descriptors: tuple[int, ...] = ()) -> None:
        """Sends a whole frame.  Raises OSError when the peer is gone."""
        body: dict[str, Any] = {"type": type(message).__name__, "body": to_data(message)}
        if descriptors:
            body["descriptors"] = len(descriptors)
        text = _to_text(body).encode()
        frame = _LENGTH.pack(len(text)) + text
        if descriptors:
            rights = array.array("i", descriptors)
            sent = self.sock.sendmsg([frame], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)])
            frame = frame[sent:]
        if frame:
            self.sock.sendall(frame)

    def receive(self) -> list[tuple[Any, list[int]]]:
        """Reads once and returns the whole messages so far, each with its descriptors.

        Raises ProtocolError for a malformed frame and EOFError when the peer closed; descriptors
        without a receiver are closed.
        """
        size = socket.CMSG_SPACE(MAX_DESCRIPTORS * 4)
        data, ancillary, _, _ = self.sock.recvmsg(2**18, size, socket.MSG_CMSG_CLOEXEC)
        for level, kind, payload in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                got = array.array("i")
                got.frombytes(payload[: len(payload) - len(payload) % got.itemsize])
                self._descriptors.extend(new_files.clear_of_scripts(fd) for fd in got)
        if not data:
            raise EOFError("peer closed the connection")
        if len(self._descriptors) > MAX_DESCRIPTORS:
            raise ProtocolError(f"{len(self._descriptors)} descriptors with one message")
        self._received += data
        messages: list[tuple[Any, list[int]]] = []
        try:
            while (frame := self._next()) is not None:
                message, count = frame
                if count > len(self._descriptors):
                    raise ProtocolError(f"{count} descriptors announced, fewer came")
                # By number: the kernel hands them out with the bytes of earlier messages too.
                taken = self._descriptors[:count]
                del self._descriptors[:count]
                messages.append((message, taken))
        except ProtocolError:
            for _, taken in messages:
                self._descriptors += taken
            self._close_descriptors()
            raise
        return messages

    def close(self) -> None:
        """Close the socket and untaken descriptors; scripts may have closed them before."""
        self._close_descriptors()
        with contextlib.suppress(OSError):
            self.sock.close()

    def _close_descriptors(self) -> None:
        for fd in self._descriptors:
            with contextlib.suppress(OSError):
                os.close(fd)
        self._descriptors.clear()

    def _next(self) -> tuple[Any, int] | None:
        if len(self._received) < _LENGTH.size:
            return None
        (length,) = _LENGTH.unpack_from(self._received)
        if length > MAX_FRAME_BYTES:
            raise ProtocolError(f"a frame of {length} bytes; at most {MAX_FRAME_BYTES} are allowed")
        end = _LENGTH.size + length
        if len(self._received) < end:
            return None
        text = bytes(self._received[_LENGTH.size : end])
        del self._received[:end]
        return _decode(text)


def decode(text: bytes) -> Any:
    """The message in a frame.  Raises ProtocolError."""
    return _decode(text)[0]


def _decode(text: bytes) -> tuple[Any, int]:
    """(message, descriptors that belong to it)."""
    try:
        data = parse_json(text)
        kind = _KINDS[data["type"]]
        count = data.get("descriptors", 0)
        if type(count) is not int or not 0 <= count <= MAX_DESCRIPTORS:
            raise ValueError(f"{count!r} descriptors")
        message: Any = from_data(kind, data["body"], where=data["type"])
        if isinstance(message, SnapshotBegan):
            _ = message.ranges
        return message, count
    except (ValueError, KeyError, TypeError, ConfigError) as error:
        raise ProtocolError(f"malformed message: {error!r}") from None


def describe(message: Any) -> str:
    """A message for the log."""
    fields = {f.name: getattr(message, f.name) for f in dataclasses.fields(message)}
    return f"{type(message).__name__}({', '.join(f'{k}={v}' for k, v in fields.items())[:300]})"
