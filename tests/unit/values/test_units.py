"""Units: what people write is read exactly once and printed as people read it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autockpt.values.errors import ConfigError
from autockpt.values.generation import Generation
from autockpt.values.units import (
    format_bytes,
    format_duration,
    format_fraction,
    format_rate,
    parse_duration_s,
    parse_fraction,
    parse_rate_bytes_per_s,
    parse_size_bytes,
)


@pytest.mark.parametrize(
    ("text", "count"),
    [("64 MiB", 64 * 2**20), ("64MB", 64 * 10**6), ("1.5 kB", 1500), ("0", 0), ("2 TiB", 2**41)],
)
def test_sizes_are_read(text: str, count: int) -> None:
    """Binary and decimal units are told apart."""
    assert parse_size_bytes(text) == count


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("1 h 30 min", 5400.0), ("15 min", 900.0), ("2.5 s", 2.5), ("3d", 259200.0), ("0", 0.0)],
)
def test_durations_are_read(text: str, seconds: float) -> None:
    """Compounds add up."""
    assert parse_duration_s(text) == pytest.approx(seconds)


def test_a_fraction_near_one_has_no_more_zeros_than_it_needs() -> None:
    """Nine nines and one are all of it."""
    assert format_fraction(0.9999) == "99.99 %"
    assert format_fraction(1.0 - 1e-12) == format_fraction(1.0) == "100 %"


def test_rates_and_fractions_are_read() -> None:
    """Per second, and percent."""
    assert parse_rate_bytes_per_s("2 GB/s") == 2e9
    assert parse_fraction("2 %") == pytest.approx(0.02)


@pytest.mark.parametrize(
    ("parse", "text", "message"),
    [
        (parse_size_bytes, "64", "bare number is ambiguous"),
        (parse_size_bytes, "64 M", "did you mean MB or MiB"),
        (parse_size_bytes, "1 GB 2 MB", "is not a size"),
        (parse_duration_s, "5 m", r"did you mean min \(minutes\)"),
        (parse_duration_s, "", "an empty text"),
        (parse_duration_s, "-5 s", "is not a duration"),
        (parse_duration_s, "nan s", "is not a duration"),
        (parse_size_bytes, "1e999 GB", "must be finite"),
        (parse_size_bytes, "1e300 TB", "must be finite"),
        (parse_duration_s, "1e999 h", "must be finite"),
        (parse_duration_s, "1e308 s 1e308 s", "must be finite"),
        (parse_rate_bytes_per_s, "1e999 GB/s", "must be finite"),
        (parse_fraction, "1e999 %", "must be finite"),
        (parse_rate_bytes_per_s, "2 GB", "is not a rate"),
        (parse_rate_bytes_per_s, "100 Gb/s", "write 12.5 GB/s for bits, 100 GB/s for bytes"),
        (parse_rate_bytes_per_s, "80 mb/s ", "write 10 MB/s for bits"),
        (parse_fraction, "0.02", "is not a percentage"),
    ],
)
def test_ambiguous_quantities_are_refused(parse: object, text: str, message: str) -> None:
    """Nobody can tell seconds from steps; the message says what to write."""
    with pytest.raises(ConfigError, match=message):
        parse(text)  # type: ignore[operator]


@given(st.text(max_size=20))
def test_no_text_breaks_the_parsers(text: str) -> None:
    """Every text is a quantity or a ConfigError."""
    for parse in (parse_size_bytes, parse_duration_s, parse_rate_bytes_per_s, parse_fraction):
        try:
            assert parse(text) >= 0
        except ConfigError:
            continue


@given(st.floats(1e-6, 1e7))
def test_printed_durations_are_near_what_they_print(seconds: float) -> None:
    """What is printed reads back within the digits printed."""
    assert parse_duration_s(format_duration(seconds)) == pytest.approx(seconds, rel=0.01)


@given(st.integers(1000, 10**15))
def test_printed_sizes_are_near_what_they_print(count: int) -> None:
    """Three digits."""
    assert parse_size_bytes(format_bytes(count)) == pytest.approx(count, rel=0.01)


def test_quantities_print_as_people_read_them() -> None:
    """Units change where the number would become long."""
    assert [format_duration(s) for s in (84e-3, 119.0, 5400.0, 200_000.0, -1.0)] == [
        "84 ms", "119 s", "90 min", "2.31 d", "-1 s",
    ]  # fmt: skip
    assert (format_rate(2.7e9), format_fraction(0.0034), format_bytes(12)) == (
        "2.7 GB/s", "0.34 %", "12 B",
    )  # fmt: skip


@given(st.integers(1, 10**6 - 1), st.integers(0, 10**9 - 1), st.integers(0, 99))
def test_a_generation_its_name_and_its_text_are_one(term: int, step: int, attempt: int) -> None:
    """Both read back; names of an attempt sort as generations do."""
    generation = Generation(term=term, step=step, attempt=attempt)
    assert Generation.from_name(generation.name) == generation
    assert Generation.from_text(generation.name) == generation
    assert Generation.from_text(str(generation)) == generation
    first, later = Generation(term=term, step=step), Generation(term=term + 1, step=0)
    assert first.name < later.name or term + 1 >= 10**4


def test_generations_are_ordered_by_term_attempt_and_step() -> None:
    """A step that is saved again is newer than a greater step of an earlier attempt."""
    texts = ["step 9 (term 1)", "step 3 (term 1), attempt 1", "step 4 (term 1), attempt 1"]
    made = [Generation.from_text(text) for text in [*texts, "ckpt-t0002-step-00000001"]]
    assert sorted({*made}) == made
    assert made[1].name == "ckpt-t0001-step-00000003.1"


@pytest.mark.parametrize(
    "name",
    [
        "",
        "ckpt-t1-step-2",
        "gen" + "-e1-s2",
        "ckpt-t0001-step-00000001.0",
        "ckpt-t00001-step-00000001",
        "ckpt-t0001-step-00000001x",
        "trash",
        "ckpt-t0000-step-00000001",
    ],
)
def test_foreign_names_are_no_generation(name: str) -> None:
    """Whatever else lies in the directory is left alone."""
    with pytest.raises(ConfigError, match=r"no name of a checkpoint|expected term >= 1"):
        Generation.from_name(name)


@pytest.mark.parametrize("text", ["6 hours", "6 hour", "6 hrs", "360 minutes", "21600 seconds"])
def test_units_of_time_may_be_written_out(text: str) -> None:
    """As people type them."""
    assert parse_duration_s(text) == 6 * 3600.0


def test_large_fractions_have_no_exponent() -> None:
    """1.05e+03 % is no figure for people."""
    assert format_fraction(10.5) == "1,050 %"
    assert format_fraction(9.99) == "999 %"
