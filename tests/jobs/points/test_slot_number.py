"""The plan gives up a memory slot while the job trains, and takes one more: saves go on."""

import time
from dataclasses import replace

import pytest

from autockpt.session import Session
from autockpt.values.plan import CheckpointPlan
from autockpt.values.telemetry import HostMemoryNoted, PlanChanged
from tests.support import trainings
from tests.support.live import Live

PATIENCE_S = 60.0
pytestmark = pytest.mark.usefixtures("one_thread")


def agreed(ckpt: Session, slots: int) -> CheckpointPlan:
    """Offers the plan with so many slots to all ranks, as the controller does."""
    now = ckpt._rank.plan
    plan = replace(now, version=now.version + 1, slots=slots)
    ckpt._plans.propose(plan)
    return plan


def test_slots_go_and_come_while_the_job_trains(live: Live) -> None:
    """From three to two and back; the newest checkpoint is in memory and durable each time."""
    job, ckpt = live.attach(plan=trainings.plan(memory=1, disk=5, version=1))
    wanted, made = iter((2, 3)), []
    slots, until_s = 3, time.monotonic() + PATIENCE_S
    for step, batch in ckpt.batches(10**6):
        trainings.train_step(job, step, batch)
        assert time.monotonic() < until_s, (slots, made)
        if len(ckpt._rank.client.slots) != slots or not ckpt._rank.client.saves.durable:
            continue
        made.append(slots)
        ckpt.wait_durable(PATIENCE_S)
        until_s = time.monotonic() + PATIENCE_S
        if (number := next(wanted, None)) is None:
            break
        slots = agreed(ckpt, number).slots
    assert made == [3, 2, 3]
    assert len(live.events(PlanChanged)) == 2
    noted = live.events(HostMemoryNoted)
    assert all(0 <= event.room_bytes <= event.available_bytes for event in noted)
