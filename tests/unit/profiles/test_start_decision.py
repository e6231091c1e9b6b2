"""The plan of a start: profile, goal and all logs, before the first iteration."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from autockpt.cli.shared.plan_choice import decide_now
from autockpt.executors.storage.event_log import events_in
from autockpt.policies.decide import decide
from autockpt.profiling.facts import last_life
from autockpt.profiling.facts.failure_history import failure_evidence
from autockpt.profiling.facts.last_life import unrecorded_failure
from autockpt.profiling.facts.start_decision import (
    Start,
    decide_start,
    read_memory,
    with_evidence,
    write_memory,
)
from autockpt.run_directory import RunDirectory
from autockpt.tuner.online.controller import Controller
from autockpt.tuner.online.proposals import intervals_of
from autockpt.tuner.online.recording import RecordedController, replay
from autockpt.values.failure import FailureRecord
from autockpt.values.goal import Goal, Pins
from autockpt.values.plan import CheckpointPlan
from autockpt.values.profile import Profile
from autockpt.values.telemetry import (
    CheckpointDurable,
    Event,
    IterationsTimed,
    SnapshotBegan,
    SnapshotSealed,
)
from tests.support.profiles import example_profile

AUTO = Goal()


def failed(run: RunDirectory, step: int, *, exposure_s: float, lost: int, term: int = 0) -> None:
    run.append_failure(
        FailureRecord(
            wall=f"2026-01-01T00:00:{term:02d}Z", kind="process", what="trainer", node=0,
            step=step, exposure_s=exposure_s, lost_steps=lost, term=term, source="memory",
            restart_s=8.0, restore_s=0.1,
        )
    )  # fmt: skip


def planned(profile: Profile, goal: Goal = AUTO) -> CheckpointPlan:
    return decide(profile, goal).plan


def wrote(run: RunDirectory, name: str, *events: dict[str, Any]) -> None:
    text = "".join(json.dumps(event) + "\n" for event in events)
    (run.telemetry / name).write_text(text)


def test_six_failures_half_an_hour_apart_give_the_plan_of_decide(tmp_path: Path) -> None:
    """Nothing dwells: the next process has the intervals that `autockpt plan` would give."""
    run, profile = RunDirectory.create(tmp_path / "runs" / "a"), example_profile()
    before = planned(profile)
    for number in range(1, 7):
        failed(run, 1000 * number, exposure_s=1800.0, lost=10, term=number)
    start = decide_start(run, AUTO, before, profile, nodes=1)
    known = failure_evidence(str(run.path), nodes=1)
    wanted = intervals_of(planned(with_evidence(profile, known)))
    assert intervals_of(start.plan) == wanted
    assert wanted[1] < intervals_of(before)[1] / 2
    assert start.plan.version == before.version + 1
    assert "failures come every" in (start.proposal.reason if start.proposal else "")


def test_a_plan_that_stays_is_promised_anew_before_a_run_too(tmp_path: Path) -> None:
    """`autockpt run --dry-run` tells what rank 0 will write down."""
    run, profile = RunDirectory.create(tmp_path / "runs" / "a"), example_profile()
    pinned = Goal(pins=Pins(disk_interval_steps=500, memory_interval_steps=100))
    first = decide(profile, pinned)
    run.write_decision(first, plan_text="")
    assert decide_now(run, profile, pinned, nodes=1).decision.expected == first.expected
    for number in range(1, 4):
        failed(run, 1000 * number, exposure_s=1800.0, lost=10, term=number)
    again = decide_now(run, profile, pinned, nodes=1)
    assert (again.new, again.change) == (False, "")
    assert again.decision.plan == first.plan
    assert again.decision.expected.waste > 2 * first.expected.waste
    assert again.decision.inputs is not None
    assert again.decision.inputs.recovery.restart.n == 3


def test_without_failures_the_plan_stays(tmp_path: Path) -> None:
    """The decision of the profile is that of the first start."""
    run, profile = RunDirectory.create(tmp_path / "a"), example_profile()
    assert decide_start(run, AUTO, planned(profile), profile, nodes=1).proposal is None


def test_three_deaths_without_progress_are_answered_within_a_third_of_a_life(
    tmp_path: Path,
) -> None:
    """Also where a declared failure rate would have it otherwise, and where nothing is measured."""
    run, profile = RunDirectory.create(tmp_path / "a"), example_profile()
    for number, steps in enumerate((90, 60, 120), start=1):
        failed(run, steps, exposure_s=steps * 0.2, lost=steps, term=number)
    declared = replace(AUTO, failures=replace(AUTO.failures, mtbf_s=30 * 86400.0))
    for measured in (profile, None):
        plan = planned(profile, declared)
        start = decide_start(run, declared, plan, measured, nodes=1)
        assert 1 <= start.plan.tier("disk").interval_steps <= 20
        assert start.plan.snapshot_interval_steps <= 20
        assert start.proposal is not None
    assert "3 starts in a row ended before a checkpoint" in start.proposal.reason


def test_what_the_user_pinned_stays_and_an_observing_policy_only_looks(tmp_path: Path) -> None:
    """A pin is no guess of ours, and `retune: observe` changes nothing."""
    run, profile = RunDirectory.create(tmp_path / "a"), example_profile()
    for number in range(1, 5):
        failed(run, 60, exposure_s=12.0, lost=60, term=number)
    pinned = Goal(pins=Pins(disk_interval_steps=500))
    start = decide_start(run, pinned, planned(profile, pinned), profile, nodes=1)
    assert start.plan.tier("disk").interval_steps == 500
    looking = Goal(pins=Pins(retune="observe"))
    plan = planned(profile, looking)
    start = decide_start(run, looking, plan, profile, nodes=1)
    assert start.proposal is not None
    assert start.plan == plan


def test_the_failure_before_this_start_counts_though_no_keeper_has_written_it(
    tmp_path: Path,
) -> None:
    """Its keeper does so when the training is back; a run that ended well had none."""
    run = RunDirectory.create(tmp_path / "a")
    started = {"event": "RunStarted", "at_s": 10.0, "rank": 0, "term": 1}
    first = {"event": "FirstIterationEnded", "at_s": 10.2, "rank": 0, "step": 1}
    block = {"event": "IterationsTimed", "at_s": 40.0, "rank": 0, "step": 150, "total_s": 30.0,
             "checkpoint_s": 0.0}  # fmt: skip
    died = {"event": "FailureObserved", "at_s": 40.1, "rank": -1, "what": "trainer"}
    wrote(run, "rank-00000.jsonl", started, first, block)
    wrote(run, "keeper-000.jsonl", died)
    found = failure_evidence(str(run.path), nodes=1, starting=True)
    assert [(life.steps, life.kept) for life in found.lives] == [(150, False)]
    assert found.rates.per_job.events == 1
    assert failure_evidence(str(run.path), nodes=1).lives == ()

    failed(run, 150, exposure_s=30.0, lost=150, term=2)
    assert len(failure_evidence(str(run.path), nodes=1, starting=True).lives) == 1

    run = RunDirectory.create(tmp_path / "b")
    wrote(run, "rank-00000.jsonl", started, first, block, {"event": "RunEnded", "at_s": 41.0})
    assert failure_evidence(str(run.path), nodes=1, starting=True).lives == ()


@pytest.mark.parametrize("piece_bytes", [300, 301, 333, 2**20])
def test_a_long_last_life_is_read_at_its_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, piece_bytes: int
) -> None:
    """Wherever the pieces of the file are cut, and with few bytes parsed."""
    monkeypatch.setattr(last_life, "PIECE_BYTES", piece_bytes)
    parsed = [0]

    def counted(text: bytes) -> Iterator[dict[str, Any]]:
        parsed[0] += len(text)
        return events_in(text)

    monkeypatch.setattr(last_life, "events_in", counted)
    run = RunDirectory.create(tmp_path / "a")
    started = {"event": "RunStarted", "at_s": 10.0, "rank": 0, "term": 4}
    first = {"event": "FirstIterationEnded", "at_s": 10.2, "rank": 0, "step": 1}
    block = {"event": "IterationsTimed", "at_s": 40.0, "rank": 0, "step": 70}
    newest = {"event": "IterationsTimed", "at_s": 900.0, "rank": 0, "step": 150}
    older = {"event": "RunStarted", "at_s": 1.0, "rank": 0, "term": 1}
    lines = [older, *[block] * 30, started, first, *[block] * 100, newest]
    wrote(run, "rank-00000.jsonl", *lines)
    found = unrecorded_failure(run)
    assert found is not None
    assert (found.term, found.step, found.exposure_s, found.lost_steps) == (5, 150, 890.0, 150)
    assert parsed[0] < 4 * piece_bytes or piece_bytes == 2**20


def test_a_committed_step_of_the_last_life_is_progress(tmp_path: Path) -> None:
    """From memory, where a keeper lived to see the trainer die; else only from disk."""
    started = {"event": "RunStarted", "at_s": 10.0, "rank": 0, "term": 1}
    block = {"event": "IterationsTimed", "at_s": 40.0, "rank": 0, "step": 150}
    first = {"event": "FirstIterationEnded", "at_s": 10.2, "rank": 0, "step": 1}
    memory = {"event": "MemoryCommitted", "at_s": 30.0, "rank": -1, "step": 100}
    died = {"event": "FailureObserved", "at_s": 40.1, "rank": -1, "what": "trainer"}
    for name, events, kept in (("a", [memory, died], True), ("b", [memory], False)):
        run = RunDirectory.create(tmp_path / name / "run")
        wrote(run, "rank-00000.jsonl", started, first, block)
        wrote(run, "keeper-000.jsonl", *events)
        (life,) = failure_evidence(str(run.path), nodes=1, starting=True).lives
        assert life.kept is kept


def told(stall_s: float, persist_s: float, *, saves: int, begin_s: float) -> list[Event]:
    """The events of a process that saves every ten iterations of 0.2 s."""
    events: list[Event] = []
    for number in range(saves):
        at_s, name = begin_s + 2.0 * number, f"e1s{number}"
        events += [
            SnapshotBegan(at_s=at_s, rank=0, generation=name, step=10, tiers="memory+disk"),
            SnapshotSealed(at_s=at_s + 0.3, rank=0, generation=name, step=10, bytes=1,
                           boundary_stall_s=stall_s, fence_stall_s=0.0, copy_s=0.1),
            CheckpointDurable(at_s=at_s + 0.5, rank=-1, generation=name, step=10, bytes=0,
                             stored_bytes=0, latency_s=persist_s, write_s=0.0),
            IterationsTimed(at_s=at_s + 1.0, rank=0, step=10, count=5, total_s=1.0,
                     checkpoint_s=0.0,
                     quiet_s=0.2, busy_s=0.0),
        ]  # fmt: skip
    return events


def test_windows_survive_a_restart(tmp_path: Path) -> None:
    """What the dead process has seen of costs decides the next plan; its times are forgotten."""
    run, profile = RunDirectory.create(tmp_path / "a"), example_profile()
    plan = planned(profile)
    first = decide_start(run, AUTO, plan, profile, nodes=1)
    controller = Controller(first.memory, goal=AUTO)
    for event in told(50 * profile.iteration_s.p50, 0.5, saves=6, begin_s=1000.0):
        controller.observe(event)
    write_memory(run, controller.memory)
    for number in range(1, 7):
        failed(run, 1000 * number, exposure_s=1800.0, lost=10, term=number)
    kept = read_memory(run)
    assert kept is not None
    assert kept.seen.stall.n == 6
    start = decide_start(run, AUTO, plan, profile, nodes=1)
    assert start.memory.seen.stall.samples == controller.seen.stall.samples
    assert start.memory.seen.first_s is None
    assert start.memory.seen.saving == {}
    blind = decide_start(RunDirectory.create(tmp_path / "b"), AUTO, plan, profile, nodes=1,
                         evidence=failure_evidence(str(run.path), nodes=1))  # fmt: skip
    assert start.plan.tier("memory").interval_steps > 2 * blind.plan.tier("memory").interval_steps

    (run.controller / "memory.json").write_text('{"plan": ')
    assert read_memory(run) is None


def test_the_decision_of_a_start_replays_byte_for_byte(tmp_path: Path) -> None:
    """It is the first question of a recording."""
    run, profile = RunDirectory.create(tmp_path / "a"), example_profile()
    for number in range(1, 5):
        failed(run, 60, exposure_s=12.0, lost=60, term=number)
    start: Start = decide_start(run, AUTO, planned(profile), profile, nodes=1)
    lines: list[dict[str, Any]] = []

    def write(line: dict[str, Any]) -> bool:
        lines.append(json.loads(json.dumps(line)))
        return False

    recorded = RecordedController(Controller(start.memory, goal=AUTO), write)
    assert recorded.start() == start.proposal
    played = replay([("a", lines)])
    assert played.difference is None
    assert played.proposals == (start.proposal,)


def test_a_declared_mtbf_that_the_log_contradicts_is_said_and_outweighed(tmp_path: Path) -> None:
    """Nine failures in some minutes against eight hours; one failure, or a rate that may be, do
    not."""
    profile = example_profile()
    declared = replace(AUTO, failures=replace(AUTO.failures, mtbf_s=8 * 3600.0))
    steps = {}
    for count, exposure_s in ((9, 30.0), (1, 30.0), (3, 7 * 3600.0)):
        run = RunDirectory.create(tmp_path / f"{count}" / "a")
        for number in range(1, count + 1):
            failed(run, 1000 * number, exposure_s=exposure_s, lost=10, term=number)
        known = with_evidence(profile, failure_evidence(str(run.path), nodes=1))
        decision = decide(known, declared)
        said = [text for text in decision.warnings if "failures.mtbf says 8 h" in text]
        assert bool(said) is (count == 9)
        assert not said or "9 failures on record" in said[0]
        steps[count] = decision.plan.tier("disk").interval_steps
    assert steps[9] < steps[1] / 5
    assert steps[1] == steps[3]
