"""Point 13 with two ranks: a change of the plan takes effect before the same step on both."""

from dataclasses import replace
from pathlib import Path

from tests.conftest import end_keeper
from tests.jobs.kill.ordeal import read_events
from tests.jobs.kill.zygote import Zygote
from tests.support import trainings


def test_two_ranks_change_at_one_step(zygote: Zygote, tmp_path: Path) -> None:
    """Proposed by rank 0 in the middle of the training, applied by both before the same step."""
    chosen = replace(trainings.plan(memory=2, disk=2), plan_id="p13")
    run_dir = trainings.prepare(tmp_path / "run", chosen)
    spec = trainings.JobSpec(steps=60, pace_s=0.004, propose_at=10)
    pids = []
    try:
        for rank in range(2):
            out = tmp_path / f"rank-{rank}"
            out.mkdir()
            pids.append(
                zygote.start(
                    trainings.spec_data(spec), run_dir, out, RANK=str(rank), WORLD_SIZE="2",
                    LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE="2", AUTOCKPT_LAUNCH_ID="p13",
                )
            )  # fmt: skip
        for rank, pid in enumerate(pids):
            log = tmp_path / f"rank-{rank}" / "log"
            assert zygote.finish(pid, log) == 0, log.read_text()
    finally:
        end_keeper(run_dir)
    steps = []
    for rank in range(2):
        events = read_events(Path(run_dir) / "telemetry" / f"rank-{rank:05d}.jsonl")
        steps += [event["step"] for event in events if event["event"] == "PlanChanged"]
    assert len(steps) == 2
    assert steps[0] == steps[1] > 10
