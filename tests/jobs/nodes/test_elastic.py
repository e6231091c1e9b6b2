"""Machines come and go: a spare one, one that comes back with what it knew, ranks that move."""

import contextlib
from pathlib import Path

import pytest

from autockpt.values import telemetry as t
from autockpt.values.redundancy import Redundancy
from benchmarks.cluster import ClusterError
from tests.jobs.nodes.conftest import BITS_PER_S, MakeJob, launched
from tests.jobs.nodes.network_job import NetworkJob

COPIES = Redundancy(scheme="replicas", copies=2)
STEPS_EACH = 60


def protected_after(job: NetworkJob, step: int) -> int:
    """Waits until something well beyond a step survives the loss of a node; the newest."""
    job.wait(lambda: job.newest("GenerationReplicated") > step + 12, "protection")
    return job.newest("GenerationReplicated")


@pytest.mark.root
@pytest.mark.slow
@pytest.mark.timeout(200)
def test_a_machine_that_comes_back_with_stale_copies_is_brought_up_to_date(
    new_job: MakeJob,
) -> None:
    """Its trainer was replaced by a spare machine, its keeper lived on; then the spare one is lost
    and the old machine takes part again: it restores what the others have, not what it held."""
    job = new_job(4, COPIES, steps=3 * STEPS_EACH, spare=1)
    job.start(STEPS_EACH)
    stale = protected_after(job, 0)
    job.lose([])
    job.places[1] = 4
    job.start(2 * STEPS_EACH)
    restored = job.restored()
    assert [event["source"] for event in restored] == ["memory", "peer", "memory", "memory"]
    promised = protected_after(job, restored[0]["step"])
    job.lose([4])
    job.places[1] = 1
    job.start(3 * STEPS_EACH)
    restored = job.restored()
    assert [event["source"] for event in restored] == ["memory", "peer", "memory", "memory"]
    assert restored[0]["step"] >= promised > stale, job.tale()
    assert job.finish() == job.undisturbed(), job.tale()


@pytest.mark.root
@pytest.mark.slow
@pytest.mark.timeout(200)
def test_ranks_on_other_machines_than_before_lose_nothing_that_is_durable(
    new_job: MakeJob,
) -> None:
    """A launcher that numbers nodes anew moves all ranks: what memory cannot serve, the disk does;
    nothing is mixed and nothing is lost that was durable."""
    job = new_job(4, COPIES, steps=2 * STEPS_EACH)
    job.start(STEPS_EACH)
    protected_after(job, 0)
    job.wait(lambda: job.newest("CheckpointDurable") > 0, "a durable one")
    job.lose([])
    durable = job.newest("CheckpointDurable")
    job.places = [1, 2, 3, 0]
    job.start(2 * STEPS_EACH)
    assert job.restored()[0]["step"] >= durable, job.tale()
    assert job.finish() == job.undisturbed(), job.tale()


SETTINGS = ("memory.interval=3 steps", "disk.interval=1002 steps", "redundancy.scheme=replicas",
            "redundancy.copies=2")  # fmt: skip
SCRIPT = ("examples/gpt/train.py", "--size", "tiny", "--steps", "400", "--threads", "1",
          "--text-bytes", "200000")  # fmt: skip


@pytest.mark.root
@pytest.mark.slow
@pytest.mark.timeout(240)
def test_survivors_keep_their_places_when_a_machine_of_another_name_replaces_one(
    tmp_path: Path,
) -> None:
    """Machine 0 is lost and one whose address sorts last comes: the rendezvous would number all
    nodes anew, and every checkpoint in memory would be looked for on the wrong machine."""
    with launched(3, BITS_PER_S, tmp_path, settings=SETTINGS, script=SCRIPT, spare=1) as job:
        job.wait_for("protection", lambda: job.events(t.GenerationReplicated) or None, 90.0)
        promised = max(event.step for event in job.events(t.GenerationReplicated))
        lost_s = job.lose(0)
        job.launch(3)

        def back() -> dict[int, t.Restored] | None:
            found = {event.rank: event for event in job.events(t.Restored, since_s=lost_s)}
            return found if len(found) == 3 else None

        try:
            restored = job.wait_for("a restore of all ranks", back, 90.0)
        except ClusterError as error:
            raise AssertionError("\n".join([str(error), *map(job.tail, job.launchers)])) from None
        sources = [restored[rank].source for rank in range(3)]
        assert sources == ["peer", "memory", "memory"], sources
        assert min(event.step for event in restored.values()) >= promised


@pytest.mark.root
@pytest.mark.slow
@pytest.mark.timeout(240)
def test_two_launchers_go_on_without_the_third_from_memory(tmp_path: Path) -> None:
    """Machine 0 is lost, the coordinator with it, and nobody comes: the two others keep their
    numbers, and with these the memory of the newest protected checkpoint."""
    settings = (*SETTINGS[:-1], "redundancy.copies=3")  # any two may be lost
    with launched(3, BITS_PER_S, tmp_path, settings=settings, script=SCRIPT, least=2) as job:
        job.wait_for("protection", lambda: job.events(t.GenerationReplicated) or None, 90.0)
        promised = max(event.step for event in job.events(t.GenerationReplicated))
        lost_s = job.lose(0)

        def back() -> dict[int, t.Restored] | None:
            found = {event.rank: event for event in job.events(t.Restored, since_s=lost_s)}
            return found if len(found) == 2 else None

        try:
            restored = job.wait_for("a restore of both ranks", back, 90.0)
        except ClusterError as error:
            raise AssertionError("\n".join([str(error), *map(job.tail, job.launchers)])) from None
        assert {event.source for event in restored.values()} <= {"memory", "peer"}
        assert {event.step for event in restored.values()} == {restored[0].step}
        assert restored[0].step >= promised
        keepers = {path.stem for path in (job.files.path / "logs").glob("keeper-*.log")}
        assert keepers == {"keeper-000", "keeper-001", "keeper-002"}


@pytest.mark.root
@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_spare_node_takes_the_place_of_a_lost_one_with_a_parked_process(tmp_path: Path) -> None:
    """Of two spares one does; the other one ends well with the job."""
    settings = (*SETTINGS, "restart.standby=on")
    script = (*SCRIPT[:4], "1500", *SCRIPT[5:])
    with launched(2, BITS_PER_S, tmp_path, settings=settings, script=script, spare=2) as job:
        job.wait_for("protection", lambda: job.events(t.GenerationReplicated) or None, 90.0)
        for spare in (2, 3):
            job.launch(spare)
        ready = "autockpt: standby for a restart"
        job.wait_for(
            "four parked processes",
            lambda: sum(commands(node.pids()).count(ready) for node in job.net.nodes) == 4 or None,
            120.0,
        )
        promised = max(event.step for event in job.events(t.GenerationReplicated))
        lost_s = job.lose(1)
        started = job.wait_for(
            "a restore of both ranks",
            lambda: (len(found := job.events(t.RunStarted, since_s=lost_s)) == 2 and found) or None,
            90.0,
        )
        assert [event.process for event in started] == ["parked", "parked"]
        restored = {event.rank: event for event in job.events(t.Restored, since_s=lost_s)}
        assert [restored[rank].source for rank in range(2)] == ["memory", "peer"]
        assert restored[0].step >= promised
        said = job.finish(120.0)
        assert sum("this node is a spare" in line for line in said) == 2
        assert sum("this spare node was not needed" in line for line in said) == 1
        assert sum("finished at step 1500" in line for line in said) == 2


def commands(pids: list[int]) -> list[str]:
    """As `ps` shows them."""
    found = []
    for pid in pids:
        with contextlib.suppress(OSError):
            found.append(Path(f"/proc/{pid}/cmdline").read_bytes().rstrip(b"\0").decode())
    return found
