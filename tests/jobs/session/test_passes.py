"""Passes over `ckpt.loader` that train nothing, and work in front of an epoch, across a restart."""

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Subset

import autockpt
from tests.jobs.session.test_epochs import EPOCH, EPOCHS, Style, Training, by_its_loader, trained
from tests.support import trainings

EMPTY = pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler")
"""The first loop of the restart has no batch, and the work behind it steps the scheduler."""


def evaluate(training: Training, loader: Any) -> None:
    """The mean over the training data."""
    training.model.eval()
    seen = [training.model(batch[0].reshape(-1, 1)).sum() for batch in loader]
    training.model.train()
    assert seen


def without_gradients(training: Training, loader: Any) -> None:
    """The same as most scripts do it."""
    with torch.no_grad():
        evaluate(training, loader)


def look(training: Training, loader: Any) -> None:
    """The shape of the first batch."""
    assert next(iter(loader))[0].shape == (2,)


def look_in_a_loop(training: Training, loader: Any) -> None:
    """The same, as torch's tutorials do it."""
    for batch in loader:
        assert batch[0].shape == (2,)
        break


Pass = Callable[[Training, Any], None]


def passing(once: Pass, where: str) -> Style:
    """A training whose loader is iterated `once` in another pass there."""

    def train(training: Training) -> None:
        ckpt = training.attach()
        loader = ckpt.loader(training.loader)
        if where == "before the loop":
            once(training, loader)
        for epoch in range(loader.epoch, EPOCHS):
            if where == "in front of an epoch":
                once(training, loader)
            for number, batch in enumerate(loader, loader.first_batch):
                if where == "on top of an iteration" and number % 2:
                    once(training, loader)
                if training.train(epoch, batch[0]):
                    return
                if where == "within an epoch" and number % 2:
                    once(training, loader)
            if where == "behind an epoch":
                once(training, loader)
            training.end_epoch(epoch)

    return train


@pytest.mark.parametrize(("once", "where"), [
    (without_gradients, "behind an epoch"), (evaluate, "behind an epoch"),
    (without_gradients, "within an epoch"), (without_gradients, "on top of an iteration"),
    (without_gradients, "before the loop"), (evaluate, "before the loop"),
    (look, "before the loop"), (look_in_a_loop, "before the loop"),
    (look, "in front of an epoch"), (look_in_a_loop, "in front of an epoch"),
    (look, "behind an epoch"), (look, "on top of an iteration"),
])  # fmt: skip
@pytest.mark.parametrize(("saved", "stop"), [(6, 9), (7, 7)])
def test_a_pass_that_trains_nothing_is_no_epoch(
    attach: Callable[..., Any], new_run: Callable[..., str], once: Pass, where: str,
    saved: int, stop: int,
) -> None:  # fmt: skip
    """The samples, epochs and rates are those of a run that was not disturbed."""
    style = passing(once, where)
    whole = trained(attach, trainings.prepare(new_run("whole"), trainings.plan()), style)
    assert [epoch for epoch, *_ in whole.steps] == [e for e in range(EPOCHS) for _ in range(EPOCH)]
    run_dir = trainings.prepare(new_run(), trainings.plan(memory=saved, disk=saved))
    trained(attach, run_dir, style, saved=saved, stop=stop)
    again = trained(attach, run_dir, style)
    assert again.start == saved
    assert again.steps == whole.steps[saved:]
    assert again.scheduler.state_dict() == whole.scheduler.state_dict()


@EMPTY
def test_a_checkpoint_waits_for_the_next_epoch(
    attach: Callable[..., Any], new_run: Callable[..., str]
) -> None:
    """So the first loop of a restart has a batch; one that the script asks for does not wait."""
    run_dir = trainings.prepare(new_run(), trainings.plan(memory=EPOCH, disk=EPOCH))
    trained(attach, run_dir, by_its_loader, saved=EPOCH + 1, stop=EPOCH + 1)
    assert trained(attach, run_dir, by_its_loader).start == EPOCH + 1

    def asking(training: Training) -> None:
        ckpt = training.attach()
        for batch in ckpt.loader(training.loader):
            if len(training.steps) == EPOCH - 1:
                ckpt.save()
            training.train(0, batch[0])
        assert ckpt.wait_durable(60)

    run_dir = trainings.prepare(new_run("asked"), trainings.plan(memory=99, disk=99))
    trained(attach, run_dir, asking)
    assert trained(attach, run_dir, by_its_loader).start == EPOCH


@EMPTY
def test_next_where_no_batch_is_left_begins_the_next_epoch(
    attach: Callable[..., Any], new_run: Callable[..., str]
) -> None:
    """A loop by `next` that makes another iterator at the end of each."""

    def stepping(training: Training) -> None:
        ckpt = training.attach()
        loader = ckpt.loader(training.loader)
        batches, epoch = iter(loader), loader.epoch
        while epoch < EPOCHS:
            try:
                batch = next(batches)
            except StopIteration:
                batches, epoch = iter(loader), epoch + 1
                continue
            if training.start + len(training.steps) == EPOCH - 1:
                ckpt.save()
            if training.train(epoch, batch[0]):
                return

    whole = trained(attach, trainings.prepare(new_run("whole"), trainings.plan()), stepping)
    run_dir = trainings.prepare(new_run(), trainings.plan(memory=99, disk=99))
    trained(attach, run_dir, stepping, saved=EPOCH, stop=EPOCH)
    again = trained(attach, run_dir, stepping)
    assert again.start == EPOCH
    assert again.steps == whole.steps[EPOCH:]


def test_a_batch_of_a_new_pass_in_each_step(
    attach: Callable[..., Any], new_run: Callable[..., str]
) -> None:
    """`next(iter(loader))` drops its iterator before the training."""

    def stepping(training: Training) -> None:
        training.loader = DataLoader(
            training.loader.dataset, batch_size=2, shuffle=True,
            generator=torch.Generator().manual_seed(3),
        )  # fmt: skip
        loader = training.attach().loader(training.loader)
        for epoch in range(loader.epoch, 12):
            if training.train(epoch, next(iter(loader))[0]):
                return

    whole = trained(attach, trainings.prepare(new_run("whole"), trainings.plan()), stepping)
    run_dir = trainings.prepare(new_run(), trainings.plan(memory=6, disk=6))
    trained(attach, run_dir, stepping, saved=6, stop=7)
    again = trained(attach, run_dir, stepping)
    assert again.start == 6
    assert [step[1:] for step in again.steps] == [step[1:] for step in whole.steps[6:]]


def test_an_attribute_that_is_taken_away_ends_no_training(
    attach: Callable[..., Any], new_run: Callable[..., str]
) -> None:
    """A `TrainState.of` keeps it; the look for others goes on."""

    def dropping(training: Training) -> None:
        owner = SimpleNamespace(early=SimpleNamespace(best=1.0))
        kept = autockpt.TrainState.of(owner, "early.best")
        loader = training.attach(kept=kept).loader(training.loader)
        for epoch in range(loader.epoch, EPOCHS):
            for batch in loader:
                owner.early = None
                training.train(epoch, batch[0])

    run_dir = trainings.prepare(new_run(), trainings.plan())
    assert len(trained(attach, run_dir, dropping).steps) == EPOCH * EPOCHS


def without_a_gradient(training: Training) -> None:
    """Weights are moved by hand, as in evolution: the whole training is under no_grad."""
    with torch.no_grad():
        ckpt = training.ckpt = training._attach(model=training.model, run_dir=training.run_dir)
        training.start = ckpt.restored.step if ckpt.restored else 0
        loader = ckpt.loader(training.loader)
        for epoch in range(loader.epoch, EPOCHS):
            for batch in loader:
                step = training.start + len(training.steps)
                training.steps.append((epoch, float(batch[0].sum()), 0.0))
                training.model.weight += batch[0].mean()
                if step % EPOCH == 1:
                    evaluate(training, loader)
                ckpt.step()
                if step == training.start + 1:
                    assert ckpt._client.wait_until(lambda: bool(ckpt._client.slots), 60)
                if step + 1 == training.saved > training.start:
                    assert ckpt.wait_durable(60)
                if step == training.stop:
                    return


def test_a_training_without_gradients_has_its_epochs(
    attach: Callable[..., Any], new_run: Callable[..., str]
) -> None:
    """What looks like an evaluation may train; a checkpoint says so of its loader."""
    plain = trainings.prepare(new_run("whole"), trainings.plan())
    whole = trained(attach, plain, without_a_gradient)
    assert [epoch for epoch, *_ in whole.steps] == [e for e in range(EPOCHS) for _ in range(EPOCH)]
    run_dir = trainings.prepare(new_run(), trainings.plan(memory=6, disk=6))
    trained(attach, run_dir, without_a_gradient, saved=6, stop=7)
    again = trained(attach, run_dir, without_a_gradient)
    assert again.start == 6
    assert again.steps == whole.steps[6:]


def helper_twice(training: Training) -> None:
    """Two whole passes from one line, in front of the loop: no limit of batches."""
    loader = training.attach().loader(training.loader)
    for _ in range(2):
        evaluate(training, loader)
    for epoch in range(loader.epoch, EPOCHS):
        for batch in loader:
            if training.train(epoch, batch[0]):
                return


def test_two_passes_from_one_line_end_no_epoch(
    attach: Callable[..., Any], new_run: Callable[..., str]
) -> None:
    """The rest of the epoch that was resumed is trained behind them."""
    whole = trained(attach, trainings.prepare(new_run("whole"), trainings.plan()), helper_twice)
    run_dir = trainings.prepare(new_run(), trainings.plan(memory=6, disk=6))
    trained(attach, run_dir, helper_twice, saved=6, stop=7)
    again = trained(attach, run_dir, helper_twice)
    assert again.start == 6
    assert again.steps == whole.steps[6:]


def curriculum(training: Training) -> None:
    """Other data in each epoch."""
    ckpt = training.attach()
    data = training.loader.dataset
    loader = ckpt.loader(DataLoader(Subset(data, range(4)), batch_size=2, shuffle=True))
    for epoch in range(loader.epoch, 3):
        part = Subset(data, range(4 + 2 * epoch))
        loader = ckpt.loader(DataLoader(part, batch_size=2, shuffle=True), replace=True)
        for batch in loader:
            if training.train(epoch, batch[0]):
                return
        training.end_epoch(epoch)


def together(training: Training) -> None:
    """Two loaders side by side; the shorter one ends the epoch."""
    ckpt = training.attach()
    short = DataLoader(Subset(training.loader.dataset, range(6)), batch_size=2, shuffle=True)
    one, other = ckpt.loader(short, name="one"), ckpt.loader(training.loader, name="other")
    for epoch in range(one.epoch, EPOCHS):
        for (x,), (y,) in zip(one, other):  # noqa: B905 - the lengths differ
            if training.train(epoch, x + 10 * y):
                return
        training.end_epoch(epoch)


@pytest.mark.parametrize("style", [curriculum, together])
@pytest.mark.parametrize("saved", [4, 7])
def test_other_loaders_go_on(
    attach: Callable[..., Any], new_run: Callable[..., str], style: Style, saved: int
) -> None:
    """With their own epochs and batches."""
    whole = trained(attach, trainings.prepare(new_run("whole"), trainings.plan()), style)
    run_dir = trainings.prepare(new_run(), trainings.plan(memory=saved, disk=saved))
    trained(attach, run_dir, style, saved=saved, stop=saved + 1)
    again = trained(attach, run_dir, style)
    assert again.start == saved
    assert again.steps == whole.steps[saved:]


def loops(training: Training, style: str) -> Iterator[tuple[int, Iterator[Any]]]:
    """Of each epoch its number and its batches."""
    if style == "ckpt.batches":
        ckpt = training.attach(data=training.loader)
        for epoch in range(ckpt.epoch, EPOCHS):
            ends = ckpt.batches(EPOCH * EPOCHS, until=(epoch + 1) * EPOCH)
            yield epoch, (batch for _, batch in ends)
    else:
        loader = training.attach().loader(training.loader)
        for epoch in range(loader.epoch, EPOCHS):
            yield epoch, iter(loader)


@pytest.mark.parametrize("style", ["ckpt.batches", "ckpt.loader"])
def test_work_in_front_of_an_epoch_counts_once(
    attach: Callable[..., Any], new_run: Callable[..., str], style: str,
    capfd: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """A rate that is divided, and a scheduler that steps, as scripts of old do it."""

    def dividing(training: Training) -> None:
        for epoch, batches in loops(training, style):
            if epoch == 1:
                training.optimizer.param_groups[0]["lr"] /= 10
            training.state.seen.append(epoch)
            for batch in batches:
                if training.train(epoch, batch[0]):
                    return

    whole = trained(attach, trainings.prepare(new_run("whole"), trainings.plan()), dividing)
    run_dir = trainings.prepare(new_run(), trainings.plan(memory=6, disk=6))
    trained(attach, run_dir, dividing, saved=6, stop=6)
    assert "ran again" not in capfd.readouterr().err
    again = trained(attach, run_dir, dividing)
    assert again.start == 6
    assert again.steps == whole.steps[6:]
    assert again.state.state_dict() == whole.state.state_dict()
    said = capfd.readouterr().err
    assert "optimizer, state: put back to step 6" in said
    assert "random numbers" not in said


def test_random_numbers_in_front_of_an_epoch_are_said(
    attach: Callable[..., Any], new_run: Callable[..., str], capfd: pytest.CaptureFixture[str]
) -> None:
    """New negatives for each epoch: the rest of it would have others."""

    def resampling(training: Training) -> None:
        for epoch, batches in loops(training, "ckpt.loader"):
            training.negatives = torch.randn(8)  # type: ignore[attr-defined]
            for batch in batches:
                if training.train(epoch, batch[0]):
                    return

    run_dir = trainings.prepare(new_run(), trainings.plan(memory=6, disk=6))
    trained(attach, run_dir, resampling, saved=6, stop=6)
    assert "random numbers were drawn in front" not in capfd.readouterr().err
    trained(attach, run_dir, resampling)
    assert "random numbers were drawn in front" in capfd.readouterr().err
