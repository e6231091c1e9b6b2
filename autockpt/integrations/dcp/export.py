"""Writes a tree as a torch.distributed.checkpoint directory, with torch's own FileSystemWriter.

The plan is made from tensors without bytes; each is read when it is to be written.
"""

import dataclasses
import os
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from autockpt import new_files
from autockpt.integrations.formats.files import torch_file
from autockpt.integrations.formats.tree.lazy_tree import (
    LazyTensor,
    Tree,
    empty,
    materialised,
    transformed,
)
from autockpt.values.errors import AutockptError, StorageError


def write_directory(
    path: str, tree: Tree, max_file_bytes: int, tell: Callable[[int], None]
) -> None:
    """Writes a tree as a DCP directory; memory holds the tensors of one of its files."""
    os.mkdir(path, new_files.READABLE_DIRECTORY)
    stands = StandIns()
    try:
        with warnings.catch_warnings():  # "assuming ... a single process", which is so
            warnings.filterwarnings("ignore", category=UserWarning, module="torch.distributed")
            save(
                stands.of(tree),
                storage_writer=_Writer(path, max_file_bytes),
                planner=_Planner(stands, tell),
                no_dist=True,
            )
    except CheckpointException as wrapper:
        raise _inner(wrapper, path) from None


def _inner(wrapper: CheckpointException, path: str) -> Exception:
    """What went wrong inside of torch: an error of ours or of the system as it was."""
    causes = [failure[0] for failure in wrapper.failures.values()]
    known = [cause for cause in causes if isinstance(cause, AutockptError | OSError)]
    if known:
        return known[0]
    return StorageError(f"{path}: torch could not write it: {causes[:1]!r:.300}")


class StandIns:
    """Tensors without bytes from which torch plans; the real tensors are read later."""

    def __init__(self) -> None:
        self._sources: dict[int, LazyTensor] = {}
        self._kept: list[torch.Tensor] = []

    def of(self, tree: Any) -> Any:
        """The tree as torch may see it; torch does not look into tuples, so those are read."""
        if isinstance(tree, dict):
            return {key: self.of(value) for key, value in tree.items()}
        if isinstance(tree, list):
            return [self.of(value) for value in tree]
        if not isinstance(tree, LazyTensor):
            return transformed(materialised(tree), torch_file.plain)
        stand = empty(tree.shape, tree.dtype, "meta")
        self._sources[id(stand)] = tree
        self._kept.append(stand)  # an id is of this tensor as long as it lives
        return stand

    def source(self, leaf: Any) -> Any:
        """The tensor behind a stand-in; anything else as it is."""
        return self._sources.get(id(leaf), leaf)


class _Planner(DefaultSavePlanner):
    """Plans with stand-ins, and reads each tensor when it is to be written."""

    def __init__(self, stands: StandIns, tell: Callable[[int], None]) -> None:
        super().__init__()
        self._stands, self._tell = stands, tell

    def lookup_object(self, index: MetadataIndex) -> Any:
        """The real tensor."""
        source = self._stands.source(super().lookup_object(index))
        if not isinstance(source, LazyTensor):
            return source
        self._tell(source.nbytes)
        return source.read()


class _Writer(FileSystemWriter):
    """Several files instead of one: torch's writer keeps the tensors of a file until its end."""

    def __init__(self, path: str, max_file_bytes: int) -> None:
        super().__init__(path)
        self._max_file_bytes = min(max_file_bytes, FILE_BYTES)

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """One call of torch's own for each file."""
        results: list[WriteResult] = []
        for number, items in enumerate(self._files(plan.items)):
            prefix = dataclasses.replace(plan.storage_data, prefix=f"__0_{number}_")
            part = dataclasses.replace(plan, items=items, storage_data=prefix)
            results += super().write_data(part, planner).wait()
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done

    def _files(self, items: list[WriteItem]) -> list[list[WriteItem]]:
        files: list[list[WriteItem]] = [[]]
        filled = 0
        for item in items:
            size = _bytes(item)
            if files[-1] and filled + size > self._max_file_bytes:
                files.append([])
                filled = 0
            files[-1].append(item)
            filled += size
        return files


FILE_BYTES = 2**28
"""The most bytes of an export in memory at a time, when tensors are smaller than that."""


def _bytes(item: WriteItem) -> int:
    if item.tensor_data is None:
        return 0
    return item.tensor_data.size.numel() * item.tensor_data.properties.dtype.itemsize
