"""What a person at the launcher hears of saves: since when the job is protected; with -v all."""

import json
from pathlib import Path

import pytest

from autockpt.console import Console
from autockpt.launch.elastic.news import News, sentence, sentences
from autockpt.run_directory import RunDirectory
from autockpt.values import telemetry as t
from autockpt.values.generation import Generation


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    return RunDirectory.create(tmp_path / "r")


def append(run: RunDirectory, file: str, *events: t.Event) -> None:
    with open(run.telemetry / file, "a") as telemetry:
        for event in events:
            telemetry.write(json.dumps(t.event_data(event)) + "\n")


def name(step: int) -> str:
    return Generation(term=1, step=step).name


def memory(step: int) -> t.Event:
    return t.MemoryCommitted(at_s=step, rank=-1, generation=name(step), step=step, latency_s=0.5)


def disk(step: int) -> t.Event:
    return t.CheckpointDurable(
        at_s=step + 0.5, rank=-1, generation=name(step), step=step, bytes=1, stored_bytes=1,
        latency_s=2.0, write_s=1.0,
    )  # fmt: skip


def skipped(step: int) -> t.Event:
    return t.SaveSkipped(at_s=step, rank=0, step=step, reason="the one before is under way")


def restored(step: int) -> t.Event:
    return t.Restored(
        at_s=0.0, rank=0, generation=name(step), step=step, source="disk", bytes=1, restore_s=1.0,
        lost_steps=3, lost_s=1.0, down_s=2.0,
    )  # fmt: skip


def heard(news: News, capsys: pytest.CaptureFixture[str]) -> list[str]:
    news._looked_s = 0.0  # it looks twice a second
    news.look(0)
    return [line.removeprefix("autockpt: ") for line in capsys.readouterr().err.splitlines()]


def test_a_run_says_once_since_when_it_is_protected(
    run: RunDirectory, capsys: pytest.CaptureFixture[str]
) -> None:
    """In memory first, then on disk; later checkpoints are not told."""
    news = News(run, Console())
    assert heard(news, capsys) == []
    append(run, "keeper-000.jsonl", memory(8))
    (first,) = heard(news, capsys)
    assert first == "protected since step 8: the training survives the death of its ranks"
    append(run, "keeper-000.jsonl", memory(16), disk(16))
    (second,) = heard(news, capsys)
    assert (
        second == "also durable since step 16: the training survives the death of ranks and keeper"
    )
    append(run, "keeper-000.jsonl", memory(24), disk(24))
    assert heard(news, capsys) == []


def test_memory_and_disk_in_one_look_are_one_line(
    run: RunDirectory, capsys: pytest.CaptureFixture[str]
) -> None:
    """A job that is over is not told that it is protected."""
    news, over = News(run, Console()), News(run, Console())
    append(run, "keeper-000.jsonl", memory(8), disk(8))
    (line,) = heard(news, capsys)
    assert line == "protected since step 8: the training survives the death of ranks and keeper"
    over.look(0, last=True)
    assert capsys.readouterr().err == ""


def test_a_run_that_resumed_was_protected_before(
    run: RunDirectory, capsys: pytest.CaptureFixture[str]
) -> None:
    """What an earlier start wrote is not read again."""
    append(run, "keeper-000.jsonl", memory(8), disk(8))
    news = News(run, Console())
    append(run, "rank-00000.jsonl", restored(8))
    append(run, "keeper-000.jsonl", memory(16), disk(16))
    assert heard(news, capsys) == []


def test_verbose_tells_each_save_skip_and_decision(
    run: RunDirectory, capsys: pytest.CaptureFixture[str]
) -> None:
    """In the order in which they happened."""
    news = News(run, Console(verbosity=1))
    plan = t.PlanChanged(
        at_s=30.0, rank=0, plan_version=2, step=30, memory_interval_steps=8,
        disk_interval_steps=16, reason="the storage became slower",
    )  # fmt: skip
    append(run, "rank-00000.jsonl", skipped(9), plan)
    append(run, "keeper-000.jsonl", memory(8), disk(8))
    assert heard(news, capsys)[1:] == [
        "step 8: checkpoint in memory after 500 ms",
        "step 8: checkpoint on disk after 2 s",
        "step 9: checkpoint skipped: the one before is under way",
        "plan 2 from step 30: the storage became slower",
    ]


def test_many_saves_at_once_are_one_line() -> None:
    """A job that saves at every iteration does not scroll the terminal away."""
    assert list(sentences(memory(step) for step in range(1, 101))) == [
        "100 checkpoints in memory, steps 1 to 100"
    ]


def test_a_line_that_is_not_whole_waits(
    run: RunDirectory, capsys: pytest.CaptureFixture[str]
) -> None:
    """And one that is no event is passed over."""
    news = News(run, Console(verbosity=1))
    whole = json.dumps(t.event_data(skipped(9)))
    path = run.telemetry / "rank-00000.jsonl"
    path.write_text("no event\n" + whole[:20])
    assert heard(news, capsys) == []
    path.write_text("no event\n" + whole + "\n")
    assert len(heard(news, capsys)) == 1


def test_another_node_tells_its_own(run: RunDirectory, capsys: pytest.CaptureFixture[str]) -> None:
    """The ranks of the first node are told of there alone."""
    news = News(run, Console(verbosity=1))
    append(run, "rank-00000.jsonl", skipped(9))
    append(run, "keeper-001.jsonl", memory(8))
    news.look(1)
    said = capsys.readouterr().err
    assert "protected since step 8" in said
    assert "skipped" not in said


def test_what_is_no_news_says_nothing() -> None:
    """The end is told by the launcher."""
    event = t.RunEnded(at_s=0.0, rank=0, step=8, reason="finished")
    assert sentence(event) == ""
