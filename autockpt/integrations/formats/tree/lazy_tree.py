"""Trees: nested dicts and lists whose tensors are read when they are needed.

Two places of a tree that share their memory hold the same `LazyTensor` object.
"""

import math
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from autockpt.executors.image.layout.boxes import Box, whole
from autockpt.values.errors import CorruptCheckpointError


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LazyTensor:
    """A tensor that stands in a file; compared by identity, because that is what ties mean."""

    name: str
    """Its name in its file."""
    dtype: torch.dtype
    shape: tuple[int, ...]
    part: Callable[[Box], torch.Tensor]
    """A box of it in host memory, checked against the digests that its format has.

    Raises CorruptCheckpointError or StorageError."""

    def read(self) -> torch.Tensor:
        """All of it."""
        return self.part(whole(self.shape))

    @property
    def nbytes(self) -> int:
        """Bytes of its elements."""
        count = self.dtype.itemsize
        for size in self.shape:
            count *= size
        return count


Tree = dict[str, Any]
"""Nested dicts, lists and tuples of LazyTensors and plain values."""
Path = tuple[str | int, ...]


def in_memory(tensor: torch.Tensor, name: str = "") -> LazyTensor:
    """A tensor that is there already, detached and on the host."""
    found = tensor.detach().cpu()
    base = whole(found.shape)
    return LazyTensor(
        name=name, dtype=found.dtype, shape=base.shape,
        part=lambda box: found if box == base else found[box.slices_in(base)],
    )  # fmt: skip


def leaves(tree: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """(path, leaf) of everything that is no dict, list or tuple; empty ones are leaves."""
    if isinstance(tree, Mapping) and tree:
        for key, value in tree.items():
            yield from leaves(value, (*path, key))
    elif isinstance(tree, list | tuple) and tree and type(tree) in (list, tuple):
        for index, value in enumerate(tree):
            yield from leaves(value, (*path, index))
    else:
        yield path, tree


def transformed(tree: Any, change: Callable[[Any], Any]) -> Any:
    """The same tree with `change` applied to every leaf; other kinds of dicts than torch's safe
    reader knows become plain ones."""
    if isinstance(tree, Mapping):
        values = {key: transformed(value, change) for key, value in tree.items()}
        if type(tree) is OrderedDict:
            return OrderedDict(values)
        return Counter(values) if type(tree) is Counter else values
    if type(tree) in (list, tuple):
        return type(tree)(transformed(value, change) for value in tree)
    return change(tree)


def tensors_of(tree: Any) -> list[LazyTensor]:
    """Every tensor of a tree once, in order."""
    found = {id(leaf): leaf for _, leaf in leaves(tree) if isinstance(leaf, LazyTensor)}
    return list(found.values())


def materialised(tree: Any, *, tell: Callable[[int], None] = lambda nbytes: None) -> Any:
    """Return the tree with real tensors; one tensor in two places stays one.

    `tell` gets the bytes of each tensor that was read.
    """
    read: dict[int, torch.Tensor] = {}

    def real(leaf: Any) -> Any:
        if not isinstance(leaf, LazyTensor):
            return leaf
        if id(leaf) not in read:
            read[id(leaf)] = leaf.read()
            tell(leaf.nbytes)
        return read[id(leaf)]

    return transformed(tree, real)


def bytes_of(raw: torch.Tensor) -> memoryview:
    """The memory of a flat uint8 tensor, writable."""
    array: Any = raw.numpy()
    return memoryview(array)


def empty(shape: tuple[int, ...], dtype: torch.dtype, device: str = "cpu") -> torch.Tensor:
    """An uninitialised tensor; made from bytes, because torch warns of some dtypes otherwise."""
    nbytes = dtype.itemsize * math.prod(shape)
    return torch.empty(nbytes, dtype=torch.uint8, device=device).view(dtype).view(shape)


def nested(leaves: Mapping[Path, Any], where: str) -> Tree:
    """The tree in which every leaf stands at its path; dicts whose keys are numbers are lists.

    Raises CorruptCheckpointError, which names `where`, for two leaves at one place.
    """
    root = _Node()
    for place, leaf in leaves.items():
        node = root
        for part in place[:-1]:
            node = node.setdefault(part, _Node())
            if not isinstance(node, _Node):
                raise CorruptCheckpointError(f"{where}: two keys stand at one place, {place}")
        node[place[-1]] = leaf
    return {str(key): _settled(value) for key, value in root.items()}


class _Node(dict[str | int, Any]):
    """A part of a tree that becomes a dict or a list, and is no leaf that is a dict."""


def _settled(node: Any) -> Any:
    if not isinstance(node, _Node):
        return node
    if all(isinstance(key, int) for key in node):
        return [_settled(node[key]) for key in sorted(node, key=int)]
    return {key: _settled(value) for key, value in node.items()}
