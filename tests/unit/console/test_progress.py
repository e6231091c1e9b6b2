"""One style of progress: a line that is redrawn on a terminal, plain lines elsewhere."""

import io
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from autockpt.console import Console, progress
from autockpt.console.progress import Counted, Progress, drawn


class Clock:
    """Time that a test moves."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


class Terminal(io.StringIO):
    """A stream that says that it is one."""

    def isatty(self) -> bool:
        return True


@pytest.fixture
def clock() -> Clock:
    return Clock()


def work(shown: Progress, clock: Clock, *, seconds: int, total: int) -> None:
    """Reports every second, at an even pace."""
    for second in range(1, seconds + 1):
        clock.now_s += 1.0
        shown.at(total * second / seconds, total)


def test_work_of_two_seconds_shows_nothing(clock: Clock) -> None:
    """Neither on a terminal nor in a log."""
    for stream in (io.StringIO(), Terminal()):
        shown = Progress("verify", stream=stream, clock=clock)
        clock.now_s += 1.9
        shown.at(50, 100)
        shown.close()
        assert stream.getvalue() == ""


def test_plain_lines_come_at_growing_pauses(clock: Clock) -> None:
    """Each with share, amount, rate and remaining time; the log of an hour holds a dozen."""
    stream = io.StringIO()
    work(Progress("verify", stream=stream, clock=clock), clock, seconds=3600, total=36 * 10**9)
    lines = stream.getvalue().splitlines()
    assert lines[0] == "autockpt: verify: 0 %, 20 MB of 36 GB, 10 MB/s, 59 min 58 s left"
    assert lines[1] == "autockpt: verify: 0 %, 40 MB of 36 GB, 10 MB/s, 59 min 56 s left"
    assert 10 <= len(lines) <= 15
    assert all("\r" not in line and "\x1b" not in line for line in lines)


def test_a_terminal_has_one_line_that_goes_away(clock: Clock) -> None:
    """It is redrawn a few times a second at most, and nothing is left of it."""
    stream = Terminal()
    shown = Progress("convert", stream=stream, clock=clock)
    clock.now_s += 4.0
    for _ in range(100):
        clock.now_s += 0.001
        shown.at(25, 100)
    assert stream.getvalue().count("convert") == 1
    assert "[#####...............]  25 %" in stream.getvalue()
    assert stream.getvalue().endswith("12 s left")
    shown.close()
    assert stream.getvalue().endswith(progress.ERASE)
    assert "\n" not in stream.getvalue()


def test_a_dumb_terminal_and_a_script_beside_it_get_plain_lines(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A line that is redrawn would break what the script prints."""
    beside = Terminal()
    work(Progress("x", stream=beside, clock=clock, beside_script=True), clock, seconds=4, total=4)
    monkeypatch.setenv("TERM", "dumb")
    dumb = Terminal()
    work(Progress("x", stream=dumb, clock=clock), clock, seconds=4, total=4)
    assert beside.getvalue() == dumb.getvalue()
    assert dumb.getvalue().startswith("autockpt: x: 50 %")


@pytest.mark.parametrize("width", [20, 39, 60, 80, 200])
def test_a_narrow_terminal_gets_less_of_the_line(width: int) -> None:
    """Never more than fits; percentage and remaining time go last."""
    parts = ["45 %", "1.2 GB of 2.7 GB", "310 MB/s", "5 s left"]
    line = drawn("verify", parts, 0.45, width)
    assert len(line) <= width
    assert "45 %" in line
    assert ("left" in line) == (width > 20)


def test_waiting_before_the_work_does_not_count(clock: Clock) -> None:
    """A restore waits for other ranks first: its rate is that of the reading."""
    stream = io.StringIO()
    shown = Progress("restore", stream=stream, clock=clock)
    clock.now_s += 60.0
    shown.at(0, 100)
    clock.now_s += 5.0
    shown.at(50, 100)
    assert stream.getvalue() == "autockpt: restore: 50 %, 50 B of 100 B, 10 B/s, 5 s left\n"


def test_a_share_is_never_above_all_of_it(clock: Clock) -> None:
    """Where more came than was expected, the amount alone is shown."""
    stream = io.StringIO()
    shown = Progress("push", stream=stream, clock=clock)
    clock.now_s += 3.0
    shown.at(150, 100)
    assert stream.getvalue() == "autockpt: push: 150 B, 50 B/s\n"


def test_things_are_counted_by_their_name(clock: Clock) -> None:
    """A stage begins its own count."""
    stream = io.StringIO()
    shown = Progress("profile", unit="iterations", stream=stream, clock=clock)
    work(shown, clock, seconds=2, total=2)
    shown.stage("profile: 4 rounds", unit="iterations")
    clock.now_s += 30.0
    shown.at(10, 40)
    assert stream.getvalue().splitlines()[-1] == (
        "autockpt: profile: 4 rounds: 25 %, 10 of 40 iterations, 20/min, 90 s left"
    )


def test_bytes_are_counted_on_their_way(clock: Clock) -> None:
    """As a throttle in front of another one, whose wait stays what it is."""

    class Slow:
        longest_wait_s = 7.0

        def wait(self, nbytes: int) -> float:
            before.append(stream.getvalue())
            clock.now_s += 3.0
            return 3.0

    stream, before = io.StringIO(), list[str]()
    counted = Counted(Progress("push", stream=stream, clock=clock), total=200, gate=Slow())
    assert counted.longest_wait_s == 7.0
    assert [counted.wait(100), counted.wait(100)] == [3.0, 3.0]
    assert "100 %, 200 B of 200 B" in stream.getvalue()
    assert "100 %" not in "".join(before), "counted before they may move"


def test_what_a_command_prints_takes_the_line_away_first(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Result, warning and error begin at the start of an empty line."""
    stream = Terminal()
    monkeypatch.setattr(sys, "stderr", stream)
    say: list[Callable[[Console], object]] = [
        lambda console: console.say("a"),
        lambda console: console.result("b"),
        lambda console: console.warn("c"),
    ]
    for print_one in say:
        shown = Progress("verify", stream=stream, clock=clock)
        clock.now_s += 3.0
        shown.at(1, 2)
        print_one(Console(out=stream))
    printed = stream.getvalue().split(progress.ERASE)
    assert [text for text in printed if text.endswith("\n")] == [
        "autockpt: a\n", "b\n", "autockpt: warning: c\n",
    ]  # fmt: skip


def test_a_terminal_that_is_gone_ends_no_work(tmp_path: Path, clock: Clock) -> None:
    """Closed, or full."""
    closed = open(tmp_path / "f", "w")  # noqa: SIM115 - closed at once
    closed.close()
    work(Progress("verify", stream=closed, clock=clock), clock, seconds=9, total=9)


def test_quiet_shows_no_progress(capsys: pytest.CaptureFixture[str]) -> None:
    """--quiet prints results and problems only."""
    with Console(verbosity=-1).progress("verify") as shown:
        shown._next_s = 0.0
        shown.at(1, 2)
    assert capsys.readouterr().err == ""
