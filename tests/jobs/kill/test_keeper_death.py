"""The keeper dies at the worst moments of a trainer that lives: it starts another one and goes on.

The random kills hit these instants now and then; here they are hit every time.
"""

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from autockpt.executors.keeper import launch
from autockpt.session import saving
from autockpt.session.endings import last_checkpoint
from autockpt.values.goal import Goal, Limits
from tests.conftest import keeper_pids
from tests.jobs.kill.loops import PATIENCE_S, Large, Loop, prepared
from tests.support import trainings


def kill_keeper(run_dir: str) -> None:
    """SIGKILL; returns when it is dead."""
    (pid,) = keeper_pids(run_dir)
    os.kill(pid, signal.SIGKILL)
    deadline = time.monotonic() + PATIENCE_S
    while pid in keeper_pids(run_dir):
        assert time.monotonic() < deadline
        time.sleep(0.002)


def durable_steps(run_dir: str) -> set[int]:
    """Steps of the committed generations."""
    from autockpt.executors.storage.catalogue import list_generations

    return {record.step for record in list_generations(f"{run_dir}/checkpoints") if record.step > 0}


def test_before_it_gave_slots(attach: Callable[..., Any], new_run: Callable[..., str]) -> None:
    """The question is asked again; without slots nothing would ever be saved."""
    run_dir = prepared(new_run)
    loop = Loop(attach, run_dir, 2**16)
    kill_keeper(run_dir)
    loop.train()
    loop.ckpt.step()
    assert loop.ckpt._client.wait_until(lambda: bool(loop.ckpt._client.slots), PATIENCE_S)
    loop.ckpt.close()
    assert durable_steps(run_dir) == {1}


def test_while_it_writes(attach: Callable[..., Any], new_run: Callable[..., str]) -> None:
    """What was in flight counts as dropped at once; nobody waits for it, the next one is good."""
    run_dir = prepared(new_run, codec={"parameters": "zstd"})
    loop = Loop(attach, run_dir, 16 * 2**20)
    loop.warm_up()
    loop.train()
    loop.ckpt.step()
    loop.ckpt.wait_for_staging()
    kill_keeper(run_dir)
    began = time.monotonic()
    assert loop.ckpt.wait_durable(10 * PATIENCE_S) == 0.0 or durable_steps(run_dir) == {2}
    loop.train()
    loop.ckpt.step()
    loop.ckpt.close()
    assert time.monotonic() - began < PATIENCE_S
    assert 3 in durable_steps(run_dir)


def test_of_a_trainer_that_was_restarted(
    attach: Callable[..., Any], new_run: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It never asked for slots, it got those of its predecessor, and hands them on."""
    monkeypatch.setattr(saving, "GRANT_WAIT_S", 1.0)  # a save under a dying keeper may be skipped
    run_dir = prepared(new_run)
    loop = Loop(attach, run_dir, 2**16)
    loop.warm_up()
    loop.train()
    loop.ckpt.step()
    loop.durable()
    loop.ckpt._closing.end("signal")
    again = Loop(attach, run_dir, 2**16)
    assert again.ckpt.step_count == 2
    kill_keeper(run_dir)
    for _ in range(2):
        again.train()
        again.ckpt.step()
    again.ckpt.close()
    assert 4 in durable_steps(run_dir)
    assert torch.equal(again.model.large, loop.model.large)


def test_while_it_starts(
    attach: Callable[..., Any], new_run: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A keeper that dies before it answers is followed by another one, within seconds."""
    spawn = launch._spawn
    spawned: list[str] = []

    def first_one_dies(start: Any) -> str:
        path = "nowhere.log" if not spawned else spawn(start)
        spawned.append(path)
        return path

    monkeypatch.setattr(launch, "_spawn", first_one_dies)
    began = time.monotonic()
    Loop(attach, prepared(new_run), 2**12)
    assert len(spawned) >= 2
    assert time.monotonic() - began < launch.START_TIMEOUT_S


def test_without_another_one_the_training_ends_soon(
    attach: Callable[..., Any], new_run: Callable[..., str], monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """Nobody will grant a slot for the last checkpoint."""
    run_dir = prepared(new_run)
    loop = Loop(attach, run_dir, 2**16)
    loop.warm_up()
    monkeypatch.setattr(launch, "START_TIMEOUT_S", 0.1)
    monkeypatch.setattr(last_checkpoint, "RECONNECT_WAIT_S", 0.5)
    monkeypatch.setattr(launch, "_spawn", lambda *_: "nowhere.log")
    kill_keeper(run_dir)
    closed_within(PATIENCE_S / 4, loop)
    assert "final checkpoint: there is no keeper; the last" in capfd.readouterr().err


def test_that_stands_still_ends_the_training_late_but_in_time(
    attach: Callable[..., Any], new_run: Callable[..., str], monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """It is connected and answers nothing."""
    run_dir = prepared(new_run)
    loop = Loop(attach, run_dir, 2**16)
    loop.warm_up()
    monkeypatch.setattr(last_checkpoint, "SLOT_WAIT_S", 1.0)
    os.kill(loop.ckpt.keeper_pid, signal.SIGSTOP)
    closed_within(PATIENCE_S / 4, loop)
    assert "final checkpoint: no slot became free in 1 s; the last" in capfd.readouterr().err


def closed_within(seconds: float, loop: Loop) -> None:
    """Ends the training, with an attempt at a last checkpoint."""
    began = time.monotonic()
    loop.ckpt.close()
    assert time.monotonic() - began < seconds


def test_whose_folder_has_a_path_longer_than_an_address(
    attach: Callable[..., Any], new_run: Callable[..., str], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """It is found, found again, and followed by another one."""
    folder = tmp_path / ("far" * 40)
    folder.mkdir()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(folder))
    run_dir = prepared(new_run)
    assert len(launch.socket_path(run_dir, 0)) > launch.MAX_ADDRESS_BYTES
    loop = Loop(attach, run_dir, 2**12)
    assert launch.keepers_here(run_dir) == (0,)
    kill_keeper(run_dir)
    loop.warm_up()
    loop.train()
    loop.ckpt.step()
    loop.durable()


def test_whose_folder_was_to_be_in_a_place_that_is_not_there(
    attach: Callable[..., Any], new_run: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a node of a batch system that hands on the environment of a login."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/run/user/of-another-machine")
    loop = Loop(attach, prepared(new_run), 2**12)
    loop.warm_up()
    loop.train()
    loop.ckpt.step()
    loop.durable()


@pytest.mark.parametrize("limit_bytes", [None, 2 * 2**20], ids=["room", "a-window"])
def test_a_state_that_outgrows_its_slots_ends_nothing(
    limit_bytes: int | None, attach: Callable[..., Any], new_run: Callable[..., str]
) -> None:
    """It gets larger ones; without room for them it streams through a window."""
    run_dir = prepared(new_run)
    goal = Goal(limits=Limits(host_memory_bytes=limit_bytes))
    loop = Loop(attach, run_dir, 2**16, goal=goal)
    loop.warm_up()
    loop.train()
    loop.ckpt.step()
    loop.durable()
    late = nn.Parameter(torch.randn(2**18))
    loop.model.register_parameter("late", late)
    loop.optimizer.add_param_group({"params": [late]})
    keepers = keeper_pids(run_dir)
    link = loop.ckpt._client
    slots = link.slots_changed
    for _ in range(6):
        loop.train()
        late.grad = torch.ones_like(late)
        loop.ckpt.step()
        if loop.ckpt.step_count == 4:
            assert link.wait_until(lambda: link.slots_changed > slots, PATIENCE_S)
        loop.durable()
    assert bool(link.window_bytes) is (limit_bytes is not None)
    loop.ckpt.close()
    assert keeper_pids(run_dir) in (keepers, [])
    assert "Traceback" not in Path(run_dir, "logs", "keeper-000.log").read_text()
    assert {2, 8} <= durable_steps(run_dir)
    if limit_bytes is not None:
        assert any("the policy allows" in e["reason"] for e in loop.events("Degraded"))


def test_the_large_part_is_restored(
    attach: Callable[..., Any], new_run: Callable[..., str]
) -> None:
    """The loops above prove little if a restore left the parameter as it was made."""
    run_dir = trainings.prepare(new_run(), trainings.plan(memory=1, disk=1))
    loop = Loop(attach, run_dir, 2**16)
    loop.warm_up()
    loop.ckpt.close()
    other = Large(2**16)
    assert not torch.equal(other.large, loop.model.large)
    ckpt = attach(
        model=other,
        optimizer=torch.optim.SGD(other.small.parameters(), lr=0.1, momentum=0.9),
        run_dir=run_dir,
    )
    assert ckpt.step_count == 1
    assert torch.equal(other.large, loop.model.large)
