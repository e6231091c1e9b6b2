"""Every way to divide the model over ranks: one function each, registered by its name.

A function is called on every rank and gives a `Training`.  What the whole state is, each says by
torch's own means (`get_state_dict`, `consolidate_state_dict`): none of it is autockpt's.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

from tests.jobs.parallel.model import BLOCKS, Block, Net, batch, loss_of

Tensors = dict[str, torch.Tensor]
Make = Callable[..., Net]
"""Makes the model, or the blocks of it that are asked for."""


@dataclass(slots=True, kw_only=True)
class Training:
    """One rank of a divided training."""

    model: nn.Module
    """As the script attaches it."""
    optimizer: torch.optim.Optimizer
    scheduler: torch.optim.lr_scheduler.LRScheduler
    forward_backward: Callable[[int], float | None]
    """Gradients of a step; the loss of this rank's part of the batch, None where it is unknown."""
    attach: dict[str, Any] = field(default_factory=dict)
    """What `attach` is told beside the model and its optimizer."""
    full_optimizer: Callable[[], dict[str, Any]] | None = None
    """State by parameter name, where `get_state_dict` does not know the optimizer."""

    def train_step(self, step: int) -> float | None:
        """One iteration."""
        loss = self.forward_backward(step)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.scheduler.step()
        return loss

    def evaluate(self) -> None:
        """A forward without a backward."""
        self.model.eval()
        with torch.no_grad():
            self.model(batch(0)[0])
        self.model.train()

    def full_state(self) -> Tensors:
        """The whole state, as far as this rank can say: collective."""
        options = StateDictOptions(full_state_dict=True)
        if self.full_optimizer is not None:
            return _plain(self.model.state_dict()) | _optimizer_tensors(self.full_optimizer())
        model, optimizer = get_state_dict(self.model, self.optimizer, options=options)
        return _plain(model) | _optimizer_tensors(optimizer)


@dataclass(frozen=True, slots=True, kw_only=True)
class Mesh:
    """A number of ranks and how they share the model."""

    ranks: int
    build: Callable[[Make], Training]
    """Divides what it makes."""


MESHES: dict[str, Mesh] = {}
Build = Callable[[Make], Training]


def mesh(name: str, ranks: int) -> Callable[[Build], Build]:
    """Registers one."""

    def register(build: Build) -> Build:
        MESHES[name] = Mesh(ranks=ranks, build=build)
        return build

    return register


# --- what they share -----------------------------------------------------------------------------


def _plain(state: Mapping[str, Any]) -> Tensors:
    return {name.removeprefix("module."): tensor.clone() for name, tensor in state.items()}


def _optimizer_tensors(state: dict[str, Any]) -> Tensors:
    """State and settings of every parameter as tensors."""
    found = {
        f"{name}.{key}": torch.as_tensor(value).clone()
        for name, values in state["state"].items()
        for key, value in values.items()
    }
    for group in state["param_groups"]:
        settings = torch.tensor([group["lr"], group["weight_decay"]], dtype=torch.float64)
        found |= {f"{name}.settings": settings for name in group["params"]}
    return {name.removeprefix("module."): tensor for name, tensor in found.items()}


def _groups(parameters: Iterable[tuple[str, nn.Parameter]]) -> Iterator[dict[str, Any]]:
    """Weights decay; biases and norms do not."""
    named = list(parameters)
    for kind, decay in (("weight", 0.1), ("rest", 0.0)):
        chosen = [p for n, p in named if (kind == "weight") == _decays(n)]
        if chosen:
            yield {"params": chosen, "weight_decay": decay}


def _decays(name: str) -> bool:
    return name.endswith(".weight") and "norm" not in name


SETTINGS: dict[str, Any] = {"lr": 0.01, "betas": (0.8, 0.9), "eps": 1e-4}
"""`eps` well above the noise of a gradient: else its last bits would decide a step's direction."""


def _optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(list(_groups(model.named_parameters())), **SETTINGS)


def _training(
    model: nn.Module, optimizer: torch.optim.Optimizer | None = None, part: int = 0, parts: int = 1
) -> Training:
    """Forward and backward of one of `parts` data-parallel ranks."""
    optimizer = optimizer or _optimizer(model)

    def forward_backward(step: int) -> float:
        words, following = batch(step, part, parts)
        loss = loss_of(model(words), following)
        loss.backward()
        return loss.item()

    return Training(
        model=model, optimizer=optimizer, scheduler=_scheduler(optimizer),
        forward_backward=forward_backward,
    )  # fmt: skip


def _scheduler(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.9)


# --- the meshes ----------------------------------------------------------------------------------


@mesh("single", 1)
def single(make: Make) -> Training:
    """Nothing is divided."""
    return _training(make())


def _ddp(model: nn.Module, **more: Any) -> nn.Module:
    # Else three or more ranks regroup their buckets after the first iteration of a process.
    return DistributedDataParallel(model, find_unused_parameters=True, **more)


@mesh("ddp-2", 2)
@mesh("ddp-4", 4)
def ddp(make: Make) -> Training:
    """The data is divided."""
    return _training(_ddp(make()), part=dist.get_rank(), parts=dist.get_world_size())


@mesh("fsdp2-2", 2)
@mesh("fsdp2-4", 4)
def fsdp2(make: Make) -> Training:
    """Rows of every tensor are divided."""
    return _fully_sharded(make, init_device_mesh("cpu", (dist.get_world_size(),)))


@mesh("hsdp-2x2", 4)
def hsdp(make: Make) -> Training:
    """Two copies, each divided over two ranks."""
    names = ("copies", "parts")
    return _fully_sharded(make, init_device_mesh("cpu", (2, 2), mesh_dim_names=names))


def _fully_sharded(make: Make, over: Any) -> Training:
    model = make()
    for block in model.blocks.values():
        fully_shard(block, mesh=over)
    fully_shard(model, mesh=over)
    return _training(model, part=dist.get_rank(), parts=dist.get_world_size())


@mesh("tp-2", 2)
def tensor_parallel(make: Make) -> Training:
    """Columns and rows of the linear layers are divided; the norms are not."""
    return _training(_tensor_parallel(make, init_device_mesh("cpu", (dist.get_world_size(),))))


def _tensor_parallel(make: Make, over: Any) -> Net:
    model = make()
    plan: dict[str, Any] = {
        "embed": RowwiseParallel(input_layouts=Replicate()),
        "head": ColwiseParallel(output_layouts=Replicate()),
    }
    for number in range(BLOCKS):
        plan[f"blocks.{number}.up"] = ColwiseParallel()
        plan[f"blocks.{number}.down"] = RowwiseParallel()
    parallelize_module(model, over, plan)
    return model


@mesh("tp2-fsdp2", 4)
def tensor_parallel_fully_sharded(make: Make) -> Training:
    """Two dimensions: tensor parallel, and every part of it divided once more."""
    over = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = _tensor_parallel(make, over["tp"])
    for block in model.blocks.values():
        fully_shard(block, mesh=over["dp"])
    fully_shard(model, mesh=over["dp"])
    return _training(model, part=over["dp"].get_local_rank(), parts=2)


@mesh("pp-2", 2)
@mesh("pp-4", 4)
def pipeline(make: Make) -> Training:
    """Each rank has some of the blocks."""
    return _pipeline(make, dist.get_rank(), dist.get_world_size(), dist.group.WORLD, 0, 1)


@mesh("pp2-dp2", 4)
def pipeline_of_copies(make: Make) -> Training:
    """Two pipelines of two stages; a stage and its copy share the data."""
    over = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    stages = over["pp"]
    return _pipeline(
        make, stages.get_local_rank(), 2, stages.get_group(), over["dp"].get_local_rank(), 2,
        copies=over["dp"].get_group(),
    )  # fmt: skip


def _pipeline(
    make: Make, stage: int, stages: int, group: Any, part: int, parts: int, copies: Any = None
) -> Training:
    """1F1B on two stages, GPipe on four; as many microbatches as stages."""
    each = BLOCKS // stages
    model: nn.Module = make(range(stage * each, (stage + 1) * each))
    if copies is not None:
        model = _ddp(model, process_group=copies)
    kind = Schedule1F1B if stages == 2 else ScheduleGPipe
    schedule = kind(
        PipelineStage(model, stage, stages, torch.device("cpu"), group=group),
        n_microbatches=stages, loss_fn=loss_of,
    )  # fmt: skip
    optimizer = _optimizer(model)

    def forward_backward(step: int) -> float | None:
        words, following = batch(step, part, parts)
        losses: list[torch.Tensor] = []
        inputs = (words,) if stage == 0 else ()
        if stage < stages - 1:
            schedule.step(*inputs)
            return None
        schedule.step(*inputs, target=following, losses=losses)
        return float(sum(loss.item() for loss in losses) / len(losses))

    return Training(
        model=model, optimizer=optimizer, scheduler=_scheduler(optimizer),
        forward_backward=forward_backward,
    )  # fmt: skip


@mesh("zero1-2", 2)
def zero_1(make: Make) -> Training:
    """The data is divided, and the optimizer's state by whole parameters."""
    from torch.distributed.optim import ZeroRedundancyOptimizer  # warns when it is imported

    model = _ddp(make())
    named = dict(model.named_parameters())
    optimizer = ZeroRedundancyOptimizer(list(_groups(named.items())), torch.optim.AdamW, **SETTINGS)
    training = _training(model, optimizer, dist.get_rank(), dist.get_world_size())
    training.full_optimizer = lambda: _consolidated(optimizer, named)
    return training


def _consolidated(optimizer: Any, named: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """By name, on rank 0."""
    optimizer.consolidate_state_dict(to=0)
    if dist.get_rank():
        return {"state": {}, "param_groups": []}
    by_id = {id(parameter): name for name, parameter in named.items()}
    names = [by_id[id(p)] for group in optimizer.param_groups for p in group["params"]]
    found = optimizer.state_dict()
    return {
        "state": {names[number]: values for number, values in found["state"].items()},
        "param_groups": [
            {**group, "params": [names[number] for number in group["params"]]}
            for group in found["param_groups"]
        ],
    }


@mesh("zero3-2", 2)
@mesh("zero3-4", 4)
def zero_3(make: Make) -> Training:
    """FSDP1: every block is one flat tensor, cut into equal ranges."""
    model = FullyShardedDataParallel(
        make(), auto_wrap_policy=ModuleWrapPolicy({Block}), use_orig_params=True,
        device_id=torch.device("cpu"),
    )  # fmt: skip
    return _training(model, part=dist.get_rank(), parts=dist.get_world_size())
