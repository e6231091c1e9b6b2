"""The benchmark of killed trainings: fair schedules, an honest comparison, and a run that works."""

import math
import re
from statistics import fmean, pstdev

import pytest

from autockpt.policies.interval.closed_forms import best_period_s
from benchmarks import accelerated
from benchmarks.kills.plans import against_best, exposures_s, predicted, ways
from tests.support.profiles import example_profile

PROFILE = example_profile(iteration_s=0.08, stall_s=0.01, snapshot_s=0.02, persist_s=0.06)


def test_schedules_have_the_mean_they_are_meant_to_have() -> None:
    """Their means spread less than those of free draws; the same seed gives the same one."""
    drawn = [exposures_s(4.0, 7, seed=seed) for seed in range(200)]
    means = [fmean(one) for one in drawn]
    assert fmean(means) == pytest.approx(4.0, rel=0.05)
    assert pstdev(means) < 0.6 * 4.0 / math.sqrt(7)
    assert drawn[3] == exposures_s(4.0, 7, seed=3) != drawn[4]


def test_the_best_interval_is_judged_where_it_was_not_chosen() -> None:
    """Two equal intervals, each lucky once: on the other half the lead is gone."""
    measured = {"auto": [0.5] * 4, "a": [0.6, 0.5, 0.6, 0.5], "b": [0.5, 0.5, 0.5, 0.5]}
    assert against_best(measured, ["a", "b"], indices=[0, 1, 2, 3]) == pytest.approx(
        fmean([1.0, 0.5 / 0.6])
    )
    lucky = {"auto": [0.5] * 2, "a": [0.9, 0.5], "b": [0.5, 0.9]}
    assert against_best(lucky, ["a", "b"], indices=[0, 1]) == pytest.approx(1.0)
    assert against_best(lucky, ["a", "b"], indices=[0]) == pytest.approx(0.5 / 0.9)


def test_the_predicted_curve_is_a_u_with_auto_near_its_bottom() -> None:
    """On long schedules: too often and too rarely both lose."""
    found = ways(PROFILE, (1, 2, 4, 8, 16, 64, 256), mtbf_s=4.0)
    exposures = exposures_s(4.0, 2000, seed=1)
    goodput = {way.name: predicted(way, PROFILE, exposures, recovery_s=0.5) for way in found}
    fixed = [goodput[way.name] for way in found[1:]]
    top = fixed.index(max(fixed))
    assert 0 < top < len(fixed) - 1
    assert fixed[:top] == sorted(fixed[:top])
    assert fixed[top:] == sorted(fixed[top:], reverse=True)
    assert goodput["auto"] >= 0.98 * max(fixed)


def test_a_slower_machine_loses_more_time_to_the_same_steps() -> None:
    """An interval in steps is longer when iterations are; what is lost at a kill grows with it."""
    rarely = ways(PROFILE, (50,), mtbf_s=4.0)[1]
    exposures = exposures_s(4.0, 500, seed=2)
    as_profiled = predicted(rarely, PROFILE, exposures, recovery_s=0.5)
    assert as_profiled == predicted(rarely, PROFILE, exposures, recovery_s=0.5, iteration_s=0.08)
    slow = predicted(rarely, PROFILE, exposures, recovery_s=0.5, iteration_s=0.16)
    assert slow < as_profiled - 0.05


def test_fixed_ways_write_like_auto_and_stay() -> None:
    """The interval is the only difference."""
    auto, *fixed = ways(PROFILE, (3, 50), mtbf_s=4.0)
    assert [way.steps for way in fixed] == [3, 50]
    for way in fixed:
        assert way.decision.plan.retune is False
        assert way.decision.plan.staging == auto.decision.plan.staging
        assert way.decision.plan.slots == auto.decision.plan.slots
    assert best_period_s(0.02, 0.25) / 0.08 / 4 < auto.steps < 4 * best_period_s(0.05, 0.25) / 0.08


@pytest.mark.slow
def test_a_training_that_is_killed_comes_back_and_is_counted(
    tmp_path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`--smoke`: profile, three ways, two kills each; saving often loses less than rarely."""
    monkeypatch.chdir(tmp_path)
    accelerated.main(["--smoke"])
    said = capsys.readouterr().out
    lost = {
        name: [int(n) for n in steps.split(", ")]
        for name, steps in re.findall(r"schedule 0  (.*?) +\d+ steps .* lost \[(.*)\]", said)
    }
    often, rarely = sorted((name for name in lost if name != "auto"), key=lambda n: int(n[6:]))
    assert all(len(steps) == 2 for steps in (*lost.values(), lost["auto"]))
    assert max(lost[often]) < max(lost[rarely])
    assert "over the best fixed" in said
    assert list(tmp_path.iterdir()) == []
