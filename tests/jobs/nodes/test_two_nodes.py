"""Two launchers with one run directory on one machine: a job on two nodes, and what may die in it.

The digest of the last state must be that of `torchrun` with two ranks and no autockpt at all.
"""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import keeper_pids
from tests.jobs.nodes.nodes_job import STEPS, NodesJob, undisturbed_digest


@pytest.fixture
def job(tmp_path: Path) -> Iterator[NodesJob]:
    """A job that has just been started."""
    nodes = NodesJob(tmp_path)
    yield nodes
    nodes.end()


@pytest.fixture(scope="module")
def undisturbed() -> str:
    """Digest of two ranks on one node, without autockpt."""
    return undisturbed_digest(2)


def _kill_keeper(job: NodesJob, node: int) -> None:
    """Kills it and waits for its successor."""
    (before,) = keeper_pids(job.run_dir, node)
    os.kill(before, signal.SIGKILL)
    job.wait(
        lambda: any(pid != before for pid in keeper_pids(job.run_dir, node)), f"keeper {node} again"
    )


@pytest.mark.timeout(200)
def test_training_and_commits_go_on_when_keepers_die_in_turn(
    job: NodesJob, undisturbed: str
) -> None:
    """First node 1's keeper, then the one that coordinates: the next commits are of both nodes."""
    job.wait(lambda: job.durable(1) > 0, "a commit")
    _kill_keeper(job, 1)
    before = job.durable(0)
    job.wait(lambda: job.durable(0) > before and job.durable(1) > before, "a commit after that")
    _kill_keeper(job, 0)
    before = job.durable(1)
    job.wait(lambda: job.durable(0) > before and job.durable(1) > before, "a commit after that")
    assert job.finish() == undisturbed, job.tale()
    assert job.durable(0) == job.durable(1) == STEPS
    for rank in range(2):
        assert len(job.events(f"rank-{rank:05d}", "RunStarted")) == 1, "nobody restarted"


@pytest.mark.timeout(200)
def test_a_killed_rank_makes_both_nodes_resume_from_memory(job: NodesJob, undisturbed: str) -> None:
    """SIGKILL of the trainer on node 1: one decision for both, newest state, nothing differs."""
    job.wait(lambda: job.durable(1) > 0, "a commit")
    (started,) = job.events("rank-00001", "RunStarted")
    os.kill(started["pid"], signal.SIGKILL)
    promised = max(event["step"] for event in job.events("keeper-001", "MemoryCommitted"))
    assert job.finish() == undisturbed, job.tale()
    for node in range(2):
        (restored,) = job.events(f"keeper-{node:03d}", "Restored")
        assert restored["source"] == "memory", job.tale()
        assert restored["step"] >= promised, job.tale()
    assert job.durable(0) == job.durable(1) == STEPS
