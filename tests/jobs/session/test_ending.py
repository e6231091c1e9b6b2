"""What the last checkpoint says: as many steps as there were updates, however the training ends."""

import contextlib
import itertools
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from autockpt.reports.analysis.degradation import degraded_tiers
from autockpt.run_directory import RunDirectory
from autockpt.values import telemetry as t
from tests.support import trainings
from tests.unit.cli.scripts import environment, python, warm, write

WARM = pytest.mark.usefixtures("warm_starts")
"""For processes that begin with torch imported.  One test begins cold, with imports of its own."""
DATA = TensorDataset(torch.arange(1.0, 101.0))


class Counted:
    """A training whose weight is minus the number of its updates."""

    def __init__(self, attach: Callable[..., Any], run_dir: str | None, data: Any = None) -> None:
        self.model = torch.nn.Linear(1, 1, bias=False)
        torch.nn.init.zeros_(self.model.weight)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1.0)
        self.ckpt = attach(model=self.model, optimizer=self.optimizer, data=data, run_dir=run_dir)
        self.first_step = self.ckpt.step_count

    def train(self) -> None:
        """One update."""
        self.optimizer.zero_grad()
        self.model(torch.ones(1, 1)).sum().backward()
        self.optimizer.step()

    def await_slots(self) -> None:
        """They are asked for at the first boundary; no checkpoint shall be skipped for them."""
        link = self.ckpt._client
        at_first = self.ckpt.step_count == self.first_step
        assert at_first or link.wait_until(lambda: bool(link.slots), 20)

    @property
    def updates(self) -> int:
        """How many there were, restored ones included."""
        return round(-self.model.weight.item())


@pytest.fixture
def begin(attach: Callable[..., Any], new_run: Callable[..., str]) -> Callable[..., Counted]:
    """Begins, or goes on with, a training that plans one checkpoint every third step."""
    run_dir = trainings.prepare(new_run(), trainings.plan(memory=3, disk=3))

    def make(data: Any = None) -> Counted:
        return Counted(attach, run_dir, data)

    return make


@pytest.mark.slow
def test_attach_alone_counts_the_last_step_when_the_script_ends(
    new_run: Callable[..., str], tmp_path: Path
) -> None:
    """The finished script trains nothing when it is started again."""
    source = f"""
import torch, autockpt
model = torch.nn.Linear(1, 1, bias=False)
torch.nn.init.zeros_(model.weight)
optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
ckpt = autockpt.attach(model=model, optimizer=optimizer, run_dir={new_run()!r})
print("from", ckpt.step_count)
for step in range(ckpt.step_count, 6):
    optimizer.zero_grad()
    model(torch.ones(1, 1)).sum().backward()
    optimizer.step()
print("updates", round(-model.weight.item()))
"""
    cwd = write(tmp_path, "s.py", source).parent
    for first, start in ((0, contextlib.nullcontext), (6, warm)):
        with start():
            done = python("s.py", cwd=cwd, AUTOCKPT_NO_PROFILE="1")
        assert done.stdout == f"from {first}\nupdates 6\n", done.stderr


def test_a_loop_with_nothing_left_says_which_run_is_over(
    begin: Callable[..., Counted],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Another experiment of the same script trained nothing, and exited with 0."""

    def said() -> str:
        it = begin()
        for _ in it.ckpt.steps(3):
            it.await_slots()
            it.train()
        assert it.updates == 3
        monkeypatch.setenv("AUTOCKPT_RUN_DIR", it.ckpt._job.run_directory)
        return capsys.readouterr().err

    assert "already at step" not in said()
    assert re.search(r"run that is already at step 3 of 3, .*; --run-dir DIR for another", said())
    monkeypatch.delenv("AUTOCKPT_RUN_DIR")
    assert re.search(
        r"run that is already at step 3 of 3, .*; attach\(run_dir=\.\.\.\) for", said()
    )


def test_who_names_no_run_is_told_which_one_goes_on(
    attach: Callable[..., Any],
    new_run: Callable[..., str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """More steps of what was meant as another experiment went on from the first one's weights."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["code/exp.py"])
    run_dir = trainings.prepare(new_run("runs/exp"), trainings.plan(memory=3, disk=3))
    for total, named in ((3, None), (6, None), (9, run_dir)):
        it = Counted(attach, named)
        for _ in it.ckpt.steps(total):
            it.await_slots()
            it.train()
        told = re.search(
            r"resumed step \d.* s\)( in runs/exp; attach\(run_dir=.*)?", capsys.readouterr().err
        )
        assert [bool(told), bool(told and told[1])] == [total > 3, total == 6]


def test_attach_alone_counts_nothing_that_it_cannot_see(begin: Callable[..., Counted]) -> None:
    """Updates without a call of the model have no boundaries to be numbered by."""
    it = begin()
    for _ in range(4):
        it.model.weight.grad = torch.ones(1, 1)
        it.optimizer.step()
    it.ckpt.close()
    again = begin()
    assert (again.ckpt.step_count, again.updates) == (0, 0)


def test_a_loop_left_within_an_iteration_keeps_the_checkpoint_before_it(
    begin: Callable[..., Counted], capfd: pytest.CaptureFixture[str]
) -> None:
    """The update behind it is of no step: in all there are as many as there are steps."""
    it = begin()
    for step in it.ckpt.steps(8):
        it.train()
        it.await_slots()
        if step == 4:
            assert it.ckpt.wait_durable(60)
            break
    it.ckpt.close()
    assert (
        "left within the iteration after step 4, so no checkpoint has it" in capfd.readouterr().err
    )
    assert (
        degraded_tiers(RunDirectory(it.ckpt._job.run_directory).events()) == ()
    )  # the disk is as good as before
    again = begin()
    assert (again.ckpt.step_count, again.updates) == (3, 3)
    for _ in again.ckpt.steps(8):
        again.train()
    assert again.updates == 8


def crashed(it: Counted, how: str) -> None:
    """Trains five steps, fails in the sixth and closes as scripts do."""
    try:
        for step in it.ckpt.steps(8):
            it.await_slots()
            it.train()
            if step == 5:
                raise RuntimeError("of the script")
    except RuntimeError as error:
        if how == "except":
            it.ckpt.close(final_checkpoint=False)
        else:
            sys.last_value = error
    if how == "hook":  # sys.excepthook runs behind every handler
        it.ckpt.close(final_checkpoint=False)
        del sys.last_value


@pytest.mark.parametrize("how", ["except", "hook"])
def test_closing_because_of_an_exception_is_a_failure(
    attach: Callable[..., Any], new_run: Callable[..., str], how: str
) -> None:
    """The keeper took it for the end of the training, and forgot what was in memory."""
    run_dir = trainings.prepare(new_run(), trainings.plan(memory=1, disk=1000))
    it = Counted(attach, run_dir)
    crashed(it, how)
    again = Counted(attach, run_dir)
    assert again.ckpt.step_count == again.updates >= 1
    ended = [e for e in RunDirectory.open(run_dir).events() if isinstance(e, t.RunEnded)]
    assert [(e.step, e.reason) for e in ended] == [(5, "error")]


def test_a_training_within_a_handler_can_finish(
    attach: Callable[..., Any], new_run: Callable[..., str]
) -> None:
    """A second try after an exception: that one is not of this training."""
    run_dir = trainings.prepare(new_run(), trainings.plan(memory=1, disk=1000))
    try:
        raise RuntimeError("out of memory")
    except RuntimeError:
        it = Counted(attach, run_dir)
        for _ in it.ckpt.steps(3):
            it.train()
            it.await_slots()
        it.ckpt.close()
    assert Counted(attach, run_dir).ckpt.step_count == 3
    ended = [e for e in RunDirectory.open(run_dir).events() if isinstance(e, t.RunEnded)]
    assert [e.reason for e in ended] == ["finished"]


def test_an_iteration_that_was_said_to_be_complete_is_kept(begin: Callable[..., Counted]) -> None:
    """step() before the break, and without one: the loop does not count it twice."""
    it = begin()
    for step in it.ckpt.steps(8):
        it.train()
        it.ckpt.step()
        assert it.ckpt.step_count == step + 1
        if step == 4:
            break
    it.ckpt.close()
    again = begin()
    assert (again.ckpt.step_count, again.updates) == (5, 5)


def test_a_batch_that_was_not_trained_with_comes_again(begin: Callable[..., Counted]) -> None:
    """Left before the update the state is whole, and the loader is put back by one batch."""
    bare = list(DataLoader(DATA, 7))
    for left, first in ((2, 0), (17, 2)):
        it = begin(DataLoader(DATA, 7))
        assert it.ckpt.step_count == first
        for step, (batch,) in it.ckpt.batches(40):
            assert torch.equal(batch, bare[step % 15][0])
            if step == left:
                break
            it.train()
        it.ckpt.close()
    again = begin(DataLoader(DATA, 7))
    assert (again.ckpt.step_count, again.updates) == (17, 17)
    step, (batch,) = next(again.ckpt.batches(40))
    assert torch.equal(batch, bare[2][0])


@pytest.mark.parametrize("loop", ["batches", "steps"])
def test_a_loop_that_goes_on_behind_close_comes_to_its_end(
    begin: Callable[..., Counted], loop: str
) -> None:
    """Unprotected; what it still trains is of no checkpoint."""
    it, seen = begin(DataLoader(DATA, 7)), []
    for one in itertools.islice(getattr(it.ckpt, loop)(5), 9):
        seen.append(one if loop == "steps" else one[0])
        it.train()
        if len(seen) == 3:
            it.ckpt.step()
            it.ckpt.close()
    assert seen == [0, 1, 2, 3, 4]
    again = begin(DataLoader(DATA, 7))
    assert (again.ckpt.step_count, again.updates) == (3, 3)


@pytest.mark.parametrize("loop", ["batches", "steps", "attach alone"])
def test_a_forward_is_part_of_an_iteration_that_is_not_kept(
    begin: Callable[..., Counted], loop: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """It may have changed buffers and generators, and its batch comes again."""
    it = begin(DataLoader(DATA, 7) if loop == "batches" else None)
    own = {"batches": lambda: it.ckpt.batches(8), "steps": lambda: it.ckpt.steps(8)}
    for step, _ in enumerate(own.get(loop, itertools.count)()):
        it.await_slots()
        if step == 4:
            it.model(torch.ones(1, 1))
            break
        it.train()
    it.ckpt.close()
    assert (
        "left within the iteration after step 4, so no checkpoint has it" in capfd.readouterr().err
    )
    again = begin(it.ckpt._position.data and DataLoader(DATA, 7))
    assert (again.ckpt.step_count, again.updates) == (3, 3)


class Noisy(TensorDataset):
    """Draws with every sample, as augmentations do."""

    def __getitem__(self, index: int) -> Any:
        """A number that does not come again."""
        return torch.rand(1) + self.tensors[0][index]


def handed_out(it: Counted, *, left: int) -> list[Any]:
    """Batches of a loop that is left in this step, before anything is called."""
    seen = []
    for step, batch in it.ckpt.batches(8):
        seen.append(batch)
        it.await_slots()
        if step == left:
            break
        it.train()
    it.ckpt.close()
    return seen


def test_a_batch_that_was_drawn_for_comes_again_as_it_was(begin: Callable[..., Counted]) -> None:
    """The generators have gone on with it, and cannot be put back."""
    it = begin(DataLoader(Noisy(*DATA.tensors), 7))
    seen = handed_out(it, left=4)
    again = begin(DataLoader(Noisy(*DATA.tensors), 7))
    assert (again.ckpt.step_count, again.updates) == (3, 3)
    for (_, batch), before in zip(again.ckpt.batches(8), seen[3:], strict=False):
        assert torch.equal(batch, before)
        again.train()


def test_a_loader_that_counts_itself_is_not_saved_one_batch_ahead(
    begin: Callable[..., Counted],
) -> None:
    """It cannot be put back, so the checkpoint before stays the last one."""
    inputs, labels = torch.arange(40.0).view(40, 1), torch.arange(40)

    def loader() -> Any:
        return trainings.StatefulLoader(inputs, labels, 4, 0)

    it = begin(loader())
    seen = handed_out(it, left=5)
    again = begin(loader())
    assert (again.ckpt.step_count, again.updates) == (3, 3)
    _, (batch, _) = next(again.ckpt.batches(8))
    assert torch.equal(batch, seen[3][0])


class SharedState(trainings.StatefulLoader):
    """What it says of itself goes on with it."""

    def state_dict(self) -> dict[str, Any]:
        """Its attributes, which are no copy."""
        return vars(self)


@pytest.mark.parametrize("kind", [trainings.StatefulLoader, SharedState])
def test_attach_alone_saves_the_data_as_it_was_behind_the_update(
    begin: Callable[..., Counted], kind: Any
) -> None:
    """The boundary comes with the next forward; the batch drawn for it is not left out."""
    inputs, labels = torch.arange(40.0).view(40, 1), torch.arange(40)
    loader = kind(inputs, labels, 4, 0)
    it, seen = begin(loader), []
    for batch, _ in itertools.islice(loader, 5):
        seen.append(batch)
        it.await_slots()
        it.train()
    it.ckpt.wait_durable(30)
    it.ckpt.close(final_checkpoint=False)
    again = begin(again_loader := kind(inputs, labels, 4, 0))
    assert (again.ckpt.step_count, again.updates) == (3, 3)
    batch, _ = next(iter(again_loader))
    assert torch.equal(batch, seen[3])


def test_attach_alone_saves_when_asked_behind_the_update(
    attach: Callable[..., Any], new_run: Callable[..., str]
) -> None:
    """The boundary at hand cannot be saved any more; the next one is."""
    run_dir = trainings.prepare(new_run(), trainings.plan(memory=1000, disk=1000))
    it = Counted(attach, run_dir)
    for step in range(6):
        if step == 3:
            it.ckpt.save()
        it.train()
        it.await_slots()
    assert it.ckpt.wait_durable(20)
    it.ckpt.close(final_checkpoint=False)
    again = Counted(attach, run_dir)
    assert (again.ckpt.step_count, again.updates) == (4, 4)


def test_batches_that_nobody_counts_are_told(
    begin: Callable[..., Counted], capfd: pytest.CaptureFixture[str]
) -> None:
    """A loader that says nothing of itself, in a loop that is not ours."""
    loader = DataLoader(DATA, 7)
    it = begin(loader)
    for _ in itertools.islice(loader, 3):
        it.train()
        it.ckpt.step()
    it.ckpt.close()
    assert capfd.readouterr().err.count("no batch came from ckpt.batches()") == 1


TWO_RANKS = """
import os, sys, time
import torch, autockpt
from autockpt.session.endings import closing
closing.ALONE_S = 2.0
model = torch.nn.Linear(1, 1, bias=False)
optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
ckpt = autockpt.attach(model=model, optimizer=optimizer, run_dir=sys.argv[1])
for _ in range(2):
    model(torch.ones(1, 1)).sum().backward()
    optimizer.step()
    ckpt.step()
    assert ckpt._client.wait_until(lambda: ckpt.ready, 30)
if ckpt._job.rank == 0:
    time.sleep(600)  # in a collective that nobody joins
print("leaving", flush=True)
sys.exit("no more")
"""


@WARM
@pytest.mark.parametrize("start", [("-m", "autockpt.cli.script_runner"), ()], ids=["boot", "bare"])
def test_a_rank_that_ends_alone_is_gone_soon(
    start: tuple[str, ...], new_run: Callable[..., str], tmp_path: Path
) -> None:
    """With our launcher `sys.exit("...")` is a failure like others: no checkpoint is tried.
    Without it nobody can tell: the others are waited for, but once and not for long."""
    run_dir = trainings.prepare(new_run(), trainings.plan(memory=5, disk=5))
    write(tmp_path, "s.py", TWO_RANKS)
    ranks = []
    try:
        for rank in range(2):
            place = {
                "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2",
                "LOCAL_WORLD_SIZE": "2", "AUTOCKPT_LAUNCH_ID": "pair",
            }  # fmt: skip
            ranks.append(
                subprocess.Popen(
                    [sys.executable, *start, "s.py", run_dir], cwd=tmp_path, text=True,
                    env=environment(**place, AUTOCKPT_NO_PROFILE="1"), stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                )
            )  # fmt: skip
        assert ranks[1].stdout is not None
        assert ranks[1].stdout.readline() == "leaving\n"
        left = time.monotonic()
        _, said = ranks[1].communicate(timeout=60)
        assert time.monotonic() - left < 15, said
    finally:
        for process in ranks:
            process.kill()
            process.communicate(timeout=20)
    assert ranks[1].returncode == 1
    assert said.endswith("no more\n") or not start
    assert ("other ranks have not begun it within 2 s" in said) == (not start), said


def test_one_rank_names_its_last_checkpoint_by_the_step_alone(
    begin: Callable[..., Counted],
) -> None:
    """Nothing else was called so."""
    it = begin()
    for step in it.ckpt.steps(100):
        it.train()
        it.await_slots()
        if step == 3:
            it.ckpt.step()
            break
    it.ckpt.close()
    names = [path.parent.name for path in Path(it.ckpt._job.checkpoints).glob("ckpt-*/COMMIT")]
    assert "ckpt-t0001-step-00000004" in names, names


class Gone:
    """A stderr that nobody reads any more."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    def write(self, text: str) -> int:
        """Raises."""
        raise self._error

    def flush(self) -> None:
        """Raises."""
        raise self._error


@pytest.mark.parametrize("error", [BrokenPipeError(), OSError(28, "full"), ValueError("closed")])
def test_a_terminal_that_is_gone_ends_no_training(
    error: Exception, begin: Callable[..., Counted], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither the first start nor a resume, which both have something to say."""
    monkeypatch.setattr(sys, "stderr", Gone(error))
    for total in (3, 6):
        it = begin()
        for _ in it.ckpt.steps(total):
            it.train()
        assert it.updates == total
