"""What a pool tells its owner, on its own threads: facts, one event each, no decision.

Every transfer ends with exactly one of ReplicaSealed, ReplicaReceived, Fetched, Served and
TransferFailed; a connection that never became one may end as ConnectionRefused.
"""

from dataclasses import dataclass
from typing import Literal

from autockpt.executors.image import ImageIndex
from autockpt.executors.transfer.frames import Subject

Direction = Literal["push", "receive", "fetch", "serve"]

Fault = Literal["refused", "silent", "broken", "protocol", "corrupt", "aborted", "internal"]
"""refused: by the owner at either end, with the reason; silent: a deadline passed; broken: the
connection ended; protocol: it said something outside the protocol; corrupt: bytes or root do not
match; aborted: by the owner; internal: a bug or an owner's callback that raised."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferEvent:
    """Names the transfer."""

    transfer: str
    node: int
    """At the other end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkReceived(TransferEvent):
    """A chunk is in the destination, its digest verified."""

    number: int
    nbytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaReceived(TransferEvent):
    """A pushed image is whole and verified; the destination was sealed before."""

    subject: Subject
    index: ImageIndex
    nbytes: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaSealed(TransferEvent):
    """What we pushed stands sealed at the other end."""

    root: str
    nbytes: int
    seconds: float
    held_s: float
    """Of these the streams waited for the snapshot and the gate (mean over streams)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fetched(TransferEvent):
    """All wanted chunks are in the destination, verified against the root that was asked for."""

    index: ImageIndex
    nbytes: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Served(TransferEvent):
    """Somebody fetched chunks from us and has verified them."""

    root: str
    nbytes: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferFailed(TransferEvent):
    """Nothing of the transfer counts; its memory is not touched any more."""

    direction: Direction
    fault: Fault
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionRefused:
    """Somebody connected and was sent away before a transfer began; at most one a second."""

    where: str
    reason: str


Event = (
    ChunkReceived | ReplicaReceived | ReplicaSealed | Fetched | Served | TransferFailed
    | ConnectionRefused
)  # fmt: skip
