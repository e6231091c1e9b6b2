"""One slot more where saves lack one and memory allows it; none is given up."""

from dataclasses import replace

import pytest

from autockpt.session.tuning.autotuner import is_news
from autockpt.tuner.online.controller import Controller, begin
from autockpt.values.goal import FailureDeclaration, Goal, Limits, Pins
from autockpt.values.record import from_data, to_data
from autockpt.values.telemetry import NO_SLOT, HostMemoryNoted, SaveSkipped
from tests.support.jobs import FakeJob
from tests.support.profiles import example_failures, example_recovery
from tests.unit.policies.interval.test_choose import costs
from tests.unit.tuner.online.test_controller import HOUR, plan

GB = 10**9
RESERVE_BYTES = 512 * 2**20


class Run:
    """A job with slots of 1 GB; every third save finds none that may be overwritten."""

    def __init__(self, goal: Goal | None = None, *, slots: int = 2) -> None:
        wanted = goal or Goal()
        pins = replace(wanted.pins, memory_interval_steps=60, disk_interval_steps=600)
        declared = FailureDeclaration(mtbf_s=2 * HOUR)
        memory = begin(
            plan=replace(plan(), slots=slots), failures=example_failures(mtbf_s=2 * HOUR),
            recovery=example_recovery(), prior=costs(),
        )  # fmt: skip
        self.controller = Controller(memory, goal=replace(wanted, pins=pins, failures=declared))
        self.job = FakeJob(seed=3)
        self.free_bytes, self.starves = 20 * GB, True
        self.room_bytes: int | None = None

    def go(self, checkpoints: int) -> list[int]:
        """So many saves; the numbers of slots that were changed to."""
        before = len(self.job.proposals)
        for n in range(checkpoints):
            job, now = self.job, self.controller.plan
            if self.starves and now.slots < 3 and n % 2:
                skipped = SaveSkipped(
                    at_s=job.now_s, rank=0, step=job.step, reason=f"rank 0: {NO_SLOT}"
                )
                self.controller.observe(skipped)
            self.controller.observe(
                HostMemoryNoted(
                    at_s=job.now_s, rank=0, available_bytes=self.free_bytes, slots=now.slots,
                    reserve_bytes=RESERVE_BYTES, slot_bytes=GB, ranks=2,
                    room_bytes=self.room_bytes or max(0, self.free_bytes - RESERVE_BYTES),
                )
            )  # fmt: skip
            job.run(self.controller, until_s=job.now_s + 1.0)
        changed = [p for p in self.job.proposals[before:] if p.kind == "slots"]
        return [p.plan.slots for p in changed]


def test_saves_without_a_slot_get_one_more_and_no_other() -> None:
    """Within eight saves, with the evidence; where saves find one nothing changes."""
    run = Run()
    assert run.go(12) == [3]
    (found,) = [p for p in run.job.proposals if p.kind == "slots"]
    assert "skipped for want of a slot" in found.reason
    assert run.go(30) == []
    calm = Run()
    calm.starves = False
    assert calm.go(30) == []


def test_a_slot_comes_only_where_the_reserve_stays() -> None:
    """Slots of two ranks take 2 GB; in a control group the room is not all that is left."""
    run = Run()
    run.room_bytes, run.free_bytes = 2 * GB, 2 * GB + RESERVE_BYTES - 1
    assert run.go(30) == []
    run.free_bytes += 1
    assert run.go(12) == [3]


def test_little_memory_takes_no_slot_that_may_hold_an_image() -> None:
    """However often the host has less than the reserve."""
    run = Run(slots=3)
    run.starves, run.free_bytes = False, 300 * 2**20
    assert run.go(20) == []


def test_the_host_is_noted_again_once_it_has_more_than_the_reserve() -> None:
    """However small the step; memory that hardly changes is not noted."""
    tight = HostMemoryNoted(
        at_s=1.0, rank=0, available_bytes=RESERVE_BYTES - 1, slots=2, reserve_bytes=RESERVE_BYTES,
        slot_bytes=GB, ranks=2, room_bytes=0,
    )  # fmt: skip
    assert is_news(None, 2, 20 * GB)
    assert is_news(tight, 2, RESERVE_BYTES + 1)
    ample = replace(tight, available_bytes=20 * GB)
    assert not is_news(ample, 2, 19 * GB)
    assert is_news(ample, 3, 19 * GB)
    assert is_news(ample, 2, 10 * GB)


@pytest.mark.parametrize(
    "goal",
    [
        Goal(pins=Pins(slots=2)),
        Goal(pins=Pins(retune=False)),
        Goal(pins=Pins(retune="observe")),
        Goal(limits=Limits(host_memory_bytes=5 * GB)),
    ],
    ids=["pinned", "not re-tuned", "observed", "limited"],
)
def test_where_more_is_not_allowed_there_is_no_more(goal: Goal) -> None:
    """Four slots of 1 GB on a node are within 5 GB, six are not."""
    assert Run(goal).go(30) == []


def test_it_goes_through_json() -> None:
    """Into the next process."""
    run = Run()
    run.go(4)
    memory = run.controller.memory
    assert sum(memory.slots.dues) == 2
    assert from_data(type(memory), to_data(memory)) == memory
