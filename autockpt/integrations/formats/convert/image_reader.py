"""The images of a generation, box by box: every byte out of a chunk that matched its digest."""

import os
import threading
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import Any, cast

import torch

from autockpt.executors.image.container import ImageHeader, find_header, header_bytes, read_header
from autockpt.executors.image.layout.boxes import Box
from autockpt.executors.image.layout.plan import EXTRA
from autockpt.executors.linux.memory import Arena
from autockpt.executors.restore.open_shards import parse_skeleton
from autockpt.executors.restore.plan.moves import Loading, Want, moves_for
from autockpt.executors.restore.plan.stored import Piece, Stored
from autockpt.executors.sharding.local_shard import LocalShard
from autockpt.executors.storage.catalogue import ShardFileSource, open_shard
from autockpt.executors.storage.directory.records import CommitFile, read_commit
from autockpt.integrations.formats.tree.lazy_tree import LazyTensor, empty
from autockpt.values.errors import ConfigError, CorruptCheckpointError, StorageError

HELD_BYTES = 2**26
"""Bytes of chunks that are kept, of any number of images; two chunks at least."""
MOST_HELD_BYTES = 2**30
"""A tensor in parts is read from many images at once, each of which wants a chunk kept."""


def commit_of(folder: str) -> CommitFile:
    """The COMMIT of a generation.

    Raises ConfigError where there is none, StorageError, CorruptCheckpointError.
    """
    try:
        return read_commit(os.path.join(folder, "COMMIT"))
    except FileNotFoundError:
        raise ConfigError(
            f"{folder}: has no COMMIT: interrupted, or still being written; see `autockpt ls`"
        ) from None
    except OSError as error:
        raise StorageError(f"{folder}: cannot be read: {error.strerror}") from error


class Images:
    """Images of one committed generation, open; close it when done.

    Holds the chunks used last: small tensors stand together, and are asked for between large ones.
    May be used from threads.
    """

    def __init__(self, folder: str, commit: CommitFile, ranks: Iterable[int]) -> None:
        """Raises ConfigError, CorruptCheckpointError or StorageError."""
        self.stored = Stored()
        self.headers: dict[int, ImageHeader] = {}
        self.skeletons: dict[int, dict[str, Any]] = {}
        """By rank everything that is no tensor, in the order of the ranks."""
        self._sources: dict[int, ShardFileSource] = {}
        self._held: OrderedDict[tuple[int, int], tuple[Arena, memoryview]] = OrderedDict()
        self._room = 2
        self._lock = threading.RLock()
        try:
            for rank in ranks:
                self._open(folder, commit, rank)
        except BaseException:
            self.close()
            raise

    @property
    def ranks(self) -> Sequence[int]:
        """Whose images these are, ascending."""
        return sorted(self._sources)

    def _open(self, folder: str, commit: CommitFile, rank: int) -> None:
        record = commit.records[rank]
        source = open_shard(folder, record, commit)
        self._sources[rank] = source
        largest = max(one.index.chunk_bytes for one in self._sources.values())
        kept = min(max(HELD_BYTES, len(self._sources) * largest), MOST_HELD_BYTES)
        self._room = max(2, min(kept // largest, max(8, len(self._sources))))
        header, text = self._head(rank, source)
        self.headers[rank] = header
        self.stored.add(rank, header)
        self.skeletons[rank] = cast(dict[str, Any], parse_skeleton(text))

    def _head(self, rank: int, source: ShardFileSource) -> tuple[ImageHeader, bytes]:
        """(header, text of the skeleton), without whole chunks where they have their own digest."""
        head, length = source.head(), source.index.image_bytes
        if head is None:
            header = find_header(lambda number: self._chunk(rank, number), length)
        else:
            header = read_header(bytes(head[: header_bytes(head, length)]), length)
        place = header.tensors.get(EXTRA)
        if place is None:
            raise CorruptCheckpointError(f"image of rank {rank}: its {EXTRA} is missing")
        if head is not None and place.stop <= len(head):
            return header, bytes(head[place.start : place.stop])
        return header, self.raw(rank, place.start, place.stop)

    def close(self) -> None:
        """Lets files and buffers go; tensors that were read stay."""
        with self._lock:
            for source in self._sources.values():
                source.close()
            while self._held:
                self._let_go()

    def lazy(self, name: str, pieces: Sequence[Piece]) -> LazyTensor:
        """A tensor out of pieces that hold all of it; the first ones are preferred."""
        return LazyTensor(
            name=name, dtype=pieces[0].dtype, shape=pieces[0].global_shape,
            part=lambda box: self._part(name, pieces, box),
        )  # fmt: skip

    def _part(self, name: str, pieces: Sequence[Piece], box: Box) -> torch.Tensor:
        """A box in new memory; only the chunks that hold it are read."""
        if sum(piece.nbytes for piece in pieces) < box.count * pieces[0].dtype.itemsize:
            raise CorruptCheckpointError(f"{name}: the images hold less of it than its shape says")
        memory = empty(box.shape, pieces[0].dtype)
        if not box.count:
            return memory
        holding = LocalShard(global_shape=pieces[0].global_shape, boxes=(box,))
        loading = Loading(moves_for(Want(name=name, holding=holding, memory=memory), pieces))
        with self._lock:
            for rank in loading.shards:
                index = self._sources[rank].index
                for number in loading.chunks(rank, index):
                    loading.put(rank, index.chunk_range(number)[0], self._chunk(rank, number))
        loading.finish()
        return memory

    def raw(self, rank: int, start: int, stop: int) -> bytes:
        """Bytes [start, stop) of an image."""
        size = self._sources[rank].index.chunk_bytes
        with self._lock:
            return b"".join(
                bytes(self._chunk(rank, n)[max(0, start - n * size) : stop - n * size])
                for n in range(start // size, -(-stop // size))
            )

    def digests(self, rank: int, start: int, stop: int) -> tuple[Any, ...]:
        """Equal for two images only if their bytes [start, stop) are; unequal says nothing."""
        index = self._sources[rank].index
        chunks = range(start // index.chunk_bytes, -(-stop // index.chunk_bytes))
        return (start, stop, index.chunk_bytes, *(index.digests[chunk] for chunk in chunks))

    def _chunk(self, rank: int, number: int) -> memoryview:
        """A verified chunk; valid until others are asked for."""
        key = rank, number
        if key in self._held:
            self._held.move_to_end(key)
            return self._held[key][1]
        while len(self._held) >= self._room:
            self._let_go()
        buffer = Arena.anonymous(self._sources[rank].room_bytes)
        try:
            self._held[key] = buffer, self._sources[rank].read(number, buffer.view)
        except BaseException:
            buffer.close()
            raise
        return self._held[key][1]

    def _let_go(self) -> None:
        """Of the chunk that was not used for longest."""
        _, (buffer, data) = self._held.popitem(last=False)
        data.release()
        buffer.close()
