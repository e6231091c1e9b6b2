"""What a command prints fits the terminal, and a pipe gets whole lines."""

import io

import pytest

from autockpt.console import Console
from autockpt.console.progress import Progress

HEADERS = ("checkpoint", "state")
ROWS = [("step 12", "durable on disk, and read back once"), ("step 13", "in memory of one node")]


class Terminal(io.StringIO):
    """A stream that says that it is one."""

    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("columns", ["40", "24"])
def test_a_table_obeys_columns(monkeypatch: pytest.MonkeyPatch, columns: str) -> None:
    """Also with few of them."""
    monkeypatch.setenv("COLUMNS", columns)
    out = Terminal()
    console = Console(out=out, color=False)
    console.table(HEADERS, ROWS)
    console.columns(ROWS)
    assert max(map(len, out.getvalue().splitlines())) <= int(columns)
    assert "once" in out.getvalue()


def test_a_pipe_gets_a_line_for_each_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """However long it is: other programs read it, and shells export COLUMNS."""
    monkeypatch.setenv("COLUMNS", "30")
    out = io.StringIO()
    Console(out=out).table(HEADERS, ROWS)
    assert len(out.getvalue().splitlines()) == 1 + len(ROWS)


def test_a_note_is_no_comment(capsys: pytest.CaptureFixture[str]) -> None:
    """An interactive zsh takes `# resumes` as arguments."""
    Console().next(["autockpt", "run", "a b.py"], note="resumes")
    assert capsys.readouterr().err.splitlines() == [
        "autockpt: the command below resumes",
        "autockpt: next: autockpt run 'a b.py'",
    ]


@pytest.mark.parametrize("stream", [None, object()])
def test_a_process_without_stderr_is_told_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], stream: object
) -> None:
    """A service, or a script that has put something else there: the work goes on."""
    monkeypatch.setattr("sys.stderr", stream)
    clock = iter(range(0, 1000, 10))
    shown = Progress("restore", clock=lambda: float(next(clock)))
    shown.at(1, 2)
    shown.close()
    Console().warn("a")
    with Console().progress("push") as again:
        again.at(1, 2)
    assert capsys.readouterr().out == ""
