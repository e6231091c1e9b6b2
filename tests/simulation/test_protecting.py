"""Rounds of copies: how long they are waited for."""

import pytest

from autockpt.executors.protocol import messages as m
from autockpt.executors.protocol.deadlines import Deadlines
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
