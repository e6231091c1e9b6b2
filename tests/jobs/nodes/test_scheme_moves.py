"""The link between nodes becomes slow and fast again: the controller changes the scheme."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from autockpt.values import telemetry as t
from autockpt.values.redundancy import Redundancy, said
from benchmarks.cluster import Cluster
from tests.jobs.nodes.conftest import launched
from tests.jobs.nodes.nodes_job import ROOT, environment

NODES = 3
BITS_PER_S = 400_000_000
SLOWER = 8
STEPS = 2500
SCRIPT = ("tests/jobs/nodes/paced.py", "--steps", str(STEPS), "--wait-ms", "80", "--kib", "4",
          "--digest")  # fmt: skip
SETTINGS = ("redundancy.scheme=replicas", "redundancy.rate=50 MB/s", "failures.mtbf=2 min",
            "disk.interval=3 min")  # fmt: skip


@pytest.mark.root
@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_the_controller_sends_fewer_copies_over_a_slow_link_and_more_again(tmp_path: Path) -> None:
    """Nobody proposes a scheme but the controller; the training is that of an undisturbed one."""
    with launched(
        NODES, BITS_PER_S, tmp_path, settings=SETTINGS, script=SCRIPT, mode="profile"
    ) as job:
        job.finish(within_s=300.0)
    with launched(
        NODES, BITS_PER_S, tmp_path, settings=SETTINGS, script=SCRIPT, profiled=True
    ) as job:
        job.wait_for("three exchanges", lambda: exchanges(job) >= 3 or None, 120.0)
        assert said(redundancy(job)) == "3 copies, group"
        for node in range(NODES):
            job.net.shape(node, BITS_PER_S // SLOWER)
        fewer = job.wait_for("fewer copies", lambda: scheme_change(job, copies=2), 180.0)
        assert "3 copies, group -> 2 copies" in fewer.reason
        for node in range(NODES):
            job.net.shape(node, BITS_PER_S)
        more = job.wait_for("more copies", lambda: scheme_change(job, copies=3), 180.0)
        assert "-> 3 copies, group" in more.reason
        since = more.at_s
        job.wait_for("an exchange of three copies", lambda: exchanges(job, since) or None, 60.0)
        printed = "\n".join(job.finish(within_s=300.0))
        moved = [event for event in job.events(t.PlanChanged) if "copies" in event.reason]
    assert [event.rank for event in moved] == [0, 0]
    assert digest_of(printed) == undisturbed()


def exchanges(job: Cluster, since_s: float = 0.0) -> int:
    """Checkpoints that other nodes hold."""
    return len(job.events(t.GenerationReplicated, since_s=since_s))


def redundancy(job: Cluster) -> Redundancy:
    """Of the plan in force."""
    plan = job.files.read_plan()
    assert plan is not None
    return plan.redundancy


def scheme_change(job: Cluster, *, copies: int) -> t.PlanChanged | None:
    """The newest change of the plan, once so many copies are made."""
    if redundancy(job).copies != copies:
        return None
    changes = [
        event for event in job.events(t.PlanChanged) if f"-> {copies} copies" in event.reason
    ]
    return changes[-1] if changes else None


def undisturbed() -> str:
    """The digest of the same ranks on one node, without autockpt, waits and messages."""
    ended = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(NODES),
         "--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0", *SCRIPT, "--bare",
         "--wait-ms", "0", "--kib", "0"],
        cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=300, check=True,
    )  # fmt: skip
    return digest_of(ended.stdout)


def digest_of(printed: str) -> str:
    """The one that rank 0 printed."""
    (found,) = re.findall(r"digest: (\w+)$", printed, re.M)
    return str(found)
