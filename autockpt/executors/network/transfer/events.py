"""How transfers end, told on the pool's own threads: facts, no decision.

A fetch ends with exactly one of Fetched and TransferFailed.  A connection that serves one ends with
one of Served and TransferFailed.  A connection that ends earlier may give ConnectionRefused.
"""

from dataclasses import dataclass
from typing import Literal

from autockpt.executors.image.container import ImageIndex

Direction = Literal["fetch", "serve"]

Fault = Literal["refused", "silent", "broken", "protocol", "corrupt", "aborted", "internal"]
"""refused: by the owner at either end, with the reason; silent: a deadline passed; broken: the
connection ended.  protocol: it sent something outside the protocol; corrupt: bytes do not match;
aborted: by the owner.  internal: a bug or an owner's callback that raised."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferEvent:
    """The end of a transfer."""

    node: int
    """At the other end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fetched(TransferEvent):
    """All wanted chunks are in the destination, verified against the root that was asked for."""

    index: ImageIndex
    nbytes: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Served(TransferEvent):
    """Another node fetched chunks from us and has verified them."""

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
    """A client connected and was sent away before a transfer began; at most one a second."""

    where: str
    reason: str


FetchEnd = Fetched | TransferFailed
ServeEnd = Served | TransferFailed
