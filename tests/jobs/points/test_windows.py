"""A training attached under `builtin:baft`: snapshots move in the gaps of its pipeline."""

import time
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

import autockpt
from autockpt.values import telemetry as t
from autockpt.values.errors import ConfigError
from autockpt.values.goal import Goal
from autockpt.values.plan import CheckpointPlan, Schedule, Staging
from tests.jobs.points.presets import preset_plan
from tests.support import trainings
from tests.support.live import SPEC, Live, granted

STEPS = 24


@pytest.fixture
def alone() -> Iterator[None]:
    """A gloo group of one rank."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_without_a_pipeline_it_is_plain_lazy_copying_and_says_why(live: Live) -> None:
    """Nothing is held back; the training ends bit for bit as without a checkpoint."""
    whole = trainings.bare(trainings.build(SPEC))
    job, ckpt = live.attach(plan=preset_plan("baft", memory=4, disk=4))
    for step, batch in ckpt.batches(SPEC.steps):
        trainings.train_step(job, step, batch)
        granted(ckpt)
    used = live.events(t.IdleWindowsUsed)
    assert used
    assert all(event.window_bytes == 0 for event in used)
    assert "no windows known yet" in used[-1].reason
    assert trainings.digest(job) == whole


class Slow(torch.nn.Module):
    """A stage in whose loop something else takes its time between two chunks."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(512, 512)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Computes."""
        out: torch.Tensor = self.layer(x)
        return out


def pausing(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """A loss between forward and backward chunks: a gap that every iteration has."""
    time.sleep(0.01)
    return ((output - target) ** 2).mean()


def pipeline(live: Live, plan: CheckpointPlan, steps: int, goal: Goal | None = None) -> None:
    """Trains a pipeline of one stage under a plan, a checkpoint at every boundary."""
    trainings.prepare(live.run_dir, plan)
    model = Slow()
    stage = PipelineStage(model, 0, 1, torch.device("cpu"))
    schedule = Schedule1F1B(stage, 4, loss_fn=pausing)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    ckpt = autockpt.attach(model=model, optimizer=optimizer, run_dir=live.run_dir, goal=goal)
    live._sessions.append(ckpt)
    batch = torch.randn(8, 512)
    for _ in ckpt.steps(steps):
        schedule.step(batch, target=batch)
        optimizer.step()
        optimizer.zero_grad()
        granted(ckpt)


@pytest.mark.usefixtures("alone")
def test_in_a_pipeline_the_bytes_move_in_its_windows(live: Live) -> None:
    """The chunks of a real schedule, hooks and gate and copy thread as a user gets them."""
    pipeline(live, preset_plan("baft", memory=1, disk=0), STEPS)
    used = live.events(t.IdleWindowsUsed)
    late = [event for event in used if not event.reason]
    assert late, [event.reason for event in used]
    assert sum(e.window_bytes for e in late) > 0.5 * sum(
        e.window_bytes + e.overlap_bytes + e.fence_bytes for e in late
    )
    drawn = [event for event in late if event.windows_s]
    assert drawn
    assert drawn[0].moved_s
    assert live.events(t.SettingMeasured) == []


@pytest.mark.usefixtures("alone")
def test_schedules_that_are_compared_take_turns_and_tell_what_they_cost(live: Live) -> None:
    """In whole rounds, windows only once they are known; held back are only those in windows."""
    compared: tuple[Schedule, ...] = ("windows", "lazy", "blocking")
    plan = preset_plan("baft", memory=1, disk=0)
    pipeline(live, replace(plan, staging=replace(plan.staging, compare=compared)), STEPS)
    tried = live.events(t.SettingMeasured)
    assert {event.setting for event in tried} == set(compared)
    staging = replace(plan.staging, compare=compared)
    assert [e.setting for e in tried] == [staging.schedule_of(e.step) for e in tried]
    assert all(event.iterations >= 1 and event.total_s > 0.04 for event in tried)
    in_windows = {event.step for event in live.events(t.IdleWindowsUsed)}
    assert in_windows
    assert in_windows >= {event.step for event in tried if event.setting == "windows"}
    assert not in_windows & {event.step for event in tried if event.setting != "windows"}


def test_a_margin_beyond_a_chunk_is_refused() -> None:
    """0..1 of the chunk's time."""
    with pytest.raises(ConfigError, match="window margin"):
        replace(Staging(), window_margin=2.0)
