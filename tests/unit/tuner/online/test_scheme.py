"""The scheme of copies follows the link and the failures while a job trains, and back again."""

import json
from dataclasses import replace

import pytest

from autockpt.policies.redundancy.link_speeds import (
    exchanges_by_speed,
    profiled_s_per_gb,
    schemes_by_speed,
)
from autockpt.tuner.online.controller import Controller, begin, go_on
from autockpt.tuner.online.controller_state import Memory
from autockpt.tuner.online.proposals import PlanProposal
from autockpt.tuner.online.recording import Line, RecordedController, replay
from autockpt.tuner.online.watches.exchange import ExchangeWatch
from autockpt.values.goal import FailureDeclaration, Goal, Pins, RedundancyWish
from autockpt.values.plan import CheckpointPlan
from autockpt.values.profile import Estimate
from autockpt.values.record import from_data, to_data, to_json
from autockpt.values.redundancy import NO_REDUNDANCY, Redundancy, said
from autockpt.values.telemetry import HostMemoryNoted
from tests.support.jobs import RESERVE_BYTES, FakeJob
from tests.support.profiles import example_failures, example_recovery
from tests.unit.policies.interval.test_choose import costs
from tests.unit.policies.redundancy.test_choose import cluster
from tests.unit.tuner.online.test_controller import HOUR, plan

THREE = Redundancy(scheme="replicas", copies=3, placement="mixed")
TWO = Redundancy(scheme="replicas", copies=2, placement="group")
PAIRS = (5.0, 4.0, 0.3, 0.3)
"""Nodes are often lost in pairs."""
GB = 10**9
SHARE_GB = 0.72
"""Of one node."""


class Run:
    """A job on 16 nodes; a lost node costs ten minutes where the memory of others does not help."""

    def __init__(
        self,
        goal: Goal | None = None,
        *,
        first: Redundancy = THREE,
        together: tuple[float, ...] = PAIRS,
    ) -> None:
        self.goal = replace(goal or Goal(), failures=FailureDeclaration(mtbf_s=2 * HOUR))
        profile = cluster(slowdown=0.2, host=5e8)
        self.profile = replace(profile, failures=replace(profile.failures, together=together))
        self.schemes = schemes_by_speed(self.profile, self.goal, first)
        self.per_gb = profiled_s_per_gb(self.profile, first)
        at = next(at for at in self.schemes[0].table if at.slower == 1.0)
        self.plan = replace(plan(), redundancy=replace(first, rate_bytes_per_s=at.rate_bytes_per_s))
        self.costs = replace(costs(persist_s=30.0, restore_disk_s=600.0), peers=at.peers)
        self.controller = Controller(self.begin(), goal=self.goal)
        self.slower, self.worse = 1.0, 1.0
        self.job = FakeJob(noise=0.1, seed=5, persist_s=30.0, exchange_of=self.exchange)

    def begin(self) -> Memory:
        """What a start knows."""
        recovery = replace(
            example_recovery(), restore_disk=Estimate(value_s=600.0, source="measured", n=3)
        )
        table = exchanges_by_speed(self.profile, self.goal, self.plan.redundancy)
        return begin(
            plan=self.plan, failures=example_failures(mtbf_s=2 * HOUR, nodes=16),
            recovery=recovery, prior=self.costs, schemes=self.schemes,
            exchange=ExchangeWatch(table=table, profiled_s_per_gb=self.per_gb),
        )  # fmt: skip

    def exchange(self, now: CheckpointPlan) -> tuple[float, float]:
        """(until other nodes hold it, moving a gigabyte) over the link as it is."""
        scheme = now.redundancy
        sent_s = SHARE_GB * GB * scheme.sent_share / scheme.rate_bytes_per_s
        moving_s = self.slower * self.per_gb
        longest_s = max(sent_s, SHARE_GB * scheme.sent_share * moving_s)
        return longest_s * (self.worse if scheme.copies == 2 else 1.0), moving_s

    def phase(self, slower: float, hours: float = 2.0) -> list[PlanProposal]:
        """So long with this link; the changes of the scheme."""
        self.slower, before = slower, len(self.job.proposals)
        self.job.run(self.controller, until_s=self.job.now_s + hours * HOUR)
        return [p for p in self.job.proposals[before:] if p.kind == "scheme"]

    @property
    def said(self) -> str:
        """The scheme in force."""
        return said(self.controller.plan.redundancy)


def test_a_link_that_halves_takes_fewer_copies_and_they_come_back() -> None:
    """One change a phase, with rate, speeds and wastes in its reason."""
    run = Run()
    assert run.phase(1.0) == []
    (fewer,) = run.phase(2.0)
    assert run.said == "2 copies, group"
    assert "3 copies, mixed -> 2 copies, group; the best intervals then waste" in fewer.reason
    assert "500 MB/s was profiled" in fewer.reason
    assert fewer.plan.redundancy.rate_bytes_per_s == pytest.approx(62.5e6)
    (back,) = run.phase(1.0)
    assert run.said == "3 copies, mixed"
    assert back.plan.redundancy.rate_bytes_per_s == run.plan.redundancy.rate_bytes_per_s
    assert run.phase(1.0) == []


def test_it_takes_no_more_than_eight_exchanges() -> None:
    """Beside the dwell from the change before."""
    run = Run()
    run.phase(1.0)
    for slower, said_then in ((2.0, "2 copies, group"), (1.0, "3 copies, mixed")):
        run.slower, begun = slower, run.controller.seen.sealed
        while run.said != said_then:
            assert run.controller.seen.sealed - begun <= 9
            run.job.run(run.controller, until_s=run.job.now_s + 60.0)
        run.phase(slower, hours=2.5)


def test_a_link_that_flaps_changes_the_scheme_once_a_dwell() -> None:
    """For one round both schemes cost memory and network."""
    run = Run()
    run.phase(1.0)
    changes = []
    for number in range(24):  # six hours
        changes += run.phase(2.0 if number % 2 else 1.0, hours=0.25)
    assert 1 <= len(changes) <= 6


def test_a_scheme_that_is_worse_than_expected_is_given_up_and_not_tried_again() -> None:
    """Two copies take four times as long as they should: back, and they stay."""
    run = Run()
    run.phase(1.0)
    run.worse = 4.0
    taken, undone = run.phase(2.0, hours=6.0)
    assert said(taken.plan.redundancy) == "2 copies, group"
    assert "an exchange takes" in undone.reason
    assert run.said == "3 copies, mixed"
    for slower in (2.0, 1.0, 2.0):
        assert run.phase(slower) == []


def test_a_scheme_whose_exchanges_never_end_is_given_up() -> None:
    """Its nodes cannot place it, for example."""
    run = Run()
    run.phase(1.0)
    job = run.job
    job.exchange_of = lambda now: None if now.redundancy.copies == 2 else run.exchange(now)
    taken, undone = run.phase(2.0)
    assert said(taken.plan.redundancy) == "2 copies, group"
    assert "none of 8 checkpoints was complete on other nodes" in undone.reason
    assert run.said == "3 copies, mixed"


def test_more_copies_need_room_on_the_host() -> None:
    """They come back when there is room."""
    run = Run()
    run.phase(1.0)
    run.phase(2.0)
    note_host(run, free_bytes=RESERVE_BYTES)
    assert run.phase(1.0) == []
    note_host(run, free_bytes=20 * GB)
    assert len(run.phase(1.0)) == 1


def note_host(run: Run, *, free_bytes: int) -> None:
    """A look at the host of rank 0."""
    run.controller.observe(
        HostMemoryNoted(
            at_s=run.job.now_s, rank=0, available_bytes=free_bytes, reserve_bytes=RESERVE_BYTES,
            room_bytes=max(0, free_bytes - RESERVE_BYTES), slots=3, slot_bytes=GB, ranks=1,
        )
    )  # fmt: skip


@pytest.mark.parametrize(
    "goal",
    [
        Goal(redundancy=RedundancyWish(scheme="replicas", copies=3)),
        Goal(redundancy=RedundancyWish(floor=2)),
        Goal(pins=Pins(retune=False)),
        Goal(pins=Pins(retune="observe")),
    ],
)
def test_what_is_pinned_or_only_observed_does_not_move(goal: Goal) -> None:
    """Nor does it fall below the floor."""
    run = Run(goal)
    run.phase(1.0)
    run.phase(8.0)
    assert run.controller.plan.redundancy.tolerates >= 2


def test_failures_on_record_choose_the_scheme_of_a_start() -> None:
    """Pairs that were lost together make two copies too few; without them three cost more."""
    found = Controller(Run(first=TWO).begin(), goal=Run().goal).start()
    assert found is not None
    assert said(found.plan.redundancy) == "3 copies, mixed"
    assert "for the failures on record: 2 copies, group -> 3 copies, mixed" in found.reason
    alone = Run(first=TWO, together=(9.9, 0.05, 0.01, 0.01))
    other = Controller(alone.begin(), goal=alone.goal).start()
    assert other is None or said(other.plan.redundancy) == "2 copies, group"


def test_the_next_process_goes_on_with_the_scheme_and_comes_back_from_it() -> None:
    """Through JSON, as a restart does."""
    run = Run()
    run.phase(1.0)
    run.phase(2.0)
    former = from_data(Memory, to_data(run.controller.memory))
    assert former == run.controller.memory
    run.plan = former.plan
    run.schemes = schemes_by_speed(run.profile, run.goal, run.plan.redundancy)
    memory = go_on(former, run.begin())
    assert memory.scheme.slower == 2.0
    run.controller = Controller(memory, goal=run.goal)
    found = run.controller.start()
    assert found is None or found.plan.redundancy == run.plan.redundancy
    assert run.phase(2.0) == []
    assert len(run.phase(1.0)) == 1


def test_a_start_takes_the_scheme_of_the_link_as_it_was_seen() -> None:
    """The process before died before its dwell was over; the next one does not wait."""
    run = Run()
    run.phase(1.0)
    run.slower = 2.0
    while run.controller.seen.link.n < 3 or run.controller.memory.scheme.wanted is None:
        run.job.run(run.controller, until_s=run.job.now_s + 60.0, apply=False)
    memory = go_on(from_data(Memory, to_data(run.controller.memory)), run.begin())
    found = Controller(memory, goal=run.goal).start()
    assert found is not None
    assert said(found.plan.redundancy) == "2 copies, group"


def test_a_change_of_the_scheme_replays_byte_for_byte() -> None:
    """From its recording alone, as text."""
    run, lines = Run(), []

    def write(line: Line) -> bool:
        lines.append(json.loads(json.dumps(line)))
        return False

    own = RecordedController(Controller(run.begin(), goal=run.goal), write)
    for slower in (1.0, 2.0, 1.0):
        run.slower = slower
        run.job.run(own, until_s=run.job.now_s + 2 * HOUR)
    assert [p.kind for p in run.job.proposals].count("scheme") == 2
    again = replay([("recording", lines)])
    assert again.difference is None
    assert list(map(to_json, again.proposals)) == list(map(to_json, run.job.proposals))


def test_the_schemes_are_those_that_goal_and_memory_allow() -> None:
    """The plan's first; none without copies, for no run would see the link again."""
    profile = cluster(slowdown=0.2)
    names = [said(one.redundancy) for one in schemes_by_speed(profile, Goal(), TWO)]
    assert names[0] == "2 copies, group"
    assert {"3 copies, mixed", "XOR over 4 nodes"} < set(names)
    assert "none" not in names
    assert schemes_by_speed(profile, Goal(), NO_REDUNDANCY) == ()
    tight = cluster(slowdown=0.2, free_gb=6.0)
    assert len(schemes_by_speed(tight, Goal(), TWO)) < len(names)
    impossible = Goal(redundancy=RedundancyWish(floor=40))
    assert [said(one.redundancy) for one in schemes_by_speed(profile, impossible, TWO)] == names[:1]
