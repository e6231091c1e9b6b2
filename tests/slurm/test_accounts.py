"""`autockpt failures` on what sacct of a real cluster says."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from autockpt.profiles.imports import slurm
from tests.slurm.cluster import Cluster, missing, wait

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]
FIELDS = "JobID,State,ExitCode,Start,End,ElapsedRaw,NNodes,NodeList"


@pytest.fixture
def counted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A cluster with accounting of its own."""
    if reason := missing(accounts=True):
        pytest.skip(reason)
    with Cluster(tmp_path_factory.mktemp("slurm"), accounts=True) as started:
        yield started


def state(cluster: Cluster, number: str) -> str:
    """Of one job."""
    return cluster.run("squeue", "-h", "-t", "all", "-j", number, "-o", "%T").strip()


def submitted(cluster: Cluster, *options: str) -> str:
    """A job that waits; its number."""
    command = ("sbatch", "--parsable", "-o", "/dev/null", *options, "--wrap", "sleep 600")
    number = cluster.run(*command).strip()
    wait(lambda: state(cluster, number) == "RUNNING", f"job {number} runs", cluster.tale)
    return number


def test_a_lost_node_is_counted_though_its_job_was_queued_again(
    counted: Cluster, tmp_path: Path
) -> None:
    """One loss with its node; a cancelled job is exposure alone."""
    first, second = counted.nodes[:2]
    lost = submitted(counted, "-w", first, "--requeue")
    other = submitted(counted, "-w", second)
    counted.lose_node(first)
    wait(lambda: state(counted, lost) == "PENDING", "the job is queued again", counted.tale)
    counted.run("scontrol", "update", f"jobid={lost}", "reqnodelist=")
    counted.start_now(lost)
    counted.run("scancel", lost, other)

    def said(*options: str) -> str:
        command = ("sacct", "-P", "-a", "-X", *options, "-S", "now-1days", "-o", FIELDS)
        return counted.run(*command)

    wait(lambda: "NODE_FAIL" in said("-D"), "the loss is accounted", counted.tale)
    wait(lambda: said("-D").count("CANCELLED") == 2, "both ends are accounted", counted.tale)
    assert "NODE_FAIL" not in said(), "the newest start of a requeued job alone"
    file = tmp_path / "sacct.txt"
    file.write_text(said("-D"))
    history = slurm.read(file.read_text(), where="sacct")
    assert [(one.kind, one.nodes) for one in history.incidents] == [("node", (first,))]
    told = subprocess.run(
        [sys.executable, "-m", "autockpt", "failures", str(file)],
        check=False, capture_output=True, text=True, cwd=tmp_path,
    )  # fmt: skip
    assert told.returncode == 0, told.stdout + told.stderr
    assert "1 interruption, 1 of nodes" in told.stdout + told.stderr
