"""A node that ended the job again and again leaves it, and the others train on."""

import os
import signal
from pathlib import Path

import pytest

from autockpt.values.exit_codes import LEFT_OUT
from autockpt.values.failure import FailureRecord
from autockpt.values.record import to_json
from tests.jobs.nodes.nodes_job import PATIENCE_S, NodesJob

NODES = 3
TIMES = 10
GUILTY = 1
"""Index of its launcher; the nodes meet at the one of index 0."""


def trainer_of(launcher: int) -> tuple[int, int]:
    """(process, number of its node) of the trainer that a launcher has started."""
    for entry in Path("/proc").iterdir():
        try:
            variables = (entry / "environ").read_bytes().split(b"\0")
            parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
        except (OSError, ValueError, IndexError):
            continue
        named = [v.partition(b"=")[2] for v in variables if v.startswith(b"AUTOCKPT_NODE=")]
        if parent == launcher and named and any(v.startswith(b"RANK=") for v in variables):
            return int(entry.name), int(named[0])
    raise AssertionError(f"launcher {launcher} has no trainer")


@pytest.mark.slow
@pytest.mark.timeout(500)
def test_its_launcher_leaves_and_the_others_go_on(tmp_path: Path) -> None:
    """Ten of ten on three nodes; the interruptions are made up, the last death is real."""
    job = NodesJob(tmp_path, NODES, ("failures.faulty_node=leave",), least=NODES - 1)
    try:
        job.wait(lambda: job.durable(0) > 0, "a durable checkpoint")
        pid, number = trainer_of(job.launchers[GUILTY].pid)
        with Path(job.run_dir, "failures.jsonl").open("a") as log:
            for term in range(1001, 1001 + TIMES):
                for node in range(NODES):
                    told_s = 11.0 if node == number else 10.0
                    record = FailureRecord(
                        wall="", kind="process", what="trainer", node=node, step=5,
                        exposure_s=60.0, told_s=told_s, term=term, nodes=tuple(range(NODES)),
                    )  # fmt: skip
                    log.write(to_json(record) + "\n")
        os.kill(pid, signal.SIGKILL)
        assert job.launchers[GUILTY].wait(timeout=PATIENCE_S) == LEFT_OUT, job.tale()
        assert "and it leaves the job" in job.tale()
        for index in range(NODES):
            if index != GUILTY:
                assert job.launchers[index].wait(timeout=PATIENCE_S) == 0, job.tale()
        assert "digest:" in job.tale()
    finally:
        job.end()
