"""Ranks that share what they hold alike: killed, astray, and back to the bit, each with its own.

Two ranks of one node train with DDP, so that each stores a part of parameters and optimizer only.
"""

from pathlib import Path

import pytest

from tests.jobs.kill.group import Group, undisturbed
from tests.jobs.kill.zygote import Zygote
from tests.support import trainings

RANKS = 2


@pytest.mark.timeout(240)
def test_what_two_ranks_share_comes_back_from_memory_and_from_disk(
    zygote: Zygote, tmp_path: Path
) -> None:
    """One rank is killed: each takes the other's part from its slot.  All die with the keeper: they
    read the files together.  In the end nothing differs from a run that nobody disturbed."""
    spec = trainings.JobSpec(steps=60, pace_s=0.01, seed=11, ddp=True, optimizer="fused")
    expected = undisturbed(zygote, spec, tmp_path / "bare")
    pair = Group(zygote, spec, tmp_path / "pair")
    pair.run_dir = trainings.prepare(tmp_path / "pair" / "run", trainings.plan(memory=2, disk=6))
    try:
        pair.start()
        pair.wait_step(14)
        pair.kill(1)
        promised = max(event["step"] for event in pair.events("MemoryCommitted"))
        pair.start()
        pair.wait_step(30)
        assert min(pair.started_at()) >= promised
        pair.wait_durable(24)
        pair.kill(0, 1, keeper=True)
        durable = max(event["step"] for event in pair.events("CheckpointDurable"))
        pair.start()
        digests = pair.finish()
        assert min(pair.started_at()) >= durable
        sources = [event["source"] for event in pair.events("Restored")]
        assert sources == ["memory"] * RANKS + ["disk"] * RANKS
        assert pair.parts_differ(), "each stores a part of its own"
        for rank in range(RANKS):
            lost = pair.events("Degraded", f"rank-{rank:05d}")
            assert not [e for e in lost if "shared state" in str(e)], pair.tale()
        assert digests == expected, pair.tale()
    finally:
        pair.end()


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_a_rank_that_goes_astray_keeps_its_own_values(zygote: Zygote, tmp_path: Path) -> None:
    """A parameter of one rank is changed behind DDP's back: the save that would mix both is
    dropped, training goes on, and from then on each rank's own state is saved and comes back."""
    spec = trainings.JobSpec(steps=60, pace_s=0.01, seed=12, ddp=True, stray_at=15)
    expected = undisturbed(zygote, spec, tmp_path / "bare")
    pair = Group(zygote, spec, tmp_path / "pair")
    pair.run_dir = trainings.prepare(tmp_path / "pair" / "run", trainings.plan(memory=2, disk=6))
    try:
        pair.start()
        pair.wait_step(40)
        pair.wait_durable(24)
        for rank in range(RANKS):
            told = pair.events("Degraded", f"rank-{rank:05d}")
            assert any("replicas differ" in str(event) for event in told), pair.tale()
        pair.kill(0, 1, keeper=True)
        pair.start()
        digests = pair.finish()
        assert not pair.parts_differ()
        assert min(pair.started_at()) >= 24 > spec.stray_at  # type: ignore[operator]
        assert digests == expected, pair.tale()
    finally:
        pair.end()
