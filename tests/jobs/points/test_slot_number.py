"""The plan takes one more memory slot while the job trains, and gives none up: saves go on."""

import os
import time
from dataclasses import replace

import pytest

from autockpt.session import Session
from autockpt.values.plan import CheckpointPlan
from autockpt.values.telemetry import HostMemoryNoted, PlanChanged
from tests.support import trainings
from tests.support.live import Live

PATIENCE_S = 60.0
SAVES = 3
"""Looked at under the last plan."""
pytestmark = pytest.mark.usefixtures("one_thread")


def agreed(ckpt: Session, slots: int) -> CheckpointPlan:
    """Offers the plan with so many slots to all ranks, as the controller does."""
    now = ckpt._rank.plan
    plan = replace(now, version=now.version + 1, slots=slots)
    ckpt._plans.propose(plan)
    return plan


def inodes(ckpt: Session) -> list[int]:
    """The memory behind the slots."""
    return [os.fstat(arena.fd).st_ino for arena in ckpt._rank.client.slots if arena.fd is not None]


def test_a_slot_comes_while_the_job_trains_and_none_goes(live: Live) -> None:
    """From three to four; a plan with two keeps the four, and the images that they hold."""
    job, ckpt = live.attach(plan=trainings.plan(memory=1, disk=5, version=1))
    wanted, made, until_s = 3, [], time.monotonic() + PATIENCE_S
    for step, batch in ckpt.batches(10**6):
        trainings.train_step(job, step, batch)
        link, now = ckpt._rank.client, ckpt._rank.plan
        assert time.monotonic() < until_s, (wanted, len(link.slots), now.slots)
        least = max(wanted, len(made[-1]) if made else 0)
        if now.slots != wanted or len(link.slots) < least or not link.saves.durable:
            continue
        ckpt.wait_durable(PATIENCE_S)
        made.append(inodes(ckpt))
        if len(made) == 3 + SAVES:
            break
        until_s = time.monotonic() + PATIENCE_S
        if len(made) < 3:
            wanted = agreed(ckpt, (4, 2)[len(made) - 1]).slots
    assert [len(slots) for slots in made] == [3, 4] + [4] * (1 + SAVES)
    assert made[1][:3] == made[0]
    assert all(slots == made[1] for slots in made[2:])
    assert len(live.events(PlanChanged)) == 2
    noted = live.events(HostMemoryNoted)
    assert all(0 <= event.room_bytes <= event.available_bytes for event in noted)
