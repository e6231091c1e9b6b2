"""A node of three is lost with its memory, and its state is rebuilt from parity at the others."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.jobs.nodes.nodes_job import NodesJob, undisturbed_digest
from tests.jobs.nodes.test_replicas import COPIES, protected

HERE = Path(__file__).parent
NODES = 3
XOR = ("redundancy.scheme=xor", "redundancy.set_size=3", "disk.chunk=64 KiB")


@pytest.fixture
def job(tmp_path: Path) -> Iterator[NodesJob]:
    """Three nodes, each with the parity of what the two others save."""
    nodes = NodesJob(tmp_path, NODES, settings=XOR)
    yield nodes
    nodes.end()


@pytest.fixture(scope="module")
def undisturbed() -> str:
    """Digest of three ranks on one node, without autockpt."""
    return undisturbed_digest(NODES)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_lost_node_comes_back_from_parity(job: NodesJob, undisturbed: str) -> None:
    """Everything of node 1 is killed; its replacement adds up what the two others have."""
    job.wait(lambda: protected(job, 0) > 30, "protection")
    require_rebuilt(job, undisturbed)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_copies_give_way_to_parity_while_the_job_trains(tmp_path: Path, undisturbed: str) -> None:
    """A plan changes the scheme; the node that is lost later comes back from parity alone."""
    job = NodesJob(tmp_path, NODES, settings=COPIES, script=f"{HERE}/rescheming_trainer.py")
    try:
        job.wait(lambda: changed_at(job) > 0, "a change of the plan")
        job.wait(lambda: protected(job, 0) > changed_at(job) + 9, "protection")
        require_rebuilt(job, undisturbed)
    finally:
        job.end()


def require_rebuilt(job: NodesJob, undisturbed: str) -> None:
    """Node 1 is lost and replaced; its rank comes back from parity, with what was protected."""
    job.lose_node(1)
    promised = protected(job, 0)
    job.replace_node(1)
    assert job.finish() == undisturbed, job.tale()
    restored = [job.events(f"keeper-{node:03d}", "Restored")[0] for node in range(NODES)]
    assert [event["source"] for event in restored] == ["memory", "parity", "memory"], job.tale()
    assert all(event["step"] >= promised for event in restored), job.tale()


def changed_at(job: NodesJob) -> int:
    """Step of the newest change of the plan on rank 0; 0: there was none."""
    return max((event["step"] for event in job.events("rank-00000", "PlanChanged")), default=0)
