"""Instructions of a coordinator: what to write into the directory and what to delete."""

from dataclasses import dataclass

from autockpt.executors.protocol.messages.facts import Health, Incarnation, Record
from autockpt.values.generation import Generation


@dataclass(frozen=True, slots=True, kw_only=True)
class ClaimTerm:
    """Claim the directory.  Answer: TermClaimed or TermRefused.

    `term` None: create the next term file.  A number: the same incarnation goes on with a new
    keeper; answer TermClaimed with that number if it is still the highest, else TermRefused.
    Refused as well if this keeper has let another incarnation in meanwhile: a claim that comes late
    would fence what replaced it.
    """

    incarnation: Incarnation
    term: int | None
    after: int = 0
    """Newest term that any keeper knows, where an emptied directory does not: this is newer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WithdrawClaim:
    """Make sure that no claim ordered so far will ever stand.  Answer: ClaimWithdrawn.

    No answer where a claim above `term` stands already, or may be standing: it is being linked.
    """

    incarnation: Incarnation
    term: int
    """Newest that this keeper claimed, as far as the coordinator knows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteDecision:
    """Write decisions/t-<term> (replacing an older attempt), fsync.  Answer: Decision*.

    Check for a newer term file before *and* after, and answer `fenced` if there is one.  Then look
    whether the generation was marked as suspect since the directory was claimed.  Then trash what
    earlier terms left without a COMMIT.
    """

    term: int
    attempt: int
    generation: Generation | None
    """None: from scratch."""
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteCommit:
    """Check the term, write COMMIT, fsync, link, fsync, check the term *again*.

    Answer: CommitWritten, or CommitFailed (fenced if either check found a newer term).
    """

    generation: Generation
    step: int
    world_size: int
    parent: Generation | None
    records: tuple[Record, ...]
    """In rank order, [world_size]."""
    layout_digests: tuple[str, ...]
    health: Health


@dataclass(frozen=True, slots=True, kw_only=True)
class TrashGeneration:
    """Move the generation's directory to trash, *unless it contains a COMMIT*; no answer."""

    generation: Generation
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyGeneration:
    """Read the committed generation back in the background.  Answer: GenerationVerified."""

    generation: Generation


@dataclass(frozen=True, slots=True, kw_only=True)
class DeleteGenerations:
    """Delete these commits (guarded; term checked first; COMMIT unlinked first); no answer."""

    term: int
    generations: tuple[Generation, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class DropOptimizerState:
    """Write the shards of a commit again with weights only (guarded; term checked last).

    New shards stand before the COMMIT that names them replaces the old one; old shards go then.
    Answer: OptimizerStateDropped.
    """

    term: int
    generation: Generation


@dataclass(frozen=True, slots=True, kw_only=True)
class MarkEverCommitted:
    """Leave a durable mark that something was durable once; repeated is harmless."""

    term: int
