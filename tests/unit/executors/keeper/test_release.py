"""What a keeper that is let go may do, and what keeps one from leaving."""

import os
import queue
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from autockpt.executors.keeper import launch, wire
from autockpt.executors.keeper.event_recorder import EventRecorder
from autockpt.executors.keeper.saving.shards import ShardSaves
from autockpt.executors.keeper.slots import MemoryTable
from autockpt.executors.keeper.wire import SlotsWanted
from autockpt.executors.protocol import messages as p
from autockpt.executors.storage.directory.directory import CheckpointDirectory
from autockpt.values.generation import Generation

PATIENCE_S = 20.0
IMAGE_BYTES = 3 * 4096
G = Generation(term=1, step=1)


@pytest.fixture
def silent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The socket of a keeper that takes connections and says nothing."""
    monkeypatch.setattr(launch, "ANSWER_S", 0.05)
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(launch.socket_path(str(tmp_path), 0))
    listener.listen(64)
    yield listener
    listener.close()


def test_a_keeper_that_does_not_answer_in_time_is_waited_for(silent: Any, tmp_path: Path) -> None:
    """The machine stood still, or it writes: it is there, and so are its files and its memory."""
    assert launch.keeper_status(str(tmp_path), 0) is None
    assert not launch.release_keeper(str(tmp_path), 0, wait_s=0.3)


def test_a_keeper_that_is_gone_is_not_waited_for(silent: Any, tmp_path: Path) -> None:
    """Its socket may be left."""
    silent.close()
    began = time.monotonic()
    assert launch.release_keeper(str(tmp_path), 0, wait_s=PATIENCE_S)
    os.unlink(launch.socket_path(str(tmp_path), 0))
    assert launch.release_keeper(str(tmp_path), 0, wait_s=PATIENCE_S)
    assert time.monotonic() - began < PATIENCE_S / 2


def test_an_image_that_cannot_be_read_is_torn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a copy for memory alone, too: its slot is free again, and the keeper may leave."""

    def out_of_memory(*_: Any, **__: Any) -> Any:
        raise MemoryError("no room to look")

    monkeypatch.setattr("autockpt.executors.keeper.saving.shards.floats_in", out_of_memory)
    directory = CheckpointDirectory(str(tmp_path / "checkpoints"))
    posted: queue.Queue[Callable[[], None]] = queue.Queue()
    told: list[p.NodeEvent] = []
    degraded: list[str] = []
    memory, journal = MemoryTable(), EventRecorder(str(tmp_path), 0)
    shards = ShardSaves(
        directory=directory, run_id=directory.open(), memory=memory, journal=journal,
        post=posted.put, tell=told.append, world_size=lambda rank: 1,
        degrade=lambda what, reason: degraded.append(reason),
    )  # fmt: skip
    memory.allocate(SlotsWanted(rank=0, image_bytes=IMAGE_BYTES, chunk_bytes=4096, slots=1))
    shards.granted(p.GrantSlot(rank=0, generation=G, slot=0))
    began = wire.SnapshotBegan(
        rank=0, generation=G, step=1, slot=0, image_bytes=IMAGE_BYTES, boundary_end=0,
        layout_digest="layout", writers=1, chunk_bytes=4096, direct_io=False, streaming=True,
        codec="none",
    )  # fmt: skip
    shards.snapshot_began(began)
    shards.snapshot_copied(wire.SnapshotCopied(rank=0, generation=G))
    posted.get(timeout=PATIENCE_S)()
    (torn,) = told
    assert isinstance(torn, p.ShardDiscarded)
    assert (torn.rank, torn.generation) == (0, G)
    assert "step 1 (term 1) of rank 0" in degraded[0]
    assert "no room to look" in torn.reason
    assert not shards.busy
    journal.close()
    memory.free(0)
