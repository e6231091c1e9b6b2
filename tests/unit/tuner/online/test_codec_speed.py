"""Encoding follows the speed of the storage: taken up when it is slow, given up when it is fast."""

from dataclasses import replace

import pytest

from autockpt.policies.codec_speeds import CodecAtSpeed, codecs_by_speed
from autockpt.tuner.online.controller import Controller, begin
from autockpt.tuner.online.controller_state import Memory
from autockpt.values.goal import FailureDeclaration, Goal, Limits, Pins
from autockpt.values.plan import CheckpointPlan
from autockpt.values.record import from_data, to_data
from tests.support.jobs import FakeJob
from tests.support.profiles import example_failures, example_profile, example_recovery
from tests.unit.policies.interval.test_choose import costs
from tests.unit.tuner.online.test_controller import HOUR, plan

ZSTD = {"parameters": "zstd", "moments": "zstd"}
PROFILED_S = 5.0
TABLE = tuple(CodecAtSpeed(slower=2.0**n, codec=ZSTD, factor=0.6) for n in range(1, 6))
"""Encoding pays from twice as slow on."""


class Storage:
    """Checkpoints that are durable after this; the codec makes of it what it really does."""

    def __init__(self, *, factor: float = 0.6) -> None:
        self.slower, self.factor = 1.0, factor

    def __call__(self, now: CheckpointPlan) -> float:
        """Seconds until durable under a plan."""
        encoded = bool(now.tier("disk").codec)
        return PROFILED_S * (max(self.slower * self.factor, 1.3) if encoded else self.slower)


class Run:
    """A job whose storage changes; what its controller did to the codec."""

    def __init__(self, storage: Storage, *, goal: Goal | None = None, noise: float = 0.05) -> None:
        memory = begin(
            plan=plan(),
            failures=example_failures(mtbf_s=2 * HOUR),
            recovery=example_recovery(),
            prior=costs(persist_s=PROFILED_S),
            codecs=TABLE,
        )
        wanted = goal or Goal(failures=FailureDeclaration(mtbf_s=2 * HOUR))
        pins = replace(wanted.pins, memory_interval_steps=60, disk_interval_steps=600)
        self.controller = Controller(memory, goal=replace(wanted, pins=pins))
        self.storage = storage
        self.job = FakeJob(stall_s=0.1, noise=noise, seed=3, persist_of=storage)

    def phase(self, slower: float, hours: float = 2.0) -> list[bool]:
        """So long on storage of this speed; whether each change of the codec encodes."""
        self.storage.slower, before = slower, len(self.job.proposals)
        self.job.run(self.controller, until_s=self.job.now_s + hours * HOUR)
        changed = [p for p in self.job.proposals[before:] if p.kind == "codec"]
        return [bool(p.plan.tier("disk").codec) for p in changed]

    @property
    def encodes(self) -> bool:
        """Under the plan in force."""
        return bool(self.controller.plan.tier("disk").codec)


def test_a_codec_is_taken_up_on_slow_storage_and_given_up_on_fast() -> None:
    """One change a phase, and none that is undone within it."""
    run = Run(Storage())
    assert run.phase(1.0) == []
    assert run.phase(4.0) == [True]
    assert run.phase(20.0) == []
    assert run.phase(1.0) == [False]
    assert run.phase(20.0) == [True]
    assert run.phase(1.0) == [False]


def test_it_takes_no_more_than_eight_checkpoints() -> None:
    """On disk, under the plan that is in force."""
    run = Run(Storage())
    run.phase(1.0)
    for slower, encodes in ((20.0, True), (1.0, False)):
        begun = run.controller.seen.persisted
        while run.encodes is not encodes:
            assert run.controller.seen.persisted - begun <= 9
            run.phase(slower, hours=0.1)


def test_a_codec_that_does_not_keep_what_was_expected_is_refused_once() -> None:
    """It makes checkpoints later; it is tried again only where the storage is twice as slow."""
    run = Run(Storage(factor=1.3))
    run.phase(1.0)
    assert run.phase(4.0, hours=4.0) == [True, False]
    assert run.phase(6.0) == []


@pytest.mark.parametrize(
    "goal",
    [Goal(pins=Pins(retune=False)), Goal(pins=Pins(retune="observe"))],
    ids=["never", "observe"],
)
def test_where_the_plan_may_not_change_the_codec_does_not(goal: Goal) -> None:
    """Whatever the storage does."""
    run = Run(Storage(), goal=goal)
    run.phase(1.0)
    assert run.phase(20.0) == []


def test_what_is_known_of_encoding_goes_through_json() -> None:
    """Into the next process, and into a recording."""
    run = Run(Storage())
    run.phase(4.0)
    memory = run.controller.memory
    assert memory.codec.raw_s is not None
    assert from_data(Memory, to_data(memory)) == memory


def test_the_table_is_what_decide_would_choose_at_each_speed() -> None:
    """No codec on fast storage, one on slow; none where it is pinned or chosen for its size."""
    profile = example_profile()
    table = codecs_by_speed(profile, Goal())
    assert [at.slower for at in table] == sorted(at.slower for at in table)
    assert table
    assert table[0].slower > 1.0
    assert all(at.codec and at.factor < 1.0 for at in table)
    factors = [at.factor for at in table]
    assert factors == sorted(factors, reverse=True)
    assert codecs_by_speed(profile, Goal(pins=Pins(codec="none"))) == ()
    assert codecs_by_speed(profile, Goal(limits=Limits(disk_bytes=10**12))) == ()
    assert codecs_by_speed(replace(profile, codecs=()), Goal()) == ()
