"""The wall clock of a keeper jumps in the middle of a run, by hours and years, and back."""

import time
from dataclasses import replace
from pathlib import Path

import pytest

from autockpt.executors.storage.catalogue import list_generations
from autockpt.run_directory import RunDirectory
from autockpt.values.goal import Goal, Retention
from autockpt.values.redundancy import Redundancy
from tests.jobs.nodes.conftest import MakeJob
from tests.jobs.nodes.network_job import NetworkJob
from tests.jobs.nodes.test_standing import DISTURBED, from_disk, let_go

KEEP_LAST = 3
YEARS_S = 10 * 365 * 86400
JUMPS_S = (YEARS_S, -YEARS_S, 3600, -3600, 0)
STEPS_EACH = 80
"""Four durable checkpoints after each jump: more than are kept."""


@pytest.mark.root
@pytest.mark.timeout(120)
@pytest.mark.parametrize("node", [0, 1], ids=["coordinator", "other"])
def test_saves_go_on_while_the_clock_of_a_keeper_jumps(new_job: MakeJob, node: int) -> None:
    """Checkpoints become durable, the newest stay and older ones go, whatever year COMMITs say;
    and the newest of all comes back on machines whose clock is right."""
    steps = STEPS_EACH * (len(JUMPS_S) + 1)
    job = new_job(2, Redundancy(), steps=steps + 20, environment=DISTURBED)
    files = RunDirectory.open(job.run_dir)
    files.write_goal(replace(Goal(), retention=Retention(keep_last=KEEP_LAST)))
    job.start(STEPS_EACH)
    job.wait(lambda: job.newest("CheckpointDurable") == STEPS_EACH, "durable ones")
    for number, jump_s in enumerate(JUMPS_S, start=2):
        job.runtime(node).joinpath("clock").write_text(str(jump_s))
        job.limit.set(number * STEPS_EACH)
        job.wait(lambda n=number: job.newest("CheckpointDurable") == n * STEPS_EACH, "durable ones")
        if node == 0:  # who coordinates writes COMMIT
            assert abs(written_s(job) - time.time() - jump_s) < 600, "the clock did not jump"
        job.wait(lambda: on_disk(job) == durable(job)[:KEEP_LAST], "retention")
    from_disk(job)
    assert job.finish() == job.undisturbed(), job.tale()
    let_go(job, 0, 1)


def written_s(job: NetworkJob) -> float:
    """When the newest was made, as it says."""
    records = list_generations(str(Path(job.run_dir, "checkpoints")))
    return max(records, key=lambda record: record.step).created_s


def durable(job: NetworkJob) -> list[int]:
    """Steps that became durable, the newest first.  A busy machine leaves one out."""
    return sorted({event["step"] for event in job.events("CheckpointDurable")}, reverse=True)


def on_disk(job: NetworkJob) -> list[int]:
    """Steps of what could be restored, the newest first."""
    records = list_generations(str(Path(job.run_dir, "checkpoints")))
    return sorted((record.step for record in records if record.step >= 0), reverse=True)
