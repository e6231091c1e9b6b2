"""Which trainer a keeper listens to, whose pages it reads, and what a refused one leaves behind."""

import contextlib
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from autockpt.executors.keeper.launch import keeper_status, keepers_here
from autockpt.run_directory import RunDirectory
from tests.conftest import keeper_pids
from tests.unit.cli.scripts import ROOT, write
from tests.unit.executors.bare_trainer import PATIENCE_S, BareTrainer

Start = Callable[..., BareTrainer]
OLD_SYSTEM = """
import fcntl, os
del os.memfd_create, os.pidfd_open, os.O_TMPFILE
for module in (os, fcntl):
    for name in [n for n in vars(module) if n.startswith(("MFD_", "F_ADD_SEALS", "F_SEAL_"))]:
        delattr(module, name)
"""


@pytest.fixture
def run_dir(new_run: Callable[..., str]) -> str:
    """A run whose keeper ends with the test."""
    return new_run()


@pytest.fixture
def start(run_dir: str) -> Iterator[Start]:
    """Starts trainers of it, which end with the test."""
    made: list[BareTrainer] = []

    def one(
        launch: str = "launch", restart_round: int = 0, launcher: int | None = None
    ) -> BareTrainer:
        made.append(BareTrainer(run_dir, launch, restart_round, launcher or os.getpid()))
        return made[-1]

    yield one
    for trainer in made:
        trainer.end()


def first(start: Start) -> BareTrainer:
    """A trainer with two checkpoints, one in each slot, and the boards' cells full."""
    trainer = start()
    assert trainer.attach() == {"refusal": "", "restored": ""}
    for step in (1, 2):
        assert trainer.save(step, fill=step)["stored"] == [step]
    return trainer


def saved(trainer: BareTrainer) -> list[object]:
    """What the files of its next checkpoints hold, of which each has its own number."""
    return [trainer.save(step, fill=100 + step).get("stored") for step in (1, 2, 3)]


def shared(run_dir: str) -> list[str]:
    """Connections, memory and processes that the keeper holds; files of the disk come and go."""
    folder, found = f"/proc/{keeper_pids(run_dir)[0]}/fd", []
    for name in os.listdir(folder):
        with contextlib.suppress(OSError):
            target = os.readlink(f"{folder}/{name}")
            found += [target.split(":[")[0]] * (not target.startswith("/") or "memfd" in target)
    return sorted(found)


def test_what_is_saved_after_a_kill_is_the_new_trainers(start: Start) -> None:
    """A worker that the dead one forked still holds its connection."""
    former = first(start)
    former.fork()
    former.kill()
    trainer = start(restart_round=1)
    assert trainer.attach() == {"refusal": "", "restored": "step 2 (term 1)"}
    assert saved(trainer) == [[101], [102], [103]]


def test_a_killed_trainer_comes_back_where_the_storage_takes_nothing(
    start: Start, run_dir: str
) -> None:
    """From memory, in its term, and the next checkpoint is stored when the storage is well."""
    former = first(start)
    terms = Path(run_dir, "checkpoints", "terms")
    away = terms.rename(terms.with_name("away"))
    terms.write_text("in the way")
    former.kill()
    trainer = start(restart_round=1)
    answer = trainer.attach()
    terms.unlink()
    away.rename(terms)
    assert (answer["refusal"], answer["restored"]) == ("", "step 2 (term 1)")
    deadline, step = time.monotonic() + PATIENCE_S, 3
    while not (answer := trainer.save(step, fill=101)).get("stored"):
        assert time.monotonic() < deadline, answer
        step += 1
    assert answer["stored"] == [101]
    assert not (terms / "t-000002").exists()


def test_what_it_resumed_from_stays_where_its_keeper_and_its_directory_are_lost(
    start: Start, run_dir: str
) -> None:
    """The trainer alone knows where it began: that slot is the only complete checkpoint."""
    first(start).kill()
    trainer = start(restart_round=1)
    assert trainer.attach() == {"refusal": "", "restored": "step 2 (term 1)"}
    checkpoints = Path(run_dir, "checkpoints")
    checkpoints.rename(checkpoints.with_name("away"))
    checkpoints.mkdir()
    (former,) = keeper_pids(run_dir)
    os.kill(former, signal.SIGKILL)
    deadline, step = time.monotonic() + PATIENCE_S, 3
    while (
        (status := keeper_status(run_dir, 0)) is None
        or not status.trainers
        or (status.pid == former)
    ):
        assert time.monotonic() < deadline, "no keeper has taken its place"
        time.sleep(0.1)
    while (answer := trainer.tell("begin", step))["skipped"]:  # until the term is open there
        assert time.monotonic() < deadline, answer
        step += 1
    assert "no slot may be overwritten" in trainer.tell("begin", step + 1)["skipped"]


def test_what_is_saved_beside_the_one_before_is_the_new_trainers(start: Start) -> None:
    """The trainer of the round before lives: the keeper follows the board of the newer one."""
    former = first(start)
    former.stop()
    trainer = start(restart_round=1)
    assert trainer.attach() == {"refusal": "", "restored": "step 2 (term 1)"}
    assert saved(trainer) == [[101], [102], [103]]


@pytest.mark.parametrize(
    ("interrupted", "state", "note"),
    [(0, "finished", "a word"), (1, "interrupted", "a word"), (None, "failed", "")],
)
def test_without_a_launcher_of_ours_the_keeper_says_how_it_ended(
    start: Start, run_dir: str, interrupted: int | None, state: str, note: str
) -> None:
    """Its own exit code nobody here knows."""
    trainer = first(start)
    if interrupted is None:
        trainer.kill()
    else:
        trainer.tell("leave", 9, interrupted)
    deadline, run = time.monotonic() + PATIENCE_S, RunDirectory(run_dir)
    while (status := run.read_status()) is None or status.state in ("running", None):
        assert time.monotonic() < deadline, status
        time.sleep(0.01)
    assert (status.state, status.reason, status.exit_code) == (state, note, None)
    assert status.last_durable is not None
    assert status.last_step == 9 or interrupted is None


def test_a_death_is_seen_while_a_child_holds_the_connection(start: Start, run_dir: str) -> None:
    """At once, and another launch is let in."""
    former = first(start)
    former.fork()
    former.kill()
    deadline = time.monotonic() + PATIENCE_S / 2
    while (status := keeper_status(run_dir, 0)) is not None and status.trainers:
        assert time.monotonic() < deadline, "the keeper believes that it lives"
        time.sleep(0.01)
    assert start("another").attach()["refusal"] == ""


def test_a_slot_that_a_replaced_trainer_writes_is_nobodys_until_it_is_gone(start: Start) -> None:
    """Rule 9: it may write into it as long as it lives."""
    former = first(start)
    assert former.tell("begin", 3) == {"skipped": ""}
    former.stop()
    trainer = start(restart_round=1)
    assert trainer.attach() == {"refusal": "", "restored": "step 2 (term 1)"}
    assert trainer.save(1, fill=101)["skipped"]
    former.kill()
    deadline = time.monotonic() + PATIENCE_S
    step = 2
    while (answer := trainer.save(step, fill=102))["skipped"]:
        assert time.monotonic() < deadline, answer
        step += 1
    assert answer["stored"] == [102]


@pytest.mark.parametrize(
    ("launch", "restart_round", "why"),
    [("another", 0, "is live: pid"), ("launch", 1, "is live: pid"), ("launch", 0, "was replaced")],
)
def test_a_refused_trainer_changes_nothing(
    start: Start, run_dir: str, launch: str, restart_round: int, why: str
) -> None:
    """Of another launch, of the same round, of an older one: not the board, nor a descriptor."""
    former = first(start)
    former.kill()
    trainer = start(restart_round=1)
    assert trainer.attach()["refusal"] == ""
    assert trainer.tell("begin", 1) == {"skipped": ""}
    before = shared(run_dir)
    second = start(launch, restart_round)
    second.tell("record")
    refusal = second.attach()["refusal"]
    assert why in refusal
    assert "launcher is dead" not in refusal
    second.end()
    deadline = time.monotonic() + PATIENCE_S
    while (after := shared(run_dir)) != before:
        assert time.monotonic() < deadline, (before, after)
        time.sleep(0.01)
    assert trainer.tell("copy", 1, 101) == {"skipped": "", "stored": [101]}
    status = keeper_status(run_dir, 0)
    assert status is not None
    assert status.trainers == (0,)


def test_the_refusal_says_when_the_launcher_of_the_living_one_is_dead(start: Start) -> None:
    """Its trainers train on; whose end it is to wait for is not the launcher's."""
    launcher = subprocess.Popen(["true"])
    launcher.wait(PATIENCE_S)
    orphan = start(launcher=launcher.pid)
    assert orphan.attach()["refusal"] == ""
    told = f"pid {orphan.pid}, launch launch#0, whose launcher is dead; stop that run first"
    assert told in start("another").attach()["refusal"]


@pytest.mark.parametrize("is_emptied", [False, True])
def test_memory_of_a_removed_run_is_for_nobody(
    start: Start, run_dir: str, is_emptied: bool
) -> None:
    """Another job begins at once in the directory that was removed or emptied: with nothing."""
    former = first(start)
    (keeper,) = keeper_pids(run_dir)
    former.kill()
    remove(run_dir, is_emptied=is_emptied)
    assert keeper_status(run_dir, 0) is None
    assert keepers_here(run_dir) == ()
    trainer = start("another")
    assert trainer.attach() == {"refusal": "", "restored": ""}
    assert saved(trainer) == [[101], [102], [103]]
    assert keeper_pids(run_dir) != [keeper]


@pytest.mark.parametrize("is_emptied", [False, True])
def test_a_launcher_that_lives_finds_the_memory_of_its_run_that_was_removed(
    start: Start, run_dir: str, is_emptied: bool
) -> None:
    """Nothing else is left of the training."""
    launcher = subprocess.Popen(["sleep", "60"])
    try:
        former = start(launcher=launcher.pid)
        assert former.attach() == {"refusal": "", "restored": ""}
        assert former.save(1, fill=1)["stored"] == [1]
        former.kill()
        remove(run_dir, is_emptied=is_emptied)
        time.sleep(3 * 2.0)  # more looks than say that it was removed
        trainer = start(restart_round=1, launcher=launcher.pid)
        assert trainer.attach() == {"refusal": "", "restored": "step 1 (term 1)"}
    finally:
        launcher.kill()
        launcher.wait(PATIENCE_S)


def remove(run_dir: str, *, is_emptied: bool) -> None:
    """And make it again, or leave the directory itself."""
    for path in sorted(Path(run_dir).iterdir()):
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()
    if not is_emptied:
        os.rename(run_dir, f"{run_dir}.gone")
        os.mkdir(run_dir)
        os.rmdir(f"{run_dir}.gone")


def test_a_refused_trainer_does_not_stand_in_the_way(start: Start) -> None:
    """While it still lives nobody holds its rank, and another launch is let in."""
    former = first(start)
    former.kill()
    newer = start(restart_round=1)
    assert newer.attach()["refusal"] == ""
    newer.kill()
    assert "was replaced by round 1" in start(restart_round=0).attach()["refusal"]
    assert start("another").attach()["refusal"] == ""


def test_restarts_leave_no_descriptors_in_the_keeper(start: Start, run_dir: str) -> None:
    """Its keeper lives as long as the run."""
    former = first(start)
    former.kill()
    held = []
    for restart_round in (1, 2, 3):
        trainer = start(restart_round=restart_round)
        assert trainer.attach()["refusal"] == ""
        assert trainer.save(1, fill=restart_round)["stored"] == [restart_round]
        held.append(shared(run_dir))
        trainer.kill()
    assert held[0] == held[1] == held[2]


def test_a_python_built_for_an_old_system_does_without_its_calls(
    start: Start, run_dir: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Conda's and uv's may lack what the kernel has; a closed connection tells a death as well."""
    write(tmp_path, "old/sitecustomize.py", OLD_SYSTEM)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path / 'old'}:{ROOT}")
    trainer = first(start)
    trainer.kill()
    log = Path(run_dir) / "logs/keeper-000.log"
    deadline = time.monotonic() + PATIENCE_S / 2
    while f"trainer of rank 0 (pid {trainer.pid}) is gone" not in log.read_text():
        assert time.monotonic() < deadline, log.read_text()
        time.sleep(0.01)
    again = start(restart_round=1)
    assert again.attach() == {"refusal": "", "restored": "step 2 (term 1)"}
