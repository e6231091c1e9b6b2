"""Small deterministic trainings that hold everything a real one holds, and a digest of their end.

    job = build(spec); train(job, autockpt.attach(**job.attached, run_dir=...)); digest(job)

Two undisturbed runs of a spec end in the same digest, to the bit; so must a run that was killed.
`run` does all of it in a process of its own and writes what the tests compare.
"""

import dataclasses
import datetime
import hashlib
import json
import mmap
import os
import random
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from autockpt.run_directory import RunDirectory
from autockpt.values.plan import CheckpointPlan, Decision, Expected, Staging, TierPlan

FEATURES = 12
CLASSES = 5
OUTLIVES_S = 0.5
"""From the start of a forked process to its end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSpec:
    """Which training."""

    steps: int = 40
    seed: int = 0
    optimizer: str = "adamw"
    """A key of OPTIMIZERS."""
    loader: str = "plain"
    """plain, workers, persistent, generator (torch DataLoaders) or stateful."""
    model: str = "plain"
    """plain, tied, bf16, conv (channels last) or odd (buffers of every dtype)."""
    scaler: bool = False
    """Trains with a (CPU) GradScaler."""
    two_optimizers: bool = False
    grow_at: int | None = None
    """The step at which a parameter group is added; 0: before the training (and attach)."""
    propose_at: int | None = None
    """The step at which rank 0 proposes a plan with twice the intervals."""
    width: int = 32
    pace_s: float = 0.0
    """Slept in every step: gives kills something to hit."""
    ddp: bool = False
    """Ranks average their gradients; they meet at the file TEST_STORE in the environment."""
    stray_at: int | None = None
    """The step in which rank 1 changes a parameter that should be equal on all ranks."""
    forks: bool = False
    """Forks a process, as loaders do, that outlives it with all that it inherits."""


class Net(nn.Module):
    """Dropout (RNG), batch norm (buffers that the forward changes), a scalar parameter."""

    def __init__(self, spec: JobSpec) -> None:
        super().__init__()
        self.inner = nn.Linear(FEATURES, spec.width)
        self.norm = nn.BatchNorm1d(spec.width)
        self.dropout = nn.Dropout(0.2)
        self.middle = nn.Linear(spec.width, spec.width)
        self.again = nn.Linear(spec.width, spec.width)
        if spec.model == "tied":
            self.again.weight = self.middle.weight
        self.head = nn.Linear(spec.width, CLASSES)
        self.gain = nn.Parameter(torch.ones(()))
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        if spec.model == "conv":
            self.mix = nn.Conv2d(3, 3, 3, padding=1).to(memory_format=torch.channels_last)
        if spec.model == "odd":
            for name, value in odd_buffers().items():
                self.register_buffer(name, value)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Logits [batch, classes]; counts what it saw."""
        self.seen += len(x)
        if hasattr(self, "phase"):
            self.phase *= torch.tensor(1j, dtype=self.phase.dtype)
        if hasattr(self, "mix"):
            images = x.view(-1, 3, 2, 2).to(memory_format=torch.channels_last)
            x = self.mix(images).reshape(len(x), FEATURES)
        x = self.dropout(F.relu(self.norm(self.inner(x))))
        return self.gain * self.head(x + self.again(torch.tanh(self.middle(x))))


def odd_buffers() -> dict[str, torch.Tensor]:
    """What a container of tensors trips over: 0-d, empty, complex, 8-bit floats, odd strides."""
    values = torch.linspace(-2, 2, 6)
    buffers = {
        "empty": torch.zeros(0, 3),
        "phase": torch.tensor(1 + 2j, dtype=torch.complex128),
        "waves": torch.complex(values, -values),
        "flagged": values > 0,
        "half_float": values.half(),
        "brain_float": values.bfloat16(),
        "wide_float": values.double(),
        "small": values.to(torch.int8),
        "unsigned": torch.arange(4, dtype=torch.int32).to(torch.uint16),
        "strided": torch.arange(12.0).view(3, 4).t(),
        "not_a_number": torch.tensor([float("nan"), float("inf"), -0.0]),
    }
    for name in ("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz"):
        dtype = getattr(torch, name, None)
        if dtype is not None:
            buffers[name] = values.to(dtype)
    return buffers


OPTIMIZERS: dict[str, Any] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, nesterov=True),
    "plain-sgd": lambda p: torch.optim.SGD(p, lr=0.05),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01),
    "foreach": lambda p: torch.optim.AdamW(p, lr=0.01, foreach=True),
    "fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "amsgrad": lambda p: torch.optim.AdamW(p, lr=0.01, amsgrad=True),
    "tensor-lr": lambda p: torch.optim.AdamW(p, lr=torch.tensor(0.01)),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.05),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.5, centered=True),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=0.05),
    "lbfgs": lambda p: torch.optim.LBFGS(p, lr=0.1, max_iter=3, history_size=4),
    "fp32-states": lambda p: Fp32Momentum(p, lr=0.05),
}
"""By name; each takes parameters."""


class Fp32Momentum(torch.optim.Optimizer):
    """SGD whose state is fp32 whatever the parameter is, with a list and numbers among it."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, {"lr": lr, "betas": (0.9, 0.5), "note": None})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Updates a master copy and rounds it into the parameter."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["master"] = parameter.detach().float().clone()
                    state["speed"] = torch.zeros_like(state["master"])
                    state["norms"] = []
                    state["count"] = 0
                state["speed"].mul_(group["betas"][0]).add_(parameter.grad.float())
                state["master"].sub_(state["speed"], alpha=group["lr"])
                state["norms"] = [*state["norms"], float(state["speed"].norm())][-3:]
                state["count"] += 1
                parameter.copy_(state["master"])


class StatefulLoader:
    """Batches in a new order each epoch; says and takes back where it is."""

    def __init__(self, inputs: torch.Tensor, labels: torch.Tensor, batch: int, seed: int) -> None:
        self.inputs, self.labels, self.batch, self.seed = inputs, labels, batch, seed
        self.epoch = self.position = 0

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """The rest of this epoch."""
        generator = torch.Generator().manual_seed(self.seed + self.epoch)
        order = torch.randperm(len(self.inputs), generator=generator)
        epoch = self.epoch
        while self.epoch == epoch:
            rows = order[self.position : self.position + self.batch]
            self.position += self.batch
            if self.position >= len(order):
                self.epoch, self.position = epoch + 1, 0
            yield self.inputs[rows], self.labels[rows]

    def state_dict(self) -> dict[str, int]:
        """Where the next batch comes from."""
        return {"epoch": self.epoch, "position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go there."""
        self.epoch, self.position = state["epoch"], state["position"]


@dataclass(slots=True, kw_only=True)
class Job:
    """What is trained, and what it is trained with."""

    spec: JobSpec
    model: Net
    caller: nn.Module
    """The model, or what wraps it."""
    optimizers: dict[str, torch.optim.Optimizer]
    scheduler: Any
    scaler: Any
    loader: Any
    grown: bool = False
    losses: list[float] = field(default_factory=list)

    @property
    def attached(self) -> dict[str, Any]:
        """Keyword arguments of `autockpt.attach`."""
        optimizers = self.optimizers
        single = optimizers["optimizer"] if len(optimizers) == 1 else optimizers
        return {
            "model": self.caller,
            "optimizer": single,
            "scheduler": self.scheduler,
            "scaler": self.scaler,
            "data": self.loader,
        }


def build(spec: JobSpec, *, rank: int = 0) -> Job:
    """The job before its first step; every rank draws its own randomness from then on."""
    torch.manual_seed(spec.seed)
    model = Net(spec)
    if spec.model == "bf16":
        model = model.to(torch.bfloat16)
    inputs = torch.randn(61, FEATURES)
    labels = torch.randint(CLASSES, (61,))
    for seed in (torch.manual_seed, random.seed, np.random.seed):
        seed(1000 * spec.seed + rank)
    parameters = list(model.parameters())
    make = OPTIMIZERS[spec.optimizer]
    if spec.two_optimizers:
        half = len(parameters) // 2
        optimizers = {
            "body": make(parameters[:half]),
            "head": torch.optim.SGD(parameters[half:], lr=0.1, momentum=0.5),
        }
    else:
        optimizers = {"optimizer": make(parameters)}
    first = next(iter(optimizers.values()))
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(first, T_max=60)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=7)
    caller: nn.Module = model
    if spec.ddp:
        # Else three ranks or more regroup their gradients after a process's first iteration.
        many = int(os.environ.get("WORLD_SIZE", "1")) > 2
        caller = nn.parallel.DistributedDataParallel(model, find_unused_parameters=many)
    job = Job(
        spec=spec, model=model, caller=caller, optimizers=optimizers, scheduler=scheduler,
        scaler=scaler if spec.scaler else None, loader=make_loader(spec, inputs, labels),
    )  # fmt: skip
    if spec.grow_at == 0:
        grow(job)
    return job


def make_loader(spec: JobSpec, inputs: torch.Tensor, labels: torch.Tensor) -> Any:
    """The loader of a spec; 61 samples in batches of 8, the last one short but not of one."""
    if spec.loader == "stateful":
        return StatefulLoader(inputs, labels, 8, spec.seed)
    data = TensorDataset(inputs, labels)
    if spec.loader == "workers":
        return DataLoader(data, batch_size=8, shuffle=True, num_workers=2)
    if spec.loader == "persistent":
        return DataLoader(data, batch_size=8, shuffle=True, num_workers=1, persistent_workers=True)
    if spec.loader == "generator":
        own = torch.Generator().manual_seed(spec.seed)
        return DataLoader(data, batch_size=8, shuffle=True, generator=own)
    return DataLoader(data, batch_size=8, shuffle=True)


def train_step(job: Job, step: int, batch: Any) -> None:
    """One iteration."""
    spec = job.spec
    if spec.grow_at is not None and step >= spec.grow_at and not job.grown:
        grow(job)
    inputs, labels = batch
    noise = torch.from_numpy(np.random.random(inputs.shape)).float() * random.random()
    inputs = (inputs + 0.1 * noise).to(job.model.head.weight.dtype)

    def closure() -> torch.Tensor:
        for optimizer in job.optimizers.values():
            optimizer.zero_grad()
        logits = job.caller(inputs).float()
        if job.grown:
            logits = logits * job.model.extra
        loss = F.cross_entropy(logits, labels)
        (job.scaler.scale(loss) if job.scaler else loss).backward()
        return loss

    if spec.optimizer == "lbfgs":
        loss: Any = job.optimizers["optimizer"].step(closure)  # type: ignore[arg-type]
    else:
        loss = closure()
        for optimizer in job.optimizers.values():
            job.scaler.step(optimizer) if job.scaler else optimizer.step()
        if job.scaler:
            job.scaler.update()
    job.losses.append(loss.detach().item())
    job.scheduler.step()
    if step == spec.stray_at and os.environ.get("RANK") == "1":
        job.model.head.weight.data.mul_(1.5)
    if spec.pace_s:
        time.sleep(spec.pace_s)


def grow(job: Job) -> None:
    """A parameter is added to the model and, as a group, to its optimizer."""
    extra = nn.Parameter(torch.full((CLASSES,), 1.5))
    job.model.register_parameter("extra", extra)
    first = next(iter(job.optimizers.values()))
    first.add_param_group({"params": [extra], "lr": 0.002})
    job.scheduler.base_lrs.append(0.002)
    first.param_groups[-1]["initial_lr"] = 0.002
    job.grown = True


def bare(job: Job) -> str:
    """Trains without autockpt: the digest of an undisturbed run."""
    step = 0
    while step < job.spec.steps:
        for batch in job.loader:
            train_step(job, step, batch)
            step += 1
            if step == job.spec.steps:
                break
    return digest(job)


def digest(job: Job) -> str:
    """Everything that decides how the training goes on, to the bit."""
    hasher = hashlib.sha256()
    feed(hasher, dict(job.model.named_parameters()))
    feed(hasher, dict(job.model.named_buffers()))
    parts = [*job.optimizers.values(), job.scheduler, job.scaler]
    feed(hasher, [part.state_dict() for part in parts if part is not None])
    if job.spec.loader == "stateful":
        feed(hasher, job.loader.state_dict())
    feed(hasher, [random.getstate(), np.random.get_state(), torch.get_rng_state()])
    return hasher.hexdigest()


def feed(hasher: Any, value: Any) -> None:
    """Nested state into a hash: types, shapes, bits; mappings in order of their keys."""
    if isinstance(value, np.ndarray):
        value = torch.from_numpy(value)
    if isinstance(value, torch.Tensor):
        hasher.update(f"{value.dtype} {list(value.shape)}\n".encode())
        flat = value.detach().contiguous().reshape(-1)
        if flat.numel():
            hasher.update(flat.view(torch.uint8).numpy())
    elif isinstance(value, Mapping):
        hasher.update(f"mapping {len(value)}\n".encode())
        for key in sorted(value, key=repr):
            feed(hasher, key)
            feed(hasher, value[key])
    elif isinstance(value, list | tuple):
        hasher.update(f"{type(value).__name__} {len(value)}\n".encode())
        for item in value:
            feed(hasher, item)
    else:
        hasher.update(f"{type(value).__name__} {value!r}\n".encode())


# --- plans ---------------------------------------------------------------------------------------


def plan(
    *, memory: int = 2, disk: int = 6, version: int = 1, slots: int = 3, retune: bool = False,
    codec: dict[str, str] | None = None, chain: int = 0, **staging: Any,
) -> CheckpointPlan:  # fmt: skip
    """A plan with these intervals, small chunks and no re-tuning."""
    return CheckpointPlan(
        plan_id="test",
        version=version,
        fingerprint="",
        tiers=(
            TierPlan(tier="memory", interval_steps=memory),
            TierPlan(tier="disk", interval_steps=disk, codec=codec or {}, chain=chain),
        ),
        staging=Staging(**{"chunk_bytes": 2**16, **staging}),
        slots=slots,
        retune=retune,
    )


def decision(chosen: CheckpointPlan) -> Decision:
    """A decision that only carries a plan."""
    nothing = Expected(
        stall_s=0.0, waste=0.0, waste_low=0.0, waste_high=0.0, checkpoint_waste=0.0,
        persist_s=0.0, recovery_memory_s=0.0, recovery_disk_s=0.0,
    )  # fmt: skip
    return Decision(plan=chosen, choices=(), expected=nothing)


def prepare(run_dir: str | Path, chosen: CheckpointPlan) -> str:
    """A run directory in which this plan is decided."""
    files = RunDirectory.create(run_dir)
    files.write_decision(decision(chosen))
    return str(run_dir)


# --- a process -----------------------------------------------------------------------------------


class StepCell:
    """A number in a file that another process reads while it changes."""

    def __init__(self, path: Path) -> None:
        if not path.exists():
            path.write_bytes(bytes(8))
        with path.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), 8)

    def get(self) -> int:
        """The newest step."""
        return int.from_bytes(self._map[:8], "little")

    def set(self, step: int) -> None:
        """Tells it."""
        self._map[:8] = step.to_bytes(8, "little")


def run(spec: JobSpec, run_dir: str, out: str, *, attach: bool = True) -> None:
    """The whole training in this process; appends its beginning and end to `out`/attempts.jsonl."""
    folder = Path(out)
    cell = StepCell(folder / "step")
    rank = int(os.environ.get("RANK", "0"))
    if spec.ddp:
        torch.distributed.init_process_group(
            "gloo", init_method=f"file://{os.environ['TEST_STORE']}", rank=rank,
            world_size=int(os.environ["WORLD_SIZE"]), timeout=datetime.timedelta(seconds=60),
        )  # fmt: skip
    job = build(spec, rank=rank)
    if not attach:
        say(folder, event="finished", rank=rank, digest=bare(job))
        return
    import autockpt

    ckpt = autockpt.attach(**job.attached, run_dir=run_dir)
    say(folder, event="started", rank=rank, step=ckpt.step_count)
    if spec.forks and os.fork() == 0:
        time.sleep(OUTLIVES_S)
        os._exit(0)
    for step, batch in ckpt.batches(spec.steps):
        cell.set(step + 1)
        train_step(job, step, batch)
        if step == spec.propose_at and rank == 0:
            ckpt._plans.propose(plan(memory=4, disk=4, version=2))
    say(folder, event="finished", rank=rank, digest=digest(job))


def run_order(spec: dict[str, Any], run_dir: str, out: str, attach: bool) -> None:
    """`run` with a spec as JSON."""
    run(JobSpec(**spec), run_dir, out, attach=attach)


def warm() -> None:
    """Lazy imports of the first optimizer step: a process that forks trainers does it once."""
    bare(build(JobSpec(steps=1)))


def say(folder: Path, **facts: Any) -> None:
    """One line in one write: readers never see half of it."""
    line = json.dumps({"pid": os.getpid(), **facts}) + "\n"
    fd = os.open(folder / "attempts.jsonl", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.write(fd, line.encode())
    os.close(fd)


def said(folder: Path) -> list[dict[str, Any]]:
    """Everything that was said, oldest first."""
    try:
        text = (folder / "attempts.jsonl").read_text()
    except FileNotFoundError:
        return []
    return [json.loads(line) for line in text.splitlines()]


def spec_data(spec: JobSpec) -> dict[str, Any]:
    """As JSON."""
    return dataclasses.asdict(spec)
