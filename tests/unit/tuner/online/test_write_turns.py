"""Ways of writing take turns where checkpoints are not durable when they were meant to be."""

from dataclasses import replace

import pytest

from autockpt.policies.staging.write_path import best_ways
from autockpt.tuner.online.controller import Controller, begin
from autockpt.values.errors import ConfigError
from autockpt.values.goal import FailureDeclaration, Goal, Pins
from autockpt.values.plan import Staging, WriteWay
from autockpt.values.record import from_data, to_data
from tests.support.jobs import FakeJob
from tests.support.profiles import example_failures, example_profile, example_recovery
from tests.unit.policies.interval.test_choose import costs
from tests.unit.tuner.online.test_controller import HOUR, plan

PROFILED_S = 60.0
NOW = Staging().write_way
BUFFERED = replace(NOW, direct_io=False)
KINDS = ("compare", "write")


class Run:
    """A job on a storage that treats ways of writing differently, phase by phase."""

    def __init__(self, *, goal: Goal | None = None) -> None:
        memory = begin(
            plan=plan(), failures=example_failures(mtbf_s=2 * HOUR), recovery=example_recovery(),
            prior=costs(persist_s=PROFILED_S),
        )  # fmt: skip
        wanted = goal or Goal(failures=FailureDeclaration(mtbf_s=2 * HOUR))
        pins = replace(wanted.pins, memory_interval_steps=60, disk_interval_steps=600)
        self.controller = Controller(memory, goal=replace(wanted, pins=pins))
        self.direct_s = self.buffered_s = PROFILED_S
        self.job = FakeJob(stall_s=0.1, noise=0.1, seed=3, durable_of=self._durable_s)

    def _durable_s(self, way: WriteWay) -> float:
        return self.direct_s if way.direct_io else self.buffered_s

    def phase(self, *, direct_s: float, buffered_s: float, hours: float = 10.0) -> list[str]:
        """So long on such a storage; what was done about the way of writing."""
        self.direct_s, self.buffered_s, before = direct_s, buffered_s, len(self.job.proposals)
        self.job.run(self.controller, until_s=self.job.now_s + hours * HOUR)
        return [p.kind for p in self.job.proposals[before:] if p.kind in KINDS]

    @property
    def way(self) -> WriteWay:
        """In force."""
        return self.controller.plan.staging.write_way


def test_the_way_follows_the_storage_both_ways_with_one_change_a_phase() -> None:
    """O_DIRECT becomes four times slower, then as fast as before, then slow again."""
    run = Run()
    assert run.phase(direct_s=60.0, buffered_s=100.0) == []
    assert run.phase(direct_s=240.0, buffered_s=100.0) == ["compare", "write"]
    assert run.way == BUFFERED
    assert "a checkpoint to disk is durable after" in run.job.proposals[0].reason
    # Nothing tells that the other way is fast again while this one is as it was.
    assert run.phase(direct_s=60.0, buffered_s=100.0) == []
    assert run.phase(direct_s=60.0, buffered_s=300.0) == ["compare", "write"]
    assert run.way.direct_io
    assert run.phase(direct_s=240.0, buffered_s=100.0) == ["compare", "write"]
    assert run.way == BUFFERED


def test_a_clear_difference_takes_two_checkpoints_of_each_way() -> None:
    """Eight show the slow storage, six compare three ways; fifteen were compared before."""
    run = Run()
    run.phase(direct_s=60.0, buffered_s=100.0, hours=4.0)
    began = run.controller.seen.persisted
    run.direct_s, run.buffered_s = 600.0, 100.0
    while run.way.direct_io and run.controller.seen.persisted < began + 30:
        run.job.run(run.controller, until_s=run.job.now_s + 700.0)
    assert run.controller.seen.persisted - began <= 8 + 6 + 4


def test_a_storage_that_is_slow_for_every_way_keeps_the_way() -> None:
    """Twenty times slower, and back: compared, and no change that is undone later."""
    run = Run()
    run.phase(direct_s=20.0, buffered_s=20.0, hours=4.0)
    for slower_s in (400.0, 20.0):
        assert run.phase(direct_s=slower_s, buffered_s=slower_s).count("write") <= 1
        assert run.way == NOW


@pytest.mark.parametrize(
    "goal",
    [
        Goal(pins=Pins(retune=False)),
        Goal(pins=Pins(retune="observe")),
        Goal(pins=Pins(direct_io=True, writers=2)),
    ],
    ids=["never", "observe", "pinned"],
)
def test_a_way_that_may_not_change_is_not_compared(goal: Goal) -> None:
    """Whatever the storage does."""
    run = Run(goal=replace(goal, failures=FailureDeclaration(mtbf_s=2 * HOUR)))
    run.phase(direct_s=60.0, buffered_s=100.0, hours=4.0)
    assert run.phase(direct_s=240.0, buffered_s=100.0) == []


def test_what_rarely_costs_anything_is_not_compared() -> None:
    """Half a second instead of a quarter, with failures every two hours."""
    run = Run()
    run.phase(direct_s=0.25, buffered_s=0.5, hours=4.0)
    assert run.phase(direct_s=0.6, buffered_s=0.25) == []


def test_what_is_known_of_ways_goes_through_json() -> None:
    """Into the next process, and into a recording."""
    run = Run()
    run.phase(direct_s=60.0, buffered_s=100.0)
    run.phase(direct_s=240.0, buffered_s=100.0)
    memory = run.controller.memory
    assert memory.compared["write"].settings[0] == str(BUFFERED)
    assert from_data(type(memory), to_data(memory)) == memory


def test_a_profile_names_the_best_way_of_each_kind_that_pins_allow() -> None:
    """Each kind once, from fast to slow."""
    profile = example_profile()
    ways = best_ways(profile, Pins())
    assert ways
    assert len({(way.writers, way.direct_io) for way in ways}) == len(ways)
    assert all(way.direct_io for way in best_ways(profile, Pins(direct_io=True)))


def test_a_comparison_needs_two_ways() -> None:
    """Of one there is nothing to learn."""
    with pytest.raises(ConfigError, match="at least two"):
        Staging(compare_writes=(NOW,))
