"""Events at a coordinator: results of its claims and of its writes in the directory."""

from dataclasses import dataclass

from autockpt.executors.protocol.messages.facts import (
    CatalogueEntry,
    Health,
    Incarnation,
    Record,
    TermParent,
)
from autockpt.values.generation import Generation


@dataclass(frozen=True, slots=True, kw_only=True)
class TermClaimed:
    """The directory is ours under `term`.  The catalogue was read *after* the claim stood."""

    incarnation: Incarnation
    term: int
    committed: tuple[CatalogueEntry, ...]
    """Every valid COMMIT on disk, of any term, made durable (fsync) before it was listed."""
    parents: tuple[TermParent, ...] = ()
    """Every decision record on disk, the newest attempt per term."""
    ever_committed: bool = False
    """Some generation was once durable, even if it is gone now."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClaimWithdrawn:
    """No claim of this keeper stands above the term that WithdrawClaim named, and none will."""

    incarnation: Incarnation


@dataclass(frozen=True, slots=True, kw_only=True)
class DirectoryRenewed:
    """The directory was empty and was made again under the claim of `term`: its checkpoints are
    gone."""

    term: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DirectoryGone:
    """The claim of `term` is gone, and the directory cannot be made again now."""

    term: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TermRefused:
    """Another run that lives holds the directory, or it cannot be read."""

    incarnation: Incarnation
    reason: str
    """Names the holder, for people."""
    failed: bool = False
    """No run holds it: the storage did not take the claim."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DecisionWritten:
    """The decision record stands on disk, fsynced."""

    term: int
    attempt: int
    suspect: bool = False
    """The generation has that mark by now."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DecisionFailed:
    """The decision record could not be written, or a newer term exists (`fenced`)."""

    term: int
    attempt: int
    reason: str
    fenced: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class CommitWritten:
    """COMMIT is linked, fsynced, and the term was *still* the highest one afterwards."""

    generation: Generation
    created_s: float = 0.0
    """Seconds since 1970."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CommitFailed:
    """COMMIT may or may not stand on disk; it must not be called durable."""

    generation: Generation
    reason: str
    fenced: bool = False
    """True: a newer term exists, this coordinator must stop."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerStateDropped:
    """The COMMIT of a generation names shards that hold weights only, or its drop has failed."""

    term: int
    """Of the order."""
    generation: Generation
    records: tuple[Record, ...] = ()
    """Of the new shards; empty: the generation is as it was."""
    reason: str = ""
    """Why it failed."""
    later: bool = False
    """Nothing was tried, for want of room; the next save may find some."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationVerified:
    """A committed generation was read back: all digests match (`ok`), or not."""

    generation: Generation
    ok: bool
    health: Health = "good"
    """Verdict on all the numbers in it; a seal may have looked at a part of them."""
    detail: str = ""
