"""A start that is refused, because another one trains in the directory, changes nothing there."""

import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from autockpt.cli.app import run
from autockpt.cli.jobs import preparation
from autockpt.executors.storage.directory.claims import TermFile
from autockpt.executors.storage.directory.directory import CheckpointDirectory
from autockpt.run_directory import RunDirectory, RunInfo
from autockpt.values.errors import DirectoryBusyError
from autockpt.values.goal import Goal
from autockpt.values.record import from_json, to_json
from tests.support import trainings
from tests.unit.cli.scripts import python, warm, write

NODES = ("--nnodes", "1:2", "--rdzv-endpoint", "localhost:1", "--rdzv-id", "b")
RANK = {
    "RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "GROUP_RANK": "0",
    "TORCHELASTIC_RUN_ID": "job", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500",
}  # fmt: skip


SECOND = """
import os, sys, torch, autockpt
from autockpt.values.goal import Goal, Retention
model = torch.nn.Linear(2, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
goal = Goal(retention=Retention(keep_last=1))
if torch.distributed.is_torchelastic_launched():
    rank, meeting = int(os.environ["RANK"]), "file://" + os.path.abspath("meeting")
    torch.distributed.init_process_group("gloo", init_method=meeting, rank=rank, world_size=2)
autockpt.attach(model=model, optimizer=optimizer, run_dir=sys.argv[1], goal=goal)
"""


@pytest.fixture
def live(
    attach: Callable[..., Any], new_run: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> Iterator[RunDirectory]:
    """A run that trains, of the script in the working directory."""
    made = RunDirectory(trainings.prepare(new_run(), trainings.plan(memory=3, disk=3)))
    monkeypatch.chdir(made.path.parent)
    monkeypatch.setattr(preparation, "LOOK_S", 0.3)
    Path("train.py").write_text("print('not reached')\n")
    session = attach(run_dir=str(made.path), **objects())
    loop = iter(session.steps(100))
    next(loop)
    made.write_goal(Goal())
    script = os.path.abspath("train.py")
    made.write_info(RunInfo(run_id="0" * 32, created="", script=script, launch_id="a"))
    yield made
    session.close(final_checkpoint=False)


def objects() -> dict[str, Any]:
    """A model and its optimizer."""
    model = torch.nn.Linear(2, 2)
    return {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1)}


def files_of(made: RunDirectory) -> dict[str, bytes]:
    """The records of a run; status.json is its keeper's."""
    records = [*made.path.glob("*.json"), *made.path.glob("*.yaml")]
    return {path.name: path.read_bytes() for path in records if path.name != "status.json"}


@pytest.mark.parametrize("launcher", ["nodes", "torchrun"])
def test_a_second_launch_writes_nothing_before_it_is_refused(
    live: RunDirectory, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
    launcher: str,
) -> None:  # fmt: skip
    """Its goal would be that of the run that trains: keepers read there what to keep."""
    before = files_of(live)
    options = NODES if launcher == "nodes" else ()
    for name, value in RANK.items() if launcher == "torchrun" else ():
        monkeypatch.setenv(name, value)
    words = ["run", *options, "--run-dir", str(live.path), "--set", "keep.last=1", "train.py"]
    assert run(words) == DirectoryBusyError.exit_code
    assert "another launch of this run trains here" in capsys.readouterr().err
    assert files_of(live) == before


def test_an_attach_that_is_refused_leaves_goal_and_job(live: RunDirectory, tmp_path: Path) -> None:
    """As a second `python train.py` with another goal in its source, and other arguments."""
    before = files_of(live)
    assert "job.json" in before
    script = write(tmp_path, "second.py", SECOND)
    with warm():
        done = python(str(script), str(live.path), cwd=tmp_path, AUTOCKPT_SAME_JOB="1")
    assert "DirectoryBusyError" in done.stderr
    assert files_of(live) == before


@pytest.mark.slow
def test_a_refused_attach_of_two_nodes_leaves_goal_and_job(
    live: RunDirectory, tmp_path: Path
) -> None:
    """Each has the goal in its source, and meets the other before one of them is refused."""
    before = files_of(live)
    script = write(tmp_path, "second.py", SECOND)
    other = {name: text for name, text in os.environ.items() if not name.startswith("AUTOCKPT_")}
    ranks = [
        subprocess.Popen(
            [sys.executable, str(script), str(live.path)], cwd=tmp_path, text=True,
            stderr=subprocess.PIPE, start_new_session=True,
            env={**other, **RANK, "RANK": node, "GROUP_RANK": node, "WORLD_SIZE": "2",
                 "AUTOCKPT_SAME_JOB": "1"},
        )
        for node in ("0", "1")
    ]  # fmt: skip
    try:
        _, said = ranks[0].communicate(timeout=120)
    finally:
        ranks[1].kill()
        ranks[1].communicate()
    assert "DirectoryBusyError" in said
    assert files_of(live) == before


def test_launchers_of_one_job_of_several_nodes_may_come_late(live: RunDirectory) -> None:
    """The id that they have in common tells them from another launch."""
    launching = dict.fromkeys(("rdzv_backend", "rdzv_endpoint", "rdzv_id"), "x")
    mine = preparation.launch_of_nodes(launching)
    info = live.read_info()
    assert info is not None
    live.write_info(replace(info, launch_id=mine))
    preparation.require_free(live, Goal(), mine)
    other = preparation.launch_of_nodes({**launching, "rdzv_id": "y"})
    with pytest.raises(DirectoryBusyError, match="trains here"):
        preparation.require_free(live, Goal(), other)


@pytest.mark.parametrize("beats", [True, False])
def test_a_run_on_another_machine_is_seen_by_its_heartbeat(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, beats: bool
) -> None:
    """One that has died holds nothing up."""
    made = RunDirectory.create(tmp_path / "r")
    made.write_info(RunInfo(run_id="0" * 32, created="", script="/t.py", launch_id="a"))
    directory = CheckpointDirectory(made.checkpoints(Goal()))
    term = directory.claim(directory.open(""), "a", 0, force=False)
    path = Path(directory.path) / "terms" / f"t-{term:06d}"
    claim = from_json(TermFile, path.read_text(), where=str(path))
    path.write_text(to_json(replace(claim, boot_id="another", host="elsewhere")))
    monkeypatch.setattr(preparation, "LOOK_S", 1.5)
    if not beats:
        preparation.require_free(made, Goal(), "b")
        return
    stop = beating(directory, term)
    try:
        with pytest.raises(DirectoryBusyError, match="trains on another machine"):
            preparation.require_free(made, Goal(), "b")
    finally:
        stop()


def beating(directory: CheckpointDirectory, term: int) -> Callable[[], None]:
    """Start heartbeats on a thread; the function ends it."""
    over = threading.Event()

    def beat() -> None:
        while not over.wait(0.1):
            directory.heartbeat(term)

    threading.Thread(target=beat, daemon=True).start()
    return over.set
