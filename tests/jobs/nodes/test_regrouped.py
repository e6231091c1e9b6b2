"""The newest protected checkpoint comes back from memory with another number of nodes."""

import pytest

from autockpt.values.redundancy import Redundancy
from tests.jobs.nodes.conftest import MakeJob
from tests.jobs.nodes.network_job import NetworkJob

TWO_COPIES = Redundancy(scheme="replicas", copies=2)
XOR = Redundancy(scheme="xor", set_size=4, parity=1)
DDP = "tests.jobs.nodes.regrouped_trainer:run_ddp"
FSDP2 = "tests.jobs.nodes.regrouped_trainer:run_fsdp2"
STEPS_EACH = 59
"""Checkpoints in memory after every third step, and after every twentieth on disk: the newest one
is two steps old, in memory only."""
DISK_STEPS = 20


def goes_on(job: NetworkJob, places: list[int], limit: int, *, is_durable: bool = False) -> None:
    """Starts on these nodes: all ranks go on with the newest protected state, from memory alone."""
    had = {fact["step"]: fact["digest"] for fact in job.said(0, "state")}
    promised, durable = job.newest("GenerationReplicated"), job.newest("CheckpointDurable")
    assert is_durable or promised > durable, f"{promised} is durable: {job.tale()}"
    former = job.starts
    job.resize(places)
    job.start(limit)
    restored = job.restored()
    assert {event["source"] for event in restored} <= {"memory", "peer"}, (restored, job.tale())
    step = int(restored[0]["step"])
    assert step >= promised, (step, promised, job.tale())
    for rank in range(job.count):
        began = [fact for fact in job.said(rank, "started") if fact["start"] == former]
        assert [fact["step"] for fact in began] == [step]
        assert first_state(job, rank, former) == had[step], job.tale()


def first_state(job: NetworkJob, rank: int, start: int) -> str:
    """Digest of what a rank went on with."""

    def said() -> list[str]:
        return [fact["digest"] for fact in job.said(rank, "state") if fact["start"] == start]

    job.wait(lambda: bool(said()), "a first step")
    return said()[0]


def train(job: NetworkJob, limit: int) -> None:
    """Until all ranks stand at a step, and a checkpoint behind the newest durable one is protected.

    A loaded machine may skip the very newest.
    """
    job.stand_at(limit)
    durable = limit // DISK_STEPS * DISK_STEPS
    job.wait(lambda: job.newest("GenerationReplicated") > durable, "protection")


@pytest.mark.root
@pytest.mark.timeout(120)
@pytest.mark.parametrize("trainer", [DDP, FSDP2], ids=["ddp", "fsdp2"])
def test_three_nodes_go_on_without_the_fourth_from_memory(new_job: MakeJob, trainer: str) -> None:
    """One is lost and nobody replaces it: the others take its shard from its partner's memory."""
    job = new_job(4, TWO_COPIES, steps=2 * STEPS_EACH, trainer=trainer, numbered=True)
    job.start(STEPS_EACH)
    train(job, STEPS_EACH)
    job.lose([1])
    goes_on(job, [0, 2, 3], 2 * STEPS_EACH)
    assert len(set(job.finish())) == 1


@pytest.mark.root
@pytest.mark.slow
@pytest.mark.timeout(180)
def test_two_nodes_go_on_after_two_are_lost_and_four_come_back(new_job: MakeJob) -> None:
    """Half of the nodes, one of each pair; then as many as at first, from the memory of two."""
    job = new_job(4, TWO_COPIES, steps=3 * STEPS_EACH, trainer=FSDP2, numbered=True)
    job.start(STEPS_EACH)
    train(job, STEPS_EACH)
    job.lose([0, 1])
    goes_on(job, [2, 3], 2 * STEPS_EACH)
    train(job, 2 * STEPS_EACH)
    job.lose([])
    goes_on(job, [0, 1, 2, 3], 3 * STEPS_EACH, is_durable=True)  # keepers saw to that meanwhile
    assert len(set(job.finish())) == 1


@pytest.mark.root
@pytest.mark.slow
@pytest.mark.timeout(180)
def test_a_lost_shard_is_rebuilt_from_parity_for_fewer_nodes(new_job: MakeJob) -> None:
    """One survivor rebuilds it in its memory, the others take what they need of it from there."""
    job = new_job(4, XOR, steps=2 * STEPS_EACH, trainer=FSDP2, numbered=True)
    job.start(STEPS_EACH)
    train(job, STEPS_EACH)
    job.lose([3])
    goes_on(job, [0, 1, 2], 2 * STEPS_EACH)
    assert len(set(job.finish())) == 1
