"""Shards of a store that several nodes need: real transfers between nodes, real shard files."""

import os
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from autockpt.executors.keeper.restoring import stored_shards as stored_module
from autockpt.executors.keeper.restoring.stored_shards import StoredShards, readers_of
from autockpt.executors.keeper.wire import ChunksLent, ChunksWanted
from autockpt.executors.linux.memory import Arena
from autockpt.executors.network.transfer import pool as pool_module
from autockpt.executors.restore.gathered_source import passed_on
from autockpt.executors.restore.shard_sources import (
    ChunkSource,
    ShardSources,
    SharedChunks,
    Together,
    shards_on_disk,
)
from autockpt.executors.storage.catalogue import ShardFileSource
from autockpt.executors.storage.directory.directory import CheckpointDirectory
from autockpt.values.errors import CorruptCheckpointError, NoRoomError
from tests.unit.executors.checkpoints import CHUNK, commit_images, open_file
from tests.unit.executors.keeper.replication.test_replica_slots import Node
from tests.unit.executors.network.transfer.ends import GENERATION, PATIENCE_S, pattern

NODES = 3
CHUNKS = 5
EVERY = tuple(range(CHUNKS))
NONE = memoryview(b"")


class Member:
    """A node with its keeper's part, and a rank that asks it."""

    def __init__(self, node: Node, checkpoints: str) -> None:
        self.node, self.said = node, list[str]()
        self.shards = StoredShards(
            checkpoints, node=node.rank, replicas=node.replicas, log=self.said.append
        )
        node.stored = self.shards.loan
        self._numbers = count()
        self._answers: dict[int, tuple[ChunksLent, int | None]] = {}
        self._news = threading.Condition()

    def begin(self, attempt: int = 1) -> None:
        """The order to restore came."""
        self.shards.begin((2, attempt), GENERATION, range(NODES))

    def want(
        self,
        shard: int,
        chunks: tuple[int, ...],
        *,
        elsewhere: bool = False,
        alone: bool = False,
    ) -> int:
        """As a rank asks."""
        number = next(self._numbers)

        def answer(lent: ChunksLent, arena: Arena | None) -> None:
            with self._news:
                fd = None if arena is None or arena.fd is None else os.dup(arena.fd)
                self._answers[number] = lent, fd
                self._news.notify_all()

        wanted = ChunksWanted(
            rank=0,
            term=2,
            attempt=1,
            shard=shard,
            chunks=chunks,
            number=number,
            stored=True,
            alone=alone,
        )
        self.shards.wanted(wanted, answer)
        return number

    def take(self, number: int) -> tuple[ChunksLent, Arena]:
        """As a rank gets it."""
        with self._news:
            assert self._news.wait_for(lambda: number in self._answers, PATIENCE_S)
        lent, fd = self._answers.pop(number)
        if fd is None:
            raise CorruptCheckpointError(lent.refusal)
        return lent, Arena.attach(fd, fault=False)

    def chunk(self, shard: int, number: int) -> bytes:
        """The bytes of one chunk, as they were lent."""
        _, arena = self.take(self.want(shard, (number,)))
        found = bytes(arena.view[number * CHUNK : (number + 1) * CHUNK])
        arena.close()
        return found

    def close(self) -> None:
        """The keeper dies."""
        self.shards.close()
        self.node.close()


class Alone:
    """Its node reads what no other one needs."""

    def __init__(self, member: Member) -> None:
        self._member = member
        self.take = member.take

    def want(self, shard: int, chunks: tuple[int, ...], *, elsewhere: bool) -> int:
        """As a rank asks."""
        return self._member.want(shard, chunks, elsewhere=elsewhere, alone=True)


class Reads:
    """What is read from the files, and a hook in front of it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.counted = Counter[tuple[int, int]]()
        """By shard and chunk."""
        self.before: Callable[[int, int], None] = lambda shard, chunk: None
        read, lock = ShardFileSource.read, threading.Lock()

        def counting(source: ShardFileSource, chunk: int, memory: memoryview, *how: Any) -> Any:
            with lock:
                self.counted[source.index.rank, chunk] += 1
            self.before(source.index.rank, chunk)
            return read(source, chunk, memory, *how)

        monkeypatch.setattr(ShardFileSource, "read", counting)


@pytest.fixture(params=["none", "zstd"])
def folder(tmp_path: Path, request: pytest.FixtureRequest) -> str:
    """A checkpoint of three ranks, plain or encoded."""
    images = [b"".join(saved(rank, chunk) for chunk in EVERY) for rank in range(NODES)]
    layouts = [f"layout {rank}" for rank in range(NODES)]
    return committed(tmp_path / "checkpoints", images, layouts, codec=request.param)


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> Reads:
    """Counted."""
    return Reads(monkeypatch)


@pytest.fixture
def members(folder: str) -> Iterator[list[Member]]:
    """Three nodes that have their orders."""
    peers: dict[int, Node] = {}
    made = [Member(Node(rank, peers), os.path.dirname(folder)) for rank in range(NODES)]
    for member in made:
        member.begin()
    yield made
    for member in made:
        member.close()


def saved(shard: int, number: int) -> bytes:
    """As it was saved."""
    return 4 * pattern(CHUNK // 4, CHUNKS * shard + number)


def every(shard: int) -> SharedChunks:
    """All of a shard, which all nodes need."""
    return SharedChunks(shard=shard, chunks=EVERY, is_needed=True)


def test_each_chunk_is_read_once_for_all_nodes(members: list[Member], reads: Reads) -> None:
    """Nodes ask in other orders, and twice: a chunk comes from the file once, and is the same."""
    pairs = [(m, (m.node.rank + turn) % NODES) for turn in (*range(NODES), 0) for m in members]
    asked = [(member, shard, member.want(shard, EVERY)) for member, shard in pairs]
    for member, shard, number in asked:
        lent, arena = member.take(number)
        assert lent.node == member.node.rank
        for chunk in EVERY:
            assert bytes(arena.view[chunk * CHUNK : (chunk + 1) * CHUNK]) == saved(shard, chunk)
        arena.close()
    assert reads.counted == dict.fromkeys(
        [(shard, chunk) for shard in range(NODES) for chunk in EVERY], 1
    )
    for member in members:
        member.shards.close()
        assert len(member.said) == 1
        assert "328 kB read from the store, 655 kB taken from other nodes" in member.said[0]


def test_a_node_that_dies_while_it_reads_is_read_for(members: list[Member], reads: Reads) -> None:
    """What it had sent stays; the others read the rest, and ask it no more."""
    reading = threading.Event()
    go_on = threading.Event()

    def hold(shard: int, chunk: int) -> None:
        if (shard, chunk) == (1, 3) and not reading.is_set():
            reading.set()
            assert go_on.wait(PATIENCE_S)

    reads.before = hold
    asked = members[0].want(1, EVERY)
    assert reading.wait(PATIENCE_S)
    dying = threading.Thread(target=members[1].close)
    dying.start()
    _, arena = members[0].take(asked)
    go_on.set()
    dying.join(PATIENCE_S)
    for chunk in EVERY:
        assert bytes(arena.view[chunk * CHUNK : (chunk + 1) * CHUNK]) == saved(1, chunk)
    arena.close()
    assert reads.counted[1, 3] == 2
    assert len(members[0].said) == 1
    assert "node 1 does not pass on what it reads from the store" in members[0].said[0]


def test_the_others_divide_the_part_of_a_node_that_is_gone(
    members: list[Member], reads: Reads
) -> None:
    """Each of its chunks is read once, as if it had never been one of them."""
    members[1].close()
    asked = [(member, member.want(1, EVERY)) for member in (members[0], members[2])]
    for member, number in asked:
        _, arena = member.take(number)
        for chunk in EVERY:
            assert bytes(arena.view[chunk * CHUNK : (chunk + 1) * CHUNK]) == saved(1, chunk)
        arena.close()
    assert reads.counted == {(1, chunk): 1 for chunk in EVERY}


def test_a_node_that_is_too_busy_to_listen_is_called_again(
    members: list[Member], reads: Reads, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All nodes of a large job may call one at a time; it closes what it cannot take."""
    replicas, calls = members[0].node.replicas, 0
    fetch = replicas.fetch_stored

    def calling(*args: Any, **how: Any) -> Any:
        nonlocal calls
        calls += 1
        monkeypatch.setattr(pool_module, "MAX_CONNECTIONS", 0 if calls < 3 else 256)
        return fetch(*args, **how)

    monkeypatch.setattr(replicas, "fetch_stored", calling)
    assert members[0].chunk(1, 0) == saved(1, 0)
    assert calls == 3
    assert members[0].said == []


def test_a_node_that_sends_nothing_is_not_waited_for(
    members: list[Member], reads: Reads, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its store hangs, and it lives: after the time for a chunk the others read for themselves."""
    monkeypatch.setattr(stored_module, "SILENCE_S", 0.5)
    go_on = threading.Event()

    def hang(shard: int, chunk: int) -> None:
        if reads.counted[shard, chunk] == 1 and chunk < 2:  # of node 1, which reads first
            assert go_on.wait(PATIENCE_S)

    reads.before = hang
    assert members[0].chunk(1, 0) == saved(1, 0)
    assert members[0].chunk(1, 4) == saved(1, 4)
    assert reads.counted == {(1, 0): 2, (1, 4): 1}
    go_on.set()
    assert "nothing for 0.5 s" in members[0].said[0]


def test_a_node_without_an_order_is_read_for(
    folder: str, reads: Reads, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It restores something else, or is late: it says so after a while."""
    monkeypatch.setattr(stored_module, "ORDER_S", 0.2)
    peers: dict[int, Node] = {}
    late, asking = (Member(Node(rank, peers), os.path.dirname(folder)) for rank in range(2))
    asking.begin()
    assert asking.chunk(0, 2) == saved(0, 2)
    assert reads.counted == {(0, 2): 1}
    assert "node 0 does not restore" in asking.said[0]
    late.close()
    asking.close()


def test_damage_is_told_and_may_be_asked_for_again(
    members: list[Member], folder: str, reads: Reads
) -> None:
    """No node passes on what does not have its digest."""
    path = open_file(folder, 1).path
    with open(path, "r+b") as file:
        whole = file.read()
        file.seek(len(whole) // 2)
        file.write(bytes(byte ^ 1 for byte in whole[len(whole) // 2 :][:8]))
    for member in members:
        with pytest.raises(CorruptCheckpointError, match=r"digest|stored bytes changed"):
            member.take(member.want(1, EVERY))
    Path(path).write_bytes(whole)
    assert members[1].chunk(1, 2) == saved(1, 2)


def test_without_memory_a_request_is_refused(
    members: list[Member], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rank then reads by itself; nothing is kept."""

    def full(nbytes: int, *, what: str) -> None:
        raise NoRoomError(f"{what}: no room")

    monkeypatch.setattr(stored_module, "require_headroom", full)
    with pytest.raises(CorruptCheckpointError, match="chunks of rank 0: no room"):
        members[0].take(members[0].want(0, EVERY))
    assert members[0].shards.total_bytes == 0


def test_the_end_refuses_what_still_waits(members: list[Member], reads: Reads) -> None:
    """And a rank that asks in an attempt that is over."""
    reading, go_on = threading.Event(), threading.Event()

    def hang(shard: int, chunk: int) -> None:
        reading.set()
        assert go_on.wait(PATIENCE_S)

    reads.before = hang
    waiting = [members[0].want(0, (chunk % CHUNKS,)) for chunk in range(3 * stored_module.REQUESTS)]
    assert reading.wait(PATIENCE_S)
    members[0].shards.close()
    for number in (*waiting, members[0].want(0, EVERY)):
        with pytest.raises(CorruptCheckpointError, match="the restore is over"):
            members[0].take(number)
    go_on.set()


def test_another_attempt_keeps_what_was_read(members: list[Member], reads: Reads) -> None:
    """A rank died while it restored: its node comes again, and the others have their chunks."""
    assert members[0].chunk(0, 0) == saved(0, 0)
    members[0].begin(attempt=2)
    assert members[0].shards.total_bytes == CHUNK
    assert members[1].chunk(0, 0) == saved(0, 0)
    assert reads.counted == {(0, 0): 1}


def test_a_rank_reads_by_itself_what_its_keeper_refuses(
    members: list[Member], folder: str, reads: Reads
) -> None:
    """At once, or in the middle of it."""
    opened = passed_on(members[0], Alone(members[0]))(open_file(folder, 1), every(1))
    opened.expect((0, 1))
    assert bytes(opened.read(1, NONE)) == saved(1, 1)
    members[0].shards.close()
    assert bytes(opened.read(1, NONE)) == saved(1, 1)
    assert reads.counted[1, 1] == 1
    assert bytes(opened.read(2, NONE)) == saved(1, 2)
    opened.close()


def test_a_rank_reads_by_itself_what_is_damaged_in_memory(
    members: list[Member], folder: str, reads: Reads
) -> None:
    """It compares each chunk that it is lent."""
    opened = passed_on(members[0], Alone(members[0]))(open_file(folder, 0), every(0))
    opened.expect(EVERY)
    _, arena = members[0].take(members[0].want(0, EVERY))
    arena.view[3 * CHUNK] ^= 1
    arena.close()
    for chunk in EVERY:
        assert bytes(opened.read(chunk, NONE)) == saved(0, chunk)
    assert reads.counted == {(0, chunk): 1 + (chunk == 3) for chunk in EVERY}
    opened.close()


def test_chunks_that_replicas_have_alike_are_asked_for_in_one_of_them(
    members: list[Member], folder: str, reads: Reads
) -> None:
    """And what is a rank's own is read by its node, in its own shard."""
    own = [open_file(folder, 1) for _ in members]
    shared = SharedChunks(shard=1, chunks=(0, 1, 2), is_needed=False)
    opened = [
        passed_on(member, Alone(member))(stored, shared)
        for member, stored in zip(members, own, strict=True)
    ]
    for one in opened:
        one.expect(EVERY)
    for one in opened:
        for chunk in EVERY:
            assert bytes(one.read(chunk, NONE)) == saved(1, chunk)
        one.close()
    assert reads.counted == {(1, chunk): 1 if chunk < 3 else 3 for chunk in EVERY}


def committed(path: Path, images: list[bytes], layouts: list[str], codec: str = "none") -> str:
    """A checkpoint of these images."""
    directory = CheckpointDirectory(str(path))
    run_id = directory.open()
    directory.claim(run_id, "launch", 0, force=False)
    arenas = [Arena.anonymous(len(image)) for image in images]
    for arena, image in zip(arenas, images, strict=True):
        arena.view[: len(image)] = image
    views = [arena.view[: len(image)] for arena, image in zip(arenas, images, strict=True)]
    return commit_images(directory, run_id, GENERATION, views, codec=codec, layouts=layouts)


def opened(folder: str, rank: int, world_size: int) -> tuple[list[SharedChunks], ShardSources]:
    """(chunks of each opened shard that are passed on, the shards), for a rank."""
    shared: list[SharedChunks] = []

    def passing(stored: ChunkSource, chunks: SharedChunks) -> ChunkSource:
        shared.append(chunks)
        return stored

    memory = Arena.create_shared(64 * 2**20, name="autockpt-test")
    together = Together(memory, (rank, rank + 1), rank)
    sources = shards_on_disk(folder, rank, world_size, together=together, passing=passing)
    for shard in sources.within_reach if world_size != sources.count else (rank,):
        sources.open(shard).close()
    memory.close()
    return shared, sources


def test_of_replicas_the_first_is_read_as_far_as_they_are_alike(tmp_path: Path) -> None:
    """Ranks 0 and 2 hold the same but for the last chunk, ranks 1 and 3 the same and more."""
    first, second = (b"".join(saved(shard, chunk) for chunk in EVERY) for shard in (0, 1))
    images = [first, second, first[: 4 * CHUNK] + saved(2, 4), second + saved(2, 0)]
    folder = committed(tmp_path / "checkpoints", images, ["a", "b", "a", "b"])
    found = [opened(folder, rank, 4)[0] for rank in range(4)]
    assert [one.shard for (one,) in found] == [0, 1, 0, 1]
    assert [list(one.chunks) for (one,) in found] == [
        [0, 1, 2, 3, 4], [0, 1, 2, 3, 4], [0, 1, 2, 3], [0, 1, 2, 3, 4],
    ]  # fmt: skip
    assert not any(one.is_needed for (one,) in found)
    assert opened(folder, 0, 4)[1].together is None


def test_a_shard_that_one_rank_needs_is_passed_on_to_another_number_of_ranks_only(
    folder: str,
) -> None:
    """FSDP as it was reads what it has written, with the ranks of its node."""
    shared, sources = opened(folder, 1, NODES)
    assert shared == []
    assert sources.together is not None
    shared, sources = opened(folder, 1, 2)
    assert [one.shard for one in shared] == [0, 1, 2]
    assert sources.together is None


def test_the_parts_are_spread_over_the_nodes_that_are_there() -> None:
    """As it was, each shard by the node of the rank that wrote it, or by those with replicas."""
    alone = [str(shard) for shard in range(6)]
    assert [readers_of(shard, alone[:4], (7, 7, 8, 8)) for shard in range(4)] == [
        [7], [7], [8], [8],
    ]  # fmt: skip
    assert [readers_of(shard, list("abab"), (7, 7, 8, 8)) for shard in range(2)] == [[7, 8]] * 2
    assert [readers_of(shard, alone, (0, 1)) for shard in range(6)] == [*[[0]] * 3, *[[1]] * 3]
    assert [readers_of(shard, alone[:2], (0, 1, 2, 3)) for shard in range(2)] == [[0], [2]]
    assert readers_of(0, ["a"] * 6, (4, 5, 6)) == [4, 5, 6]
