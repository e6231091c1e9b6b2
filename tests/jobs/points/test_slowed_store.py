"""A real run whose storage becomes four times as slow, and as fast again: the interval follows."""

import os
import time
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from autockpt.cli.app import run
from autockpt.session import Session
from autockpt.session.boundaries import iteration_clock
from autockpt.session.tuning import autotuner
from autockpt.values.goal import FailureDeclaration, Goal, Limits
from autockpt.values.telemetry import CheckpointDurable, Event, IterationsTimed, PlanChanged
from tests.support import trainings
from tests.support.live import Live

STORE = Path(__file__).parent / "slowed_store"
LIMIT = 0.25
GOAL = Goal(
    limits=Limits(overhead=LIMIT),
    failures=FailureDeclaration(mtbf_s=1.0, process_share=0.5),
)
"""As many checkpoints as the limit allows; the training waits for each, so that it costs what it
takes."""
FAST_S, SLOW_S = 0.03, 0.12
"""Added to every write."""
SETTLED = 8
NOISE = 1.2
"""Four checkpoints on a machine that does other things as well."""
PATIENCE_S = 100.0


@dataclass
class Watched:
    """What the controller hears, by kind."""

    persists: int = 0
    changes: list[PlanChanged] = field(default_factory=list)
    blocks: list[IterationsTimed] = field(default_factory=list)

    def hear(self, event: Event) -> None:
        """One event of this run."""
        self.persists += isinstance(event, CheckpointDurable)
        if isinstance(event, PlanChanged):
            self.changes.append(event)
        if isinstance(event, IterationsTimed):
            self.blocks.append(event)


def set_delay(path: Path, seconds: float) -> None:
    """The store's speed from the next write on."""
    path.with_suffix(".new").write_text(f"{seconds}")
    os.replace(path.with_suffix(".new"), path)


def watched(ckpt: Session, monkeypatch: pytest.MonkeyPatch) -> Watched:
    """Listens where the controller does."""
    assert ckpt._plans.tuner is not None
    seen, controller = Watched(), ckpt._plans.tuner._controller
    observe = controller.observe

    def heard(event: Event) -> None:
        seen.hear(event)
        observe(event)

    monkeypatch.setattr(controller, "observe", heard)
    return seen


@pytest.mark.slow
@pytest.mark.usefixtures("one_thread")
def test_a_real_run_follows_its_storage_both_ways(
    live: Live, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Within eight checkpoints and three changes each; then the overhead is within its limit."""
    delay = tmp_path / "delay"
    set_delay(delay, FAST_S)
    monkeypatch.setenv("SLOWED_STORE", str(delay))
    monkeypatch.setenv("PYTHONPATH", str(STORE))
    monkeypatch.setattr(iteration_clock, "BLOCK_S", 0.2)
    monkeypatch.setattr(autotuner, "THINK_S", 0.05)
    monkeypatch.setattr(autotuner, "ANSWER_S", 1.0)
    start = trainings.plan(memory=0, disk=40, version=0, retune=True, persist="sync")
    job, ckpt = live.attach(trainings.JobSpec(pace_s=0.01), plan=start, goal=GOAL)
    seen, steps = watched(ckpt, monkeypatch), ckpt.batches(100_000)
    deadline = time.monotonic() + PATIENCE_S

    def train(persists: int) -> None:
        enough = seen.persists + persists
        for step, batch in steps:
            trainings.train_step(job, step, batch)
            assert time.monotonic() < deadline, (seen.persists, seen.changes)
            if seen.persists >= enough:
                return

    def settle(seconds: float) -> int:
        """Eight checkpoints at another speed, then four whose cost is within the limit."""
        changes = len(seen.changes)
        set_delay(delay, seconds)
        train(SETTLED)
        assert len(seen.changes) > changes
        blocks = len(seen.blocks)
        train(4)
        assert len(seen.changes) - changes <= 3, seen.changes
        spent = sum(block.checkpoint_s for block in seen.blocks[blocks:])
        trained = sum(block.total_s for block in seen.blocks[blocks:])
        assert spent / (spent + trained) <= LIMIT * NOISE
        return seen.changes[-1].disk_interval_steps

    train(12)
    quick = ckpt._rank.plan.tier("disk").interval_steps
    slow = settle(SLOW_S)
    again = settle(FAST_S)
    assert slow > 2 * quick
    assert again < slow / 2
    live.leave()
    assert run(["explain", live.run_dir, "--replay"]) == 0
    assert "the same decisions" in capsys.readouterr().out
