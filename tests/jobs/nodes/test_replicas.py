"""A node is lost with its memory, and the job goes on from the memory of the others."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.jobs.nodes.nodes_job import NodesJob
from tests.jobs.nodes.test_two_nodes import undisturbed  # noqa: F401

COPIES = ("redundancy.scheme=replicas", "redundancy.copies=2")


@pytest.fixture
def job(tmp_path: Path) -> Iterator[NodesJob]:
    """Two nodes, each with a copy of what the other one saves."""
    nodes = NodesJob(tmp_path, settings=COPIES)
    yield nodes
    nodes.end()


def protected(job: NodesJob, node: int) -> int:
    """Newest step that this node's keeper knows to survive the loss of a node."""
    events = job.events(f"keeper-{node:03d}", "GenerationReplicated")
    return max((event["step"] for event in events), default=0)


@pytest.mark.timeout(400)
def test_a_lost_node_comes_back_from_the_memory_of_the_other(
    job: NodesJob,
    undisturbed: str,  # noqa: F811
) -> None:
    """Everything of node 1 is killed; its replacement fetches the newest protected state."""
    job.wait(lambda: protected(job, 0) > 30, "protection")
    job.lose_node(1)
    promised = protected(job, 0)
    job.replace_node(1)
    assert job.finish() == undisturbed, job.tale()
    exchanges = job.events("keeper-000", "GenerationReplicated")
    came = [event for event in exchanges if event["bytes"]]
    assert came, job.tale()
    assert any(0 < event["moving_s"] <= event["latency_s"] for event in came), exchanges[:3]
    restored = [job.events(f"keeper-{node:03d}", "Restored")[0] for node in range(2)]
    assert [event["source"] for event in restored] == ["memory", "peer"], job.tale()
    assert all(event["step"] >= promised for event in restored), job.tale()
