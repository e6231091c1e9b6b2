"""An end that is announced: the coming boundary is the last checkpoint, on all ranks."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import DataLoader

from autockpt.run_directory import RunDirectory
from autockpt.values import telemetry as t
from tests.jobs.session.test_ending import DATA, Counted
from tests.support import trainings
from tests.unit.cli.scripts import environment, write

WARM = pytest.mark.usefixtures("warm_starts")
"""For processes that begin with torch imported.  One test begins cold, with imports of its own."""
PATIENCE_S = 60.0


@pytest.fixture
def begin(attach: Callable[..., Any], new_run: Callable[..., str]) -> Callable[..., Counted]:
    """Begins, or goes on with, a training whose plan makes no checkpoint for long."""
    run_dir = trainings.prepare(new_run(), trainings.plan(memory=1000, disk=1000))

    def make(data: Any = None) -> Counted:
        return Counted(attach, run_dir, data)

    return make


def asked(it: Counted) -> None:
    """Asks for a stop, and waits until that is known."""
    it.ckpt.request_stop()
    deadline = time.monotonic() + PATIENCE_S
    while not it.ckpt._stopper.is_stopping:
        assert time.monotonic() < deadline
        time.sleep(0.001)


@pytest.mark.parametrize("loop", ["batches", "steps", "step"])
def test_a_stop_that_is_asked_for_saves_the_coming_boundary(
    begin: Callable[..., Counted], loop: str
) -> None:
    """Durable, and exactly that step."""
    it = begin(DataLoader(DATA, 7) if loop == "batches" else None)
    seen = []
    loops: dict[str, Callable[[], Any]] = {
        "batches": lambda: it.ckpt.batches(50), "steps": lambda: it.ckpt.steps(50)
    }  # fmt: skip
    for step, _ in enumerate(loops.get(loop, lambda: range(50))()):
        seen.append(step)
        it.train()
        if step == 4:
            asked(it)
        if loop == "step":
            it.ckpt.step()
        if it.ckpt.stopped:
            break
    assert it.ckpt.stopped
    again = begin(DataLoader(DATA, 7) if loop == "batches" else None)
    assert again.ckpt.step_count == again.updates == it.ckpt.step_count == 5


def test_attach_alone_stops_at_a_boundary_whose_random_state_was_kept(
    begin: Callable[..., Counted],
) -> None:
    """Behind the update it is too late for the boundary at hand."""
    it = begin()
    for step in range(50):
        it.train()
        if step == 4:
            asked(it)
        if it.ckpt.stopped:
            break
    again = begin()
    # The session had ended when the update of the iteration behind the last boundary came.
    assert again.ckpt.step_count == again.updates == it.ckpt.step_count == it.updates - 1 == 6


def test_a_stop_waits_for_the_gradients_that_are_being_accumulated(
    begin: Callable[..., Counted],
) -> None:
    """The boundary behind the optimizer's step: a checkpoint before it would lose gradients."""
    it = begin()
    for step in it.ckpt.steps(50):
        it.model(it.model.weight.new_ones(1, 1)).sum().backward()
        if step % 4 == 3:
            it.optimizer.step()
            it.optimizer.zero_grad()
        if step == 8:
            asked(it)
    assert it.ckpt.step_count == 12
    again = begin()
    assert (again.ckpt.step_count, again.updates) == (12, 12)


def test_a_stop_in_the_last_iteration_is_the_end(begin: Callable[..., Counted]) -> None:
    """All steps are trained; nothing is made twice."""
    it = begin()
    for step in it.ckpt.steps(6):
        it.train()
        if step == 5:
            asked(it)
    assert begin().ckpt.step_count == 6
    ended = [e for e in RunDirectory.open(it.ckpt._job.run_directory).events()
             if isinstance(e, t.RunEnded)]  # fmt: skip
    assert (ended[0].step, ended[0].reason) == (6, "finished")


SCRIPT = """
import os, signal, sys, time
import torch, autockpt
OWN
torch.manual_seed(0)
model = torch.nn.Linear(1, 1, bias=False)
torch.nn.init.zeros_(model.weight)
optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
ckpt = autockpt.attach(model=model, optimizer=optimizer, run_dir=sys.argv[1])
for step in ckpt.steps(1000000):
    optimizer.zero_grad()
    model(torch.ones(1, 1)).sum().backward()
    optimizer.step()
    if step >= 3:
        open(f"ready-{ckpt._job.rank}", "w").close()
    time.sleep(0.01)
print("behind the loop", flush=True)
"""


@contextmanager
def ranks(
    tmp_path: Path, run_dir: str, *, count: int = 1, own: str = ""
) -> Iterator[list["subprocess.Popen[str]"]]:
    """Trainings in processes of their own, some steps in; ended when the block is."""
    write(tmp_path, "s.py", SCRIPT.replace("OWN", own))
    started = []
    try:
        for rank in range(count):
            place = {} if count == 1 else {
                "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(count),
                "LOCAL_WORLD_SIZE": str(count), "AUTOCKPT_LAUNCH_ID": "pair",
            }  # fmt: skip
            started.append(
                subprocess.Popen(
                    [sys.executable, "s.py", run_dir], cwd=tmp_path, text=True,
                    env=environment(**place, AUTOCKPT_NO_PROFILE="1"),
                    stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                )
            )  # fmt: skip
        deadline = time.monotonic() + PATIENCE_S
        while not all((tmp_path / f"ready-{rank}").exists() for rank in range(count)):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        yield started
    finally:
        for process in started:
            process.kill()
            process.communicate(timeout=PATIENCE_S)


def durable_steps(run_dir: str) -> list[int]:
    """Of the checkpoints that were made durable."""
    events = RunDirectory.open(run_dir).events()
    return [e.step for e in events if isinstance(e, t.CheckpointDurable)]


def ended_at(run_dir: str) -> list[int]:
    """Steps at which ranks said that a signal ended them."""
    events = RunDirectory.open(run_dir).events()
    return [e.step for e in events if isinstance(e, t.RunEnded) and e.reason == "signal"]


@pytest.mark.parametrize(
    "number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow)]
)
def test_a_signal_saves_the_coming_boundary_and_leaves(
    new_run: Callable[..., str], tmp_path: Path, number: signal.Signals
) -> None:
    """Nothing was saved: SIGTERM wrote what was in memory, and Ctrl-C was an exception."""
    run_dir = trainings.prepare(new_run(), trainings.plan(memory=1000000, disk=1000000))
    with ranks(tmp_path, run_dir) as (rank,):
        rank.send_signal(number)
        out, err = rank.communicate(timeout=PATIENCE_S)
    assert (rank.returncode, out) == (128 + number, ""), err
    (step,) = ended_at(run_dir)
    assert durable_steps(run_dir) == [step]
    assert f"stopped at step {step}; the checkpoint of step {step} is durable" in err
    assert "Traceback" not in err


@WARM
def test_two_ranks_stop_at_one_boundary_though_one_was_told(
    new_run: Callable[..., str], tmp_path: Path
) -> None:
    """They agree on it: neither waits for the other, and the checkpoint is whole."""
    run_dir = trainings.prepare(new_run(), trainings.plan(memory=1000000, disk=1000000))
    with ranks(tmp_path, run_dir, count=2) as pair:
        pair[1].send_signal(signal.SIGUSR1)
        said = [process.communicate(timeout=PATIENCE_S)[1] for process in pair]
    assert [process.returncode for process in pair] == [128 + signal.SIGUSR1] * 2, said
    steps = ended_at(run_dir)
    assert len(steps) == 2
    assert set(durable_steps(run_dir)) == set(steps)


@WARM
@pytest.mark.slow
def test_a_rank_whose_neighbour_is_lost_does_not_wait_for_a_checkpoint(
    new_run: Callable[..., str], tmp_path: Path
) -> None:
    """torchelastic ends the ranks that are left, and starts none before they are gone."""
    run_dir = trainings.prepare(new_run(), trainings.plan(memory=2, disk=1000000))
    with ranks(tmp_path, run_dir, count=2) as pair:
        pair[1].kill()
        pair[1].wait(PATIENCE_S)
        began = time.monotonic()
        pair[0].send_signal(signal.SIGTERM)
        _, err = pair[0].communicate(timeout=PATIENCE_S)
        took_s = time.monotonic() - began
    assert pair[0].returncode == 128 + signal.SIGTERM
    assert took_s < 20, err  # and not the 25 s that a grace of 30 s leaves
    assert "no checkpoint of the coming step" in err


@WARM
@pytest.mark.slow
def test_a_handler_of_the_script_is_kept_and_can_ask_for_the_stop(
    new_run: Callable[..., str], tmp_path: Path
) -> None:
    """What an end is says the script; `request_stop` is callable from there."""
    run_dir = trainings.prepare(new_run(), trainings.plan(memory=1000000, disk=1000000))
    own = """
def leave(number, frame):
    print("script told", flush=True)
    ckpt.request_stop()
signal.signal(signal.SIGTERM, leave)
"""
    with ranks(tmp_path, run_dir, own=own) as (rank,):
        rank.send_signal(signal.SIGTERM)
        out, err = rank.communicate(timeout=PATIENCE_S)
    assert (rank.returncode, out) == (0, "script told\nbehind the loop\n"), err
    assert "the script asked for a stop: stopped at step" in err
    assert len(durable_steps(run_dir)) == 1


@WARM
@pytest.mark.slow
def test_a_second_signal_ends_at_once(new_run: Callable[..., str], tmp_path: Path) -> None:
    """While the loop does not come to a boundary; what it says of checkpoints is true."""
    run_dir = trainings.prepare(new_run(), trainings.plan(memory=1000000, disk=1000000))
    own = "time.sleep = lambda s, sleep=time.sleep: sleep(600 if os.path.exists('ready-0') else s)"
    with ranks(tmp_path, run_dir, own=own) as (rank,):
        rank.send_signal(signal.SIGTERM)
        assert rank.stderr is not None
        while "makes a checkpoint of the coming step" not in rank.stderr.readline():
            pass
        rank.send_signal(signal.SIGHUP)
        _, err = rank.communicate(timeout=PATIENCE_S)
    assert rank.returncode == 128 + signal.SIGHUP
    assert "ends at once; nothing newer than step 0, where it began, is durable" in err
    assert durable_steps(run_dir) == []
    assert os.path.isdir(run_dir)
