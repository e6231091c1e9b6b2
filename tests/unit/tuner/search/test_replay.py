"""A record decides again, to the same answer, without Optuna and without a write."""

import sys
from collections.abc import Iterator
from dataclasses import replace

import pytest

from autockpt.tuner.search.outcome import outcome_of, replay
from autockpt.tuner.search.record import Record, Trial, header_line, parse, trial_line
from autockpt.tuner.search.search import Search
from autockpt.values.errors import ConfigError
from autockpt.values.record import to_json
from tests.unit.tuner.search.machines import (
    Machine,
    carried_out,
    changed,
    model,
    record_of,
    search_for,
)

MODEL = model()
BEST = changed(MODEL.space.default, writers=4)


def searched(*, seed: int = 0, enough_after: int | None = None, noise: float = 0.2) -> Search:
    return carried_out(
        search_for(MODEL, seed=seed), Machine(BEST, noise=noise, seed=seed),
        enough_after=enough_after,
    )  # fmt: skip


def text_of(record: Record) -> list[str]:
    return [header_line(record.header), *map(trial_line, record.trials)]


@pytest.mark.parametrize("enough_after", [None, 2, 7, 20])
@pytest.mark.parametrize("seed", range(2))
def test_a_record_gives_the_same_outcome(seed: int, enough_after: int | None) -> None:
    """Through text and back, also of a search that time cut short; to the byte."""
    search = searched(seed=seed, enough_after=enough_after)
    record = parse(text_of(record_of(search, seed=seed)), where="trials.jsonl")
    assert to_json(replay(record, where="trials.jsonl")) == to_json(outcome_of(search))


def test_a_replay_needs_no_optuna(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another version of it would propose other ways."""
    record = record_of(searched())
    monkeypatch.setitem(sys.modules, "optuna", None)
    assert replay(record, where="trials.jsonl").tried


def test_a_record_that_a_kill_cut_short_still_decides() -> None:
    """The half line is dropped; the final counts its whole rounds."""
    lines = text_of(record_of(searched()))
    cut = [*lines[:-1], lines[-1][: len(lines[-1]) // 2]]
    record = parse(cut, where="trials.jsonl")
    assert len(record.trials) == len(lines) - 2
    assert replay(record, where="trials.jsonl").verdict.contenders


def test_a_changed_sample_is_noticed_by_what_it_would_have_led_to() -> None:
    """The slowest way made the fastest belongs into the final, where it never was."""
    record = record_of(searched(noise=0.0))
    finalists = {t.candidate for t in record.trials if t.stage == "final"}
    place = next(n for n, t in enumerate(record.trials) if t.candidate not in finalists)
    refused(record, place, seconds=1e-3)


@pytest.mark.parametrize("place", [1, -1])
def test_a_way_that_was_never_asked_for_is_noticed(place: int) -> None:
    """In the place of a seed, and of a finalist."""
    refused(record_of(searched()), place, candidate=changed(BEST, writers=8, chunk_bytes=2**20))


def refused(record: Record, place: int, **change: object) -> None:
    trials = list(record.trials)
    trials[place] = replace(trials[place], **change)
    with pytest.raises(ConfigError, match=r"comes next\. The file was changed, or another version"):
        replay(replace(record, trials=tuple(trials)), where="trials.jsonl")


def broken_lines() -> Iterator[tuple[str, list[str], str]]:
    lines = text_of(record_of(searched()))
    yield "empty", [], "is empty"
    yield "half a header", [lines[0][:-9]], "within its first line"
    yield "no header", lines[1:], "trials.jsonl:1: .*schema_version"
    newer = lines[0].replace('{"schema_version":1', '{"schema_version":2', 1)
    yield "another version", [newer], "schema_version 2, this autockpt reads 1"
    yield "no JSON", [lines[0], "{\n"], "trials.jsonl:2: not valid JSON"
    odd = lines[1].replace('"writers":', '"writers":-', 1)
    yield "no writers", [lines[0], odd], "writers: must be between"
    timeless = to_json(Trial(number=0, stage="seed", candidate=BEST, seconds=1.0))
    timeless = timeless.replace('"seconds":1.0', '"seconds":0.0')
    yield "no time", [lines[0], timeless + "\n"], "a write takes more than 0 s"


@pytest.mark.parametrize(
    ("lines", "message"), [pytest.param(*rest, id=name) for name, *rest in broken_lines()]
)
def test_a_damaged_record_is_refused_with_its_line(lines: list[str], message: str) -> None:
    """Nothing is decided from half-understood samples."""
    with pytest.raises(ConfigError, match=message):
        parse(lines, where="trials.jsonl")
