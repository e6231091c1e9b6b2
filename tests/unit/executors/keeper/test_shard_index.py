"""The index of a shard is written by the shard's writer, before the shard counts as persisted."""

import os
import queue
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from autockpt.executors.image.container import read_index
from autockpt.executors.keeper import wire
from autockpt.executors.keeper.event_recorder import EventRecorder
from autockpt.executors.keeper.saving.shards import ShardSaves
from autockpt.executors.keeper.slots import MemoryTable
from autockpt.executors.keeper.wire import SlotsWanted
from autockpt.executors.protocol import messages as p
from autockpt.executors.storage.directory.directory import CheckpointDirectory
from autockpt.values.generation import Generation

IMAGE_BYTES = 8192
G = Generation(term=1, step=1)
PATIENCE_S = 60.0


class Node:
    """The saves of one rank, whose loop is this test."""

    def __init__(self, tmp_path: Path) -> None:
        self.directory = CheckpointDirectory(str(tmp_path / "checkpoints"))
        self.posted: queue.Queue[Callable[[], None]] = queue.Queue()
        self.told: list[p.NodeEvent] = []
        self.memory = MemoryTable()
        self.journal = EventRecorder(str(tmp_path), 0)
        self.shards = ShardSaves(
            directory=self.directory, run_id=self.directory.open(), memory=self.memory,
            journal=self.journal, post=self.posted.put, tell=self.told.append,
            world_size=lambda rank: 1, degrade=lambda what, reason: None,
        )  # fmt: skip
        self.memory.allocate(
            SlotsWanted(rank=0, image_bytes=IMAGE_BYTES, chunk_bytes=4096, slots=1)
        )
        self.folder = self.directory.generation_path(G)

    def save(self) -> None:
        """One snapshot, copied, and on its way to storage."""
        self.shards.granted(p.GrantSlot(rank=0, generation=G, slot=0))
        self.shards.start_persist(p.StartPersist(rank=0, generation=G, slot=0, attempt=1))
        began = wire.SnapshotBegan(
            rank=0, generation=G, step=1, slot=0, image_bytes=IMAGE_BYTES, boundary_end=4096,
            layout_digest="layout", writers=1, chunk_bytes=4096, direct_io=False, streaming=True,
            codec="none",
        )  # fmt: skip
        self.shards.snapshot_began(began)
        self.shards.snapshot_copied(wire.SnapshotCopied(rank=0, generation=G))

    def next_event(self) -> p.NodeEvent:
        """What the protocol hears next; the work that was posted is done until then."""
        while not self.told:
            self.posted.get(timeout=PATIENCE_S)()
        return self.told.pop(0)

    def end(self) -> None:
        self.shards.leave(0, sealed=True)
        self.journal.close()
        self.memory.free(0)


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    one = Node(tmp_path)
    yield one
    one.end()


def test_a_shard_counts_as_persisted_when_its_index_stands(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The seal comes first; with the file the index is there, with no more work of the loop."""
    monkeypatch.setattr("autockpt.executors.keeper.saving.shards.floats_in", lambda *_, **__: ())
    node.save()
    sealed, persisted = node.next_event(), node.next_event()
    assert isinstance(sealed, p.ShardSealed)
    assert isinstance(persisted, p.ShardPersisted)
    index = read_index(Path(node.folder, persisted.record["index"]).read_bytes(), where="index")
    assert (index.root, index.head_bytes) == (sealed.root, 4096)
    assert os.path.exists(os.path.join(node.folder, persisted.record["file"]))
    assert node.posted.empty()
    assert not node.shards.busy


def test_an_index_that_cannot_be_written_fails_the_shard(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A vote of a dead keeper may name the index that stands there: it is left alone."""
    monkeypatch.setattr("autockpt.executors.keeper.saving.shards.floats_in", lambda *_, **__: ())
    node.directory.create_generation(G)
    index = Path(node.folder, "idx-00000-a1.json")
    index.write_text("of another keeper")
    node.save()
    sealed, failed = node.next_event(), node.next_event()
    assert isinstance(sealed, p.ShardSealed)
    assert isinstance(failed, p.PersistFailed)
    assert (failed.attempt, failed.retryable) == (1, True)
    assert "idx-00000-a1.json" in failed.reason
    assert index.read_text() == "of another keeper"
