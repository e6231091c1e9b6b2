"""A framework that starts the ranks by itself says what they are a start of."""

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch.distributed as dist

from autockpt.executors.storage.places import store
from autockpt.executors.storage.places.object_store import Objects
from autockpt.launch import given
from autockpt.launch.given import GivenLaunch, give_launch, numbered
from autockpt.session.job import current_job
from autockpt.values.errors import ConfigError
from autockpt.values.goal import Goal


@pytest.fixture
def group(tmp_path: Path) -> Iterator[None]:
    """One rank with a store, as a framework leaves it."""
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def launch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> GivenLaunch:
    """Given to this process until the test is over."""
    launch = GivenLaunch(launch_id="ray-1", job="ray:name", run_dir=str(tmp_path / "run"))
    monkeypatch.setattr(given, "_given", launch)
    return launch


@pytest.mark.usefixtures("group")
def test_a_restart_is_a_later_round_of_the_same_launch(
    launch: GivenLaunch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With other arguments too: those of Ray's workers differ at every start."""
    rounds = []
    for argument in ("--port=1", "--port=2", "--port=3"):
        monkeypatch.setattr(sys, "argv", ["default_worker.py", argument])
        job = current_job()
        assert (job.run_directory, job.placed) == (launch.run_dir, "")
        assert job.incarnation.launch_id == "ray-1"
        rounds.append(job.incarnation.restart_round)
    assert rounds == sorted(set(rounds))


@pytest.mark.usefixtures("group")
def test_fresh_begins_once_in_a_launch(
    launch: GivenLaunch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A restart of the workers goes on with what the launch has by then."""
    assert current_job(fresh=True).fresh
    claimed = current_job().incarnation
    monkeypatch.setattr("autockpt.session.job._claimed_by", lambda *_: claimed)
    assert not current_job(fresh=True).fresh


def test_a_store_keeps_its_job_where_the_run_directory_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A script that attaches by itself, on a new machine each time; a user's word takes over."""
    monkeypatch.setattr(store, "_bucket", lambda *_: Objects(f"file://{tmp_path}/objects"))
    goal = Goal(storage_path="s3://bucket/run")

    def attach(machine: str, *words: str, fresh: bool = False) -> str:
        monkeypatch.setattr(sys, "argv", ["train.py", *words])
        return current_job(run_dir=str(tmp_path / machine), policy=goal, fresh=fresh).checkpoints

    assert attach("first", "--lr", "1") == goal.storage_path
    assert attach("second", "--lr", "1", "--steps", "9") == goal.storage_path
    with pytest.raises(ConfigError, match=r"of another job: --lr 2 \(there: 1\); .*SAME_JOB=1"):
        attach("third", "--lr", "2")
    monkeypatch.setenv("AUTOCKPT_SAME_JOB", "1")
    assert attach("fourth", "--lr", "2") == goal.storage_path
    monkeypatch.delenv("AUTOCKPT_SAME_JOB")
    assert attach("fifth", "--lr", "2") == goal.storage_path
    assert attach("sixth", "--lr", "3", fresh=True) == goal.storage_path
    with pytest.raises(ConfigError, match=r"--lr 2 \(there: 3\)"):
        attach("seventh", "--lr", "2")


def test_variables_of_the_launcher_above_are_forgotten(
    launch: GivenLaunch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are of the driver: its one node, and its restarts."""
    monkeypatch.setenv("GROUP_WORLD_SIZE", "1")
    monkeypatch.setenv("AUTOCKPT_LAUNCH_ID", "driver")
    give_launch(launch)
    assert "GROUP_WORLD_SIZE" not in os.environ
    assert "AUTOCKPT_LAUNCH_ID" not in os.environ


def test_a_node_keeps_its_number_and_a_new_one_takes_a_lost_ones() -> None:
    """Memory of a node is found by its number."""
    first = numbered(["a", "b", "c"], {})
    assert first == {"a": 0, "b": 1, "c": 2}
    assert numbered(["b", "c", "d"], first) == {"b": 1, "c": 2, "d": 0}
    assert numbered(["c"], first) == {"c": 2}
