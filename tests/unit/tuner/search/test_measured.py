"""tune says what it measured, tries only what it can write, and knows what was tried before."""

from dataclasses import replace

import pytest

from autockpt.policies.decide import decide
from autockpt.tuner.search.outcome import outcome_of, replay
from autockpt.tuner.search.record import earlier_tries
from autockpt.tuner.search.search import Search
from autockpt.tuner.search.space import candidate_of
from autockpt.values.goal import Goal, Pins
from tests.support.profiles import example_codecs
from tests.unit.tuner.search.machines import (
    SAMPLE_BYTES,
    Machine,
    carried_out,
    changed,
    job,
    model,
    proposer,
    record_of,
    search_for,
)

MODEL = model()
BEST = changed(MODEL.space.default, writers=4)


def quick(times: float) -> Machine:
    """A machine whose default takes `times` what the profile predicts."""
    default = MODEL.space.default
    machine = Machine(BEST)
    machine.scale = times * MODEL.predicted_s(default, SAMPLE_BYTES) / machine.seconds(default)
    return machine


def test_the_column_measured_holds_measured_seconds() -> None:
    """The mean of the writes of the final, and not a ratio times a prediction."""
    search = carried_out(search_for(MODEL), Machine(BEST, noise=0.1))
    for tried in outcome_of(search).tried:
        own = [t for t in search.trials if t.candidate == tried.candidate]
        final = [t.seconds for t in own if t.stage == "final"]
        seconds = final or [t.seconds for t in own]
        assert tried.measured_s == pytest.approx(sum(seconds) / len(seconds))


@pytest.mark.parametrize("times", [0.2, 1.6, 90.0])
def test_a_storage_that_is_not_what_was_profiled_is_said(times: float) -> None:
    """Beyond a factor of two; then lost time is reckoned with what was measured."""
    outcome = outcome_of(carried_out(search_for(MODEL), quick(times)))
    assert outcome.default_times == pytest.approx(times)
    lost = {tried.candidate: tried.waste for tried in outcome.tried}[outcome.default]
    assert lost is not None
    if times == 90.0:
        assert lost > 1.5 * MODEL.rate(outcome.default, 1.0).waste
    assert bool(outcome.warnings) == (not 0.5 <= times <= 2.0)
    assert all("autockpt profile" in said for said in outcome.warnings)


def test_differences_are_no_candidates() -> None:
    """A measured write has no save before it; a plan that writes them is tuned by full writes."""
    deltas = tuple(replace(m, codec="delta", gap_steps=20) for m in example_codecs())
    profile = job(codecs=(*example_codecs(), *deltas))
    space = model(profile).space
    assert {c.codec for c in space.candidates()} == {"none", "zstd"}
    plan = decide(profile, Goal(pins=Pins(codec="delta"))).plan
    assert candidate_of(plan).codec != "delta"


def test_the_usual_budget_searches() -> None:
    """Not only seeds and a final."""
    from autockpt.cli.jobs.tune import BUDGET

    search = carried_out(search_for(MODEL, budget=BUDGET), Machine(BEST, noise=0.1))
    assert sum(trial.stage == "search" for trial in search.trials) >= 15


def test_what_was_tried_before_is_not_explored_again() -> None:
    """It may win all the same, because the final measures it anew; and a replay agrees."""
    first = carried_out(search_for(MODEL), Machine(BEST))
    known = earlier_tries([record_of(first)])
    assert known
    again = carried_out(Search(MODEL, proposer(MODEL), 25, earlier=known), Machine(BEST, seed=1))
    explored = {t.candidate for t in again.trials if t.stage != "final"}
    assert not explored & {tried.candidate for tried in known}
    assert again.verdict().winner == first.verdict().winner
    assert outcome_of(again) == replay(record_of(again), where="trials.jsonl")
