"""The search: seeds, Optuna, final; within the budget, and never worse than the default."""

import math
import statistics
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autockpt.tuner.search.proposals import STUDY
from autockpt.tuner.search.search import FINALISTS, LEAST_BUDGET, ROUNDS, Search, seeds_of
from autockpt.tuner.search.space import MIB, Candidate
from autockpt.values.errors import ConfigError, StorageError
from tests.unit.tuner.search.machines import (
    Machine,
    carried_out,
    changed,
    model,
    proposer,
    search_for,
)

MODEL = model()
DEFAULT = MODEL.space.default
BEST = changed(DEFAULT, writers=4, chunk_bytes=4 * MIB)
FINDS = settings(max_examples=8, deadline=None)


def test_the_default_is_measured_first_and_one_of_each_category_follows() -> None:
    """Path x codec: four categories, each by its best predicted way."""
    seeds = seeds_of(MODEL)
    assert seeds[0] == DEFAULT
    assert {way.category for way in seeds} == {way.category for way in MODEL.space.allowed()}
    rest = [way for way in seeds[1:] if way.category != DEFAULT.category]
    assert len({way.category for way in rest}) == len(rest) == 3
    for way in rest:
        rivals = [c for c in MODEL.space.allowed() if c.category == way.category]
        least = min(MODEL.rate(c, MODEL.predicted_ratio(c)).waste for c in rivals)
        assert MODEL.rate(way, MODEL.predicted_ratio(way)).waste == pytest.approx(least, rel=1e-3)


@FINDS
@given(
    budget=st.integers(LEAST_BUDGET, 40),
    seed=st.integers(0, 5),
    enough_after=st.none() | st.integers(1, 30),
)
def test_a_search_keeps_its_budget_and_its_order(
    budget: int, seed: int, enough_after: int | None
) -> None:
    """Stages in turn, whole rounds with the default, no way measured twice before the final."""
    search = carried_out(
        search_for(MODEL, budget=budget, seed=seed), Machine(BEST, seed=seed),
        enough_after=enough_after,
    )  # fmt: skip
    stages = [trial.stage for trial in search.trials]
    assert len(stages) <= budget
    assert stages == sorted(stages, key=["seed", "search", "final"].index)
    before = [t.candidate for t in search.trials if t.stage != "final"]
    assert len(set(before)) == len(before)
    finals = [t.candidate for t in search.trials if t.stage == "final"]
    ways = set(finals)
    assert not ways or DEFAULT in ways
    assert len(ways) <= FINALISTS + 1
    counts = {finals.count(way) for way in ways}
    assert len(counts) <= 1
    if enough_after is None:
        assert min(counts) >= ROUNDS


@pytest.mark.parametrize("seed", range(3))
def test_a_good_default_is_as_good_as_it_gets(seed: int) -> None:
    """Where the default is the best way there is nothing to win, and nothing is lost."""
    search = carried_out(search_for(MODEL, seed=seed), Machine(DEFAULT, noise=0.05, seed=seed))
    assert search.verdict().winner == DEFAULT


@pytest.mark.parametrize("best_writers", [1, 8])
@pytest.mark.parametrize("direct", [True, False])
def test_a_machine_that_the_profile_does_not_know_is_found_out(
    best_writers: int, direct: bool
) -> None:
    """Most searches of 25 writes win back half of what the default loses there."""
    best = changed(DEFAULT, writers=best_writers, chunk_bytes=2 * MIB, direct_io=direct)
    machine = Machine(best)
    least, default = machine.seconds(best), machine.seconds(DEFAULT)
    found = [carried_out(search_for(MODEL, seed=n), machine).verdict() for n in range(3)]
    median_s = statistics.median(machine.seconds(verdict.winner) for verdict in found)
    assert median_s - least <= (default - least) / 2


def test_hopeless_ways_are_not_proposed() -> None:
    """A codec whose seed took three times as long is not tried again."""
    search = carried_out(search_for(MODEL), Machine(BEST))
    proposed = [t.candidate for t in search.trials if t.stage == "search"]
    assert proposed
    assert all(way.codec == "none" for way in proposed)


def test_the_same_seed_asks_the_same() -> None:
    """And another one something else."""
    first, again, other = (
        [t.candidate for t in carried_out(search_for(MODEL, seed=seed), Machine(BEST)).trials]
        for seed in (3, 3, 4)
    )
    assert first == again
    assert first != other


def test_ways_that_fail_are_out_and_the_search_goes_on() -> None:
    """A file system without O_DIRECT, say: what works is compared."""
    broken = tuple(c for c in MODEL.space.allowed() if not c.direct_io)
    search = carried_out(search_for(MODEL), Machine(BEST, broken=broken))
    assert any(trial.failure for trial in search.trials)
    assert all(c.candidate.direct_io for c in search.verdict().contenders)


def test_a_default_that_cannot_be_written_stays() -> None:
    """There is nothing to compare with, and the reason says so."""
    search = carried_out(search_for(MODEL), Machine(BEST, broken=(DEFAULT,)))
    assert search.verdict().kept_default
    assert "not measured" in search.verdict().reason


def test_a_dead_storage_is_an_error_with_its_own_reason() -> None:
    """No decision is made from nothing."""
    search = carried_out(search_for(MODEL), Machine(BEST, broken=tuple(MODEL.space.candidates())))
    with pytest.raises(StorageError, match="not one write could be measured: no such device"):
        search.verdict()


def test_a_budget_without_room_for_a_final_is_refused() -> None:
    """The message says how many it takes."""
    with pytest.raises(ConfigError, match=f"at least {LEAST_BUDGET}"):
        search_for(MODEL, budget=LEAST_BUDGET - 1)


def test_the_study_is_a_journal_that_optuna_opens(tmp_path: Path) -> None:
    """Every way that was measured before the final, with its value, for optuna-dashboard."""
    import optuna
    from optuna.storages.journal import JournalFileBackend, JournalStorage

    optuna_side = proposer(MODEL)
    search = carried_out(Search(MODEL, optuna_side, 25), Machine(BEST))
    journal = str(tmp_path / "study.journal")
    optuna_side.save(journal)
    study = optuna.load_study(study_name=STUDY, storage=JournalStorage(JournalFileBackend(journal)))
    told = [t for t in study.trials if t.state == optuna.trial.TrialState.COMPLETE]
    asked = {t.candidate for t in search.trials if t.stage != "final"}
    assert asked <= {Candidate(**trial.params) for trial in told}
    assert all(trial.value is not None and math.isfinite(trial.value) for trial in told)
