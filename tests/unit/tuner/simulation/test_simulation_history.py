"""Histories: what is drawn has the asked rates, what a trace says is what happens."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autockpt.tuner.simulation.engine import replay
from autockpt.tuner.simulation.history import Down, Failure, World, draw, from_trace
from autockpt.tuner.simulation.outcome import meta_ettr, moevement_ettr, spread, student_t
from autockpt.tuner.simulation.rules import neighbours, spread_pairs
from autockpt.tuner.simulation.strategy import Level, Periodic, Strategy
from autockpt.values.errors import ConfigError

DAY = 86400.0


def world(**changes: float) -> World:
    """64 nodes in domains of 8, one failure an hour."""
    values = {"nodes": 64, "mtbf_s": 3600.0, "process_share": 0.4, "domain_nodes": 8}
    return World(**{**values, **changes})  # type: ignore[arg-type]


def test_a_drawn_history_has_the_rates_that_were_asked_for() -> None:
    """2,400 failures: number and mix within four standard deviations."""
    found = draw(world(), length_s=100 * DAY, seed=1)
    assert len(found.failures) == pytest.approx(2400, abs=4 * 49)
    assert found.process_share == pytest.approx(0.4, abs=0.04)
    assert [f.at_s for f in found.failures] == sorted(f.at_s for f in found.failures)


def test_a_burst_stays_in_its_domain() -> None:
    """Two nodes or more of one domain; without bursts always one."""
    found = draw(world(burst_share=1.0, process_share=0.0), length_s=30 * DAY, seed=2)
    sizes = [len(failure.nodes) for failure in found.failures]
    assert min(sizes) == 2
    assert max(sizes) > 3
    assert all(len({node // 8 for node in failure.nodes}) == 1 for failure in found.failures)
    alone = draw(world(process_share=0.0), length_s=30 * DAY, seed=2)
    assert {len(failure.nodes) for failure in alone.failures} == {1}


def test_the_length_of_the_other_runs_does_not_change_a_run() -> None:
    """Run 3 of seed 0 is itself, and no other."""
    one = draw(world(), length_s=DAY, seed=0, run=3)
    assert one == draw(world(), length_s=DAY, seed=0, run=3)
    assert one != draw(world(), length_s=DAY, seed=0, run=4)


def test_simultaneous_starts_are_one_failure() -> None:
    """Within a minute of the first of them; a line without a node is a failure of processes."""
    downs = [
        Down(node=4, start_s=100.0, end_s=900.0),
        Down(node=7, start_s=130.0, end_s=500.0),
        Down(node=None, start_s=400.0, end_s=400.0),
        Down(node=1, start_s=2000.0, end_s=3000.0),
    ]
    found = from_trace(downs, nodes=8, spares=None, length_s=1500.0)
    assert found.failures == (Failure(at_s=100.0, nodes=(4, 7)), Failure(at_s=400.0))
    assert found.outages == ()


def test_without_spares_the_job_waits_for_its_nodes() -> None:
    """One spare: it waits while two are out, from the failure that took the second."""
    downs = [
        Down(node=4, start_s=100.0, end_s=900.0),
        Down(node=7, start_s=300.0, end_s=500.0),
    ]
    found = from_trace(downs, nodes=8, spares=1, length_s=1000.0)
    assert found.outages == ((300.0, 500.0),)
    disk = Level(
        place="disk",
        every=1,
        stall_s=0.0,
        slowdown_s=0.0,
        latency_s=0.0,
        restart_s=10.0,
        restore_s=5.0,
    )
    job = Strategy(name="job", iteration_s=1.0, calendar=Periodic(steps=10), levels=(disk,))
    outcome = replay(job, found)
    assert outcome.waiting_s == 200.0
    assert outcome.recoveries["disk"] == 2
    # 100 s, then 115 to 300 (180 of 185 saved), then 515 to 1000.
    assert outcome.productive_s == pytest.approx(100.0 + 180.0 + 485.0)


@given(st.lists(st.integers(min_value=0, max_value=31), max_size=6, unique=True))
def test_a_pair_is_lost_only_with_both_of_its_nodes(lost: list[int]) -> None:
    """Neighbours 0 and 1, 2 and 3, ...; of an odd number the last three stand in a ring."""
    pairs = [(n, n + 1) for n in range(0, 32, 2)]
    fatal = any(a in lost and b in lost for a, b in pairs)
    assert neighbours(32).survives(lost) == (not fatal)
    assert neighbours(5).survives({3}) is True
    assert neighbours(5).survives({2, 4}) is False


def test_spread_pairs_never_share_a_domain() -> None:
    """Domains of 4 of 20 nodes: whole domains may be lost."""
    placement = spread_pairs(20, 4)
    assert all(placement.survives(range(start, start + 4)) for start in range(0, 20, 4))


def test_definitions_of_ettr_give_their_worked_examples() -> None:
    """Meta's and MoEvement's, by hand: w = 60 s, dt = 1 h, MTBF 10 h, u = 10 min."""
    meta = meta_ettr(cost_s=60.0, period_s=3660.0, failures_per_s=1 / 36000, restart_s=600.0)
    assert meta == pytest.approx((1 - (600 + 1800) / 36000) / (1 + 60 / 3600))
    moe = moevement_ettr(cost_s=60.0, period_s=3660.0, failures_per_s=1 / 36000)
    assert moe == pytest.approx(1 / (1 + 60 / 3600) / (1 + 1800 / 36000))
    assert meta_ettr(cost_s=1.0, period_s=1e6, failures_per_s=1e-3, restart_s=0.0) == 0.0


@pytest.mark.parametrize(
    ("freedom", "expected"), [(1, 12.706), (5, 2.571), (9, 2.262), (30, 2.042)]
)
def test_students_t_is_that_of_the_tables(freedom: int, expected: float) -> None:
    """97.5 %."""
    assert student_t(freedom) == pytest.approx(expected, rel=2e-3)


def test_a_single_run_has_no_interval() -> None:
    """And equal runs have one of no width."""
    assert spread([0.9]).low is None
    assert spread([0.9, 0.9, 0.9]).high == pytest.approx(0.9)
    two = spread([0.8, 0.9])
    assert (two.mean, two.low) == (pytest.approx(0.85), pytest.approx(0.85 - 12.7062 * 0.05))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"nodes": 0}, "at least 1"),
        ({"mtbf_s": 0.0}, "more than 0 s"),
        ({"mtbf_s": float("inf")}, "finite"),
        ({"burst_share": 1.5}, "burst share"),
        ({"process_share": -0.1}, "process share"),
    ],
)
def test_impossible_worlds_are_refused(changes: dict[str, float], said: str) -> None:
    """With what is wrong."""
    with pytest.raises(ConfigError, match=said):
        world(**changes)
