"""The judge of chosen intervals: its figures on few scenarios, and that it notices bad choices."""

import pytest

from benchmarks.regret import scenarios
from benchmarks.regret.judge import judge
from benchmarks.tuner import rows


@pytest.fixture(scope="module")
def figures():
    """Twelve scenarios, 1500 failures each."""
    found = rows(judge(12, failures=1500, seed=3))
    return {(one.contestant, one.figure): one.value for one in found}


def test_known_rates_are_near_the_best_of_all_intervals(figures):
    """Loose bounds for few scenarios; the real ones are those of `make bench-tuner`."""
    assert 0.0 <= figures["known, hindsight", "regret, mean"] < 3.0
    assert figures["known, foresight", "regret, p95"] < 8.0
    assert figures["known over default", "waste more, worst"] < 2.0
    assert figures["known over habit", "waste more, mean"] < -20.0


def test_what_is_known_is_worth_something(figures):
    """Regret falls from the prior over five failures to the truth."""
    prior, learned, known = (
        figures[name, "regret, mean"]
        for name in ("prior alone", "learned from 5", "known, foresight")
    )
    assert prior > learned > known


def test_the_judge_notices_a_rule_that_chooses_badly(monkeypatch):
    """Intervals three times too long cost two thirds of the tunable waste."""
    good = scenarios.chosen

    def long(scenario, believed):
        memory, disk = good(scenario, believed)
        return 3 * memory, 3 * disk

    monkeypatch.setattr(scenarios, "chosen", long)
    found = {(r.contestant, r.figure): r for r in rows(judge(12, failures=1500, seed=3))}
    assert found["known, hindsight", "regret, mean"].value > 30.0
    assert found["known, hindsight", "regret, mean"].met is False
