"""Tables: every cell is shown at every width, aligned where there is room."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autockpt.values.table import NARROWEST, columns, markdown, table

HEADERS = ("checkpoint", "bytes", "state", "path")
ROWS = (
    ("step 12", "4096", "durable on disk", "/data/run"),
    ("step 200", "12", "discarded: the storage hangs for a while", "/data/run"),
)


def test_columns_are_aligned_and_numbers_stand_right() -> None:
    """Without a width a row is one line."""
    assert table(("name", "bytes"), [("a", "4096"), ("bcd", "12")]) == [
        "name  bytes",
        "a      4096",
        "bcd      12",
    ]


@pytest.mark.parametrize("width", [40, 60, 80])
def test_no_line_is_wider_than_the_terminal(width: int) -> None:
    """Columns of text wrap, down to blocks with a line for each column."""
    lines = table(HEADERS, ROWS, width=width)
    assert max(map(len, lines)) <= width
    for cell in (cell for row in ROWS for cell in row):
        assert all(word in "\n".join(lines) for word in cell.split())


def test_a_narrow_terminal_gets_a_block_for_each_row() -> None:
    """Each value stands behind the name of its column."""
    lines = table(HEADERS, ROWS, width=40)
    assert lines[:5] == [
        "checkpoint  step 12",
        "bytes       4096",
        "state       durable on disk",
        "path        /data/run",
        "",
    ]
    assert lines[7:9] == ["state       discarded: the storage hangs", "            for a while"]


def test_the_last_column_wraps_below_itself() -> None:
    """Rows without headers keep their columns."""
    rows = [("interval", "500 steps"), ("", "because the storage is slow today")]
    assert columns(rows, width=30, indent="  ") == [
        "  interval  500 steps",
        "            because the",
        "            storage is slow",
        "            today",
    ]
    assert columns([]) == []


def test_options_and_paths_stay_whole() -> None:
    """A reader copies them."""
    rows = [("asked", "pass --max-restarts 5 and /scratch/run-7/c again")]
    assert columns(rows, width=25) == [
        "asked  pass",
        "       --max-restarts 5",
        "       and",
        "       /scratch/run-7/c",
        "       again",
    ]


@pytest.mark.parametrize("width", [24, 40, 60])
def test_three_columns_fit_a_narrow_terminal(width: int) -> None:
    """The last wraps, then the others; in the end each cell has lines of its own."""
    row = ("where the time went", "two hours of three hours", "because the storage is slow")
    lines = columns([row, ("a", "", "")], width=width)
    assert max(map(len, lines)) <= width
    assert [w for cell in row for w in cell.split() if w not in " ".join(lines).split()] == []


def test_an_empty_table_has_its_headers() -> None:
    """Also where the terminal is too narrow for them on one line."""
    assert table(HEADERS, [], width=20) == ["checkpoint  bytes", "state  path"]


WORD = st.text("abc1-/", min_size=1, max_size=8)
CELL = st.lists(WORD, max_size=6).map(" ".join)


@settings(max_examples=25)
@given(st.lists(st.tuples(CELL, CELL, CELL), min_size=1, max_size=4), st.integers(30, 90))
def test_no_word_is_lost(rows: list[tuple[str, str, str]], width: int) -> None:
    """At any width; lines are wider only where a word and its column's name are."""
    lines = table(("x", "y", "z"), rows, width=width)
    assert max(map(len, lines)) <= max(width, 3 + 8 + NARROWEST)
    words = sorted(word for row in rows for cell in row for word in cell.split())
    shown = sorted(word for line in lines for word in line.split())
    assert [word for word in words if word not in shown] == []


def test_markdown_has_a_rule_below_its_head() -> None:
    """An empty cell is one blank."""
    assert markdown(("", "b"), [("c", "d"), ("e", "")]) == [
        "| | b |",
        "|---|---|",
        "| c | d |",
        "| e | |",
    ]
