"""Announced failures: in time they lose no work, too late they are failures like any other."""

import math
import random

import pytest

from autockpt.policies.interval import best_period_s
from autockpt.policies.preemption import Notice, preempted_period_s, preemption_waste
from autockpt.policies.renewal import exact_goodput
from autockpt.values.errors import ConfigError


def test_only_a_notice_that_is_long_enough_helps():
    """AWS: 120 s, polled every 5 s; a save of 100 s fits, one of 115 s does not."""
    assert Notice(notice_s=120.0, poll_s=5.0, drain_s=100.0).suffices
    late = Notice(notice_s=120.0, poll_s=5.0, drain_s=115.0)
    assert late.answered == 0.0
    assert preempted_period_s(
        2.0, failures_per_s=1e-5, preemptions_per_s=1e-4, notice=late
    ) == best_period_s(2.0, 1.1e-4)
    assert preemption_waste(1e-4, recover_s=60.0, notice=late) == 0.0


@pytest.mark.parametrize("recall", [0.0, 0.5, 0.9])
def test_the_period_is_the_published_one_for_cheap_checkpoints(recall):
    """sqrt(2 C M / (1 - r)) within 0.5 % at C / M = 1e-4."""
    notice = Notice(notice_s=120.0, drain_s=10.0, recall=recall)
    found = preempted_period_s(1.0, failures_per_s=0.0, preemptions_per_s=1e-4, notice=notice)
    assert found == pytest.approx(math.sqrt(2.0 * 1e4 / (1.0 - recall)), rel=5e-3)


def simulated(period_s: float, notice: Notice, *, failures: float, preemptions: float) -> float:
    """Goodput of one level: cost 4 s, recovery 30 s, 40,000 interruptions of both kinds."""
    chance, rate = random.Random(3), failures + preemptions
    work_s = wall_s = 0.0
    for _ in range(40_000):
        up_s = chance.expovariate(rate)
        announced = chance.random() < preemptions / rate and chance.random() < notice.answered
        periods, rest_s = divmod(up_s, period_s)
        saved_s = min(rest_s, period_s - 4.0) if announced else 0.0
        work_s += periods * (period_s - 4.0) + saved_s
        wall_s += up_s + 30.0 + (notice.drain_s if announced else 0.0)
    return work_s / wall_s


def test_waste_of_preemptions_agrees_with_a_simulation():
    """Within 1 % of time: unannounced failures by the exact form, a drain and a recovery each."""
    notice = Notice(notice_s=120.0, drain_s=20.0)
    failures, preemptions = 1e-4, 3e-4
    period_s = preempted_period_s(
        4.0, failures_per_s=failures, preemptions_per_s=preemptions, notice=notice
    )
    unannounced = exact_goodput(
        period_s, cost_s=4.0, latency_s=4.0, recover_s=30.0, mtbf_s=1.0 / failures
    )
    expected = 1.0 - unannounced + preemption_waste(preemptions, recover_s=30.0, notice=notice)
    found = 1.0 - simulated(period_s, notice, failures=failures, preemptions=preemptions)
    assert found == pytest.approx(expected, abs=0.01)


def test_impossible_notices_are_refused():
    """Negative times and recalls beyond 1."""
    with pytest.raises(ConfigError, match="between 0 and 1"):
        Notice(notice_s=1.0, drain_s=1.0, recall=1.5)
    with pytest.raises(ConfigError, match="must not be negative"):
        Notice(notice_s=-1.0, drain_s=1.0)
