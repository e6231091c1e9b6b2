"""The statistics and the table that all benchmarks share."""

import importlib
import random
import statistics
from pathlib import Path

import pytest

from benchmarks import harness
from benchmarks.harness import (
    Row,
    bootstrap_interval,
    bootstrap_upper,
    print_notes,
    print_table,
    pseudomedian,
    quantile,
    row,
)


def test_the_bound_is_the_same_for_the_same_samples() -> None:
    """Two runs over one result file say the same."""
    samples = [1.0, 1.02, 0.99, 1.05, 1.01]
    assert bootstrap_upper(samples) == bootstrap_upper(samples)


def test_the_bound_lies_between_the_median_and_the_largest_sample() -> None:
    """It bounds the median, not the samples."""
    draw = random.Random(7)
    samples = [draw.gauss(1.02, 0.05) for _ in range(40)]
    assert statistics.median(samples) <= bootstrap_upper(samples) <= max(samples)


def test_more_pairs_tighten_the_bound() -> None:
    """Forty pairs say more than five of the same noise."""
    draw = random.Random(3)
    many = [draw.gauss(1.0, 0.1) for _ in range(400)]
    few_excess = bootstrap_upper(many[:10]) - statistics.median(many[:10])
    assert bootstrap_upper(many) - statistics.median(many) < few_excess


def test_the_bound_holds_the_true_median_about_as_often_as_it_says() -> None:
    """Of 200 experiments with a known median, about 95 % are bounded from above."""
    draw = random.Random(11)
    held = sum(
        bootstrap_upper([draw.gauss(1.0, 0.1) for _ in range(40)], resamples=200) >= 1.0
        for _ in range(200)
    )
    assert 0.88 <= held / 200 <= 0.995


def test_the_interval_holds_the_true_value_about_as_often_as_it_says() -> None:
    """Of 100 experiments with a known middle, about 95 % hold it; it leaves out either side."""
    draw = random.Random(13)
    sides = []
    for _ in range(100):
        samples = [draw.gauss(1.0, 0.1) for _ in range(20)]
        low, high = bootstrap_interval(samples, pseudomedian, resamples=100)
        sides.append((low > 1.0) - (high < 1.0))
    assert 0.86 <= sides.count(0) / 100 <= 0.99
    assert {1, -1} < {*sides}


def test_wild_samples_do_not_move_the_pseudomedian() -> None:
    """And it is closer to the middle than the median: nearly as close as the mean."""
    assert pseudomedian([1.0, 2.0, 4.0]) == 2.25
    assert pseudomedian([1.0, 1.1, 0.9, 1.0, 50.0]) < 1.1
    draw = random.Random(17)
    tries = [[draw.gauss(0.0, 1.0) for _ in range(15)] for _ in range(400)]
    scatter = {
        statistic: statistics.pstdev(statistic(samples) for samples in tries)
        for statistic in (statistics.fmean, statistics.median, pseudomedian)
    }
    assert scatter[pseudomedian] < 1.1 * scatter[statistics.fmean]
    assert scatter[pseudomedian] < 0.95 * scatter[statistics.median]


@pytest.mark.parametrize(("q", "expected"), [(0.0, 1), (0.5, 2), (0.95, 4), (1.0, 4)])
def test_a_quantile_is_a_sample(q: float, expected: float) -> None:
    """No value is made up between two samples."""
    assert quantile([4, 1, 3, 2], q) == expected


def test_a_target_from_below_is_missed_below_it() -> None:
    """A gain has to reach its target."""
    assert row("ours", "gain", [2.1], "x", at_least=2.2).met is False
    assert row("ours", "gain", [2.3], "x", at_least=2.2).met is True


def test_no_sample_meets_no_target() -> None:
    """What was not measured is neither met nor missed, and the target still shows."""
    missing = row("ours", "stall", [], "ms", at_most=1.0)
    assert (missing.value, missing.met, missing.target) == (None, None, "<= 1")


def test_the_table_shows_every_figure(capsys: pytest.CaptureFixture[str]) -> None:
    """Shared figures stand in columns, those of one contestant in lines, missed ones starred."""
    rows = [
        row("ours", "ratio", [1.5], "x", at_most=1.0),
        row("peer", "ratio", [2.0], "x"),
        row("ours", "idle", [4.0], "us", at_most=50.0),
        Row(contestant="gone", figure="ratio", value=None, unit="x", n=0, note="absent: why"),
    ]
    print_table(rows)
    print_notes(rows, {"peer": "its trap"})
    shown = capsys.readouterr().out
    for text in ("1.5 *", "ours, idle: 4 us   target <= 50", "absent: why", "peer: its trap"):
        assert text in shown


NAMES = sorted(path.stem for path in Path(harness.__file__).parent.glob("*.py"))


@pytest.mark.parametrize("name", NAMES)
def test_every_benchmark_finds_what_it_measures(name: str) -> None:
    """Functions move; who runs a benchmark once a month must not be the one who notices."""
    importlib.import_module(f"benchmarks.{name}")
