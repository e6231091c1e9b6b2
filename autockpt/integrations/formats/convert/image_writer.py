"""Writes images of ours without a training: tensor after tensor, one of them in memory."""

import json
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from autockpt.executors.image.container import ImageIndex
from autockpt.executors.image.dtypes import dtype_name, stored_form
from autockpt.executors.image.layout.boxes import Box, whole
from autockpt.executors.image.layout.plan import EXTRA, TensorSpec, plan_layout
from autockpt.executors.storage.directory.directory import CheckpointDirectory
from autockpt.executors.storage.rewriting.image_stream import ImageStream
from autockpt.integrations.formats.tree.lazy_tree import bytes_of
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
    stream = ImageStream(os.path.join(folder, shard), layout, ticket.chunk_bytes)
    try:
        stream.put(0, memoryview(layout.header))
        for entry in layout.entries:
            if entry.spec.name == EXTRA:
                stream.put(entry.offset, memoryview(text))
                continue
            stream.skip_to(entry.offset)
            for tensor in read(entry.spec.name):
                stream.append(_bytes(tensor))
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


def _bytes(tensor: torch.Tensor) -> memoryview:
    """The elements of a tensor, row by row."""
    host = tensor.detach().cpu().contiguous()
    return bytes_of(host.view(-1).view(torch.uint8)) if host.numel() else memoryview(b"")
