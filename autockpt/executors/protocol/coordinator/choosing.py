"""The choice of a restore: which checkpoint all ranks can get back, and why.

Reads the state only: the inventory of the nodes, the catalogue of the directory, and the sources
that were struck out.
"""

from autockpt.executors.protocol import messages as m
from autockpt.executors.protocol.coordinator.state import CoordinatorState
from autockpt.executors.protocol.selection import (
    Choice,
    Question,
    choose,
    newest_chain,
    weights_only_refusal,
)
from autockpt.values.generation import Generation

HOPELESS_STARTS = 2
"""A checkpoint in memory that failed in so many starts, each without another one, is not asked for
again.  Else every start would fail like them."""


class Choosing:
    """Answers questions about the inventory; changes nothing."""

    def __init__(self, state: CoordinatorState) -> None:
        self.state = state

    # ------------------------------------------------------------------ shards in memory

    def recoverable_memory(self) -> tuple[m.HeldShard, ...]:
        """Shards in the memory of the node where their rank lives now."""
        return tuple(
            shard
            for node, report in sorted(self.state.inventory.items())
            for shard in report.held
            if self._is_home(shard, node)
        )

    def copies_elsewhere(self) -> tuple[m.ShardCopy, ...]:
        """All other shards in the memory of nodes, also of another number of ranks."""
        return tuple(
            m.ShardCopy(node=node, shard=shard)
            for node, report in sorted(self.state.inventory.items())
            for shard in report.held
            if not self._is_home(shard, node)
        )

    def _is_home(self, shard: m.HeldShard, node: int) -> bool:
        """It is of this world, and its rank lives on that node."""
        fits = shard.world_size == self.state.world_size and shard.rank < self.state.world_size
        return fits and self.state.nodes[shard.rank] == node

    def parities_held(self) -> tuple[m.ShardCopy, ...]:
        """Parities in the memory of all nodes."""
        return tuple(
            m.ShardCopy(node=node, shard=parity)
            for node, report in sorted(self.state.inventory.items())
            for parity in report.parities
        )

    def silent_nodes(self) -> list[int]:
        """Nodes that have not said what is in their memory."""
        return sorted(set(self.state.every_node) - set(self.state.inventory))

    def is_hopeless(self, shard: m.HeldShard) -> bool:
        """Of a generation in memory that is not asked for again; a transfer may fail once."""
        return self.state.failed[shard.generation] >= HOPELESS_STARTS

    # ------------------------------------------------------------------ the choice

    def question(self) -> Question:
        """Return the facts that the choice depends on, as known now."""
        state = self.state
        ranks = range(state.world_size)
        return Question(
            world_size=state.world_size,
            memory=tuple(s for s in self.recoverable_memory() if not self.is_hopeless(s)),
            nodes=state.nodes,
            copies=tuple(c for c in self.copies_elsewhere() if not self.is_hopeless(c.shard)),
            parities=tuple(c for c in self.parities_held() if not self.is_hopeless(c.shard)),
            committed=tuple(state.catalogue.values()),
            chain=self._older_chain(),
            layout_digests=tuple(state.attaches[rank].layout_digest for rank in ranks),
            struck=frozenset(state.struck),
            suspect=frozenset(state.suspect),
            resume_from=state.attaches[0].resume_from,
        )

    def _older_chain(self) -> tuple[m.TermParent, ...]:
        if self.state.is_in_same_term:
            return self.state.chain_of_term()
        return newest_chain(self.older_parents())

    def older_parents(self) -> dict[int, Generation | None]:
        """Decisions before this term: what we decide ourselves is not history yet."""
        return {
            term: parent for term, parent in self.state.parents.items() if term < self.state.term
        }

    def select(self) -> Choice | None:
        """Rule 5: the greatest one on the lineage that every rank can get back."""
        return choose(self.question())

    def is_something_missed(self) -> bool:
        """Then starting from scratch needs a person's word."""
        return self.state.ever_durable or self.state.attaches[0].resume_from is not None

    # ------------------------------------------------------------------ reasons, for people

    def reason(self, *, fresh: bool) -> str:
        state = self.state
        if state.choice is None:
            return "from scratch, as asked" if fresh else state.scratch or "the first start"
        kinds = [source.kind for source in state.choice.sources]
        counts = ", ".join(f"{kinds.count(kind)} from {kind}" for kind in sorted(set(kinds)))
        return f"greatest recoverable generation: {state.choice.generation} ({counts})"

    def reason_for_scratch(self) -> str:
        """Return the fate of earlier starts, "" when there was none."""
        if not self.older_parents():
            return ""
        bad = [
            str(g) for g, starts in sorted(self.state.failed.items()) if starts >= HOPELESS_STARTS
        ]
        return "an earlier start left no durable checkpoint" + (
            f", and what was in memory is bad: {bad[-3:]}" if bad else ""
        )

    def bad_sources(self) -> list[str]:
        return [f"rank {rank} {g} on {kind}" for rank, g, kind in sorted(self.state.struck)][-3:]

    def reason_for_refusal(self) -> str:
        wanted = self.state.attaches[0].resume_from
        if wanted is not None and self._holds_weights_only(wanted):
            return weights_only_refusal(str(wanted))
        entries = sorted(self.state.catalogue.values(), key=lambda entry: entry.generation)
        on_disk = [str(e.generation) for e in entries if not e.weights_only][-3:]
        weights = [str(e.generation) for e in entries if e.weights_only][-3:]
        begin = f"; {weights} hold weights only: begin another run with attach(load=...)"
        in_memory = [str(g) for g in sorted({s.generation for s in self.recoverable_memory()})][-3:]
        return (
            f"no generation{f' {wanted}' if wanted else ''} can be restored for all "
            f"{self.state.world_size} ranks; on disk {on_disk}, in memory {in_memory}, "
            f"bad {self.bad_sources()}{self._why_suspect()}; ask for a fresh start, or resume from "
            f"another generation{begin if weights else ''}"
        )

    def _holds_weights_only(self, generation: Generation) -> bool:
        entry = self.state.catalogue.get(generation)
        return entry is not None and entry.weights_only

    def _why_suspect(self) -> str:
        """Return the newest three that only a person may choose."""
        marked = {g for g, entry in self.state.catalogue.items() if entry.health == "suspect"}
        held = {s.generation for s in self.recoverable_memory() if s.health == "suspect"}
        found = [g.name for g in sorted(marked | held | self.state.suspect)][-3:]
        if not found:
            return ""
        return f"; NaN in {', '.join(found)}, restored only by --resume-from {found[-1]}"
