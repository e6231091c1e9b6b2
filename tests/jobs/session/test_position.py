"""A resume that nothing of the script goes along with is refused: exit code 91."""

import itertools
import logging
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from autockpt.session.place import position
from autockpt.session.place.script.frames import is_only_shown
from autockpt.values import exit_codes, script_errors
from tests.jobs.session.test_ending import DATA
from tests.support import trainings
from tests.unit.cli.scripts import python, write

Make = Callable[..., "Plain"]


class Plain:
    """A training that reads nothing of its session by itself; its weight is minus its updates."""

    def __init__(self, attach: Callable[..., Any], run_dir: str, **attached: Any) -> None:
        self.model = torch.nn.Linear(1, 1, bias=False)
        torch.nn.init.zeros_(self.model.weight)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1.0)
        self.ckpt = attach(model=self.model, optimizer=self.optimizer, run_dir=run_dir, **attached)

    def train(self, steps: int) -> None:
        """A loop that begins at 0 whatever was resumed."""
        for _ in range(steps):
            self.optimizer.zero_grad()
            self.model(torch.ones(1, 1)).sum().backward()
            self.optimizer.step()

    @property
    def updates(self) -> int:
        """How many there were, restored ones included."""
        return round(-self.model.weight.item())


@pytest.fixture
def begin(attach: Callable[..., Any], new_run: Callable[..., str]) -> Make:
    """Begins, or goes on with, one run."""
    run_dir = trainings.prepare(new_run(), trainings.plan(memory=3, disk=3))
    return lambda **attached: Plain(attach, run_dir, **attached)


def ended(it: Plain, steps: int = 4) -> None:
    """Trains and makes the last checkpoint."""
    it.train(steps)
    it.ckpt.close()


def test_a_plain_loop_is_not_resumed_from_its_beginning(
    begin: Make, capfd: pytest.CaptureFixture[str]
) -> None:
    """Told in the first start, refused in the second in front of anything."""
    ended(begin())
    assert capfd.readouterr().err.count("a restart will be refused (exit code 91)") == 1
    it = begin()
    with pytest.raises(SystemExit, match="91"):
        it.train(1)
    said = capfd.readouterr().err
    assert it.updates == 4
    assert "refused: the state was resumed at step 4, but nothing puts the loop" in said
    assert 'attach(data="script")' in said


@pytest.mark.parametrize("read", ["shown", "late"])
def test_a_count_that_is_shown_or_comes_late_places_nothing(
    begin: Make, read: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """Printed before the loop, or read behind the first step of an optimizer."""

    def train(it: Plain) -> None:
        ckpt = it.ckpt
        if read == "shown":
            print("goes on at", ckpt.step_count, flush=True)
        for _ in range(4):
            it.train(1)
            if read == "late" and ckpt.step_count % 2 == 0:
                print("two more")

    first = begin()
    train(first)
    first.ckpt.close()
    assert capfd.readouterr().err.count("a restart will be refused (exit code 91)") == 1
    second = begin()
    with pytest.raises(SystemExit, match="91"):
        train(second)
    assert "did not read ckpt.step_count to begin there" in capfd.readouterr().err
    assert begin().updates == 4


class Counting:
    """Has the count that a loop begins at."""

    seen: tuple[bool, ...] = ()

    @property
    def step_count(self) -> int:
        """Notes what becomes of it."""
        self.seen += (is_only_shown(sys._getframe(1)),)
        return 7


def test_what_becomes_of_a_count_is_read_from_the_source() -> None:
    """A log or a bar shows it, in a text too; all else may begin there."""
    ckpt = Counting()
    log, bar = logging.getLogger("x"), types.SimpleNamespace(set_description=str)
    print("step", ckpt.step_count, end="")
    log.info("at %d", ckpt.step_count)
    bar.set_description(f"at {ckpt.step_count}")
    print(f"at {str(ckpt.step_count).rjust(4)}", end="")
    assert ckpt.seen == (True,) * 4
    ckpt.seen = ()
    assert f"{ckpt.step_count}.pt" == "7.pt"  # the name of a file, for one
    print(len(range(ckpt.step_count, 9)))
    list(range(ckpt.step_count, 9))
    start = ckpt.step_count
    while ckpt.step_count < start:
        break
    int(ckpt.step_count)
    exec("ckpt.step_count")  # without a source
    assert ckpt.seen == (False,) * 7


def untaken(it: Plain) -> None:
    """A script whose loop of ours stands in a branch that it does not take."""
    ckpt = it.ckpt
    it.train(4)
    if it.updates < 0:
        for _ in ckpt.steps(9):
            it.train(1)


def test_a_loop_of_ours_that_never_comes_does_not_hide_the_scripts_own(
    begin: Make, capfd: pytest.CaptureFixture[str]
) -> None:
    """Told where the first start ends; in the second the iterations are not kept."""
    first = begin()
    untaken(first)
    first.ckpt.close()
    assert capfd.readouterr().err.count("a restart will be refused (exit code 91)") == 1
    second = begin()
    untaken(second)
    with pytest.raises(SystemExit, match="91"):
        second.ckpt.close()
    assert "at step 4, but nothing puts the loop" in (said := capfd.readouterr().err)
    assert "; the 4 iterations since are not kept. " in said
    assert begin().updates == 4


@pytest.mark.parametrize("said", ["attach", "environment", "own state"])
def test_a_script_that_sees_to_it_goes_on(
    begin: Make,
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """By attach(data="script"), by AUTOCKPT_DATA, by a loader that keeps its own place."""
    inputs, labels = torch.arange(40.0).view(40, 1), torch.arange(40)
    attached: dict[str, Any] = {
        "attach": {"data": "script"},
        "environment": {},
        "own state": {"data": trainings.StatefulLoader(inputs, labels, 4, 0)},
    }[said]
    if said == "environment":
        monkeypatch.setenv("AUTOCKPT_DATA", "script")
    ended(begin(**attached))
    it = begin(**attached)
    it.train(1)
    assert it.updates == 5
    assert "exit code 91" not in capfd.readouterr().err


def test_an_attached_loader_that_is_iterated_elsewhere_is_not_resumed(
    begin: Make, capfd: pytest.CaptureFixture[str]
) -> None:
    """Its place is known to ckpt.batches() alone, also in a loop of ours that counts steps."""
    ended(begin(data=DataLoader(DATA, 7)))
    it = begin(data=DataLoader(DATA, 7))
    with pytest.raises(SystemExit, match="91"):
        [it.train(1) for _ in it.ckpt.steps(8)]
    assert it.updates == 4
    assert "no batch came from ckpt.batches(), so the attached loader" in capfd.readouterr().err


@pytest.mark.parametrize("attached", [{}, {"data": "script"}, {"data": DataLoader(DATA, 7)}])
def test_a_loader_that_feeds_the_loop_unattached_is_named(
    begin: Make, capfd: pytest.CaptureFixture[str], attached: dict[str, Any]
) -> None:
    """It begins anew after a restart, though the loop begins where the state is."""
    it, batches = begin(**attached), iter(DataLoader(DATA, 7))
    if isinstance(attached.get("data"), DataLoader):
        batches = (batch for _, batch in it.ckpt.batches(2))
    for _ in range(it.ckpt.step_count, 2):
        next(batches)
        it.train(1)
        if not isinstance(attached.get("data"), DataLoader):
            it.ckpt.step()
    it.ckpt.close()
    is_named = "a DataLoader that is not attached feeds" in capfd.readouterr().err
    assert is_named == (not attached)


def test_step_by_itself_puts_nothing_where_the_state_is(begin: Make) -> None:
    """An iteration is counted; which one the script believes it to be nobody has asked."""
    ended(begin())
    it = begin()
    it.model.weight.grad = torch.ones(1, 1)
    it.optimizer.step()
    with pytest.raises(SystemExit, match="91"):
        it.ckpt.step()


def test_a_loop_that_will_ask_is_waited_for(begin: Make) -> None:
    """What is trained before it is another matter; the loop goes on where the state is."""
    ended(begin())
    it = begin()
    it.train(2)
    assert [it.train(1) for _ in it.ckpt.steps(8)] == [None] * 4
    assert it.updates == 4 + 2 + 4


FRAMEWORK = """
class Trainer:
    def train(self, on_begin, step):
        on_begin()
        for epoch in range(2):
            for batch in range(3):
                step()
"""


def framework(name: str) -> Any:
    """A trainer whose module has the name of a real one."""
    module = types.ModuleType(name)
    exec(compile(FRAMEWORK, f"{name}.py", "exec"), module.__dict__)
    return module.__dict__["Trainer"]()


@pytest.mark.parametrize(
    "module", ["transformers.trainer", "lightning.pytorch.trainer.trainer", "ignite.engine.engine"]
)
def test_the_loop_of_a_framework_is_not_resumed(
    begin: Make, module: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """As a callback is written first: attach, read step_count, call step()."""
    made: list[Plain] = []

    def on_begin() -> None:
        made.append(begin())
        assert made[-1].ckpt.step_count >= 0

    def step() -> None:
        made[-1].train(1)
        made[-1].ckpt.step()

    framework(module).train(on_begin, step)
    made[-1].ckpt.close()
    name = position.FRAMEWORKS[next(m for m in position.FRAMEWORKS if module.startswith(m))]
    assert f"(exit code 91): the loop is that of {name}" in capfd.readouterr().err
    with pytest.raises(SystemExit, match="91"):
        framework(module).train(on_begin, step)
    assert len(made) == 1
    assert f"at step 6, but the loop is that of {name}" in capfd.readouterr().err


def test_a_loop_of_a_framework_that_iterates_batches_of_ours_goes_on(begin: Make) -> None:
    """Its counters are its own matter; loop and data are ours."""

    def train(it: Plain, steps: int) -> None:
        batches = it.ckpt.batches(8)
        framework("ignite.engine.engine").train(
            lambda: None, lambda: (next(batches, None), it.train(1))
        )

    it = begin(data=DataLoader(DATA, 7))
    train(it, 6)
    it.ckpt.step()
    it.ckpt.close()
    again = begin(data=DataLoader(DATA, 7))
    step, (batch,) = next(again.ckpt.batches(8))
    assert (step, batch.tolist()) == (6, DATA.tensors[0][42:49].tolist())
    again.train(1)


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("transformers.trainer_callback", "Hugging Face Trainer"),
        ("lightning.fabric.fabric", None),
        ("transformers.trainers_own", None),
        ("accelerate.accelerator", None),
        ("ignite.distributed.launcher", None),
    ],
)
def test_only_a_framework_that_owns_the_loop_counts(module: str, name: str | None) -> None:
    """Others only start the script's function, or wrap its objects."""
    seen: list[str | None] = []
    import sys

    framework(module).train(
        lambda: seen.append(position.framework_of(sys._getframe())), lambda: None
    )
    assert seen == [name]


class Holder:
    """Has a state."""

    def __init__(self, state: dict[str, Any]) -> None:
        self.state_dict = lambda: state


class Target(torch.nn.Module):
    """A model that is attached as another object; its buffer counts its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.tensor(3))


def test_objects_that_may_count_batches_are_the_scripts_own() -> None:
    """A class of torch, or what is named as a schedule or an average, does not."""
    own, sgd = object(), torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)
    assert position.may_keep_values([("progress", own)])
    assert not position.may_keep_values([("ema_model", own), ("scheduler_2", own), ("other", sgd)])
    own, blind = Holder({"at": {"epoch": 3}}), Holder({"best": 0.5, "done": False})
    assert position.may_hold_place([("progress", own)])
    assert position.may_hold_place([("progress", Holder({"n": [torch.tensor(2)]}))])
    assert not position.may_hold_place([("best", blind), ("target", Target())])
    assert not position.may_hold_place([("ema_model", own), ("scheduler_2", own), ("other", sgd)])
    assert not position.may_hold_place([])


def test_a_refusal_is_final_and_no_evidence_of_machines() -> None:
    """Another start would meet it again."""
    assert script_errors.origin_of(SystemExit(exit_codes.WOULD_TRAIN_WRONGLY)) == "mistake"


def test_the_exit_codes_are_those_of_the_page() -> None:
    """docs/reference/exit_codes.md shows the table."""
    page = (Path(__file__).parents[3] / "docs" / "reference" / "exit_codes.md").read_text(
        encoding="utf-8"
    )
    rows = [f"| {c} | {what} | {do} |" for c, (what, do) in exit_codes.EXIT_CODES.items()]
    assert list(itertools.filterfalse(page.__contains__, rows)) == []


SCRIPT = """
import torch, autockpt
model = torch.nn.Linear(1, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
ckpt = autockpt.attach(model=model, optimizer=optimizer)
for epoch in range(2):
    for batch in range(3):
        optimizer.zero_grad()
        model(torch.ones(1, 1)).sum().backward()
        optimizer.step()
print("trained", flush=True)
"""


UNTAKEN = SCRIPT.replace(
    "print(",
    """if batch < 0:
    for step in ckpt.steps(9):
        pass
print(""",
)


@pytest.mark.slow
def test_a_script_that_ends_by_itself_has_that_exit_code_too(tmp_path: Path) -> None:
    """It does not close its session; the second start trains, and keeps nothing of it."""
    cwd = write(tmp_path, "train.py", UNTAKEN).parent
    run = ("-m", "autockpt", "run", "--run-dir", "runs/own", "--no-profile", "train.py")
    for words in (("train.py",), run):
        assert python(*words, cwd=cwd).returncode == 0
        done = python(*words, cwd=cwd)
        assert (done.returncode, done.stdout) == (91, "trained\n"), done.stderr
        assert done.stderr.count("the 6 iterations since are not kept") == 1


@pytest.mark.slow
def test_the_command_returns_it_and_starts_nothing_again(tmp_path: Path) -> None:
    """As a user would meet it, with `autockpt run` and with plain Python."""
    cwd = write(tmp_path, "train.py", SCRIPT).parent
    run = ("-m", "autockpt", "run", "--run-dir", "runs/train", "--no-profile", "train.py")
    first = python(*run, cwd=cwd)
    assert (first.returncode, first.stdout) == (0, "trained\n"), first.stderr
    for words in (run, ("train.py",)):
        done = python(*words, cwd=cwd)
        assert (done.returncode, done.stdout) == (91, ""), done.stderr
        assert done.stderr.count("refused: the state was resumed at step 6") == 1
        assert "restarting" not in done.stderr
