"""The restoring part of the coordinator: one decision for all ranks, or none.

claim the directory -> ask every keeper what it holds -> choose -> write the decision down -> all
ranks restore and verify -> all ranks go on.  A source that turns out bad is struck out and the
choice is made again for *all* ranks.  A rank that resumed alone from another generation would mix
two histories of the training.
"""

from collections.abc import Sequence
from dataclasses import replace

from autockpt.executors.protocol import messages as m
from autockpt.executors.protocol.coordinator.choosing import Choosing
from autockpt.executors.protocol.coordinator.plan_change import PlanChange
from autockpt.executors.protocol.coordinator.replicating import Replicating
from autockpt.executors.protocol.coordinator.same_term import SameTerm
from autockpt.executors.protocol.coordinator.saving import Saving
from autockpt.executors.protocol.coordinator.state import CoordinatorState
from autockpt.executors.protocol.selection import Choice, on_lineage, parents_of
from autockpt.values.generation import Generation


class Restoring:
    """From the claim of the directory to the moment all ranks train."""

    def __init__(
        self,
        state: CoordinatorState,
        replicating: Replicating,
        saving: Saving,
        plan_change: PlanChange,
        choosing: Choosing,
        same_term: SameTerm,
    ) -> None:
        self.state = state
        self.replicating = replicating
        self.saving = saving
        self.plan_change = plan_change
        self.choosing = choosing
        self.same_term = same_term

    # ------------------------------------------------------------------ claim

    def rank_interrupted(self, rank: int) -> None:
        """Its keeper died, and with it every snapshot and shard file that was in flight."""
        for save in list(self.state.saves.values()):
            if rank not in save.sealed:
                self.saving.drop_memory(save, f"the keeper of rank {rank} restarted")
            elif save.disk == "open" and rank not in save.votes:
                self.saving.drop_disk(save, f"the keeper of rank {rank} restarted")
        self.plan_change.drop_plan(f"rank {rank} came back to a new keeper")

    def term_claimed(self, event: m.TermClaimed) -> None:
        """Older terms are fenced: ask every keeper what it holds."""
        state = self.state
        if state.held is not None and event.term > state.held.term:
            state.held = None
        if event.incarnation != state.incarnation or state.phase != "claiming":
            state.stale(event)
            return
        state.term = event.term
        state.catalogue = {entry.generation: self._judged(entry) for entry in event.committed}
        state.parents = parents_of(event.parents, event.committed)
        state.ever_durable = event.ever_committed or bool(event.committed)
        state.admission.hold(event.term)
        state.go("inventory")
        for node in state.every_node:
            self.want_inventory(node)

    def _judged(self, entry: m.CatalogueEntry) -> m.CatalogueEntry:
        """Add the result of reading it back, if its mark was lost."""
        if entry.health != "good":
            self.state.suspect.add(entry.generation)
        return replace(entry, health="suspect") if entry.generation in self.state.suspect else entry

    def want_inventory(self, node: int) -> None:
        state = self.state
        assert state.incarnation is not None
        rejoin = state.rejoining is not None
        state.send(
            node, m.InventoryWanted(incarnation=state.incarnation, term=state.term, rejoin=rejoin)
        )

    def term_refused(self, event: m.TermRefused) -> None:
        """A live run holds the directory, or we were replaced while our keeper was away.

        Storage that does not answer says neither, and ends no training: it is asked again.
        """
        state = self.state
        if event.incarnation != state.incarnation or state.phase != "claiming":
            state.stale(event)
            return
        if event.failed and not state.is_withdrawing and self.same_term.may_stay():
            self.same_term.ask_claim_back()
            return
        state.held = None
        if state.rejoining is not None and event.failed:
            state.is_claim_due = True
            detail = f"term {state.rejoining} waits for the storage: {event.reason}"
            state.emit(m.Report(kind="warning", detail=detail))
        elif state.rejoining is not None:
            state.term = state.rejoining
            state.refusal = (event.reason, False, False)
            self.saving.fence(event.reason)
        else:
            self.refuse(event.reason, retryable=event.failed, restoring=event.failed)

    def claim(self) -> None:
        """Ask for the directory."""
        self.state.go("claiming")
        self._order_claim()

    def _order_claim(self) -> None:
        state = self.state
        assert state.incarnation is not None
        state.emit(
            m.ClaimTerm(incarnation=state.incarnation, term=state.rejoining, after=state.known_term)
        )

    def claim_withdrawn(self, event: m.ClaimWithdrawn) -> None:
        """Rule 21: no term but the one that ran; ask every keeper whether memory has all."""
        state = self.state
        if event.incarnation != state.incarnation or state.phase != "claiming":
            state.stale(event)
        elif state.held is None or not self.same_term.may_stay():
            self._order_claim()
        else:
            self.same_term.stay(state.held)
            state.go("inventory")
            for node in state.every_node:
                self.want_inventory(node)

    def _claim_after_all(self, reason: str) -> None:
        """These trainers wait for the storage."""
        detail = f"the start waits for the storage: {reason}"
        self.state.emit(m.Report(kind="warning", detail=detail))
        self.same_term.leave()
        self.state.inventory, self.state.choice = {}, None
        self.claim()

    def commit_written(self, event: m.CommitWritten) -> None:
        """Durable; also a commit that the past part of the term had ordered."""
        if not self.same_term.commit_written(event):
            self.saving.commit_written(event)

    def commit_failed(self, event: m.CommitFailed) -> None:
        """A commit of the past part of the term may stand all the same, unless it is fenced."""
        state = self.state
        if state.held is None or event.generation not in state.held.commits:
            self.saving.commit_failed(event)
        elif event.fenced:
            state.held = None
            if state.is_in_same_term and state.phase == "running":
                self.saving.fence(event.reason)
            elif state.is_in_same_term and state.phase in ("inventory", "restoring"):
                self._claim_after_all(event.reason)

    # ------------------------------------------------------------------ inventory and decision

    def inventory_reported(self, from_node: int, message: m.InventoryReported) -> None:
        """The last answer starts the decision."""
        state = self.state
        fits = message.incarnation == state.incarnation and message.term == state.term
        if not fits or state.phase != "inventory":
            state.stale(message)
            return
        state.inventory[from_node] = message
        for link in (link for link in message.lineage if not link.attempt):
            state.parents.setdefault(link.term, link.parent)
        everybody = len(state.inventory) >= len(state.every_node)
        if everybody and state.inventory.keys() >= set(state.every_node):
            self._inventory_complete()

    def _inventory_complete(self) -> None:
        self._link_memory()
        if self.state.rejoining is not None:
            self._rejoin()
        else:
            self.decide()

    def _link_memory(self) -> None:
        """The directory was emptied, and no keeper remembers these terms: memory is all there is.

        Each term counts as begun from the memory of the term before.  A start that took the newest
        term alone would begin from scratch where that one is in pieces and an older one is whole.
        """
        state = self.state
        if state.catalogue:
            return
        known = max(state.parents, default=0)
        held = {shard.generation for r in state.inventory.values() for shard in r.held}
        older: Generation | None = None
        for generation in sorted(held):
            first = older is None or older.term < generation.term
            if first and generation.term > known:
                state.parents[generation.term] = None if state.rejoining else older
            older = generation

    def decide(self) -> None:
        """Rule 6: choose for all ranks, and write the choice down before a rank acts on it."""
        state = self.state
        if state.is_in_same_term:
            self._go_on()
            return
        fresh = state.attaches[0].fresh
        state.choice = None if fresh else self.choosing.select()
        if state.choice is None and not fresh and self._refuses_scratch():
            return
        state.scratch = (
            self.choosing.reason_for_scratch() if state.choice is None and not fresh else ""
        )
        state.attempt += 1
        state.verified = set()
        state.go("deciding")
        generation = state.choice.generation if state.choice else None
        state.emit(
            m.WriteDecision(
                term=state.term,
                attempt=state.attempt,
                generation=generation,
                reason=self.choosing.reason(fresh=fresh),
            )
        )

    def _go_on(self) -> None:
        """Rule 21: nothing to write down, the term has begun long ago."""
        state, choice = self.state, self.choosing.select()
        reason = self.same_term.why_not_from_memory(choice)
        if reason or choice is None or state.phase != "inventory":
            self._claim_after_all(reason or "the choice does not hold")
            return
        state.choice = choice
        self.same_term.begin_part(choice.generation)
        state.attempt += 1
        state.verified = set()
        state.go("restoring")
        self._order(range(state.world_size), choice)

    def _refuses_scratch(self) -> bool:
        """Rule 8: a lost durable generation is missed; one that never was durable is not.

        Some rank may hold a part of it already, or may yet get it: then another start begins from
        scratch.
        """
        if self.choosing.is_something_missed():
            self.refuse(self.choosing.reason_for_refusal(), retryable=False)
        elif self.state.struck:
            self.state.failed.update({generation for _, generation, _ in self.state.struck})
            self.refuse(
                f"nothing in memory can be restored: {self.choosing.bad_sources()}", retryable=True
            )
        elif silent := self.choosing.silent_nodes():
            self.refuse(f"nodes {silent} do not say what they hold in memory", retryable=True)
        else:
            return False
        return True

    def decision_written(self, event: m.DecisionWritten) -> None:
        """It stands: all ranks restore, or start from scratch."""
        state = self.state
        if not self._deciding(event):
            return
        state.parents[state.term] = state.choice.generation if state.choice else None
        if state.choice is None:
            self.open()
            return
        if event.suspect:
            self.doubt(state.choice.generation, "marked so since the directory was claimed")
        state.go("restoring")
        if self._is_doubted(state.choice):
            self.decide()
        else:
            self._order(range(state.world_size), state.choice)

    def _is_doubted(self, choice: Choice) -> bool:
        """It turned out to be suspect since, and the user did not ask for exactly that one."""
        asked = self.state.attaches[0].resume_from == choice.generation
        return choice.generation in self.state.suspect and not asked

    def generation_verified(self, event: m.GenerationVerified) -> None:
        """A checkpoint was read back; all ranks leave one that proved suspect."""
        self.saving.note_read_back(event)
        if event.health != "good":  # of an incarnation that is over, too: the next may choose it
            self.doubt(event.generation, event.detail)
        self.saving.retain_read_back(event)

    def doubt(self, generation: Generation, reason: str) -> None:
        """All ranks leave the generation being restored for an older one."""
        self.saving.doubt(generation, reason)
        if (
            self.state.phase == "restoring"
            and self.state.choice is not None
            and self._is_doubted(self.state.choice)
        ):
            self.decide()

    def decision_failed(self, event: m.DecisionFailed) -> None:
        """Handle a decision that could not be written: no rank acts on it."""
        if not self._deciding(event):
            return
        if event.fenced:
            self.state.refusal = (event.reason, False, True)
            self.saving.fence(event.reason)
        else:
            self.refuse(f"decision could not be written: {event.reason}", retryable=True)

    def _deciding(self, event: m.DecisionWritten | m.DecisionFailed) -> bool:
        state = self.state
        fits = (event.term, event.attempt) == (state.term, state.attempt)
        if not fits or state.phase != "deciding":
            state.stale(event)
            return False
        return True

    # ------------------------------------------------------------------ restore and open

    def _order(self, ranks: Sequence[int], choice: Choice) -> None:
        state = self.state
        named = [(rank, bool(source.brought)) for rank, source in enumerate(choice.sources)]
        fetching = state.by_node(rank for rank, brought in named if brought)
        readers = state.by_node(
            rank
            for rank, brought in named
            if not brought and choice.sources[rank].kind in ("disk", "reshard")
        )
        if choice.places:
            placed = self._shards_placed(choice)
            for node in sorted(state.by_node(ranks)):
                state.send(node, placed)
        for rank in ranks:
            node = state.nodes[rank]
            reading, waiting = readers.get(node, ()), fetching.get(node, ())
            self._order_one(rank, choice, tuple(reading), tuple(waiting))

    def _shards_placed(self, choice: Choice) -> m.ShardsPlaced:
        """Return the places of all shards: one message for all nodes, because it is long."""
        state = self.state
        assert state.incarnation is not None
        return m.ShardsPlaced(
            incarnation=state.incarnation,
            term=state.term,
            attempt=state.attempt,
            generation=choice.generation,
            places=choice.places,
            rebuilt=choice.rebuilt,
            rebuilds=tuple(
                m.Rebuild(node=node, source=source)
                for node, sources in sorted(choice.rebuilds.items())
                for source in sources
            ),
        )

    def _order_one(
        self, rank: int, choice: Choice, readers: tuple[int, ...], fetching: tuple[int, ...]
    ) -> None:
        state = self.state
        assert state.incarnation is not None
        order = m.RestoreOrdered(
            incarnation=state.incarnation,
            rank=rank,
            term=state.term,
            attempt=state.attempt,
            generation=choice.generation,
            step=choice.step,
            source=choice.sources[rank],
            readers=readers,
            fetching=fetching,
        )
        state.send(state.nodes[rank], order)

    def rank_verified(self, from_node: int, message: m.ShardVerified) -> None:
        """The last one opens the term."""
        if not self._restoring(message):
            return
        self.state.verified.add(message.rank)
        if self.all_verified():
            self.open()

    def all_verified(self) -> bool:
        """Rule 7: no rank trains before all ranks hold the same generation."""
        return len(self.state.verified) == self.state.world_size

    def rank_bad(self, from_node: int, message: m.ShardBad) -> None:
        """Strike the source out and decide again, for all ranks.

        Of a store that cannot be read now, no older checkpoint is taken: the newer one would leave
        the lineage, and be deleted.
        """
        if not self._restoring(message):
            return
        if message.unread:
            self.refuse(f"rank {message.rank} cannot read it now: {message.detail}", retryable=True)
        elif not self._leave_out(message):
            self.strike((message.rank,), message.detail)

    def _leave_out(self, message: m.ShardBad) -> bool:
        """Gather without the memory of one shard: it is rebuilt, or read from its file.

        False: no shard is named, or its memory was left out already.
        """
        choice, shard = self.state.choice, message.lost
        if choice is None or shard is None or not choice.places:
            return False
        bad = (shard, choice.generation, "memory")
        if bad in self.state.struck:
            return False
        self.state.struck.add(bad)
        told = f"no memory has rank {shard} of {choice.generation} whole: {message.detail}"
        self.state.emit(m.Report(kind="warning", detail=told))
        self.decide()
        return True

    def strike(self, ranks: tuple[int, ...], detail: str) -> None:
        """These ranks' sources are not offered again in this term."""
        state = self.state
        assert state.choice is not None
        for rank in ranks:
            state.struck.add((rank, state.choice.generation, state.choice.sources[rank].name))
        bad = f"ranks {list(ranks)} cannot restore {state.choice.generation}: {detail}"
        state.emit(m.Report(kind="warning", detail=bad))
        self.decide()

    def _restoring(self, message: m.ShardVerified | m.ShardBad) -> bool:
        state = self.state
        fits = (message.term, message.attempt) == (state.term, state.attempt)
        if not fits or state.phase != "restoring" or state.choice is None:
            state.stale(message)
            return False
        return True

    def open(self) -> None:
        """All ranks hold the same state: the term begins."""
        state = self.state
        state.go("running")
        state.chain = state.chain_of_term()
        if state.choice is not None and state.choice.in_memory:
            state.memory_committed = state.choice.generation
        self.replicating.place_copies()
        self._tell_opened()
        self.replicating.begin_round()
        self._verify_leftovers()
        self.saving.retain()

    def _verify_leftovers(self) -> None:
        """Commits the previous term did not live to read back would never count in retention."""
        for generation, entry in sorted(self.state.catalogue.items()):
            unread = not entry.verified and not entry.corrupt
            if unread and on_lineage(generation, self.state.chain):
                self.state.emit(m.VerifyGeneration(generation=generation))

    def _tell_opened(self) -> None:
        for node in self.state.every_node:
            self.state.send(node, self.opened(node))

    def opened(self, node: int) -> m.TermOpened:
        state = self.state
        assert state.incarnation is not None
        parent = state.began_from()
        durable = [g for g in state.catalogue if state.is_of_term(g)]
        version = max((v for v, step in state.plan_verdicts.items() if step is not None), default=0)
        return m.TermOpened(
            incarnation=state.incarnation,
            term=state.term,
            parent=parent,
            step=self._parent_step(parent),
            parent_durable=self._is_sound_on_disk(parent),
            lineage=state.chain,
            memory_committed=state.memory_committed,
            replicated=state.replicated.get(node, ()),
            holders=state.holders.get(node, ()),
            protected=state.protected or (parent if state.protects else None),
            durable=max(durable, default=None),
            plan_version=version,
            plan_apply_step=state.plan_verdicts.get(version) or 0,
            ever_durable=state.ever_durable,
            scratch=state.scratch,
        )

    def _parent_step(self, parent: Generation | None) -> int:
        """Also of a parent that a new coordinator knows by its name alone."""
        state = self.state
        if state.choice is not None:
            return state.choice.step
        if parent in state.catalogue:
            return state.catalogue[parent].step
        return parent.step if parent is not None else 0

    def _is_sound_on_disk(self, parent: Generation | None) -> bool:
        entry = self.state.catalogue.get(parent) if parent else None
        struck = {name for _, generation, name in self.state.struck if generation == parent}
        return (
            entry is not None and not entry.corrupt and not struck & {"disk", "gather", "reshard"}
        )

    def _rejoin(self) -> None:
        """A new keeper continues a running term: rebuild what the old one knew from memory."""
        state = self.state
        if state.term not in state.parents:
            if state.catalogue:
                self.refuse(f"term {state.term} has no decision record", retryable=True)
                return
            state.parents[state.term] = None  # the directory was emptied, and nobody else knows it
        state.alive, state.lost = set(range(state.world_size)), set()
        links = {link for report in state.inventory.values() for link in report.lineage}
        parts = (link for link in links if link.attempt and link.term == state.term)
        state.parts = tuple(sorted(parts, key=lambda link: link.attempt, reverse=True))
        state.chain = state.chain_of_term()
        state.go("running")
        parent = state.began_from()
        holders = {s.rank for s in self.choosing.recoverable_memory() if s.generation == parent}
        if len(holders) == state.world_size:
            state.memory_committed = parent
        self.replicating.resume_protection()
        for report in state.inventory.values():
            if report.plan_version:
                state.plan_verdicts[report.plan_version] = report.plan_apply_step
                state.plan_newest = max(state.plan_newest, report.plan_version)
        for shard in sorted(self.choosing.recoverable_memory(), key=lambda s: s.generation):
            if state.is_of_term(shard.generation):
                self.rebuild(shard)
        self.replicating.place_copies()
        self._tell_opened()
        self.replicating.begin_round()
        for rank in sorted(state.attaches):
            self.rank_interrupted(rank)

    def rebuild(self, shard: m.HeldShard) -> None:
        """Count a seal that the previous coordinator may have counted already."""
        self.saving.rank_sealed(self.state.nodes[shard.rank], m.RankSealed(shard=shard))

    # ------------------------------------------------------------------ endings

    def refuse(self, reason: str, *, retryable: bool, restoring: bool = True) -> None:
        """This incarnation does not start; every rank receives the reason."""
        state = self.state
        state.refusal = (reason, retryable, restoring)
        state.go("refused")
        state.emit(m.Report(kind="refused", detail=reason))
        for rank in sorted(state.attaches):
            self.tell_refusal(rank)

    def tell_refusal(self, rank: int) -> None:
        state = self.state
        assert state.incarnation is not None
        reason, retryable, restoring = state.refusal
        reason = reason or "this term was fenced"
        refused: m.AttachRefused | m.RestoreRefused
        if restoring:
            refused = m.RestoreRefused(
                rank=rank, incarnation=state.incarnation, reason=reason, retryable=retryable
            )
        else:
            refused = m.AttachRefused(rank=rank, incarnation=state.incarnation, reason=reason)
        state.send(state.nodes[rank], refused)

    def break_incarnation(self, reason: str) -> None:
        """A rank is gone before the start: the launcher has to try again."""
        restoring = ("gathering", "claiming", "inventory", "deciding", "restoring")
        if self.state.phase in restoring and self.state.rejoining is None:
            self.refuse(reason, retryable=True)

    def expire_restore(self) -> None:
        """Every wait ends: say who did not answer, and go on without or give up."""
        state = self.state
        waited, limits = state.waited_s(), state.deadlines
        if state.phase == "gathering" and waited >= limits.attach_s:
            missing = sorted(set(range(state.world_size)) - set(state.attaches))
            self.refuse(f"ranks {missing} did not attach in {waited:.0f} s", retryable=True)
        elif state.phase == "claiming" and waited >= limits.claim_s:
            self.same_term.ask_claim_back()
        elif state.phase == "inventory" and waited >= limits.inventory_s:
            state.emit(
                m.Report(
                    kind="warning", detail=f"nodes {self.choosing.silent_nodes()} report no memory"
                )
            )
            self._inventory_late()
        elif state.phase == "restoring" and waited >= limits.restore_s:
            self._end_restore(tuple(sorted(set(range(state.world_size)) - state.verified)))

    def _end_restore(self, silent: tuple[int, ...]) -> None:
        """Strike the sources of the silent out.

        Storage that hangs says nothing about its bytes: no older checkpoint is taken for it.
        """
        state = self.state
        assert state.choice is not None
        waited = f"no answer in {state.waited_s():.0f} s"
        reading = [r for r in silent if state.choice.sources[r].kind in ("disk", "reshard")]
        if reading:
            told = f"ranks {reading} still read {state.choice.generation} from storage: {waited}"
            self.refuse(told, retryable=True)
        else:
            self.strike(silent, waited)

    def _inventory_late(self) -> None:
        """A restore counts the silent as empty; a running term needs all, so it waits on."""
        if self.state.is_in_same_term:
            silent = self.choosing.silent_nodes()
            self._claim_after_all(f"nodes {silent} do not say what they hold in memory")
        elif self.state.rejoining is None:
            self.decide()
        else:
            self.state.began_s = self.state.now_s

    def repeat_restore(self) -> None:
        """Ask again the nodes and ranks that have not answered."""
        state = self.state
        if state.phase == "inventory":
            for node in sorted(set(state.every_node) - set(state.inventory)):
                self.want_inventory(node)
        elif state.phase == "claiming" and state.is_claim_due:
            state.is_claim_due = False
            self._order_claim()
        elif state.phase == "restoring" and state.choice is not None:
            self._order(sorted(set(range(state.world_size)) - state.verified), state.choice)
