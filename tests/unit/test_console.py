"""What a command prints fits the terminal, and a pipe gets whole lines."""

import io

import pytest

from autockpt.console import Console

HEADERS = ("checkpoint", "state")
ROWS = [("step 12", "durable on disk, and read back once"), ("step 13", "in memory of one node")]


@pytest.mark.parametrize("columns", ["40", "24"])
def test_a_table_obeys_columns(monkeypatch: pytest.MonkeyPatch, columns: str) -> None:
    """Also with few of them."""
    monkeypatch.setenv("COLUMNS", columns)
    out = io.StringIO()
    console = Console(out=out)
    console.table(HEADERS, ROWS)
    console.columns(ROWS)
    assert max(map(len, out.getvalue().splitlines())) <= int(columns)
    assert "once" in out.getvalue()


def test_a_pipe_gets_a_line_for_each_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """However long it is: other programs read it."""
    monkeypatch.delenv("COLUMNS", raising=False)
    out = io.StringIO()
    Console(out=out).table(HEADERS, ROWS)
    assert len(out.getvalue().splitlines()) == 1 + len(ROWS)
