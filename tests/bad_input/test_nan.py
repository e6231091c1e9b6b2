"""A training that turns NaN goes on, and what it saves from then on displaces nothing good."""

from pathlib import Path

import pytest
import torch

from autockpt.executors.catalogue import list_generations
from autockpt.values.telemetry import Degraded, Scrubbed
from tests.fakes import trainings
from tests.fakes.live import SPEC, Live, granted

PLAN = trainings.plan(memory=2, disk=2)


def test_the_newest_sound_generation_is_resumed(
    live: Live, capfd: pytest.CaptureFixture[str]
) -> None:
    """NaN from step 5 on; the states of 6 to 12 are kept, marked, and passed over."""
    job, ckpt = live.attach(SPEC, PLAN)
    for step, batch in ckpt.batches(SPEC.steps):
        trainings.train_step(job, step, batch)
        if step == 5:
            with torch.no_grad():
                next(job.model.parameters()).fill_(torch.nan)
        granted(ckpt)
    live.leave()
    health = {one.step: one.health for one in list_generations(live.checkpoints)}
    assert health[4] == "good"
    assert set(health) >= {4, SPEC.steps}
    assert {step for step, verdict in health.items() if verdict != "good"} == {
        step for step in health if step > 5
    }
    told = [event.reason for event in live.events(Degraded) if event.what == "health"]
    assert "rank 0 has NaN in model." in told[0]
    verdicts = {event.generation: event.verdict for event in live.events(Scrubbed)}
    assert verdicts.get("e1s4", "whole") == "whole"
    assert set(verdicts.values()) <= {"whole", "suspect"}
    job, ckpt = live.attach(SPEC)
    assert ckpt.step_count == 4
    assert "resumed step 4 from disk" in capfd.readouterr().err
    assert Path(live.checkpoints).is_dir()
