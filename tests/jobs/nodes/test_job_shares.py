"""Jobs whose nodes divide what they hold alike: stored once, and put together again from anywhere.

Every rank says the digest of its whole state before each step.  A restored state is compared with
what the former ranks had at that step, and the end with a training that nobody disturbed.
"""

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
import torch

import autockpt
from autockpt.cli import app
from autockpt.run_directory import RunDirectory
from autockpt.values.goal import SharedAmong
from autockpt.values.redundancy import NO_REDUNDANCY, Redundancy
from tests.conftest import keeper_pids
from tests.jobs.kill.ordeal import read_events
from tests.jobs.nodes.conftest import MakeJob
from tests.jobs.nodes.network_job import PATIENCE_S, NetworkJob
from tests.jobs.nodes.nodes_job import NodesJob, undisturbed_digest
from tests.jobs.nodes.regrouped_trainer import build, undisturbed
from tests.jobs.nodes.test_regrouped import DISK_STEPS, first_state

DDP = "tests.jobs.nodes.regrouped_trainer:run_ddp"
ASTRAY = "tests.jobs.nodes.regrouped_trainer:run_astray"
HSDP = "tests.jobs.nodes.regrouped_trainer:run_hsdp"
WIDTH = 4096
STEPS_EACH = 59
"""Checkpoints in memory after every third step, and after every twentieth on disk: the newest one
is two steps old, in memory only."""


def state_bytes() -> int:
    """Parameters and both moments."""
    return 3 * sum(p.nbytes for p in build(WIDTH).parameters())


def newest_shards(job: NetworkJob | NodesJob) -> list[Path]:
    """The files of the newest durable checkpoint, by rank."""
    folders = sorted(Path(job.run_dir, "checkpoints").glob("ckpt-*"))
    newest = [f for f in folders if (f / "COMMIT").exists()][-1]
    return sorted(newest.rglob("shard-*.safetensors"))


def stored_bytes(job: NetworkJob) -> list[int]:
    """By rank the bytes of its shard in the newest durable checkpoint."""
    return [path.stat().st_size for path in newest_shards(job)]


def kill_rank(job: NetworkJob, rank: int) -> None:
    """SIGKILL of one trainer; the others are ended, as launchers do.  Keepers live on.

    They make the newest checkpoint durable.  Its files are damaged, so that memory alone has it.
    """
    newest = job.newest("MemoryCommitted")
    os.kill(job.pids[rank], signal.SIGKILL)
    job.lose([])
    deadline = time.monotonic() + PATIENCE_S
    while job.newest("CheckpointDurable") < newest:
        assert time.monotonic() < deadline, job.tale()
        time.sleep(0.02)
    for path in newest_shards(job):
        path.write_bytes(b"damaged")


def reach(job: NetworkJob, step: int) -> int:
    """Waits until all ranks stand at a step, and memory has a newer checkpoint than the disk.

    A loaded machine may skip the very newest.
    """
    job.stand_at(step)
    durable = step // DISK_STEPS * DISK_STEPS
    job.wait(lambda: job.newest("MemoryCommitted") > durable, "a checkpoint in memory")
    job.wait(lambda: job.newest("CheckpointDurable") >= durable, "a durable one")
    return job.newest("MemoryCommitted")


def resumed(job: NetworkJob, limit: int) -> tuple[int, list[str]]:
    """Starts with the state that the former ranks had; the step, and the source of every rank."""
    had = {fact["step"]: fact["digest"] for fact in job.said(0, "state")}
    former = job.starts
    job.start(limit)
    restored = job.restored()
    step = int(restored[0]["step"])
    for rank in range(job.count):
        assert first_state(job, rank, former) == had[step], job.tale()
    return step, [event["source"] for event in restored]


@pytest.mark.root
@pytest.mark.timeout(120)
def test_two_nodes_store_what_both_hold_once_and_resume_from_each_other(new_job: MakeJob) -> None:
    """The bytes of one node in all; a killed rank costs nothing that was in memory."""
    job = new_job(2, NO_REDUNDANCY, steps=2 * STEPS_EACH, trainer=DDP, width=WIDTH, shares="job")
    job.start(STEPS_EACH)
    promised = reach(job, STEPS_EACH)
    stored = stored_bytes(job)
    assert sum(stored) <= 1.05 * state_bytes(), stored
    assert max(stored) <= 0.55 * state_bytes(), stored
    kill_rank(job, 1)
    step, sources = resumed(job, 2 * STEPS_EACH)
    assert step >= promised, (step, promised, job.tale())
    assert sources == ["memory", "memory"], job.tale()
    assert set(job.finish()) == {undisturbed(WIDTH, 2 * STEPS_EACH)}, job.tale()


@pytest.mark.root
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_three_nodes_lose_a_rank_a_node_and_all_memory(new_job: MakeJob) -> None:
    """A rank: from memory.  A node: from the newest durable one.  All: from disk, on two nodes."""
    steps = [STEPS_EACH * number for number in (1, 2, 3, 4)]
    job = new_job(3, NO_REDUNDANCY, steps=steps[-1], trainer=DDP, width=WIDTH, shares="job")
    job.start(steps[0])
    promised = reach(job, steps[0])
    stored = stored_bytes(job)
    assert sum(stored) <= 1.05 * state_bytes(), stored
    kill_rank(job, 2)
    step, sources = resumed(job, steps[1])
    assert step >= promised, (step, promised, job.tale())
    assert sources == ["memory"] * 3, (step, promised, job.tale())

    reach(job, steps[1])
    durable = job.newest("CheckpointDurable")
    job.lose([1])
    step, sources = resumed(job, steps[2])
    assert step == durable, (step, durable, sources, job.tale())
    assert "disk" in sources, (step, durable, sources, job.tale())

    reach(job, steps[2])
    durable = job.newest("CheckpointDurable")
    job.lose([0, 1, 2])
    job.resize([0, 1])
    step, sources = resumed(job, steps[3])
    assert step == durable, (step, durable, sources, job.tale())
    assert sources == ["disk", "disk"], (step, durable, sources, job.tale())
    assert len(set(job.finish())) == 1, job.tale()


@pytest.mark.root
@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    "redundancy",
    [Redundancy(scheme="replicas", copies=2), Redundancy(scheme="xor", set_size=3, parity=1)],
    ids=["copies", "xor"],
)
def test_a_lost_node_takes_no_shares_with_it_where_others_protect_them(
    new_job: MakeJob, redundancy: Redundancy
) -> None:
    """The newest protected checkpoint comes back, which is on no disk."""
    job = new_job(3, redundancy, steps=2 * STEPS_EACH, trainer=DDP, width=WIDTH, shares="job")
    job.start(STEPS_EACH)
    reach(job, STEPS_EACH)
    durable = job.newest("CheckpointDurable")
    job.wait(lambda: job.newest("GenerationReplicated") > durable, "protection")
    promised = job.newest("GenerationReplicated")
    job.lose([1])
    step, sources = resumed(job, 2 * STEPS_EACH)
    assert step >= promised, (step, promised, sources, job.tale())
    assert "disk" not in sources, (step, promised, sources, job.tale())
    assert len(set(job.finish())) == 1, job.tale()


def damage_memory(job: NetworkJob, rank: int) -> None:
    """Bytes of every slot of a rank differ, in the memory that its keeper holds."""
    (keeper,) = keeper_pids(job.run_dir, rank)
    slots = 0
    for link in Path(f"/proc/{keeper}/fd").iterdir():
        with suppress(FileNotFoundError):
            if f"memfd:autockpt-r{rank}-s" in os.readlink(link):
                slots += 1
                with open(link, "r+b") as memory:
                    for offset in range(2**16, os.fstat(memory.fileno()).st_size // 2, 2**16):
                        memory.seek(offset)
                        memory.write(b"damaged")
    assert slots


@pytest.mark.root
@pytest.mark.slow
@pytest.mark.timeout(240)
def test_a_damaged_share_is_rebuilt_from_parity(new_job: MakeJob) -> None:
    """No file has the checkpoint, and the damaged memory is on the node of its rank."""
    redundancy = Redundancy(scheme="xor", set_size=3, parity=1)
    job = new_job(3, redundancy, steps=2 * STEPS_EACH, trainer=DDP, width=WIDTH, shares="job")
    job.start(STEPS_EACH)
    reach(job, STEPS_EACH)
    durable = job.newest("CheckpointDurable")
    job.wait(lambda: job.newest("GenerationReplicated") > durable, "protection")
    promised = job.newest("GenerationReplicated")
    kill_rank(job, 2)
    damage_memory(job, 1)
    step, sources = resumed(job, 2 * STEPS_EACH)
    assert step >= promised, (step, promised, sources, job.tale())
    assert "disk" not in sources, (step, promised, sources, job.tale())
    assert len(set(job.finish())) == 1, job.tale()


@pytest.mark.root
@pytest.mark.slow
@pytest.mark.timeout(240)
def test_pairs_that_cut_the_state_share_with_the_pairs_that_hold_the_same(
    new_job: MakeJob,
) -> None:
    """HSDP: a rank's part is on one other node; memory, then half as many nodes from disk."""
    job = new_job(4, NO_REDUNDANCY, steps=3 * STEPS_EACH, trainer=HSDP, width=WIDTH, shares="job")
    job.start(STEPS_EACH)
    promised = reach(job, STEPS_EACH)
    stored = stored_bytes(job)
    assert sum(stored) <= 1.05 * state_bytes(), stored
    assert max(stored) <= 0.3 * state_bytes(), stored
    kill_rank(job, 3)
    step, sources = resumed(job, 2 * STEPS_EACH)
    assert step >= promised, (step, promised, job.tale())
    assert sources == ["memory"] * 4, (step, promised, job.tale())
    reach(job, 2 * STEPS_EACH)
    job.lose([0, 1, 2, 3])
    job.resize([0, 1])
    step, sources = resumed(job, 3 * STEPS_EACH)
    assert sources == ["disk", "disk"], (sources, job.tale())
    assert len(set(job.finish())) == 1, job.tale()


@pytest.mark.root
@pytest.mark.slow
@pytest.mark.timeout(240)
def test_ranks_that_hold_other_values_store_all_of_their_own(new_job: MakeJob) -> None:
    """One of three leaves the others: nothing of it is shared, and each goes on with its own."""
    job = new_job(3, NO_REDUNDANCY, steps=2 * STEPS_EACH, trainer=ASTRAY, width=WIDTH, shares="job")
    job.start(STEPS_EACH)
    promised = reach(job, STEPS_EACH)
    for rank in range(3):
        events = read_events(Path(job.run_dir, "telemetry", f"rank-{rank:05d}.jsonl"))
        degraded = [e for e in events if e["event"] == "Degraded" and e["what"] == "shared state"]
        assert len(degraded) == 1, degraded
        assert "rank 1 holds other values than ranks [0, 2]" in degraded[0]["reason"], degraded
    had = [{f["step"]: f["digest"] for f in job.said(r, "state")} for r in range(3)]
    assert had[1][STEPS_EACH] != had[0][STEPS_EACH] == had[2][STEPS_EACH]
    kill_rank(job, 2)
    former = job.starts
    job.start(2 * STEPS_EACH)
    restored = job.restored()
    step = int(restored[0]["step"])
    assert step >= promised > 20, (step, promised, job.tale())
    assert [first_state(job, r, former) for r in range(3)] == [had[r][step] for r in range(3)]
    ends = job.finish()
    assert ends[1] != ends[0] == ends[2], job.tale()


def disturb(job: NetworkJob, dice: Random) -> None:
    """Ends a start: nothing else, a rank, a keeper, a node, or all nodes."""
    match dice.choice(("none", "rank", "keeper", "node", "all")):
        case "rank":
            os.kill(dice.choice(job.pids), signal.SIGKILL)
            job.lose([])
        case "keeper":
            for pid in keeper_pids(job.run_dir, dice.choice(job.places)):
                os.kill(pid, signal.SIGKILL)
            job.lose([])
        case "node":
            job.lose([dice.choice(job.places)])
        case "all":
            job.lose(job.places)
        case _:
            job.lose([])


@pytest.mark.root
@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("seed", range(4))
def test_random_losses_with_another_setting_and_number_of_nodes(
    new_job: MakeJob, seed: int
) -> None:
    """What is restored is what ranks had at that step, and never older than what was durable."""
    dice = Random(seed)
    redundancy = dice.choice((NO_REDUNDANCY, Redundancy(scheme="replicas", copies=2)))
    trainer, nodes, fewer = dice.choice(((DDP, 3, (2, 3)), (HSDP, 4, (2, 4))))
    job = new_job(
        nodes, redundancy, steps=10_000, trainer=trainer, numbered=True, width=512, shares="job"
    )
    files = RunDirectory(job.run_dir)
    job.start(30)
    for number in range(1, 7):
        at_least = 30 * number - dice.randrange(12)
        job.wait(lambda step=at_least: reached(job) >= step, f"step {at_least}")
        disturb(job, dice)
        durable = job.newest("CheckpointDurable")
        had = {fact["step"]: fact["digest"] for fact in job.said(0, "state")}
        if dice.random() < 0.3:
            job.resize(sorted(dice.sample(range(nodes), dice.choice(fewer))))
        plan = files.read_plan()
        assert plan is not None
        shares = dice.choice(("job", "job", "node"))
        files.write_plan(replace(plan, staging=replace(plan.staging, shares=shares)))
        former = job.starts
        job.start(30 * number + 30)
        step = int(job.restored()[0]["step"])
        assert step >= durable, (number, step, durable, job.tale())
        for rank in range(job.count):
            assert first_state(job, rank, former) == had[step], (number, rank, job.tale())
    job.lose([])


def reached(job: NetworkJob) -> int:
    """The step that all ranks of the newest start have reached."""
    newest = [
        [fact["step"] for fact in job.said(rank, "state") if fact["start"] == job.starts - 1]
        for rank in range(job.count)
    ]
    return min(max(steps, default=0) for steps in newest)


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Callable[[SharedAmong], NodesJob]]:
    """Starts two launchers with two ranks each."""
    with ExitStack() as stack:

        def start(shares: SharedAmong) -> NodesJob:
            folder = tmp_path / shares
            folder.mkdir()
            job = NodesJob(folder, settings=(f"staging.shares={shares}",), ranks=2)
            stack.callback(job.end)
            return job

        yield start


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_ranks_of_launchers_share_and_every_tool_reads_what_they_stored(
    launch: Callable[[SharedAmong], NodesJob], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """GPT with tied weights, four ranks, a kill; the end is that of a job that shares by node."""
    job = launch("job")
    job.wait(lambda: job.durable(1) > 0, "a commit")
    (started,) = job.events("rank-00003", "RunStarted")
    os.kill(started["pid"], signal.SIGKILL)
    promised = max(event["step"] for event in job.events("keeper-001", "MemoryCommitted"))
    digest = job.finish()
    restored = job.events("keeper-000", "Restored") + job.events("keeper-001", "Restored")
    assert {event["source"] for event in restored} == {"memory"}, job.tale()
    assert all(event["step"] >= promised for event in restored), job.tale()
    by_node = launch("node")
    assert digest == by_node.finish() == undisturbed_digest(4), job.tale()

    stored = {
        one.run_dir: sum(f.stat().st_size for f in newest_shards(one)) for one in (job, by_node)
    }
    assert stored[job.run_dir] <= 0.7 * stored[by_node.run_dir], stored
    state = autockpt.load(job.run_dir)
    other = autockpt.load(by_node.run_dir)
    assert state["model"].keys() == other["model"].keys()
    assert all(torch.equal(state["model"][n], t) for n, t in other["model"].items())
    weights = str(tmp_path / "weights.pt")
    for command in (
        ("verify", job.run_dir), ("show", job.run_dir), ("explain", job.run_dir),
        ("diff", job.run_dir, by_node.run_dir, "--only", "model"),
        ("convert", job.run_dir, weights, "--to", "torch"),
        ("diff", job.run_dir, weights, "--only", "model"),
    ):  # fmt: skip
        assert app.run([*command]) == 0, (command, capfd.readouterr())
