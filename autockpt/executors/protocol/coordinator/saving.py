"""The saving part of the coordinator: seals and votes become commits, or nothing.

A generation is *memory-committed* when all ranks sealed it, *durable* when all ranks also wrote
their files and the commit record stands.  Both verdicts need every rank; a missing one can only
turn the generation into nothing.
"""

from collections.abc import Iterable
from dataclasses import replace

from autockpt.executors.protocol import messages as m
from autockpt.executors.protocol.coordinator.replicas import ReplicaComparison
from autockpt.executors.protocol.coordinator.replicating import Replicating
from autockpt.executors.protocol.coordinator.state import CoordinatorState, Save
from autockpt.executors.protocol.retention import bases_of, deletions, reductions
from autockpt.values.generation import Generation
from autockpt.values.goal import Retention
from autockpt.values.telemetry import LOST, PASSED

_REMEMBERED = 32
"""Settled saves kept to answer late questions exactly; older ones are answered by rule."""


def worst(verdicts: list[m.Health]) -> m.Health:
    """A generation is as healthy as its worst shard."""
    if "bad" in verdicts:
        return "bad"
    return "suspect" if "suspect" in verdicts else "good"


class Saving:
    """Counts seals and votes of the open term."""

    def __init__(self, state: CoordinatorState, replicating: Replicating) -> None:
        self.state = state
        self.replicating = replicating
        self._replicas = ReplicaComparison()
        """The comparisons of this term."""

    # ------------------------------------------------------------------ rules

    def memory_complete(self, save: Save) -> bool:
        """Rule 3: memory-committed means sealed by every rank."""
        return len(save.sealed) == self.state.world_size

    def disk_complete(self, save: Save) -> bool:
        """Rule 4: COMMIT is written only with the vote of every rank, each sealed and persisted."""
        return len(save.votes) == self.state.world_size and self.memory_complete(save)

    def to_delete(self) -> tuple[Generation, ...]:
        """Rule 10: what retention lets go, seen from the open term."""
        return self._beyond(self.state.retention)

    def to_reduce(self) -> tuple[Generation, ...]:
        """Rule 23: older ones whose optimizer state goes."""
        state = self.state
        return reductions(
            state.catalogue.values(), state.retention, chain=state.chain, pinned=self._bases()
        )

    def _beyond(self, retention: Retention) -> tuple[Generation, ...]:
        return deletions(
            self.state.catalogue.values(),
            retention,
            chain=self.state.chain,
            pinned=self._bases(),
        )

    def _bases(self) -> frozenset[Generation]:
        """Bases of checkpoints that are not committed yet."""
        live = (s for s in self.state.saves.values() if s.disk in ("open", "committing"))
        pinned = frozenset[Generation]().union(*(bases_of(s.votes.values()) for s in live))
        if self.state.held is not None:
            ordered = self.state.held.commits.values()
            pinned = pinned.union(*(bases_of(entry.records) for entry in ordered))
        return pinned

    # ------------------------------------------------------------------ reports of ranks

    def rank_began(self, from_node: int, message: m.RankBegan) -> None:
        """A slot was granted: the save exists, and of older ones this rank seals the named only."""
        state = self.state
        save = self._save(from_node, message.generation, message.step)
        if save is not None:
            if message.disk:
                save.memory_only.discard(message.rank)
                self._open_disk(save)
            elif message.rank not in save.votes and message.rank not in save.joining:
                save.memory_only.add(message.rank)
            self.join_writers(save)
            if missing := state.lost - save.sealed.keys():
                self.drop_memory(save, f"rank {min(missing)} {LOST}")
        if state.accepts(message.generation):
            newest = state.begun.get(message.rank)
            if newest is None or message.generation > newest.generation:
                state.begun[message.rank] = message
            for older in [save for save in state.saves.values() if save.memory == "open"]:
                self._give_up_if_passed(older, message.rank)

    def _give_up_if_passed(self, save: Save, rank: int) -> None:
        """A rank whose keeper was away skipped saves without a word; the others hold theirs.

        In either order of the news: of the save, and of the rank that went on.  A save that is new
        here is compared with all ranks, later only with the rank that has just begun.  Comparing
        with all each time would cost the square of their number.
        """
        ranks = (rank,) if save.compared else tuple(self.state.begun)
        save.compared = True
        for one in ranks:
            newest = self.state.begun[one]
            passed = newest.generation > save.generation and save.generation not in newest.coming
            if passed and one not in save.sealed:
                self.drop_memory(save, f"rank {one} {PASSED} {newest.generation}")

    def rank_sealed(self, from_node: int, message: m.RankSealed) -> None:
        """One more rank holds it; the last one makes it memory-committed."""
        shard = message.shard
        save = self._save(from_node, shard.generation, shard.step)
        if save is None:
            return
        if save.memory == "committed":
            health = self._health(save)
            self.state.send(from_node, self._committed(save, health))
            return
        save.sealed[shard.rank] = shard
        self._complete_memory(save)
        self._complete_disk(save)

    def rank_prepared(self, from_node: int, message: m.RankPrepared) -> None:
        """A vote; the last one makes the commit."""
        save = self._save(from_node, message.generation, message.step)
        if save is None:
            return
        if save.disk == "durable":
            self.state.send(from_node, m.DurableCommitted(generation=save.generation))
        elif save.disk == "dropped":
            self._answer_dropped(from_node, save)
        else:
            self._open_disk(save)
            save.votes[message.rank] = message.record
            save.memory_only.discard(message.rank)
            self.join_writers(save)
            self._complete_disk(save)

    def rank_dropped(self, from_node: int, message: m.RankDropped) -> None:
        """One rank will never have it, so no rank does."""
        save = self._save(from_node, message.generation, 0)
        if save is None:
            return
        if save.memory == "committed" and message.memory:
            detail = f"rank {message.rank} gave up {save.generation} after sealing it"
            self.state.emit(m.Report(kind="violation", detail=detail))
            self._answer_dropped(from_node, save)
        elif message.memory:
            self.drop_memory(save, f"rank {message.rank}: {message.reason}")
        elif save.disk == "dropped":
            self._answer_dropped(from_node, save)
        else:
            self.drop_disk(save, f"rank {message.rank}: {message.reason}")
            if message.full:
                self.make_room()

    def _save(self, from_node: int, generation: Generation, step: int) -> Save | None:
        """The save a report is about; None if it needs no more thought."""
        state = self.state
        if not state.accepts(generation):
            state.stale(f"news of {generation} from node {from_node}")
            return None
        save = state.saves.get(generation)
        if save is None and state.floor is not None and generation <= state.floor:
            self._answer_forgotten(from_node, generation)
            return None
        if save is None:
            save = Save(generation=generation, step=step, began_s=state.now_s)
            state.saves[generation] = save
        if step and save.step and step != save.step:
            # A rank counts differently: its shard is of another moment of the training.
            self.drop_memory(save, f"ranks disagree on its step: {save.step} and {step}")
        if save.memory == "dropped":
            self._answer_dropped(from_node, save)
            return None
        return save

    def _answer_forgotten(self, node: int, generation: Generation) -> None:
        """Below the floor it was dropped, or all ranks hold something newer: nothing is lost."""
        if generation in self.state.catalogue:
            self.state.send(node, m.DurableCommitted(generation=generation))
        else:
            reason = "superseded"
            self.state.send(
                node, m.GenerationDropped(generation=generation, reason=reason, memory=True)
            )

    def _answer_dropped(self, node: int, save: Save) -> None:
        """Repeat the verdict, and trash again: a late writer may have made the directory anew."""
        memory = save.memory == "dropped"
        generation, reason = save.generation, save.drop_reason
        self.state.send(
            node, m.GenerationDropped(generation=generation, reason=reason, memory=memory)
        )
        if save.disk == "dropped":
            self.state.emit(m.TrashGeneration(generation=generation, reason=reason))

    # ------------------------------------------------------------------ memory

    def _complete_memory(self, save: Save) -> None:
        state = self.state
        if save.memory != "open" or not self.memory_complete(save):
            return
        verdict = self._replicas.compare(state.term, state.nodes, save.sealed.values())
        if isinstance(verdict, str):
            self.drop_memory(save, f"{m.REPLICAS_DIFFER}: {verdict}")
            return
        save.dispute = verdict
        disputed: m.Health = "good" if verdict is None else "suspect"
        save.worst = worst([disputed, *(shard.health for shard in save.sealed.values())])
        save.go_memory("committed")
        health = self._health(save)
        newer = state.memory_committed is None or save.generation > state.memory_committed
        if health == "good" and newer:
            state.memory_committed = save.generation
        state.broadcast(self._committed(save, health))
        self._drop_older_seals(save)
        self.replicating.begin_round()
        if state.breakpoint or state.unreachable or state.bare:
            self.persist_newest()

    def _committed(self, save: Save, health: m.Health) -> m.MemoryCommitted:
        return m.MemoryCommitted(generation=save.generation, health=health, dispute=save.dispute)

    def _drop_older_seals(self, save: Save) -> None:
        """Ranks seal in order: an older open save can never be completed."""
        for older in list(self.state.saves.values()):
            if older.generation < save.generation and older.memory == "open":
                self.drop_memory(older, f"{save.generation} is newer")
        self._forget()

    def drop_memory(self, save: Save, reason: str) -> None:
        """It can never be committed, neither to memory nor to disk."""
        if save.memory != "open":
            return
        save.go_memory("dropped")
        dropped = m.GenerationDropped(generation=save.generation, reason=reason, memory=True)
        self.state.broadcast(dropped)
        self._drop_files(save, reason)

    def _health(self, save: Save) -> m.Health:
        """The health of a memory-committed save, with later findings."""
        read: m.Health = "suspect" if save.generation in self.state.suspect else "good"
        return worst([read, save.worst or "good"])

    # ------------------------------------------------------------------ disk

    def _open_disk(self, save: Save) -> None:
        if save.disk == "none":
            save.go_disk("open")
            save.disk_began_s = self.state.now_s

    def join_writers(self, save: Save) -> None:
        """Rule 18: if one rank writes a generation, all write it.

        Ranks learn at different moments that an older one is durable.  With a limit on how many are
        under way, they would begin different ones for ever.
        """
        if save.disk == "open" and save.memory_only:
            asked, save.memory_only = sorted(save.memory_only), set()
            save.joining.update(asked)
            self._ask_to_persist(save, asked)

    def _complete_disk(self, save: Save) -> None:
        state = self.state
        if save.disk != "open" or not self.disk_complete(save):
            return
        lost = bases_of(save.votes.values()) - set(state.catalogue)
        if lost:
            self.drop_disk(save, f"is stored as a difference to {min(lost)}, which is gone")
            return
        save.go_disk("committing")
        ranks = sorted(save.votes)
        entry = m.WriteCommit(
            generation=save.generation,
            step=save.step,
            world_size=state.world_size,
            parent=state.parents.get(state.term),
            records=tuple(save.votes[rank] for rank in ranks),
            layout_digests=tuple(save.sealed[rank].layout_digest for rank in ranks),
            health=self._health(save),
        )
        state.emit(entry)

    def drop_disk(self, save: Save, reason: str) -> None:
        """It will never be durable; what ranks hold in memory stays."""
        if save.disk in ("durable", "dropped", "committing"):
            return
        self._drop_files(save, reason)
        dropped = m.GenerationDropped(generation=save.generation, reason=reason, memory=False)
        self.state.broadcast(dropped)

    def _drop_files(self, save: Save, reason: str) -> None:
        save.drop_reason = save.drop_reason or reason
        began = save.disk == "open"
        if save.disk != "dropped":
            save.go_disk("dropped")
        if began:
            self.state.emit(m.TrashGeneration(generation=save.generation, reason=reason))

    def commit_written(self, event: m.CommitWritten) -> None:
        """Durable from now on: tell everybody, check it, let old ones go."""
        state = self.state
        save = state.saves.get(event.generation)
        if save is None or save.disk != "committing" or not state.accepts(event.generation):
            state.stale(event)
            return
        save.go_disk("durable")
        state.bare = False
        state.catalogue[save.generation] = self.entry_of(save, event.created_s)
        if not state.ever_durable:
            state.ever_durable = True
            state.emit(m.MarkEverCommitted(term=state.term))
        state.broadcast(m.DurableCommitted(generation=save.generation))
        state.emit(m.VerifyGeneration(generation=save.generation))
        for older in list(state.saves.values()):
            if older.generation < save.generation and older.disk == "open":
                self.drop_disk(older, f"{save.generation} is durable")
        self.retain()
        self._forget()

    def entry_of(self, save: Save, created_s: float) -> m.CatalogueEntry:
        """Its entry in the catalogue, once its COMMIT stands."""
        ranks = sorted(save.votes)
        return m.CatalogueEntry(
            generation=save.generation,
            step=save.step,
            world_size=self.state.world_size,
            parent=self.state.parents.get(self.state.term),
            records=tuple(save.votes[rank] for rank in ranks),
            layout_digests=tuple(save.sealed[rank].layout_digest for rank in ranks),
            created_s=created_s,
            health=self._health(save),
        )

    def commit_failed(self, event: m.CommitFailed) -> None:
        """Not durable.  The record may stand all the same: then a later restore may find it."""
        state = self.state
        save = state.saves.get(event.generation)
        if save is None or save.disk != "committing" or not state.accepts(event.generation):
            state.stale(event)
            return
        save.go_disk("dropped")
        state.emit(m.TrashGeneration(generation=save.generation, reason=event.reason))
        dropped = m.GenerationDropped(generation=save.generation, reason=event.reason, memory=False)
        state.broadcast(dropped)
        if event.fenced:
            self.fence(event.reason)

    def note_read_back(self, event: m.GenerationVerified) -> None:
        """Record the verdict of a reading in the catalogue."""
        entry = self.state.catalogue.get(event.generation)
        if entry is not None:
            health = worst([entry.health, event.health])
            self.state.catalogue[event.generation] = replace(
                entry, verified=event.ok, corrupt=not event.ok, health=health
            )

    def retain_read_back(self, event: m.GenerationVerified) -> None:
        """Only a checkpoint that was read back, and is healthy, may push older ones out."""
        state = self.state
        if event.generation not in state.catalogue or state.phase != "running":
            state.stale(event)
            return
        if not event.ok:
            detail = f"{event.generation} was read back and differs: {event.detail}"
            state.emit(m.Report(kind="warning", detail=detail))
        self.retain()

    def doubt(self, generation: Generation, reason: str) -> None:
        """Rule 16: it was taken for healthy; from now on it displaces nothing."""
        state = self.state
        if generation in state.suspect:
            return
        state.suspect.add(generation)
        state.emit(m.Report(kind="warning", detail=f"{generation} is suspect: {reason}"))
        if state.accepts(generation):
            self._displace_nothing(generation)

    def _displace_nothing(self, generation: Generation) -> None:
        state = self.state
        if state.memory_committed == generation:
            sound = (g for g, save in state.saves.items() if self._is_sound_in_memory(save))
            state.memory_committed = max(sound, default=None)
        state.broadcast(m.MemoryCommitted(generation=generation, health="suspect"))
        self.replicating.unprotect(generation, "it is suspect")
        self.replicating.begin_round()

    def _is_sound_in_memory(self, save: Save) -> bool:
        return save.memory == "committed" and self._health(save) == "good"

    def retain(self) -> None:
        """Delete what retention lets go, and drop optimizer state of older ones that stay."""
        self._delete(self.to_delete())
        state = self.state
        for generation in self.to_reduce():
            if generation not in state.dropping:
                state.dropping.add(generation)
                state.emit(m.DropOptimizerState(term=state.term, generation=generation))

    def optimizer_state_dropped(self, event: m.OptimizerStateDropped) -> None:
        """Its COMMIT names other shards; a drop that failed is tried again by the next start."""
        state = self.state
        if event.term != state.term:
            state.stale(event)
            return
        if event.records or event.later:
            state.dropping.discard(event.generation)
        entry = state.catalogue.get(event.generation)
        if entry is None:
            state.stale(event)
        elif event.records:
            state.catalogue[event.generation] = replace(
                entry, records=event.records, layout_digests=(), reshardable=False
            )
        elif not event.later:
            detail = f"{event.generation} keeps its optimizer state: {event.reason}"
            state.emit(m.Report(kind="warning", detail=detail))

    def make_room(self) -> None:
        """The disk is full: make room for new generations.

        Generations older than the newest verified one give way, even if the policy keeps them.
        """
        doomed = self._beyond(Retention(keep_last=1))
        if doomed:
            names = ", ".join(map(str, doomed))
            self.state.emit(m.Report(kind="warning", detail=f"the disk is full: {names} give way"))
        self._delete(doomed)

    def _delete(self, doomed: tuple[Generation, ...]) -> None:
        state = self.state
        if doomed:
            for generation in doomed:
                del state.catalogue[generation]
                state.suspect.discard(generation)
            state.emit(m.DeleteGenerations(term=state.term, generations=doomed))

    # ------------------------------------------------------------------ breakpoint, fence, time

    def breakpoint_relayed(
        self, from_node: int, message: m.Relayed, event: m.BreakpointRequested
    ) -> None:
        """A node knows that the end is near."""
        if message.incarnation != self.state.incarnation or self.state.phase != "running":
            self.state.stale(event)
            return
        self.break_off(event.reason)

    def break_off(self, reason: str) -> None:
        """From now on every memory commit goes to disk, beginning with the newest there is."""
        if not self.state.breakpoint:
            self.state.breakpoint = True
            self.state.emit(m.Report(kind="warning", detail=f"breakpoint save: {reason}"))
        self.persist_newest()

    def persist_newest(self) -> None:
        """Ask for the newest memory commit on disk, unless it is on its way."""
        state = self.state
        save = state.saves.get(state.memory_committed) if state.memory_committed else None
        if save is not None and save.disk == "none" and save.generation not in state.catalogue:
            self._open_disk(save)
            self.want_persisted(save)

    def want_persisted(self, save: Save) -> None:
        """Ask all ranks without a vote; who writes already has nothing to do."""
        self._ask_to_persist(save, [r for r in range(self.state.world_size) if r not in save.votes])

    def _ask_to_persist(self, save: Save, ranks: Iterable[int]) -> None:
        """Every node hears of its own ranks alone."""
        for node, here in sorted(self.state.by_node(ranks).items()):
            self.state.send(node, m.PersistWanted(generation=save.generation, ranks=tuple(here)))

    def directory_renewed(self, event: m.DirectoryRenewed) -> None:
        """The durable generations are gone with the directory; memory still has its own."""
        state = self.state
        if state.phase != "running" or event.term != state.term:
            state.stale(event)
            return
        state.emit(m.Report(kind="warning", detail="the directory was empty and was made again"))
        state.catalogue.clear()
        state.ever_durable, state.bare = False, True
        self.persist_newest()

    def directory_gone(self, event: m.DirectoryGone) -> None:
        """A claim that is missing is not a newer one: the training goes on."""
        if event.term == self.state.term:
            self.state.emit(m.Report(kind="warning", detail=event.reason))

    def fence(self, reason: str) -> None:
        """A newer term owns the directory."""
        state = self.state
        assert state.incarnation is not None
        state.go("fenced")
        fenced = m.TermFenced(incarnation=state.incarnation, term=state.term, reason=reason)
        state.broadcast(fenced)
        state.emit(m.Report(kind="fenced", detail=f"term {state.term}: {reason}"))

    def expire_saves(self) -> None:
        """A vote missing at the deadline is a no."""
        state = self.state
        for save in list(state.saves.values()):
            seal_s, disk_s = state.now_s - save.began_s, state.now_s - save.disk_began_s
            if save.memory == "open" and seal_s >= state.deadlines.seal_s:
                missing = sorted(set(range(state.world_size)) - set(save.sealed))
                self.drop_memory(save, f"ranks {missing} did not seal within {seal_s:.0f} s")
            elif save.disk == "open" and disk_s >= state.deadlines.commit_s:
                missing = sorted(set(range(state.world_size)) - set(save.votes))
                self.drop_disk(save, f"ranks {missing} did not persist within {disk_s:.0f} s")
        self._forget()

    def repeat_saves(self) -> None:
        """A late verdict or a request to write may have been lost, with a keeper as well."""
        state = self.state
        for save in state.saves.values():
            newest = state.memory_committed is None or save.generation > state.memory_committed
            if newest and save.memory == "committed" and save.generation in state.suspect:
                state.broadcast(m.MemoryCommitted(generation=save.generation, health="suspect"))
            if save.disk == "open" and save.memory == "committed":
                self.want_persisted(save)

    def _forget(self) -> None:
        """Bound the records: settled saves are forgotten, except the one that protects slots."""
        state = self.state
        old = sorted(
            g for g, s in state.saves.items() if s.finished and g != state.memory_committed
        )
        for generation in old[:-_REMEMBERED]:
            del state.saves[generation]
            state.floor = max(state.floor or generation, generation)
