"""Each rule of the protocol taken away, one at a time: the simulator must notice.

A mutant overrides one small method of a part of the real machines (or of the storage habits they
rely on).
`budget` is the number of seeds, from 0, within which it must be found;
docs/internals/protocol.md names the mutant beside the rule it proves.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any

from autockpt.executors.protocol import messages as m
from autockpt.executors.protocol.admission import Admission
from autockpt.executors.protocol.coordinator.attaching import Attaching as CoordinatorAttaching
from autockpt.executors.protocol.coordinator.choosing import Choosing
from autockpt.executors.protocol.coordinator.machine import CoordinatorParts, CoordinatorProtocol
from autockpt.executors.protocol.coordinator.plan_change import PlanChange
from autockpt.executors.protocol.coordinator.replicating import (
    Replicating as CoordinatorReplicating,
)
from autockpt.executors.protocol.coordinator.restoring import Restoring as CoordinatorRestoring
from autockpt.executors.protocol.coordinator.same_term import SameTerm
from autockpt.executors.protocol.coordinator.saving import Saving as CoordinatorSaving
from autockpt.executors.protocol.coordinator.state import CoordinatorState, Proposal, Round, Save
from autockpt.executors.protocol.node.attaching import Attaching as NodeAttaching
from autockpt.executors.protocol.node.machine import NodeParts, NodeProtocol
from autockpt.executors.protocol.node.replica_slots import ReplicaSlots as NodeReplicaSlots
from autockpt.executors.protocol.node.replicating import Replicating as NodeReplicating
from autockpt.executors.protocol.node.restoring import Restoring as NodeRestoring
from autockpt.executors.protocol.node.saving import Saving as NodeSaving
from autockpt.executors.protocol.node.slots import Slot, Slots
from autockpt.executors.protocol.node.state import Key, LocalRank
from autockpt.executors.protocol.retention import bases_of, counts, reductions
from autockpt.executors.protocol.selection import Choice, Question, choose
from autockpt.values.generation import Generation
from tests.simulation.actors import Disk, Rules, Runtime

# --------------------------------------------------------------------------- slots


class OverwriteAnySlot(NodeSaving):
    """Double buffering per rank: take the oldest slot, whatever the others hold."""

    def may_overwrite(self, local: LocalRank, slot: Slot) -> bool:
        return slot.state != "writing" and not self.is_busy(local, slot)


class OverwriteWhenSealedHere(NodeSaving):
    """Free a slot when this rank, not all ranks, holds something newer."""

    def may_overwrite(self, local: LocalRank, slot: Slot) -> bool:
        if slot.state != "sealed" or slot.generation is None or self.is_busy(local, slot):
            return slot.state == "empty"
        held = [s.generation for s in local.slots.slots if s.state == "sealed" and s.generation]
        return any(generation > slot.generation for generation in held)


class OverwriteWhilePersisted(NodeSaving):
    """A slot under way to storage is not protected, and its file is written on."""

    def is_busy(self, local: LocalRank, slot: Slot) -> bool:
        return False

    def overwritten(self, local: LocalRank, slot: Slot) -> None:
        if slot.generation is not None:
            self.state.unsettled.pop((local.rank, slot.generation), None)


class OverwriteRestored(NodeSaving):
    """What was restored from is free at once."""

    def is_superseded(self, local: LocalRank, held: Generation) -> bool:
        parent = self.state.chain[0].parent if self.state.chain else None
        return parent is not None and held <= parent


class KeepUndurable(NodeSaving):
    """A single slot waits for the disk to take what the disk has refused."""

    def is_on_its_way(self, key: Key) -> bool:
        return self.state.durable is None or key[1] > self.state.durable


class GiveUpUnsealed(NodeSaving):
    """A single slot is free when nobody writes it, although others may still seal what it holds."""

    def is_on_its_way(self, key: Key) -> bool:
        return key in self.state.persists


class KeepDiscarded(NodeSaving):
    """A torn snapshot counts as sealed."""

    def shard_discarded(self, event: m.ShardDiscarded) -> None:
        self.shard_sealed(m.ShardSealed(rank=event.rank, generation=event.generation, root="torn"))


class ReuseNames(NodeSaving):
    """A second attempt writes the file of the first one."""

    def next_attempt(self, key: Key) -> int:
        return 1


# --------------------------------------------------------------------------- commits


class MemoryCommitWithOneMissing(CoordinatorSaving):
    """All ranks but one are enough in memory."""

    def memory_complete(self, save: Save) -> bool:
        return len(save.sealed) >= max(1, self.state.world_size - 1)


class CommitBeforeAllVotes(CoordinatorSaving):
    """All votes but one are enough on disk."""

    def disk_complete(self, save: Save) -> bool:
        return len(save.votes) >= max(1, self.state.world_size - 1) and self.memory_complete(save)


class NoTermCheck(Runtime):
    """COMMIT is written without looking at the terms."""

    def fenced_before_commit(self, disk: Disk, term: int) -> bool:
        return False

    def fenced_after_commit(self, disk: Disk, term: int) -> bool:
        return False


class MissingIsNewer(Runtime):
    """A claim that is gone counts as fenced."""

    def fenced_before_commit(self, disk: Disk, term: int) -> bool:
        return disk.claim != term


class ForgetTerms(CoordinatorAttaching):
    """A directory without claims is taken for a new one."""

    def rank_attached(self, from_node: int, message: m.RankAttached) -> None:
        super().rank_attached(from_node, replace(message, term=0))

    def _take_over(self, attach: m.TrainerAttached) -> None:
        self.state.admission.term = 0
        super()._take_over(attach)


class ForgetWhereTrainersBegan(NodeAttaching):
    """The lineage that running trainers name is not listened to."""

    def _learn_lineage(self, event: m.TrainerAttached) -> None:
        pass


class NoSecondTermCheck(Runtime):
    """The term is checked before COMMIT only."""

    def fenced_after_commit(self, disk: Disk, term: int) -> bool:
        return False


class RetentionKeepsTooFew(CoordinatorSaving):
    """Whatever is in the catalogue counts, abandoned, unread or suspect."""

    def to_delete(self) -> tuple[Generation, ...]:
        keep = max(1, self.state.retention.keep_last)
        return tuple(sorted(self.state.catalogue))[:-keep]


class RetentionCountsUnread(CoordinatorSaving):
    """A commit that was never read back pushes older ones out."""

    def to_delete(self) -> tuple[Generation, ...]:
        unread = self.state.catalogue
        self.state.catalogue = {g: replace(entry, verified=True) for g, entry in unread.items()}
        doomed = super().to_delete()
        self.state.catalogue = unread
        return doomed


class RetentionForgetsBases(CoordinatorSaving):
    """What stays may be a difference to what goes."""

    def to_delete(self) -> tuple[Generation, ...]:
        known = self.state.catalogue
        self.state.catalogue = {g: replace(entry, records=()) for g, entry in known.items()}
        doomed = super().to_delete()
        self.state.catalogue = known
        return doomed


class CommitOnLostBase(CoordinatorSaving):
    """Nobody looks whether what a commit is a difference to is still there."""

    def _complete_disk(self, save: Save) -> None:
        known = dict(self.state.catalogue)
        lost = bases_of(save.votes.values()) - set(known)
        some = next(iter(known.values()), None)
        if some is not None:
            self.state.catalogue |= dict.fromkeys(lost, some)
        super()._complete_disk(save)
        self.state.catalogue = known


# --------------------------------------------------------------------------- numbers


class RestoreSuspect(Choosing):
    """The numbers in a state do not matter to the choice."""

    def question(self) -> Question:
        question = super().question()
        return replace(
            question,
            suspect=frozenset(),
            memory=tuple(replace(shard, health="good") for shard in question.memory),
            committed=tuple(replace(entry, health="good") for entry in question.committed),
        )


class CommitAsGood(CoordinatorState):
    """COMMIT does not say what the seals said."""

    def emit(self, *instructions: m.CoordinatorInstruction) -> None:
        told = (replace(i, health="good") if isinstance(i, m.WriteCommit) else i
                for i in instructions)  # fmt: skip
        super().emit(*told)


class SuspectFreesSlots(NodeSaving):
    """A suspect generation supersedes older ones in memory."""

    def memory_committed(self, message: m.MemoryCommitted) -> None:
        super().memory_committed(replace(message, health="good"))


class DropNearlyAll(CoordinatorSaving):
    """Only the newest that was read back stays whole."""

    def to_reduce(self) -> tuple[Generation, ...]:
        if not self.state.retention.weights_only:
            return ()
        entries = self.state.catalogue.values()
        counted = sorted(e.generation for e in entries if counts(e, self.state.chain))
        return tuple(counted[:-1])


class DropUnread(CoordinatorSaving):
    """Two newer ones are enough, read back or not."""

    def to_reduce(self) -> tuple[Generation, ...]:
        if not self.state.retention.weights_only:
            return ()
        whole = (e.generation for e in self.state.catalogue.values() if not e.weights_only)
        return tuple(sorted(whole))[:-2]


class DropBases(CoordinatorSaving):
    """Optimizer state goes of what others are stored as differences to."""

    def to_reduce(self) -> tuple[Generation, ...]:
        state = self.state
        bare = [replace(e, records=_without(e.records, "base")) for e in state.catalogue.values()]
        return reductions(bare, state.retention, chain=state.chain)


def _without(records: tuple[m.Record, ...], key: str) -> tuple[m.Record, ...]:
    return tuple({k: v for k, v in record.items() if k != key} for record in records)


class SuspectPushesOut(CoordinatorRestoring):
    """Read back whole counts in retention, whatever the numbers."""

    def generation_verified(self, event: m.GenerationVerified) -> None:
        super().generation_verified(replace(event, health="good"))


class ForgetVerdict(CoordinatorState):
    """What was found when it was read back is known for as long as the incarnation lasts."""

    def reset(self) -> None:
        super().reset()
        self.suspect = set()


class VerdictOnlyWhileRunning(CoordinatorRestoring):
    """What is found while nobody trains is of no interest."""

    def generation_verified(self, event: m.GenerationVerified) -> None:
        if self.state.phase == "running":
            super().generation_verified(event)


# --------------------------------------------------------------------------- restore


class IdentityByStep(Choosing):
    """Two shards of the same step are taken for the same generation."""

    def question(self) -> Question:
        question = super().question()
        newest: dict[int, Generation] = {}
        for shard in question.memory:
            newest[shard.step] = max(newest.get(shard.step, shard.generation), shard.generation)
        memory = tuple(replace(s, generation=newest[s.step]) for s in question.memory)
        return replace(question, memory=memory)


class IgnoreLineage(Choosing):
    """The greatest generation wins, even if it was left behind."""

    def question(self) -> Question:
        question = super().question()
        terms = {s.generation.term for s in question.memory}
        terms |= {e.generation.term for e in question.committed}
        chain = tuple(m.TermParent(term=e, parent=_last(e)) for e in sorted(terms))
        return replace(question, chain=chain)


def _last(term: int) -> Generation:
    return Generation(term=term, step=10**9)


class RestoreMixed(Choosing):
    """Every rank restores the newest it has itself."""

    def select(self) -> Choice | None:
        choice = choose(self.question())
        if choice is None:
            return None
        sources = list(choice.sources)
        for shard in sorted(self.recoverable_memory(), key=lambda s: s.generation):
            if shard.generation >= choice.generation:
                sources[shard.rank] = m.ShardSource(kind="memory", slot=shard.slot, root=shard.root)
        return replace(choice, sources=tuple(sources))


class StrikeOneRankOnly(CoordinatorRestoring):
    """Only the rank with the bad source restores something else."""

    def strike(self, ranks: tuple[int, ...], detail: str) -> None:
        before, verified, attempt = self.state.choice, set(self.state.verified), self.state.attempt
        assert before is not None
        for rank in ranks:
            self.state.struck.add((rank, before.generation, before.sources[rank].kind))
        after = self.choosing.select()
        if after is None or after.generation == before.generation:
            super().strike(ranks, detail)
            return
        self.state.choice, self.state.verified, self.state.attempt = before, verified, attempt + 1
        self.state.choice = replace(before, generation=before.generation)
        for rank in ranks:
            self._order(rank, after)
        self.state.verified |= set(range(self.state.world_size)) - set(ranks)


class StrikeUnread(CoordinatorRestoring):
    """A store that does not answer now counts as a damaged checkpoint."""

    def rank_bad(self, from_node: int, message: m.ShardBad) -> None:
        super().rank_bad(from_node, replace(message, unread=False))


class FenceUnanswered(CoordinatorRestoring):
    """Storage that does not answer a new keeper counts as a newer claim."""

    def term_refused(self, event: m.TermRefused) -> None:
        rejoins = self.state.rejoining is not None
        super().term_refused(replace(event, failed=event.failed and not rejoins))


class ResumeBeforeAllVerified(CoordinatorRestoring):
    """Training goes on when the first rank is ready."""

    def all_verified(self) -> bool:
        return True


class AssumeFresh(Choosing):
    """Nothing found means start from scratch."""

    def is_something_missed(self) -> bool:
        return False


class NoIncarnationFence(NodeAttaching):
    """An old incarnation may come back and take over."""

    def attach_refusal(self, event: m.TrainerAttached) -> str | None:
        return None


class GrantWhileWritten(NodeAttaching):
    """A takeover frees the slots that trainers of the old incarnation still write."""

    def _forget_incarnation(self) -> None:
        super()._forget_incarnation()
        for local in self.state.ranks.values():
            for slot in local.slots.slots:
                if slot.state == "writing":
                    slot.clear()


class InventoryTooEarly(NodeRestoring):
    """A new keeper answers before its trainers are back with what they know."""

    def report_inventory(self) -> None:
        for rank, node in enumerate(self.state.nodes):
            if node == self.state.node and rank not in self.state.ranks:
                self.state.ranks[rank] = LocalRank(rank=rank)
        waiting = [local for local in self.state.ranks.values() if local.attach is None]
        some = next((r.attach for r in self.state.ranks.values() if r.attach is not None), None)
        for local in waiting:
            local.attach = some
        super().report_inventory()
        for local in waiting:
            local.attach = None


class ActBeforeDecision(CoordinatorRestoring):
    """Ranks restore while the decision is still being written."""

    def decide(self) -> None:
        super().decide()
        if self.state.phase == "deciding":
            self.decision_written(
                m.DecisionWritten(term=self.state.term, attempt=self.state.attempt)
            )


class ForgetStrikes(CoordinatorRestoring):
    """A source that turned out bad is offered again."""

    def decide(self) -> None:
        self.state.struck = set()
        super().decide()


class ReadBeforeClaim(Runtime):
    """The directory is read, then claimed: what was committed in between is not seen."""

    reads_before_claim = True


class StayAmongLiving(SameTerm):
    """A term goes on although trainers of its past part may live."""

    def is_unbroken(self, node: int) -> bool:
        return node in self.state.inventory


class SameAttempt(SameTerm):
    """What a term saves when it goes on is named as what it had saved."""

    def attempt_of_part(self, generation: Generation) -> int:
        return generation.attempt


class OneFurtherAttempt(SameTerm):
    """What a term saves when it goes on again is named as when it went on first."""

    def attempt_of_part(self, generation: Generation) -> int:
        return 1


class MixWorlds(Choosing):
    """Shards of another number of ranks are taken for today's."""

    def question(self) -> Question:
        question = super().question()
        world = self.state.world_size
        at_home = (
            c.shard for c in question.copies if c.node in self.state.nodes[c.shard.rank :][:1]
        )
        memory = (*question.memory, *(replace(shard, world_size=world) for shard in at_home))
        return replace(question, memory=memory)


class OpenAdmission(Admission):
    """Whoever is alive does not stand in the way of another launch."""

    def refusal(self, attach: m.TrainerAttached, alive: Sequence[int]) -> str | None:
        return super().refusal(attach, [])


class AdmitOverLiving(NodeProtocol):
    """A keeper lets another launch in while trainers of the holder live."""

    def __init__(self, **more: Any) -> None:
        super().__init__(**more)
        self.state.admission = OpenAdmission()


class ForgetfulAdmission(Admission):
    """The term of a running trainer says nothing about who is the real one."""

    def _running_refusal(self, term: int) -> str | None:
        return None


class AdmitOlderTerm(NodeProtocol):
    """At a new keeper trainers of an older term replace those of a newer one."""

    def __init__(self, **more: Any) -> None:
        super().__init__(**more)
        self.state.admission = ForgetfulAdmission()


# --------------------------------------------------------------------------- copies


class ProtectWithOneMissing(CoordinatorReplicating):
    """All copies but one are enough."""

    def all_copied(self, copies: Round) -> bool:
        wanted = {(rank, node) for node, ranks in self.state.replicated.items() for rank in ranks}
        return len(copies.sealed) >= len(wanted) + self.state.world_size - 1


class OverwriteWhileCopied(NodeReplicaSlots):
    """A slot that others are still copying is as free as anything older."""

    def is_kept(self, generation: Generation) -> bool:
        return generation == self.state.protected


class HideCopies(NodeRestoring):
    """A keeper does not say what it holds of other nodes' ranks."""

    def _shard_slots(self) -> Iterator[Slots]:
        yield from (local.slots for local in self.state.ranks.values())


class HideParities(Choosing):
    """What parities could give back is not asked."""

    def parities_held(self) -> tuple[m.ShardCopy, ...]:
        return ()


class KeepCountsAfterRestart(CoordinatorReplicating):
    """Copies that died with a keeper count on."""

    def copies_lost(self, reason: str) -> None:
        pass


class OverwriteProtected(NodeReplicaSlots):
    """What is protected is as free as anything older than the newest memory commit."""

    def is_kept(self, generation: Generation) -> bool:
        return False


class OverwriteReplicas(NodeReplicaSlots):
    """A newer copy takes the oldest replica slot, before it is complete elsewhere."""

    def may_overwrite_replica(self, slot: Slot) -> bool:
        return slot.state != "writing" and slot.index == 0


class KeepOldPlacement(NodeReplicating):
    """A node brings what it brought when the term began, whatever the plan wants since."""

    def copies_wanted(self, message: m.CopiesWanted) -> None:
        state = self.state
        old = replace(message, replicated=state.replicated, holders=state.holders)
        super().copies_wanted(old)


class FollowWithinRound(CoordinatorReplicating):
    """A plan's other scheme counts at once, also in the round that is under way."""

    def copy_sealed(self, from_node: int, message: m.CopySealed) -> None:
        self._follow_plan()
        super().copy_sealed(from_node, message)


class TrustAnyCopy(NodeReplicating):
    """A copy that somebody has under way counts as made."""

    def copies_wanted(self, message: m.CopiesWanted) -> None:
        super().copies_wanted(message)
        for (rank, parity), fetch in list(self.state.fetches.items()):
            if not parity:
                shard = m.HeldShard(
                    rank=rank,
                    slot=fetch.slot,
                    generation=fetch.generation,
                    step=0,
                    world_size=len(self.state.nodes),
                    root="",
                    copied=True,
                )
                self.state.tell(m.CopySealed(shard=shard))


class CopyOfAnotherRound(CoordinatorReplicating):
    """A copy counts whatever generation it is of."""

    def copy_sealed(self, from_node: int, message: m.CopySealed) -> None:
        if self.state.round is not None:
            shard = replace(message.shard, generation=self.state.round.generation)
            message = replace(message, shard=shard)
        super().copy_sealed(from_node, message)

    def _is_original(self, copies: Round, shard: m.HeldShard) -> bool:
        return True


# --------------------------------------------------------------------------- parity


class ProtectWithoutParity(CoordinatorReplicating):
    """Originals at home are enough, whoever has made parity of them."""

    def all_copied(self, copies: Round) -> bool:
        holders = {rank for each in self.state.sets for rank in each.ranks}
        return super().all_copied(replace(copies, encoded=holders))


class OverwriteParity(NodeReplicaSlots):
    """The next parity takes the slot of the protected one."""

    def may_overwrite_replica(self, slot: Slot) -> bool:
        if slot.shard is None or slot.shard.parity is None:
            return super().may_overwrite_replica(slot)
        return slot.index == 0


class MixParity(Runtime):
    """What is sealed of a rank is added to a parity, of whatever generation it is."""

    mixes = True


class DropOutgrown(NodeReplicaSlots):
    """What ranks of another number were restored from goes with its slots."""

    def outgrown(self, event: m.SlotsOutgrown) -> None:
        return


class GatherMixed(Choosing):
    """The newest shard of a rank will do, whichever generation the others are of."""

    def select(self) -> Choice | None:
        choice = super().select()
        if choice is None or not choice.places:
            return choice
        newest = {}
        for copy in (*self.copies_elsewhere(), *choice.places):
            known = newest.setdefault(copy.shard.rank, copy)
            if copy.shard.generation > known.shard.generation:
                newest[copy.shard.rank] = copy
        return replace(choice, places=tuple(newest.values()))


class RebuildFromFewer(Runtime):
    """What did not come counts as zeros, and nobody compares with the digests of the lost."""

    rebuilds_from_fewer = True


# --------------------------------------------------------------------------- plans


class PlanOnFirstAnswer(PlanChange):
    """The first rank that prepared decides for all."""

    def all_prepared(self, proposal: Proposal) -> bool:
        return len(proposal.prepared) >= 1


class PlanWithoutMargin(PlanChange):
    """The switch is set to the step of the slowest rank."""

    def _decide_plan(self, proposal: Proposal) -> None:
        self._set_plan(proposal.version, min(proposal.prepared.values()))


class WaitForOverwritten(NodeSaving):
    """The verdict on a generation is waited for although its slot holds another one."""

    def overwritten(self, local: LocalRank, slot: Slot) -> None:
        return


class WaitForReplaced(CoordinatorState):
    """A coordinator of ranks that have gone to another one keeps its keeper waiting for theirs."""

    def settled_for(self, incarnation: m.Incarnation | None) -> bool:
        return all(save.finished for save in self.saves.values())


class WriteAlone(CoordinatorSaving):
    """Ranks that began a generation for memory alone are not asked to write it, too."""

    def join_writers(self, save: Save) -> None:
        return

    def want_persisted(self, save: Save) -> None:
        if self.state.breakpoint or self.state.unreachable:
            super().want_persisted(save)


# --------------------------------------------------------------------------- catalogue of mutants


@dataclass(frozen=True, slots=True)
class Mutant:
    """A rule taken away."""

    kind: type[Any]
    rule: str
    budget: int
    """Seeds within which it must be found."""

    def rules(self) -> Rules:
        """The machines with this one swapped."""
        for part in fields(NodeParts):
            if issubclass(self.kind, part.default):  # type: ignore[arg-type]
                parts = NodeParts(**{part.name: self.kind})
                return Rules(node=partial(NodeProtocol, parts=parts))
        if issubclass(self.kind, NodeProtocol):
            return Rules(node=self.kind)
        for part in fields(CoordinatorParts):
            if issubclass(self.kind, part.default):  # type: ignore[arg-type]
                swapped = CoordinatorParts(**{part.name: self.kind})
                return Rules(coordinator=partial(CoordinatorProtocol, parts=swapped))
        return Rules(runtime=self.kind)


MUTANTS: dict[str, Mutant] = {
    "write-alone": Mutant(WriteAlone, "18", 1000),
    "wait-for-overwritten": Mutant(WaitForOverwritten, "19", 2000),
    "wait-for-replaced": Mutant(WaitForReplaced, "19", 4000),
    "overwrite-any-slot": Mutant(OverwriteAnySlot, "1", 200),
    "overwrite-when-sealed-here": Mutant(OverwriteWhenSealedHere, "1", 500),
    "overwrite-while-persisted": Mutant(OverwriteWhilePersisted, "1", 1000),
    "overwrite-restored": Mutant(OverwriteRestored, "2", 4000),
    "keep-undurable": Mutant(KeepUndurable, "2", 1000),
    "give-up-unsealed": Mutant(GiveUpUnsealed, "2", 1000),
    "drop-outgrown": Mutant(DropOutgrown, "2", 10_000),
    "keep-discarded": Mutant(KeepDiscarded, "3", 100),
    "reuse-names": Mutant(ReuseNames, "12", 100),
    "memory-commit-one-missing": Mutant(MemoryCommitWithOneMissing, "3", 20),
    "commit-before-all-votes": Mutant(CommitBeforeAllVotes, "4", 20),
    "no-term-check": Mutant(NoTermCheck, "4", 4000),
    "missing-is-newer": Mutant(MissingIsNewer, "20", 500),
    "forget-terms": Mutant(ForgetTerms, "20", 1000),
    "forget-lineage": Mutant(ForgetWhereTrainersBegan, "20", 400),
    "no-second-term-check": Mutant(NoSecondTermCheck, "4", 4000),
    "retention-counts-all": Mutant(RetentionKeepsTooFew, "10", 1000),
    "retention-counts-unread": Mutant(RetentionCountsUnread, "10", 1000),
    "retention-forgets-bases": Mutant(RetentionForgetsBases, "17", 1000),
    "drop-nearly-all": Mutant(DropNearlyAll, "23", 200),
    "drop-unread": Mutant(DropUnread, "23", 200),
    "drop-bases": Mutant(DropBases, "23", 200),
    "commit-on-lost-base": Mutant(CommitOnLostBase, "17", 4000),
    "restore-suspect": Mutant(RestoreSuspect, "16", 500),
    "commit-as-good": Mutant(CommitAsGood, "16", 500),
    "suspect-frees-slots": Mutant(SuspectFreesSlots, "16", 2000),
    "suspect-pushes-out": Mutant(SuspectPushesOut, "16", 1000),
    "forget-verdict": Mutant(ForgetVerdict, "16", 8000),
    "verdict-only-while-running": Mutant(VerdictOnlyWhileRunning, "16", 4000),
    "identity-by-step": Mutant(IdentityByStep, "5", 1000),
    "ignore-lineage": Mutant(IgnoreLineage, "5", 2000),
    "restore-mixed": Mutant(RestoreMixed, "6", 100),
    "gather-mixed": Mutant(GatherMixed, "6", 4000),
    "strike-one-rank-only": Mutant(StrikeOneRankOnly, "6", 600),
    "fence-unanswered": Mutant(FenceUnanswered, "22", 1000),
    "strike-unread": Mutant(StrikeUnread, "22", 2000),
    "resume-before-all-verified": Mutant(ResumeBeforeAllVerified, "7", 200),
    "assume-fresh": Mutant(AssumeFresh, "8", 1000),
    "no-incarnation-fence": Mutant(NoIncarnationFence, "9", 200),
    "grant-while-written": Mutant(GrantWhileWritten, "9", 8000),
    "inventory-too-early": Mutant(InventoryTooEarly, "11", 500),
    "act-before-decision": Mutant(ActBeforeDecision, "6", 500),
    "forget-strikes": Mutant(ForgetStrikes, "6", 2000),
    "read-before-claim": Mutant(ReadBeforeClaim, "4", 4000),
    "stay-among-living": Mutant(StayAmongLiving, "21", 2000),
    "same-attempt": Mutant(SameAttempt, "21", 200),
    "one-further-attempt": Mutant(OneFurtherAttempt, "21", 1000),
    "mix-worlds": Mutant(MixWorlds, "6", 1000),
    "admit-over-living": Mutant(AdmitOverLiving, "9", 1000),
    "admit-older-term": Mutant(AdmitOlderTerm, "9", 4000),
    "overwrite-while-copied": Mutant(OverwriteWhileCopied, "14", 2000),
    "hide-copies": Mutant(HideCopies, "14", 4000),
    "hide-parities": Mutant(HideParities, "15", 2000),
    "keep-counts-after-restart": Mutant(KeepCountsAfterRestart, "14", 4000),
    "protect-one-missing": Mutant(ProtectWithOneMissing, "14", 100),
    "overwrite-protected": Mutant(OverwriteProtected, "14", 2000),
    "overwrite-replicas": Mutant(OverwriteReplicas, "14", 5000),
    "trust-any-copy": Mutant(TrustAnyCopy, "14", 2000),
    "copy-of-another-round": Mutant(CopyOfAnotherRound, "14", 2000),
    "protect-without-parity": Mutant(ProtectWithoutParity, "15", 100),
    "overwrite-parity": Mutant(OverwriteParity, "15", 8000),
    "mix-parity": Mutant(MixParity, "15", 2000),
    "rebuild-from-fewer": Mutant(RebuildFromFewer, "15", 4000),
    "keep-old-placement": Mutant(KeepOldPlacement, "24", 100),
    "follow-within-round": Mutant(FollowWithinRound, "24", 500),
    "plan-on-first-answer": Mutant(PlanOnFirstAnswer, "13", 1000),
    "plan-without-margin": Mutant(PlanWithoutMargin, "13", 200),
}


def first_seed(name: str, run: Callable[[int, Rules], str | None]) -> int | None:
    """The first seed within the budget that finds the mutant."""
    mutant = MUTANTS[name]
    rules = mutant.rules()
    return next((seed for seed in range(mutant.budget) if run(seed, rules) is not None), None)
