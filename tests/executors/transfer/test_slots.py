"""From a slot that a snapshot still fills: the keeper's pipeline digests, the transfer follows."""

import time

from autockpt.executors.keeper.pipeline import ShardPipeline
from autockpt.executors.transfer.events import ChunkReceived, ReplicaReceived, TransferFailed
from tests.executors.transfer.conftest import Make, Start
from tests.executors.transfer.ends import CHUNK, PATIENCE_S, Image


class Snapshot:
    """A slot that is filled bit by bit, as by a trainer's copy thread."""

    def __init__(self, image: Image) -> None:
        self.image, self.copied = image, 0
        self.pipeline = ShardPipeline(
            image.view, chunk_bytes=CHUNK, available=lambda: self.copied, streaming=True,
            known=None, target=None, on_chunk=image.source.digested,
            on_digested=lambda digests: image.source.seal(image.index),
            on_persisted=lambda outcome: None, on_failed=lambda error: None,
        )  # fmt: skip
        self.pipeline.start()

    def copy(self, copied: int) -> None:
        """So much is in the slot."""
        self.copied = copied


def test_a_replica_is_complete_a_moment_after_the_snapshot(start: Start, image: Make) -> None:
    """Chunks go out while later ones are still being copied; sealed here, sealed there."""
    sender, receiver, made = start(0), start(1), image(8 * CHUNK)
    snapshot = Snapshot(made)
    sender.pool.push(1, receiver.address, made.source, deadline_s=PATIENCE_S, streams=2)
    for copied in range(CHUNK, 8 * CHUNK, CHUNK):
        snapshot.copy(copied)
        time.sleep(0.005)
    receiver.told(ChunkReceived)
    assert not receiver.sealed
    snapshot.copy(8 * CHUNK)
    snapshot.pipeline.sealed()
    assert receiver.told(ReplicaReceived).index == made.index
    assert receiver.received == made.view
    snapshot.pipeline.join()


def test_a_torn_snapshot_leaves_no_replica(start: Start, image: Make) -> None:
    """The state changed under the copy: what has travelled by then is worth nothing."""
    sender, receiver, made = start(0), start(1), image(4 * CHUNK)
    snapshot = Snapshot(made)
    sender.pool.push(1, receiver.address, made.source, deadline_s=PATIENCE_S)
    snapshot.copy(2 * CHUNK)
    receiver.told(ChunkReceived)
    snapshot.pipeline.cancel()
    made.source.revoke("the snapshot is torn")
    assert sender.told(TransferFailed).reason == "the snapshot is torn"
    receiver.told(TransferFailed)
    assert not receiver.sealed
