"""The saving third of the coordinator: seals and votes become commits, or nothing.

A generation is *memory-committed* when all ranks sealed it, *durable* when all ranks also wrote
their files and the commit record stands.  Both verdicts need every rank; a missing one can only
turn the generation into nothing.
"""

from collections.abc import Iterable
from dataclasses import replace

from autockpt.executors.protocol.coordinator.replicating import Protecting
from autockpt.executors.protocol.coordinator.state import Save
from autockpt.executors.protocol.messages import (
    REPLICAS_DIFFER,
    BreakpointWanted,
    CatalogueEntry,
    CommitFailed,
    CommitWritten,
    DeleteGenerations,
    DirectoryGone,
    DirectoryRenewed,
    DurableCommitted,
    GenerationDropped,
    GenerationVerified,
    Health,
    HeldShard,
    MarkEverCommitted,
    MemoryCommitted,
    PersistWanted,
    RankBegan,
    RankDropped,
    RankPrepared,
    RankSealed,
    Report,
    TermFenced,
    TrashGeneration,
    VerifyGeneration,
    WriteCommit,
)
from autockpt.executors.protocol.retention import bases_of, deletions
from autockpt.values.generation import Generation
from autockpt.values.goal import Retention

_REMEMBERED = 32
"""Settled saves kept to answer late questions exactly; older ones are answered by rule."""


def worst(verdicts: list[Health]) -> Health:
    """A generation is as healthy as its worst shard."""
    if "bad" in verdicts:
        return "bad"
    return "suspect" if "suspect" in verdicts else "good"


def replicas_that_differ(shards: Iterable[HeldShard]) -> str:
    """Who does not hold what others say they hold alike, "" when all agree.

    Each of them stores a part of it only: what they restored together would be nobody's state.
    """
    said: dict[tuple[int, ...], str] = {}
    for shard in shards:
        for proof in shard.replicas:
            if said.setdefault(proof.members, proof.digest) != proof.digest:
                return f"rank {shard.rank} holds other values than ranks {list(proof.members)}"
    return ""


class Saving(Protecting):
    """Counts seals and votes of the open term."""

    # ------------------------------------------------------------------ rules

    def memory_complete(self, save: Save) -> bool:
        """Rule 3: memory-committed means sealed by every rank."""
        return len(save.sealed) == self.world_size

    def disk_complete(self, save: Save) -> bool:
        """Rule 4: COMMIT is written only with the vote of every rank, each sealed and persisted."""
        return len(save.votes) == self.world_size and self.memory_complete(save)

    def to_delete(self) -> tuple[Generation, ...]:
        """Rule 10: what retention lets go, seen from the open term."""
        return self._beyond(self.retention)

    def _beyond(self, retention: Retention) -> tuple[Generation, ...]:
        live = (s for s in self.saves.values() if s.disk in ("open", "committing"))
        pinned = frozenset[Generation]().union(*(bases_of(s.votes.values()) for s in live))
        return deletions(self.catalogue.values(), retention, chain=self.chain, pinned=pinned)

    # ------------------------------------------------------------------ what ranks report

    def rank_began(self, from_node: int, message: RankBegan) -> None:
        """A slot was granted: the save exists, and of older ones this rank seals the named only."""
        save = self._save(from_node, message.generation, message.step)
        if save is not None:
            if message.disk:
                save.memory_only.discard(message.rank)
                self._open_disk(save)
            elif message.rank not in save.votes and message.rank not in save.joining:
                save.memory_only.add(message.rank)
            self.join_writers(save)
        if self.accepts(message.generation):
            newest = self.begun.get(message.rank)
            if newest is None or message.generation > newest.generation:
                self.begun[message.rank] = message
            for older in [save for save in self.saves.values() if save.memory == "open"]:
                self._give_up_if_passed(older, message.rank)

    def _give_up_if_passed(self, save: Save, rank: int) -> None:
        """A rank whose keeper was away skipped saves without a word; the others hold theirs.

        In either order of the news: of the save, and of the rank that went on.  A save that was
        not looked at before is compared with all ranks, later with the one that has just begun:
        comparing with all each time would cost the square of their number.
        """
        ranks = (rank,) if save.compared else tuple(self.begun)
        save.compared = True
        for one in ranks:
            newest = self.begun[one]
            passed = newest.generation > save.generation and save.generation not in newest.coming
            if passed and one not in save.sealed:
                self.drop_memory(save, f"rank {one} went on to {newest.generation}")

    def rank_sealed(self, from_node: int, message: RankSealed) -> None:
        """One more rank holds it; the last one makes it memory-committed."""
        shard = message.shard
        save = self._save(from_node, shard.generation, shard.step)
        if save is None:
            return
        if save.memory == "committed":
            health = self._health(save)
            self.send(from_node, MemoryCommitted(generation=save.generation, health=health))
            return
        save.sealed[shard.rank] = shard
        self._complete_memory(save)
        self._complete_disk(save)

    def rank_prepared(self, from_node: int, message: RankPrepared) -> None:
        """A vote; the last one makes the commit."""
        save = self._save(from_node, message.generation, message.step)
        if save is None:
            return
        if save.disk == "durable":
            self.send(from_node, DurableCommitted(generation=save.generation))
        elif save.disk == "dropped":
            self._answer_dropped(from_node, save)
        else:
            self._open_disk(save)
            save.votes[message.rank] = message.record
            save.memory_only.discard(message.rank)
            self.join_writers(save)
            self._complete_disk(save)

    def rank_dropped(self, from_node: int, message: RankDropped) -> None:
        """One rank will never have it, so nobody does."""
        save = self._save(from_node, message.generation, 0)
        if save is None:
            return
        if save.memory == "committed" and message.memory:
            detail = f"rank {message.rank} gave up {save.generation} after sealing it"
            self.emit(Report(kind="violation", detail=detail))
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
        if not self.accepts(generation):
            self.stale(f"news of {generation} from node {from_node}")
            return None
        save = self.saves.get(generation)
        if save is None and self.floor is not None and generation <= self.floor:
            self._answer_forgotten(from_node, generation)
            return None
        if save is None:
            save = Save(generation=generation, step=step, began_s=self.now_s)
            self.saves[generation] = save
        if step and save.step and step != save.step:
            # A rank counts differently: its shard is of another moment of the training.
            self.drop_memory(save, f"ranks disagree on its step: {save.step} and {step}")
        if save.memory == "dropped":
            self._answer_dropped(from_node, save)
            return None
        return save

    def _answer_forgotten(self, node: int, generation: Generation) -> None:
        """Below the floor it was dropped, or all ranks hold something newer: nothing is lost."""
        if generation in self.catalogue:
            self.send(node, DurableCommitted(generation=generation))
        else:
            reason = "superseded"
            self.send(node, GenerationDropped(generation=generation, reason=reason, memory=True))

    def _answer_dropped(self, node: int, save: Save) -> None:
        """Repeat the verdict, and trash again: a late writer may have made the directory anew."""
        memory = save.memory == "dropped"
        generation, reason = save.generation, "dropped before"
        self.send(node, GenerationDropped(generation=generation, reason=reason, memory=memory))
        if save.disk == "dropped":
            self.emit(TrashGeneration(generation=generation, reason=reason))

    # ------------------------------------------------------------------ memory

    def _complete_memory(self, save: Save) -> None:
        if save.memory != "open" or not self.memory_complete(save):
            return
        differing = replicas_that_differ(save.sealed.values())
        if differing:
            self.drop_memory(save, f"{REPLICAS_DIFFER}: {differing}")
            return
        save.worst = worst([shard.health for shard in save.sealed.values()])
        save.go_memory("committed")
        health = self._health(save)
        newer = self.memory_committed is None or save.generation > self.memory_committed
        if health == "good" and newer:
            self.memory_committed = save.generation
        self.broadcast(MemoryCommitted(generation=save.generation, health=health))
        self._drop_older_seals(save)
        self.begin_round()
        if self.breakpoint or self.unreachable or self.bare:
            self.persist_newest()

    def _drop_older_seals(self, save: Save) -> None:
        """Ranks seal in order: what is still open below can never be completed."""
        for older in list(self.saves.values()):
            if older.generation < save.generation and older.memory == "open":
                self.drop_memory(older, f"{save.generation} is newer")
        self._forget()

    def drop_memory(self, save: Save, reason: str) -> None:
        """It can never be committed, neither to memory nor to disk."""
        if save.memory != "open":
            return
        save.go_memory("dropped")
        dropped = GenerationDropped(generation=save.generation, reason=reason, memory=True)
        self.broadcast(dropped)
        self._drop_files(save, reason)

    def _health(self, save: Save) -> Health:
        """Of a save that is memory-committed, with what was found since."""
        read: Health = "suspect" if save.generation in self.suspect else "good"
        return worst([read, save.worst or "good"])

    # ------------------------------------------------------------------ disk

    def _open_disk(self, save: Save) -> None:
        if save.disk == "none":
            save.go_disk("open")
            save.disk_began_s = self.now_s

    def join_writers(self, save: Save) -> None:
        """Rule 18: what one rank writes, all write.

        Ranks hear at different moments that an older one is durable, and with a limit on how many
        are under way they would begin different ones for ever.
        """
        if save.disk == "open" and save.memory_only:
            asked, save.memory_only = sorted(save.memory_only), set()
            save.joining.update(asked)
            self._ask_to_persist(save, asked)

    def _complete_disk(self, save: Save) -> None:
        if save.disk != "open" or not self.disk_complete(save):
            return
        lost = bases_of(save.votes.values()) - set(self.catalogue)
        if lost:
            self.drop_disk(save, f"is stored as a difference to {min(lost)}, which is gone")
            return
        save.go_disk("committing")
        ranks = sorted(save.votes)
        entry = WriteCommit(
            generation=save.generation,
            step=save.step,
            world_size=self.world_size,
            parent=self.parents.get(self.term),
            records=tuple(save.votes[rank] for rank in ranks),
            layout_digests=tuple(save.sealed[rank].layout_digest for rank in ranks),
            health=self._health(save),
        )
        self.emit(entry)

    def drop_disk(self, save: Save, reason: str) -> None:
        """It will never be durable; what ranks hold in memory stays."""
        if save.disk in ("durable", "dropped", "committing"):
            return
        self._drop_files(save, reason)
        dropped = GenerationDropped(generation=save.generation, reason=reason, memory=False)
        self.broadcast(dropped)

    def _drop_files(self, save: Save, reason: str) -> None:
        began = save.disk == "open"
        if save.disk != "dropped":
            save.go_disk("dropped")
        if began:
            self.emit(TrashGeneration(generation=save.generation, reason=reason))

    def commit_written(self, event: CommitWritten) -> None:
        """Durable from now on: tell everybody, check it, let old ones go."""
        save = self.saves.get(event.generation)
        if save is None or save.disk != "committing" or not self.accepts(event.generation):
            self.stale(event)
            return
        save.go_disk("durable")
        self.bare = False
        self.catalogue[save.generation] = self._entry(save, event.created_s)
        if not self.ever_durable:
            self.ever_durable = True
            self.emit(MarkEverCommitted(term=self.term))
        self.broadcast(DurableCommitted(generation=save.generation))
        self.emit(VerifyGeneration(generation=save.generation))
        for older in list(self.saves.values()):
            if older.generation < save.generation and older.disk == "open":
                self.drop_disk(older, f"{save.generation} is durable")
        self.retain()
        self._forget()

    def _entry(self, save: Save, created_s: float) -> CatalogueEntry:
        ranks = sorted(save.votes)
        return CatalogueEntry(
            generation=save.generation,
            step=save.step,
            world_size=self.world_size,
            parent=self.parents.get(self.term),
            records=tuple(save.votes[rank] for rank in ranks),
            layout_digests=tuple(save.sealed[rank].layout_digest for rank in ranks),
            created_s=created_s,
            health=self._health(save),
        )

    def commit_failed(self, event: CommitFailed) -> None:
        """Not durable.  The record may stand all the same: then a later restore may find it."""
        save = self.saves.get(event.generation)
        if save is None or save.disk != "committing" or not self.accepts(event.generation):
            self.stale(event)
            return
        save.go_disk("dropped")
        self.emit(TrashGeneration(generation=save.generation, reason=event.reason))
        dropped = GenerationDropped(generation=save.generation, reason=event.reason, memory=False)
        self.broadcast(dropped)
        if event.fenced:
            self.fence(event.reason)

    def generation_verified(self, event: GenerationVerified) -> None:
        """Only what was read back, and is healthy, may push older commits out."""
        generation, entry = event.generation, self.catalogue.get(event.generation)
        if entry is not None:
            health = worst([entry.health, event.health])
            self.catalogue[generation] = replace(
                entry, verified=event.ok, corrupt=not event.ok, health=health
            )
        if event.health != "good":  # of an incarnation that is over, too: the next may choose it
            self.doubt(generation, event.detail)
        if entry is None or self.phase != "running":
            self.stale(event)
            return
        if not event.ok:
            detail = f"{generation} was read back and differs: {event.detail}"
            self.emit(Report(kind="warning", detail=detail))
        self.retain()

    def doubt(self, generation: Generation, reason: str) -> None:
        """Rule 16: it was taken for healthy; from now on it displaces nothing."""
        if generation in self.suspect:
            return
        self.suspect.add(generation)
        self.emit(Report(kind="warning", detail=f"{generation} is suspect: {reason}"))
        if self.accepts(generation):
            self._displace_nothing(generation)

    def _displace_nothing(self, generation: Generation) -> None:
        if self.memory_committed == generation:
            sound = (g for g, save in self.saves.items() if self._is_sound_in_memory(save))
            self.memory_committed = max(sound, default=None)
        self.broadcast(MemoryCommitted(generation=generation, health="suspect"))
        self.unprotect(generation, "it is suspect")
        self.begin_round()

    def _is_sound_in_memory(self, save: Save) -> bool:
        return save.memory == "committed" and self._health(save) == "good"

    def retain(self) -> None:
        """Delete what retention lets go."""
        self._delete(self.to_delete())

    def make_room(self) -> None:
        """The disk is full: what is older than the newest that was read back gives way to what
        comes, whatever the policy keeps."""
        doomed = self._beyond(Retention(keep_last=1))
        if doomed:
            names = ", ".join(map(str, doomed))
            self.emit(Report(kind="warning", detail=f"the disk is full: {names} give way"))
        self._delete(doomed)

    def _delete(self, doomed: tuple[Generation, ...]) -> None:
        if doomed:
            for generation in doomed:
                del self.catalogue[generation]
                self.suspect.discard(generation)
            self.emit(DeleteGenerations(term=self.term, generations=doomed))

    # ------------------------------------------------------------------ breakpoint, fence, time

    def breakpoint_wanted(self, from_node: int, message: BreakpointWanted) -> None:
        """Somebody knows that the end is near."""
        if message.incarnation != self.incarnation or self.phase != "running":
            self.stale(message)
            return
        self.break_off(message.reason)

    def break_off(self, reason: str) -> None:
        """From now on every memory commit goes to disk, beginning with the newest there is."""
        if not self.breakpoint:
            self.breakpoint = True
            self.emit(Report(kind="warning", detail=f"breakpoint save: {reason}"))
        self.persist_newest()

    def persist_newest(self) -> None:
        """Ask for the newest memory commit on disk, unless it is on its way."""
        save = self.saves.get(self.memory_committed) if self.memory_committed else None
        if save is not None and save.disk == "none" and save.generation not in self.catalogue:
            self._open_disk(save)
            self.want_persisted(save)

    def want_persisted(self, save: Save) -> None:
        """Ask all ranks without a vote; who writes already has nothing to do."""
        self._ask_to_persist(save, [r for r in range(self.world_size) if r not in save.votes])

    def _ask_to_persist(self, save: Save, ranks: Iterable[int]) -> None:
        """Every node hears of its own ranks alone."""
        for node, here in sorted(self.by_node(ranks).items()):
            self.send(node, PersistWanted(generation=save.generation, ranks=tuple(here)))

    def directory_renewed(self, event: DirectoryRenewed) -> None:
        """What was durable is gone with the directory; what is in memory is not."""
        if self.phase != "running" or event.term != self.term:
            self.stale(event)
            return
        self.emit(Report(kind="warning", detail="the directory was empty and was made again"))
        self.catalogue.clear()
        self.ever_durable, self.bare = False, True
        self.persist_newest()

    def directory_gone(self, event: DirectoryGone) -> None:
        """A claim that is missing is not a newer one: the training goes on."""
        if event.term == self.term:
            self.emit(Report(kind="warning", detail=event.reason))

    def fence(self, reason: str) -> None:
        """A newer term owns the directory."""
        assert self.incarnation is not None
        self.go("fenced")
        fenced = TermFenced(incarnation=self.incarnation, term=self.term, reason=reason)
        self.broadcast(fenced)
        self.emit(Report(kind="fenced", detail=f"term {self.term}: {reason}"))

    def expire_saves(self) -> None:
        """A vote missing at the deadline is a no."""
        for save in list(self.saves.values()):
            seal_s, disk_s = self.now_s - save.began_s, self.now_s - save.disk_began_s
            if save.memory == "open" and seal_s >= self.deadlines.seal_s:
                missing = sorted(set(range(self.world_size)) - set(save.sealed))
                self.drop_memory(save, f"ranks {missing} did not seal within {seal_s:.0f} s")
            elif save.disk == "open" and disk_s >= self.deadlines.commit_s:
                missing = sorted(set(range(self.world_size)) - set(save.votes))
                self.drop_disk(save, f"ranks {missing} did not persist within {disk_s:.0f} s")
        self._forget()

    def repeat_saves(self) -> None:
        """A late verdict or a request to write may have been lost, with a keeper as well."""
        for save in self.saves.values():
            newest = self.memory_committed is None or save.generation > self.memory_committed
            if newest and save.memory == "committed" and save.generation in self.suspect:
                self.broadcast(MemoryCommitted(generation=save.generation, health="suspect"))
            if save.disk == "open" and save.memory == "committed":
                self.want_persisted(save)

    def _forget(self) -> None:
        """Bound the records: settled saves are forgotten, except the one that protects slots."""
        old = sorted(g for g, s in self.saves.items() if s.finished and g != self.memory_committed)
        for generation in old[:-_REMEMBERED]:
            del self.saves[generation]
            self.floor = max(self.floor or generation, generation)
