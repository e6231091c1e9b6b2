"""The shards of a commit written again with weights only: optimizer state takes most of the bytes.

Parameters, buffers, states of modules and attached objects, and the step stay.  Optimizers, random
states and the place in the data go.  New files stand beside the old ones, and
`commits.replace_commit` makes them count.
"""

import contextlib
import json
import os
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

from autockpt.executors.image.container import ImageHeader, ImageIndex, find_header
from autockpt.executors.image.layout.plan import (
    EXTRA,
    NATURAL_DTYPE,
    TensorSpec,
    plan_layout,
)
from autockpt.executors.image.tensor_references import tensor_names
from autockpt.executors.linux.memory import Arena
from autockpt.executors.protocol.messages import Record, holds_weights_only
from autockpt.executors.storage.catalogue import ShardFileSource, load_index, open_shard
from autockpt.executors.storage.directory.directory import CheckpointDirectory
from autockpt.executors.storage.directory.records import CommitFile, read_commit
from autockpt.executors.storage.file_reuse import is_tight
from autockpt.executors.storage.places.choose import place_of
from autockpt.executors.storage.rewriting.commits import (
    forget_rewritten,
    new_suffix,
    require_held,
    rewritten_records,
)
from autockpt.executors.storage.rewriting.image_stream import ImageStream
from autockpt.executors.throttle.rate_limit import Throttle
from autockpt.values.errors import ConfigError, CorruptCheckpointError
from autockpt.values.generation import Generation
from autockpt.values.policy_keys.paths import is_store_url
from autockpt.values.record import to_json

Skeleton = dict[str, Any]
CACHED_CHUNKS = 4
"""Small tensors stand together, and are read between large ones."""
_EMPTIED: Skeleton = {"optimizers": {}, "rng": {}}
_DROPPED = ("own", "passing")


def write_weights(
    directory: CheckpointDirectory, generation: Generation, gate: Throttle, *, term: int
) -> tuple[CommitFile, tuple[Record, ...]]:
    """Writes and reads back new shards; (the commit as it stands, records of the new shards).

    Their names are of this call alone.  A commit of weights keeps its shards.  Raises GuardError
    where `term` is held no more, CorruptCheckpointError, StorageError, OSError, and ConfigError
    for a checkpoint whose optimizer state has no place of its own.
    """
    folder = directory.generation_path(generation)
    commit = read_commit(os.path.join(folder, "COMMIT"))
    if holds_weights_only(commit.records):
        return commit, rewritten_records(commit)
    place_of(folder).require_replacing(os.path.join(folder, "COMMIT.probe.tmp"))
    suffix = new_suffix(term)
    records: list[Record] = [
        {
            **{key: old[key] for key in ("rank", "metrics", "lossy") if key in old},
            "file": f"shard-{rank:05d}-{suffix}.safetensors",
            "index": f"idx-{rank:05d}-{suffix}.json",
            "weights_only": True,
        }
        for rank, old in enumerate(commit.records)
    ]
    try:
        for rank, record in enumerate(records):
            require_held(directory, term)
            _write_rank(directory, folder, commit, rank, record, gate)
    except BaseException:
        forget_rewritten(directory, generation, tuple(records), term=term)
        raise
    return commit, tuple(records)


def missing_room(directory: CheckpointDirectory, generation: Generation) -> str:
    """Why the disk has no room to write shards again, "" where it has, and for an object store.

    Saves come first: the new shards and one checkpoint have to fit.  Raises like `write_weights`.
    """
    if is_store_url(directory.path):
        return ""
    folder = directory.generation_path(generation)
    commit = read_commit(os.path.join(folder, "COMMIT"))
    if holds_weights_only(commit.records):
        return ""
    whole = sum(load_index(folder, record, commit).image_bytes for record in commit.records)
    room = os.statvfs(folder)
    free = room.f_bavail * room.f_frsize
    if not is_tight(directory.path) and free >= 2 * whole:
        return ""
    return f"{folder}: {free} bytes are free, expected {2 * whole} and a disk that is not tight"


def _write_rank(
    directory: CheckpointDirectory,
    folder: str,
    commit: CommitFile,
    rank: int,
    record: Record,
    gate: Throttle,
) -> None:
    """Completes `record`."""
    source = open_shard(folder, commit.records[rank], commit)
    try:
        index = _write_image(os.path.join(folder, record["file"]), commit, source, gate)
    finally:
        source.close()
    path = os.path.join(folder, record["index"])
    directory.write_index(path, to_json(index).encode())
    record |= {
        "bytes": index.image_bytes, "root": index.root, "layout_digest": index.layout_digest,
        "chunks": len(index.digests), "chunk_bytes": index.chunk_bytes,
    }  # fmt: skip
    _read_back(folder, record, commit, gate)


def _write_image(
    path: str, commit: CommitFile, source: ShardFileSource, gate: Throttle
) -> ImageIndex:
    with contextlib.closing(_Chunks(source, gate)) as chunks:
        header = find_header(chunks.chunk, source.index.image_bytes)
        skeleton = _weights_of(chunks.skeleton(header), source.path)
        kept = _old_names(header, chunks.skeleton(header), skeleton)
        text = json.dumps(skeleton, separators=(",", ":")).encode()
        layout = plan_layout(
            [_spec(header, name, place) for name, place in kept.items()],
            aliases=_aliases(header, kept),
            extra_bytes=len(text),
            known_nan=header.known_nan,
        )
        stream = ImageStream(path, layout, source.index.chunk_bytes)
        try:
            stream.append(memoryview(layout.header))
            for entry in layout.entries:
                stream.skip_to(entry.offset)
                if entry.spec.name == EXTRA:
                    stream.append(memoryview(text))
                    continue
                place = header.tensors[kept[entry.spec.name]]
                for piece in chunks.pieces(place.start, place.stop):
                    stream.append(piece)
                    piece.release()
            digests, head_digest = stream.finish()
        except BaseException:
            stream.discard()
            raise
    index = source.index
    return ImageIndex(
        run_id=index.run_id, generation=index.generation, step=index.step, rank=index.rank,
        world_size=index.world_size, layout_digest=layout.digest, image_bytes=layout.image_bytes,
        across_nodes=index.across_nodes,
        chunk_bytes=index.chunk_bytes, digests=digests, head_bytes=stream.head_bytes,
        head_digest=head_digest,
    )  # fmt: skip


def _read_back(folder: str, record: Record, commit: CommitFile, gate: Throttle) -> None:
    """Raises CorruptCheckpointError where the storage holds other bytes than were written."""
    source = open_shard(folder, record, commit)
    buffer = Arena.anonymous(source.room_bytes)
    try:
        for chunk in range(len(source.index.digests)):
            start, stop = source.index.chunk_range(chunk)
            gate.wait(stop - start)
            source.read(chunk, buffer.view).release()
    finally:
        buffer.close()
        source.close()


def _weights_of(skeleton: Skeleton, where: str) -> Skeleton:
    """The state apart from tensors, without what only a resume needs."""
    if "tree" in skeleton:
        raise ConfigError(f"{where}: torch.distributed.checkpoint wrote it; its state is one tree")
    kept = {name: part for name, part in skeleton.items() if name not in _DROPPED}
    progress = {name: value for name, value in skeleton["progress"].items() if name != "data"}
    trained = sorted(_trained(skeleton["optimizers"]))
    return {**kept, **_EMPTIED, "progress": progress, "trained": trained}


def _trained(optimizers: Skeleton) -> set[str]:
    """Names of the parameters in all groups, of which replicas hold the same."""
    names = set[str]()
    for optimizer in optimizers.values():
        for group in optimizer["groups"]:
            params = group["params"]
            names.update(params.split("\n") if isinstance(params, str) else params)
    return names - {""}


def _old_names(header: ImageHeader, before: Skeleton, after: Skeleton) -> dict[str, str]:
    """Return the old name of each tensor by its new one, in the order of their bytes."""
    optimizers = tuple(f"{name}." for name in before["optimizers"])
    needed = set(tensor_names(after))
    dropped = set(tensor_names(before)) - needed

    def stays(name: str) -> bool:
        return name in needed or not (name in dropped or name.startswith(optimizers))

    kept = {name: name for name in header.tensors if name != EXTRA and stays(name)}
    for alias, name in header.aliases.items():
        if stays(alias) and name not in kept and name not in kept.values():
            kept[alias] = name  # the tensor that it named goes, and its bytes stay
    return dict(sorted(kept.items(), key=lambda item: header.tensors[item[1]].start))


def _aliases(header: ImageHeader, kept: dict[str, str]) -> dict[str, str]:
    """Second names of tensors that stay."""
    new = {old: name for name, old in kept.items()}
    return {
        alias: new[name]
        for alias, name in header.aliases.items()
        if name in new and alias not in kept
    }


def _spec(header: ImageHeader, name: str, old: str) -> TensorSpec:
    place, part = header.tensors[old], header.parts.get(old)
    true_dtype = header.true_dtypes.get(old, NATURAL_DTYPE.get(place.dtype, ""))
    return TensorSpec(
        name=name, dtype=place.dtype, shape=place.shape, true_dtype=true_dtype, lazy=True,
        tensor_class="other", global_shape=None if part is None else part.global_shape,
        boxes=() if part is None else part.boxes,
    )  # fmt: skip


class _Chunks:
    """Verified chunks of a shard; the ones used last are kept."""

    def __init__(self, source: ShardFileSource, gate: Throttle) -> None:
        self._source, self._gate = source, gate
        self._held: OrderedDict[int, tuple[Arena, memoryview]] = OrderedDict()

    def chunk(self, number: int) -> memoryview:
        """Valid until others are asked for."""
        if number in self._held:
            self._held.move_to_end(number)
            return self._held[number][1]
        while len(self._held) >= CACHED_CHUNKS:
            self._let_go()
        start, stop = self._source.index.chunk_range(number)
        self._gate.wait(stop - start)
        buffer = Arena.anonymous(self._source.room_bytes)
        try:
            self._held[number] = buffer, self._source.read(number, buffer.view)
        except BaseException:
            buffer.close()
            raise
        return self._held[number][1]

    def pieces(self, start: int, stop: int) -> Iterator[memoryview]:
        """The bytes [start, stop) of the image, chunk by chunk."""
        size = self._source.index.chunk_bytes
        while start < stop:
            number = start // size
            end = min(stop, (number + 1) * size)
            yield self.chunk(number)[start - number * size : end - number * size]
            start = end

    def skeleton(self, header: ImageHeader) -> Skeleton:
        """The state apart from its tensors.  Raises CorruptCheckpointError."""
        place = header.tensors.get(EXTRA)
        try:
            assert place is not None
            found = json.loads(b"".join(map(bytes, self.pieces(place.start, place.stop))))
            if isinstance(found["optimizers"], dict) and isinstance(found["progress"], dict):
                return dict(found)
        except (ValueError, KeyError, TypeError, AssertionError, RecursionError) as error:
            raise CorruptCheckpointError(f"{self._source.path}: {EXTRA}: {error!r:.200}") from None
        raise CorruptCheckpointError(f"{self._source.path}: its {EXTRA} is malformed")

    def _let_go(self) -> None:
        _, (buffer, data) = self._held.popitem(last=False)
        data.release()
        buffer.close()

    def close(self) -> None:
        """Lets all buffers go."""
        while self._held:
            self._let_go()
