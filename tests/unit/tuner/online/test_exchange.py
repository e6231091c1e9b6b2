"""Copies to other nodes follow the speed of the link: slower while it is slow, and back again."""

import json
from dataclasses import replace

from autockpt.policies.redundancy.link_speeds import (
    exchanges_by_speed,
    profiled_s_per_gb,
)
from autockpt.tuner.online.controller import Controller, begin, go_on
from autockpt.tuner.online.controller_state import Memory
from autockpt.tuner.online.proposals import PlanProposal, intervals_of
from autockpt.tuner.online.recording import Line, RecordedController, replay
from autockpt.tuner.online.watches.exchange import ExchangeWatch, entry_beyond
from autockpt.values.goal import FailureDeclaration, Goal, Pins, RedundancyWish
from autockpt.values.plan import CheckpointPlan
from autockpt.values.record import from_data, to_data, to_json
from autockpt.values.redundancy import NO_REDUNDANCY, Redundancy
from autockpt.values.telemetry import PlanChanged
from tests.support.jobs import FakeJob
from tests.support.profiles import example_failures, example_recovery
from tests.unit.policies.interval.test_choose import costs
from tests.unit.policies.redundancy.test_choose import cluster
from tests.unit.tuner.online.test_controller import HOUR, plan

COPIES = Redundancy(scheme="replicas", copies=2, placement="group")
GB = 1e9


class Run:
    """A job on 16 nodes whose link changes; copies of a gigabyte, whose rate the plan limits."""

    def __init__(self, goal: Goal | None = None, *, noise: float = 0.1) -> None:
        wanted = goal or Goal()
        self.goal = replace(wanted, failures=FailureDeclaration(mtbf_s=2 * HOUR, process_share=0.3))
        profile = cluster(slowdown=0.2)  # 2 GB/s that hold training up by a fifth
        table = exchanges_by_speed(profile, self.goal, COPIES)
        rate = wanted.redundancy.rate_bytes_per_s
        self.watch = ExchangeWatch(
            table=table, profiled_s_per_gb=profiled_s_per_gb(profile, COPIES)
        )
        at = next(at for at in table if at.slower == 1.0)
        redundancy = replace(COPIES, rate_bytes_per_s=rate or at.rate_bytes_per_s)
        self.plan = replace(plan(), redundancy=redundancy)
        self.profiled_rate = at.rate_bytes_per_s
        self.costs = replace(costs(persist_s=30.0), peers=at.peers)
        self.controller = Controller(self.begin(), goal=self.goal)
        self.slower = 1.0
        self.job = FakeJob(noise=noise, seed=5, persist_s=30.0, exchange_of=self.exchange)

    def begin(self) -> Memory:
        """What a start knows."""
        return begin(
            plan=self.plan, failures=example_failures(mtbf_s=2 * HOUR, nodes=16),
            recovery=example_recovery(), prior=self.costs, exchange=self.watch,
        )  # fmt: skip

    def exchange(self, now: CheckpointPlan) -> tuple[float, float]:
        """(until other nodes hold it, moving) over the link as it is."""
        moving_s = self.slower * self.watch.profiled_s_per_gb
        rate = now.redundancy.rate_bytes_per_s
        return max(moving_s, GB / rate if rate else 0.0), moving_s

    def phase(self, slower: float, hours: float = 1.0) -> list[PlanProposal]:
        """So long with this link; the changes of the rate."""
        self.slower, before = slower, len(self.job.proposals)
        self.job.run(self.controller, until_s=self.job.now_s + hours * HOUR)
        return [p for p in self.job.proposals[before:] if p.kind == "redundancy"]

    @property
    def rate(self) -> float:
        """Bytes per second under the plan in force."""
        return self.controller.plan.redundancy.rate_bytes_per_s


def test_a_link_that_halves_halves_the_rate_and_it_comes_back() -> None:
    """One change a phase, none undone within it, with the speeds in its reason."""
    run = Run()
    assert run.phase(1.0) == []
    (slowed,) = run.phase(2.0)
    assert run.rate == run.profiled_rate / 2
    assert "meant for 2 GB/s" in slowed.reason
    (back,) = run.phase(1.0)
    assert run.rate == run.profiled_rate
    assert back.plan.redundancy.scheme == "replicas"


def test_it_takes_no_more_than_eight_exchanges() -> None:
    """In both directions."""
    run = Run()
    run.phase(1.0)
    for slower, factor in ((4.0, 0.25), (1.0, 1.0)):
        run.slower, begun = slower, run.controller.seen.sealed
        while run.rate != factor * run.profiled_rate:
            assert run.controller.seen.sealed - begun <= 9
            run.job.run(run.controller, until_s=run.job.now_s + 60.0)


def test_intervals_leave_room_for_an_exchange_that_takes_longer() -> None:
    """Over a link 64 times slower copies take longer than an interval did; and back, soon."""
    run = Run()
    run.phase(1.0)
    usual_steps = intervals_of(run.controller.plan)[0]
    run.phase(64.0)
    slow_steps = intervals_of(run.controller.plan)[0]
    exchange_s = run.exchange(run.controller.plan)[0]
    assert usual_steps * run.job.iteration_s < exchange_s <= 1.2 * slow_steps * run.job.iteration_s
    began_s = run.job.now_s
    run.phase(1.0)
    moved = [p for p in run.job.proposals if p.kind == "retune"]
    assert len(moved) == 2, "one change a phase"
    came_s = [e.at_s for e in run.job.log if isinstance(e, PlanChanged)][-1]
    assert came_s - began_s <= 5 * slow_steps * run.job.iteration_s
    assert intervals_of(run.controller.plan)[0] <= 0.5 * slow_steps


def test_what_is_pinned_or_only_observed_does_not_move() -> None:
    """Whatever the link does."""
    pinned = Goal(redundancy=RedundancyWish(rate_bytes_per_s=3e8))
    for goal in (pinned, Goal(pins=Pins(retune=False)), Goal(pins=Pins(retune="observe"))):
        run = Run(goal)
        assert run.phase(1.0) == []
        assert run.phase(8.0) == []


def test_the_table_is_what_the_plan_would_have_at_each_speed() -> None:
    """Half the rate where the link is half as fast; none where the link shows no speed."""
    profile = cluster(slowdown=0.2)
    table = exchanges_by_speed(profile, Goal(), COPIES)
    rates = {at.slower: at.rate_bytes_per_s for at in table}
    assert rates[2.0] == rates[1.0] / 2 == rates[0.5] / 4
    for other in (
        NO_REDUNDANCY,
        replace(COPIES, schedule="windows"),
        replace(COPIES, path="device"),
    ):
        assert exchanges_by_speed(profile, Goal(), other) == ()


def test_the_next_process_knows_the_link() -> None:
    """Its rate stays the one of the slow link, through JSON, and comes back there."""
    run = Run()
    run.phase(4.0)
    former = from_data(Memory, to_data(run.controller.memory))
    assert former == run.controller.memory
    run.plan = former.plan
    run.controller = Controller(go_on(former, run.begin()), goal=run.goal)
    assert run.controller.memory.exchange.slower == 4.0
    assert run.phase(4.0) == []
    assert len(run.phase(1.0)) == 1
    assert run.rate == run.profiled_rate


def test_the_rate_of_a_slow_link_comes_back_where_no_process_tells_of_it() -> None:
    """The memory was lost, or is of bytes that were staged otherwise."""
    run = Run()
    assert run.begin().exchange.slower == 1.0
    run.phase(4.0)
    former, cut = run.controller.memory, run.controller.plan
    run.plan = cut
    lost = run.begin()
    assert (lost.exchange.slower, lost.scheme.slower) == (4.0, 0.0)
    lost.seen.link = former.seen.link
    assert entry_beyond(lost.exchange, lost.seen.link, 0.0) is not None, "its scheme is doubtful"
    run.controller = Controller(run.begin(), goal=run.goal)
    assert len(run.phase(1.0)) == 1
    assert run.rate == run.profiled_rate
    run.plan = replace(cut, staging=replace(cut.staging, chunk_bytes=cut.staging.chunk_bytes * 2))
    otherwise = go_on(former, run.begin())
    assert otherwise.exchange.slower == former.exchange.slower
    assert otherwise.scheme.slower == former.scheme.slower
    assert otherwise.seen.link == former.seen.link


def test_a_run_with_a_slow_link_replays_byte_for_byte() -> None:
    """From its recording alone, as text."""
    run, lines = Run(), []

    def write(line: Line) -> bool:
        lines.append(json.loads(json.dumps(line)))
        return False

    own = RecordedController(Controller(run.begin(), goal=run.goal), write)
    run.job.run(own, until_s=0.5 * HOUR)
    run.slower = 4.0
    run.job.run(own, until_s=HOUR)
    assert "redundancy" in [proposal.kind for proposal in run.job.proposals]
    again = replay([("recording", lines)])
    assert again.difference is None
    assert list(map(to_json, again.proposals)) == list(map(to_json, run.job.proposals))
