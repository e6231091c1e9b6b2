"""The saves of a rank: their states move by the table alone, and the book agrees with them."""

from pathlib import Path
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autockpt.executors.keeper.client.saves import (
    REMEMBERED,
    STATES,
    TRANSITIONS,
    UNANSWERED,
    SaveEvent,
    SaveHandle,
    Saves,
    SaveState,
)
from autockpt.values.generation import Generation
from autockpt.values.table import markdown

EVENTS: tuple[SaveEvent, ...] = get_args(SaveEvent)


def of(step: int) -> Generation:
    """A checkpoint by its step."""
    return Generation(term=1, step=step)


def begun(saves: Saves, step: int, *, disk: bool) -> SaveHandle:
    """A save whose snapshot is on its way into slot 0."""
    save = saves.ask(of(step), disk=disk)
    saves.grant(of(step), 0)
    assert saves.begin(save, disk=disk) == 0
    save.began_s = float(step)
    saves.note_began(save)
    return save


# --- the table -----------------------------------------------------------------------------------


@given(st.lists(st.sampled_from(EVENTS)))
def test_a_handle_moves_by_the_table_alone(events: list[SaveEvent]) -> None:
    """Events come in any order, and a late one changes nothing."""
    save = SaveHandle(of(1), disk=True)
    for event in events:
        former = save.state
        save.apply(event, "why")
        assert save.state == TRANSITIONS.get((former, event), former)
        if save.state == "discarded":
            assert save.reason == "why"
        if save.state == "durable":
            assert save.reason is None


@given(st.lists(st.sampled_from(EVENTS)))
def test_what_is_durable_stays_durable(events: list[SaveEvent]) -> None:
    """No event takes a checkpoint back that is on disk."""
    save = SaveHandle(of(1), disk=True, state="durable")
    for event in events:
        save.apply(event, "why")
    assert save.state == "durable"
    assert save.reason is None


def test_every_state_is_reached_and_every_event_has_a_row() -> None:
    """A row that nothing leads to would be dead, and a state without one a mistake."""
    reached, edge = {"asked"}, {"asked"}
    while edge:
        edge = {target for (source, _), target in TRANSITIONS.items() if source in edge} - reached
        reached |= edge
    assert reached == set(STATES) == set(get_args(SaveState))
    assert {event for _, event in TRANSITIONS} == set(EVENTS)


@pytest.mark.parametrize("state", [state for state in get_args(SaveState) if state != "durable"])
def test_every_save_can_end(state: SaveState) -> None:
    """A new keeper may end on disk what the one before had begun."""
    save = SaveHandle(of(1), disk=True, state=state)
    save.apply("durable")
    assert save.state == "durable"


# --- the book ------------------------------------------------------------------------------------


CALLS = ("ask", "grant", "refuse", "begin", "copied", "withdrawn", "start", "drop", "durable")


@given(st.lists(st.tuples(st.sampled_from((*CALLS, "lost")), st.integers(1, 4))))
def test_what_is_writing_is_what_the_handles_say(calls: list[tuple[str, int]]) -> None:
    """The set that every boundary reads is kept, and never worked out: it must not differ."""
    saves, durable = Saves(), 0
    for call, step in calls:
        save = saves.get(of(step))
        match call:
            case "ask":
                saves.ask(of(step), disk=step % 2 == 0)
            case "grant":
                saves.grant(of(step), 0)
            case "refuse":
                saves.refuse(of(step), "no slot")
            case "begin" if save is not None:
                saves.begin(save, disk=False)
            case "copied" | "withdrawn" if save is not None:
                saves.change(save, call)
            case "start":
                saves.start_writing(of(step))
            case "drop":
                saves.drop(of(step), "torn")
            case "durable":
                saves.report_durable(of(step), 1.0)
                durable = max(durable, step)
            case "lost":
                saves.report_keeper_lost("its keeper died")
        handles = [each for each in map(saves.get, map(of, range(1, 5))) if each is not None]
        assert saves.writing == {each.generation for each in handles if each.is_writing}
        assert saves.durable == (of(durable) if durable else None)
        assert not any(each.is_writing for each in handles if each.step <= durable)


def test_a_dead_keeper_takes_its_grants_and_what_it_wrote() -> None:
    """A snapshot for memory alone goes on: its slot is ours."""
    saves = Saves()
    written, kept = begun(saves, 1, disk=True), begun(saves, 2, disk=False)
    granted = saves.ask(of(3), disk=False)
    saves.grant(of(3), 1)
    saves.report_keeper_lost("its keeper died")
    assert (written.state, kept.state, granted.state) == ("discarded", "copying", "discarded")
    assert saves.begin(granted, disk=False) is None
    assert granted.reason == saves.discard_reason(of(1)) == "its keeper died"
    saves.report_durable(of(1), 1.0)
    assert not saves.is_discarded(of(1)), "the next keeper has ended it"


def test_memory_takes_a_snapshot_whose_file_has_failed() -> None:
    """The disk was full before the boundary came: the slot is there all the same."""
    saves = Saves()
    save = saves.ask(of(1), disk=True)
    saves.grant(of(1), 0)
    saves.drop(of(1), "no space left")
    assert saves.begin(save, disk=True) == 0
    assert saves.is_discarded(of(1))
    assert not saves.writing


def test_a_save_that_others_have_dropped_is_asked_for_all_the_same() -> None:
    """The keeper answers; until it does the reason is known."""
    saves = Saves()
    saves.drop(of(1), "no space left")
    save = saves.ask(of(1), disk=True)
    assert save.is_answered
    assert saves.begin(save, disk=True) is None
    saves.grant(of(1), 0)
    assert saves.begin(save, disk=True) == 0


def test_an_end_is_news_once_and_only_of_a_save_that_began_here() -> None:
    """A keeper that takes over announces again what is durable."""
    saves = Saves()
    save = begun(saves, 1, disk=True)
    assert saves.report_durable(of(1), 3.0) is save
    assert saves.report_durable(of(1), 9.0) is None
    assert list(saves.took_s) == [2.0]
    assert saves.report_durable(of(2), 9.0) is None
    assert saves.drop(of(3), "torn") is None


def test_commits_that_overtake_each_other_leave_the_newest() -> None:
    """The older one is news as well: its time until durable is a figure of its own."""
    saves = Saves()
    older = begun(saves, 1, disk=True)
    begun(saves, 2, disk=True)
    saves.report_durable(of(2), 4.0)
    assert older.state == "durable"
    assert saves.report_durable(of(1), 5.0) is older
    assert (saves.durable, saves.durable_s) == (of(2), 4.0)


def test_a_slow_save_is_remembered_among_many_quick_ones() -> None:
    """Memory takes a snapshot at every iteration, while one is on its way to a slow disk."""
    saves = Saves()
    slow = begun(saves, 1, disk=True)
    for step in range(2, 5 * REMEMBERED):
        save = begun(saves, step, disk=False)
        saves.change(save, "copied")
    assert saves.get(of(1)) is slow
    assert saves.get(of(2)) is None
    assert saves.report_durable(of(1), 9.0) is slow


def test_requests_that_nobody_hears_are_not_waited_for() -> None:
    """Silent is a keeper that was asked and says nothing."""
    saves = Saves()
    for step in range(1, UNANSWERED + 1):
        saves.forget_request(saves.ask(of(step), disk=False))
    assert not saves.is_silent
    for step in range(1, UNANSWERED + 1):
        saves.ask(of(UNANSWERED + step), disk=False)
    assert saves.is_silent
    saves.refuse(of(2 * UNANSWERED), "busy")
    assert not saves.is_silent


# --- the page ------------------------------------------------------------------------------------


def table() -> str:
    """The states as docs/internals/protocol.md shows them."""
    rows = [
        (
            state,
            meaning,
            "; ".join(f"{e}: {to}" for (s, e), to in TRANSITIONS.items() if s == state),
        )
        for state, meaning in STATES.items()
    ]
    return "\n".join(markdown(("State", "Meaning", "Event: next state"), rows)) + "\n"


def test_the_page_has_the_table_of_the_code() -> None:
    """docs/internals/protocol.md and `TRANSITIONS` are one table."""
    text = (Path(__file__).parents[5] / "docs" / "internals" / "protocol.md").read_text()
    assert f"<!-- saves -->\n{table()}<!-- /saves -->" in text
