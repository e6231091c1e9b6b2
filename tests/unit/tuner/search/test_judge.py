"""The default stays unless another was better beyond the spread of interleaved writes."""

import math
import random
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autockpt.tuner.search.judge import Verdict, judge, noise_factor
from autockpt.tuner.search.record import Trial
from autockpt.tuner.search.space import MIB, Candidate
from tests.unit.tuner.search.machines import changed, model

MODEL = model(codec="none")
DEFAULT = MODEL.space.default
OTHER = changed(DEFAULT, writers=4, chunk_bytes=16 * MIB)
THIRD = changed(DEFAULT, writers=1)


def finals(
    rows: dict[Candidate, Sequence[float]], cpu_s: dict[Candidate, float] | None = None
) -> list[Trial]:
    """Rounds of writes in turn; `rows` holds the seconds of each way."""
    longest = max(map(len, rows.values()))
    turns = [
        (way, times[i]) for i in range(longest) for way, times in rows.items() if i < len(times)
    ]
    cpu = cpu_s or {}
    return [
        Trial(number=n, stage="final", candidate=way, seconds=s, cpu_s=cpu.get(way, 0.01))
        for n, (way, s) in enumerate(turns)
    ]


def verdict(rows: dict[Candidate, Sequence[float]]) -> Verdict:
    return judge(MODEL, finals(rows))


def test_a_way_that_is_faster_in_every_round_wins() -> None:
    """With the ratio and the rounds in the reason."""
    found = verdict({DEFAULT: [0.10, 0.11, 0.10, 0.11], OTHER: [0.05, 0.055, 0.05, 0.054]})
    assert (found.winner, found.kept_default) == (OTHER, False)
    assert "0.50 times as long" in found.reason
    assert "4 interleaved rounds" in found.reason
    assert found.rating.waste < MODEL.rate(DEFAULT, 1.0).waste
    assert [c.candidate for c in found.contenders] == [OTHER, DEFAULT]
    assert found.tied == ()


def test_a_gain_within_the_spread_keeps_the_default() -> None:
    """Ten percent less time among rounds that vary by a third say nothing; both are tied."""
    found = verdict({DEFAULT: [0.10, 0.13, 0.08, 0.11], OTHER: [0.11, 0.08, 0.09, 0.10]})
    assert (found.winner, found.kept_default) == (DEFAULT, True)
    assert "within the" in found.reason
    assert found.tied == (OTHER,)


def test_two_percent_are_not_worth_a_change() -> None:
    """However little the rounds vary, a path must be 3 % faster."""
    found = verdict({DEFAULT: [0.1] * 6, OTHER: [0.098] * 6})
    assert (found.kept_default, found.margin) == (True, pytest.approx(1.03))
    assert not verdict({DEFAULT: [0.1] * 6, OTHER: [0.095] * 6}).kept_default


def test_a_slow_minute_slows_all_and_proves_nothing() -> None:
    """Noise that a round's writes share is no noise of their difference."""
    slow = (1.0, 3.0, 1.0, 2.0, 5.0)
    found = verdict({DEFAULT: [0.1 * s for s in slow], OTHER: [0.08 * s for s in slow]})
    assert found.winner == OTHER
    assert found.margin == pytest.approx(1.03)


def test_speed_bought_with_cores_does_not_win() -> None:
    """A tenth less time that keeps sixteen cores busy costs the training more than it saves."""
    rows = {DEFAULT: [0.1] * 4, OTHER: [0.09] * 4}
    assert judge(MODEL, finals(rows)).winner == OTHER
    busy = judge(MODEL, finals(rows, cpu_s={DEFAULT: 0.01, OTHER: 1.6}))
    assert busy.winner == DEFAULT


def test_one_round_has_no_spread_and_decides_nothing() -> None:
    """Time ran out: the default stays."""
    found = verdict({DEFAULT: [0.1], OTHER: [0.01]})
    assert (found.kept_default, found.margin) == (True, math.inf)


def test_rounds_that_were_cut_short_do_not_count() -> None:
    """The last write of the default is missing, so the last of the other is left out."""
    whole = {DEFAULT: [0.1, 0.1, 0.1], OTHER: [0.05, 0.05, 0.05]}
    cut = {DEFAULT: [0.1, 0.1, 0.1], OTHER: [0.05, 0.05, 0.05, 9.0]}
    assert verdict(cut).contenders == verdict(whole).contenders


def test_a_way_that_failed_once_is_out() -> None:
    """And the others are judged without it; without the default nothing is."""
    rows = {DEFAULT: [0.1] * 4, OTHER: [0.05] * 4, THIRD: [0.06] * 4}
    failed = Trial(number=99, stage="final", candidate=OTHER, seconds=0.0, failure="disk full")
    assert judge(MODEL, [*finals(rows), failed]).winner == THIRD
    lost = Trial(number=99, stage="final", candidate=DEFAULT, seconds=0.0, failure="disk full")
    found = judge(MODEL, [*finals(rows), lost])
    assert (found.winner, found.contenders) == (DEFAULT, ())
    assert "default was not measured" in found.reason


@settings(max_examples=50, deadline=None)
@given(
    rows=st.lists(st.lists(st.floats(0.01, 10.0), min_size=3, max_size=3), min_size=2, max_size=4),
    shared=st.lists(st.floats(0.1, 10.0), min_size=3, max_size=3),
)
def test_the_noise_of_rounds_cancels(rows: list[list[float]], shared: list[float]) -> None:
    """Whatever slows a whole round leaves the factor as it is."""
    scaled = [[value * s for value, s in zip(row, shared, strict=True)] for row in rows]
    assert noise_factor(scaled) == pytest.approx(noise_factor(rows), rel=1e-6)


def test_equal_ways_win_in_one_of_twenty_searches_at_most() -> None:
    """The best of three challengers that are no better, on 200 finals."""
    draw = random.Random(1)
    ways = (DEFAULT, OTHER, THIRD, changed(DEFAULT, writers=8))

    def noisy() -> list[float]:
        return [0.1 * math.exp(draw.gauss(0.0, 0.2)) for _ in range(4)]

    found = [verdict({way: noisy() for way in ways}) for _ in range(200)]
    assert sum(not one.kept_default for one in found) <= 0.05 * 200


def test_a_way_twice_as_fast_is_found_under_heavy_noise() -> None:
    """Four rounds with a fifth of noise are enough in nine of ten searches."""
    draw = random.Random(2)

    def noisy(seconds: float) -> list[float]:
        return [seconds * math.exp(draw.gauss(0.0, 0.2)) for _ in range(4)]

    rows = [{DEFAULT: noisy(0.1), OTHER: noisy(0.05), THIRD: noisy(0.1)} for _ in range(50)]
    assert sum(verdict(row).winner == OTHER for row in rows) >= 45
