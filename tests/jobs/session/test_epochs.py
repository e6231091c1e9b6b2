"""Loops over epochs with work behind each: a resumed training does the work of each epoch once."""

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import autockpt
from autockpt.values.errors import AutockptError, ConfigError
from tests.support import trainings

EPOCH, EPOCHS = 4, 4
TOTAL = EPOCH * EPOCHS

Steps = list[tuple[int, float, float]]
"""Of each iteration its epoch, its sample, and the rate."""


class Training:
    """A scheduler that steps once an epoch, and the best value of a script's own."""

    def __init__(self, attach: Callable[..., Any], run_dir: str, saved: int, stop: int) -> None:
        """A checkpoint is made behind `saved` iterations; `stop`: the process is gone then."""
        torch.manual_seed(0)
        self.model = torch.nn.Linear(1, 1)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1.0)
        self.scheduler = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.5)
        self.loader: Any = DataLoader(TensorDataset(torch.arange(8.0)), batch_size=2, shuffle=True)
        self.state = autockpt.TrainState(best=0.0, seen=[])
        self.run_dir, self.saved, self.stop = run_dir, saved, stop
        self.steps: Steps = []
        self.over: list[int] = []
        """Epochs behind which this process has worked."""
        self._attach = attach

    def attach(self, **more: Any) -> Any:
        """The session."""
        self.ckpt = self._attach(
            model=self.model, optimizer=self.optimizer, scheduler=self.scheduler,
            state=self.state, run_dir=self.run_dir, **more,
        )  # fmt: skip
        self.start = self.ckpt.restored.step if self.ckpt.restored else 0
        return self.ckpt

    def train(self, epoch: int, batch: Any) -> bool:
        """One iteration; True: the process goes away."""
        step = self.start + len(self.steps)
        self.steps.append((epoch, float(batch.sum()), self.optimizer.param_groups[0]["lr"]))
        self.optimizer.zero_grad()
        self.model(torch.ones(1, 1)).sum().backward()
        self.optimizer.step()
        if step == self.start + 1:
            assert self.ckpt._client.wait_until(lambda: bool(self.ckpt._client.slots), 60)
        if step == self.saved > self.start:
            assert self.ckpt.wait_durable(60)
        return step == self.stop

    def end_epoch(self, epoch: int) -> None:
        """Work once an epoch."""
        self.scheduler.step()
        with torch.no_grad():  # an evaluation, of a model without dropout: no model.eval()
            self.model(torch.ones(1, 1))
        self.over.append(epoch)
        if self.state.best < epoch:
            self.state.best = float(epoch)
        self.state.seen.append(epoch)


def from_the_first(training: Training) -> None:
    """A restart goes through the loops that are trained as well."""
    ckpt = training.attach(data=training.loader)
    for epoch in range(EPOCHS):
        for _, batch in ckpt.batches(TOTAL, until=(epoch + 1) * EPOCH):
            if training.train(epoch, batch[0]):
                return
        training.end_epoch(epoch)


def from_the_one_under_way(training: Training) -> None:
    """It leaves the loops that are trained out."""
    ckpt = training.attach(data=training.loader)
    for epoch in range(ckpt.epoch, EPOCHS):
        for _, batch in ckpt.batches(TOTAL, until=(epoch + 1) * EPOCH):
            if training.train(epoch, batch[0]):
                return
        training.end_epoch(epoch)


def by_its_loader(training: Training) -> None:
    """The loop stays as it was: its loader knows the place."""
    ckpt = training.attach()
    loader = ckpt.loader(training.loader)
    for epoch in range(ckpt.epoch, EPOCHS):
        for batch in loader:
            if training.train(epoch, batch[0]):
                return
        training.end_epoch(epoch)


Style = Callable[[Training], None]
STYLES: list[Style] = [from_the_first, from_the_one_under_way, by_its_loader]


def trained(
    attach: Callable[..., Any], run_dir: str, style: Style, *, saved: int = 0, stop: int = TOTAL
) -> Training:
    """What a process has done."""
    training = Training(attach, run_dir, saved, stop)
    style(training)
    training.ckpt.close(final_checkpoint=False)
    return training


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize(("saved", "stop"), [(6, 9), (8, 9), (8, 8)])
def test_the_work_behind_an_epoch_counts_once(
    attach: Callable[..., Any], new_run: Callable[..., str], style: Style, saved: int, stop: int
) -> None:
    """Killed in an epoch, or where one begins, with a checkpoint of the edge or of before."""
    plan = trainings.plan(memory=saved, disk=saved)
    if style is by_its_loader and saved % EPOCH == 0:
        saved, stop = saved + 1, stop + 1  # it waits for the next epoch
    whole = trained(attach, trainings.prepare(new_run("whole"), trainings.plan()), style)
    run_dir = trainings.prepare(new_run(), plan)
    trained(attach, run_dir, style, saved=saved, stop=stop)
    again = trained(attach, run_dir, style)
    assert again.start == saved
    assert [step[1:] for step in again.steps] == [step[1:] for step in whole.steps[saved:]]
    assert again.steps == whole.steps[saved:]
    assert again.scheduler.state_dict() == whole.scheduler.state_dict()
    assert again.state.state_dict() == whole.state.state_dict()


def test_work_that_ran_again_is_said(
    attach: Callable[..., Any], new_run: Callable[..., str], capfd: pytest.CaptureFixture[str]
) -> None:
    """With the objects that were put back, and the line that leaves it out."""
    run_dir = trainings.prepare(new_run(), trainings.plan(memory=6, disk=6))
    trained(attach, run_dir, from_the_first, saved=6, stop=9)
    assert "ran again" not in capfd.readouterr().err
    trained(attach, run_dir, from_the_first)
    said = capfd.readouterr().err
    assert "optimizer, scheduler, state: put back to step 6" in said
    assert "for epoch in range(ckpt.epoch, epochs)" in said


def averaging(training: Training) -> None:
    """The work behind each epoch changes the weights, past torch's count of writes."""
    ckpt = training.attach(data=training.loader)
    for epoch in range(EPOCHS):
        for _, batch in ckpt.batches(TOTAL, until=(epoch + 1) * EPOCH):
            if training.train(epoch, batch[0]):
                return
        training.model.weight.data.mul_(0.5)


def test_weights_that_the_work_changes_again_are_said(
    attach: Callable[..., Any], new_run: Callable[..., str], capfd: pytest.CaptureFixture[str]
) -> None:
    """They are not put back: a second copy of them would need as much memory again."""
    run_dir = trainings.prepare(new_run(), trainings.plan(memory=6, disk=6))
    trained(attach, run_dir, averaging, saved=6, stop=9)
    assert "degraded: loop" not in capfd.readouterr().err
    trained(attach, run_dir, averaging)
    assert "degraded: loop: model.weight was changed" in capfd.readouterr().err


@pytest.mark.parametrize(("epochs", "is_said"), [(1, False), (2, True)])
def test_of_a_run_that_was_over_the_last_work_is_due(
    attach: Callable[..., Any], new_run: Callable[..., str], capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch, epochs: int, is_said: bool,
) -> None:  # fmt: skip
    """It changes the weights as it would have; only work behind earlier epochs is said."""
    run_dir = trainings.prepare(new_run(), trainings.plan(memory=4, disk=4))
    monkeypatch.setitem(globals(), "EPOCHS", epochs)
    monkeypatch.setitem(globals(), "TOTAL", epochs * EPOCH)
    trained(attach, run_dir, averaging)
    monkeypatch.undo()
    trained(attach, run_dir, averaging)
    assert ("degraded: loop: model.weight was changed" in capfd.readouterr().err) == is_said


@pytest.mark.parametrize("style", [from_the_first, from_the_one_under_way])
def test_a_run_that_was_over_goes_on_behind_its_last_epoch(
    attach: Callable[..., Any], new_run: Callable[..., str], style: Style,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Its last checkpoint was made before the work behind the last epoch, which is done once."""
    whole = trained(attach, trainings.prepare(new_run("whole"), trainings.plan()), style)
    run_dir = trainings.prepare(new_run(), trainings.plan(memory=4, disk=4))
    monkeypatch.setitem(globals(), "EPOCHS", 2)
    monkeypatch.setitem(globals(), "TOTAL", 2 * EPOCH)
    trained(attach, run_dir, style)
    monkeypatch.undo()
    again = trained(attach, run_dir, style)
    assert again.steps == whole.steps[2 * EPOCH :]
    assert again.scheduler.state_dict() == whole.scheduler.state_dict()
    assert again.state.state_dict() == whole.state.state_dict()


@pytest.mark.parametrize("epochs", [2, 4])
def test_a_while_loop_over_epochs_ends(
    attach: Callable[..., Any], new_run: Callable[..., str], epochs: int
) -> None:
    """A script that is over is started again, with as many epochs or with more."""

    def until(training: Training, last: int) -> None:
        ckpt = training.attach(data=training.loader)
        while ckpt.epoch < last:
            assert len(training.over) < EPOCHS, "it goes on for ever"
            epoch = ckpt.epoch
            for _, batch in ckpt.batches(last * EPOCH, until=(epoch + 1) * EPOCH):
                training.train(epoch, batch[0])
            training.end_epoch(epoch)

    run_dir = trainings.prepare(new_run(), trainings.plan(memory=4, disk=4))
    assert trained(attach, run_dir, lambda training: until(training, 2)).over == [0, 1]
    again = trained(attach, run_dir, lambda training: until(training, epochs))
    assert again.over == list(range(1, epochs))
    assert again.state.seen == list(range(epochs))


def test_epochs_that_are_no_passes_are_known_to_the_script(
    attach: Callable[..., Any], new_run: Callable[..., str], capfd: pytest.CaptureFixture[str]
) -> None:
    """Epochs of two passes: the error says to begin at 0, and no advice says otherwise."""

    def of_two_passes(training: Training) -> None:
        ckpt = training.attach(data=training.loader)
        for epoch in range(2):
            for _, batch in ckpt.batches(TOTAL, until=(epoch + 1) * 2 * EPOCH):
                if training.train(epoch, batch[0]):
                    return
            training.end_epoch(epoch)

    whole = trained(attach, trainings.prepare(new_run("whole"), trainings.plan()), of_two_passes)
    run_dir = trainings.prepare(new_run(), trainings.plan(memory=9, disk=9))
    trained(attach, run_dir, of_two_passes, saved=9, stop=11)
    early = Training(attach, run_dir, 0, TOTAL)
    ckpt = early.attach(data=early.loader)
    with pytest.raises(AutockptError, match=r"no passes over the loader.*Begin at epoch 0"):
        _ = ckpt.epoch
    ckpt.close(final_checkpoint=False)
    again = trained(attach, run_dir, of_two_passes)
    assert again.steps == whole.steps[9:]
    said = capfd.readouterr().err
    assert "put back to step 9" in said
    assert "range(ckpt.epoch" not in said


@pytest.mark.parametrize("saved", [6, 7])
def test_a_loader_for_evaluations_ends_no_iteration(
    attach: Callable[..., Any], new_run: Callable[..., str], saved: int
) -> None:
    """It is iterated behind the optimizer's step, and before the scheduler's."""

    def evaluating(training: Training) -> None:
        ckpt = training.attach()
        loader = ckpt.loader(training.loader)
        held_out = ckpt.loader(DataLoader(TensorDataset(torch.arange(3.0)), shuffle=True), name="v")
        for epoch in range(loader.epoch, EPOCHS):
            for batch in loader:
                stops = training.train(epoch, batch[0])
                if (training.start + len(training.steps)) % 2:
                    list(held_out)
                training.scheduler.step()
                if stops:
                    return

    whole = trained(attach, trainings.prepare(new_run("whole"), trainings.plan()), evaluating)
    run_dir = trainings.prepare(new_run(), trainings.plan(memory=saved, disk=saved))
    trained(attach, run_dir, evaluating, saved=saved, stop=9)
    again = trained(attach, run_dir, evaluating)
    assert again.start == saved
    assert again.steps == whole.steps[saved:]


def cycled(training: Training) -> None:
    """itertools.cycle keeps copies of the batches and asks the loader no more."""
    training.attach()
    batches = itertools.cycle(training.ckpt.loader(training.loader))
    for _ in range(2 * EPOCH):
        training.train(0, next(batches)[0])


def twice(training: Training) -> None:
    """Two steps for each batch."""
    training.attach()
    for batch in training.ckpt.loader(training.loader):
        training.train(0, batch[0])
        training.train(0, batch[0])


def fetched_ahead(training: Training) -> None:
    """The next batch is fetched between forward and step."""
    training.attach()
    batches = iter(training.ckpt.loader(training.loader))
    batch = next(batches)
    for _ in range(EPOCH - 1):
        training.optimizer.zero_grad()
        training.model(torch.ones(1, 1)).sum().backward()
        batch = next(batches)
        training.optimizer.step()
    assert batch is not None


def with_evaluations(training: Training) -> None:
    """In training mode, with a loader of its own, behind each step."""
    training.attach()
    loader = training.ckpt.loader(training.loader)
    held_out = training.ckpt.loader(DataLoader(TensorDataset(torch.arange(3.0))), name="v")
    for _ in range(2):
        for batch in loader:
            training.train(0, batch[0])
            with torch.no_grad():
                for (x,) in held_out:
                    training.model(x)


@pytest.mark.parametrize(
    ("style", "is_said"),
    [(cycled, True), (twice, True), (fetched_ahead, True), (with_evaluations, False),
     (by_its_loader, False)],
)  # fmt: skip
def test_a_batch_that_the_loop_has_already_is_said(
    attach: Callable[..., Any], new_run: Callable[..., str], capfd: pytest.CaptureFixture[str],
    style: Style, is_said: bool,
) -> None:  # fmt: skip
    """A restart goes on with the loader's next one."""
    trained(attach, trainings.prepare(new_run(), trainings.plan()), style)
    said = capfd.readouterr().err
    assert ("degraded: carried values: an iteration begins without a batch" in said) == is_said


def test_a_count_of_batches_goes_on(
    attach: Callable[..., Any], new_run: Callable[..., str]
) -> None:
    """`first_batch` is the place in the epoch under way, and 0 for the next ones."""

    def counting(training: Training) -> None:
        training.attach()
        loader = training.ckpt.loader(training.loader)
        for _ in range(loader.epoch, EPOCHS):
            for i, batch in enumerate(loader, loader.first_batch):
                if training.train(i, batch[0]):
                    return

    whole = trained(attach, trainings.prepare(new_run("whole"), trainings.plan()), counting)
    run_dir = trainings.prepare(new_run(), trainings.plan(memory=6, disk=6))
    trained(attach, run_dir, counting, saved=6, stop=8)
    again = trained(attach, run_dir, counting)
    assert again.start == 6
    assert again.steps == whole.steps[6:]


def test_another_batch_size_counts_the_rest_of_an_epoch_from_its_end(
    attach: Callable[..., Any], new_run: Callable[..., str], capsys: pytest.CaptureFixture[str]
) -> None:
    """A loop that asks for the last batch finds it, as one that accumulates gradients does."""
    seen: list[tuple[int, int]] = []
    within: list[bool] = []

    def counting(training: Training, size: int) -> None:
        data = training.loader.dataset
        training.attach()
        within.append(training.ckpt._position.is_within_epoch)
        made = DataLoader(data, batch_size=size, shuffle=True, num_workers=int(size == 1))
        loader = training.ckpt.loader(made)
        within.append(training.ckpt._position.is_within_epoch)
        for epoch in range(loader.epoch, EPOCHS):
            for i, batch in enumerate(loader, loader.first_batch):
                seen.append((epoch, i))
                if training.train(i, batch[0]):
                    return

    run_dir = trainings.prepare(new_run(), trainings.plan(memory=6, disk=6))
    trained(attach, run_dir, lambda training: counting(training, 2), saved=6, stop=8)
    capsys.readouterr()
    seen.clear()
    within.clear()
    again = trained(attach, run_dir, lambda training: counting(training, 1))
    assert again.start == 6
    assert seen[:6] == [(1, 4), (1, 5), (1, 6), (1, 7), (2, 0), (2, 1)]
    assert within == [False, True]
    said = capsys.readouterr().err
    assert "batch size was 2 and is 1; 4 of 8 samples are left of epoch 1" in said
    assert "new workers load the rest of this epoch" in said


@pytest.mark.parametrize("where", ["in front of the work", "behind ckpt.step()"])
def test_an_epoch_that_is_left_early(
    attach: Callable[..., Any], new_run: Callable[..., str], where: str,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """A restart from its last checkpoint is exact where the test stands in front of the work.

    Else the checkpoint is within the epoch, and the script is told.
    """

    def leaving(training: Training) -> None:
        training.attach().own_boundary()
        loader = training.ckpt.loader(training.loader)
        for epoch in range(loader.epoch, EPOCHS):
            for i, batch in enumerate(loader, loader.first_batch):
                if i == 3 and where == "in front of the work":
                    break
                ends = training.train(epoch, batch[0])
                training.ckpt.step()
                if ends:
                    return
                if i + 1 == 3 and where == "behind ckpt.step()":
                    break

    whole = trained(attach, trainings.prepare(new_run("whole"), trainings.plan()), leaving)
    assert len(whole.steps) == 3 * EPOCHS
    said = capsys.readouterr().err.count("the loop left an epoch behind ckpt.step() after 3")
    run_dir = trainings.prepare(new_run(), trainings.plan(memory=6, disk=6))
    trained(attach, run_dir, leaving, saved=6, stop=7)
    again = trained(attach, run_dir, leaving)
    assert again.start == 6
    is_exact = where == "in front of the work"
    assert (again.steps == whole.steps[6:]) == is_exact
    assert said == (0 if is_exact else 1)


def test_an_epoch_needs_one_loader(attach: Callable[..., Any], new_run: Callable[..., str]) -> None:
    """Without one, and with two, the error says what to do."""
    training = Training(attach, trainings.prepare(new_run(), trainings.plan()), 0, TOTAL)
    ckpt = training.attach()
    with pytest.raises(AutockptError, match=r"attach\(data=\.\.\.\).*there are 0"):
        _ = ckpt.epoch
    first, _second = (ckpt.loader(training.loader, name=name) for name in "ab")
    with pytest.raises(AutockptError, match=r"loader\.epoch; there are 2"):
        _ = ckpt.epoch
    assert first.epoch == 0
    ckpt.close(final_checkpoint=False)


def test_values_of_a_train_state_keep_their_kinds() -> None:
    """Tensors go where they were, and a value that the checkpoint lacks stays."""
    state = autockpt.TrainState(best=1.0, mean=torch.zeros(2, dtype=torch.float64), added="new")
    state.load_state_dict({"best": None, "mean": torch.ones(2, dtype=torch.float64)})
    assert (state.best, state.mean.tolist(), state.added) == (None, [1.0, 1.0], "new")
    assert repr(autockpt.TrainState(best=0.5, bad=2)) == "TrainState(best=0.5, bad=2)"
    with pytest.raises(ConfigError, match=r"TrainState\(state_dict=\.\.\.\): this name is taken"):
        autockpt.TrainState(state_dict=1)
