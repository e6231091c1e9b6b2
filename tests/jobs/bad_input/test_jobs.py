"""Jobs that autockpt cannot protect, or not now: a clear sentence, and the training goes on."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from autockpt.values.errors import ConfigError
from autockpt.values.goal import Goal, Limits
from autockpt.values.telemetry import Degraded, SaveSkipped
from tests.conftest import end_keeper
from tests.jobs.kill.zygote import ROOT, Zygote, environment
from tests.support import trainings
from tests.support.live import SPEC, Live, granted, room_for_one
from tests.unit.executors.states import Holder

pytestmark = pytest.mark.usefixtures("warm_starts")
PLAN = trainings.plan(memory=4, disk=4)


def test_too_little_memory_for_the_slots_degrades_and_changes_nothing(
    live: Live, capfd: pytest.CaptureFixture[str]
) -> None:
    """The policy allows one page; the training ends as if nobody had attached."""
    whole = trainings.bare(trainings.build(SPEC))
    job, ckpt = live.attach(SPEC, PLAN, Goal(limits=Limits(host_memory_bytes=4096)))
    for step, batch in ckpt.batches(SPEC.steps):
        trainings.train_step(job, step, batch)
        if step == 1:
            assert ckpt._client.wait_until(lambda: bool(ckpt._client.slots_refused), 30)
    assert trainings.digest(job) == whole
    told = live.events(Degraded)
    assert {"memory tier", "final checkpoint"} <= {event.what for event in told}
    said = "the policy allows 4.1 kB; raise limits.host_memory or lower memory.slots"
    assert all(said in event.reason for event in told), told
    assert {event.step for event in live.events(SaveSkipped)} == {4, 8, 12}
    assert said in capfd.readouterr().err
    assert live.durable_steps() == {}


def test_memory_for_one_slot_still_saves_to_storage(live: Live) -> None:
    """Two are asked for, because they serve better; what was planned is taken then."""
    one = trainings.plan(memory=0, disk=4, slots=1)
    whole = trainings.bare(trainings.build(SPEC))
    job, ckpt = live.attach(SPEC, one, room_for_one(live, SPEC, one))
    link = ckpt._client
    for step, batch in ckpt.batches(SPEC.steps):
        if step in (2, 3):  # refused two, then given one
            assert link.wait_until(lambda: bool(link.slots or link.slots_refused), 30)
        granted(ckpt)
        trainings.train_step(job, step, batch)
    assert len(link.slots) == 1
    assert trainings.digest(job) == whole
    assert set(live.durable_steps()) >= {4, 8, 12}


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (
            {"ema": Holder({"decay": 0.9, "hook": print})},
            r"ema\.hook: a builtins\.builtin_function_or_method cannot be saved safely\. "
            r"Give its owner a state_dict\(\)/load_state_dict\(\) of tensors",
        ),
        (
            {"ema": Holder({"weights": [1, {"deep": object()}]})},
            r"ema\.weights\.1\.deep: a builtins\.object cannot be saved safely",
        ),
        ({"ema": object()}, r"attach\(ema=\.\.\.\): a object has no state_dict/load_state_dict"),
        (
            {"policy": "p.yaml"},
            r"attach\(policy=\.\.\.\): p\.yaml is no .*goal=\.\.\.\) takes a Goal",
        ),
        ({"model": "net"}, r"attach\(model=\.\.\.\): expected a torch\S+Module, got str$"),
        (
            {"model": ["net", "other"]},
            r"attach\(model=\.\.\.\): expected a torch\S+Module, got list; several go in a dict by "
            r"name: model=\{'first': \.\.\., 'second': \.\.\.\}",
        ),
        ({"model": None}, r"attach\(model=\.\.\.\): expected a torch\S+Module, got None"),
        (
            {"optimiser": torch.optim.SGD(torch.nn.Linear(1, 1).parameters(), lr=0.1)},
            r"attach\(optimiser=\.\.\.\): a SGD goes under optimizer=; several go in a dict",
        ),
        (
            {"loader": torch.utils.data.DataLoader([1, 2])},
            r"attach\(loader=\.\.\.\): a DataLoader goes under data=",
        ),
    ],
    ids=[
        "function",
        "nested",
        "no-state-dict",
        "policy",
        "no-module",
        "list",
        "none",
        "optimizer",
        "loader",
    ],
)
def test_what_cannot_be_saved_is_said_at_attach(
    more: dict[str, Any], said: str, live: Live
) -> None:
    """With its key and the way out, before any keeper is started."""
    with pytest.raises(ConfigError, match=said) as caught:
        live.attach(SPEC, PLAN, **more)
    assert caught.value.exit_code == 78
    assert not Path(live.checkpoints).exists()


def test_an_object_that_turns_bad_later_degrades_and_ends_nothing(live: Live) -> None:
    """Older checkpoints stay what a restart resumes."""
    whole = trainings.bare(trainings.build(SPEC))
    holder = Holder({"decay": 0.9})
    job, ckpt = live.attach(SPEC, PLAN, ema=holder)
    for step, batch in ckpt.batches(SPEC.steps):
        trainings.train_step(job, step, batch)
        granted(ckpt)
        if step == 5:
            assert ckpt.wait_durable(30) > 0
            holder.state = {"decay": print}
    assert trainings.digest(job) == whole
    assert any("ema.decay: a builtins." in event.reason for event in live.events(Degraded))
    live.leave()
    assert set(live.durable_steps()) == {4}
    _, ckpt = live.attach(SPEC, ema=Holder({"decay": 0.1}))
    assert ckpt.step_count == 4


TWO_RANKS = """
import sys, time
import autockpt
from tests.support import trainings
rank, run_dir = int(sys.argv[1]), sys.argv[2]
job = trainings.build(trainings.JobSpec(steps=9), rank=rank)
ckpt = autockpt.attach(**job.attached, run_dir=run_dir)
print("from", ckpt.step_count, flush=True)
batches = iter([(b[0], b[1]) for _ in range(3) for b in job.loader])
def one():
    trainings.train_step(job, ckpt.step_count, next(batches))
    ckpt.step()
def save():
    ckpt._client.wait_until(lambda: bool(ckpt._client.slots), 60)
    ckpt.save()
    ckpt._saver.ask(ckpt._rank.generation(ckpt.step_count + 1), disk=True)
    generation = ckpt._rank.generation(ckpt.step_count + 1)
    link = ckpt._client
    link.wait_until(lambda: link.saves.get(generation).is_answered, 60)
    one()
    ckpt.wait_for_staging()
    return generation
if ckpt.step_count == 0:
    one(); one()
    good = save()
    print("durable", ckpt.wait_durable(60) > 0, flush=True)
    if rank == 1:
        ckpt.step()
    bad = save()
    one(); one()
    print("only the good one is durable", ckpt._client.saves.durable == good != bad, flush=True)
ckpt.close(final_checkpoint=False)
print("trained on", flush=True)
"""


def test_ranks_that_disagree_on_the_step_lose_that_generation_and_train_on(
    zygote: Zygote, tmp_path: Path
) -> None:
    """Rank 1 counts one step too many before both save; what both had before is what loads."""
    (tmp_path / "job.py").write_text(TWO_RANKS)
    run_dir = trainings.prepare(tmp_path / "run", trainings.plan(memory=0, disk=1000))

    def place(rank: int, launch: str) -> dict[str, str]:
        return {
            "RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": str(rank),
            "LOCAL_WORLD_SIZE": "2", "AUTOCKPT_LAUNCH_ID": launch,
            "AUTOCKPT_LAUNCHER_PID": str(os.getpid()),
        }  # fmt: skip

    processes = [
        subprocess.Popen(
            [sys.executable, str(tmp_path / "job.py"), str(rank), run_dir], cwd=ROOT, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            env={**environment(), **place(rank, "first")},
        )
        for rank in range(2)
    ]  # fmt: skip
    try:
        for process in processes:
            said = process.communicate(timeout=100)[0]
            assert process.returncode == 0, said
            assert "durable True" in said
            assert "only the good one is durable True" in said
            assert "trained on" in said
        end_keeper(run_dir)
        commits = tmp_path.glob("run/checkpoints/ckpt-*/COMMIT")
        assert [path.parent.name for path in commits] == ["ckpt-t0001-step-00000003"]
        outs = [tmp_path / f"again-{rank}" for rank in range(2)]
        for out in outs:
            out.mkdir()
        spec = trainings.spec_data(trainings.JobSpec(steps=9))
        pids = [
            zygote.start(spec, run_dir, outs[rank], **place(rank, "again")) for rank in range(2)
        ]
        for pid, out in zip(pids, outs, strict=True):
            assert zygote.finish(pid, out / "log") == 0, (out / "log").read_text()
            assert trainings.said(out)[0]["step"] == 3
    finally:
        for process in processes:
            process.kill()
            process.wait()
        end_keeper(run_dir)
