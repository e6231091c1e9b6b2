"""The risk of a plan that was decided: its mean is the promise beside it."""

import statistics
from dataclasses import replace

import pytest

from autockpt.cli.shared.prospects import risk_of
from autockpt.policies.decide import decide
from autockpt.values.goal import Goal, RedundancyWish
from tests.support.profiles import example_failures, example_recovery
from tests.unit.policies.redundancy.test_choose import cluster


@pytest.mark.parametrize("copies", [None, 2], ids=["no copies", "two copies"])
def test_the_mean_is_what_the_plan_promises(copies: int | None) -> None:
    """Within a twentieth of a well known rate, and peers serve no failure that they were not
    reckoned to serve."""
    rates = example_failures(mtbf_s=3 * 3600.0, nodes=16, process_share=0.1, shape=400.0)
    profile = replace(
        cluster(16),
        failures=replace(rates, together=(1.0, 1.0, 1.0, 1.0)),
        recovery=example_recovery(restore_disk_s=300.0),
    )
    scheme = "none" if copies is None else "replicas"
    goal = Goal(redundancy=RedundancyWish(scheme=scheme, copies=copies))
    found = risk_of(decide(profile, goal))
    assert found is not None
    plan = found.ways[0]
    assert statistics.fmean(plan.lost) == pytest.approx(plan.promised, rel=0.05)
