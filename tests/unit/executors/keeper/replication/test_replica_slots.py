"""Replica slots of several keepers in one process: parities, and what is rebuilt from them."""

import queue
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from autockpt.executors.image.container import chunk_digest
from autockpt.executors.keeper.replication import replica_slots as replicas_module
from autockpt.executors.keeper.replication.device_transfers import KeeperExchanges
from autockpt.executors.keeper.replication.replica_slots import ReplicaSlots
from autockpt.executors.keeper.replication.shard_fetch import DEADLINE_S, time_for
from autockpt.executors.keeper.slots import MemoryTable
from autockpt.executors.keeper.wire import SlotsWanted
from autockpt.executors.network.transfer.frames import Want
from autockpt.executors.network.transfer.session import Loan
from autockpt.executors.protocol import messages as p
from autockpt.executors.protocol.coordinator.replicating import parities_of
from autockpt.executors.protocol.coordinator.state import ParityRanks
from autockpt.values.errors import GuardError
from tests.unit.executors.network.transfer.ends import (
    CHUNK,
    GENERATION,
    HOST,
    PATIENCE_S,
    RUN,
    SECRET,
    Image,
    identity,
)

SIZES = (7 * CHUNK, 9 * CHUNK + 77, 3 * CHUNK + 1, CHUNK // 2)
"""One image is far shorter than the others: most of them get no chunk of it."""


class Node:
    """A keeper's replica slots, and a sealed shard of its one rank."""

    def __init__(self, rank: int, peers: dict[int, "Node"], *, empty: bool = False) -> None:
        self.rank, self.peers = rank, peers
        self.posted: queue.Queue[Callable[[], None]] = queue.Queue()
        self.told: list[Any] = []
        self.coming: list[p.ShardComing] = []
        self.rate = 0.0
        self.stored: Callable[[Want], Loan | str] = lambda want: "no store"
        self.memory = MemoryTable()
        self.image = Image(SIZES[rank], seed=rank, rank=rank)
        if not empty:
            memory = self.memory.allocate(
                SlotsWanted(rank=rank, image_bytes=SIZES[rank], chunk_bytes=CHUNK, slots=2)
            )
            memory.image(0, SIZES[rank])[:] = self.image.view
            memory.seal(0, self.image.index)
        self.replicas = ReplicaSlots(
            run_id=RUN, memory=self.memory, post=self.posted.put, tell=self._tell,
            address=lambda node: (HOST, self.peers[node].port), rate=lambda: self.rate,
            restoring=lambda: False, copied=lambda *_: None, receiver=lambda _: None,
            exchanges=KeeperExchanges(lambda *_: None),
            log=lambda text: None, stored=lambda want: self.stored(want),
        )  # fmt: skip
        self.port = self.replicas.open(SECRET, identity(rank), HOST)
        peers[rank] = self

    def _tell(self, event: Any) -> None:
        (self.coming if isinstance(event, p.ShardComing) else self.told).append(event)

    @property
    def shard(self) -> p.HeldShard:
        """As its owner sealed it."""
        index = self.image.index
        return p.HeldShard(
            rank=self.rank, slot=0, generation=GENERATION, step=index.step, world_size=4,
            root=index.root, layout_digest=index.layout_digest, bytes=index.image_bytes,
            chunk_bytes=CHUNK,
        )  # fmt: skip

    def close(self) -> None:
        """Ends all; a keeper's memory ends with it."""
        self.replicas.close()
        for memory in self.memory.ranks.values():
            memory.close_slots()
        for parity in (False, True):
            for rank in range(4):
                self.replicas.free(p.FreeReplicas(rank=rank, parity=parity))


@pytest.fixture
def nodes() -> Iterator[dict[int, Node]]:
    """Four nodes with a rank each."""
    peers: dict[int, Node] = {}
    for rank in range(4):
        Node(rank, peers)
    yield peers
    for node in list(peers.values()):
        node.close()


def run(nodes: dict[int, Node], done: Callable[[], bool]) -> None:
    """The loops of all keepers, in turn, until it is done."""
    deadline = time.monotonic() + PATIENCE_S
    while not done():
        assert time.monotonic() < deadline, [node.told for node in nodes.values()]
        for node in list(nodes.values()):
            while not node.posted.empty():
                node.posted.get()()
        time.sleep(0.001)


def orders(nodes: dict[int, Node], losses: int) -> list[p.FetchShard]:
    """What a round of copies asks of every node."""
    shards = {node.rank: node.shard for node in nodes.values()}
    each = ParityRanks(ranks=tuple(sorted(shards)), losses=losses)
    return [
        p.FetchShard(
            shard=parity, slot=0,
            sources=tuple(
                p.ShardCopy(node=r, shard=shards[r]) for r in each.ranks if r != parity.rank
            ),
        )
        for parity in parities_of(each, shards)
    ]  # fmt: skip


def protect(nodes: dict[int, Node], losses: int) -> dict[int, p.HeldShard]:
    """Every node makes its parity; by rank."""
    for order in orders(nodes, losses):
        nodes[order.shard.rank].replicas.fetch(order)
    run(nodes, lambda: all(node.told for node in nodes.values()))
    made = [node.told.pop() for node in nodes.values()]
    assert all(isinstance(answer, p.ShardFetched) for answer in made), made
    return {answer.shard.rank: answer.shard for answer in made}


def rebuild_order(
    nodes: dict[int, Node], made: dict[int, p.HeldShard], rank: int, lost: set[int]
) -> p.FetchShard:
    """What a restore asks of the node where the rank lives now."""
    left = [r for r in nodes if r not in lost]
    pieces = [p.ShardCopy(node=r, shard=nodes[r].shard) for r in left]
    pieces += [p.ShardCopy(node=r, shard=made[r]) for r in left]
    return p.FetchShard(shard=made[left[0]].of_member(rank), slot=1, sources=tuple(pieces))


@pytest.mark.parametrize("lost", [{0}, {1}, {2}, {3}, {0, 3}, {1, 2}], ids=str)
def test_what_lost_nodes_had_is_rebuilt_from_the_others(
    nodes: dict[int, Node], lost: set[int]
) -> None:
    """Images of any length come back to the bit, with their digests, and can be lent again."""
    made = protect(nodes, len(lost))
    shards = {rank: nodes[rank].shard for rank in lost}
    for rank in lost:
        nodes.pop(rank).close()
    for rank in lost:
        order = rebuild_order(nodes, made, rank, lost)
        fresh = Node(rank, nodes, empty=True)
        fresh.replicas.fetch(order)
        run(nodes, partial(bool, fresh.told))
        rebuilt = replace(shards[rank], slot=1, copied=True, proofs_known=False)
        assert fresh.told == [p.ShardFetched(shard=rebuilt)]
        replica = fresh.replicas.holding(rank, GENERATION)
        assert replica is not None
        assert replica.arena.view[: SIZES[rank]] == fresh.image.view
        assert replica.index() == fresh.image.index
        nodes.pop(rank).close()


def test_a_parity_is_smaller_than_a_copy_and_its_memory_is_used_again(
    nodes: dict[int, Node],
) -> None:
    """A third of the longest image of four and the digests; the next one takes the same memory."""
    protect(nodes, 1)
    sizes = [node.replicas.total_bytes for node in nodes.values()]
    assert max(sizes) < max(SIZES) // 2
    protect(nodes, 1)
    assert [node.replicas.total_bytes for node in nodes.values()] == sizes


def test_a_member_whose_shard_is_another_spoils_its_parity_only(nodes: dict[int, Node]) -> None:
    """What does not have the root that was sealed is not added to anything."""
    order = orders(nodes, 1)[0]
    other = replace(order.sources[1].shard, root=chunk_digest(memoryview(b"other")))
    sources = (order.sources[0], replace(order.sources[1], shard=other), order.sources[2])
    nodes[0].replicas.fetch(replace(order, sources=sources))
    run(nodes, lambda: bool(nodes[0].told))
    (failed,) = nodes[0].told
    assert isinstance(failed, p.FetchFailed)
    assert (failed.parity, failed.final) == (True, True)
    assert "no shard of rank 2" in failed.reason
    assert nodes[0].replicas.holding(0, GENERATION) is None


def test_a_survivor_with_rotten_bytes_is_noticed(nodes: dict[int, Node]) -> None:
    """A bit that flipped after the seal fails its digest on the way."""
    made = protect(nodes, 1)
    nodes.pop(1).close()
    nodes[0].memory.of(0).image(0, SIZES[0])[5 * CHUNK] ^= 1
    order = rebuild_order(nodes, made, 1, {1})
    fresh = Node(1, nodes, empty=True)
    fresh.replicas.fetch(order)
    run(nodes, lambda: bool(fresh.told))
    (failed,) = fresh.told
    assert isinstance(failed, p.FetchFailed), failed
    assert failed.final
    assert not failed.parity


def test_of_two_slots_that_claim_the_same_shard_the_whole_one_is_lent(
    nodes: dict[int, Node],
) -> None:
    """A page of memory that was copied over another one took a trailer with it."""
    made = protect(nodes, 1)
    nodes.pop(1).close()
    memory = nodes[0].memory.of(0)
    memory.image(1, SIZES[0])[:] = memory.image(0, SIZES[0])
    memory.seal(1, nodes[0].image.index)
    memory.image(0, SIZES[0])[:] = bytes(SIZES[0])
    order = rebuild_order(nodes, made, 1, {1})
    fresh = Node(1, nodes, empty=True)
    fresh.replicas.fetch(order)
    run(nodes, lambda: bool(fresh.told))
    (fetched,) = fresh.told
    assert isinstance(fetched, p.ShardFetched), fetched


def test_a_piece_on_the_same_node_is_taken_from_itself(nodes: dict[int, Node]) -> None:
    """Ranks may have moved: the lost one lives where a member of its set does."""
    made = protect(nodes, 1)
    lost = nodes[1].shard
    nodes.pop(1).close()
    nodes[2].replicas.fetch(rebuild_order(nodes, made, 1, {1}))
    run(nodes, lambda: bool(nodes[2].told))
    rebuilt = replace(lost, slot=1, copied=True, proofs_known=False)
    assert nodes[2].told == [p.ShardFetched(shard=rebuilt)]


def test_after_an_abort_nobody_writes_the_slot_or_says_anything(nodes: dict[int, Node]) -> None:
    """Whether it has begun or not; the slot is used by the next fetch."""
    for pause_s in (0.0, 0.002, 0.01):
        order = orders(nodes, 1)[0]
        nodes[0].replicas.fetch(order)
        time.sleep(pause_s)
        abort = p.AbortFetch(rank=0, generation=GENERATION, slot=0, reason="test", parity=True)
        nodes[0].replicas.abort(abort)
        nodes[0].replicas.fetch(order)
        run(nodes, lambda: bool(nodes[0].told))
        assert [type(answer) for answer in nodes[0].told] == [p.ShardFetched]
        nodes[0].told.clear()


def test_without_headroom_a_parity_is_refused(
    nodes: dict[int, Node], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The round is told at once that asking again is in vain."""

    def none_left(nbytes: int, *, what: str) -> None:
        raise GuardError(f"{what}: no memory")

    monkeypatch.setattr(replicas_module, "require_headroom", none_left)
    nodes[0].replicas.fetch(orders(nodes, 1)[0])
    run(nodes, lambda: bool(nodes[0].told))
    (failed,) = nodes[0].told
    assert failed.final
    assert "parity held by rank 0" in failed.reason
    assert nodes[0].replicas.total_bytes == 0


def test_what_is_on_its_way_is_told(
    nodes: dict[int, Node], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each word says more than the one before, and the last one that all of it is here."""
    monkeypatch.setattr(replicas_module, "COMING_S", 0.0)
    nodes[1].replicas.fetch(orders(nodes, 1)[1])
    run(nodes, lambda: bool(nodes[1].told))
    words = nodes[1].coming
    marks = [word.mark for word in words]
    assert marks
    assert marks == sorted(marks)
    assert all((w.rank, w.slot, w.parity) == (1, 0, True) for w in words)
    assert CHUNK // 2 <= marks[-1] <= sum(SIZES)


def test_a_node_sends_no_faster_than_its_rate_however_many_ask(nodes: dict[int, Node]) -> None:
    """Three nodes want a chunk each, which takes 1 s: the last one waits for two others."""
    owner = nodes[3]
    owner.rate = SIZES[3] / 1.0
    began = time.monotonic()
    for node in (0, 1, 2):
        source = p.ShardCopy(node=3, shard=owner.shard)
        nodes[node].replicas.fetch(p.FetchShard(shard=owner.shard, slot=0, sources=(source,)))
    run(nodes, lambda: all(nodes[node].told for node in (0, 1, 2)))
    answers = [nodes[node].told.pop() for node in (0, 1, 2)]
    assert all(isinstance(answer, p.ShardFetched) for answer in answers), answers
    took_s = time.monotonic() - began
    assert 1.9 < took_s < 6
    for node in (0, 1, 2):  # the pauses that the rate makes are no part of the link's speed
        nbytes, moving_s = nodes[node].replicas.link.take()
        assert nbytes == owner.shard.bytes
        assert 0 < moving_s < took_s / 4


def test_a_large_shard_has_more_time_than_a_small_one() -> None:
    """80 GB at 1 Gbit/s is 640 s; nobody has to be that fast."""
    assert time_for(10**8) == DEADLINE_S
    assert time_for(80 * 10**9) > 10 * 640
