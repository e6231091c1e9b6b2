"""The world around the protocol: trainers, memory, storage, network; everything but the rules.

Deterministic: no clock, no thread; one `random.Random` decides.  Events are small on purpose: the
last vote, the check of the epoch, the link, the fsync and the second check are separate moments,
because the bugs live between them.
"""

from collections import deque
from dataclasses import dataclass, field
from random import Random
from typing import Any

from autockpt.executors.protocol import messages as m
from autockpt.executors.protocol.coordinator import CoordinatorProtocol
from autockpt.executors.protocol.deadlines import Deadlines
from autockpt.executors.protocol.node import NodeProtocol
from autockpt.values.generation import Generation
from autockpt.values.goal import Retention

DEADLINES = Deadlines(
    resend_s=4.0,
    attach_s=200.0,
    knock_s=15.0,
    inventory_s=40.0,
    restore_s=120.0,
    seal_s=30.0,
    commit_s=60.0,
    plan_s=15.0,
    plan_margin_steps=2,
    persist_attempts=2,
)


class Violation(AssertionError):
    """An oracle was broken."""


@dataclass(slots=True)
class Content:
    """Bytes of one shard: which state, of which rank, and where they came from."""

    generation: Generation
    history: int
    rank: int
    step: int = 0
    sealed: bool = False
    corrupt: bool = False
    writer: "Trainer | None" = None
    shard: m.HeldShard | None = None


@dataclass(slots=True, eq=False)
class Trainer:
    """One trainer process."""

    rank: int
    node: int
    incarnation: m.Incarnation
    alive: bool = True
    running: bool = False
    refused: bool = False
    final: bool = False
    """Refused, and trying again will not help."""
    epoch: int | None = None
    seq: int = 0
    step: int = 0
    history: int = 0
    loaded: Content | None = None
    order: m.RestoreShard | None = None
    writing: tuple[Generation, int] | None = None
    """(generation, slot) of the snapshot in flight."""
    told_discard: bool = False
    held: int = 0
    """Plan version prepared and without a verdict."""
    hold_step: int = 0
    """Last step it may stand at without a verdict."""
    decided: dict[int, int] = field(default_factory=dict)
    """Apply step by plan version."""
    plans: dict[int, int] = field(default_factory=dict)
    """Step at which each version was applied."""


@dataclass(slots=True, eq=False)
class Node:
    """One machine: its memory and, while it lives, its keeper."""

    index: int
    slots: dict[tuple[int, int], Content | None] = field(default_factory=dict)
    """(rank, slot) -> content; survives while keeper or any trainer lives."""
    keeper: "Keeper | None" = None


@dataclass(slots=True, eq=False)
class Keeper:
    """One keeper process: the two machines and the work its runtime has in hand."""

    node: int
    machine: NodeProtocol
    coordinator: CoordinatorProtocol
    jobs: list[list[Any]] = field(default_factory=list)
    """[kind, stage, payload]: storage work, one small stage per action."""
    inbox: deque[m.NodeEvent] = field(default_factory=deque)
    """Events from local trainers, in order."""
    names: set[tuple[int, Generation, int]] = field(default_factory=set)
    """Shard file names this keeper has asked for."""


@dataclass(slots=True)
class Commit:
    """One COMMIT on disk."""

    entry: m.CatalogueEntry
    synced: bool = False


@dataclass(slots=True)
class Disk:
    """The shared directory."""

    epoch: int = 0
    decisions: dict[int, Generation | None] = field(default_factory=dict)
    commits: dict[Generation, Commit] = field(default_factory=dict)
    files: dict[str, Content] = field(default_factory=dict)
    trashed: set[str] = field(default_factory=set)
    marked: bool = False


class Runtime:
    """Storage habits of a keeper that the rules rely on; mutants break them."""

    def fenced_before_commit(self, disk: Disk, epoch: int) -> bool:
        """The check before COMMIT is linked."""
        return disk.epoch != epoch

    def fenced_after_commit(self, disk: Disk, epoch: int) -> bool:
        """The check before anybody is told."""
        return disk.epoch != epoch


@dataclass(slots=True)
class Rules:
    """Which machines play; the mutants swap one."""

    node: type[NodeProtocol] = NodeProtocol
    coordinator: type[CoordinatorProtocol] = CoordinatorProtocol
    runtime: type[Runtime] = Runtime


class Oracle:
    """What must hold; the world tells it what really happened."""

    def __init__(self) -> None:
        self.history: dict[Generation, int] = {}
        self.durable: set[Generation] = set()
        self.memory: set[Generation] = set()
        self.announced: set[Generation] = set()
        """Called memory-committed at least once."""
        self.ever = False
        self.decided: dict[int, Generation | None] = {}
        self.basis: dict[int, dict[int, int | None]] = {}
        """What each claimed epoch could continue when it read the directory."""
        self.applied: dict[tuple[m.Incarnation, int], int] = {}
        self.resumed = 0
        self.commits = 0

    def fail(self, text: str) -> None:
        """An oracle is broken."""
        raise Violation(text)

    def lineage(self, tip: int) -> dict[int, int | None]:
        """Newest eligible seq by epoch, from the decisions as they were really written."""
        limits: dict[int, int | None] = {tip: None}
        while self.decided.get(tip) is not None:
            parent = self.decided[tip]
            assert parent is not None
            limits[parent.epoch], tip = parent.seq, parent.epoch
        return limits

    def eligible(self, before: int) -> dict[int, int | None]:
        """The lineage that epoch `before` may continue."""
        tips = [epoch for epoch in self.decided if epoch < before]
        return self.lineage(max(tips)) if tips else {}

    @staticmethod
    def on(generation: Generation, limits: dict[int, int | None]) -> bool:
        """`generation` lies on that lineage."""
        if generation.epoch not in limits:
            return False
        limit = limits[generation.epoch]
        return limit is None or generation.seq <= limit

    def trained(self, generation: Generation, history: int) -> None:
        """A trainer reached this boundary: all must get there with the same past."""
        if self.history.setdefault(generation, history) != history:
            self.fail(f"{generation} has two histories: timelines were mixed")

    def decision(self, epoch: int, parent: Generation | None, *, asked: bool) -> None:
        """The decision of `epoch` stands on disk."""
        if not asked:
            self._check_parent(epoch, parent)
        if parent is not None and not self.on(parent, self.basis[epoch]):
            self.fail(f"epoch {epoch} restores {parent}, which was abandoned")
        self.decided[epoch] = parent

    def _check_parent(self, epoch: int, parent: Generation | None) -> None:
        limits = self.basis[epoch]
        for name, promised in (("durable", self.durable), ("memory-committed", self.memory)):
            due = max((g for g in promised if self.on(g, limits)), default=None)
            if due is not None and (parent is None or parent < due):
                self.fail(f"epoch {epoch} restores {parent}, but {due} was {name}")
        if parent is None and self.ever:
            self.fail(f"epoch {epoch} starts from scratch although something was committed")

    def loaded(self, epoch: int, generation: Generation, content: Content | None) -> None:
        """A rank was told to train on with this content."""
        if self.decided.get(epoch) != generation:
            self.fail(f"rank resumed {generation}, decided was {self.decided.get(epoch)}")
        if content is None or content.generation != generation:
            self.fail(f"rank resumed {generation} but holds {content}")
        assert content is not None
        if content.history != self.history[generation]:
            self.fail(f"{generation} was restored with another past")
        self.resumed += 1

    def plan(self, trainer: Trainer, version: int) -> None:
        """A trainer switched plan at its present step."""
        key = (trainer.incarnation, version)
        if self.applied.setdefault(key, trainer.step) != trainer.step:
            self.fail(f"plan {version} applied at {self.applied[key]} and {trainer.step}")

    def passed(self, trainer: Trainer) -> None:
        """A trainer passes its present step: it must have made every switch others made here."""
        for (incarnation, version), step in self.applied.items():
            if incarnation == trainer.incarnation and step <= trainer.step:
                if version not in trainer.plans:
                    self.fail(f"rank {trainer.rank} passed step {step} without plan {version}")

    def deleted(self, disk: Disk, doomed: tuple[Generation, ...], keep: int) -> None:
        """Commits are about to be deleted."""
        limits = self.lineage(max(self.decided)) if self.decided else {}
        sound = [
            g
            for g, commit in disk.commits.items()
            if commit.synced and commit.entry.health == "good" and self.on(g, limits)
        ]
        left = [g for g in sound if g not in doomed]
        if sound and max(sound) in doomed:
            self.fail(f"retention deletes the last durable {max(sound)}")
        if len(left) < min(keep, len(sound)):
            self.fail(f"retention leaves {len(left)} of {len(sound)}, keep_last is {keep}")
        self.durable -= set(doomed)


def retention(rng: Random) -> Retention:
    """A policy for one seed."""
    return Retention(keep_last=rng.choice((1, 1, 2, 3)))
