"""Writes images of ours without a training: tensor after tensor, one of them in memory."""

import json
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from autockpt.executors.image.container import ImageIndex, chunk_digest
from autockpt.executors.image.dtypes import dtype_name, stored_form
from autockpt.executors.image.layout.boxes import Box, whole
from autockpt.executors.image.layout.plan import EXTRA, Layout, TensorSpec, plan_layout
from autockpt.executors.keeper.saving.shards import HEAD_BYTES
from autockpt.executors.linux.memory import PAGE_BYTES, Arena
from autockpt.executors.storage.directory import CheckpointDirectory
from autockpt.executors.storage.shard_file import ImageFile
from autockpt.integrations.tree.lazy_tree import bytes_of
from autockpt.values.generation import Generation
from autockpt.values.record import to_json

CHUNK_BYTES = 2**23
"""A keeper's own default."""
Record = dict[str, Any]
"""The record of one image in COMMIT."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ticket:
    """The image of a generation that a writer makes."""

    directory: str
    run_id: str
    generation: Generation
    step: int
    rank: int
    world_size: int
    chunk_bytes: int = CHUNK_BYTES


def spec_of(
    name: str, dtype: torch.dtype, shape: Sequence[int], boxes: Sequence[Box] = ()
) -> TensorSpec:
    """A tensor of `shape`, or these boxes of it, one after another.

    Raises ConfigError for a dtype that cannot be stored.
    """
    parts = tuple(box for box in boxes if box.count)
    is_part = bool(boxes) and parts != (whole(shape),) and bool(whole(shape).count)
    local = tuple(shape)
    if is_part:
        local = parts[0].shape if len(parts) == 1 else (sum(box.count for box in parts),)
    kind, stored = stored_form(dtype, local)
    return TensorSpec(
        name=name, dtype=kind, shape=stored, true_dtype=dtype_name(dtype), lazy=True,
        tensor_class="other", global_shape=tuple(shape) if is_part else None,
        boxes=parts if is_part else (),
    )  # fmt: skip


def write_image(
    ticket: Ticket,
    specs: list[TensorSpec],
    aliases: dict[str, str],
    skeleton: dict[str, Any],
    read: Callable[[str], Iterable[torch.Tensor]],
    *,
    owner: int | None = None,
) -> Record:
    """Writes one image and its index, durable.

    `read`: the elements of a tensor, by name, in pieces that follow one another; each is asked for
    once.  `owner`: as `plan_layout` has it.  Tensors that the skeleton's progress lists under `nan`
    may hold NaN.  Raises ConfigError for names that cannot stand, StorageError.
    """
    text = json.dumps(skeleton, separators=(",", ":")).encode()
    known_nan = map(str, (skeleton.get("progress") or {}).get("nan") or ())
    layout = plan_layout(
        specs, aliases=aliases, extra_bytes=len(text), owner=owner, known_nan=frozenset(known_nan)
    )
    folder = os.path.join(ticket.directory, ticket.generation.name)
    shard = f"shard-{ticket.rank:05d}-a1.safetensors"
    stream = _Stream(os.path.join(folder, shard), layout, ticket.chunk_bytes)
    try:
        stream.put(0, memoryview(layout.header))
        for entry in layout.entries:
            if entry.spec.name == EXTRA:
                stream.put(entry.offset, memoryview(text))
                continue
            stream.skip_to(entry.offset)
            for tensor in read(entry.spec.name):
                stream.append(tensor)
        digests, head_digest = stream.finish()
    except BaseException:
        stream.discard()
        raise
    index = ImageIndex(
        run_id=ticket.run_id, generation=ticket.generation, step=ticket.step, rank=ticket.rank,
        world_size=ticket.world_size, layout_digest=layout.digest,
        image_bytes=layout.image_bytes, chunk_bytes=ticket.chunk_bytes, digests=digests,
        head_bytes=stream.head_bytes, head_digest=head_digest,
    )  # fmt: skip
    name = f"idx-{ticket.rank:05d}-a1.json"
    CheckpointDirectory(ticket.directory).write_index(
        os.path.join(folder, name), to_json(index).encode()
    )
    return {
        "rank": ticket.rank, "file": shard, "index": name, "bytes": layout.image_bytes,
        "root": index.root, "layout_digest": layout.digest, "chunks": len(digests),
        "chunk_bytes": ticket.chunk_bytes,
    }  # fmt: skip


class _Stream:
    """An image that is written from its first byte to its last, chunk by chunk."""

    def __init__(self, path: str, layout: Layout, chunk_bytes: int) -> None:
        self._file = ImageFile(path, allocate_bytes=layout.image_bytes, direct=True)
        self._image_bytes = layout.image_bytes
        self._buffer = Arena.anonymous(chunk_bytes)
        self._chunk = self._buffer.view[:chunk_bytes]
        self._at = 0
        self._digests: list[str] = []
        head = layout.boundary_end
        self.head_bytes = head if head <= min(HEAD_BYTES, chunk_bytes) else 0
        """0: too large for a digest of its own."""
        self._head_digest = ""

    def put(self, offset: int, data: memoryview) -> None:
        """Bytes at a place that is not behind what was written already."""
        self.skip_to(offset)
        self._write(data)

    def skip_to(self, offset: int) -> None:
        """Zeros up to a place."""
        while self._at < offset:
            self._write(memoryview(bytes(min(offset - self._at, PAGE_BYTES))))

    def append(self, tensor: torch.Tensor) -> None:
        """The elements of a tensor, row by row."""
        host = tensor.detach().cpu().contiguous()
        if host.numel():
            self._write(bytes_of(host.view(-1).view(torch.uint8)))

    def _write(self, data: memoryview) -> None:
        size = len(self._chunk)
        while data:
            place = self._at % size
            part = data[: size - place]
            self._chunk[place : place + len(part)] = part
            self._at += len(part)
            data = data[len(part) :]
            if self._at % size == 0:
                self._flush(size)

    def _flush(self, count: int) -> None:
        done = self._chunk[:count]
        if not self._digests and self.head_bytes:
            self._head_digest = chunk_digest(done[: self.head_bytes])
        self._file.write_at(len(self._digests) * len(self._chunk), done)
        self._digests.append(chunk_digest(done))

    def finish(self) -> tuple[tuple[str, ...], str]:
        """(digests of the chunks, of the head); the file is durable."""
        self.skip_to(self._image_bytes)
        if self._at % len(self._chunk):
            self._flush(self._at % len(self._chunk))
        self._file.finish(self._image_bytes)
        self._close()
        return tuple(self._digests), self._head_digest

    def discard(self) -> None:
        """Nothing of it is left."""
        self._file.discard()
        self._close()

    def _close(self) -> None:
        self._chunk.release()
        self._buffer.close()
