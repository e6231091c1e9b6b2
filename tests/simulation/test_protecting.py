"""Rounds of copies: how long they are waited for, and what stays where their end is lost."""

from dataclasses import replace

import pytest

from autockpt.executors.protocol import messages as m
from autockpt.executors.protocol.coordinator.machine import CoordinatorProtocol
from autockpt.executors.protocol.deadlines import Deadlines
from autockpt.executors.protocol.node.machine import NodeProtocol
from autockpt.values.redundancy import Redundancy
from tests.simulation.cluster import Cluster, gen

SAVED = gen(1, 1)
COPIES = Redundancy(scheme="replicas", copies=2, placement="ring")
WAIT_S = Deadlines().copies_s


def copying() -> tuple[Cluster, list[m.FetchShard]]:
    """A rank on each of four nodes, and what each is told to fetch of its neighbour."""
    cluster = Cluster((0, 1, 2, 3), slots=3)
    cluster.attach_all(redundancy=COPIES)
    cluster.claim(1)
    cluster.tell(m.DecisionWritten(term=1, attempt=1))
    cluster.save(SAVED)
    orders = cluster.take(m.FetchShard)
    assert len(orders) == 4
    return cluster, sorted(orders, key=lambda order: order.shard.rank)


def fetched(cluster: Cluster, order: m.FetchShard) -> None:
    """The copy is complete on the next node of the ring."""
    sealed = m.ShardFetched(
        shard=m.HeldShard(
            rank=order.shard.rank, slot=order.slot, generation=SAVED, step=order.shard.step,
            world_size=4, root=order.shard.root, copied=True,
        )
    )  # fmt: skip
    cluster.tell_node(fetcher(cluster, order), sealed)


def coming(cluster: Cluster, order: m.FetchShard, mark: int) -> None:
    """A part of it is there, which the coordinator is told when it asks again."""
    told = m.ShardComing(rank=order.shard.rank, generation=SAVED, slot=order.slot, mark=mark)
    cluster.tell_node(fetcher(cluster, order), told)


def fetcher(cluster: Cluster, order: m.FetchShard) -> int:
    """The node that copies the shard of an order."""
    return next(
        n for n, keeper in cluster.nodes.items() if order.shard.rank in keeper.state.replicated
    )


def test_copies_that_come_one_by_one_are_waited_for() -> None:
    """One each minute: the round is longer than its deadline, and protects."""
    cluster, orders = copying()
    for order in orders:
        cluster.tick(WAIT_S / 2)
        assert cluster.coordinator.state.round is not None
        fetched(cluster, order)
    assert {a.generation for a in cluster.take(m.AnnounceProtected)} == {SAVED}


def test_one_copy_that_takes_longer_than_the_deadline_is_waited_for() -> None:
    """All of it is one shard: what came of it counts, as none is complete before."""
    cluster, orders = copying()
    for mark in range(1, 6):
        coming(cluster, orders[0], mark)
        cluster.tick(WAIT_S * 0.9)
        assert cluster.coordinator.state.round is not None
    for order in orders:
        fetched(cluster, order)
    assert {a.generation for a in cluster.take(m.AnnounceProtected)} == {SAVED}


@pytest.mark.parametrize("stuck", [True, False])
def test_a_round_of_which_nothing_more_comes_ends(stuck: bool) -> None:
    """Copies that stand still, and one that breaks at the same place again and again."""
    cluster, (order, *_) = copying()
    coming(cluster, order, 7)
    cluster.tick(10.0)
    if not stuck:
        broken = m.FetchFailed(rank=0, generation=SAVED, slot=order.slot, reason="broken")
        cluster.tell_node(fetcher(cluster, order), broken)
        cluster.tick(10.0)
        (order,) = cluster.take(m.FetchShard)
        coming(cluster, order, 7)
    cluster.tick(WAIT_S / 2)
    assert cluster.coordinator.state.round is not None
    cluster.tick(WAIT_S / 2)
    assert cluster.coordinator.state.round is None
    (report,) = [r for r in cluster.take(m.Report) if r.kind == "warning"]
    assert "nothing more of its copies came for 1" in report.detail


# --------------------------------------------------------------------------- an end that is lost


PARITY = Redundancy(scheme="xor", set_size=3, parity=1)
NEWER, NEWEST = gen(1, 3), gen(1, 5)


def encoding(nodes: tuple[int, ...], *, slots: int = 2) -> tuple[Cluster, list[m.FetchShard]]:
    """A rank on each node, and the parity that each is told to make."""
    cluster = Cluster(nodes, slots=slots)
    cluster.attach_all(redundancy=PARITY)
    cluster.claim(1)
    cluster.tell(m.DecisionWritten(term=1, attempt=1))
    cluster.save(SAVED)
    return cluster, sorted(cluster.take(m.FetchShard), key=lambda order: order.shard.rank)


def encode(cluster: Cluster, order: m.FetchShard, *, is_end_lost: bool = False) -> None:
    """The parity is made; what the coordinator says to that may be lost."""
    made = m.ShardFetched(shard=replace(order.shard, slot=order.slot, root=f"p{order.shard.rank}"))
    node = order.shard.rank
    if not is_end_lost:
        cluster.tell_node(node, made)
        return
    for told in cluster.nodes[node].handle(made):
        if isinstance(told, m.Send):
            cluster.coordinator.handle(m.MessageReceived(from_node=node, message=told.message))


def replace_coordinator(cluster: Cluster) -> None:
    """The keeper of node 0 dies, and a new one adopts the slots of its rank."""
    held = cluster.nodes[0].state.ranks[0].slots.restorable_shards()
    cluster.nodes[0], cluster.coordinator = NodeProtocol(), CoordinatorProtocol()
    cluster.tell_node(0, m.SlotsAdopted(rank=0, slots=cluster.slots, held=held))
    cluster.attach(0, term=1, redundancy=PARITY)
    cluster.claim(1, parents=(m.TermParent(term=1, parent=None),))


@pytest.mark.parametrize("is_coordinator_lost", [False, True])
def test_a_protected_checkpoint_stays_where_a_node_did_not_hear_of_it(
    is_coordinator_lost: bool,
) -> None:
    """The slots stay while a newer one is copied, and are free again if that fails."""
    cluster, orders = encoding((0, 1))
    encode(cluster, orders[0])
    encode(cluster, orders[1], is_end_lost=True)
    assert cluster.coordinator.state.protected == SAVED
    assert cluster.nodes[1].state.protected is None
    cluster.cut = {1} if is_coordinator_lost else set()
    cluster.save(NEWER)
    cluster.cut = set()
    if is_coordinator_lost:
        replace_coordinator(cluster)
    assert cluster.coordinator.state.round is not None
    assert cluster.coordinator.state.round.generation == NEWER
    for rank in (0, 1):
        assert cluster.held(rank) == [str(SAVED), str(NEWER)]
        cluster.done = []
        cluster.request(rank, NEWEST)
        assert [skip.rank for skip in cluster.take(m.SkipSave)] == [rank]
    failed = m.CopyFailed(owner=1, generation=NEWER, reason="no memory")
    cluster.tell(m.MessageReceived(from_node=1, message=failed))
    cluster.done = []
    cluster.request(1, gen(1, 7))
    assert len(cluster.take(m.GrantSlot)) == 1


def test_a_round_that_a_node_had_not_finished_has_protected_nothing() -> None:
    """Of three nodes the last makes its parity yet, when the coordinator is lost."""
    cluster, orders = encoding((0, 1, 2))
    for order in orders:
        encode(cluster, order)
    cluster.save(NEWER)
    orders = sorted(cluster.take(m.FetchShard), key=lambda order: order.shard.rank)
    for order in orders[:2]:
        encode(cluster, order)
    replace_coordinator(cluster)
    assert cluster.coordinator.state.protected == SAVED


def test_a_parity_of_another_scheme_is_no_part_of_a_round() -> None:
    """A plan wants two losses survived.  Node 2 has an older parity, and no slot for another."""
    cluster, orders = encoding((0, 1, 2), slots=3)
    for order in orders:
        encode(cluster, order)
    cluster.save(NEWER)
    orders = sorted(cluster.take(m.FetchShard), key=lambda order: order.shard.rank)
    encode(cluster, orders[2])
    failed = m.CopyFailed(owner=1, generation=NEWER, reason="no memory")
    cluster.tell(m.MessageReceived(from_node=1, message=failed))
    for order in orders:
        assert order.shard.parity is not None
        parity = replace(order.shard, parity=replace(order.shard.parity, losses=2))
        wanted = m.CopiesWanted(
            generation=NEWER, parities=(parity,), holders=(parity.rank,), protected=SAVED
        )
        cluster.tell_node(parity.rank, m.MessageReceived(from_node=0, message=wanted))
    orders = sorted(cluster.take(m.FetchShard), key=lambda order: order.shard.rank)
    assert [order.shard.rank for order in orders] == [0, 1]
    encode(cluster, orders[1], is_end_lost=True)
    replace_coordinator(cluster)
    copied = [r.copied for _, r in sorted(cluster.coordinator.state.inventory.items())]
    assert copied == [None, NEWER, None]
    assert cluster.coordinator.state.protected == SAVED


def test_a_parity_that_is_under_way_gives_way_to_that_of_another_scheme() -> None:
    """The end of the round for it was lost: complete, it would end the next round."""
    cluster, orders = encoding((0, 1, 2))
    assert orders[2].shard.parity is not None
    parity = replace(orders[2].shard, parity=replace(orders[2].shard.parity, losses=2))
    wanted = m.CopiesWanted(generation=SAVED, parities=(parity,), holders=(2,))
    for _ in range(2):  # a repeated request begins nothing again
        cluster.tell_node(2, m.MessageReceived(from_node=0, message=wanted))
    told = [one for one in cluster.done if isinstance(one, m.AbortFetch | m.FetchShard)]
    assert [type(one) for one in told] == [m.AbortFetch, m.FetchShard]
    assert cluster.take(m.FetchShard)[0].shard == parity


def test_a_replaced_coordinator_says_nothing_of_copies() -> None:
    """Its node was left out and comes back: the checkpoint is the parent of another term now."""
    cluster, orders = encoding((0, 1, 2))
    for order in orders:
        encode(cluster, order)
    node = cluster.nodes[2].state
    ended = m.CopiesEnded(generation=SAVED, protected=False, reason="a node is lost")
    cluster.tell_node(2, m.MessageReceived(from_node=1, message=ended))
    assert node.protected == SAVED
    wanted = m.CopiesWanted(generation=SAVED, replicated=(0, 1))
    cluster.tell_node(2, m.MessageReceived(from_node=1, message=wanted))
    assert (node.replicated, node.copying) == ((), None)
    cluster.tell_node(2, m.MessageReceived(from_node=0, message=ended))
    assert node.protected is None


OLD = m.Incarnation(launch_id="older", restart_round=0)
OF_REPLACED: tuple[m.WireMessage, ...] = (
    m.InventoryWanted(incarnation=OLD, term=1),
    m.RestoreOrdered(
        incarnation=OLD, rank=2, term=1, attempt=1, generation=SAVED, step=1,
        source=m.ShardSource(kind="disk"),
    ),
    m.ShardsPlaced(incarnation=OLD, term=1, attempt=1, generation=SAVED, places=()),
    m.TermOpened(
        incarnation=OLD, term=1, parent=None, step=0, parent_durable=False, lineage=()
    ),
    m.AttachRefused(rank=2, incarnation=OLD, reason="replaced"),
    m.RestoreRefused(rank=2, incarnation=OLD, reason="replaced"),
    m.TermFenced(incarnation=OLD, term=1, reason="newer term"),
    m.MemoryCommitted(generation=NEWER),
    m.CopiesWanted(generation=SAVED, replicated=(0, 1)),
    m.CopiesEnded(generation=SAVED, protected=False),
    m.DurableCommitted(generation=NEWER),
    m.GenerationDropped(generation=SAVED, reason="older", memory=True),
    m.PersistWanted(generation=SAVED, ranks=(2,)),
    m.PlanOffered(incarnation=OLD, term=1, version=7, payload={}, margin_steps=2),
    m.PlanDecided(term=1, version=7, apply_step=9),
    m.PlanDropped(term=1, version=7, reason="older"),
)  # fmt: skip
"""All that a coordinator tells nodes, of a term with the number of the present one."""


@pytest.mark.parametrize("message", OF_REPLACED, ids=lambda message: type(message).__name__)
def test_a_node_listens_to_no_replaced_coordinator(message: m.WireMessage) -> None:
    """The directory was emptied between: a term's number does not tell them apart."""
    cluster, orders = encoding((0, 1, 2))
    for order in orders:
        encode(cluster, order)
    cluster.nodes[2].state.ranks[2].plan_offered = 7
    before = repr(cluster.nodes[2].state.ranks), cluster.held(2)
    told = cluster.nodes[2].handle(m.MessageReceived(from_node=1, message=message))
    assert [getattr(one, "kind", None) for one in told] == ["stale"]
    assert (repr(cluster.nodes[2].state.ranks), cluster.held(2)) == before


def test_every_kind_of_message_to_nodes_is_in_the_table() -> None:
    """One that is added later is refused as well."""
    kinds = {type(message) for message in OF_REPLACED}
    assert kinds == set(m.TO_NODE)
