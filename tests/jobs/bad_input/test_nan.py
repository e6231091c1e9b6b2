"""A training that turns NaN goes on, and what it saves from then on displaces nothing good."""

from pathlib import Path

import pytest
import torch

from autockpt.executors.storage.catalogue import list_generations
from autockpt.session import Session
from autockpt.values.errors import NoCheckpointError
from autockpt.values.telemetry import Degraded, Scrubbed
from tests.support import trainings
from tests.support.live import SPEC, Live, granted

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
    assert verdicts.get("step 4 (term 1)", "whole") == "whole"
    assert set(verdicts.values()) <= {"whole", "suspect"}
    job, ckpt = live.attach(SPEC)
    assert ckpt.step_count == 4
    assert "resumed step 4 from disk" in capfd.readouterr().err
    assert Path(live.checkpoints).is_dir()


def with_nan(live: Live, *, used: bool, steps: int) -> Session:
    """A training with a NaN before its first step, in a frozen parameter or a trained one."""
    job = trainings.build(SPEC)
    parameter = torch.nn.Parameter(torch.full((3,), torch.nan), requires_grad=False)
    if used:
        parameter = job.model.head.bias
        with torch.no_grad():
            parameter.fill_(torch.nan)
    else:
        job.model.unused = parameter
    _, ckpt = live.attach(SPEC, PLAN, model=job.model, optimizer=job.attached["optimizer"])
    for step, batch in ckpt.batches(steps):
        trainings.train_step(job, step, batch)
        granted(ckpt)
    return ckpt


def healths(live: Live) -> set[str]:
    """Of every checkpoint that was committed; an end without a last one may cut one off."""
    found = list_generations(live.checkpoints)
    return {one.health for one in found if one.state != "incomplete"}


def test_nan_that_training_does_not_touch_is_said_and_resumed(
    live: Live, capfd: pytest.CaptureFixture[str]
) -> None:
    """Nobody uses it, so it makes no checkpoint suspect; now, read back, and after a restart."""
    with_nan(live, used=False, steps=4)
    assert "model.unused holds NaN before the training" in capfd.readouterr().err
    live.leave()
    assert healths(live) == {"good"}
    ckpt = with_nan(live, used=False, steps=8)
    assert ckpt._rank.start_step == 4
    live.leave()
    assert healths(live) == {"good"}
    told = capfd.readouterr().err
    assert "suspect" not in told
    assert not [event for event in live.events(Degraded) if event.what == "health"]


def test_nan_that_spreads_is_named_where_people_look(
    live: Live, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The training says it at once, a refused start names it, and a person may restore it."""
    with_nan(live, used=True, steps=4)
    told = capfd.readouterr().err
    assert "model.head.bias holds NaN before the training" in told
    assert "degraded: health: checkpoint" in told
    assert "rank 0 has NaN in " in told
    live.leave()
    newest = max(one.name for one in list_generations(live.checkpoints))
    with pytest.raises(NoCheckpointError, match=r"NaN in .*restored only by --resume-from ckpt-"):
        live.attach(SPEC, PLAN)
    live.leave()
    monkeypatch.setenv("AUTOCKPT_RESUME_FROM", newest)
    _, ckpt = live.attach(SPEC, PLAN)
    assert ckpt.step_count > 0
