"""The controller against a fake job: it finds the plan, keeps it, and undoes what backfires."""

import json
from dataclasses import replace

import pytest

from autockpt.policies.cost_model.costs import PeerCosts
from autockpt.policies.interval.choose import choose_intervals
from autockpt.tuner.online.controller import Controller, begin
from autockpt.tuner.online.proposals import digest_of, intervals_of, scaled
from autockpt.tuner.online.settings import ControllerSettings
from autockpt.values.goal import FailureDeclaration, Goal, Limits, Pins
from autockpt.values.plan import CheckpointPlan, TierPlan, safe_default_plan
from autockpt.values.record import from_data, to_data
from autockpt.values.redundancy import Redundancy
from autockpt.values.telemetry import PlanChanged
from tests.support.jobs import FakeJob
from tests.support.machines import SharedMachine
from tests.support.profiles import example_failures, example_recovery
from tests.unit.policies.interval.test_choose import costs

HOUR = 3600.0


def plan(memory: int = 60, disk: int = 600, version: int = 1) -> CheckpointPlan:
    return CheckpointPlan(
        plan_id="test",
        version=version,
        fingerprint="",
        tiers=(
            TierPlan(tier="memory", interval_steps=memory),
            TierPlan(tier="disk", interval_steps=disk),
        ),
    )


def controller(
    start: CheckpointPlan | None = None,
    *,
    goal: Goal | None = None,
    mtbf_s: float = 2 * HOUR,
    settings: ControllerSettings | None = None,
) -> Controller:
    memory = begin(
        plan=start or plan(),
        failures=example_failures(mtbf_s=mtbf_s, process_share=0.8),
        recovery=example_recovery(),
    )
    wanted = Goal(failures=FailureDeclaration(mtbf_s=mtbf_s, process_share=0.8))
    return Controller(memory, goal=goal or wanted, settings=settings)


def settled(job: FakeJob, mtbf_s: float = 2 * HOUR) -> Controller:
    """A controller that starts at the best plan for `job`."""
    probe = controller(mtbf_s=mtbf_s)
    FakeJob(
        iteration_s=job.iteration_s, stall_s=job.stall_s, persist_s=job.persist_s,
        slower=job.slower,
    ).run(probe, until_s=600.0, apply=False)  # fmt: skip
    best = probe.outlook.best()
    return controller(plan(best.memory_steps, best.disk_steps), mtbf_s=mtbf_s)


# --- profiles in place


def test_a_run_without_profile_is_tuned_after_three_checkpoints():
    """The safe default gives way to the measured optimum without waiting an hour."""
    job, tuned = FakeJob(stall_s=0.05), controller(safe_default_plan())
    job.run(tuned, until_s=1000.0)
    first = job.proposals[0]
    assert first.kind == "first"
    assert first.plan.version == 1
    assert job.log[-1].at_s < 1500.0
    best = tuned.outlook.best()
    assert intervals_of(tuned.plan)[0] == pytest.approx(best.memory_steps, rel=0.25)
    assert "intervals 100 / 100 steps -> " in first.reason
    assert first.expected_waste is not None
    assert "failures come every 2 h" in first.reason


def test_nothing_is_proposed_before_enough_checkpoints():
    """observe_only_checkpoints real ones."""
    job = FakeJob(stall_s=0.05)
    tuned = controller(safe_default_plan(), settings=ControllerSettings(observe_only_checkpoints=6))
    job.run(tuned, until_s=480.0)
    assert not job.proposals
    job.run(tuned, until_s=700.0)
    assert job.proposals


# --- gates


def test_a_settled_plan_stays_for_days_of_noise():
    """40 % noise on every cost and no change worth making: no switch in three days."""
    job = FakeJob(stall_s=2.0, noise=0.4, seed=3)
    tuned = settled(job)
    job.run(tuned, until_s=72 * HOUR)
    assert len(job.proposals) <= 1


def test_no_proposal_inside_the_dead_band():
    """A plan 20 % off the best is as good as the best."""
    job = FakeJob(stall_s=2.0)
    best = settled(job).plan
    memory, disk = intervals_of(best)
    near = plan(round(memory * 1.2), round(memory * 1.2) * (disk // memory))
    job.run(controller(near), until_s=24 * HOUR)
    assert not job.proposals


def test_a_plan_far_off_changes_once_after_the_dwell():
    """Both directions: four times too short and four times too long."""
    for factor in (4.0, 0.25):
        job = FakeJob(stall_s=2.0)
        best = settled(job).plan
        tuned = controller(plan(*scaled(intervals_of(best), factor)))
        job.run(tuned, until_s=0.9 * HOUR)
        assert not job.proposals
        job.run(tuned, until_s=12 * HOUR)
        assert [p.kind for p in job.proposals] == ["retune"]
        assert intervals_of(tuned.plan)[0] == pytest.approx(intervals_of(best)[0], rel=0.05)


def test_a_job_that_fails_often_dwells_no_longer_than_it_lives():
    """The mean time between failures, and not an hour that no process of it sees."""
    often = 1200.0
    job = FakeJob(stall_s=2.0)
    best = settled(job, mtbf_s=often).plan
    tuned = controller(plan(*scaled(intervals_of(best), 0.5)), mtbf_s=often)
    job.run(tuned, until_s=0.9 * often)
    assert not job.proposals
    job.run(tuned, until_s=1.5 * often)
    assert [p.kind for p in job.proposals] == ["retune"]


def test_a_gain_below_a_thousandth_of_time_is_not_taken():
    """Cheap checkpoints and rare failures: ten times off is still nothing."""
    job = FakeJob(stall_s=0.001, slower=0.0, persist_s=0.1)
    tuned = controller(plan(100, 1000), mtbf_s=2e7)
    job.run(tuned, until_s=24 * HOUR)
    assert not job.proposals


def test_a_job_that_loses_nearly_all_its_time_is_tuned_as_well():
    """It waits 35 s for each restart and fails every 2 s: its waste is near 1 at any interval."""
    job = FakeJob(stall_s=0.05, slower=0.0, persist_s=0.5)
    declared = FailureDeclaration(mtbf_s=2.0, process_share=0.8)
    tuned = controller(plan(60, 60), goal=Goal(failures=declared), mtbf_s=2.0)
    job.run(tuned, until_s=0.5 * HOUR)
    assert [p.kind for p in job.proposals] == ["retune"]
    assert intervals_of(tuned.plan)[1] <= 10


def test_dwell_follows_a_known_run_length():
    """Five percent of a two-hour run is six minutes."""
    settings = ControllerSettings(run_s=2 * HOUR)
    job = FakeJob(stall_s=2.0)
    job.run(controller(plan(10, 100), settings=settings), until_s=900.0)
    assert job.proposals


@pytest.mark.parametrize("off", ["plan", "pin"])
def test_retune_false_keeps_the_plan(off):
    """Said by the plan or by the policy."""
    start = replace(plan(5, 50), retune=off != "plan")
    goal = Goal(pins=Pins(retune=False)) if off == "pin" else None
    job = FakeJob(stall_s=2.0)
    job.run(controller(start, goal=goal), until_s=12 * HOUR)
    assert not job.proposals


def test_pinned_intervals_do_not_move():
    """Neither by re-tuning nor by an emergency."""
    goal = Goal(
        pins=Pins(memory_interval_steps=5, disk_interval_steps=50), limits=Limits(overhead=0.9)
    )
    job, tuned = FakeJob(stall_s=20.0), controller(plan(5, 50), goal=goal)
    job.run(tuned, until_s=HOUR)
    tuned.interrupted(job.now_s, exposure_s=1.0)
    job.run(tuned, until_s=2 * HOUR)
    assert not job.proposals


# --- jumps


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("factor", [4.0, 0.25])
def test_controller_settles_after_a_cost_jump_with_at_most_three_changes(seed, factor):
    """Stall and persist jump by 4 mid-run under 30 % noise; it ends within 35 % of the optimum.

    The dead-band leaves a plan that is off by 1.25, and a mean of 8 samples is off by 10 %.
    """
    job = FakeJob(stall_s=4.0 / factor**0.5, persist_s=20.0, noise=0.3, seed=seed)
    tuned = settled(job)
    job.run(tuned, until_s=6 * HOUR)
    before = len(job.proposals)
    job.stall_s, job.persist_s = job.stall_s * factor, job.persist_s * factor
    job.run(tuned, until_s=48 * HOUR)
    assert 1 <= len(job.proposals) - before <= 3
    exact = FakeJob(stall_s=job.stall_s, persist_s=job.persist_s)
    best = settled(exact).plan
    assert intervals_of(tuned.plan)[0] == pytest.approx(intervals_of(best)[0], rel=0.35)


def test_a_jump_is_answered_without_waiting_for_the_dwell():
    """Within five checkpoints after it, although the plan changed minutes ago."""
    job = FakeJob(stall_s=1.0)
    tuned = settled(job)
    job.run(tuned, until_s=0.4 * HOUR)
    job.stall_s = 16.0
    sealed = tuned.seen.sealed
    while not job.proposals:
        job.run(tuned, until_s=job.now_s + 1.0)
    assert tuned.seen.sealed - sealed <= 5
    assert job.now_s < 0.8 * HOUR


# --- watching


def test_a_change_that_backfires_is_rolled_back():
    """Shorter intervals make each stall twice as long: back to the plan before."""
    job = FakeJob(stall_of=lambda p: 2.0 if intervals_of(p)[0] >= 100 else 4.0, slower=0.0)
    tuned = controller(plan(120, 120), mtbf_s=1200.0)
    job.run(tuned, until_s=2.0 * HOUR)
    assert [p.kind for p in job.proposals] == ["retune", "rollback"]
    assert intervals_of(job.proposals[1].plan) == (120, 120)
    assert "was expected" in job.proposals[1].reason


def test_slower_iterations_after_a_change_undo_it():
    """The quiet iteration became 5 % longer with the change."""
    job = FakeJob(stall_s=0.5, slower=0.0)
    tuned = controller(plan(20, 200))
    while not job.proposals:
        job.run(tuned, until_s=job.now_s + 1.0)
    assert job.proposals[0].kind == "retune"
    job.iteration_s *= 1.05
    job.run(tuned, until_s=1.6 * HOUR)
    rollback = job.proposals[1]
    assert rollback.kind == "rollback"
    assert intervals_of(rollback.plan) == (20, 200)
    assert rollback.plan.version == 3
    assert "longer with the change" in rollback.reason


def test_patience_doubles_after_a_rollback():
    """No see-saw: the next try waits twice as long."""
    job = FakeJob(stall_s=0.5, slower=0.0)
    tuned = controller(plan(20, 200))
    job.run(tuned, until_s=1.05 * HOUR)
    job.iteration_s *= 1.05
    job.run(tuned, until_s=1.6 * HOUR)
    rolled_at_s = job.now_s
    count = len(job.proposals)
    job.run(tuned, until_s=rolled_at_s + 1.3 * HOUR)
    assert len(job.proposals) == count


# --- emergencies


def test_three_expensive_checkpoints_back_off_at_once():
    """Overhead beyond twice the budget: intervals x 1.5 without dwell."""
    goal = Goal(failures=FailureDeclaration(mtbf_s=60.0, process_share=0.8))
    job = FakeJob(stall_s=5.0, slower=0.0)
    tuned = controller(plan(10, 100), goal=goal)
    job.run(tuned, until_s=65.0)
    assert not job.proposals
    job.run(tuned, until_s=800.0)
    assert job.proposals[0].kind == "back-off"
    assert intervals_of(job.proposals[0].plan) == (15, 150)
    assert "twice the budget of 5 %" in job.proposals[0].reason


def test_back_off_respects_the_lost_time_limit():
    """RPO beats overhead."""
    goal = Goal(limits=Limits(lost_time_s=170.0), failures=FailureDeclaration(mtbf_s=60.0))
    job = FakeJob(stall_s=5.0, slower=0.0)
    job.run(controller(plan(10, 100), goal=goal), until_s=1000.0)
    assert all(p.kind != "back-off" for p in job.proposals)


def test_a_burst_of_failures_shortens_intervals_for_an_hour():
    """Two failures within one interval: / 1.5, and back when it is over."""
    job = FakeJob(stall_s=0.2, slower=0.0)
    tuned = controller(plan(90, 900), mtbf_s=2 * HOUR)
    job.run(tuned, until_s=2900.0)
    tuned.interrupted(job.now_s, exposure_s=20.0)
    job.run(tuned, until_s=job.now_s + 100.0)
    hurry = job.proposals[-1]
    assert hurry.kind == "hurry"
    assert intervals_of(hurry.plan) == (60, 600)
    job.run(tuned, until_s=job.now_s + HOUR + 200.0)
    assert any(p.kind == "calm" and intervals_of(p.plan) == (90, 900) for p in job.proposals)


def test_outgrown_lost_time_limit_is_repaired_at_once():
    """Iterations became slower, so the pinned number of steps would lose too much."""
    goal = Goal(
        limits=Limits(lost_time_s=400.0),
        failures=FailureDeclaration(mtbf_s=1e6, process_share=0.5),
    )
    job = FakeJob(stall_s=0.1, slower=0.0)
    tuned = controller(plan(38, 380), goal=goal)
    job.run(tuned, until_s=2000.0)
    assert not job.proposals
    job.iteration_s = 1.5
    job.run(tuned, until_s=4500.0)
    assert not tuned.outlook.too_old(intervals_of(tuned.plan))
    assert job.proposals[0].kind == "retune"


def test_limits_that_cannot_be_kept_leave_the_plan_and_say_so():
    """Degrade, never kill."""
    goal = Goal(limits=Limits(lost_time_s=6.0), failures=FailureDeclaration(mtbf_s=HOUR))
    job = FakeJob(stall_s=2.0, persist_s=5.9)
    tuned = controller(plan(10, 100), goal=goal)
    job.run(tuned, until_s=1000.0)
    assert not [p for p in job.proposals if p.kind == "retune"]
    assert "no interval fits" in tuned.obstacle


def test_a_burst_is_known_to_the_process_after_it():
    """The second failure took the controller along; the next one is told how soon it came."""
    job, tuned = FakeJob(stall_s=0.2, slower=0.0), controller(plan(90, 90))
    tuned.seen.quiet.observe(1.0)  # as a profile would tell
    tuned.interrupted(job.now_s, exposure_s=100.0)
    assert tuned.memory.hurry_until_s < 0.0
    tuned.interrupted(job.now_s, exposure_s=80.0)
    job.run(tuned, until_s=400.0)
    assert [p.kind for p in job.proposals] == ["hurry"]
    assert intervals_of(job.proposals[0].plan) == (60, 60)


def test_nothing_is_rolled_back_over_a_limit():
    """The plan before wastes less, and costs more than limits.overhead: it does not come back."""
    goal = Goal(limits=Limits(overhead=0.02), failures=FailureDeclaration(mtbf_s=600.0))
    job = FakeJob(stall_s=2.0, slower=0.0)
    tuned = controller(plan(20, 20), goal=goal)
    job.run(tuned, until_s=1.5 * HOUR)
    assert "rollback" not in [p.kind for p in job.proposals]
    job.stall_of = lambda _: 4.0
    job.run(tuned, until_s=4 * HOUR)
    assert "rollback" not in [p.kind for p in job.proposals]
    assert tuned.outlook.overhead <= 0.02


# --- observing


def test_an_observing_policy_says_each_change_once_and_stays():
    """Not again before the dwell is over, however often it is asked."""
    goal = Goal(pins=Pins(retune="observe"), failures=FailureDeclaration(mtbf_s=2 * HOUR))
    job = SharedMachine(stall_s=2.0, noise=0.1, seed=1)
    start = plan(20, 20)
    tuned = controller(start, goal=goal)
    job.run(tuned, seconds=5.5 * HOUR)
    assert tuned.plan == start
    assert 1 <= len(job.proposals) <= 6
    assert all(intervals_of(p.plan)[1] > 20 and p.plan.version == 2 for p in job.proposals)


# --- bookkeeping


def test_replay_gives_the_same_proposals():
    """Same events, same questions: the same answers."""
    runs = []
    for _ in range(2):
        job = FakeJob(stall_s=2.0, noise=0.4, seed=11)
        tuned = controller(safe_default_plan(), goal=Goal())
        job.run(tuned, until_s=24 * HOUR)
        runs.append(job.proposals)
    assert runs[0] == runs[1]
    assert runs[0]


def test_a_run_without_a_failure_lowers_the_rate():
    """Believed: one in 20 minutes.  After 30 quiet hours the interval is longer."""
    job = FakeJob(stall_s=1.0)
    often = example_failures(mtbf_s=HOUR / 3)
    memory = begin(plan=plan(40, 40), failures=often, recovery=example_recovery())
    tuned = Controller(memory, goal=Goal())
    before = tuned.outlook.rates.total_per_s
    job.run(tuned, until_s=30 * HOUR)
    assert tuned.outlook.rates.total_per_s < before / 2
    assert intervals_of(tuned.plan)[0] > 50


def test_a_plan_decided_elsewhere_is_watched_like_our_own():
    """A full decision from a profile in place comes with its staging and its promise."""
    tuned = controller(safe_default_plan())
    decided = replace(plan(50, 100), version=1, slots=2)
    tuned.expect(decided)
    tuned.observe(
        PlanChanged(
            at_s=1.0, rank=0, plan_version=1, step=1, memory_interval_steps=50,
            disk_interval_steps=100, reason="profiled in place",
        )
    )  # fmt: skip
    assert tuned.plan == decided


def test_an_offer_is_recognised_although_later_questions_had_no_answer():
    """Two-phase apply takes seconds; asking goes on meanwhile."""
    job = FakeJob(stall_s=0.05)
    tuned = controller(safe_default_plan())
    job.run(tuned, until_s=290.0, apply=False)
    job.run(tuned, until_s=390.0, apply=False)
    offer = job.proposals[-1]
    tuned.seen.quiet.samples = ()
    tuned.propose(job.now_s, job.step)
    job.apply(tuned, offer)
    assert tuned.plan == offer.plan


def test_the_offer_that_was_applied_is_told_from_one_with_the_same_intervals():
    """Slots and rates leave version and intervals; the first offer holds among many later ones."""
    tuned = controller(plan(50, 100))
    first = replace(plan(50, 100, version=2), slots=3)
    tuned.expect(first)
    for slots in range(4, 16):
        tuned.expect(replace(first, slots=slots))
    read = from_data(CheckpointPlan, json.loads(json.dumps(to_data(first))), where="plan change")
    tuned.observe(
        PlanChanged(
            at_s=1.0, rank=0, plan_version=2, step=1, memory_interval_steps=50,
            disk_interval_steps=100, reason="agreed", plan_digest=digest_of(read),
        )
    )  # fmt: skip
    assert tuned.plan == first


def test_a_change_from_elsewhere_is_followed():
    """A plan applied by somebody else is the plan in force."""
    tuned = controller()
    tuned.observe(
        PlanChanged(
            at_s=1.0, rank=0, plan_version=7, step=1, memory_interval_steps=20,
            disk_interval_steps=40, reason="by hand",
        )
    )  # fmt: skip
    assert tuned.plan.version == 7
    assert intervals_of(tuned.plan) == (20, 40)


def test_controller_and_policy_agree():
    """The controller's best is choose_intervals of what it has seen."""
    job = FakeJob(stall_s=1.0)
    tuned = settled(job)
    job.run(tuned, until_s=HOUR)
    outlook = tuned.outlook
    same = choose_intervals(
        outlook.costs, outlook.rates, tuned.goal, memory_on=True, slots=3, sync=False
    )
    assert outlook.best() == same


@pytest.mark.parametrize(
    ("before", "factor", "after"),
    [((10, 100), 1.5, (15, 150)), ((1, 1), 1.5, (2, 2)), ((0, 10), 1.5, (0, 15)),
     ((1, 30), 1 / 1.5, (1, 20)), ((3, 3), 1 / 1.5, (2, 2))],
)  # fmt: skip
def test_scaling_keeps_intervals_nested_and_at_least_one(before, factor, after):
    """Rounded away from no change."""
    assert scaled(before, factor) == after


# --- redundancy -------------------------------------------------------------------------------


def test_what_peers_serve_is_not_the_disk_s_to_serve() -> None:
    """Under a plan with redundancy the best disk interval is longer, and without it the same."""
    peers = PeerCosts(send_s=1.0, send_high_s=1.2, slowdown_s=0.01, restore_s=2.0, served=0.9)
    shared = replace(plan(), redundancy=Redundancy(scheme="replicas", copies=2))
    best = {}
    for name, begun, prior in (
        ("alone", plan(), costs()),
        ("unused", plan(), costs(peers=peers)),
        ("shared", shared, costs(peers=peers)),
    ):
        failures = example_failures(mtbf_s=HOUR, process_share=0.5)
        memory = begin(plan=begun, failures=failures, recovery=example_recovery(), prior=prior)
        found = Controller(memory, goal=Goal())
        FakeJob(iteration_s=0.5, stall_s=0.1, persist_s=4.0).run(found, until_s=900.0, apply=False)
        best[name] = found.outlook.best()
    assert best["unused"] == best["alone"]
    # sqrt(1 / (1 - served)) = 3.2 times, less what the exposure of this run adds.
    assert best["shared"].disk_steps > 2 * best["alone"].disk_steps
    assert best["shared"].waste.total < best["alone"].waste.total
