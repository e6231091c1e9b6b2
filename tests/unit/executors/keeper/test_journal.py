"""What the keeper writes down: telemetry of the node, and one failure record per interruption."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from autockpt.executors.keeper import event_recorder as journal_module
from autockpt.executors.keeper.event_recorder import EventRecorder
from autockpt.executors.keeper.slots import (
    CELL_STARTED_NS,
    CELL_STEP,
    CELL_STEP_NS,
    RankMemory,
)
from autockpt.executors.keeper.wire import TrainerResumed
from autockpt.executors.linux.memory import Arena
from autockpt.executors.storage.event_log import TelemetryWriter
from autockpt.profiles.failures import estimate_rates, estimate_recovery
from autockpt.profiles.imports import own_log
from autockpt.run_directory import RunDirectory
from autockpt.values.failure import FailureRecord
from autockpt.values.generation import Generation
from autockpt.values.record import from_json
from autockpt.values.telemetry import Event, Restored, event_from_data

G = Generation(term=1, step=30)


class Clock:
    """The keeper's monotonic clock."""

    now_s = 1000.0


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """Moved by the test."""
    clock = Clock()
    monkeypatch.setattr(journal_module, "_now", lambda: clock.now_s)
    return clock


def board(rank: int, *, step: int, started_s: float = 900.0, step_s: float = 990.0) -> RankMemory:
    """A trainer's board at the moment of its death."""
    memory = RankMemory(rank=rank, board=Arena.anonymous(4096))
    assert memory.board is not None
    cells = memory.board.view[:64].cast("Q")
    cells[CELL_STEP], cells[CELL_STEP_NS] = step, int(step_s * 1e9)
    cells[CELL_STARTED_NS] = int(started_s * 1e9)
    return memory


def back(
    rank: int = 0,
    *,
    step: int = 30,
    source: str = "memory",
    restore_s: float = 2.0,
    term: int = 2,
) -> TrainerResumed:
    """A rank trains again."""
    return TrainerResumed(
        rank=rank, term=term, generation=G, step=step, source=source, bytes=100,
        restore_s=restore_s,
    )  # fmt: skip


@pytest.fixture(autouse=True)
def written_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """An event is in the file when `emit` returns."""
    emit = TelemetryWriter.emit

    def emit_and_flush(writer: TelemetryWriter, event: Event) -> None:
        emit(writer, event)
        writer.flush()

    monkeypatch.setattr(TelemetryWriter, "emit", emit_and_flush)


def failures(path: Path) -> list[FailureRecord]:
    """The failure log, read as a later run reads it."""
    file = path / "failures.jsonl"
    lines = file.read_text().splitlines() if file.exists() else []
    return [from_json(FailureRecord, line) for line in lines]


def events(path: Path) -> list[Event]:
    """The keeper's telemetry."""
    lines = (path / "telemetry" / "keeper-000.jsonl").read_text().splitlines()
    return [event_from_data(json.loads(line)) for line in lines]


def test_an_interruption_is_recorded_with_what_it_cost(tmp_path: Path, clock: Clock) -> None:
    """Exposure, down time less the restore, steps and time lost, and where the state came from."""
    journal = EventRecorder(str(tmp_path), 0)
    journal.trainer_lost(board(0, step=45), 77, "SIGKILL")
    clock.now_s += 12.0
    journal.resumed(back(step=30))
    (record,) = failures(tmp_path)
    assert (record.kind, record.what, record.node, record.step) == ("process", "trainer", 0, 45)
    assert record.exposure_s == pytest.approx(90.0)
    assert (record.restart_s, record.restore_s) == (pytest.approx(10.0), 2.0)
    assert (record.source, record.lost_steps) == ("memory", 15)
    assert record.lost_s == pytest.approx(15 * 90.0 / 45)
    assert journal.outage is None
    observed, restored = (
        e for e in events(tmp_path) if type(e).__name__ in ("FailureObserved", "Restored")
    )
    assert (observed.failed_rank, observed.pid, observed.detail) == (0, 77, "SIGKILL")  # type: ignore[attr-defined]
    assert (restored.down_s, restored.lost_steps) == (pytest.approx(12.0), 15)  # type: ignore[attr-defined]


def test_the_record_tells_when_all_nodes_were_told_to_go_on(tmp_path: Path, clock: Clock) -> None:
    """Of two tries the last; the state is put in place later, and how fast is each node's own."""
    journal = EventRecorder(str(tmp_path), 0)
    journal.told_to_go_on()
    journal.trainer_lost(board(0, step=45), 77, "SIGKILL", nodes=(0, 0, 2, 1))
    for _ in range(2):
        clock.now_s += 3.0
        journal.told_to_go_on()
    clock.now_s += 8.0
    journal.resumed(back(step=30))
    (record,) = failures(tmp_path)
    assert (record.nodes, record.told_s) == ((0, 1, 2), pytest.approx(6.0))


def test_what_died_says_the_kind_and_not_where_the_state_came_from(
    tmp_path: Path, clock: Clock
) -> None:
    """With the memory tier off a killed trainer comes back from disk, on a node that is whole; a
    node is lost where the keeper died as well and no slot of it was found."""
    journal = EventRecorder(str(tmp_path), 0)
    journal.trainer_lost(board(0, step=10), 1, "")
    journal.resumed(back(step=5, source="disk"))
    rank_file(tmp_path, STARTED, STEPPED)
    EventRecorder(str(tmp_path), 0).resumed(back(step=5, source="disk"))
    EventRecorder(str(tmp_path), 0).resumed(back(step=5, source="memory"))
    assert [record.kind for record in failures(tmp_path)] == ["process", "node", "process"]


def test_all_ranks_of_a_node_are_one_interruption(tmp_path: Path, clock: Clock) -> None:
    """Survivors that torchelastic kills are part of it, the furthest step counts."""
    journal = EventRecorder(str(tmp_path), 0)
    for rank, step in ((1, 44), (0, 46), (2, 45)):
        journal.trainer_lost(board(rank, step=step), rank, "")
        clock.now_s += 1
    for rank in (2, 1, 0):
        journal.resumed(back(rank, step=40))
    (record,) = failures(tmp_path)
    assert (record.step, record.lost_steps, record.what) == (46, 6, "trainer")


def test_one_interruption_of_many_nodes_is_one(tmp_path: Path, clock: Clock) -> None:
    """Survivors leave their collectives without a word, so every keeper logs it: readers count it
    once, as the node that lost its memory met it, and the next one apart."""
    journals = [EventRecorder(str(tmp_path), node) for node in range(8)]
    for term, lost in ((2, 5), (3, None)):
        for node, journal in enumerate(journals):
            journal.trainer_lost(board(node, step=40 + node), 1, "")
        clock.now_s += 10.0
        for node, journal in enumerate(journals):
            source = "peer" if node == lost else "memory"
            journal.resumed(back(node, step=30, source=source, restore_s=1.0, term=term))
    assert len(failures(tmp_path)) == 16
    first, second = RunDirectory(tmp_path).failures()
    assert (first.kind, first.node, first.source, first.term) == ("node", 5, "peer", 2)
    assert (first.step, first.lost_steps, second.kind) == (47, 17, "process")
    assert first.exposure_s == pytest.approx(90.0)
    text = (tmp_path / "failures.jsonl").read_text()
    history = own_log.read(text, where="log", nodes=8)
    assert [incident.kind for incident in history.incidents] == ["node", "process"]
    assert sum(one.job_s for one in history.exposures) == pytest.approx(2 * 90.0)
    rates = estimate_rates((first, second), nodes=8)
    assert (rates.per_node.events, rates.per_job.events) == (1, 1)


def test_the_first_start_is_no_failure(tmp_path: Path, clock: Clock) -> None:
    """Nothing was lost."""
    journal = EventRecorder(str(tmp_path), 0)
    journal.resumed(
        TrainerResumed(rank=0, term=1, generation=None, step=0, source="", bytes=0, restore_s=0.0)
    )
    assert failures(tmp_path) == []
    assert [type(e).__name__ for e in events(tmp_path)] == []


def test_a_resume_on_purpose_is_told_and_is_no_failure(tmp_path: Path, clock: Clock) -> None:
    """A run continued the next day was not interrupted."""
    journal = EventRecorder(str(tmp_path), 0)
    journal.resumed(back(source="disk"))
    assert failures(tmp_path) == []
    assert [type(e).__name__ for e in events(tmp_path)] == ["Restored"]


def test_a_trainer_without_a_board_is_lost_all_the_same(tmp_path: Path, clock: Clock) -> None:
    """It died before its first step: no exposure, no pace, no division by zero."""
    journal = EventRecorder(str(tmp_path), 0)
    journal.trainer_lost(RankMemory(rank=0), 5, "")
    journal.resumed(back(step=0))
    (record,) = failures(tmp_path)
    assert (record.step, record.exposure_s, record.lost_steps, record.lost_s) == (0, 0.0, 0, 0.0)


def rank_file(path: Path, *events: dict[str, Any] | str) -> None:
    """Telemetry that a trainer left."""
    (path / "telemetry").mkdir(exist_ok=True)
    lines = [event if isinstance(event, str) else json.dumps(event) for event in events]
    (path / "telemetry" / "rank-00000.jsonl").write_text("\n".join(lines))


def read_bytes() -> int:
    """Bytes that this process has read so far."""
    return int(Path("/proc/self/io").read_text().split()[1])


STARTED = {"event": "RunStarted", "at_s": 1.0, "rank": 0}
STEPPED = {"event": "IterationsTimed", "at_s": 5.0, "rank": 0, "step": 12}


def test_a_keeper_is_born_into_an_outage_that_nobody_saw(tmp_path: Path) -> None:
    """Trainer and keeper died together: the telemetry without an end says so."""
    rank_file(tmp_path, STARTED, STEPPED)
    journal = EventRecorder(str(tmp_path), 0)
    assert journal.outage is not None
    assert (journal.outage.step, journal.outage.exposure_s) == (12, 4.0)
    journal.resumed(back(step=10, source="disk"))
    (record,) = failures(tmp_path)
    assert (record.what, record.lost_steps) == ("keeper+trainer", 2)


@pytest.mark.parametrize("lives", [1, 2])
@pytest.mark.parametrize("is_old", [False, True], ids=["days", "weeks"])
def test_a_keeper_listens_soon_however_long_the_training_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lives: int, is_old: bool
) -> None:
    """It reads the end of each file, and seeks the beginning of one life: at most so far back."""
    seconds, ranks = 50_000, 8
    steps = (
        json.dumps({**STEPPED, "at_s": 10.0 + at / 100, "step": 2 * at, "count": 2}) + "\n"
        for at in range(seconds)
    )
    text = json.dumps({**STARTED, "at_s": 5.0}) + "\n" + "".join(steps)
    if lives == 2:
        ended = json.dumps({"event": "RunEnded", "at_s": 4.0, "rank": 0, "step": 1}) + "\n"
        text = json.dumps(STARTED) + "\n" + json.dumps(STEPPED) + "\n" + ended + text
    (tmp_path / "telemetry").mkdir()
    for rank in range(ranks):
        (tmp_path / "telemetry" / f"rank-{rank:05d}.jsonl").write_text(text)
    if is_old:
        monkeypatch.setattr(journal_module, "LIFE_BYTES", len(text) // 2)
    before = read_bytes()
    journal = EventRecorder(str(tmp_path), 0)
    assert read_bytes() - before < 3 * len(text)
    outage = journal.outage
    assert outage is not None
    assert outage.step == 2 * (seconds - 1)
    exposure_s = seconds / 100 * (0.5 if is_old else 1.0)
    assert outage.exposure_s == pytest.approx(exposure_s, rel=0.02)
    assert outage.steps == pytest.approx(200 * exposure_s, rel=0.02)


@pytest.mark.parametrize(
    "lines",
    [
        [],
        [STARTED, STEPPED, {"event": "RunEnded", "at_s": 6.0, "rank": 0, "step": 12}],
        [STARTED, {**STEPPED, "at_s": 1e15}],
        [STARTED],
    ],
    ids=["nothing", "ended", "another boot", "never stepped"],
)
def test_a_run_that_ended_leaves_no_outage(tmp_path: Path, lines: list[Any]) -> None:
    """Nor one of another boot, whose clock says nothing."""
    rank_file(tmp_path, *lines)
    assert EventRecorder(str(tmp_path), 0).outage is None


def test_damaged_telemetry_does_not_stop_a_keeper(tmp_path: Path) -> None:
    """Torn lines, other people's lines, links to nowhere."""
    rank_file(
        tmp_path, "{", "3", "[]", "null", "\x00", '{"event":"IterationsTimed"}',
        '{"event":"IterationsTimed","step":null,"at_s":1}',
        '{"event":"IterationsTimed","step":"x","at_s":"y"}',
        json.dumps(STARTED), json.dumps(STEPPED), '{"event":"Iterat',
    )  # fmt: skip
    (tmp_path / "telemetry" / "rank-00001.jsonl").symlink_to(tmp_path / "nowhere")
    journal = EventRecorder(str(tmp_path), 0)
    assert journal.outage is not None
    assert journal.outage.step == 12


def test_a_failure_log_that_cannot_be_written_is_told(tmp_path: Path, clock: Clock) -> None:
    """In telemetry; the training goes on."""
    (tmp_path / "failures.jsonl").mkdir()
    journal = EventRecorder(str(tmp_path), 0)
    journal.trainer_lost(board(0, step=3), 1, "")
    journal.resumed(back(step=1))
    assert [type(e).__name__ for e in events(tmp_path)][-1] == "Degraded"


def test_commits_are_told_with_their_latencies(tmp_path: Path, clock: Clock) -> None:
    """From the boundary on this node; the slowest shard's write."""
    journal = EventRecorder(str(tmp_path), 0)
    journal.snapshot_began(G, 30, 990.0)
    journal.shard_written(G, 100, 80, 1.5)
    journal.shard_written(G, 100, 70, 2.5)
    journal.memory_committed(G)
    clock.now_s += 5
    journal.durable(G)
    journal.retired(G, 30, 150)
    journal.dropped(Generation(term=1, step=31), "disk full")
    memory, durable, retired, dropped = events(tmp_path)
    assert memory.latency_s == pytest.approx(10.0)  # type: ignore[attr-defined]
    assert (durable.bytes, durable.stored_bytes, durable.write_s) == (200, 150, 2.5)  # type: ignore[attr-defined]
    assert durable.latency_s == pytest.approx(15.0)  # type: ignore[attr-defined]
    assert (retired.bytes, dropped.reason) == (150, "disk full")  # type: ignore[attr-defined]


def test_an_exception_of_the_script_is_no_evidence_about_machines(
    tmp_path: Path, clock: Clock
) -> None:
    """It is on record as what it was; the rates count the training before it, and no event."""
    journal = EventRecorder(str(tmp_path), 0)
    journal.trainer_failing(1)
    for rank in (0, 1):  # rank 0 is ended by its launcher
        journal.trainer_lost(board(rank, step=45), rank, "its connection closed")
    journal.resumed(back(step=30, source="disk"))
    (record,) = failures(tmp_path)
    assert (record.kind, record.lost_steps) == ("script", 15)
    rates = estimate_rates((record,), nodes=1)
    assert (rates.per_node.events, rates.per_job.events) == (0, 0)
    history = own_log.read((tmp_path / "failures.jsonl").read_text(), where="log", nodes=1)
    assert (history.incidents, len(history.exposures)) == ((), 1)
    assert "1 ended by an exception of the script" in history.notes[-1]
    journal.trainer_lost(board(1, step=50), 1, "killed")  # the next one is not the script's
    journal.resumed(back(1, step=45))
    assert [record.kind for record in failures(tmp_path)] == ["script", "process"]


def test_a_script_failed_before_its_keeper_died(tmp_path: Path, clock: Clock) -> None:
    """The next keeper reads it in what the trainer left."""
    failed = {"event": "TrainerFailed", "at_s": 6.0, "rank": 0, "step": 13, "error": "ValueError",
              "origin": "mistake"}  # fmt: skip
    rank_file(tmp_path, STARTED, STEPPED, failed)
    EventRecorder(str(tmp_path), 0).resumed(back(step=10, source="disk"))
    (record,) = failures(tmp_path)
    assert (record.kind, record.step, record.lost_steps) == ("script", 13, 3)


def test_without_any_checkpoint_a_living_keeper_lost_no_node(tmp_path: Path, clock: Clock) -> None:
    """Killed before its first checkpoint: from scratch, on a node that is whole."""
    journal = EventRecorder(str(tmp_path), 0)
    journal.trainer_lost(board(0, step=3), 1, "killed")
    journal.resumed(
        TrainerResumed(rank=0, term=2, generation=None, step=0, source="", bytes=0, restore_s=0.0)
    )
    assert [record.kind for record in failures(tmp_path)] == ["process"]


def test_a_start_that_discards_the_training_has_lost_no_step(tmp_path: Path, clock: Clock) -> None:
    """`--resume-from` behind a failure: the failure is on record, and the steps were left."""
    for discards, lost in ((False, 20), (True, 0)):
        journal = EventRecorder(str(tmp_path), 0)
        journal.trainer_lost(board(0, step=30), 5, "")
        journal.resumed(replace(back(step=10), discards=discards))
        told = [event for event in events(tmp_path) if isinstance(event, Restored)]
        assert (told[-1].lost_steps, told[-1].lost_s > 0) == (lost, lost > 0)
        assert failures(tmp_path)[-1].lost_steps == lost


def test_detection_restart_and_restore_are_recorded_for_every_failure(
    tmp_path: Path, clock: Clock
) -> None:
    """They add up to the outage; the estimate of the next run is measured, not assumed."""
    journal = EventRecorder(str(tmp_path), 0)
    for _ in range(2):
        journal.trainer_lost(board(0, step=30), 5, "")
        clock.now_s += 10.0
        journal.resumed(replace(back(), came_s=7.0))
    records = failures(tmp_path)
    assert [(r.detect_s, r.restart_s, r.restore_s) for r in records] == [(3.0, 5.0, 2.0)] * 2
    known = estimate_recovery(records)
    assert (known.detect.source, known.detect.value_s, known.detect.n) == ("measured", 3.0, 2)
    told = [e for e in events(tmp_path) if isinstance(e, Restored)]
    assert [e.detect_s for e in told] == [3.0, 3.0]


def test_a_way_back_that_nobody_timed_counts_as_restart(tmp_path: Path, clock: Clock) -> None:
    """As under a launcher that is not ours: nothing is assumed on top of it."""
    journal = EventRecorder(str(tmp_path), 0)
    journal.trainer_lost(board(0, step=30), 5, "")
    clock.now_s += 10.0
    journal.resumed(back())
    (record,) = failures(tmp_path)
    assert (record.detect_s, record.restart_s, record.restore_s) == (0.0, 8.0, 2.0)


@pytest.mark.parametrize("came_s", [7.0, None])
def test_the_night_until_somebody_starts_a_job_again_is_no_restart(
    tmp_path: Path, clock: Clock, came_s: float | None
) -> None:
    """What the new start took is; the promise of the next run would be worth nothing otherwise."""
    journal = EventRecorder(str(tmp_path), 0)
    journal.trainer_lost(board(0, step=30), 5, "")
    clock.now_s += 8 * 3600.0
    journal.resumed(replace(back(), came_s=came_s, begins_launch=True))
    (record,) = failures(tmp_path)
    restart_s = None if came_s is None else 5.0
    assert (record.detect_s, record.restart_s, record.restore_s) == (None, restart_s, 2.0)
    known = estimate_recovery([record])
    assert (known.detect.source, known.restart.source) == (
        "assumed", "assumed" if came_s is None else "measured"
    )  # fmt: skip
