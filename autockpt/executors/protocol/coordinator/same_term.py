"""Rule 21: a restart whose memory is all there goes on in its term while the storage hangs.

A new term is a claim of the directory.  Storage that hangs takes none, and the trainers would wait
for it although nothing of theirs is lost.  The coordinator that ran the term goes on in it under
four conditions:

- It knows every decision of the term and every COMMIT that was ordered in it.  Its claim for the
  next term is withdrawn for good.  A term that another keeper has claimed fences this one later,
  like any running term.
- The same launch starts its trainers again on the same nodes, and asks for nothing special.
- Every keeper had the term open, and has seen the end of all its trainers.  The past part of the
  term gets no new name, seal or file any more.
- Take the newest generation of which all shards are sealed, or which may be on disk.  It is in the
  memory of every rank.  So a newer one stays in pieces for ever, and nothing whole is left behind.

New checkpoints have an attempt that is unused in the term.  To keepers, the past part of the term
is as an older term.  No decision is written: the term began from its parent long ago.
"""

from dataclasses import replace

from autockpt.executors.protocol import messages as m
from autockpt.executors.protocol.coordinator.saving import Saving
from autockpt.executors.protocol.coordinator.state import CoordinatorState, HeldTerm
from autockpt.executors.protocol.selection import Choice
from autockpt.values.generation import Generation


class SameTerm:
    """Whether, and from what, trainers may go on in the term that ran."""

    def __init__(self, state: CoordinatorState, saving: Saving) -> None:
        self.state = state
        self.saving = saving

    # ------------------------------------------------------------------ the term that ran

    def held_term(self) -> HeldTerm | None:
        """The term of the incarnation that is about to be replaced."""
        if self.state.phase == "fenced":
            return None
        if self.state.phase != "running":
            return self.state.held
        assert self.state.incarnation is not None
        under_way = [save for save in self.state.saves.values() if save.disk == "committing"]
        ordered = {} if self.state.held is None else self.state.held.commits
        return HeldTerm(
            incarnation=self.state.incarnation,
            nodes=self.state.nodes,
            term=self.state.term,
            attempt=self.state.attempt,
            parents=self.state.parents,
            parts=self.state.parts,
            catalogue=self.state.catalogue,
            ever_durable=self.state.ever_durable,
            commits={**ordered, **{s.generation: self.saving.entry_of(s, 0.0) for s in under_way}},
            plan_verdicts=self.state.plan_verdicts,
            plan_newest=self.state.plan_newest,
        )

    def commit_written(self, event: m.CommitWritten) -> bool:
        """True: the past part of the term had ordered it."""
        held = self.state.held
        if held is None or event.generation not in held.commits:
            return False
        entry = held.commits.pop(event.generation)
        held.catalogue[event.generation] = replace(entry, created_s=event.created_s)
        if not held.ever_durable:
            held.ever_durable = True
            self.state.emit(m.MarkEverCommitted(term=held.term))
        if self.state.is_in_same_term:  # it has the catalogue of the term that it goes on in
            self.state.ever_durable, self.state.bare = True, False
        self.state.emit(m.VerifyGeneration(generation=event.generation))
        return True

    # ------------------------------------------------------------------ before a claim

    def may_stay(self) -> bool:
        """As far as this coordinator knows by itself."""
        held = self.state.held
        if held is None or self.state.rejoining is not None or self.state.incarnation is None:
            return False
        first = self.state.attaches[0]
        asked = first.fresh or first.resume_from is not None
        same = held.incarnation.launch_id == self.state.incarnation.launch_id
        same = same and held.nodes == self.state.nodes and self.state.known_term <= held.term
        return same and not asked and held.plan_newest < m.STOP_VERSION

    def ask_claim_back(self) -> None:
        """Once for an incarnation: the answer may be that the claim stands, or will."""
        if self.state.is_withdrawing or not self.may_stay():
            return
        assert self.state.held is not None
        assert self.state.incarnation is not None
        self.state.is_withdrawing = True
        self.state.emit(
            m.WithdrawClaim(incarnation=self.state.incarnation, term=self.state.held.term)
        )

    def stay(self, held: HeldTerm) -> None:
        """Take up what the term knew."""
        self.state.is_in_same_term = True
        self.state.admission.hold(held.term)
        self.state.term, self.state.attempt, self.state.parts = held.term, held.attempt, held.parts
        self.state.catalogue, self.state.parents = held.catalogue, held.parents
        self.state.ever_durable = held.ever_durable
        self.state.plan_verdicts, self.state.plan_newest = held.plan_verdicts, held.plan_newest
        detail = f"the storage takes no claim: term {held.term} goes on if memory has all"
        self.state.emit(m.Report(kind="warning", detail=detail))

    def leave(self) -> None:
        """It has to be a new term after all."""
        self.state.is_in_same_term = False
        self.state.parts = ()
        self.state.plan_verdicts, self.state.plan_newest = {}, 0

    # ------------------------------------------------------------------ from what

    def why_not_from_memory(self, choice: Choice | None) -> str:
        """Why these trainers need the storage; "": they do not."""
        assert self.state.held is not None
        if broken := [n for n in self.state.every_node if not self.is_unbroken(n)]:
            return f"keepers of nodes {broken} are new, or trainers of the former start live"
        if self.state.struck:
            return "something in memory is bad"
        own = choice is not None and all(source.kind == "memory" for source in choice.sources)
        if choice is None or not (own or choice.at_home):
            return "not every rank has the newest checkpoint in its memory"
        newest = self.newest_whole()
        if newest is not None and choice.generation < newest:
            return f"{newest} may be whole, and is newer than {choice.generation}"
        parent = self.state.parents.get(self.state.term)
        if choice.generation.term != self.state.term and choice.generation != parent:
            return f"term {self.state.term} did not begin from {choice.generation}"
        return ""

    def is_unbroken(self, node: int) -> bool:
        """Its keeper had the term open, and no trainer of the past part lives there."""
        return node in self.state.inventory and self.state.inventory[node].unbroken

    def newest_whole(self) -> Generation | None:
        """Of which all shards are in memory, or which is on disk, or may be."""
        assert self.state.held is not None
        return max(
            self._whole() | set(self.state.catalogue) | set(self.state.held.commits), default=None
        )

    def _whole(self) -> set[Generation]:
        ranks: dict[Generation, set[int]] = {}
        for report in self.state.inventory.values():
            for shard in report.held:
                ranks.setdefault(shard.generation, set()).add(shard.rank)
        return {g for g, found in ranks.items() if len(found) >= self.state.world_size}

    def begin_part(self, generation: Generation) -> None:
        """From now on checkpoints have an attempt of their own."""
        attempt = self.attempt_of_part(generation)
        part = m.TermParent(term=self.state.term, parent=generation, attempt=attempt)
        self.state.parts = (part, *self.state.parts)

    def attempt_of_part(self, generation: Generation) -> int:
        """Newer than any that was named in the term."""
        seen = [report.attempt for report in self.state.inventory.values()]
        seen += [
            s.generation.attempt for report in self.state.inventory.values() for s in report.held
        ]
        seen += [
            g.attempt for g in (generation, *self.state.catalogue) if g.term == self.state.term
        ]
        seen += [part.attempt for part in self.state.parts]
        return max(seen) + 1
