"""Real checkpoints in a directory, made as the keeper makes them: pipeline, index, COMMIT."""

import os
import threading
from dataclasses import dataclass, field
from typing import Any

from autockpt.executors.image.container import ImageIndex, chunk_digest
from autockpt.executors.keeper.saving.delta_bases import Base
from autockpt.executors.keeper.saving.shard_writer import PersistTarget, ShardOutcome, ShardPipeline
from autockpt.executors.restore.apply_state import RestoredState
from autockpt.executors.restore.reader import restore_shards
from autockpt.executors.restore.shard_sources import ChunkSource, one_shard
from autockpt.executors.state.live_state import LiveState
from autockpt.executors.storage.catalogue import ShardFileSource, open_shard
from autockpt.executors.storage.directory.directory import CheckpointDirectory
from autockpt.executors.storage.directory.records import read_commit
from autockpt.values.generation import Generation
from autockpt.values.record import to_json
from tests.unit.executors.states import snapshot

CHUNK = 2**16
PATIENCE_S = 60.0


@dataclass
class Persisted:
    """What a pipeline called back with."""

    digests: tuple[str, ...] = ()
    outcome: ShardOutcome | None = None
    codec: str = "none"
    error: Exception | None = None
    ended: threading.Event = field(default_factory=threading.Event)

    def on_digested(self, digests: tuple[str, ...]) -> None:
        self.digests = digests

    def on_persisted(self, outcome: ShardOutcome) -> None:
        self.outcome = outcome
        self.ended.set()

    def on_failed(self, error: Exception) -> None:
        self.error = error
        self.ended.set()


def target(path: str, codec: str = "none", **changes: Any) -> PersistTarget:
    """A shard file beside nothing else."""
    values: dict[str, Any] = {
        "path": path, "prepare": lambda: None, "writers": 2, "direct_io": True, "codec": codec,
        "codec_ranges": (),
    }  # fmt: skip
    return PersistTarget(**values | changes)


def pipeline(
    image: memoryview, goal: PersistTarget | None, result: Persisted, **changes: Any
) -> ShardPipeline:
    """A pipeline over a finished image."""
    values: dict[str, Any] = {
        "chunk_bytes": CHUNK, "available": lambda: len(image), "streaming": True, "known": None,
    }  # fmt: skip
    return ShardPipeline(
        image, target=goal, on_digested=result.on_digested, on_persisted=result.on_persisted,
        on_failed=result.on_failed, **values | changes,
    )  # fmt: skip


def persist(image: memoryview, path: str, codec: str = "none", **changes: Any) -> Persisted:
    """One image written to the end, or to its failure."""
    result = Persisted(codec=codec)
    one = pipeline(image, target(path, codec, **changes), result)
    one.sealed()
    one.start()
    assert result.ended.wait(PATIENCE_S)
    one.cancel()
    return result


def index_of(
    image: memoryview, result: Persisted, generation: Generation, **changes: Any
) -> ImageIndex:
    """The index of a written shard."""
    assert result.outcome is not None, result.error
    values: dict[str, Any] = {
        "run_id": "run", "generation": generation, "step": 1, "rank": 0, "world_size": 1,
        "layout_digest": "layout", "image_bytes": len(image), "chunk_bytes": CHUNK,
        "digests": result.digests, "stored": result.outcome.stored,
        "codec": result.codec,
    }  # fmt: skip
    return ImageIndex(**values | changes)


def commit_images(
    directory: CheckpointDirectory,
    run_id: str,
    generation: Generation,
    images: list[memoryview],
    *,
    codec: str = "none",
    step: int = 1,
    parent: Generation | None = None,
    heads: list[int] | None = None,
    layouts: list[str] | None = None,
    base: Base | None = None,
    codec_ranges: tuple[tuple[int, ...], ...] = (),
) -> str:
    """One committed generation of given images, one per rank; its folder.

    `heads`: bytes of each that have a digest of their own; `layouts`: their digests; `base`: what
    the image is stored as a difference to.
    """
    folder = directory.create_generation(generation)
    records: list[dict[str, Any]] = []
    for rank, image in enumerate(images):
        shard, idx = f"shard-{rank:05d}-a1.safetensors", f"idx-{rank:05d}-a1.json"
        path = os.path.join(folder, shard)
        result = persist(image, path, codec, base=base, codec_ranges=codec_ranges)
        named = (
            base.index.generation if base and result.outcome and result.outcome.needs_base else None
        )
        head = heads[rank] if heads else 0
        index = index_of(
            image, result, generation, run_id=run_id, step=step, rank=rank, world_size=len(images),
            layout_digest=layouts[rank] if layouts else f"layout {rank}", head_bytes=head,
            head_digest=chunk_digest(image[:head]) if head else "", base=named,
        )  # fmt: skip
        directory.write_index(os.path.join(folder, idx), to_json(index).encode())
        assert result.outcome is not None
        records.append(
            {
                "rank": rank, "file": shard, "index": idx, "bytes": result.outcome.stored_bytes,
                "root": index.root, "layout_digest": index.layout_digest,
                "chunks": len(index.digests), "chunk_bytes": index.chunk_bytes,
                **({"base": named.name} if named else {}),
            }
        )  # fmt: skip
    directory.write_commit(
        run_id, generation, step=step, world_size=len(images), parent=parent,
        records=tuple(records), health="good",
    )  # fmt: skip
    return folder


def commit_state(
    directory: CheckpointDirectory,
    run_id: str,
    generation: Generation,
    state: LiveState,
    **how: Any,
) -> str:
    """One committed generation of a live state."""
    arena, shooter = snapshot(state, progress={"step": how.get("step", 1)})
    assert shooter.layout is not None
    image = arena.view[: shooter.layout.image_bytes]
    folder = commit_images(directory, run_id, generation, [image], **how)
    shooter.close()
    return folder


def open_file(folder: str, rank: int = 0) -> ShardFileSource:
    """The shard file of a rank in a committed generation."""
    commit = read_commit(f"{folder}/COMMIT")
    return open_shard(folder, commit.records[rank], commit)


def restore_shard(source: ChunkSource, state: LiveState) -> RestoredState:
    """A restore from one shard, which holds everything; closes it."""
    return restore_shards(one_shard(source), state)
