"""Ranks of a node read together: every chunk once, whoever dies, fails, stops or never comes."""

import os
import threading
from collections.abc import Callable, Iterator

import pytest

from autockpt.executors.linux.memory import (
    READING_HUGE_MARK,
    READING_TABLE_BYTES,
    Arena,
    memory_to_read_in,
)
from autockpt.executors.restore.cooperative_read import CooperativeRead
from autockpt.executors.storage.shard_file import run_parallel
from autockpt.values.errors import StorageError
from tests.unit.executors.sharding.readers import Scene, play

ALL = list(range(40))


def everything(members: int) -> list[list[int]]:
    """All need all."""
    return [ALL] * members


@pytest.mark.parametrize(("members", "threads"), [(2, 4), (3, 1)])
def test_what_all_need_is_read_once_and_taken_by_all(members: int, threads: int) -> None:
    """Bytes read over unique bytes are 1, with one thread a rank and with several."""
    seen = play(Scene(needs=everything(members), chunks=len(ALL), threads=threads))
    assert seen.ended == [0] * members
    assert [seen.read_in_all(chunk) for chunk in ALL] == [1] * len(ALL)
    assert seen.takes == [[1] * len(ALL)] * members
    assert all(sum(row) for row in seen.reads), "the work was divided"


@pytest.mark.parametrize("buffers", [1, 8])
def test_chunks_are_read_into_buffers_that_nobody_needs(buffers: int) -> None:
    """In huge pages: a buffer is used again when all have taken, its own rank too."""
    seen = play(
        Scene(needs=everything(3), chunks=len(ALL), buffers=buffers, threads=2, direct=True)
    )
    assert seen.ended == [0] * 3
    assert [seen.read_in_all(chunk) for chunk in ALL] == [1] * len(ALL)
    assert seen.takes == [[1] * len(ALL)] * 3


@pytest.mark.parametrize("direct", [False, True])
def test_what_is_read_ahead_is_read_once_and_taken_by_all(direct: bool) -> None:
    """As many chunks as a rank has buffers for; nobody reads them again."""
    seen = play(
        Scene(needs=everything(3), chunks=len(ALL), buffers=2, ahead=4, direct=direct, threads=1)
    )
    assert seen.ended == [0] * 3
    assert [seen.read_in_all(chunk) for chunk in ALL] == [1] * len(ALL)
    assert seen.takes == [[1] * len(ALL)] * 3
    firsts = [0, 13, 26]
    assert [row[at : at + 2] for row, at in zip(seen.reads, firsts, strict=True)] == [[1, 1]] * 3


def test_what_was_read_ahead_and_nobody_needs_frees_its_buffer() -> None:
    """A guess that was wrong costs one read."""
    needs = [list(range(20, 40))] * 2
    seen = play(Scene(needs=needs, chunks=len(ALL), buffers=1, ahead=1))
    assert (seen.ended, seen.reads[0][0]) == ([0, 0], 1)
    assert [seen.read_in_all(chunk) for chunk in needs[0]] == [1] * 20
    assert [sum(row) for row in seen.takes] == [20, 20]


def test_a_read_ahead_that_fails_is_made_again() -> None:
    """By whoever needs the chunk, who meets the same error if it stands."""
    seen = play(Scene(needs=everything(2), chunks=len(ALL), ahead=2, faults={"0": ("fail", 1)}))
    assert seen.ended == [0, 0]
    assert [seen.read_in_all(chunk) for chunk in ALL] == [2] + [1] * (len(ALL) - 1)
    assert seen.takes == [[1] * len(ALL)] * 2


def test_memory_to_read_in_holds_chunks_for_all_ranks() -> None:
    """Four usual ones each; whether they are in huge pages stands in it."""
    for ranks in (2, 8):
        arena = memory_to_read_in(ranks)
        assert arena.nbytes >= READING_TABLE_BYTES + 4 * ranks * 8 * 2**20
        huge = arena.make_huge(READING_TABLE_BYTES, arena.nbytes - READING_TABLE_BYTES)
        assert arena.view[READING_HUGE_MARK] == huge
        arena.close()


@pytest.mark.parametrize("threads", [1, 4])
def test_a_ring_of_one_buffer_a_rank_is_enough(threads: int) -> None:
    """More threads than buffers, far more chunks than buffers: slower, and nothing is lost."""
    seen = play(Scene(needs=everything(3), chunks=len(ALL), buffers=1, threads=threads))
    assert seen.ended == [0] * 3
    assert [seen.read_in_all(chunk) for chunk in ALL] == [1] * len(ALL)
    assert seen.takes == [[1] * len(ALL)] * 3


def test_a_chunk_that_one_rank_needs_is_read_by_that_one() -> None:
    """Overlapping needs: each rank takes its own, once, and reads nothing for nobody."""
    needs = [list(range(25)), list(range(15, 40)), [3, 39]]
    seen = play(Scene(needs=needs, chunks=len(ALL)))
    assert seen.ended == [0] * 3
    assert [seen.read_in_all(chunk) for chunk in ALL] == [1] * len(ALL)
    for needed, taken, read in zip(needs, seen.takes, seen.reads, strict=True):
        assert [chunk for chunk in ALL if taken[chunk]] == needed
        assert {chunk for chunk in ALL if read[chunk]} <= set(needed)
        assert max(taken) == 1


def test_a_rank_without_needs_leaves_and_keeps_nobody() -> None:
    """All that it wanted stood in the heads."""
    seen = play(Scene(needs=[ALL, []], chunks=len(ALL), buffers=1))
    assert (seen.ended, sum(seen.reads[1])) == ([0, 0], 0)
    assert seen.reads[0] == [1] * len(ALL)


@pytest.mark.parametrize(("at", "buffers"), [(1, 8), (4, 1)])
def test_a_rank_killed_while_it_reads_is_replaced_by_the_others(at: int, buffers: int) -> None:
    """Its claim is opened by the kernel and its buffers stay; one chunk is read a second time."""
    seen = play(
        Scene(needs=everything(3), chunks=len(ALL), buffers=buffers, faults={"1": ("kill", at)})
    )
    assert seen.ended == [0, -9, 0]
    assert [seen.takes[0], seen.takes[2]] == [[1] * len(ALL)] * 2
    # Its other thread may have died in a read as well.
    assert len(ALL) < sum(seen.read_in_all(chunk) for chunk in ALL) <= len(ALL) + 2


def test_a_rank_that_fails_keeps_nobody_waiting() -> None:
    """A chunk that does not match ends its rank; the others read it themselves, and see it too."""
    seen = play(Scene(needs=everything(2), chunks=len(ALL), faults={"0": ("fail", 5)}))
    assert seen.ended == [1, 0]
    assert seen.takes[1] == [1] * len(ALL)
    assert max(seen.takes[0]) <= 1


@pytest.mark.parametrize(("fault", "buffers"), [(("stop", 3), 1), (("absent", 0), 8)])
def test_a_rank_that_stands_still_is_given_up_and_its_part_read_alone(
    fault: tuple[str, int], buffers: int
) -> None:
    """A checkpoint is not called bad because somebody is slow: patience ends, work does not."""
    seen = play(
        Scene(
            needs=everything(2), chunks=len(ALL), buffers=buffers, patience_s=1.5,
            faults={"1": fault},
        )
    )  # fmt: skip
    assert seen.ended[0] == 0
    assert seen.takes[0] == [1] * len(ALL)
    assert seen.seconds > 1.5


def test_a_late_rank_is_waited_for() -> None:
    """Reading before all needs are known would read twice."""
    seen = play(Scene(needs=everything(2), chunks=len(ALL), faults={"0": ("late", 1)}))
    assert [seen.read_in_all(chunk) for chunk in ALL] == [1] * len(ALL)


@pytest.mark.parametrize(("chunks", "chunk_bytes"), [(2**21, 4096), (8, 2**20)])
def test_what_does_not_fit_the_memory_is_refused(chunks: int, chunk_bytes: int) -> None:
    """Too many chunks for the table, or too large ones for a buffer a rank: each reads alone."""
    arena = Arena.create_shared(READING_TABLE_BYTES + 2**20, name="autockpt-test-reading")
    with pytest.raises(StorageError, match="too many to share"):
        CooperativeRead(arena, (0, 1), 0, chunks=chunks, chunk_bytes=chunk_bytes)
    arena.close()


def test_threads_that_would_only_wait_are_not_started(monkeypatch: pytest.MonkeyPatch) -> None:
    """Enough readers in all ranks, as many in each only where processors are free; one takes."""
    arena = Arena.create_shared(READING_TABLE_BYTES + 2**20, name="autockpt-test-reading")

    def threads(members: int, cores: int) -> int:
        monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(cores)))
        group = CooperativeRead(arena, range(members), 0, chunks=8, chunk_bytes=4096)
        return group.threads(4)

    assert [threads(members, 2) for members in (1, 2, 3, 4, 8)] == [5, 3, 3, 2, 2]
    assert [threads(members, 64) for members in (2, 8, 32)] == [5, 5, 3]


@pytest.fixture
def pair() -> Iterator[tuple[CooperativeRead, CooperativeRead]]:
    """Two members who need all of 8 chunks, with 4 buffers each; only the first will work."""
    arena = Arena.create_shared(READING_TABLE_BYTES + 8 * 4096, name="autockpt-test-reading")
    one, other = (CooperativeRead(arena, (0, 1), me, chunks=8, chunk_bytes=4096) for me in (0, 1))
    waits = threading.Thread(target=other.join, args=(range(8),))
    waits.start()
    one.join(range(8))
    waits.join()
    yield one, other
    arena.close()


def work(
    one: CooperativeRead, read: Callable[[int], None], put: Callable[[int], None], threads: int = 2
) -> list[int]:
    """What was put by threads of which the first one takes."""
    done: list[int] = []

    def reads(chunk: int, place: memoryview | None) -> memoryview:
        read(chunk)
        return memoryview(bytes(4096))

    def puts(chunk: int, data: memoryview) -> None:
        put(chunk)
        done.append(chunk)

    run_parallel(
        range(threads), lambda thread: one.run(reads, puts, takes=thread == 0), workers=threads
    )
    return sorted(done)


def test_storage_is_read_while_a_chunk_is_copied(
    pair: tuple[CooperativeRead, CooperativeRead],
) -> None:
    """Until all buffers are full, whatever the copy takes."""
    (one, other), full, chunks = pair, threading.Event(), []

    def read(chunk: int) -> None:
        chunks.append(chunk)
        if len(chunks) == 4:
            full.set()

    def put(chunk: int) -> None:
        assert full.wait(10), f"only {chunks} were read while one was copied"
        other.leave()  # takes nothing, so that nothing is kept for it any longer

    assert work(one, read, put) == list(range(8))
    assert sorted(chunks) == list(range(8))


def test_a_chunk_is_taken_while_storage_is_slow(
    pair: tuple[CooperativeRead, CooperativeRead],
) -> None:
    """The thread that takes is not away to read for others."""
    (one, other), taken, chunks = pair, threading.Event(), []

    def read(chunk: int) -> None:
        chunks.append(chunk)
        assert len(chunks) == 1 or taken.wait(10), "all threads read and none took"

    def put(chunk: int) -> None:
        taken.set()
        other.leave()

    assert work(one, read, put) == list(range(8))
