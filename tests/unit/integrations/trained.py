"""Trained jobs and committed generations of them, for the bridges."""

from pathlib import Path
from typing import Any

import torch

from autockpt.executors.state.live_state import LiveState
from autockpt.executors.storage.directory.directory import CheckpointDirectory
from autockpt.values.generation import Generation
from tests.unit.executors.checkpoints import commit_images, commit_state
from tests.unit.executors.states import snapshot

FIRST = Generation(term=1, step=7)


class Net(torch.nn.Module):
    """Tied weights, a buffer, bfloat16, a parameter that no optimizer has and a 0-d one."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(30, 16)
        self.norm = torch.nn.BatchNorm1d(16)
        self.low = torch.nn.Linear(16, 16, dtype=torch.bfloat16)
        self.head = torch.nn.Linear(16, 30, bias=False)
        self.head.weight = self.embed.weight
        self.scale = torch.nn.Parameter(torch.tensor(1.0))
        self.frozen = torch.nn.Parameter(torch.arange(5.0), requires_grad=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.norm(self.embed(tokens))
        hidden = self.low(hidden.bfloat16()).float() * self.scale
        return self.head(hidden)


Job = tuple[Net, torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler]


def new_job(seed: int = 0) -> Job:
    """Not trained yet; two parameter groups, one of which has another learning rate."""
    torch.manual_seed(seed)
    net = Net()
    groups = [
        {"params": [*net.low.parameters()], "lr": 1e-2},
        {"params": [p for n, p in net.named_parameters() if not n.startswith(("low", "frozen"))]},
    ]
    optimizer = torch.optim.AdamW(groups, lr=1e-3)
    return net, optimizer, torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=10)


def train(job: Job, steps: int = 3) -> None:
    """A few iterations."""
    net, optimizer, scheduler = job
    for _ in range(steps):
        optimizer.zero_grad()
        net(torch.randint(0, 30, (8,))).square().sum().backward()
        optimizer.step()
        scheduler.step()


def trained_job(seed: int = 0) -> Job:
    """Three steps along."""
    job = new_job(seed)
    train(job)
    return job


def state_of(job: Job, **others: Any) -> LiveState:
    """As `attach` would take it."""
    net, optimizer, scheduler = job
    return LiveState.of(model=net, optimizer=optimizer, scheduler=scheduler, **others)


def opened_directory(path: Path) -> tuple[CheckpointDirectory, str]:
    """A checkpoint directory in its first term, and its run id."""
    directory = CheckpointDirectory(str(path))
    run_id = directory.open()
    if not any((path / "terms").glob("t-*")):
        directory.claim(run_id, "launch", 0, force=False)
    return directory, run_id


def saved(path: Path, job: Job, generation: Generation = FIRST, **how: Any) -> str:
    """A committed generation of a job in a checkpoint directory; its folder."""
    others = how.pop("others", {})
    directory, run_id = opened_directory(path)
    return commit_state(directory, run_id, generation, state_of(job, **others), step=7, **how)


def saved_tensors(path: Path, tensors: dict[str, torch.Tensor]) -> str:
    """A generation of a model of given tensors, and no optimizer."""
    module = torch.nn.Module()
    for name, tensor in tensors.items():
        module.register_buffer(name, tensor)
    directory, run_id = opened_directory(path)
    return commit_state(directory, run_id, FIRST, LiveState.of(model=module), step=7)


def saved_ranks(path: Path, jobs: list[Job]) -> str:
    """One generation of several ranks."""
    return saved_states(path, [state_of(job) for job in jobs])


def saved_states(path: Path, states: list[LiveState]) -> str:
    """One generation of ranks of given states."""
    images, shooters = [], []
    for state in states:
        arena, shooter = snapshot(state)
        assert shooter.layout is not None
        images.append(arena.view[: shooter.layout.image_bytes])
        shooters.append(shooter)
    directory, run_id = opened_directory(path)
    folder = commit_images(directory, run_id, FIRST, images, step=7)
    for shooter in shooters:
        shooter.close()
    return folder
