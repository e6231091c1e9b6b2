"""A storage reader: torch.distributed.checkpoint loads from our directories as they are.

dcp.load(state, storage_reader=GenerationReader("runs/train-20260101-120000"))

`GenerationWriter` stands here as well, so that both have one address.
"""

import dataclasses
import os
import warnings
from typing import Any

import torch
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from autockpt.executors.image.layout.boxes import Box
from autockpt.executors.storage.directory.records import lossy_notice
from autockpt.integrations.dcp.export import StandIns
from autockpt.integrations.dcp.storage_writer import GenerationWriter as GenerationWriter
from autockpt.integrations.formats.files import torch_file
from autockpt.integrations.formats.tree.checkpoint_tree import GenerationTree
from autockpt.integrations.formats.tree.lazy_tree import LazyTensor
from autockpt.integrations.places import generation_folder
from autockpt.values.errors import ConfigError


class GenerationReader(StorageReader):
    """Lets `dcp.load` read a generation of ours, in one process (`no_dist=True`) or in several.

    Keys are an export's: "model", "optimizer" (by parameter names, as `get_optimizer_state_dict`
    gives it), other attached objects by their names, "step".  Every chunk is compared with its
    digest; ranks may ask for other parts than were written.  Warns (UserWarning) of a generation
    that came back from a lossy archive.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        generation: str | None = None,
        rank: int | None = None,
    ) -> None:
        """`path`: a run directory, a checkpoint directory (then the newest good generation of it,
        or `generation`), or one generation; `rank`: whose image, as in `autockpt convert`."""
        self._path, self._generation, self._rank = os.fspath(path), generation, rank
        self._source: GenerationTree | None = None
        self._leaves: dict[str, Any] = {}

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """A new load begins."""
        if checkpoint_id:
            self._path = os.fspath(checkpoint_id)
        self._close()

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return the contents of the generation, in torch's words."""
        stands = StandIns()
        flat, mappings = flatten_state_dict(stands.of(self._open().tree))
        self._leaves = {key: stands.source(leaf) for key, leaf in flat.items()}
        described = {key: _described(leaf) for key, leaf in self._leaves.items()}
        return Metadata(described, planner_data=mappings, storage_meta=StorageMeta(self._path))

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        """Other ranks than the coordinator have not read the metadata themselves."""
        if not self._leaves:
            self.read_metadata()

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """In the order of the image, so that every chunk is read once."""
        order = {key: place for place, key in enumerate(self._leaves)}
        items = sorted(plan.items, key=lambda item: order.get(item.storage_index.fqn, 0))
        return dataclasses.replace(plan, items=items)

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Nothing to change."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Fills what the planner asks for, one tensor at a time."""
        try:
            for item in plan.items:
                self._read(item, planner)
        finally:
            self._close()
        done: Future[None] = Future()
        done.set_result(None)
        return done

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether it names something of ours."""
        try:
            generation_folder(os.fspath(checkpoint_id))
        except ConfigError:
            return False
        return True

    def _read(self, item: ReadItem, planner: LoadPlanner) -> None:
        leaf = self._leaves[item.storage_index.fqn]
        if item.type == LoadItemType.BYTE_IO:
            planner.load_bytes(item, torch_file.packed(leaf))
            return
        box = Box(offset=tuple(item.storage_offsets), shape=tuple(item.lengths))
        target = planner.resolve_tensor(item).detach()
        target.copy_(leaf.part(box))
        planner.commit_tensor(item, target)

    def _open(self) -> GenerationTree:
        if self._source is None:
            folder = generation_folder(self._path, self._generation)
            self._source = GenerationTree(folder, rank=self._rank)
            if lossy := self._source.lossy:
                warnings.warn(lossy_notice(folder, lossy), stacklevel=2)
        return self._source

    def _close(self) -> None:
        if self._source is not None:
            self._source.close()
        self._source, self._leaves = None, {}


def _described(leaf: Any) -> TensorStorageMetadata | BytesStorageMetadata:
    if not isinstance(leaf, LazyTensor):
        return BytesStorageMetadata()
    size = torch.Size(leaf.shape)
    chunk = ChunkStorageMetadata(offsets=torch.Size([0] * len(size)), sizes=size)
    return TensorStorageMetadata(
        properties=TensorProperties(dtype=leaf.dtype), size=size, chunks=[chunk]
    )
