"""Code that changes the state behind the fence's back while the copy stands still.

Whatever it is, there are two ends: the image is the boundary's, or every tensor that is not has
been named, so that the generation is discarded and the next one is good.  Through a session and a
real keeper the same is done in `tests/jobs/kill/test_fence.py`.
"""

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn, update_bn

from autockpt.executors.linux.memory import Arena
from autockpt.executors.snapshot.optimizer_hooks import OptimizerHooks
from autockpt.executors.snapshot.snapshotter import Snapshotter
from autockpt.executors.state.live_state import LiveState
from tests.unit.executors.shots import (
    assert_image,
    held,
    saved,
    shoot,
    slot_for,
    snapshotter,
    state_bytes,
)

FUSED = {"adamw": torch.optim.AdamW, "sgd": torch.optim.SGD, "adagrad": torch.optim.Adagrad}


class Job:
    """A model with running statistics, its optimizer, two averages of it that are saved too."""

    def __init__(self) -> None:
        self.model: Any = torch.nn.Sequential(
            torch.nn.Linear(40, 60), torch.nn.BatchNorm1d(60), torch.nn.Linear(60, 3)
        )
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1, fused=True)
        self.average = AveragedModel(self.model, multi_avg_fn=get_ema_multi_avg_fn(0.5))
        self.swa = AveragedModel(self.model, use_buffers=True)
        self.state = LiveState.of(
            model={"net": self.model, "ema": self.average, "swa": self.swa},
            optimizer=self.optimizer,
        )
        for _ in range(2):
            self.backward()
            self.optimizer.step()
            self.average.update_parameters(self.model)
            self.swa.update_parameters(self.model)
        self.backward()

    def backward(self) -> None:
        """Forward and backward; the forward changes the running statistics."""
        self.optimizer.zero_grad()
        self.model(torch.randn(8, 40)).square().sum().backward()


def fused(name: str) -> Callable[[Job], object]:
    """A step of an optimizer that nobody attached."""

    def change(job: Job) -> None:
        FUSED[name](job.model.parameters(), lr=0.1, fused=True).step()

    return change


def duck(job: Job) -> None:
    """An "optimizer" of somebody's own: no torch.optim, no hook."""
    for parameter in job.model.parameters():
        if parameter.grad is not None:
            parameter.data.sub_(parameter.grad, alpha=0.1)


def own_step(job: Job) -> None:
    """The attached optimizer, and its hook fired for nobody (taken off, or a step of C++)."""
    job.optimizer.step()


def interpolate(job: Job) -> None:
    """Lookahead: weights pulled back between two steps."""
    with torch.no_grad():
        for slow, fast in zip(job.average.parameters(), job.model.parameters(), strict=True):
            fast.lerp_(slow, 0.5)


BEHIND: dict[str, Callable[[Job], object]] = {
    **{f"fused {name}": fused(name) for name in FUSED},
    "fused step of our own": own_step,
    "duck-typed optimizer": duck,
    "lookahead": interpolate,
    "EMA": lambda job: job.average.update_parameters(job.model),
    "SWA with buffers": lambda job: job.swa.update_parameters(job.model),
    "numpy view": lambda job: job.model[2].weight.detach().numpy().__imul__(2),
    "numpy view of a moment": lambda job: job.optimizer.state[job.model[2].weight]["exp_avg"]
    .numpy().__iadd__(1),
    ".data in place": lambda job: job.model[0].weight.data.mul_(0.5),
    ".data replaced": lambda job: setattr(job.model[0].bias, "data", torch.ones(60)),
    ".data replaced by a shorter one": lambda job: setattr(
        job.model[0].bias, "data", torch.ones(7)
    ),
    "half precision": lambda job: job.model.half(),
    "double precision": lambda job: job.model.double(),
    "a moment replaced": lambda job: job.optimizer.state[job.model[2].weight].update(
        exp_avg=torch.ones(3, 60)
    ),
    "the state cleared": lambda job: job.optimizer.state.clear(),
    "a module replaced": lambda job: job.model.__setitem__(2, torch.nn.Linear(60, 3)),
    "a parameter frozen out": lambda job: job.model[2].register_parameter("bias", None),
    "swapped": lambda job: torch.utils.swap_tensors(
        job.model[2].bias, torch.nn.Parameter(torch.ones(3))
    ),
}  # fmt: skip

HARMLESS: dict[str, Callable[[Job], object]] = {
    "running statistics in the forward": Job.backward,
    "a pass in another mode": lambda job: job.model.train(False)(torch.randn(4, 40)),
    "SWA's last statistics": lambda job: update_bn([torch.randn(9, 40)], job.swa),
    "a copy": lambda job: copy.deepcopy(job.model),
    "a schedule": lambda job: job.optimizer.param_groups[0].update(lr=0.5),
    "a new buffer": lambda job: job.model.register_buffer("late", torch.ones(3)),
    "a buffer replaced": lambda job: setattr(job.model[1], "running_var", torch.ones(60)),
    "a save by hand": lambda job: job.model.state_dict(),
}


@pytest.fixture
def job() -> Job:
    """Trained for two steps, with gradients of a third one."""
    torch.manual_seed(3)
    return Job()


def change_while_held(
    job: Job, shooter: Snapshotter, slot: Arena, change: Callable[[Job], object]
) -> list[str]:
    """A snapshot whose every lazy byte is copied after the change; what the fence says."""
    with held(shooter.engine):
        snapshot = shooter.begin(slot, {"step": 1}, lazy=True)
        change(job)
    changed = shooter.fence()
    assert snapshot.error is None
    return changed


@pytest.mark.parametrize("name", BEHIND)
def test_every_tensor_that_is_not_the_boundarys_is_named(job: Job, name: str) -> None:
    """And copied at the boundary from then on, as the session does it, the next image is good."""
    with snapshotter(job.state) as shooter:
        slot, expected = slot_for(shooter), state_bytes(job.state)
        changed = change_while_held(job, shooter, slot, BEHIND[name])
        assert changed
        found = saved(slot)
        torn = {name for name, data in expected.items() if found[name] != data}
        assert torn <= set(changed)
        job.state.not_lazy |= set(changed) & set(job.state.lazy_tensors())
        slot = slot_for(shooter)
        shoot(shooter, slot, 2)
        assert_image(slot, state_bytes(job.state))


@pytest.mark.parametrize("name", ["fused adamw", "EMA", "numpy view", ".data in place"])
def test_the_same_change_is_harmless_once_its_tensors_are_held(job: Job, name: str) -> None:
    """One discarded generation teaches it."""
    with snapshotter(job.state) as shooter:
        slot = slot_for(shooter)
        job.state.not_lazy |= set(change_while_held(job, shooter, slot, BEHIND[name]))
        slot = slot_for(shooter)
        for _ in range(2):
            expected = state_bytes(job.state)
            assert change_while_held(job, shooter, slot, BEHIND[name]) == []
            assert_image(slot, expected)


@pytest.mark.parametrize("name", HARMLESS)
def test_what_was_copied_at_the_boundary_may_change_at_once(job: Job, name: str) -> None:
    """Buffers, groups, modes: no false alarm, and the image is the boundary's."""
    with snapshotter(job.state) as shooter:
        slot, expected = slot_for(shooter), state_bytes(job.state)
        assert change_while_held(job, shooter, slot, HARMLESS[name]) == []
        assert_image(slot, expected)


# --- the hook inside compiled code ---------------------------------------------------------------


@pytest.fixture
def fenced(job: Job) -> Iterator[tuple[Job, Snapshotter, list[Any]]]:
    """A job whose optimizer waits for the snapshot, and what its fences said."""
    said: list[Any] = []
    with snapshotter(job.state) as shooter:

        def before(optimizer: torch.optim.Optimizer | None) -> None:
            if shooter.current is not None:
                said.append(shooter.fence(optimizer))

        hooks = OptimizerHooks([job.optimizer], before, job.state.stepped)
        yield job, shooter, said
        hooks.remove()


@pytest.mark.filterwarnings("ignore")  # dynamo's own, and different with every version
@pytest.mark.parametrize("what", ["step", "iteration"])
def test_a_compiled_step_waits_for_the_copy(fenced: Any, what: str) -> None:
    """Also when forward, backward and step are one compiled function.

    The "eager" backend: what is asked is whether tracing keeps the hook, not what it compiles to.
    """
    job, shooter, said = fenced

    def step() -> None:
        job.optimizer.step()

    def iteration() -> None:
        job.backward()
        job.optimizer.step()

    torch.compiler.reset()
    compiled = torch.compile(iteration if what == "iteration" else step, backend="eager")
    slot = slot_for(shooter)
    for turn in range(3):
        job.backward()
        expected = state_bytes(job.state)
        shooter.begin(slot, {"step": turn}, lazy=True)
        compiled()
        assert said == [[]] * (turn + 1)
        assert_image(slot, expected)
        assert state_bytes(job.state) != expected
    torch.compiler.reset()
