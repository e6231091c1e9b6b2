"""A script's signal handler that raises ends what the script wants to end, inside our code too."""

import signal
from collections.abc import Iterator
from typing import Any

import pytest

from tests.support import trainings
from tests.support.live import SPEC, Live, granted


class Preempted(Exception):
    """The script's own."""


@pytest.fixture(autouse=True)
def _handler() -> Iterator[None]:
    def raising(number: int, frame: Any) -> None:
        raise Preempted("by the script")

    before = signal.signal(signal.SIGUSR1, raising)
    yield
    signal.signal(signal.SIGUSR1, before)


@pytest.mark.parametrize("where", ["is_due", "begin", "fence"])
def test_it_is_raised_into_the_training_loop(
    live: Live, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """At a boundary, in a snapshot, at its fence; the keeper has what was committed before."""
    job, ckpt = live.attach(SPEC, trainings.plan(memory=1, disk=4))
    owner: Any = ckpt._saver

    def interrupted(*arguments: Any, **more: Any) -> Any:
        signal.raise_signal(signal.SIGUSR1)

    def train() -> None:
        for step, batch in ckpt.batches(SPEC.steps):
            trainings.train_step(job, step, batch)
            granted(ckpt)
            if step == 5:
                target = owner if where != "fence" else ckpt._rank.snapshotter
                monkeypatch.setattr(target, where, interrupted)

    with pytest.raises(Preempted, match="script"):
        train()
    monkeypatch.undo()
    assert ckpt.step_count in (5, 6, 7)


def test_it_is_raised_out_of_a_last_checkpoint(live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second signal while the first is obeyed; the session is closed all the same."""
    job, ckpt = live.attach(SPEC, trainings.plan(memory=1, disk=4))
    for step, batch in ckpt.batches(SPEC.steps, until=6):
        trainings.train_step(job, step, batch)
        granted(ckpt)
    monkeypatch.setattr(ckpt._last, "make", lambda: signal.raise_signal(signal.SIGUSR1))
    monkeypatch.setattr(ckpt._last, "has_last_step", lambda: False)
    with pytest.raises(Preempted, match="script"):
        ckpt.close()
    assert ckpt._rank.is_closed
