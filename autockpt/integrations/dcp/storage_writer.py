"""A storage writer: torch.distributed.checkpoint saves into a checkpoint directory of ours.

    writer = GenerationWriter("checkpoints")
    dcp.save(state, storage_writer=writer)

DCP's planner decides which rank writes what; every rank writes one image, and the coordinator
commits.  The keys of the state may differ from the keys of `autockpt.attach`.  The image records
the place of each value, as `tree` in its skeleton, and `GenerationReader` gives the same keys back.
"""

import dataclasses
import io
import os
from collections.abc import Iterator
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from autockpt.executors.image.layout.boxes import Box
from autockpt.executors.image.layout.plan import TensorSpec
from autockpt.executors.state import state_tree
from autockpt.integrations.formats.convert.committing import GenerationsOf
from autockpt.integrations.formats.convert.image_writer import Record, Ticket, spec_of, write_image
from autockpt.integrations.formats.files import torch_file
from autockpt.values.errors import ConfigError, CorruptCheckpointError


class GenerationWriter(StorageWriter):
    """Lets `dcp.save` and `dcp.async_save` write generations of ours, from one process or many.

    The directory is leased from the first save to `close` or the end of the process.  A live run in
    it is an error, and a later one fences this writer.  Old generations are not deleted here.
    """

    def __init__(self, path: str | os.PathLike[str], *, step: int | None = None) -> None:
        """`path`: a checkpoint directory, made if needed; `step`: label of the next save, by
        default the number of the save."""
        self.step = step
        self._path = os.path.abspath(path)
        self._lease: GenerationsOf | None = None
        self._saves = 0

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """A new save begins; a `checkpoint_id` is another directory from now on."""
        if checkpoint_id and os.path.abspath(checkpoint_id) != self._path:
            self.close()
            self._path = os.path.abspath(checkpoint_id)

    def close(self) -> None:
        """Gives the directory back; the next save would lease it again."""
        if self._lease is not None:
            self._lease.close()
        self._lease = None

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Counts: all ranks have saved equally often."""
        if not kwargs.get("use_collectives", True):
            raise ConfigError(
                "GenerationWriter: a generation is committed once for all ranks; save with "
                "use_collectives=True"
            )
        self._saves += 1

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Nothing to change."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Begins a generation and tells every rank which image of it is its own."""
        directory = self._leased()
        ticket = Ticket(
            directory=directory.path, run_id=directory.run_id,
            generation=directory.begin(self._saves), step=self._label,
            rank=0, world_size=len(plans),
        )  # fmt: skip
        return [
            dataclasses.replace(plan, storage_data=dataclasses.replace(ticket, rank=rank))
            for rank, plan in enumerate(plans)
        ]

    def _leased(self) -> GenerationsOf:
        """The directory, by this process; only the coordinator asks."""
        if self._lease is None:
            self._lease = GenerationsOf(self._path)
        return self._lease

    @property
    def _label(self) -> int:
        return self._saves if self.step is None else self.step

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Writes the image of this rank, durable; one tensor in memory at a time."""
        ticket = plan.storage_data
        if not isinstance(ticket, Ticket) or ticket.generation.step != self._saves:
            raise ConfigError(
                "GenerationWriter: the planner kept a plan of an earlier save; use a planner with "
                "enable_plan_caching=False"
            )
        record = _RankImage(plan, planner).write(ticket)
        done: Future[list[WriteResult]] = Future()
        done.set_result([WriteResult(MetadataIndex(record["file"]), record["bytes"], record)])
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """All images are durable: commits.  Raises GuardError when a newer run took over."""
        records = [result.storage_data for of_rank in results for result in of_rank]
        self._leased().commit(self._label, records)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether it can be a checkpoint directory: new, empty, or one already."""
        path = os.fspath(checkpoint_id)
        if not os.path.exists(path):
            return True
        return os.path.isdir(path) and (not os.listdir(path) or os.path.exists(f"{path}/RUN"))


class _RankImage:
    """The items of DCP's plan for one rank, as an image."""

    def __init__(self, plan: SavePlan, planner: SavePlanner) -> None:
        self._planner = planner
        self._paths = plan.planner_data or {}
        self._items: dict[str, list[WriteItem]] = {}
        for item in plan.items:
            self._items.setdefault(item.index.fqn, []).append(item)
        self._inside: dict[str, torch.Tensor] = {}
        """Tensors inside of values."""

    def write(self, ticket: Ticket) -> Record:
        """Raises ConfigError for a value that no safe reader would take, StorageError."""
        tree = [[list(self._paths.get(key, (key,))), self._value(key)] for key in self._items]
        specs = [self._spec(key) for key in self._items if self._is_tensor(key)]
        specs += [spec_of(name, t.dtype, t.shape) for name, t in self._inside.items()]
        nothing: dict[str, Any] = {"optimizers": {}, "modules": {}, "others": {}}
        skeleton = {**nothing, "progress": {"step": ticket.step}, "rng": None, "tree": tree}
        return write_image(ticket, specs, {}, skeleton, self._read)

    def _is_tensor(self, key: str) -> bool:
        return self._items[key][0].type != WriteItemType.BYTE_IO

    def _value(self, key: str) -> Any:
        """Skeleton of what stands under a key."""
        if self._is_tensor(key):
            return {"$tensor": key}
        (item,) = self._items[key]
        data = self._planner.resolve_data(item)
        if not isinstance(data, io.BytesIO):
            raise ConfigError(f"{key}: the planner gives a {type(data).__qualname__} for a value")
        try:
            return state_tree.encode(torch_file.unpacked(data.getvalue(), key), key, self._inside)
        except CorruptCheckpointError as error:
            raise ConfigError(f"{error}; keep tensors, numbers, texts, lists and dicts") from None

    def _spec(self, key: str) -> TensorSpec:
        forms = [item.tensor_data for item in self._items[key] if item.tensor_data is not None]
        chunks = [form.chunk for form in forms]
        boxes = [Box(offset=tuple(c.offsets), shape=tuple(c.sizes)) for c in chunks]
        return spec_of(key, forms[0].properties.dtype, tuple(forms[0].size), boxes)

    def _read(self, name: str) -> Iterator[torch.Tensor]:
        if name in self._inside:
            yield self._inside[name]
            return
        for item in self._items[name]:
            data = self._planner.resolve_data(item)
            if isinstance(data, torch.Tensor):
                yield data
