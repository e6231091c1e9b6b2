"""Two real ranks over gloo that train in several ways and write generations of ours.

One start of processes for all tests: importing torch and meeting costs more than everything else.
Each way leaves its generation in `<root>/<way>` and what it must hold in `<root>/<way>.pt`.
"""

import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
)

from autockpt.executors.linux.memory import Arena, page_align
from autockpt.executors.snapshot.replica_shares import Place
from autockpt.executors.snapshot.snapshotter import Snapshotter
from autockpt.executors.state.live_state import LiveState
from autockpt.values.generation import Generation
from tests.unit.executors.checkpoints import commit_images
from tests.unit.executors.states import Holder
from tests.unit.integrations.trained import opened_directory

WORLD = 2
FULL = StateDictOptions(full_state_dict=True, cpu_offload=True)
PROGRESS = {"step": 2, "data": None}


class Net(torch.nn.Module):
    """Layers of odd sizes, so that no cut is even."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.up = torch.nn.Linear(9, 32)
        self.down = torch.nn.Linear(32, 5)
        self.scale = torch.nn.Parameter(torch.ones(1))
        self.register_buffer("seen", torch.zeros(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(self.up(x))) * self.scale


def build(way: str) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """A network in one way of being parallel, and its optimizer."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import parallel

    net: torch.nn.Module = Net()
    mesh = init_device_mesh("cpu", (WORLD,))
    if way == "ddp":
        net = torch.nn.parallel.DistributedDataParallel(net)
    elif way == "fsdp":
        for layer in (net.up, net.down):
            fully_shard(layer, mesh=mesh)  # type: ignore[arg-type]
        fully_shard(net, mesh=mesh)
    elif way == "tp":
        parallel.parallelize_module(
            net, mesh, {"up": parallel.ColwiseParallel(), "down": parallel.RowwiseParallel()}
        )
    return net, torch.optim.AdamW(net.parameters(), lr=1e-2)


def train(net: torch.nn.Module, optimizer: torch.optim.Optimizer, *, same_data: bool) -> None:
    """Two iterations."""
    generator = torch.Generator().manual_seed(0 if same_data else dist.get_rank())
    for _ in range(2):
        optimizer.zero_grad()
        net(torch.randn(4, 9, generator=generator)).square().sum().backward()
        optimizer.step()


def save(root: Path, way: str, net: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """A generation of both ranks, and the whole state as torch puts it together."""
    state = LiveState.of(model=net, optimizer=optimizer, mine=Holder({"rate": 0.5, "n": 3}))
    shooter = Snapshotter(
        state, memoryview(bytearray(64)), place=Place(rank=dist.get_rank(), nodes=(0,) * WORLD)
    )
    layout = shooter.plan(PROGRESS)
    arena = Arena.anonymous(page_align(layout.image_bytes) + 2**16)
    shooter.begin(arena, PROGRESS, lazy=True)
    assert shooter.fence() == []
    image = root / f"{way}.{dist.get_rank()}.image"
    image.write_bytes(arena.view[: shooter.layout.image_bytes])  # type: ignore[union-attr]
    shooter.close()
    whole = {
        "model": get_model_state_dict(net, options=FULL),
        "optimizer": get_optimizer_state_dict(net, optimizer, options=FULL),
    }
    dist.barrier()
    if dist.get_rank() == 0:
        torch.save(whole, root / f"{way}.pt")
        directory, run_id = opened_directory(root / way)
        images = [memoryview((root / f"{way}.{r}.image").read_bytes()) for r in range(WORLD)]
        commit_images(directory, run_id, Generation(term=1, step=2), images, step=2)
    dist.barrier()


WAYS = ("ddp", "fsdp", "tp")


def _train_and_save(root: Path, way: str) -> None:
    net, optimizer = build(way)
    train(net, optimizer, same_data=way == "tp")
    save(root, way, net, optimizer)


def _save_by_dcp(root: Path) -> None:
    """Two `dcp.save`s of a divided model into one directory; the second one is kept as well."""
    from torch.distributed.checkpoint import save

    from autockpt.integrations.dcp.storage_reader import GenerationWriter

    writer = GenerationWriter(root / "dcp")
    net, optimizer = build("fsdp")
    for turn in (1, 2):
        train(net, optimizer, same_data=False)
        model, moments = get_model_state_dict(net), get_optimizer_state_dict(net, optimizer)
        writer.step = 10 * turn
        own = {f"rank_{dist.get_rank()}": bytes([turn, dist.get_rank()])}
        state = {"model": model, "optimizer": moments, "loader": own}
        save(state, storage_writer=writer)
    whole = {
        "model": get_model_state_dict(net, options=FULL),
        "optimizer": get_optimizer_state_dict(net, optimizer, options=FULL),
    }
    if dist.get_rank() == 0:
        torch.save(whole, root / "dcp.pt")
    dist.barrier()


def _load_elsewhere(root: Path, source: str, way: str) -> None:
    """`dcp.load` of one way's generation into another way's model."""
    from torch.distributed.checkpoint import load

    from autockpt.integrations.dcp.storage_reader import GenerationReader

    net, optimizer = build(way)
    train(net, optimizer, same_data=way == "tp")
    state = {
        "model": get_model_state_dict(net),
        "optimizer": get_optimizer_state_dict(net, optimizer),
    }
    load(state, storage_reader=GenerationReader(root / source))
    _require_equal(root / f"{source}.pt", state)


def _require_equal(expected: Path, state: dict[str, Any]) -> None:
    """All ranks gather what they loaded; it is the other way's whole state."""
    from torch.distributed.tensor import DTensor

    from tests.unit.integrations.formats.convert.test_export import same

    def full(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: full(inner) for key, inner in value.items()}
        if isinstance(value, list):
            return [full(inner) for inner in value]
        return value.full_tensor() if isinstance(value, DTensor) else value

    whole = torch.load(expected, weights_only=True)
    assert same(full(state), whole), expected


def _rank(rank: int, root: str, port: int) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    store = dist.FileStore(f"{root}/store", WORLD)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=WORLD)
    for way in WAYS:
        _train_and_save(Path(root), way)
    _save_by_dcp(Path(root))
    for source, way in (("ddp", "fsdp"), ("fsdp", "tp"), ("tp", "ddp"), ("dcp", "tp")):
        _load_elsewhere(Path(root), source, way)
    dist.barrier()
    os._exit(0)  # meshes hold the group, and gloo's threads may abort a normal end


def run(root: Path) -> None:
    """Everything above, once."""
    mp.spawn(_rank, args=(str(root), 0), nprocs=WORLD)
