"""A directory of torch.distributed.checkpoint as a tree, without loading torch.distributed.

Each piece in its files is a small file of torch.save, read with `weights_only=True`, values too.
"""

import os
from typing import Any

import torch

from autockpt.executors.image.layout.boxes import Box, intersect
from autockpt.integrations.dcp.metadata import Chunk, Entry, read_metadata
from autockpt.integrations.formats.files import torch_file
from autockpt.integrations.formats.tree.lazy_tree import LazyTensor, Tree, empty, nested
from autockpt.values.errors import CorruptCheckpointError

METADATA = ".metadata"


def read_directory(path: str) -> Tree:
    """The state in a directory.  Raises CorruptCheckpointError."""
    metadata = read_metadata(os.path.join(path, METADATA))
    leaves = {
        metadata.paths[key]: _leaf(path, key, entry) for key, entry in metadata.entries.items()
    }
    return nested(leaves, path)


def _leaf(folder: str, key: str, entry: Entry) -> Any:
    if entry.dtype is None:
        return _piece(folder, entry.chunks[0])
    dtype = entry.dtype

    def part(wanted: Box) -> torch.Tensor:
        tensor = empty(wanted.shape, dtype)
        for chunk in entry.chunks:
            stored = Box(offset=chunk.offsets, shape=chunk.sizes)
            both = intersect(stored, wanted)
            if both is not None:
                held = _tensor(folder, key, dtype, chunk)[both.slices_in(stored)]
                tensor[both.slices_in(wanted)] = held
        return tensor

    return LazyTensor(name=key, dtype=dtype, shape=entry.shape, part=part)


def _tensor(folder: str, key: str, dtype: torch.dtype, chunk: Chunk) -> torch.Tensor:
    tensor = _piece(folder, chunk)
    if not isinstance(tensor, torch.Tensor) or tensor.dtype != dtype:
        raise CorruptCheckpointError(f"{folder}: {key}: holds no tensor of {dtype}")
    if tuple(tensor.shape) != chunk.sizes or tensor.layout != torch.strided or tensor.is_meta:
        raise CorruptCheckpointError(f"{folder}: {key}: a chunk has another form")
    return tensor


def _piece(folder: str, chunk: Chunk) -> Any:
    path = os.path.join(folder, chunk.file)
    try:
        with open(path, "rb") as file:
            # Asked before anything is allocated by a number from the metadata.
            if os.fstat(file.fileno()).st_size < chunk.start + chunk.nbytes:
                raise CorruptCheckpointError(f"{path}: is truncated")
            file.seek(chunk.start)
            return torch_file.unpacked(file.read(chunk.nbytes), path)
    except OSError as error:
        raise CorruptCheckpointError(f"{path}: cannot be read: {error.strerror}") from error
