"""One rank's image, tensor by tensor: every byte comes out of a chunk that matched its digest."""

import os
import threading
from collections import OrderedDict
from typing import Any, cast

import torch

from autockpt.executors.catalogue import ChunkSource, load_index, shard_path
from autockpt.executors.directory import CommitFile, read_commit
from autockpt.executors.dtypes import true_form
from autockpt.executors.image import TensorPlace, find_header
from autockpt.executors.layout.plan import EXTRA
from autockpt.executors.memory import Arena
from autockpt.executors.restore import parse_skeleton
from autockpt.integrations.lazy import LazyTensor, bytes_of
from autockpt.values.errors import ConfigError, CorruptCheckpointError

HELD_BYTES = 2**26
"""Of chunks; eight at most, two at least."""


def commit_of(folder: str) -> CommitFile:
    """The COMMIT of a generation.  Raises ConfigError where there is none."""
    try:
        return read_commit(os.path.join(folder, "COMMIT"))
    except FileNotFoundError:
        raise ConfigError(
            f"{folder}: has no COMMIT: interrupted, or still being written; see `autockpt ls`"
        ) from None
    except OSError as error:
        raise ConfigError(f"{folder}: cannot be read: {error.strerror}") from error


class ImageTensors:
    """The tensors of one rank in a committed generation; close it when done.

    Holds the chunks used last: small tensors stand together, and are asked for between large ones.
    May be used from threads.
    """

    def __init__(self, folder: str, commit: CommitFile, rank: int) -> None:
        record = commit.records[rank]
        self.rank = rank
        self.layout_digest = str(record.get("layout_digest"))
        self._source = ChunkSource(shard_path(folder, record), load_index(folder, record, commit))
        self.index = self._source.index
        self._held: OrderedDict[int, tuple[Arena, memoryview]] = OrderedDict()
        self._room = max(2, min(8, HELD_BYTES // self.index.chunk_bytes))
        self._lock = threading.Lock()
        try:
            self.header = find_header(self.chunk, self.index.image_bytes)
            self.skeleton = self._read_skeleton()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Lets file and buffers go; tensors that were read stay."""
        self._source.close()
        while self._held:
            self._let_go()

    def lazy_tensors(self) -> dict[str, LazyTensor]:
        """All tensors by name, in the order of the image; a second name has the same object."""
        found = {
            name: self._lazy(name, place)
            for name, place in sorted(self.header.tensors.items(), key=lambda row: row[1].start)
            if name != EXTRA
        }
        aliases = sorted(self.header.aliases.items())
        return found | {alias: found[name] for alias, name in aliases if name in found}

    def read(self, start: int, into: memoryview) -> None:
        """Fills `into` with the bytes of the image from `start` on."""
        done = 0
        with self._lock:
            while done < len(into):
                at = start + done
                chunk = at // self.index.chunk_bytes
                first, stop = self.index.chunk_range(chunk)
                count = min(len(into) - done, stop - at)
                into[done : done + count] = self.chunk(chunk)[at - first : at - first + count]
                done += count

    def chunk(self, number: int) -> memoryview:
        """A verified chunk; valid until others are asked for."""
        if number in self._held:
            self._held.move_to_end(number)
            return self._held[number][1]
        while len(self._held) >= self._room:
            self._let_go()
        buffer = self._source.buffer()
        try:
            self._held[number] = buffer, self._source.read(number, buffer)
        except BaseException:
            buffer.close()
            raise
        return self._held[number][1]

    def _let_go(self) -> None:
        """Of the chunk that was not used for longest."""
        _, (buffer, data) = self._held.popitem(last=False)
        data.release()
        buffer.close()

    def _lazy(self, name: str, place: TensorPlace) -> LazyTensor:
        dtype, shape = true_form(self.header, name)

        def read() -> torch.Tensor:
            raw = torch.empty(place.stop - place.start, dtype=torch.uint8)
            self.read(place.start, bytes_of(raw))
            return raw.view(dtype).view(shape)

        return LazyTensor(name=name, dtype=dtype, shape=shape, read=read)

    def _read_skeleton(self) -> dict[str, Any]:
        """Everything that is no tensor.  Raises CorruptCheckpointError."""
        place = self.header.tensors.get(EXTRA)
        if place is None:
            raise CorruptCheckpointError(f"image: its {EXTRA} is missing")
        text = bytearray(place.stop - place.start)
        self.read(place.start, memoryview(text))
        return cast(dict[str, Any], parse_skeleton(bytes(text)))
