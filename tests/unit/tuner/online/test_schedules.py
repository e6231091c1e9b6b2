"""Schedules of copying that take turns: judged by what they were seen to cost, beyond the noise."""

import random
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autockpt.policies.cost_model.costs import profile_costs
from autockpt.tuner.online.controller import Controller, begin
from autockpt.tuner.online.settings import ControllerSettings
from autockpt.tuner.online.turns.compare import GIVEN_UP, ROUNDS, compare, setting_costs
from autockpt.values.errors import ConfigError
from autockpt.values.goal import FailureDeclaration, Goal, Pins
from autockpt.values.plan import CheckpointPlan, Schedule, Staging, TierPlan
from autockpt.values.record import from_json, to_json
from autockpt.values.telemetry import (
    CheckpointDurable,
    IterationsTimed,
    PlanChanged,
    SettingMeasured,
    SnapshotSealed,
)
from tests.support.profiles import example_failures, example_profile, example_recovery

RIVALS: tuple[Schedule, ...] = ("windows", "lazy", "blocking")
ITERATION_S = 0.4


def tried(costs: dict[Schedule, float], count: int, *, noise: float = 0.1) -> list[SettingMeasured]:
    """So many snapshots in turn on a machine that gets 50 % slower meanwhile."""
    chance, staging, events = random.Random(1), Staging(compare=tuple(costs)), []
    for number in range(count):
        schedule = staging.schedule_of(number)
        slower = 1.0 + 0.5 * number / count
        cost_s = costs[schedule] * chance.uniform(1 - noise, 1 + noise)
        events.append(
            SettingMeasured(
                at_s=float(number), rank=0, generation=f"step {number} (term 1)", step=number,
                decision="schedule", setting=schedule, iterations=1,
                total_s=slower * (ITERATION_S + cost_s),
            )
        )  # fmt: skip
    return events


def test_overlap_that_costs_more_than_waiting_is_found() -> None:
    """4.3 s beside the compute where waiting takes 0.3 s."""
    events = tried({"windows": 3.9, "lazy": 4.3, "blocking": 0.3}, 3 * ROUNDS)
    found = compare(RIVALS, events, 0.0)
    assert found is not None
    assert found.winner == "blocking"
    assert "blocking" in found.sentence("a snapshot")
    assert found.numbers["windows_tries"] == ROUNDS
    assert found.numbers["windows_observed_s"] > 5 * found.numbers["blocking_observed_s"]


def test_windows_that_cost_more_than_lazy_lose_whatever_was_expected() -> None:
    """They were first, and are 50 ms dearer."""
    found = compare(("windows", "lazy"), tried({"windows": 0.06, "lazy": 0.01}, 2 * ROUNDS), 0.4)
    assert found is not None
    assert found.winner == "lazy"


def test_what_noise_cannot_tell_apart_stays_as_it_was_expected() -> None:
    """Equal costs under 40 % noise: the first one nearly always stays."""
    stayed = 0
    for seed in range(1000):
        chance = random.Random(seed)
        events = [
            replace(event, total_s=ITERATION_S + 0.1 * chance.uniform(0.6, 1.4))
            for event in tried({"windows": 0.1, "lazy": 0.1}, 2 * ROUNDS)
        ]
        found = compare(("windows", "lazy"), events, ITERATION_S)
        assert found is not None
        stayed += found.winner == "windows"
    assert 950 <= stayed < 1000


def test_too_few_tries_are_no_verdict_and_a_schedule_nobody_can_use_is_given_up() -> None:
    """A run whose windows are never known would compare for ever."""
    costs: dict[Schedule, float] = {"windows": 0.1, "lazy": 0.2}
    assert compare(("windows", "lazy"), tried(costs, 2 * ROUNDS - 2), 0.0) is None
    lazy = [e for e in tried(costs, 2 * GIVEN_UP * ROUNDS) if e.setting == "lazy"]
    assert compare(("windows", "lazy"), lazy[:ROUNDS], 0.0) is None
    found = compare(("windows", "lazy"), lazy, 0.0)
    assert found is not None
    assert found.winner == "lazy"
    assert [cost.setting for cost in found.costs] == ["lazy"]


def test_costs_are_what_is_beyond_quiet_iterations() -> None:
    """A copy that lasted two iterations is compared with two quiet ones."""
    event = SettingMeasured(
        at_s=1.0,
        rank=0,
        generation="step 1 (term 1)",
        step=1,
        decision="schedule",
        setting="lazy",
        iterations=2,
        total_s=1.0,
    )
    (cost,) = setting_costs(("lazy", "windows"), [event, event, event], 0.4)
    assert cost.cost_s == pytest.approx(0.2)
    assert cost.tries == 3


@given(number=st.integers(0, 10**9), compared=st.permutations(RIVALS), count=st.integers(2, 3))
def test_every_round_tries_each_once_and_no_order_is_always_the_same(
    number: int, compared: list[Schedule], count: int
) -> None:
    """All ranks find the same without talking: it follows from the number alone."""
    staging = Staging(compare=tuple(compared[:count]))
    start = number // count * count
    assert {staging.schedule_of(start + i) for i in range(count)} == set(compared[:count])
    first = Counter(staging.schedule_of(start + i * count) for i in range(6))
    assert set(first.values()) == {6 // count}
    assert Staging(schedule="blocking").schedule_of(number) == "blocking"


@pytest.mark.parametrize("compared", [("lazy",), ("lazy", "lazy")])
def test_a_comparison_needs_two_schedules(compared: tuple[Schedule, ...]) -> None:
    """Of one there is nothing to learn."""
    with pytest.raises(ConfigError, match="at least two"):
        Staging(compare=compared)


# --- the controller -------------------------------------------------------------------------------


class Run:
    """A run whose snapshots cost what `costs` says, told to a controller that it obeys."""

    def __init__(self, costs: dict[Schedule, float], *, goal: Goal | None = None) -> None:
        self.costs, self.quiet_s, self.now_s, self.step = costs, ITERATION_S, 0.0, 0
        plan = CheckpointPlan(
            plan_id="p", version=1, fingerprint="",
            tiers=(TierPlan(tier="memory", interval_steps=50),
                   TierPlan(tier="disk", interval_steps=500)),
            staging=Staging(schedule="windows", compare=("windows", "lazy")),
        )  # fmt: skip
        memory = begin(
            plan=plan, failures=example_failures(mtbf_s=7200.0, process_share=0.8),
            recovery=example_recovery(),
        )  # fmt: skip
        wanted = Goal(failures=FailureDeclaration(mtbf_s=7200.0, process_share=0.8))
        self.controller = Controller(
            memory, goal=goal or wanted, settings=ControllerSettings(compare_checkpoints=20)
        )
        self.kinds: list[str] = []
        self.reasons: list[str] = []

    def snapshots(self, count: int) -> None:
        """So many, each 50 iterations apart; proposals are applied at once."""
        for _ in range(count):
            self._snapshot()
            found = self.controller.propose(self.now_s, self.step)
            if found is not None:
                self.kinds.append(found.kind)
                self.reasons.append(found.reason)
                memory, disk = (found.plan.tier(n).interval_steps for n in ("memory", "disk"))
                self.controller.observe(
                    PlanChanged(
                        at_s=self.now_s, rank=0, plan_version=found.plan.version, step=self.step,
                        memory_interval_steps=memory, disk_interval_steps=disk,
                        reason=found.reason,
                    )
                )  # fmt: skip

    def stall_s(self, schedule: Schedule) -> float:
        """Of one snapshot."""
        return 0.001

    def _snapshot(self) -> None:
        self.step += 50
        self.now_s += 50 * self.quiet_s
        staging, name = self.controller.plan.staging, f"step {self.step} (term 1)"
        schedule = staging.schedule_of(self.step // 50)
        tell = self.controller.observe
        tell(
            IterationsTimed(
                at_s=self.now_s, rank=0, step=self.step, count=50, total_s=50 * self.quiet_s,
                checkpoint_s=0.0, quiet_s=self.quiet_s, busy_s=0.0,
            )
        )  # fmt: skip
        tell(
            SnapshotSealed(
                at_s=self.now_s, rank=0, generation=name, step=self.step, bytes=1,
                boundary_stall_s=self.stall_s(schedule), fence_stall_s=0.0, copy_s=0.1,
            )
        )  # fmt: skip
        tell(
            CheckpointDurable(
                at_s=self.now_s, rank=-1, generation=name, step=self.step, bytes=1,
                stored_bytes=1, latency_s=1.0, write_s=1.0,
            )
        )  # fmt: skip
        if staging.compare:
            tell(
                SettingMeasured(
                    at_s=self.now_s, rank=0, generation=name, step=self.step, decision="schedule",
                    setting=schedule, iterations=1, total_s=self.quiet_s + self.costs[schedule],
                )
            )  # fmt: skip


def test_a_run_falls_back_to_lazy_when_windows_cost_more() -> None:
    """The plan was made for windows; sixteen snapshots later it is not."""
    run = Run({"windows": 0.2, "lazy": 0.02})
    run.snapshots(2 * ROUNDS)
    assert run.kinds.count("schedule") == 1
    staging = run.controller.plan.staging
    assert (staging.schedule, staging.compare) == ("lazy", ())
    assert "windows 200 ms (8 tries), lazy 20 ms (8 tries); lazy it is" in "".join(run.reasons)
    run.snapshots(50)
    assert run.kinds.count("schedule") == 1


def test_windows_that_are_as_good_as_expected_stay() -> None:
    """And nobody takes turns any more."""
    run = Run({"windows": 0.001, "lazy": 0.05})
    run.snapshots(2 * ROUNDS)
    staging = run.controller.plan.staging
    assert (staging.schedule, staging.compare) == ("windows", ())


def test_another_pace_of_the_training_is_compared_anew() -> None:
    """Iterations became twice as long: another batch size has other windows."""
    run = Run({"windows": 0.001, "lazy": 0.05})
    run.snapshots(40)
    assert run.kinds.count("compare") == 0
    run.quiet_s, run.costs = 2 * ITERATION_S, {"windows": 0.3, "lazy": 0.05}
    run.snapshots(60)
    assert run.kinds.count("compare") == 1
    assert run.controller.plan.staging.schedule == "lazy"


def test_a_run_that_only_observes_compares_nothing() -> None:
    """Nothing would be applied."""
    run = Run({"windows": 0.2, "lazy": 0.02}, goal=Goal(pins=Pins(retune="observe")))
    run.snapshots(2 * ROUNDS)
    assert "schedule" not in run.kinds


def test_what_was_tried_goes_through_json() -> None:
    """A recording of the controller may begin in the middle of a comparison."""
    run = Run({"windows": 0.2, "lazy": 0.02})
    run.snapshots(5)
    memory = run.controller.memory
    assert len(memory.seen.tried) == 5
    assert from_json(type(memory), to_json(memory)) == memory


# --- any job --------------------------------------------------------------------------------------


class Jumping(Run):
    """A job without windows, whose snapshots stall what its schedule costs now."""

    def __init__(self, costs: dict[Schedule, float], *, goal: Goal | None = None) -> None:
        super().__init__(costs, goal=goal)
        staging = Staging(schedule="blocking")
        plan = replace(self.controller.plan, staging=staging)
        prior = replace(
            profile_costs(example_profile(), staging, write=None),
            iteration_s=ITERATION_S, stall_s=costs["blocking"],
        )  # fmt: skip
        memory = begin(
            plan=plan, failures=example_failures(mtbf_s=7200.0, process_share=0.8),
            recovery=example_recovery(), prior=prior,
        )  # fmt: skip
        self.controller = Controller(memory, goal=self.controller.goal)
        self.chance = random.Random(5)

    def stall_s(self, schedule: Schedule) -> float:
        """With noise of a fifth."""
        return self.costs[schedule] * self.chance.uniform(0.8, 1.2)

    @property
    def schedule(self) -> Schedule:
        """Of the plan in force."""
        return self.controller.plan.staging.schedule


QUIET: dict[Schedule, float] = {"blocking": 0.06, "lazy": 0.2}
BUSY: dict[Schedule, float] = {"blocking": 0.5, "lazy": 0.1}
"""Beside another job on the machine."""


def test_a_stall_that_is_not_as_promised_makes_the_schedules_take_turns() -> None:
    """Blocking was promised 60 ms and takes 500: lazy wins, and once the machine is quiet again
    blocking comes back; one comparison and one change a phase."""
    run = Jumping(QUIET)
    run.snapshots(40)
    assert run.schedule == "blocking"
    assert not {"compare", "schedule"} & set(run.kinds)
    for costs, best in ((BUSY, "lazy"), (QUIET, "blocking"), (BUSY, "lazy")):
        run.costs, before = costs, len(run.kinds)
        run.snapshots(80)
        phase = [kind for kind in run.kinds[before:] if kind in ("compare", "schedule")]
        assert (run.schedule, phase) == (best, ["compare", "schedule"]), costs


def test_a_stall_that_takes_no_time_to_speak_of_begins_nothing() -> None:
    """Ten times a tenth of a millisecond is nothing."""
    run = Jumping({"blocking": 1e-4, "lazy": 1e-4})
    run.snapshots(20)
    run.costs = {"blocking": 1e-3, "lazy": 1e-3}
    run.snapshots(60)
    assert "compare" not in run.kinds


@pytest.mark.parametrize(
    "goal",
    [
        Goal(pins=Pins(schedule="blocking")),
        Goal(objective="stall"),
        Goal(pins=Pins(retune=False)),
        Goal(pins=Pins(retune="observe")),
    ],
    ids=["pinned", "stall", "never", "observe"],
)
def test_a_schedule_that_may_not_change_is_not_compared(goal: Goal) -> None:
    """Whatever it costs."""
    run = Jumping(QUIET, goal=goal)
    run.snapshots(10)
    run.costs = BUSY
    run.snapshots(60)
    assert not {"compare", "schedule"} & set(run.kinds)
