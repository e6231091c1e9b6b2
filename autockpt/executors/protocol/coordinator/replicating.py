"""The replicating part of the coordinator: rounds of copies, one generation at a time.

A generation that is memory-committed survives the death of trainers, not of a node.  In a *round*
every node fetches its replicated ranks' shards of one generation, or encodes parities of them.
When all are sealed it is *protected*: as many nodes may be lost as the placement tolerates.  One
round at a time, or two nodes would for ever hold copies of different generations.  A round that
fails ends: a protected generation stays so where there is room for it.  Training never waits.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence

from autockpt.executors.protocol import messages as m
from autockpt.executors.protocol.coordinator.state import CoordinatorState, ParityRanks, Round
from autockpt.executors.protocol.transitions import moved
from autockpt.values.errors import ConfigError
from autockpt.values.generation import Generation
from autockpt.values.placement import Cell, place, rank_sets, ranks_by_node
from autockpt.values.redundancy import Redundancy, is_placed_alike


def parity_sets(cells: Iterable[Cell], nodes: Sequence[int]) -> Iterator[ParityRanks]:
    """Sets of ranks of every parity cell; `nodes`: by rank.

    Raises ConfigError where a node has so many more ranks than the others that some lack partners.
    """
    here = ranks_by_node(nodes)
    for cell in cells:
        for ranks in rank_sets(cell, here):
            yield ParityRanks(ranks=ranks, losses=cell.tolerates)


def parities_of(each: ParityRanks, shards: Mapping[int, m.HeldShard]) -> Iterator[m.HeldShard]:
    """Yield the parities that a set's members hold; none while a shard of it is unknown."""
    if not shards.keys() >= set(each.ranks):
        return
    members = tuple(
        m.ParityMember(
            rank=shard.rank, root=shard.root, layout_digest=shard.layout_digest,
            bytes=shard.bytes, health=shard.health,
        )
        for shard in (shards[rank] for rank in each.ranks)
    )  # fmt: skip
    made_of = m.ParityOf(members=members, losses=each.losses)
    for rank in each.ranks:
        shard = shards[rank]
        yield m.HeldShard(
            rank=rank, slot=0, generation=shard.generation, step=shard.step,
            world_size=shard.world_size, root="", chunk_bytes=shard.chunk_bytes, parity=made_of,
        )  # fmt: skip


class Replicating:
    """Decides who copies which shard, and counts the copies."""

    def __init__(self, state: CoordinatorState) -> None:
        self.state = state

    # ------------------------------------------------------------------ rules

    def all_copied(self, copies: Round) -> bool:
        """Rule 14: protected means that every shard is sealed here and everywhere it is copied.

        Or that every member of its set has made its parity.  Only what was asked for is counted
        (`_is_asked`), so numbers say it.
        """
        encoded = len(copies.encoded) >= self.state.parities_wanted
        return encoded and len(copies.sealed) >= self.state.copies_wanted

    # ------------------------------------------------------------------ who copies which shard

    def place_copies(self) -> None:
        """Place replicas or parity sets of all nodes, as this incarnation's trainers want them."""
        state = self.state
        state.replicated, state.sets, state.holders = {}, (), {}
        state.copies_wanted, state.parities_wanted = state.world_size, 0
        state.placed = self._redundancy()
        if state.placed.scheme == "none":
            return
        nodes, domains = state.every_node, state.attaches[min(state.attaches)].domains
        try:
            cells = place(state.placed, nodes, domains).cells
            state.sets = tuple(parity_sets([c for c in cells if c.kind == "parity"], state.nodes))
        except ConfigError as error:
            state.emit(m.Report(kind="warning", detail=f"no copies on other nodes: {error}"))
            return
        state.holders = self._holders()
        here = ranks_by_node(state.nodes)
        for cell in cells:
            for node in cell.members:
                kept = sorted(r for other in cell.kept_by(node) for r in here.get(other, ()))
                state.replicated[node] = tuple(kept)
        replicated = {(rank, node) for node, ranks in state.replicated.items() for rank in ranks}
        state.copies_wanted = len(replicated | set(enumerate(state.nodes)))
        state.parities_wanted = len({rank for ranks in state.holders.values() for rank in ranks})

    def _redundancy(self) -> Redundancy:
        """Of the newest plan on which all ranks agreed; a new coordinator has it from a rank."""
        state = self.state
        newest = max(state.attaches.values(), key=lambda one: (one.plan_version, -one.rank))
        return state.redundancy or newest.redundancy

    def _follow_plan(self) -> None:
        """Rule 24: a plan's other scheme is for rounds that begin later.

        Nothing is let go for it: a protected checkpoint stays until a newer one is protected.  So
        a plan without any copies waits for the next start.
        """
        state, wanted = self.state, self.state.redundancy
        if wanted is None or state.placed is None or is_placed_alike(wanted, state.placed):
            return
        if wanted.scheme == "none":
            return
        before = state.placed
        self.place_copies()
        if not state.protects and before.scheme != "none":
            state.redundancy = before  # it fits no node, and this has been said
            self.place_copies()

    def _holders(self) -> dict[int, tuple[int, ...]]:
        found: dict[int, list[int]] = {}
        for rank in sorted(rank for each in self.state.sets for rank in each.ranks):
            found.setdefault(self.state.nodes[rank], []).append(rank)
        return {node: tuple(ranks) for node, ranks in found.items()}

    # ------------------------------------------------------------------ rounds

    def begin_round(self) -> None:
        """Of the newest generation, unless one is under way or it is protected already."""
        state = self.state
        newest = state.memory_committed
        if newest is None or state.round is not None:
            return
        self._follow_plan()
        if not state.protects:
            return
        if state.intact and state.protected is not None and newest <= state.protected:
            return
        shards = self._sealed(newest)
        made = {parity.rank: parity for each in state.sets for parity in parities_of(each, shards)}
        self._set_round(Round(generation=newest, news_s=state.now_s, shards=shards, parities=made))
        self.repeat_round()

    def copy_sealed(self, from_node: int, message: m.CopySealed) -> None:
        """One more copy; the last one makes the generation protected."""
        state = self.state
        shard = message.shard
        copies = state.round
        if copies is None or shard.generation != copies.generation:
            if state.intact and shard.generation == state.protected:
                state.send(from_node, m.CopiesEnded(generation=shard.generation, protected=True))
            else:
                state.stale(message)
            return
        if not self._is_asked(from_node, shard) or not self._is_original(copies, shard):
            what = "copy of" if shard.parity is None else "parity at"
            detail = f"node {from_node} has a {what} rank {shard.rank} that nobody asked for"
            self.end_round(detail)
            return
        before = len(copies.sealed) + len(copies.encoded)
        if shard.parity is None:
            copies.sealed.add((shard.rank, from_node))
        else:
            copies.encoded.add(shard.rank)
        if len(copies.sealed) + len(copies.encoded) > before:
            copies.news_s = state.now_s
        if self.all_copied(copies):
            self._set_round(None)
            state.protected, state.intact = copies.generation, True
            state.broadcast(m.CopiesEnded(generation=copies.generation, protected=True))
            self.begin_round()

    def _is_asked(self, node: int, shard: m.HeldShard) -> bool:
        """That node was to have it."""
        state = self.state
        if shard.parity is not None:
            asked = state.round is not None and shard.rank in state.round.parities
            return asked and state.nodes[shard.rank] == node
        own = shard.rank < state.world_size and state.nodes[shard.rank] == node
        return own or shard.rank in state.replicated.get(node, ())

    def _is_original(self, copies: Round, shard: m.HeldShard) -> bool:
        """It has the content that its owners sealed, as far as that is known."""
        if shard.parity is not None:
            return shard.parity == copies.parities[shard.rank].parity
        owned = copies.shards.get(shard.rank)
        return owned is None or owned.root == shard.root

    def copy_coming(self, from_node: int, message: m.CopyComing) -> None:
        """More of a copy is there: the round is not waited for in vain.

        One that begins anew, as it broke, is no news until it is further than before.
        """
        state = self.state
        if state.round is None or message.generation != state.round.generation:
            state.stale(message)
            return
        marks, key = state.round.marks, (message.owner, from_node, message.parity)
        if message.mark > marks.get(key, 0):
            marks[key], state.round.news_s = message.mark, state.now_s

    def copy_failed(self, from_node: int, message: m.CopyFailed) -> None:
        """One copy will not be made, so the round is for nothing."""
        if self.state.round is None or message.generation != self.state.round.generation:
            self.state.stale(message)
            return
        self.end_round(f"node {from_node} has no copy of rank {message.owner}: {message.reason}")

    def end_round(self, reason: str) -> None:
        """It failed.  The next memory commit begins another one."""
        state = self.state
        if state.round is None:
            return
        generation = state.round.generation
        self._set_round(None)
        state.emit(m.Report(kind="warning", detail=f"{generation} is not protected: {reason}"))
        state.broadcast(m.CopiesEnded(generation=generation, protected=False, reason=reason))

    def copies_lost(self, reason: str) -> None:
        """The replica slots of a node are gone with its keeper: all are to be copied once more.

        A protected generation is kept all the same where copies remain.
        """
        self.end_round(reason)
        self.state.intact = False

    def resume_protection(self) -> None:
        """Learn from the nodes which generation is the newest that may have been protected.

        A round may have ended with the coordinator that counted it.  It can have protected only if
        every node had its part.  A node whose keeper is new has lost that, and knows of no round.
        """
        state = self.state
        known = [{r.protected, r.copied} - {None} for r in state.inventory.values()]
        kept = [r.protected for r in state.inventory.values() if r.protected is not None]
        copied = [r.copied for r in state.inventory.values() if r.copied is not None]
        kept += [g for g in copied if all(g in each for each in known if each)]
        state.protected, state.intact = max(kept, default=None), False

    def unprotect(self, generation: Generation, reason: str) -> None:
        """Copies of it are worth nothing, made or under way."""
        state = self.state
        if state.round is not None and state.round.generation == generation:
            self.end_round(reason)
        if state.protected == generation:
            state.protected, state.intact = None, False

    def _set_round(self, copies: Round | None) -> None:
        before, after = ("wanted" if r else "none" for r in (self.state.round, copies))
        moved("round of copies", before, after)
        self.state.round = copies

    def expire_round(self) -> None:
        """Every wait ends; copies that go on coming are waited for."""
        state = self.state
        if state.round is None:
            return
        waited = state.now_s - state.round.news_s
        if waited >= state.deadlines.copies_s:
            self.end_round(f"nothing more of its copies came for {waited:.0f} s")

    def repeat_round(self) -> None:
        """Ask again; nodes that have their copies say so again."""
        state = self.state
        if state.round is None:
            return
        copies = state.round
        for node in state.every_node:
            replicated, holders = state.replicated.get(node, ()), state.holders.get(node, ())
            wanted = m.CopiesWanted(
                generation=copies.generation,
                shards=tuple(copies.shards[rank] for rank in replicated if rank in copies.shards),
                parities=tuple(
                    copies.parities[rank] for rank in holders if rank in copies.parities
                ),
                replicated=replicated,
                holders=holders,
                protected=state.protected,
            )
            state.send(node, wanted)

    def _sealed(self, generation: Generation) -> dict[int, m.HeldShard]:
        """Shards by rank, as their owners sealed them: in this term, or before it."""
        state = self.state
        if generation in state.saves:
            return dict(state.saves[generation].sealed)
        shards = [shard for report in state.inventory.values() for shard in report.held]
        if state.choice is not None:
            shards += [source.shard for source in state.choice.sources if source.shard is not None]
        return {shard.rank: shard for shard in shards if shard.generation == generation}
