"""Shards read by ranks of another world: from this node, from others, from what is rebuilt."""

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count

import pytest

from autockpt.executors.keeper.restoring import shard_gather as gathering_module
from autockpt.executors.keeper.restoring.shard_gather import Gathering
from autockpt.executors.keeper.wire import ChunksLent, ChunksWanted, LostShardError
from autockpt.executors.linux.memory import Arena
from autockpt.executors.protocol import messages as p
from autockpt.executors.restore.gathered_source import LentSource, farthest, gathered_shards
from autockpt.values.errors import CorruptCheckpointError, GuardError
from tests.unit.executors.keeper.replication.test_replica_slots import (
    Node,
    nodes,
    protect,
    rebuild_order,
    run,
)
from tests.unit.executors.network.transfer.ends import CHUNK, GENERATION, RUN

__all__ = ["nodes"]
NONE = memoryview(b"")
"""What is read in place needs no memory."""


class Reader:
    """What a trainer's link does, with the loops of all keepers in hand."""

    def __init__(self, nodes: dict[int, Node], gathering: Gathering) -> None:
        self.nodes, self.gathering = nodes, gathering
        self.answers: dict[int, tuple[ChunksLent, Arena | None]] = {}
        self._numbers = count()

    def want(self, shard: int, chunks: tuple[int, ...], *, elsewhere: bool) -> int:
        """Asks the keeper."""
        number = next(self._numbers)
        wanted = ChunksWanted(
            rank=9, term=2, attempt=1, shard=shard, chunks=chunks, number=number,
            elsewhere=elsewhere,
        )  # fmt: skip
        self.gathering.wanted(wanted, lambda *lent: self.answers.update({number: lent}))
        return number

    def take(self, number: int) -> tuple[ChunksLent, Arena]:
        """The answer, with a mapping of its own as after a message."""
        run(self.nodes, lambda: number in self.answers)
        lent, arena = self.answers.pop(number)
        if lent.lost is not None:
            raise LostShardError(lent.refusal, lent.lost)
        if arena is None or arena.fd is None:
            raise CorruptCheckpointError(lent.refusal)
        return lent, Arena.attach(os.dup(arena.fd), fault=False)


@contextmanager
def gathering(
    nodes: dict[int, Node], at: int, places: list[p.ShardCopy], rebuilt: tuple[int, ...] = ()
) -> Iterator[Reader]:
    """What node `at` gathers."""
    order = p.ServeShards(
        term=2, attempt=1, generation=GENERATION, places=tuple(places), rebuilt=rebuilt
    )
    node = nodes[at]
    made = Gathering(order, run_id=RUN, node=at, memory=node.memory, replicas=node.replicas)
    yield Reader(nodes, made)
    made.close()


def home(node: Node) -> p.ShardCopy:
    """A shard where its owner sealed it."""
    return p.ShardCopy(node=node.rank, shard=node.shard)


def copy_to(nodes: dict[int, Node], at: int, rank: int) -> p.ShardCopy:
    """A copy in a replica slot."""
    nodes[at].replicas.fetch(
        p.FetchShard(shard=nodes[rank].shard, sources=(home(nodes[rank]),), slot=0)
    )
    run(nodes, lambda: bool(nodes[at].told))
    assert isinstance(nodes[at].told.pop(), p.ShardFetched)
    return p.ShardCopy(node=at, shard=nodes[rank].shard)


def chunk(node: Node, number: int) -> bytes:
    """As it was saved."""
    return bytes(node.image.view[number * CHUNK : (number + 1) * CHUNK])


def test_a_rank_gets_the_chunks_that_it_asks_for_and_no_others(nodes: dict[int, Node]) -> None:
    """What is here takes no memory, of what is elsewhere only what was brought."""
    with gathering(nodes, 0, [home(node) for node in nodes.values()]) as reader:
        began = reader.gathering.began(9)
        assert (len(began.layouts), began.near) == (4, (0,))
        shards, used = gathered_shards(9, 2, GENERATION, began, reader, "nowhere")
        assert (shards.home, shards.regrouped) == (0, True)
        own, other = shards.open(0), shards.open(1)
        assert bytes(own.read(6, NONE)) == chunk(nodes[0], 6)
        assert reader.gathering.total_bytes == CHUNK  # the first one of the other
        other.expect([2, 5])
        for number in (5, 2, 0, 9):
            assert bytes(other.read(number, NONE)) == chunk(nodes[1], number)
        assert reader.gathering.total_bytes == 4 * CHUNK
        assert farthest(used) == "peer"


def test_a_node_that_is_gone_is_passed_over(nodes: dict[int, Node]) -> None:
    """Its partner has the same bytes."""
    places = [home(nodes[1]), copy_to(nodes, 2, 1)]
    nodes[1].replicas.close()
    for turn in (0, 3):  # whom they ask first differs
        with gathering(nodes, turn, places) as reader:
            lent = LentSource(reader, 1, GENERATION)
            assert lent.node == 2
            assert bytes(lent.read(3, NONE)) == chunk(nodes[1], 3)


def test_a_flipped_bit_is_read_from_another_copy(nodes: dict[int, Node]) -> None:
    """In the slot of this very node; in one of another node the transfer finds it."""
    places = [home(nodes[0]), copy_to(nodes, 2, 0)]
    nodes[0].memory.of(0).image(0, CHUNK)[7] ^= 1
    for at in (0, 1):
        with gathering(nodes, at, places) as reader:
            lent = LentSource(reader, 0, GENERATION)
            assert bytes(lent.read(0, NONE)) == chunk(nodes[0], 0)
            assert bytes(lent.read(1, NONE)) == chunk(nodes[0], 1)


def test_a_shard_that_no_memory_has_whole_is_named(nodes: dict[int, Node]) -> None:
    """On the node that has it, and on another one; without its node nothing is known of it."""
    place = home(nodes[0])
    nodes[0].memory.of(0).image(0, CHUNK)[7] ^= 1
    for at in (0, 1):
        with (
            gathering(nodes, at, [place]) as reader,
            pytest.raises(LostShardError, match=r"(rank|node) 0") as told,
        ):
            LentSource(reader, 0, GENERATION).read(0, NONE)
        assert told.value.shard == 0
    nodes[0].replicas.close()
    with (
        gathering(nodes, 1, [place]) as reader,
        pytest.raises(CorruptCheckpointError, match="node 0") as silent,
    ):
        LentSource(reader, 0, GENERATION)
    assert not isinstance(silent.value, LostShardError)


def test_a_refusal_is_of_all_chunks_of_a_request(nodes: dict[int, Node]) -> None:
    """Its answer comes once: a second reader would wait for it in vain."""
    with gathering(nodes, 0, [home(nodes[1])]) as reader:
        lent = LentSource(reader, 1, GENERATION)
        nodes[1].memory.of(1).clear(0)
        lent.expect([1, 2])
        for number in (1, 2):
            with pytest.raises(LostShardError, match="no shard of rank 1"):
                lent.read(number, NONE)


def test_a_damaged_shard_is_not_taken_for_the_rebuilt_one(nodes: dict[int, Node]) -> None:
    """Its node has both: the slot, and a way to the node that rebuilds."""
    made = protect(nodes, 1)
    shard, image = nodes[1].shard, chunk(nodes[1], 0)
    nodes[1].memory.of(1).image(0, CHUNK)[7] ^= 1
    order = rebuild_order(nodes, made, 1, {1})
    with gathering(nodes, 1, [p.ShardCopy(node=2, shard=shard)], rebuilt=(1,)) as reader:
        number = reader.want(1, (0,), elsewhere=False)
        nodes[2].replicas.fetch(order)
        lent, arena = reader.take(number)
        assert lent.node == 2
        assert bytes(arena.view[:CHUNK]) == image


def test_what_is_rebuilt_meanwhile_is_waited_for(nodes: dict[int, Node]) -> None:
    """Another node adds it up from parity; whoever asks too early gets it when it is there."""
    made = protect(nodes, 1)
    shard, image = nodes[1].shard, chunk(nodes[1], 4)
    order = rebuild_order(nodes, made, 1, {1})
    nodes.pop(1).close()
    with gathering(nodes, 0, [p.ShardCopy(node=2, shard=shard)], rebuilt=(1,)) as reader:
        number = reader.want(1, (4,), elsewhere=False)
        nodes[2].replicas.fetch(order)
        lent, arena = reader.take(number)
        assert lent.node == 2
        assert bytes(arena.view[4 * CHUNK : 5 * CHUNK]) == image


def test_a_shard_that_is_nowhere_is_refused_with_the_reason(nodes: dict[int, Node]) -> None:
    """At once: nobody rebuilds it.  So is everything once the restore is over."""
    place = home(nodes[1])
    nodes[1].memory.of(1).clear(0)
    with gathering(nodes, 0, [place]) as reader:
        with pytest.raises(CorruptCheckpointError, match="no shard of rank 1"):
            LentSource(reader, 1, GENERATION)
        with pytest.raises(CorruptCheckpointError, match="no other memory"):
            LentSource(reader, 3, GENERATION)
    with pytest.raises(CorruptCheckpointError, match="over"):
        LentSource(reader, 1, GENERATION)


def test_a_request_is_answered_though_the_gathering_ends_as_its_fetch_begins(
    nodes: dict[int, Node], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next attempt takes its place: without an answer, the rank would never begin that one."""
    with gathering(nodes, 0, [home(nodes[1])]) as reader:
        monkeypatch.setattr(
            gathering_module, "require_headroom", lambda *_, **__: reader.gathering.close()
        )
        with pytest.raises(CorruptCheckpointError, match=gathering_module.OVER):
            reader.take(reader.want(1, (2,), elsewhere=False))


def test_without_room_for_a_chunk_nothing_is_brought(
    nodes: dict[int, Node], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Refused as a missing shard is: the file may have it."""

    def none_left(nbytes: int, *, what: str) -> None:
        raise GuardError(f"{what}: no memory for {nbytes} bytes")

    monkeypatch.setattr(gathering_module, "require_headroom", none_left)
    with (
        gathering(nodes, 0, [home(nodes[1])]) as reader,
        pytest.raises(CorruptCheckpointError, match="chunks of rank 1: no memory"),
    ):
        LentSource(reader, 1, GENERATION)


def test_a_request_is_answered_where_the_kernel_gives_no_memory(
    nodes: dict[int, Node], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is refused; the loop of the keeper goes on."""

    def none_left(nbytes: int, *, name: str) -> Arena:
        raise OSError(errno.EMFILE, "too many open files")

    monkeypatch.setattr(Arena, "create_sparse", none_left)
    with (
        gathering(nodes, 0, [home(nodes[1])]) as reader,
        pytest.raises(CorruptCheckpointError, match="too many open files"),
    ):
        LentSource(reader, 1, GENERATION)
