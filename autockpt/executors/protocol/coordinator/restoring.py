"""The restoring third of the coordinator: one decision for all ranks, or none.

claim the directory -> ask every keeper what it holds -> choose -> write the decision down ->
all ranks restore and verify -> all ranks go on.  A source that turns out bad is struck out and the
choice is made again for *all* ranks: a rank that went on alone with another generation would mix
two histories of the training.
"""

from collections.abc import Sequence
from dataclasses import replace

from autockpt.executors.protocol.coordinator.saving import Saving
from autockpt.executors.protocol.messages import (
    AttachDenied,
    CatalogueEntry,
    ClaimTerm,
    DecisionFailed,
    DecisionWritten,
    HeldShard,
    InventoryReported,
    InventoryWanted,
    RankAttached,
    RankBad,
    RankSealed,
    RankVerified,
    Rebuild,
    Report,
    RestoreOrdered,
    ShardCopy,
    ShardsPlaced,
    TermClaimed,
    TermOpened,
    TermRefused,
    TrainerAttached,
    VerifyGeneration,
    WriteDecision,
)
from autockpt.executors.protocol.selection import (
    Choice,
    Question,
    chain_from,
    choose,
    newest_chain,
    on_lineage,
    parents_of,
)
from autockpt.values.generation import Generation

HOPELESS_STARTS = 2
"""A generation in memory that failed in so many starts, each without another one, is not asked for
again: else every start would fail as those did."""


class Restoring(Saving):
    """From the first trainer of an incarnation to the moment all may train."""

    # ------------------------------------------------------------------ attach and claim

    def rank_attached(self, from_node: int, message: RankAttached) -> None:
        """Admit, refuse, or tell again what a repeated question wants to know."""
        attach = message.attach
        back = attach.term is not None and self.phase == "running"
        if back and from_node in self.every_node:
            # Whoever comes back comes to a new keeper, also one that is denied here.
            self.copies_lost(f"the keeper of node {from_node} restarted")
        self._vacate(from_node, attach)
        refusal = self.admission.refusal(attach, self._in_the_way(attach))
        if refusal is not None:
            if not self._may_knock(attach):
                self._deny(from_node, attach, refusal)
            return
        self.knocking.clear()
        if attach.incarnation != self.incarnation:
            self._take_over(attach)
        self.known_term = max(self.known_term, message.term, self.admission.term)
        same = attach.nodes is self.nodes or attach.nodes == self.nodes
        if same:
            self.nodes = attach.nodes  # the object that most ranks name: next time a glance will do
        if not same or attach.nodes[attach.rank] != from_node:
            self._deny(from_node, attach, f"nodes differ: {self.nodes} and {attach.nodes}")
        elif self.phase == "gathering":
            self._gather(attach)
        elif self.phase in ("inventory", "deciding", "restoring"):
            self._want_inventory(from_node)
        elif self.phase == "running":
            self._rank_back(from_node, attach)
        elif self.phase in ("refused", "fenced"):
            self._tell_refusal(attach.rank)

    def _vacate(self, node: int, attach: TrainerAttached) -> None:
        """A keeper lets another launch in only when the holder's ranks there are gone."""
        if self.incarnation is None or attach.incarnation.launch_id == self.incarnation.launch_id:
            return
        if self.admission.refusal(attach, []) is None:
            self.alive -= {rank for rank, here in enumerate(self.nodes) if here == node}

    def _may_knock(self, attach: TrainerAttached) -> bool:
        """Only the living stand in its way, and it has not waited long: no answer yet."""
        if self.admission.refusal(attach, []) is not None:
            return False
        since = self.knocking.setdefault(attach.incarnation, self.now_s)
        return self.now_s - since < self.deadlines.knock_s

    def _in_the_way(self, attach: TrainerAttached) -> list[int]:
        """Ranks of another launch that hold the run; those of its own stand in nobody's way."""
        known = self.incarnation
        same = known is None or known.launch_id == attach.incarnation.launch_id
        return [] if same else self.reachable()

    def reachable(self) -> list[int]:
        """Ranks that hold the run, as far as anybody here knows."""
        return sorted(r for r in self.alive if self.nodes[r] not in self.unreachable)

    def _deny(self, node: int, attach: TrainerAttached, reason: str) -> None:
        incarnation = attach.incarnation
        self.send(node, AttachDenied(incarnation=incarnation, rank=attach.rank, refusal=reason))

    def _take_over(self, attach: TrainerAttached) -> None:
        self.reset()
        self.admission.admit(attach)
        self.nodes = attach.nodes
        self.every_node = tuple(sorted(set(attach.nodes)))
        self.go("gathering")

    def _gather(self, attach: TrainerAttached) -> None:
        self.attaches[attach.rank] = attach
        self.alive.add(attach.rank)
        if attach.term is not None:
            self.rejoining = attach.term
        elif len(self.attaches) < self.world_size:
            return
        self.go("claiming")
        assert self.incarnation is not None
        self.emit(
            ClaimTerm(incarnation=self.incarnation, term=self.rejoining, after=self.known_term)
        )

    def _rank_back(self, node: int, attach: TrainerAttached) -> None:
        """Its keeper restarted, or the start order was lost on the way."""
        if attach.term is not None and attach.term != self.term:
            self._deny(node, attach, f"term {attach.term} is over, {self.term} runs")
            return
        self.alive.add(attach.rank)
        if attach.term is not None:
            self.rank_interrupted(attach.rank)
        self.send(node, self._opened(node))
        self.begin_round()

    def rank_interrupted(self, rank: int) -> None:
        """Its keeper died, and with it every snapshot and shard file that was in flight."""
        for save in list(self.saves.values()):
            if rank not in save.sealed:
                self.drop_memory(save, f"the keeper of rank {rank} restarted")
            elif save.disk == "open" and rank not in save.votes:
                self.drop_disk(save, f"the keeper of rank {rank} restarted")

    def term_claimed(self, event: TermClaimed) -> None:
        """Older terms are fenced: ask every keeper what it holds."""
        if event.incarnation != self.incarnation or self.phase != "claiming":
            self.stale(event)
            return
        self.term = event.term
        self.catalogue = {entry.generation: self._judged(entry) for entry in event.committed}
        self.parents = parents_of(event.parents, event.committed)
        self.ever_durable = event.ever_committed or bool(event.committed)
        self.admission.hold(event.term)
        self.go("inventory")
        for node in self.every_node:
            self._want_inventory(node)

    def _judged(self, entry: CatalogueEntry) -> CatalogueEntry:
        """With what was found when it was read back, if its mark was lost."""
        if entry.health != "good":
            self.suspect.add(entry.generation)
        return replace(entry, health="suspect") if entry.generation in self.suspect else entry

    def _want_inventory(self, node: int) -> None:
        assert self.incarnation is not None
        rejoin = self.rejoining is not None
        self.send(
            node, InventoryWanted(incarnation=self.incarnation, term=self.term, rejoin=rejoin)
        )

    def term_refused(self, event: TermRefused) -> None:
        """Somebody alive holds the directory, or we were replaced while our keeper was away."""
        if event.incarnation != self.incarnation or self.phase != "claiming":
            self.stale(event)
        elif self.rejoining is not None:
            self.term = self.rejoining
            self.refusal = (event.reason, False, False)
            self.fence(event.reason)
        else:
            self.refuse(event.reason, retryable=False, restoring=False)

    # ------------------------------------------------------------------ inventory and decision

    def inventory_reported(self, from_node: int, message: InventoryReported) -> None:
        """The last answer starts the decision."""
        fits = message.incarnation == self.incarnation and message.term == self.term
        if not fits or self.phase != "inventory":
            self.stale(message)
            return
        self.inventory[from_node] = message
        for link in message.lineage:
            self.parents.setdefault(link.term, link.parent)
        everybody = len(self.inventory) >= len(self.every_node)
        if everybody and self.inventory.keys() >= set(self.every_node):
            self._inventory_complete()

    def _inventory_complete(self) -> None:
        self._link_memory()
        if self.rejoining is not None:
            self._rejoin()
        else:
            self.decide()

    def _link_memory(self) -> None:
        """The directory was emptied, and no keeper remembers these terms: memory is all there is.

        Each counts as begun from what is in memory of the one before.  A start that took the newest
        term alone would begin from scratch where that one is in pieces and an older one is whole.
        """
        if self.catalogue:
            return
        known = max(self.parents, default=0)
        held = {shard.generation for r in self.inventory.values() for shard in r.held}
        older: Generation | None = None
        for generation in sorted(held):
            first = older is None or older.term < generation.term
            if first and generation.term > known:
                self.parents[generation.term] = None if self.rejoining else older
            older = generation

    def recoverable_memory(self) -> tuple[HeldShard, ...]:
        """Shards in the memory of the node where their rank lives now."""
        return tuple(
            shard
            for node, report in sorted(self.inventory.items())
            for shard in report.held
            if self._is_home(shard, node)
        )

    def copies_elsewhere(self) -> tuple[ShardCopy, ...]:
        """All others in the memory of nodes, those of another number of ranks among them."""
        return tuple(
            ShardCopy(node=node, shard=shard)
            for node, report in sorted(self.inventory.items())
            for shard in report.held
            if not self._is_home(shard, node)
        )

    def _is_home(self, shard: HeldShard, node: int) -> bool:
        """It is of this world, and its rank lives on that node."""
        fits = shard.world_size == self.world_size and shard.rank < self.world_size
        return fits and self.nodes[shard.rank] == node

    def parities_held(self) -> tuple[ShardCopy, ...]:
        """Parities in the memory of all nodes."""
        return tuple(
            ShardCopy(node=node, shard=parity)
            for node, report in sorted(self.inventory.items())
            for parity in report.parities
        )

    def question(self) -> Question:
        """What the choice depends on, as known now."""
        ranks = range(self.world_size)
        return Question(
            world_size=self.world_size,
            memory=tuple(s for s in self.recoverable_memory() if not self.is_hopeless(s)),
            nodes=self.nodes,
            copies=tuple(c for c in self.copies_elsewhere() if not self.is_hopeless(c.shard)),
            parities=tuple(c for c in self.parities_held() if not self.is_hopeless(c.shard)),
            committed=tuple(self.catalogue.values()),
            chain=newest_chain(self._older_parents()),
            layout_digests=tuple(self.attaches[rank].layout_digest for rank in ranks),
            struck=frozenset(self.struck),
            suspect=frozenset(self.suspect),
            resume_from=self.attaches[0].resume_from,
        )

    def _older_parents(self) -> dict[int, Generation | None]:
        """Decisions before this term: what we decide ourselves is not history yet."""
        return {term: parent for term, parent in self.parents.items() if term < self.term}

    def decide(self) -> None:
        """Rule 6: choose for all ranks and write it down before anybody acts on it."""
        fresh = self.attaches[0].fresh
        self.choice = None if fresh else self.select()
        if self.choice is None and not fresh and self._refuses_scratch():
            return
        self.scratch = self._why_scratch() if self.choice is None and not fresh else ""
        self.attempt += 1
        self.verified = set()
        self.go("deciding")
        generation = self.choice.generation if self.choice else None
        self.emit(
            WriteDecision(
                term=self.term,
                attempt=self.attempt,
                generation=generation,
                reason=self._why(fresh=fresh),
            )
        )

    def _refuses_scratch(self) -> bool:
        """Rule 8: what was durable is missed; what never was is not, but some rank may hold a part
        of it already, or may yet get it: then another start begins from scratch."""
        if self._something_was_durable():
            self.refuse(self._why_nothing(), retryable=False)
        elif self.struck:
            self.failed.update({generation for _, generation, _ in self.struck})
            self.refuse(f"nothing in memory can be restored: {self._bad()}", retryable=True)
        elif silent := self._silent():
            self.refuse(f"nodes {silent} do not say what they hold in memory", retryable=True)
        else:
            return False
        return True

    def is_hopeless(self, shard: HeldShard) -> bool:
        """Of a generation in memory that is not asked for again; a transfer may fail once."""
        return self.failed[shard.generation] >= HOPELESS_STARTS

    def _something_was_durable(self) -> bool:
        """Then starting from scratch needs a person's word."""
        return self.ever_durable or self.attaches[0].resume_from is not None

    def _silent(self) -> list[int]:
        """Nodes that have not said what is in their memory."""
        return sorted(set(self.every_node) - set(self.inventory))

    def _why(self, *, fresh: bool) -> str:
        if self.choice is None:
            return "from scratch, as asked" if fresh else self.scratch or "the first start"
        kinds = [source.kind for source in self.choice.sources]
        counts = ", ".join(f"{kinds.count(kind)} from {kind}" for kind in sorted(set(kinds)))
        return f"greatest recoverable generation: {self.choice.generation} ({counts})"

    def _why_scratch(self) -> str:
        """What became of earlier starts, "" when there was none."""
        if not self._older_parents():
            return ""
        bad = [str(g) for g, starts in sorted(self.failed.items()) if starts >= HOPELESS_STARTS]
        return "an earlier start left no durable checkpoint" + (
            f", and what was in memory is bad: {bad[-3:]}" if bad else ""
        )

    def _bad(self) -> list[str]:
        return [f"rank {rank} {g} on {kind}" for rank, g, kind in sorted(self.struck)][-3:]

    def _why_nothing(self) -> str:
        wanted = self.attaches[0].resume_from
        on_disk = [str(g) for g in sorted(self.catalogue)][-3:]
        in_memory = [str(g) for g in sorted({s.generation for s in self.recoverable_memory()})][-3:]
        return (
            f"no generation{f' {wanted}' if wanted else ''} can be restored for all "
            f"{self.world_size} ranks; on disk {on_disk}, in memory {in_memory}, "
            f"bad {self._bad()}{self._why_suspect()}; ask for a fresh start, or resume from "
            "another generation"
        )

    def _why_suspect(self) -> str:
        """Those that only a person may choose, the newest three."""
        marked = {g for g, entry in self.catalogue.items() if entry.health == "suspect"}
        held = {s.generation for s in self.recoverable_memory() if s.health == "suspect"}
        found = [g.name for g in sorted(marked | held | self.suspect)][-3:]
        if not found:
            return ""
        return f"; NaN in {', '.join(found)}, restored only by --resume-from {found[-1]}"

    def select(self) -> Choice | None:
        """Rule 5: the greatest one on the lineage that every rank can get back."""
        return choose(self.question())

    def decision_written(self, event: DecisionWritten) -> None:
        """It stands: all ranks restore, or start from scratch."""
        if not self._deciding(event):
            return
        self.parents[self.term] = self.choice.generation if self.choice else None
        if self.choice is None:
            self.open()
            return
        if event.suspect:
            self.doubt(self.choice.generation, "marked so since the directory was claimed")
        self.go("restoring")
        if self._is_doubted(self.choice):
            self.decide()
        else:
            self._order(range(self.world_size), self.choice)

    def _is_doubted(self, choice: Choice) -> bool:
        """It turned out to be suspect since, and nobody asked for exactly that."""
        asked = self.attaches[0].resume_from == choice.generation
        return choice.generation in self.suspect and not asked

    def doubt(self, generation: Generation, reason: str) -> None:
        """What is being restored is left for an older one, by all ranks."""
        super().doubt(generation, reason)
        if self.phase == "restoring" and self.choice is not None and self._is_doubted(self.choice):
            self.decide()

    def decision_failed(self, event: DecisionFailed) -> None:
        """Nobody acts on a decision that does not stand."""
        if not self._deciding(event):
            return
        if event.fenced:
            self.refusal = (event.reason, False, True)
            self.fence(event.reason)
        else:
            self.refuse(f"decision could not be written: {event.reason}", retryable=True)

    def _deciding(self, event: DecisionWritten | DecisionFailed) -> bool:
        fits = (event.term, event.attempt) == (self.term, self.attempt)
        if not fits or self.phase != "deciding":
            self.stale(event)
            return False
        return True

    # ------------------------------------------------------------------ restore and open

    def _order(self, ranks: Sequence[int], choice: Choice) -> None:
        named = [(rank, bool(source.brought)) for rank, source in enumerate(choice.sources)]
        fetching = self.by_node(rank for rank, brought in named if brought)
        readers = self.by_node(
            rank
            for rank, brought in named
            if not brought and choice.sources[rank].kind in ("disk", "reshard")
        )
        if choice.places:
            placed = self._placed(choice)
            for node in sorted(self.by_node(ranks)):
                self.send(node, placed)
        for rank in ranks:
            node = self.nodes[rank]
            reading, waiting = readers.get(node, ()), fetching.get(node, ())
            self._order_one(rank, choice, tuple(reading), tuple(waiting))

    def _placed(self, choice: Choice) -> ShardsPlaced:
        """One for all nodes: it is as long as there are ranks, and so are the nodes many."""
        assert self.incarnation is not None
        return ShardsPlaced(
            incarnation=self.incarnation,
            term=self.term,
            attempt=self.attempt,
            generation=choice.generation,
            places=choice.places,
            rebuilt=choice.rebuilt,
            rebuilds=tuple(
                Rebuild(node=node, source=source)
                for node, sources in sorted(choice.rebuilds.items())
                for source in sources
            ),
        )

    def _order_one(
        self, rank: int, choice: Choice, readers: tuple[int, ...], fetching: tuple[int, ...]
    ) -> None:
        assert self.incarnation is not None
        order = RestoreOrdered(
            incarnation=self.incarnation,
            rank=rank,
            term=self.term,
            attempt=self.attempt,
            generation=choice.generation,
            step=choice.step,
            source=choice.sources[rank],
            readers=readers,
            fetching=fetching,
        )
        self.send(self.nodes[rank], order)

    def rank_verified(self, from_node: int, message: RankVerified) -> None:
        """The last one opens the term."""
        if not self._restoring(message):
            return
        self.verified.add(message.rank)
        if self.all_verified():
            self.open()

    def all_verified(self) -> bool:
        """Rule 7: nobody trains before everybody holds the same generation."""
        return len(self.verified) == self.world_size

    def rank_bad(self, from_node: int, message: RankBad) -> None:
        """Strike the source out and decide again, for all ranks."""
        if self._restoring(message):
            self.strike((message.rank,), message.detail)

    def strike(self, ranks: tuple[int, ...], detail: str) -> None:
        """These ranks' sources are not offered again in this term."""
        assert self.choice is not None
        for rank in ranks:
            self.struck.add((rank, self.choice.generation, self.choice.sources[rank].name))
        bad = f"ranks {list(ranks)} cannot restore {self.choice.generation}: {detail}"
        self.emit(Report(kind="warning", detail=bad))
        self.decide()

    def _restoring(self, message: RankVerified | RankBad) -> bool:
        fits = (message.term, message.attempt) == (self.term, self.attempt)
        if not fits or self.phase != "restoring" or self.choice is None:
            self.stale(message)
            return False
        return True

    def open(self) -> None:
        """All ranks hold the same state: the term begins."""
        self.go("running")
        self.chain = chain_from(self.term, self.parents)
        if self.choice is not None and self.choice.in_memory:
            self.memory_committed = self.choice.generation
        self.place_copies()
        self._tell_opened()
        self.begin_round()
        self._verify_leftovers()
        self.retain()

    def _verify_leftovers(self) -> None:
        """Commits the previous term did not live to read back would never count in retention."""
        for generation, entry in sorted(self.catalogue.items()):
            unread = not entry.verified and not entry.corrupt
            if unread and on_lineage(generation, self.chain):
                self.emit(VerifyGeneration(generation=generation))

    def _tell_opened(self) -> None:
        for node in self.every_node:
            self.send(node, self._opened(node))

    def _opened(self, node: int) -> TermOpened:
        assert self.incarnation is not None
        parent = self.parents.get(self.term)
        durable = [g for g in self.catalogue if g.term == self.term]
        version = max((v for v, step in self.plan_verdicts.items() if step is not None), default=0)
        return TermOpened(
            incarnation=self.incarnation,
            term=self.term,
            parent=parent,
            step=self._parent_step(parent),
            parent_durable=self._is_sound_on_disk(parent),
            lineage=self.chain,
            memory_committed=self.memory_committed,
            wards=self.wards.get(node, ()),
            holders=self.holders.get(node, ()),
            protected=self.protected or (parent if self.protects else None),
            durable=max(durable, default=None),
            plan_version=version,
            plan_apply_step=self.plan_verdicts.get(version) or 0,
            ever_durable=self.ever_durable,
            scratch=self.scratch,
        )

    def _parent_step(self, parent: Generation | None) -> int:
        if self.choice is not None:
            return self.choice.step
        if parent in self.catalogue:
            return self.catalogue[parent].step
        steps = [shard.step for shard in self.recoverable_memory() if shard.generation == parent]
        return steps[0] if steps else 0

    def _is_sound_on_disk(self, parent: Generation | None) -> bool:
        entry = self.catalogue.get(parent) if parent else None
        struck = {name for _, generation, name in self.struck if generation == parent}
        return (
            entry is not None and not entry.corrupt and not struck & {"disk", "gather", "reshard"}
        )

    def _rejoin(self) -> None:
        """A new keeper continues a running term: rebuild what the old one knew from memory."""
        if self.term not in self.parents:
            if self.catalogue:
                self.refuse(f"term {self.term} has no decision record", retryable=True)
                return
            self.parents[self.term] = None  # the directory was emptied, and nobody else knows it
        self.alive = set(range(self.world_size))
        self.chain = chain_from(self.term, self.parents)
        self.go("running")
        parent = self.parents[self.term]
        holders = {s.rank for s in self.recoverable_memory() if s.generation == parent}
        if len(holders) == self.world_size:
            self.memory_committed = parent
        kept = [r.protected for r in self.inventory.values() if r.protected is not None]
        self.protected, self.intact = max(kept, default=None), False
        for report in self.inventory.values():
            if report.plan_version:
                self.plan_verdicts[report.plan_version] = report.plan_apply_step
                self.plan_newest = max(self.plan_newest, report.plan_version)
        for shard in sorted(self.recoverable_memory(), key=lambda s: s.generation):
            if shard.generation.term == self.term:
                self.rebuild(shard)
        self.place_copies()
        self._tell_opened()
        self.begin_round()
        for rank in sorted(self.attaches):
            self.rank_interrupted(rank)

    def rebuild(self, shard: HeldShard) -> None:
        """Count a seal that the previous coordinator may have counted already."""
        self.rank_sealed(self.nodes[shard.rank], RankSealed(shard=shard))

    # ------------------------------------------------------------------ endings

    def refuse(self, reason: str, *, retryable: bool, restoring: bool = True) -> None:
        """This incarnation does not start; every rank is told why."""
        self.refusal = (reason, retryable, restoring)
        self.go("refused")
        self.emit(Report(kind="refused", detail=reason))
        for rank in sorted(self.attaches):
            self._tell_refusal(rank)

    def _tell_refusal(self, rank: int) -> None:
        assert self.incarnation is not None
        reason, retryable, restoring = self.refusal
        denied = AttachDenied(
            incarnation=self.incarnation,
            rank=rank,
            refusal=reason or "this term was fenced",
            retryable=retryable,
            restoring=restoring,
        )
        self.send(self.nodes[rank], denied)

    def break_incarnation(self, reason: str) -> None:
        """Somebody is gone before the start: the launcher has to try again."""
        restoring = ("gathering", "claiming", "inventory", "deciding", "restoring")
        if self.phase in restoring and self.rejoining is None:
            self.refuse(reason, retryable=True)

    def expire_restore(self) -> None:
        """Every wait ends: say who did not answer, and go on without or give up."""
        waited, limits = self.waited_s(), self.deadlines
        if self.phase == "gathering" and waited >= limits.attach_s:
            missing = sorted(set(range(self.world_size)) - set(self.attaches))
            self.refuse(f"ranks {missing} did not attach in {waited:.0f} s", retryable=True)
        elif self.phase == "inventory" and waited >= limits.inventory_s:
            self.emit(Report(kind="warning", detail=f"nodes {self._silent()} report no memory"))
            self._inventory_late()
        elif self.phase == "restoring" and waited >= limits.restore_s:
            silent = sorted(set(range(self.world_size)) - self.verified)
            self.strike(tuple(silent), f"no answer in {waited:.0f} s")

    def _inventory_late(self) -> None:
        """A restore counts the silent as empty; a running term needs all, so it waits on."""
        if self.rejoining is None:
            self.decide()
        else:
            self.began_s = self.now_s

    def repeat_restore(self) -> None:
        """Ask again whoever has not answered."""
        if self.phase == "inventory":
            for node in sorted(set(self.every_node) - set(self.inventory)):
                self._want_inventory(node)
        elif self.phase == "restoring" and self.choice is not None:
            self._order(sorted(set(range(self.world_size)) - self.verified), self.choice)
