"""Parity sets: who is in one, what a round asks for, and what brings a lost shard back."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autockpt.executors.protocol import messages as m
from autockpt.executors.protocol.coordinator.machine import CoordinatorProtocol
from autockpt.executors.protocol.coordinator.replicating import parities_of, parity_sets
from autockpt.executors.protocol.coordinator.state import ParityRanks
from autockpt.executors.protocol.node.machine import NodeProtocol
from autockpt.executors.protocol.parity_recovery import ParitySets, rebuilt
from autockpt.executors.protocol.selection import Choice, Question, choose
from autockpt.values.errors import ConfigError
from autockpt.values.generation import Generation
from autockpt.values.placement import Cell
from autockpt.values.redundancy import Redundancy
from tests.simulation.cluster import LAUNCH, Cluster, gen

XOR = Redundancy(scheme="xor", set_size=3, parity=1)
TWO_LOSSES = Redundancy(scheme="rs", set_size=3, parity=2)
SAVED = gen(1, 3)
NEXT = m.Incarnation(launch_id="launch", restart_round=1)


def shard(rank: int, generation: Generation = SAVED, *, world: int = 3) -> m.HeldShard:
    """As its owner sealed it."""
    return m.HeldShard(
        rank=rank, slot=0, generation=generation, step=generation.step, world_size=world,
        root=f"{generation}:{rank}", bytes=100 + rank, chunk_bytes=64,
    )  # fmt: skip


def parities(losses: int = 1, *, world: int = 3) -> dict[int, m.ShardCopy]:
    """Of one set of all ranks, a rank a node; by who holds it."""
    each = ParityRanks(ranks=tuple(range(world)), losses=losses)
    shards = {rank: shard(rank, world=world) for rank in range(world)}
    return {
        parity.rank: m.ShardCopy(node=parity.rank, shard=replace(parity, root=f"p{parity.rank}"))
        for parity in parities_of(each, shards)
    }


def copies(*ranks: int, world: int = 3) -> dict[int, m.ShardCopy]:
    """Shards where their ranks live, a rank a node."""
    return {rank: m.ShardCopy(node=rank, shard=shard(rank, world=world)) for rank in ranks}


def chosen(held: tuple[int, ...], parity: tuple[int, ...], **more: object) -> Choice | None:
    """The choice when these ranks still have their shard, and these their parity."""
    made = parities()
    question = Question(
        world_size=3, nodes=(0, 1, 2), memory=tuple(shard(rank) for rank in held),
        parities=tuple(made[rank] for rank in parity), committed=(),
        chain=(m.TermParent(term=1, parent=None),),
    )  # fmt: skip
    return choose(replace(question, **more))  # type: ignore[arg-type]


# --------------------------------------------------------------------------- sets


def test_ranks_of_unequal_nodes_are_dealt_to_sets() -> None:
    """Two nodes with two ranks and one with one: no set has two ranks of a node."""
    cell = Cell(kind="parity", members=(2, 0, 1), tolerates=1)
    sets = list(parity_sets([cell], (0, 0, 1, 2, 2)))
    assert [each.ranks for each in sets] == [(3, 0, 2), (4, 1)]


def test_ranks_that_would_stand_alone_are_refused() -> None:
    """A rank with no partner on another node cannot be protected: nothing is promised at all."""
    cell = Cell(kind="parity", members=(0, 1), tolerates=1)
    with pytest.raises(ConfigError, match=r"node 0 has 2 of the 3 ranks on nodes \[0, 1\]"):
        list(parity_sets([cell], (0, 0, 1)))


# --------------------------------------------------------------------------- choice


def test_a_lost_shard_is_rebuilt_from_the_others() -> None:
    """Node 1 is gone: two shards and two parities give rank 1 back, the others stay in memory."""
    choice = chosen((0, 2), (0, 2))
    assert choice is not None
    assert [source.kind for source in choice.sources] == ["memory", "parity", "memory"]
    source = choice.sources[1]
    assert source.shard == replace(shard(1), proofs_known=False)
    assert [(piece.node, piece.shard.parity is None) for piece in source.pieces] == [
        (0, True), (2, True), (0, False), (2, False),
    ]  # fmt: skip
    assert source.name == "parity 0 2"


@pytest.mark.parametrize(
    ("held", "parity"), [((0,), (0,)), ((0, 2), (0,)), ((0, 2), ()), ((2,), (0, 2))]
)
def test_too_little_of_a_set_gives_nothing_back(
    held: tuple[int, ...], parity: tuple[int, ...]
) -> None:
    """Two nodes lost; a parity lost with its keeper; all of them; the shard of a third rank."""
    assert chosen(held, parity) is None


def test_a_parity_of_other_shards_is_not_mixed_in() -> None:
    """A survivor whose shard differs from what the parity was made of is no piece of it."""
    other = replace(shard(2), root="other")
    assert chosen((0, 2), (0, 2), memory=(shard(0), other)) is None


def test_a_struck_rebuild_is_not_offered_again() -> None:
    """Its name has the nodes that were asked."""
    struck = frozenset({(1, SAVED, "parity 0 2")})
    assert chosen((0, 2), (0, 2), struck=struck) is None


def test_a_suspect_member_is_rebuilt_only_by_name() -> None:
    """The lost shard was suspect: so is its generation."""
    made_of = parities()[0].shard.parity
    assert made_of is not None
    members = tuple(
        replace(member, health="suspect" if member.rank == 1 else "good")
        for member in made_of.members
    )
    odd = tuple(
        replace(p, shard=replace(p.shard, parity=replace(made_of, members=members)))
        for p in parities().values()
    )
    assert chosen((0, 2), (0, 2), parities=odd) is None
    assert chosen((0, 2), (0, 2), parities=odd, resume_from=SAVED) is not None


@given(st.integers(2, 6), st.data())
def test_a_shard_comes_back_exactly_while_enough_members_have_both(
    world: int, data: st.DataObject
) -> None:
    """Compared with the count of members that have their shard and their parity."""
    losses = data.draw(st.integers(1, world - 1))
    held = data.draw(st.sets(st.integers(0, world - 1)))
    parity = data.draw(st.sets(st.integers(0, world - 1)))
    rank = data.draw(st.integers(0, world - 1))
    held -= {rank}
    made = parities(losses, world=world)
    sets = ParitySets(made[r] for r in sorted(parity))
    found = list(rebuilt(rank, copies(*held, world=world), sets))
    assert bool(found) == (world - len(held & parity) <= losses)
    for source in found:
        assert source.shard == replace(shard(rank, world=world), proofs_known=False)
        assert {piece.shard.rank for piece in source.pieces} == held & parity


# --------------------------------------------------------------------------- rounds


def protecting() -> Cluster:
    """Three nodes with parity that saved (1, 3) to memory."""
    cluster = Cluster((0, 1, 2), slots=3)
    cluster.attach_all(redundancy=XOR)
    cluster.claim(1)
    cluster.tell(m.DecisionWritten(term=1, attempt=1))
    cluster.save(SAVED)
    return cluster


def encode(cluster: Cluster, order: m.FetchShard) -> None:
    """The runtime has made the parity of an order."""
    made = replace(order.shard, slot=order.slot, root=f"p{order.shard.rank}", bytes=64)
    cluster.tell_node(order.shard.rank, m.ShardFetched(shard=made))


def test_a_generation_is_protected_when_every_member_has_made_its_parity() -> None:
    """Each node is told to add up what the two others have sealed; the last one counts."""
    cluster = protecting()
    orders = cluster.take(m.FetchShard)
    assert [order.shard.rank for order in orders] == [0, 1, 2]
    assert [[s.node for s in order.sources] for order in orders] == [[1, 2], [0, 2], [0, 1]]
    assert all(s.shard.root == f"{SAVED}:{s.node}" for order in orders for s in order.sources)
    for order in orders[:2]:
        encode(cluster, order)
    assert cluster.take(m.AnnounceProtected) == []
    encode(cluster, orders[2])
    assert [a.generation for a in cluster.take(m.AnnounceProtected)] == [SAVED] * 3


def test_a_parity_that_cannot_be_made_ends_the_round() -> None:
    """No memory at one node: the others stop, and say so."""
    cluster = protecting()
    order = cluster.take(m.FetchShard)[1]
    cluster.tell_node(
        1,
        m.FetchFailed(
            rank=1, generation=SAVED, slot=order.slot, reason="no memory", final=True, parity=True
        ),
    )
    assert sorted(a.rank for a in cluster.take(m.AbortFetch)) == [0, 2]
    assert cluster.coordinator.state.round is None


def test_a_node_that_comes_back_empty_is_rebuilt_and_protected_again() -> None:
    """Node 1 is replaced: its rank is rebuilt in a replica slot, then read as memory."""
    cluster = protecting()
    for order in cluster.take(m.FetchShard):
        encode(cluster, order)
    for rank in range(3):
        cluster.tell_node(rank, m.TrainerLost(rank=rank, incarnation=LAUNCH))
    cluster.replace(1)
    cluster.attach_all(NEXT, redundancy=XOR)
    cluster.claim(2, NEXT, parents=(m.TermParent(term=1, parent=None),), ever_committed=True)
    cluster.tell(m.DecisionWritten(term=2, attempt=1))
    (order,) = cluster.take(m.FetchShard)
    assert (order.shard.rank, order.shard.parity, len(order.sources)) == (1, None, 4)
    rebuilt_shard = replace(order.shard, slot=order.slot, copied=True)
    cluster.tell_node(1, m.ShardFetched(shard=rebuilt_shard))
    (read,) = cluster.take(m.RestoreShard)
    assert (read.source.kind, read.source.copied, read.source.rebuilt) == ("memory", True, True)
    cluster.verify_all(2)
    again = cluster.take(m.FetchShard)
    assert [order.shard.rank for order in again] == [1]  # the two others still have theirs
    encode(cluster, again[0])
    assert {a.generation for a in cluster.take(m.AnnounceProtected)} == {SAVED}


def restarted_with_two_losses() -> tuple[Cluster, list[m.FetchShard]]:
    """Protected with one loss, the next start wants parity for two: what it is told to make."""
    cluster = protecting()
    for order in cluster.take(m.FetchShard):
        encode(cluster, order)
    for rank in range(3):
        cluster.tell_node(rank, m.TrainerLost(rank=rank, incarnation=LAUNCH))
    cluster.attach_all(NEXT, redundancy=TWO_LOSSES)
    cluster.claim(2, NEXT, parents=(m.TermParent(term=1, parent=None),))
    cluster.tell(m.DecisionWritten(term=2, attempt=1))
    cluster.verify_all(2)
    return cluster, cluster.take(m.FetchShard)


def losses_of_parities(cluster: Cluster, generation: Generation = SAVED) -> list[list[int]]:
    """By node, how many losses the parities of a checkpoint there are for."""
    found = []
    for node, keeper in sorted(cluster.nodes.items()):
        held = keeper.state.replicas[node, True].restorable_shards()
        of_it = [s.parity.losses for s in held if s.parity and s.generation == generation]
        found.append(sorted(of_it))
    return found


def test_a_parity_stays_until_every_node_has_the_one_that_takes_its_place() -> None:
    """The second of three new ones is not made: the old ones are whole, and bring back a shard."""
    cluster, orders = restarted_with_two_losses()
    assert [order.shard.rank for order in orders] == [0, 1, 2]
    encode(cluster, orders[0])
    failed = m.CopyFailed(owner=1, generation=SAVED, reason="no memory")
    cluster.tell(m.MessageReceived(from_node=1, message=failed))
    assert cluster.coordinator.state.round is None
    assert losses_of_parities(cluster) == [[1, 2], [1], [1]]
    cluster.done = []
    newer = gen(2, 5)
    cluster.save(newer)
    orders = cluster.take(m.FetchShard)
    assert [order.shard.rank for order in orders] == [0, 1, 2]  # there is a slot for each
    for order in orders:
        encode(cluster, order)
    assert {a.generation for a in cluster.take(m.AnnounceProtected)} == {newer}
    assert losses_of_parities(cluster, newer) == [[2], [2], [2]]


def test_older_parities_of_a_checkpoint_go_once_newer_ones_protect_it() -> None:
    """All three are made."""
    cluster, orders = restarted_with_two_losses()
    for order in orders:
        encode(cluster, order)
    assert losses_of_parities(cluster) == [[2], [2], [2]]


def test_a_late_parity_is_no_protection_while_they_are_counted_anew() -> None:
    """The coordinator's keeper was replaced, and the round after it failed."""
    cluster = protecting()
    orders = cluster.take(m.FetchShard)
    for order in orders:
        encode(cluster, order)
    cluster.nodes[0], cluster.coordinator = NodeProtocol(), CoordinatorProtocol()
    cluster.tell_node(0, m.SlotsAdopted(rank=0, slots=3, held=(shard(0),)))
    cluster.attach(0, term=1, redundancy=XOR)
    cluster.claim(1, parents=(m.TermParent(term=1, parent=None),))
    assert cluster.coordinator.state.protected == SAVED
    failed = m.CopyFailed(owner=0, generation=SAVED, reason="no memory")
    cluster.tell(m.MessageReceived(from_node=0, message=failed))
    assert cluster.coordinator.state.round is None
    cluster.done = []
    late = m.CopySealed(shard=replace(orders[2].shard, root="p2", bytes=64))
    cluster.tell(m.MessageReceived(from_node=2, message=late))
    assert cluster.take(m.AnnounceProtected) == []


# --------------------------------------------------------------------------- another world


def test_fewer_ranks_gather_and_one_survivor_rebuilds_for_all() -> None:
    """Node 1 is gone and two ranks go on: its shard is rebuilt once, where a piece of it is."""
    made, left = parities(), copies(0, 2)
    question = Question(
        world_size=2, nodes=(0, 2), memory=(), copies=tuple(left.values()),
        parities=(made[0], made[2]), committed=(),
        chain=(m.TermParent(term=1, parent=None),),
    )  # fmt: skip
    choice = choose(question)
    assert choice is not None
    assert {source.kind for source in choice.sources} == {"gather"}
    assert choice.rebuilt == (1,)
    ((node, (source,)),) = choice.rebuilds.items()
    assert node in (0, 2)
    assert source.root == shard(1).root
    assert {place.node for place in choice.places if place.shard.rank == 1} == {node}
    assert choose(replace(question, parities=(made[0],))) is None


def across(rank: int) -> m.HeldShard:
    """A share that no other node has."""
    return replace(shard(rank), across_nodes=True)


def test_a_damaged_share_is_rebuilt_and_the_others_come_from_memory() -> None:
    """Node 1 has its shard, which is named as bad; without parity its file takes its place."""
    made = parities()
    question = Question(
        world_size=3, nodes=(0, 1, 2), memory=tuple(across(rank) for rank in range(3)),
        parities=tuple(made.values()), committed=(), chain=(m.TermParent(term=1, parent=None),),
        struck=frozenset({(1, SAVED, "memory")}),
    )  # fmt: skip
    choice = choose(question)
    assert choice is not None
    assert choice.rebuilt == (1,)
    assert {(place.shard.rank, place.node) for place in choice.places} > {(0, 0), (2, 2)}
    assert all(place.node != 1 for place in choice.places)
    records = tuple({"file": f"{r}", "root": shard(r).root} for r in range(3))
    stored = m.CatalogueEntry(generation=SAVED, step=3, world_size=3, records=records)
    assert choose(replace(question, parities=())) is None
    choice = choose(replace(question, parities=(), committed=(stored,)))
    assert choice is not None
    assert {place.shard.rank for place in choice.places} == {0, 2}


def test_a_rank_that_names_a_lost_share_costs_no_checkpoint() -> None:
    """The choice is made again without that memory; once more, and it is given up."""
    cluster = Cluster((0, 1))
    cluster.start()
    cluster.save(gen(1, 3), disk=True, across_nodes=True)
    records = tuple({"file": f"{r}", "root": f"{gen(1, 3)}:{r}"} for r in range(2))
    stored = m.CatalogueEntry(generation=gen(1, 3), step=3, world_size=2, records=records)
    parents = (m.TermParent(term=1, parent=None),)
    cluster.start(2, NEXT, committed=(stored,), parents=parents)
    for attempt, kind in ((1, "gather"), (2, "gather"), (3, "disk")):
        if attempt > 1:
            cluster.tell(m.DecisionWritten(term=2, attempt=attempt))
        orders = cluster.take(m.RestoreShard)
        assert {(o.generation, o.source.kind) for o in orders} == {(gen(1, 3), kind)}, attempt
        lost = m.ShardBad(rank=0, term=2, attempt=attempt, detail="a chunk", lost=1)
        if attempt < 3:
            cluster.tell_node(0, lost)
