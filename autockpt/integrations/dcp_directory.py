"""A directory of torch.distributed.checkpoint as a tree, without loading torch.distributed.

Each piece in its files is a small file of torch.save, read with `weights_only=True`, values too.
"""

import os
from typing import Any

import torch

from autockpt.integrations import torch_file
from autockpt.integrations.dcp_metadata import Chunk, DcpMetadata, Entry, read_metadata
from autockpt.integrations.lazy import LazyTensor, Tree, empty
from autockpt.values.errors import CorruptCheckpointError

METADATA = ".metadata"


def read_directory(path: str) -> Tree:
    """The state in a directory.  Raises CorruptCheckpointError."""
    metadata = read_metadata(os.path.join(path, METADATA))
    leaves = {
        metadata.paths[key]: _leaf(path, key, entry) for key, entry in metadata.entries.items()
    }
    return _nested(path, metadata, leaves)


def _leaf(folder: str, key: str, entry: Entry) -> Any:
    if entry.dtype is None:
        return _piece(folder, entry.chunks[0])
    dtype = entry.dtype

    def read() -> torch.Tensor:
        tensor = empty(entry.shape, dtype)
        for chunk in entry.chunks:
            part = _piece(folder, chunk)
            if not isinstance(part, torch.Tensor) or part.dtype != dtype:
                raise CorruptCheckpointError(f"{folder}: {key}: holds no tensor of {dtype}")
            if tuple(part.shape) != chunk.sizes or part.layout != torch.strided or part.is_meta:
                raise CorruptCheckpointError(f"{folder}: {key}: a chunk has another form")
            ranges = zip(chunk.offsets, chunk.sizes, strict=True)
            tensor[tuple(slice(start, start + size) for start, size in ranges)] = part
        return tensor

    return LazyTensor(name=key, dtype=dtype, shape=entry.shape, read=read)


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


def _nested(path: str, metadata: DcpMetadata, leaves: dict[tuple[str | int, ...], Any]) -> Tree:
    root: dict[str | int, Any] = {}
    for place, leaf in leaves.items():
        node = root
        for part in place[:-1]:
            node = node.setdefault(part, _Node())
            if not isinstance(node, _Node):
                raise CorruptCheckpointError(f"{path}: two keys stand at one place, {place}")
        node[place[-1]] = leaf
    return {str(key): _settled(value) for key, value in root.items()}


class _Node(dict[str | int, Any]):
    """A part of the state that became a dict, or a list when its keys are numbers."""


def _settled(node: Any) -> Any:
    if not isinstance(node, _Node):
        return node
    if all(isinstance(key, int) for key in node):
        return [_settled(node[key]) for key in sorted(node, key=int)]
    return {key: _settled(value) for key, value in node.items()}
