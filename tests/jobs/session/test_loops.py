"""Loops of ours that are left and entered again, and optimizers that step before the loop."""

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from autockpt.session.boundaries import iterations
from autockpt.values.errors import ConfigError
from tests.jobs.session.test_ending import DATA, Counted
from tests.support import trainings

TOTAL = 12


@pytest.fixture
def begin(attach: Callable[..., Any], new_run: Callable[..., str]) -> Callable[..., Counted]:
    """Begins, or goes on with, a training with a checkpoint after every second step."""

    def make(data: Any = None, name: str = "run") -> Counted:
        run_dir = trainings.prepare(new_run(name), trainings.plan(memory=2, disk=2))
        return Counted(attach, run_dir, data)

    return make


def shuffled() -> Any:
    """Five batches an epoch; the order is drawn when an iterator is made."""
    return DataLoader(DATA, 20, shuffle=True)


def seen(it: Counted, *, leave: tuple[int, ...], stop: int) -> Iterator[tuple[int, list[float]]]:
    """(step, samples) up to `stop`, in loops that are left behind each step of `leave`."""
    while it.ckpt.step_count < stop:
        for step, (batch,) in it.ckpt.batches(TOTAL):
            it.train()
            yield step, batch.tolist()
            it.await_slots()
            it.ckpt.step()
            if step in leave or step + 1 == stop:
                break


@pytest.mark.parametrize("leave", [(4,), (1, 2, 6)])
def test_a_loop_that_is_entered_again_is_resumed_with_its_samples(
    begin: Callable[..., Counted], leave: tuple[int, ...]
) -> None:
    """It goes on in the epoch that it left, killed behind that or not."""
    torch.manual_seed(1)
    whole = list(seen(begin(shuffled(), "whole"), leave=leave, stop=TOTAL))
    for epoch in (whole[:5], whole[5:10]):
        assert sorted(itertools.chain(*(batch for _, batch in epoch))) == DATA.tensors[0].tolist()
    torch.manual_seed(1)
    it = begin(shuffled())
    list(seen(it, leave=leave, stop=8))
    assert it.ckpt.wait_durable(30)
    it.ckpt.close(final_checkpoint=False)
    again = begin(shuffled())
    first = again.ckpt.step_count
    assert 0 < first <= 8
    assert list(seen(again, leave=leave, stop=TOTAL)) == whole[first:]


def epochs(it: Counted) -> Iterator[tuple[int, list[float]]]:
    """(step, samples) of three epochs, each of which ends with a change of the weight by 100."""
    first = it.ckpt.step_count // 5
    for epoch in range(first, 3):
        for step, (batch,) in it.ckpt.batches(15, until=(epoch + 1) * 5):
            it.train()
            yield step, batch.tolist()
            it.await_slots()
        with torch.no_grad():
            it.ckpt.wait_for_staging()
            it.model.weight -= 100


@pytest.mark.parametrize("stop", [9, 10, 11])
def test_what_is_done_once_an_epoch_belongs_to_its_last_iteration(
    attach: Callable[..., Any], new_run: Callable[..., str], stop: int
) -> None:
    """A checkpoint of an epoch's last step has it, and a restart does not do it again."""

    def begin(name: str) -> Counted:
        run_dir = trainings.prepare(new_run(name), trainings.plan(memory=5, disk=5))
        return Counted(attach, run_dir, shuffled())

    torch.manual_seed(1)
    it = begin("whole")
    whole = list(epochs(it))
    assert it.updates == 315
    torch.manual_seed(1)
    it = begin("stopped")
    for step, _ in itertools.islice(epochs(it), stop):
        assert step != 6 or it.ckpt.wait_durable(60)  # else the next checkpoint may come later
    it.ckpt.wait_durable(60)
    it.ckpt.close(final_checkpoint=False)
    again = begin("stopped")
    done = 10 if stop == 11 else 5
    assert (again.ckpt.step_count, again.updates) == (done, done + 100 * (done // 5))
    assert list(epochs(again)) == whole[done:]
    assert again.updates == 315


class Failing(Dataset[Any]):
    """Fails with one of its samples, once."""

    failed = False

    def __len__(self) -> int:
        return 100

    def __getitem__(self, index: int) -> Any:
        if index == 42 and not self.failed:
            self.failed = True
            raise OSError("not there now")
        return (torch.tensor(float(index)),)


def test_an_error_of_the_loader_leaves_the_epoch_where_it_was(
    begin: Callable[..., Counted],
) -> None:
    """Who tries again gets the batch that failed, then the rest; generators are left alone."""
    it = begin(DataLoader(Failing(), 20, shuffle=True))
    batches, random = [], None
    while it.ckpt.step_count < 5:
        try:
            for _, (batch,) in it.ckpt.batches(5):
                assert random is None or torch.equal(random, torch.get_rng_state())
                random = None
                batches.append(batch)
                it.train()
        except OSError:
            random = torch.get_rng_state()
    assert sorted(torch.cat(batches).tolist()) == list(range(100))


@pytest.mark.parametrize("total", [-5, "5", None, float("nan")])
def test_a_length_that_is_none_is_refused(begin: Callable[..., Counted], total: Any) -> None:
    """In both loops, with what was given; a loop of length 0 trains nothing."""
    it = begin(shuffled())
    for loop in (it.ckpt.batches, it.ckpt.steps):
        with pytest.raises(ConfigError, match=f"expected a number of iterations.* got {total!r}"):
            next(loop(total))
    with pytest.raises(ConfigError, match="until of"):
        next(it.ckpt.steps(TOTAL, until="3"))
    assert list(it.ckpt.steps(0)) == []


def test_a_loop_behind_the_end_of_another_says_that_it_saves_nothing(
    begin: Callable[..., Counted], capfd: pytest.CaptureFixture[str]
) -> None:
    """One loop for each epoch: the first one has ended the session."""
    it = begin(shuffled())
    for epochs in (1, 2):
        for _ in it.ckpt.batches(5 * epochs):
            it.train()
    assert it.updates == 10
    assert capfd.readouterr().err.count("ended at step 5, so this loop makes no checkpoint") == 1


def warmed_up(it: Counted) -> None:
    """A learning rate finder: seven steps that no loop of ours makes."""
    for _ in range(7):
        it.train()


def fit(it: Counted) -> int:
    """A loop in a function of its own."""
    return sum(1 for _ in it.ckpt.steps(TOTAL) if not it.train())


@pytest.mark.parametrize("loop", ["batches", "function", "range"])
def test_steps_before_the_loop_are_none_of_its_iterations(
    begin: Callable[..., Counted], loop: str
) -> None:
    """The loop makes all of its own, and what it resumes from is of the loop."""
    it = begin(shuffled() if loop == "batches" else None)
    warmed_up(it)
    assert it.ckpt.step_count == 0
    if loop == "batches":
        for _ in it.ckpt.batches(TOTAL):
            it.train()
    elif loop == "function":
        assert fit(it) == TOTAL
    else:
        for _ in range(it.ckpt.step_count, TOTAL):
            it.train()
            it.ckpt.step()
    assert (it.ckpt.step_count, it.updates) == (TOTAL, TOTAL + 7)
    it.ckpt.close()
    again = begin(shuffled() if loop == "batches" else None)
    assert (again.ckpt.step_count, again.updates) == (TOTAL, TOTAL + 7)


@pytest.mark.parametrize("loop", ["steps", "step"])
def test_steps_that_were_counted_are_taken_back_when_the_loop_begins(
    begin: Callable[..., Counted], loop: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """Where the code does not tell that a loop will come; what was saved is superseded at once."""
    it = begin()
    begin_loop = {"steps": "ste" + "ps", "step": "ste" + "p"}[loop]
    for _ in range(7):
        it.train()
        it.await_slots()
    assert it.ckpt.step_count == 6
    assert it.ckpt.wait_durable(30)
    counts = iter(getattr(it.ckpt, begin_loop)(TOTAL)) if loop == "steps" else itertools.count()
    for _ in counts:
        it.train()
        if loop == "step":
            getattr(it.ckpt, begin_loop)()
        if it.ckpt._client.saves.newest.step > 6:
            break
        it.ckpt._client.wait_until(lambda: not it.ckpt._client.saves.writing, 30)
    assert it.ckpt.wait_durable(30)
    assert "iterations before it were counted" in capfd.readouterr().err
    it.ckpt.close(final_checkpoint=False)
    again = begin()
    assert again.updates == 7 + again.ckpt.step_count
    assert 0 < again.ckpt.step_count <= it.ckpt.step_count


def test_a_loop_that_does_not_come_is_not_waited_for_for_ever(
    begin: Callable[..., Counted],
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """Its iterations are counted after all, those from before too."""
    monkeypatch.setattr(iterations, "LEAD_STEPS", 3)
    it = begin()
    for _ in range(6):
        it.train()
    assert it.ckpt.step_count == 5
    it.ckpt.close()
    if not it.updates:
        it.ckpt.step()
    assert capfd.readouterr().err.count("3 iterations came before ckpt.batches()") == 1
    again = begin()
    assert (again.ckpt.step_count, again.updates) == (6, 6)


def test_a_script_that_ends_before_its_loop_has_trained_all_the_same(
    begin: Callable[..., Counted],
) -> None:
    """What it trained is in the last checkpoint."""
    it = begin()
    for _ in range(5):
        it.train()
    it.ckpt.close()
    if not it.updates:
        it.ckpt.step()
    again = begin()
    assert (again.ckpt.step_count, again.updates) == (5, 5)


def test_steps_on_a_resumed_state_before_the_loop_are_told(
    begin: Callable[..., Counted], capfd: pytest.CaptureFixture[str]
) -> None:
    """The finder runs in every start, and the state it finds is that of the training."""
    for first, told in ((0, 0), (3, 1)):
        it = begin()
        warmed_up(it)
        for step in it.ckpt.steps(TOTAL):
            it.train()
            it.ckpt.step()
            if step == first + 2:
                break
        assert it.ckpt.step_count == first + 3
        it.ckpt.close()
        said = capfd.readouterr().err
        assert said.count("stepped between attach and the loop, on the state of step 3") == told
