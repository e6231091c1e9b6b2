"""The spread over rates and luck: around the promise, wider the less is known, reproducible."""

import statistics

import pytest

from autockpt.policies.interval.choose import tiers_of
from autockpt.tuner.simulation.risk import Risk, quantiles, risk
from autockpt.tuner.simulation.rules import two_tiers
from autockpt.values.errors import ConfigError
from tests.unit.policies.interval.test_choose import costs, rates

TIERS = tiers_of(costs(), rates(36_000.0), memory_on=True)


def drawn(shape: float, *, seed: int = 0, draws: int = 200) -> Risk:
    """A plan of 100 / 1000 iterations, and one of ten times that."""
    assert TIERS.memory is not None
    return risk(
        [two_tiers("plan", TIERS, 100, 1000), two_tiers("rare", TIERS, 1000, 10_000)],
        memory_per_s=TIERS.memory.failures_per_s,
        disk_per_s=TIERS.disk.failures_per_s,
        shape=shape,
        nodes=8,
        draws=draws,
        seed=seed,
    )


def test_the_mean_is_what_the_formula_promises() -> None:
    """Within 1 % of time, a well known rate and a vague one."""
    for shape in (50.0, 2.0):
        lost = [1.0 - x for x in drawn(shape, draws=400).goodputs["plan"]]
        promised = TIERS.waste(100, 1000).total
        assert statistics.fmean(lost) == pytest.approx(promised, abs=0.01)


def test_evidence_narrows_the_band() -> None:
    """What is left with a known rate is luck."""
    vague, known = drawn(1.0), drawn(100.0)
    spans = [q[2] - q[0] for q in (quantiles(r.goodputs["plan"]) for r in (vague, known))]
    assert spans[0] > 2 * spans[1] > 0
    assert quantiles(vague.mtbf_s)[2] > quantiles(known.mtbf_s)[2]


def test_all_strategies_meet_the_same_worlds() -> None:
    """Paired: rarer checkpoints lose more in nine of ten worlds with several failures."""
    found = drawn(2.0)
    pairs = zip(found.goodputs["plan"], found.goodputs["rare"], found.failures, strict=True)
    worse = [plan > rare for plan, rare, failures in pairs if failures >= 5]
    assert sum(worse) > 0.9 * len(worse) > 90


def test_the_same_seed_gives_the_same_worlds() -> None:
    """And another one does not."""
    assert drawn(2.0) == drawn(2.0)
    assert drawn(2.0) != drawn(2.0, seed=1)


def test_a_world_that_fails_all_the_time_is_drawn_for_a_shorter_time() -> None:
    """About a hundred failures in the mean, however many come in a month."""
    often = rates(600.0)
    found = risk([two_tiers("plan", TIERS, 100, 1000)], memory_per_s=often.memory_per_s,
                 disk_per_s=often.disk_per_s, shape=100.0, nodes=8, draws=20)  # fmt: skip
    assert found.length_s == pytest.approx(60_000.0)
    assert statistics.fmean(found.failures) == pytest.approx(100.0, rel=0.2)


def test_nothing_that_fails_has_no_risk() -> None:
    """A rate of zero is refused."""
    with pytest.raises(ConfigError, match="must be more than 0"):
        risk([], memory_per_s=0.0, disk_per_s=0.0, shape=1.0, nodes=1)
