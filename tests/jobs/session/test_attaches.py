"""Several attaches of one process, and what children and workers of it do not touch."""

import copy
import multiprocessing
import os
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

import autockpt
from autockpt.cli.shared.gather import run_data
from autockpt.profiling.pass_through import PassThroughSession
from autockpt.reports.model import build
from autockpt.run_directory import RunDirectory
from autockpt.session.attaches import Attaches, is_helper, within
from autockpt.session.job import current_job
from autockpt.values.errors import ConfigError
from autockpt.values.goal import Goal, RemoteWish
from autockpt.values.same_job import Job
from autockpt.values.telemetry import RunStarted
from tests.conftest import end_keeper, keeper_pids
from tests.support import trainings
from tests.unit.cli.scripts import python, write


@dataclass(eq=False)
class Held:
    """A session, as far as its place among others goes."""

    directory: str
    named: bool = False
    objects: Sequence[Any] = ()
    launch_id: str = "launch"
    superseded: list[str] = field(default_factory=list)
    disowned: int = 0

    def supersede(self, by: str) -> None:
        """Noted."""
        self.superseded.append(by)

    def disown(self) -> None:
        """Counted."""
        self.disowned += 1


def begin(attaches: Attaches, name: str | None, *, shared: bool = False) -> int:
    """Number of a run that then is in force."""
    number = attaches.number(name, "launch", shared=shared)
    attaches.began(Held(f"{name}-{number}", named=name is not None), name, shared=shared)
    return number


def test_each_attach_without_a_name_is_one_more_run() -> None:
    """In the same order again they are the same ones."""
    for _ in range(2):
        attaches = Attaches()
        assert [begin(attaches, None) for _ in range(3)] == [1, 2, 3]
    assert within("runs/x", 1) == "runs/x"
    assert within("runs/x", 3) == os.path.join("runs/x", "attach-3")


def test_an_attach_that_failed_is_none() -> None:
    """What tries again does not get another run, which would be empty."""
    attaches = Attaches()
    assert attaches.number(None, "launch", shared=False) == 1
    assert not attaches.any


def test_named_runs_are_numbered_where_a_launcher_gave_one_directory_for_all() -> None:
    """The name says which; elsewhere each name is a directory."""
    attaches = Attaches()
    names = ["a", None, "b", "a", "./a", None]
    assert [begin(attaches, name, shared=True) for name in names] == [1, 2, 3, 1, 1, 4]
    assert [begin(Attaches(), name) for name in ("a", "b")] == [1, 1]
    alone = Attaches()
    assert [begin(alone, name) for name in ("a", None, "b", None)] == [1, 1, 1, 2]


@pytest.mark.parametrize(
    ("former", "named", "ends"),
    [
        pytest.param(Held("x"), False, True, id="both without a name"),
        pytest.param(Held("x", named=True), False, False, id="it had a name"),
        pytest.param(Held("x"), True, False, id="the new one has a name"),
        pytest.param(Held("y", named=True), True, True, id="the same directory"),
        pytest.param(Held("x", named=True, objects=["model"]), True, True, id="the same model"),
        pytest.param(Held("y", launch_id="other"), False, False, id="another launch"),
    ],
)
def test_an_open_session_ends_where_a_new_one_takes_its_place(
    former: Held, named: bool, ends: bool
) -> None:
    """Two with names of their own go on side by side."""
    attaches = Attaches()
    attaches.began(former, None, shared=False)
    attaches.end_former("y", "launch", named=named, objects=["model", "optimizer"])
    assert former.superseded == (["y"] if ends else [])


def test_a_forked_child_has_attached_nothing() -> None:
    """What it attaches itself is its first run."""
    attaches, held = Attaches(), Held("x")
    attaches.began(held, None, shared=False)
    attaches.in_child()
    assert held.disowned == 1
    assert not attaches.any
    assert begin(attaches, None) == 1


def test_a_numbered_run_has_the_goal_of_the_first_and_storage_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else both would write one directory of checkpoints."""
    attaches = Attaches()
    monkeypatch.setattr("autockpt.session.job.of_this_process", attaches)
    monkeypatch.setattr(sys, "argv", ["train.py"])
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("AUTOCKPT_RUN_DIR", raising=False)
    goal = Goal(storage_path="store", remote=RemoteWish(url="file:///x"))
    jobs = []
    for policy in (goal, None, goal):
        jobs.append(current_job(policy=policy))
        held = Held(jobs[-1].run_directory, launch_id=jobs[-1].incarnation.launch_id)
        attaches.began(held, None, shared=False)
    assert [os.path.relpath(job.run_directory) for job in jobs] == [
        "runs/train", "runs/train/attach-2", "runs/train/attach-3",
    ]  # fmt: skip
    assert [os.path.relpath(job.checkpoints) for job in jobs] == [
        "store", "store/attach-2", "store/attach-3",
    ]  # fmt: skip
    assert [job.goal.remote.url for job in jobs] == ["file:///x", None, None]


def test_a_numbered_run_keeps_its_place_under_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a second process, which is told the number of writers alone."""
    monkeypatch.setattr(sys, "argv", ["train.py"])
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("AUTOCKPT_RUN_DIR", raising=False)
    monkeypatch.setenv("AUTOCKPT_DISK_PATH", str(tmp_path / "store"))
    places = []
    for _ in range(2):
        attaches = Attaches()
        monkeypatch.setattr("autockpt.session.job.of_this_process", attaches)
        for _ in range(2):
            job = current_job()
            places.append(os.path.relpath(job.checkpoints))
            held = Held(job.run_directory, launch_id=job.incarnation.launch_id)
            attaches.began(held, None, shared=False)
        monkeypatch.delenv("AUTOCKPT_DISK_PATH", raising=False)
        monkeypatch.setenv("AUTOCKPT_DISK_WRITERS", "2")
    assert places == ["store", "store/attach-2"] * 2


def test_a_run_that_this_process_attaches_again_is_another_round_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Below that of the next restart."""
    monkeypatch.setattr("autockpt.session.job.of_this_process", Attaches())
    rounds = []
    for restarts in ("0", "0", "1"):
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", restarts)
        rounds.append(current_job(run_dir=str(tmp_path)).incarnation.restart_round)
    assert rounds == sorted(set(rounds))


def train(steps: int, **arguments: Any) -> int:
    """Train to this step; the step at which it began."""
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    ckpt = autockpt.attach(model=model, optimizer=optimizer, **arguments)
    start = int(ckpt.step_count)
    for _ in ckpt.steps(steps):
        optimizer.zero_grad()
        model(torch.ones(1, 1)).sum().backward()
        optimizer.step()
    return start


@pytest.mark.usefixtures("attach")
def test_each_fresh_attach_to_one_run_begins_anew(
    new_run: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A restart in the second one goes on with that; without `fresh` the run goes on.

    An accepted start renews the record of the job, and says what it leaves behind.
    """
    run_dir = trainings.prepare(new_run(), trainings.plan(memory=1, disk=1))
    run, former = RunDirectory(run_dir), Job(script="former.py")
    run.write_job(former)
    monkeypatch.setenv("AUTOCKPT_SAME_JOB", "1")
    monkeypatch.setenv("AUTOCKPT_LAUNCH_ID", "launch")
    started = partial(train, run_dir=run_dir)
    assert [started(3, fresh=True), started(2, fresh=True), started(4)] == [0, 0, 2]
    assert run.read_job() not in (None, former)
    starts = [event for event in run.events() if isinstance(event, RunStarted)]
    assert [event.discards for event in starts] == [True, True, False]


@pytest.mark.usefixtures("attach")
def test_a_rollback_leaves_iterations_that_no_figure_counts(
    new_run: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`--resume-from` step 2 of 5, then `--fresh`: events and report say what still counts."""
    run_dir = trainings.prepare(new_run(), trainings.plan(memory=1, disk=1))
    run = RunDirectory(run_dir)
    monkeypatch.setenv("AUTOCKPT_RUN_DIR", run_dir)

    def launched(name: str, steps: int, **arguments: Any) -> int:
        monkeypatch.setenv("AUTOCKPT_LAUNCH_ID", name)
        return train(steps, **arguments)

    assert (launched("one", 2), launched("on", 5)) == (0, 2)
    (second,) = Path(run.checkpoints()).glob("ckpt-*-00000002")
    monkeypatch.setenv("AUTOCKPT_RESUME_FROM", second.name)
    assert launched("two", 4) == 2
    starts = [event for event in run.events() if isinstance(event, RunStarted)]
    assert [event.discards for event in starts] == [False, False, True]
    rolled_back = build(run_data(run))
    assert rolled_back.accounting is not None
    # Blocks leave out the first iteration of a process: 1 of the first one's, 1 of the last one's.
    assert (rolled_back.accounting.steps, rolled_back.accounting.lost_s) == (2, 0.0)
    assert rolled_back.accounting.left_s > 0.0
    assert "were left with --resume-from, and are not counted" in rolled_back.verdict.cost
    monkeypatch.delenv("AUTOCKPT_RESUME_FROM")
    assert launched("three", 3, fresh=True) == 0
    anew = build(run_data(run))
    assert anew.accounting is not None
    assert (anew.accounting.steps, anew.accounting.left_s) == (2, 0.0)
    assert "not counted" in {fact.label: fact.value for fact in anew.facts}["Begun anew"]


FOLDS = """
import copy, pickle, sys, torch, autockpt
for fold in range(3):
    torch.manual_seed(fold)
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ckpt = autockpt.attach(model=model, optimizer=optimizer)
    start = ckpt.step_count
    for step in ckpt.steps(4) if fold else range(start, 4):
        optimizer.zero_grad()
        model(torch.randn(4, 2)).sum().backward()
        optimizer.step()
    if fold == 0:
        torch.save(model, "model.pt")
    print("fold", fold, start, model.weight.tolist())
"""


@pytest.mark.usefixtures("attach")
def test_a_second_attach_is_a_run_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Attached in the same order again, each is where it was."""
    monkeypatch.setattr(sys, "argv", ["folds.py"])
    monkeypatch.chdir(tmp_path)
    run, found = str(tmp_path / "runs" / "folds"), []
    try:
        for launch in ("one", "two"):
            for steps in (3, 4):
                model = torch.nn.Linear(1, 1, bias=False)
                torch.nn.init.zeros_(model.weight)
                optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
                monkeypatch.setenv("AUTOCKPT_LAUNCH_ID", launch)
                ckpt = autockpt.attach(model=model, optimizer=optimizer)
                found.append((ckpt.step_count, round(-model.weight.item())))
                for _ in ckpt.steps(steps):
                    optimizer.zero_grad()
                    model(torch.ones(1, 1)).sum().backward()
                    optimizer.step()
        assert found == [(0, 0), (0, 0), (3, 3), (4, 4)]
    finally:
        for number in (1, 2):
            end_keeper(within(run, number))


@pytest.mark.slow
def test_folds_are_runs_of_their_own(tmp_path: Path) -> None:
    """The script that is started again finds each of them trained, with its own weights."""
    write(tmp_path, "folds.py", FOLDS)
    run = tmp_path / "runs" / "folds"
    try:
        first, again = (python("folds.py", cwd=tmp_path, AUTOCKPT_NO_PROFILE="1") for _ in range(2))
        assert first.returncode == again.returncode == 0, first.stderr + again.stderr
        trained = [line.split(maxsplit=3) for line in first.stdout.splitlines()]
        found = [line.split(maxsplit=3) for line in again.stdout.splitlines()]
        assert [line[2] for line in trained] == ["0", "0", "0"]
        assert [line[2] for line in found] == ["4", "4", "4"]
        assert [line[3] for line in trained] == [line[3] for line in found]
        assert len({line[3] for line in trained}) == 3
    finally:
        for number in (1, 2, 3):
            end_keeper(within(str(run), number))


class Rows(Dataset[int]):
    """Says of each row in which process it was read, and whether that has attached."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> int:
        assert is_helper()
        session = autockpt.attach(model=torch.nn.Linear(1, 1))
        assert isinstance(session, PassThroughSession)
        return index


@pytest.fixture
def training(attach: Callable[..., Any], new_run: Callable[..., str]) -> tuple[Any, Any, str]:
    """(session, one iteration, run directory)."""
    run_dir = trainings.prepare(new_run(), trainings.plan(memory=1, disk=1))
    model = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.zeros_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    ckpt = attach(model=model, optimizer=optimizer, run_dir=run_dir)

    def iterate() -> int:
        optimizer.zero_grad()
        model(torch.ones(1, 1)).sum().backward()
        optimizer.step()
        return int(ckpt.step())

    return ckpt, iterate, run_dir


def in_child(work: Callable[[], object]) -> int:
    """Exit code of a forked child that does it; 0 when it raised nothing."""
    child = os.fork()
    if not child:
        code = 1
        try:
            signal.alarm(60)
            work()
            code = 0
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_a_forked_child_leaves_the_run_to_its_parent(training: tuple[Any, Any, str]) -> None:
    """It trains, ends, and runs our exit function: nothing of the run changes."""
    ckpt, iterate, run_dir = training
    for _ in range(3):
        iterate()
    assert ckpt._client.wait_until(lambda: bool(ckpt._client.slots), 60)
    keepers, before = keeper_pids(run_dir), ckpt.step_count

    def child() -> None:
        descriptors = {os.readlink(f"/proc/self/fd/{name}") for name in os.listdir("/proc/self/fd")
                       if os.path.exists(f"/proc/self/fd/{name}")}  # fmt: skip
        assert not any("autockpt-slot" in name for name in descriptors), descriptors
        assert not autockpt.session.attached()
        for _ in range(5):
            iterate()
        ckpt.save()
        ckpt.wait_for_staging()
        ckpt._closing._at_exit()
        ckpt.close()

    assert in_child(child) == 0
    assert ckpt.step_count == before
    assert ckpt._client.connected
    for _ in range(3):
        iterate()
    ckpt.save()
    iterate()
    assert ckpt.wait_durable(60) > 0
    assert keeper_pids(run_dir) == keepers
    assert not ckpt._rank.warned & {"keeper", "snapshot"}


def test_workers_that_fork_train_nothing(training: tuple[Any, Any, str]) -> None:
    """An attach that they meet is none, and the run of their parent goes on."""
    ckpt, iterate, run_dir = training
    iterate()
    keepers = keeper_pids(run_dir)
    loader = DataLoader(Rows(), num_workers=2, multiprocessing_context="fork")
    for batch in loader:
        assert iterate() == batch.item() + 2
    assert ckpt._client.connected
    assert keeper_pids(run_dir) == keepers


def test_an_attach_met_while_a_spawned_process_imports_its_script_is_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Python marks a process so while it does."""
    monkeypatch.setattr(multiprocessing.current_process(), "_inheriting", True, raising=False)
    session = autockpt.attach(model=torch.nn.Linear(1, 1))
    assert isinstance(session, PassThroughSession)
    assert list(session.steps(2)) == [0, 1]
    monkeypatch.undo()
    assert not is_helper()


def test_the_loop_of_a_run_that_another_has_replaced_cannot_go_on(
    training: tuple[Any, Any, str],
) -> None:
    """It is refused at once: a restart would resume the two at different steps."""
    ckpt, iterate, _ = training
    iterate()
    ckpt._closing._supersede("runs/other")
    with pytest.raises(ConfigError, match=r"ended at step 1, when a later attach .* runs/other"):
        iterate()
    with pytest.raises(ConfigError, match="attach all models and optimizers in one call"):
        next(ckpt.steps(5))


def test_what_was_attached_is_free_after_the_end(training: tuple[Any, Any, str]) -> None:
    """No hook, no exit function and no signal handler of ours holds a model of an earlier fold."""
    ckpt, iterate, _ = training
    iterate()
    model = next(iter(ckpt._rank.live.models.values()))
    assert type(copy.deepcopy(model)._forward_pre_hooks) is not type(model._forward_pre_hooks)
    ckpt.close()
    assert not model._forward_pre_hooks
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    assert signal.set_wakeup_fd(-1) == -1


SPAWNED = """
import torch, autockpt
from torch.utils.data import DataLoader, TensorDataset
model = torch.nn.Linear(1, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = DataLoader(
    TensorDataset(torch.ones(6, 1)), num_workers=1, multiprocessing_context="spawn"
)
ckpt = autockpt.attach(model=model, optimizer=optimizer, data=loader)
if __name__ == "__main__":
    for step, (x,) in ckpt.batches(6):
        optimizer.zero_grad()
        model(x).sum().backward()
        optimizer.step()
    print("trained", ckpt.step_count)
"""


@pytest.mark.slow
def test_an_attach_at_the_top_of_a_script_with_spawned_workers(tmp_path: Path) -> None:
    """The worker imports the script, and must not take the run."""
    write(tmp_path, "top.py", SPAWNED)
    try:
        done = python("top.py", cwd=tmp_path, AUTOCKPT_NO_PROFILE="1")
        assert done.returncode == 0, done.stderr
        assert done.stdout == "trained 6\n"
        assert "degraded" not in done.stderr
    finally:
        end_keeper(str(tmp_path / "runs" / "top"))
