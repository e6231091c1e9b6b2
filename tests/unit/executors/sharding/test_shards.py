"""Several ranks in, several out: who reads what, and what each gets back."""

import json
import os
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from autockpt.executors.linux.memory import PAGE_BYTES, READING_TABLE_BYTES, Arena
from autockpt.executors.restore import headers, open_shards, shard_sources
from autockpt.executors.restore.plan.load_plan import LoadPlan
from autockpt.executors.restore.plan.planner import LoadPlanner
from autockpt.executors.restore.shard_sources import Together, shards_on_disk
from autockpt.executors.storage.catalogue import ShardFileSource
from autockpt.executors.storage.directory.records import CommitFile, read_commit
from autockpt.values.errors import CorruptCheckpointError
from autockpt.values.record import to_json
from tests.unit.executors.checkpoints import CHUNK
from tests.unit.executors.sharding.simulated import Rank, save, shared_alike


@pytest.fixture
def chunks_read(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """(file, chunk) of every chunk that is read from storage."""
    seen: list[tuple[str, int]] = []
    plain = ShardFileSource.read

    def read(self: ShardFileSource, chunk: int, memory: memoryview) -> memoryview:
        seen.append((os.path.basename(self.path), chunk))
        return plain(self, chunk, memory)

    monkeypatch.setattr(ShardFileSource, "read", read)
    return seen


@pytest.mark.parametrize("codec", ["none", "zstd"])
@pytest.mark.parametrize(("before", "after"), [(2, 2), (3, 2), (2, 3), (1, 2), (3, 1)])
def test_any_number_of_ranks_comes_back_as_any_other(
    before: int, after: int, codec: str, tmp_path: Path
) -> None:
    """Parameters and optimizer of all; buffers and random states of the rank of one's number."""
    ranks = [Rank(r, (0,) * before) for r in range(before)]
    folder = save(str(tmp_path), ranks, codec=codec)
    for r in range(after):
        new = Rank(r, (0,) * after, seed=99)
        new.restore(shards_on_disk(folder, r, after))
        twin = ranks[r] if r < before else ranks[0]
        assert new.contents() == twin.contents()


def test_the_first_chunks_are_read_while_it_is_planned_and_no_chunk_twice(
    tmp_path: Path, chunks_read: list[tuple[str, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Storage is not idle meanwhile; what came is not asked for again."""
    (rank,) = ranks = [Rank(0, (0,), width=4000)]
    folder = save(str(tmp_path), ranks)
    plain, ahead = LoadPlanner.plan, open_shards.AHEAD

    def plan(self: LoadPlanner, *, compare: bool = False) -> LoadPlan:
        deadline = time.monotonic() + 60
        while len(chunks_read) < ahead and time.monotonic() < deadline:
            time.sleep(0.001)
        assert len(chunks_read) == ahead
        return plain(self, compare=compare)

    monkeypatch.setattr(LoadPlanner, "plan", plan)
    new = Rank(0, (0,), seed=99, width=4000)
    new.restore(shards_on_disk(folder, 0, 1))
    assert new.contents() == rank.contents()
    assert len(chunks_read) == len(set(chunks_read)) > 2 * ahead


def test_replicas_of_other_nodes_are_neither_opened_nor_read(
    tmp_path: Path, chunks_read: list[tuple[str, int]]
) -> None:
    """Two nodes stored the same; all ranks of the next run choose the same shards of the two."""
    ranks = [Rank(r, (0, 0, 1, 1), width=4000) for r in range(4)]
    folder = save(str(tmp_path), ranks)
    assert list(shards_on_disk(folder, 3, 4).within_reach) == [0, 1]
    stored = [-(-int(r["bytes"]) // CHUNK) for r in read_commit(f"{folder}/COMMIT").records]
    assert min(stored) > 10
    needed = set()
    for r in range(4):
        chunks_read.clear()
        new = Rank(r, (0, 0, 1, 1), seed=99, width=4000)
        new.restore(shards_on_disk(folder, r, 4))
        assert new.contents() == ranks[r].contents()
        # Of its own image a rank needs what is its own: buffers, counters, random states.
        own = {(name, chunk) for name, chunk in chunks_read if int(name[6:11]) == r}
        assert len(own) <= 2 or r < 2
        needed |= set(chunks_read) - own
    assert {name[:11] for name, _ in needed} == {"shard-00000", "shard-00001"}
    assert len(needed) <= sum(stored[:2])


def test_more_shards_than_are_kept_open_are_read_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A job of thousands of ranks has more shards than a process may have descriptors."""
    ranks = [Rank(r, (0,) * 5) for r in range(5)]
    folder = save(str(tmp_path), ranks)
    monkeypatch.setattr(headers, "KEPT_OPEN", 2)
    before = len(os.listdir("/proc/self/fd"))
    new = Rank(1, (0, 0), seed=99)
    new.restore(shards_on_disk(folder, 1, 2))
    assert new.contents() == ranks[1].contents()
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_rank_whose_own_shard_has_everything_opens_no_other(
    tmp_path: Path, chunks_read: list[tuple[str, int]]
) -> None:
    """Ranks that hold different values under one name get their own back."""
    ranks = [Rank(r, (0, 0), seed=r) for r in range(2)]
    for rank in ranks:
        rank.place = None  # what the session does when replicas differ
    folder = save(str(tmp_path), ranks)
    assert not shared_alike(ranks[0].contents(), ranks[1].contents())
    for r in range(2):
        chunks_read.clear()
        new = Rank(r, (0, 0), seed=99)
        assert new.restore(shards_on_disk(folder, r, 2)).exact
        assert new.contents() == ranks[r].contents()
        assert {name[:11] for name, _ in chunks_read} == {f"shard-0000{r}"}


def test_no_more_headers_are_read_than_it_takes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The nearest first: of a job of thousands nobody reads the headers of all."""
    nodes = (0, 0, 1, 1, 2, 2, 3, 3)
    ranks = [Rank(r, nodes, note=r) for r in range(8)]  # no two of one layout
    folder = save(str(tmp_path), ranks)
    monkeypatch.setattr(headers, "KEPT_OPEN", 2)
    opened: list[int] = []
    plain = shard_sources.open_shard

    def opening(folder: str, record: dict[str, Any], commit: CommitFile) -> ShardFileSource:
        opened.append(commit.records.index(record))
        return plain(folder, record, commit)

    monkeypatch.setattr(shard_sources, "open_shard", opening)
    for r in (0, 5):
        opened.clear()
        new = Rank(r, nodes, seed=99)
        new.restore(shards_on_disk(folder, r, 8))
        assert new.contents() == ranks[r].contents()
        assert sorted(opened) == [r // 2 * 2, r // 2 * 2 + 1]


@given(st.integers(1, 300), st.data())
def test_every_shard_is_in_one_block_and_the_nearest_come_first(
    count: int, data: st.DataObject
) -> None:
    """Also where replicas are left out and the home shard is one of them."""
    shards = sorted(data.draw(st.sets(st.integers(0, 2 * count), min_size=1, max_size=count)))
    home = data.draw(st.integers(shards[0], 2 * count))
    blocks = headers.nearest_first(shards, home)
    assert sorted(shard for block in blocks for shard in block) == shards
    near = [shard for shard in shards if shard <= home][-1]
    assert near in blocks[0]


def test_what_is_a_ranks_own_may_differ_in_form_from_rank_to_rank(tmp_path: Path) -> None:
    """State of an attached object, of another length on each: everybody gets what was his."""
    lengths = (3, 0, 700)
    ranks = [Rank(r, (0, 0, 0), note=n) for r, n in enumerate(lengths)]
    folder = save(str(tmp_path), ranks)
    for r, length in enumerate(lengths):
        new = Rank(r, (0, 0, 0), seed=99, note=5)
        new.restore(shards_on_disk(folder, r, 3))
        assert new.state.others["note"].state["t"].shape == (length,)


@pytest.mark.parametrize("after", [3, 2])
def test_caches_of_different_lengths_are_taken_where_they_fit(after: int, tmp_path: Path) -> None:
    """A buffer that does not persist: everybody his own or none, whatever others have."""

    def rank(number: int, ranks: int, cache: torch.Tensor, seed: int = 7) -> Rank:
        made = Rank(number, (0,) * ranks, seed=seed)
        made.model.register_buffer("cache", cache, persistent=False)
        return made

    ranks = [rank(r, 3, torch.full((length,), r + 1.0)) for r, length in enumerate((3, 2, 2))]
    folder = save(str(tmp_path), ranks)
    for r, left in enumerate((True, False, False)[:after]):
        new = rank(r, after, torch.zeros(2), seed=99)
        restored = new.restore(shards_on_disk(folder, r, after))
        assert new.model.cache.tolist() == [0.0 if left else r + 1.0] * 2
        assert restored.as_built == (("model.cache",) if left else ())
        assert shared_alike(
            {n: t for n, t in new.contents().items() if n != "model.cache"},
            {n: t for n, t in ranks[r].contents().items() if n != "model.cache"},
        )


def test_shards_of_different_sizes_are_read_by_the_same_threads(tmp_path: Path) -> None:
    """Images shorter than a chunk: a buffer large enough for one is not so for the next."""
    ranks = [Rank(r, (0, 0, 0), width=8, note=(0, 4000, 0)[r]) for r in range(3)]
    folder = save(str(tmp_path), ranks)
    sizes = [int(record["bytes"]) for record in read_commit(f"{folder}/COMMIT").records]
    assert sizes[0] + 2 * PAGE_BYTES < sizes[1] < CHUNK
    for _ in range(8):  # whichever thread reads which
        Rank(0, (0,), seed=99, width=8).restore(shards_on_disk(folder, 0, 1))


def flip(path: str, offset: int) -> None:
    """One bit of a file."""
    with open(path, "r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 1]))


def test_a_flipped_byte_in_a_head_is_found(tmp_path: Path) -> None:
    """Anywhere between the length of the header and the last buffer; the model stays as it is."""
    folder = save(str(tmp_path), [Rank(r, (0, 0)) for r in range(2)])
    record = read_commit(f"{folder}/COMMIT").records[1]
    path = f"{folder}/{record['file']}"
    head = json.loads(Path(folder, record["index"]).read_text())["head_bytes"]
    assert head > 8192
    for offset in (0, 9, head // 2, head - 1):
        flip(path, offset)
        new = Rank(0, (0, 0), seed=99)
        was = new.contents()
        with pytest.raises(
            CorruptCheckpointError, match=r"head of checkpoint step 1 \(term 1\): expected dig"
        ):
            new.restore(shards_on_disk(folder, 0, 2))
        assert new.contents() == was
        flip(path, offset)
    Rank(0, (0, 0)).restore(shards_on_disk(folder, 0, 2))


def recommit(folder: str, **changes: Any) -> None:
    """Writes COMMIT again, with another record of shard 1; it is sound but for that."""
    path = Path(folder, "COMMIT")
    commit = read_commit(str(path))
    first, second = commit.records
    lying = replace(commit, records=(first, second | changes)).sealed()
    path.unlink()
    path.write_text(to_json(lying))


@pytest.mark.parametrize("lie", [{"chunks": 7}, {"chunks": 10**9}, {"chunk_bytes": 4096}])
def test_a_commit_that_lies_about_chunks_is_found(lie: dict[str, int], tmp_path: Path) -> None:
    """Ranks that read together number chunks by it."""
    folder = save(str(tmp_path), [Rank(r, (0, 0)) for r in range(2)])
    recommit(folder, **lie)
    with pytest.raises(CorruptCheckpointError, match=r"shard 1 has .* COMMIT says"):
        Rank(0, (0, 0)).restore(shards_on_disk(folder, 0, 2))


def test_a_cooperative_read_brings_back_what_a_read_alone_does(
    tmp_path: Path, chunks_read: list[tuple[str, int]]
) -> None:
    """No chunk twice, those that are read ahead into the shared buffers among them."""
    (rank,) = ranks = [Rank(0, (0,), width=4000)]
    folder = save(str(tmp_path), ranks)
    ring = Arena.create_shared(READING_TABLE_BYTES + 32 * CHUNK, name="test")
    new = Rank(0, (0,), seed=99, width=4000)
    new.restore(shards_on_disk(folder, 0, 1, together=Together(ring, (0,), 0)))
    ring.close()
    assert new.contents() == rank.contents()
    assert len(chunks_read) == len(set(chunks_read)) > 8
