"""Fewer checkpoints for a quota: the keeper follows the plan, and keeps no more than the goal."""

from dataclasses import replace
from pathlib import Path

from autockpt.executors.keeper.standing.goal_in_force import retention_in_force
from autockpt.policies.decide import decide
from autockpt.run_directory import RunDirectory
from autockpt.values.goal import Goal, Limits, Retention
from tests.support.profiles import STATE_BYTES, example_profile

TIGHT = Goal(limits=Limits(disk_bytes=4 * STATE_BYTES))


def run_with(path: Path, goal: Goal) -> RunDirectory:
    """A run directory with a goal and the plan made of it."""
    run = RunDirectory.create(str(path / "run"))
    run.write_goal(goal)
    run.write_decision(decide(example_profile(codecs=()), goal))
    return run


def test_the_plan_of_a_tight_quota_is_followed(tmp_path: Path) -> None:
    """Four states fit: two, one being written, one to be read back."""
    run = run_with(tmp_path, TIGHT)
    assert retention_in_force(str(run.path)) == Retention(keep_last=2)


def test_without_a_quota_the_goal_decides(tmp_path: Path) -> None:
    """A plan of an earlier policy has no say."""
    run = run_with(tmp_path, TIGHT)
    run.write_goal(Goal(retention=Retention(keep_last=5)))
    assert retention_in_force(str(run.path)) == Retention(keep_last=5)


def test_never_more_than_the_goal(tmp_path: Path) -> None:
    """A plan that kept two, and now somebody wants one."""
    run = run_with(tmp_path, TIGHT)
    run.write_goal(replace(TIGHT, retention=Retention(keep_last=1, reach_s=60.0)))
    assert retention_in_force(str(run.path)) == Retention(keep_last=1, reach_s=60.0)


def test_no_plan_and_an_unreadable_one_leave_the_goal(tmp_path: Path) -> None:
    """A decision of another version is not in force."""
    assert retention_in_force(str(tmp_path)) == Retention()
    run = run_with(tmp_path, TIGHT)
    Path(run.path, "decision.json").write_text('{"schema_version": 99}')
    assert retention_in_force(str(run.path)) == Retention()
