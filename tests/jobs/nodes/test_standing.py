"""The keeper of the node that coordinates stands still, for a while or until it was replaced.

A stopped process keeps its connections: the kernel acknowledges for it.  So nobody takes its place
by itself; saves are skipped, the training goes on, and a launcher that starts the job without its
node has it fenced.
"""

import contextlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from autockpt.executors.keeper.launch import release_keeper
from autockpt.values.redundancy import Redundancy
from tests.conftest import keeper_pids
from tests.jobs.nodes.conftest import MakeJob
from tests.jobs.nodes.network_job import PATIENCE_S, NetworkJob
from tests.support import trainings

DISTURBED = {"PYTHONPATH": str(Path(__file__).with_name("disturbed"))}
UNANSWERED_STEPS = 420
"""More saves than messages of them fit into the socket of a keeper that reads none."""


@pytest.mark.root
@pytest.mark.timeout(120)
@pytest.mark.slow
def test_training_goes_on_beside_a_coordinator_that_stands_still(new_job: MakeJob) -> None:
    """However long: nothing is promised meanwhile, and everything again when it is awake."""
    job = new_job(2, Redundancy(), steps=UNANSWERED_STEPS + 160)
    job.start(UNANSWERED_STEPS + 140)
    job.wait(lambda: job.newest("CheckpointDurable") >= 20, "a durable one")
    with standing(job, 0):
        durable, held = job.newest("CheckpointDurable"), job.newest("MemoryCommitted")
        job.wait(lambda: reached(job) >= held + UNANSWERED_STEPS, "training")
        assert job.newest("CheckpointDurable") <= durable + 20, "one may have been on its way"
    job.wait(lambda: job.newest("CheckpointDurable") > held + UNANSWERED_STEPS, "a durable one")
    from_disk(job)
    assert job.finish() == job.undisturbed(), job.tale()
    let_go(job, 0, 1)


@pytest.mark.root
@pytest.mark.timeout(120)
@pytest.mark.parametrize("when", ["still-before", "still-after"])
def test_a_coordinator_that_was_replaced_while_it_stood_still_promises_nothing(
    new_job: MakeJob, when: str
) -> None:
    """It stops between the first look at its term and the second one, before or after COMMIT has
    its name; the job goes on without its node; then it wakes, and is fenced."""
    job = new_job(2, Redundancy(), steps=240, spare=1, numbered=True, environment=DISTURBED)
    job.start(100)
    job.wait(lambda: job.newest("CheckpointDurable") >= 20, "a durable one")
    job.runtime(0).joinpath(when).touch()
    (zombie,) = keeper_pids(job.run_dir, 0)
    job.wait(lambda: stopped(zombie), "a COMMIT")
    held = reached(job)
    job.wait(lambda: reached(job) >= min(100, held + 20), "training")
    promised = job.newest("CheckpointDurable")
    job.lose([])
    job.places = [2, 1]
    job.start(1)  # held where they go on
    began = job.restored()[0]["step"]
    assert began >= promised, job.tale()
    job.limit.set(began + 21)
    job.wait(lambda: job.newest("CheckpointDurable") > began, "a durable one of the next term")
    said = job.events("CheckpointDurable", [0])
    os.kill(zombie, signal.SIGCONT)
    log = Path(job.run_dir, "logs", "keeper-000.log")
    job.wait(lambda: "fenced" in log.read_text(), "the fence")
    let_go(job, 0)
    assert job.events("CheckpointDurable", [0]) == said, job.tale()
    job.limit.set(200)
    job.wait(lambda: job.newest("CheckpointDurable") >= 180, "a durable one behind the fence")
    from_disk(job)
    assert job.finish() == job.undisturbed(), job.tale()
    let_go(job, 1, 2)


def reached(job: NetworkJob) -> int:
    """The step at which all ranks are."""
    return min(trainings.StepCell(job.out(rank) / "step").get() for rank in range(job.count))


def stopped(pid: int) -> bool:
    """It stands still."""
    return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "T"


@contextlib.contextmanager
def standing(job: NetworkJob, node: int) -> Iterator[None]:
    """Inside the block the keeper of a node does."""
    (pid,) = keeper_pids(job.run_dir, node)
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def from_disk(job: NetworkJob) -> None:
    """All nodes are lost with their memory: all ranks go on with the newest that was promised."""
    job.lose(range(len(job.network.nodes)))
    promised = job.newest("CheckpointDurable")
    job.start(job.spec.steps)
    restored = job.restored()
    assert {event["source"] for event in restored} == {"disk"}, job.tale()
    assert restored[0]["step"] >= promised, job.tale()


def let_go(job: NetworkJob, *nodes: int) -> None:
    """The keepers of these nodes leave when they are told to, and their slots with them."""
    for node in nodes:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("XDG_RUNTIME_DIR", str(job.runtime(node)))
            release_keeper(job.run_dir, node, wait_s=PATIENCE_S)
        job.wait(lambda node=node: not keeper_pids(job.run_dir, node), "an end of the keeper")
