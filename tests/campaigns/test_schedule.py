"""How the minutes of all campaigns are divided."""

from collections.abc import Iterable

from tests.campaigns.framework import DISTINCT, Summary
from tests.campaigns.schedule import ENDLESS, FULL, counts_reached, play_all

DIFFERENT = 40


class Machine:
    """Campaigns at so many executions a second, and the clock they move."""

    def __init__(self, rates: dict[str, float], *, skipped: str = "") -> None:
        self.now_s, self._rates, self._skipped = 0.0, rates, skipped
        self.played: list[tuple[str, int | None, float, int]] = []

    def run(self, name: str, count: int | None, seconds: float, first: int) -> Summary:
        """As `run_share`: until the count or the time is over, one case at least."""
        self.played.append((name, count, seconds, first))
        if name == self._skipped:
            return Summary(name=name, skipped="not here")
        if count == DISTINCT:
            count = DIFFERENT - first
        rate = self._rates.get(name, 1e9)
        fits = max(1, int(rate * seconds))
        cases = fits if count is None else min(count, fits)
        took = seconds if count is None else cases / rate
        self.now_s += took
        return Summary(
            name=name, distinct=DIFFERENT, cases=cases, executions=cases, following=first + cases,
            seconds=took,
        )  # fmt: skip

    def play(self, seconds: float, before: Iterable[Summary] = ()) -> dict[str, Summary]:
        """All."""
        played = play_all(self.run, seconds, before=before, clock=lambda: self.now_s)
        return {one.name: one for one in played}


def test_every_count_is_reached_and_the_rest_goes_to_what_never_ends() -> None:
    """No second is left over, no campaign gets more than it asks for before all have that."""
    machine = Machine(dict.fromkeys(ENDLESS, 1e5))
    summaries = machine.play(9000.0)
    assert list(summaries) == list(FULL)
    assert all(one.reached for one in summaries.values())
    assert abs(machine.now_s - 9000.0) < 10.0
    assert [name for name, *_ in machine.played[len(FULL) :]] == list(ENDLESS)
    for name in ENDLESS:
        wanted = FULL[name].count
        assert wanted is not None
        assert summaries[name].executions > wanted
        assert summaries[name].following == summaries[name].cases, "numbers follow"


def test_time_that_is_left_goes_to_counts_that_were_not_reached() -> None:
    """A slow campaign goes on where it stopped; only when all are done do others get more."""
    machine = Machine({"errno": 5.0, "strace": 0.1})
    summaries = machine.play(9000.0)
    again = machine.played[len(FULL)]
    assert again[0] == "errno"
    assert 0 < again[3] < 26_000, "not from the beginning"
    assert all(one.reached for one in summaries.values())
    assert summaries["strace"].executions == DIFFERENT


def test_too_little_time_is_divided_and_said() -> None:
    """Everybody plays at least once; the counts that were not reached are named."""
    summaries = Machine(dict.fromkeys(FULL, 1.0)).play(60.0)
    assert all(one.executions >= 1 for one in summaries.values())
    told = counts_reached(summaries.values())
    assert f"{'simulation':<12} " in told
    assert "not reached" in told
    assert told.endswith(
        f"0 of {sum(one.wanted is not None for one in summaries.values())} counts reached"
    )


def test_a_campaign_that_cannot_run_here_is_left_out() -> None:
    """What it does not need is everybody's."""
    machine = Machine({}, skipped="power")
    assert machine.play(100.0)["power"].skipped
    assert [name for name, *_ in machine.played].count("power") == 1


def test_a_later_run_goes_on_where_an_earlier_one_ended() -> None:
    """Counts that were reached are left alone; numbers follow; the minutes go to the others."""
    machine = Machine({"simulation": 200.0})
    first = machine.play(1000.0)
    assert [name for name, one in first.items() if not one.reached] == ["simulation"]
    before, machine.played = first["simulation"].executions, []
    again = machine.play(8000.0, first.values())
    assert list(again) == list(FULL)
    assert all(one.reached for one in again.values())
    left = [name for name, one in FULL.items() if one.count is None or name == "simulation"]
    assert [name for name, *_ in machine.played[: len(left)]] == left
    assert ("simulation", 1_000_000 - before, before) in {
        (n, c, f) for n, c, _, f in machine.played
    }
