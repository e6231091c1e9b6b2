"""What must hold in every run, checked against what really happened.

The oracle knows the truth the machines cannot know: which training history every generation had,
which promises (memory-committed, durable) were given and which of them a loss beyond tolerance has
lifted.  It computes the lineage by itself.
"""

from dataclasses import dataclass

from autockpt.executors.protocol import messages as m
from autockpt.values.generation import Generation
from tests.simulation.actors import Content, Disk, Node, Trainer


class Violation(AssertionError):
    """An oracle was broken."""


@dataclass(slots=True, kw_only=True)
class Promise:
    """A protected generation: what of it is still there."""

    world: int
    copies: set[tuple[int, int]]
    """(rank, node) that have the shard."""
    parities: set[tuple[int, int]]
    """(rank, node) that have the parity which the rank holds."""
    sets: tuple[tuple[frozenset[int], int], ...]
    """Ranks of every parity set, and how many it may lose."""

    def recoverable(self) -> set[int]:
        """Ranks with a copy, or with a set of which enough members have shard and parity."""
        shards = {rank for rank, _ in self.copies}
        left = shards & {rank for rank, _ in self.parities}
        enough = (ranks for ranks, losses in self.sets if len(ranks - left) <= losses)
        return shards.union(*enough)


class Oracle:
    """What must hold; the world tells it what really happened."""

    def __init__(self) -> None:
        self.history: dict[Generation, int] = {}
        self.durable: set[Generation] = set()
        self.memory: set[Generation] = set()
        self.announced: set[Generation] = set()
        """Called memory-committed at least once."""
        self.protected: dict[Generation, Promise] = {}
        """Of the newest one called protected."""
        self.wanted: dict[Generation, int] = {}
        """Losses of memory so far, when copies were first asked for."""
        self.protections: set[Generation] = set()
        """Called protected at least once."""
        self.ever = False
        self.nan: set[Generation] = set()
        """Numbers in some shard of it are not sound."""
        self.seen_nan: set[Generation] = set()
        """Some seal has seen it."""
        self.decayed: set[Generation] = set()
        """A bit of it flipped in a slot after the seal; nobody sees that before it is read."""
        self.decided: dict[int, Generation | None] = {}
        self.parts: dict[int, list[m.TermParent]] = {}
        """By term where its trainers began anew within it, in order."""
        self.basis: dict[int, dict[int, Generation | None]] = {}
        """What each claimed term could continue when it read the directory."""
        self.emptied: dict[int, bool] = {}
        """Whether it had lost decision records by then."""
        self.known: dict[int, bool] = {}
        """Whether something had ever been durable by then; later ones are of the replaced."""
        self.marked: dict[int, set[Generation]] = {}
        """What the directory called suspect when each claimed term read it, or looked again."""
        self.applied: dict[tuple[m.Incarnation, int], int] = {}
        self.resumed = 0
        self.commits = 0

    def fail(self, text: str) -> None:
        """An oracle is broken."""
        raise Violation(text)

    def begin_anew(self, term: int, running: list[int | None], nodes: list[Node]) -> None:
        """Nobody who was asked knows that these terms were: then nothing of them may be left."""
        contents = [c for node in nodes for c in (*node.slots.values(), *node.replicas.values())]
        # What nobody completes any more is nothing.
        left = {c.generation.term for c in contents if c is not None and (c.sealed or c.writer)}
        if any(old >= term for old in (*left, *(e for e in running if e is not None))):
            self.fail(f"term {term} is claimed again, and something of it is left")
        tables = (
            self.decided, self.parts, self.basis, self.known, self.marked, self.emptied,
        )  # fmt: skip
        for table in tables:
            for old in [old for old in table if old >= term]:
                del table[old]
        for told in (self.history, self.wanted):
            for generation in [g for g in told if g.term >= term]:
                del told[generation]
        sets = (
            self.durable, self.memory, self.announced, self.protections, self.nan, self.seen_nan,
            self.decayed,
        )  # fmt: skip
        for promised in sets:
            promised -= {g for g in promised if g.term >= term}
        self.protected = {g: p for g, p in self.protected.items() if g.term < term}

    def lineage(
        self, tip: int, decided: dict[int, Generation | None] | None = None
    ) -> dict[int, Generation | None]:
        """Newest eligible one by term, from the decisions as they were really written."""
        decided = self.decided if decided is None else decided
        limits: dict[int, Generation | None] = {tip: None}
        while decided.get(tip) is not None:
            parent = decided[tip]
            assert parent is not None
            limits[parent.term], tip = parent, parent.term
        return limits

    def eligible(self, before: int) -> dict[int, Generation | None]:
        """The lineage that term `before` may continue."""
        tips = [term for term in self.decided if term < before]
        return self.lineage(max(tips)) if tips else {}

    def on(self, generation: Generation, limits: dict[int, Generation | None]) -> bool:
        """`generation` lies on that lineage."""
        if generation.term not in limits:
            return False
        limit = limits[generation.term]
        return not self._left_in_term(generation, limit) and (limit is None or generation <= limit)

    def _left_in_term(self, generation: Generation, limit: Generation | None) -> bool:
        """Trainers began anew within its term, before it and without it."""
        for part in self.parts.get(generation.term, ()):
            assert part.parent is not None
            counts = limit is None or limit.attempt >= part.attempt
            if counts and generation.attempt < part.attempt and generation > part.parent:
                return True
        return False

    def begin_part(self, part: m.TermParent, *, newest: bool) -> None:
        """Trainers begin anew within a term; `newest`: nobody has claimed a later one."""
        parts = self.parts.setdefault(part.term, [])
        if part in parts:
            return
        if any(part.attempt <= other.attempt for other in parts):
            self.fail(f"attempt {part.attempt} is used twice in term {part.term}")
        if newest:
            self._check_promises(part.term, part.parent, self.lineage(part.term))
            self.protected = {g: c for g, c in self.protected.items() if g >= part.parent}
        parts.append(part)

    def began_from(self, term: int) -> Generation | None:
        """What trainers of that term were to begin from last."""
        parts = self.parts.get(term)
        return parts[-1].parent if parts else self.decided.get(term)

    def trained(self, generation: Generation, history: int) -> None:
        """A trainer reached this boundary: all must get there with the same past."""
        if self.history.setdefault(generation, history) != history:
            self.fail(f"{generation} has two histories: timelines were mixed")

    def sealed(self, generation: Generation, *, nan: bool, seen: bool) -> None:
        """A shard is complete: what is wrong with it, and whether its seal says so."""
        if nan:
            self.nan.add(generation)
        if seen:
            self.seen_nan.add(generation)

    def found_suspect(self, generation: Generation) -> None:
        """It was promised as sound: what it superseded in memory may be gone."""
        self.durable.discard(generation)
        self.protected.pop(generation, None)
        self.memory = {promised for promised in self.memory if promised > generation}

    def overwritten(self, generation: Generation, term: int, held: set[Generation]) -> None:
        """A rank that has those `held` sealed saves over its shard: not of the newest promised.

        One of them may be newer and decayed: it is no promise, but looks like one until it is read.
        """
        limits, parent = self.lineage(term), self.began_from(term)
        newest = max((g for g in self.memory if self.on(g, limits)), default=None)
        if generation == newest and (parent is None or generation >= parent):
            seeming = (held & self.announced & self.decayed) - self.seen_nan
            if any(g > generation and self.on(g, limits) for g in seeming):
                self.forget_up_to(generation)
                return
            self.fail(f"{generation} is the newest in memory, and is overwritten")

    def promise_protected(self, generation: Generation, promise: Promise) -> None:
        """From now on it may be lost only if a shard loses all copies, and its set too many."""
        if not self.protected or generation >= max(self.protected):
            self.protected = {generation: promise}

    def lost(self, node: int, ranks: set[int] | None = None) -> None:
        """Copies on a node are gone: those of some ranks, or all, then its parities as well."""
        for promise in self.protected.values():
            promise.copies -= {
                c for c in promise.copies if c[1] == node and (ranks is None or c[0] in ranks)
            }
        if ranks is None:
            self.lost_parity(node)
        self._let_go()

    def lost_replicas(self, node: int, kept: set[tuple[int, Generation]]) -> None:
        """A node lost what it had but these (rank, generation), which are in slots."""
        for generation, promise in self.protected.items():
            promise.copies -= {
                (r, n) for r, n in promise.copies if n == node and (r, generation) not in kept
            }
        self.lost_parity(node)

    def lost_parity(self, node: int, rank: int | None = None) -> None:
        """Parities on a node are gone: that of one rank, or all."""
        for promise in self.protected.values():
            promise.parities -= {
                p for p in promise.parities if p[1] == node and rank in (None, p[0])
            }
        self._let_go()

    def _let_go(self) -> None:
        self.protected = {
            g: promise
            for g, promise in self.protected.items()
            if len(promise.recoverable()) == promise.world
        }

    def forget_memory(self) -> None:
        """What the memory of nodes promised lapses."""
        self.memory.clear()
        self.protected.clear()

    def forget_up_to(self, generation: Generation) -> None:
        """What `generation` took the place of may be gone, whatever becomes of that."""
        self.memory = {other for other in self.memory if other > generation}

    def decision(
        self,
        term: int,
        parent: Generation | None,
        *,
        asked: bool,
        told: dict[int, Generation | None],
    ) -> None:
        """The decision of `term` stands on disk; `told`: the older ones somebody remembers."""
        if not asked:
            self._check_parent(term, parent)
        left = parent is not None and not self.on(parent, self.basis[term])
        if left and (not self.emptied[term] or self._was_left(parent, told)):
            self.fail(f"term {term} restores {parent}, which was abandoned")
        self.decided[term] = parent
        if parent is not None:
            self.protected = {g: c for g, c in self.protected.items() if g >= parent}

    def _was_left(self, generation: Generation | None, told: dict[int, Generation | None]) -> bool:
        """As far as anybody can know where the directory was emptied.

        A decision that went with the directory, and of which no keeper was told, binds nobody: what
        it left behind is whole, and what came after it is gone.
        """
        tip = max(told, default=0)
        assert generation is not None
        return generation.term <= tip and not self.on(generation, self.lineage(tip, told))

    def _check_parent(self, term: int, parent: Generation | None) -> None:
        self._check_promises(term, parent, self.basis[term])
        if parent is None and self.known[term]:
            self.fail(f"term {term} starts from scratch although something was durable")

    def _check_promises(
        self, term: int, parent: Generation | None, limits: dict[int, Generation | None]
    ) -> None:
        promises = (
            ("durable", self.durable),
            ("memory-committed", self.memory),
            ("protected", set(self.protected)),
        )
        for name, promised in promises:
            due = max((g for g in promised if self.on(g, limits)), default=None)
            if due is not None and (parent is None or parent < due):
                self.fail(f"term {term} restores {parent}, but {due} was {name}")

    def loaded(self, term: int, generation: Generation, content: Content | None) -> None:
        """A rank was told to train on with this content."""
        if self.began_from(term) != generation:
            self.fail(f"rank resumed {generation}, decided was {self.began_from(term)}")
        if content is None or content.generation != generation:
            self.fail(f"rank resumed {generation} but holds {content}")
        assert content is not None
        if content.weights:
            self.fail(f"{generation} was restored without its optimizer state")
        if content.history != self.history[generation]:
            self.fail(f"{generation} was restored with another past")
        if generation in self.marked[term]:
            self.fail(f"term {term} resumes {generation}, which is suspect")
        self.resumed += 1

    def plan(self, trainer: Trainer, version: int) -> None:
        """A trainer switched plan at its present step."""
        key = (trainer.incarnation, version)
        if self.applied.setdefault(key, trainer.step) != trainer.step:
            self.fail(f"plan {version} applied at {self.applied[key]} and {trainer.step}")

    def passed(self, trainer: Trainer) -> None:
        """A trainer passes its present step: it must have made every switch others made here."""
        for (incarnation, version), step in self.applied.items():
            mine = incarnation == trainer.incarnation and step <= trainer.step
            if mine and version not in trainer.plans:
                self.fail(f"rank {trainer.rank} passed step {step} without plan {version}")

    def let_go(self, disk: Disk, doomed: tuple[Generation, ...], keep: int) -> None:
        """Retention decides: each sound one has enough above it that were read back."""
        limits = self.lineage(max(self.decided)) if self.decided else {}
        sound = {
            g: commit.entry
            for g, commit in disk.commits.items()
            if g not in self.nan
            and not commit.entry.corrupt
            and self.on(g, limits)
            and not commit.entry.weights_only
        }
        for generation in sound.keys() & set(doomed):
            above = [g for g, e in sound.items() if g > generation and e.verified]
            if len(set(above) - set(doomed)) < keep:
                self.fail(f"retention lets {generation} go, read back above it are {above}")
        self.durable -= set(doomed)

    def reduced(self, disk: Disk, generation: Generation) -> None:
        """A commit is about to lose its optimizer state: two newer ones were read back whole."""
        limits = self.lineage(max(self.decided)) if self.decided else {}
        newer = [
            g
            for g, commit in disk.commits.items()
            if g > generation and commit.entry.verified and not commit.entry.corrupt
            and g not in self.nan and self.on(g, limits) and not commit.entry.weights_only
        ]  # fmt: skip
        if len(newer) < 2:
            self.fail(f"{generation} loses its optimizer state, whole above it are {newer}")
        self.durable.discard(generation)

    def deleted(self, disk: Disk, doomed: tuple[Generation, ...], keep: int) -> None:
        """Commits are about to be deleted."""
        limits = self.lineage(max(self.decided)) if self.decided else {}
        sound = [
            g
            for g, commit in disk.commits.items()
            if commit.synced
            and g not in self.nan
            and self.on(g, limits)
            and not commit.entry.weights_only
        ]
        left = [g for g in sound if g not in doomed]
        if sound and max(sound) in doomed:
            self.fail(f"retention deletes the last durable {max(sound)}")
        newest = max(self.decided, default=0)
        parent = self.decided.get(newest)
        if parent in doomed and not any(g.term == newest for g in left):
            self.fail(f"retention deletes {parent}, which term {newest} began from")
        if len(left) < min(keep, len(sound)):
            self.fail(f"retention leaves {len(left)} of {len(sound)}, keep_last is {keep}")
        self.durable -= set(doomed)
