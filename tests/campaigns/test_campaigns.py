"""A few cases of every campaign; `make test-all` plays many more."""

import contextlib
import json
import random
import subprocess
import sys
from pathlib import Path

import pytest

from tests.campaigns import framework
from tests.campaigns.__main__ import main
from tests.campaigns.framework import ROOT, environment, read_summaries, replay_line, run_share
from tests.campaigns.schedule import FULL, Full
from tests.campaigns.table import PAGE, RESULT, with_table
from tests.unit.cli.scripts import warm

COUNTS = {
    "simulation": 250,
    "mutants": 2,
    "errno": 200,
    "store": 60,
    "kill": 250,
    "kill-again": 100,
    "power": 30,
    "fence": 100,
    "strace": 4,
    "random-kills": 25,
    "oom": 1,
    "keeper-ops": 2,
    "sigterm": 4,
    "exact-ranks": 2,
    "corruption": 3_000,
    "peers": 15,
    "fuzz": 30_000,
}
"""Executions in `make test`."""
LONG = ("keeper-ops", "oom", "sigterm")
"""Campaigns that are not in `make test`."""
WARM = ("keeper-ops", "sigterm")
"""Campaigns whose own processes begin with torch imported; what they start is told by the case."""


def campaign(
    name: str, tmp_path: Path, *more: str, seed: int = 1
) -> tuple[framework.Summary, subprocess.CompletedProcess[str]]:
    """Plays it in processes of its own; skips the test where it cannot be."""
    out = tmp_path / "out.json"
    workers = "1" if COUNTS[name] < 10 else "2"  # each imports torch
    command = [
        sys.executable, "-m", "tests.campaigns", name, "--seed", str(seed), "--workers", workers,
        "--minutes", "12", "--out", str(out), *more,
    ]  # fmt: skip
    with warm() if name in WARM else contextlib.nullcontext():
        ended = subprocess.run(
            command, cwd=ROOT, env=environment(), capture_output=True, text=True, check=False
        )
    assert out.exists(), ended.stdout + ended.stderr
    (summary,) = read_summaries(out)
    if summary.skipped:
        pytest.skip(summary.skipped)
    return summary, ended


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.slow] * (name in LONG)) for name in sorted(COUNTS)],
)
def test_no_promise_is_broken(name: str, tmp_path: Path) -> None:
    """Zero violations; one prints the line that replays it."""
    count = COUNTS[name]
    summary, ended = campaign(name, tmp_path, "--count", str(count))
    assert summary.violated == 0, ended.stdout
    assert ended.returncode == 0, ended.stderr
    assert summary.executions >= count, "not all fitted the time"


def test_a_broken_promise_is_reported_with_its_replay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A campaign that never finds anything would pass for ever."""
    monkeypatch.setitem(framework.CAMPAIGNS, "broken", f"{__name__}:Broken")
    monkeypatch.setitem(sys.modules, __name__, sys.modules[__name__])
    summary = run_share("broken", seed=5, count=10, seconds=60)
    assert (summary.cases, summary.violated, summary.following) == (10, 2, 10)
    assert "ValueError: seven" in summary.violations[1]
    assert replay_line("broken", 5, 7) in summary.violations[1]
    again = run_share("broken", seed=5, count=None, seconds=60, only=7)
    assert (again.cases, again.violated) == (1, 1)


def test_a_case_that_the_machine_does_not_play_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where a mount is held by another process: neither played nor a broken promise."""

    def refuse(campaign: Broken, number: int, rng: random.Random) -> str:
        raise framework.Skipped("held")

    monkeypatch.setitem(framework.CAMPAIGNS, "broken", f"{__name__}:Broken")
    monkeypatch.setattr(Broken, "run", refuse)
    summary = run_share("broken", seed=5, count=None, seconds=60, only=7)
    assert (summary.cases, summary.violated, summary.outcomes["not played"]) == (0, 0, 1)


def test_processes_that_share_a_campaign_leave_no_number_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each takes what is next, until the count is reached."""
    monkeypatch.setitem(framework.CAMPAIGNS, "broken", f"{__name__}:Broken")
    monkeypatch.setitem(sys.modules, __name__, sys.modules[__name__])
    numbers = framework.Numbers(tmp_path / "numbers", first=2)
    assert numbers.take(below=None, goal=5) == 2, "as another process does"
    numbers.played(1)
    rest = run_share("broken", seed=5, count=5, seconds=60, numbers=tmp_path / "numbers")
    assert (rest.cases, rest.following, rest.violated) == (4, 7, 1), "3, not 7"
    assert numbers.take(below=None, goal=5) is None
    assert numbers.take(below=7, goal=None) is None
    numbers.close()


def test_a_second_run_of_all_goes_on_where_the_first_one_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of the same sources; else it begins anew, and says so."""
    monkeypatch.setitem(framework.CAMPAIGNS, "broken", f"{__name__}:Broken")
    monkeypatch.setitem(sys.modules, __name__, sys.modules[__name__])
    monkeypatch.setattr("tests.campaigns.schedule.FULL", {"broken": Full(8, 1.0)})
    out = tmp_path / "out.json"
    monkeypatch.setattr(sys, "argv", ["", "all", "--minutes", "0", "--out", str(out)])

    def play(sources: str) -> list[int]:
        """No time is one case; its number is what was played before."""
        monkeypatch.setattr("tests.campaigns.__main__.sources", lambda: sources)
        main()
        (one,) = read_summaries(out)
        return [one.executions, one.following, one.violated]

    assert [play("abc") for _ in range(4)] == [[1, 1, 0], [2, 2, 0], [3, 3, 0], [4, 4, 1]]
    assert "going on after 3 runs of" in capsys.readouterr().out
    assert json.loads(out.read_text())["runs"] == 4
    assert play("def") == [1, 1, 0]
    assert "anew" in capsys.readouterr().out


class Broken:
    """Fails at 3 and 7."""

    claim = "never"
    distinct = None

    def __init__(self, scratch: Path) -> None:
        assert scratch.is_dir()

    def run(self, number: int, rng: object) -> str:
        framework.require(number != 3, "three")
        if number == 7:
            raise ValueError("seven")
        return "fine"

    def close(self) -> None:
        """Nothing."""


def test_the_page_shows_the_last_full_campaign() -> None:
    """`python -m tests.campaigns.table` writes it; nobody else does."""
    page = PAGE.read_text()
    assert with_table(page, json.loads(RESULT.read_text())) == page


def test_every_campaign_is_played_by_both_commands_and_explained() -> None:
    """A new one gets its counts and its line."""
    assert set(framework.CAMPAIGNS) == set(FULL) == set(COUNTS)
    assert sum(one.minutes for one in FULL.values()) <= 2 * 150, (
        "of two workers, in `make test-all`"
    )
    for name in framework.CAMPAIGNS:
        assert f"`{name}`" in PAGE.read_text(), name
