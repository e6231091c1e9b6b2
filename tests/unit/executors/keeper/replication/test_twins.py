"""What a replica on the fetching node has does not cross the network once more."""

from collections.abc import Iterator
from dataclasses import replace

import pytest

from autockpt.executors.image.container import chunk_digest
from autockpt.executors.keeper.replication import shard_fetch
from autockpt.executors.keeper.wire import SlotsWanted
from autockpt.executors.protocol import messages as p
from tests.unit.executors.keeper.replication.test_replica_slots import Node, run
from tests.unit.executors.network.transfer.ends import CHUNK

NBYTES = 6 * CHUNK + 77
OWN = (0, 3)
"""Chunks that differ between the two ranks."""


class Replica(Node):
    """A node whose shard equals those of all others but for a few chunks."""

    def __init__(self, rank: int, peers: dict[int, Node]) -> None:
        super().__init__(rank, peers, empty=True)
        self.came: list[int] = []
        image, index = self.image, self.image.index
        self.replicas._tell_copied = lambda *a: self.came.append(a[2])
        image.view[:] = bytes((7 * n) % 251 for n in range(NBYTES))
        for number in OWN:
            image.view[number * CHUNK] = rank
        ranges = [index.chunk_range(number) for number in range(len(index.digests))]
        digests = tuple(chunk_digest(image.view[start:stop]) for start, stop in ranges)
        image.index = replace(index, digests=digests, layout_digest="parts of each")
        self.memory_of_rank = self.memory.allocate(
            SlotsWanted(rank=rank, image_bytes=NBYTES, chunk_bytes=CHUNK, slots=2)
        )
        self.memory_of_rank.image(0, NBYTES)[:] = image.view
        self.memory_of_rank.seal(0, image.index)


@pytest.fixture
def replicas(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[int, Node]]:
    """Two nodes of a job whose state stands on each of them."""
    monkeypatch.setattr(
        "tests.unit.executors.keeper.replication.test_replica_slots.SIZES", (NBYTES,) * 2
    )
    peers: dict[int, Node] = {}
    for rank in range(2):
        Replica(rank, peers)
    yield peers
    for node in list(peers.values()):
        node.close()


def copy(replicas: dict[int, Node]) -> Replica:
    """Node 1 makes its copy of the shard of node 0."""
    here, there = replicas[1], replicas[0]
    assert isinstance(here, Replica)
    shard = there.shard
    here.replicas.fetch(
        p.FetchShard(shard=shard, slot=0, sources=(p.ShardCopy(node=0, shard=shard),))
    )
    run(replicas, lambda: bool(here.told))
    assert isinstance(here.told[0], p.ShardFetched), here.told
    (_, arena, index), *_ = here.replicas._replicas_of(0, "image")
    assert index == there.image.index
    assert bytes(arena.view[:NBYTES]) == bytes(there.image.view)
    return here


def test_chunks_that_a_replica_here_has_are_not_fetched(replicas: dict[int, Node]) -> None:
    """The copy is whole to the bit; two of seven chunks crossed the network."""
    here = copy(replicas)
    assert here.came == [len(OWN) * CHUNK]


def test_a_replica_that_is_written_meanwhile_is_not_believed(replicas: dict[int, Node]) -> None:
    """Its description says one thing, its bytes another: the chunk comes from its owner."""
    here = replicas[1]
    assert isinstance(here, Replica)
    here.memory_of_rank.image(0, NBYTES)[CHUNK + 5] ^= 1
    assert copy(replicas).came == [(len(OWN) + 1) * CHUNK]


def test_a_fetch_that_is_aborted_waits_for_one_chunk_of_a_replica(
    replicas: dict[int, Node], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where no chunk is what it was: else an abort would wait for the whole image."""
    here, shard = replicas[1], replicas[0].shard
    assert isinstance(here, Replica)
    order = p.FetchShard(shard=shard, slot=0, sources=(p.ShardCopy(node=0, shard=shard),))
    twin = here.replicas._twin(order)
    here.memory_of_rank.image(0, NBYTES)[:] = bytes(NBYTES)
    compared: list[int] = []
    monkeypatch.setattr(shard_fetch, "chunk_digest", lambda chunk: compared.append(len(chunk)))
    filling = shard_fetch.Copying(order, "run", twin=twin)
    filling.parts(memoryview(bytearray(filling.image_bytes)))
    assert filling.later_parts(replicas[0].image.index, lambda nbytes: False) == []
    assert compared == [CHUNK]
