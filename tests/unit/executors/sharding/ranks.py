"""Real gloo ranks that wrap small models in every way and write down what they hold.

    python -m tests.unit.executors.sharding.ranks FOLDER 2 4

forks 2 and then 4 ranks out of one process that has loaded torch, and leaves `FOLDER/N.RANK.json`:
by case and tensor what `declared` and `holding_of` say, and whether the bytes are that part of the
tensor in the bare model.
"""

import datetime
import json
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel as Fsdp1
from torch.distributed.fsdp import ShardingStrategy, fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from autockpt.executors.sharding.adapters.collectors import declared
from autockpt.executors.sharding.adapters.fsdp2_gathered import gathering_units, shard_again
from autockpt.executors.sharding.fqns import Assembled, plain_fqn
from autockpt.executors.sharding.local_shard import LocalShard, follow, holding_of, whole_of
from autockpt.executors.sharding.optimizers import held_state, owns_state, state_of
from autockpt.values.errors import ConfigError

Tensors = Iterator[tuple[str, torch.Tensor, LocalShard, torch.Tensor]]
"""(name, local tensor, its holding, the tensor in the bare model)"""

CASES: dict[str, tuple[tuple[int, ...], Callable[[], Tensors]]] = {}
"""By name the numbers of ranks it runs on, and the case."""


def case(*world_sizes: int) -> Callable[[Callable[[], Tensors]], Callable[[], Tensors]]:
    """Registers a case."""

    def register(function: Callable[[], Tensors]) -> Callable[[], Tensors]:
        CASES[function.__name__] = (world_sizes, function)
        return function

    return register


class Tied(nn.Module):
    """Odd sizes, a scalar, and one weight under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(9, 5)
        self.norm = nn.Linear(5, 3)
        self.mix = nn.Linear(3, 5, bias=False)
        self.head = nn.Linear(5, 9, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Logits."""
        hidden = self.mix(self.norm(self.embed(tokens)).relu())
        logits: torch.Tensor = self.head(hidden)
        return logits


def bare_model() -> tuple[Tied, dict[str, torch.Tensor]]:
    """The same on all ranks, and a copy of its parameters by name."""
    torch.manual_seed(7)
    model = Tied()
    return model, {name: p.detach().clone() for name, p in model.named_parameters()}


def parameters(module: nn.Module, bare: dict[str, torch.Tensor]) -> Tensors:
    """Every parameter that is told of, and a plain one as whole."""
    known = declared([module])
    for name, parameter in module.named_parameters():
        plain = plain_fqn(name)
        holding = holding_of(parameter) or known.get(id(parameter)) or whole_of(parameter)
        yield plain, local(parameter), holding, bare[plain]


def local(tensor: Any) -> torch.Tensor:
    """The bytes of this rank."""
    return tensor.to_local().detach() if hasattr(tensor, "to_local") else tensor.detach()


@case(2, 4)
def ddp() -> Tensors:
    """Everything on every rank."""
    model, bare = bare_model()
    yield from parameters(nn.parallel.DistributedDataParallel(model), bare)


@case(2, 4)
def fsdp2() -> Tensors:
    """Dimension 0 is cut; with 4 ranks the biases of 3 leave one without any."""
    model, bare = bare_model()
    yield from parameters(fully_shard(model), bare)


@case(2)
def fsdp2_after_evaluation() -> Tensors:
    """A forward without a backward leaves the root's parameters gathered."""
    model, bare = bare_model()
    wrapped = fully_shard(model)
    with torch.no_grad():
        wrapped(torch.arange(4))
    assert not any(hasattr(parameter, "to_local") for parameter in wrapped.parameters())
    shard_again(gathering_units(wrapped))
    assert all(hasattr(parameter, "to_local") for parameter in wrapped.parameters())
    yield from parameters(wrapped, bare)


@case(4)
def hsdp() -> Tensors:
    """Two copies, each on two ranks."""
    model, bare = bare_model()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("copies", "parts"))
    yield from parameters(fully_shard(model, mesh=mesh), bare)


def _tensor_parallel(mesh: Any) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    model, bare = bare_model()
    plan = {"norm": ColwiseParallel(), "mix": RowwiseParallel()}
    return parallelize_module(model, mesh, plan), bare


@case(2)
def tensor_parallel() -> Tensors:
    """Columns, rows, and parameters outside the plan, which stay plain."""
    yield from parameters(*_tensor_parallel(init_device_mesh("cpu", (2,))))


@case(4)
def fsdp2_over_tensor_parallel() -> Tensors:
    """The rows of a column-parallel weight are cut twice, in strided order."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model, bare = _tensor_parallel(mesh["tp"])
    for module in (model.norm, model.mix):  # the plain rest stays plain
        fully_shard(module, mesh=mesh["dp"])  # type: ignore[arg-type]
    yield from parameters(model, bare)


@case(8)
def hsdp_over_tensor_parallel() -> Tensors:
    """Three axes: copies, FSDP2's parts, tensor parallelism."""
    mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("copies", "parts", "tp"))
    model, bare = _tensor_parallel(mesh["tp"])
    for module in (model.norm, model.mix):  # the plain rest stays plain
        fully_shard(module, mesh=mesh["copies", "parts"])  # type: ignore[arg-type]
    yield from parameters(model, bare)
    tensor = torch.arange(35.0).view(7, 5)
    shared = distribute_tensor(tensor, mesh, [Shard(0), Shard(1), Shard(0)])
    holding = holding_of(shared)
    assert holding is not None
    yield "all axes", local(shared), holding, tensor


@case(2, 4)
def tensors_of_meshes() -> Tensors:
    """Tensors of no module: scalars, fewer rows than ranks, one dimension cut twice."""
    mesh = init_device_mesh("cpu", (dist.get_world_size() // 2, 2))
    whole, row = torch.arange(13.0), torch.arange(5.0).view(1, 5)
    for name, tensor, places in (
        ("scalar", torch.tensor(3.0), [Replicate(), Replicate()]),
        ("twice", whole, [Shard(0), Shard(0)]),
        ("across", row, [Replicate(), Shard(1)]),
        ("one row", row, [Shard(0), Shard(0)]),
        ("copies", whole, [Replicate(), Replicate()]),
    ):
        shared = distribute_tensor(tensor, mesh, places)
        holding = holding_of(shared)
        assert holding is not None
        yield name, local(shared), holding, tensor


@case(2, 4)
def fsdp1_slices() -> Tensors:
    """Every parameter is a 1-D slice of the flat one, or empty; Adam's state has its shape."""
    model, bare = bare_model()
    wrapped = Fsdp1(model, use_orig_params=True, device_id=torch.device("cpu"))
    optimizer = torch.optim.Adam(wrapped.parameters())
    yield from parameters(wrapped, bare)
    with Fsdp1.summon_full_params(wrapped), pytest.raises(ConfigError, match="has gathered"):
        declared([wrapped])
    wrapped(torch.arange(4)).sum().backward()
    optimizer.step()
    known = declared([wrapped])
    with Fsdp1.summon_full_params(wrapped, writeback=False):
        now = {plain_fqn(name): p.detach().clone() for name, p in wrapped.named_parameters()}
    for name, tensor, holding, _ in parameters(wrapped, bare):
        yield f"{name} after a step", tensor, holding, now[name]
    for parameter, state in optimizer.state.items():
        moments = follow(state["exp_avg"], parameter, known[id(parameter)])
        assert moments == known[id(parameter)]
        assert moments.count == state["exp_avg"].numel()


@case(2, 4)
def fsdp1_units() -> Tensors:
    """A unit in a unit: both flat."""
    model, bare = bare_model()
    model.mix = Fsdp1(model.mix, use_orig_params=True, device_id=torch.device("cpu"))  # type: ignore[assignment]
    wrapped = Fsdp1(model, use_orig_params=True, device_id=torch.device("cpu"))
    yield from parameters(wrapped, bare)
    strided = nn.Linear(3, 5)
    strided.weight = nn.Parameter(torch.ones(3, 5).t())
    with pytest.raises(ConfigError, match=r"^weight: is not contiguous"):
        declared([Fsdp1(strided, use_orig_params=True, device_id=torch.device("cpu"))])


@case(2, 4)
def fsdp1_flat() -> Tensors:
    """One 1-D tensor of its own; its last range is padded."""
    model, bare = bare_model()
    order = ("embed.weight", "norm.weight", "norm.bias", "mix.weight")
    flat = torch.cat([bare[name].flatten() for name in order])
    wrapped = Fsdp1(model, use_orig_params=False, device_id=torch.device("cpu"))
    ((name, parameter),) = wrapped.named_parameters()
    yield plain_fqn(name), local(parameter), declared([wrapped])[id(parameter)], flat


@case(4)
def fsdp1_hybrid() -> Tensors:
    """Two copies, each a flat tensor on two ranks."""
    model, bare = bare_model()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("copies", "parts"))
    wrapped = Fsdp1(
        model, use_orig_params=True, device_mesh=mesh, device_id=torch.device("cpu"),
        sharding_strategy=ShardingStrategy.HYBRID_SHARD,
    )  # fmt: skip
    yield from parameters(wrapped, bare)


@case(2)
def fsdp1_no_shard() -> Tensors:
    """As DDP."""
    model, bare = bare_model()
    wrapped = Fsdp1(
        model, use_orig_params=True, device_id=torch.device("cpu"),
        sharding_strategy=ShardingStrategy.NO_SHARD,
    )  # fmt: skip
    yield from parameters(wrapped, bare)


@case(2, 4)
def zero_redundancy() -> Tensors:
    """The state of every parameter stands on the one rank that owns it."""
    from torch.distributed.optim import ZeroRedundancyOptimizer  # warns when it is imported

    model, bare = bare_model()
    wrapped = nn.parallel.DistributedDataParallel(model)
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=0.1)
    wrapped(torch.arange(4)).sum().backward()
    whole = {name: torch.zeros_like(p) for name, p in bare.items()}
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        whole[name] = parameter.grad * 0.1  # Adam's first moment after one step, beta1 = 0.9
    optimizer.step()
    known, state = declared([wrapped]), state_of(optimizer)
    for name, parameter in model.named_parameters():
        assert owns_state(optimizer, parameter) == (parameter in state)
        assert known[id(parameter)].holders == tuple(range(dist.get_world_size()))
        if owns_state(optimizer, parameter):
            holding = held_state(optimizer, parameter, known[id(parameter)])
            yield f"{name}.exp_avg", state[parameter]["exp_avg"], holding, whole[name]
        else:
            nothing = LocalShard(global_shape=tuple(parameter.shape), boxes=())
            yield f"{name}.exp_avg", torch.empty(0), nothing, whole[name]


@case(4)
def pipeline_stages() -> Tensors:
    """Two hand-made stages that count their layers from 0, each on two ranks with DDP."""
    torch.manual_seed(7)
    layers = [nn.Linear(3, 3) for _ in range(4)]
    bare = {
        f"layers.{i}.{name}": p.detach().clone()
        for i, layer in enumerate(layers)
        for name, p in layer.named_parameters()
    }
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    stage = dist.get_rank() // 2
    own = nn.Sequential(*layers[2 * stage : 2 * stage + 2])
    wrapped = nn.parallel.DistributedDataParallel(own, process_group=groups[stage])
    at = {f"layers.{2 * stage + i}": layer for i, layer in enumerate(own)}
    yield from parameters(Assembled(at=at, wrappers=[wrapped]), bare)


def seen(tensor: torch.Tensor, holding: LocalShard, bare: torch.Tensor) -> dict[str, Any]:
    """What one rank writes down of one tensor."""
    parts = [
        bare[tuple(slice(o, o + n) for o, n in zip(box.offset, box.shape, strict=True))].flatten()
        for box in holding.boxes
    ]
    expected = torch.cat(parts) if parts else bare.new_empty(0)
    return {
        "global_shape": list(holding.global_shape),
        "boxes": [[list(box.offset), list(box.shape)] for box in holding.boxes],
        "holders": list(holding.holders),
        "true_shape": list(bare.shape),
        "elements": tensor.numel(),
        "same": torch.equal(tensor.flatten()[: holding.count], expected),
    }


def run_cases(rank: int, world_size: int, folder: Path) -> None:
    """All cases of a number of ranks; an error of one is its result."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/{world_size}.store", rank=rank,
        world_size=world_size, timeout=datetime.timedelta(seconds=60),
    )  # fmt: skip
    found: dict[str, Any] = {}
    for name, (sizes, function) in CASES.items():
        if world_size in sizes:
            try:
                found[name] = {n: seen(t, h, bare) for n, t, h, bare in function()}
            except Exception:
                found[name] = traceback.format_exc()
    (folder / f"{world_size}.{rank}.json").write_text(json.dumps(found))
    dist.barrier()


def main(folder: Path, world_sizes: list[int]) -> int:
    """Forks the ranks before torch has threads; the exit status of the worst."""
    worst = 0
    for world_size in world_sizes:
        children = []
        for rank in range(world_size):
            pid = os.fork()
            if pid == 0:
                status = 1
                try:
                    run_cases(rank, world_size, folder)
                    status = 0
                except BaseException:
                    traceback.print_exc()
                finally:
                    sys.stderr.flush()
                    os._exit(status)
            children.append(pid)
        worst = max(worst, *(os.waitpid(pid, 0)[1] for pid in children))
    return 1 if worst else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), [int(size) for size in sys.argv[2:]]))
