"""What the report says: verdicts, promises, findings, timeline."""

import dataclasses
import re
from typing import Literal

import pytest

from autockpt.reports.analysis.promises import FACTOR
from autockpt.reports.analysis.timeline import ROWS, SPANS, timeline
from autockpt.reports.findings import CHECKS, Finding
from autockpt.reports.formats.json_out import read, render
from autockpt.reports.html import html
from autockpt.reports.model import ReportModel, build
from autockpt.values.errors import ConfigError
from autockpt.values.failure import FailureRecord, FaultyNode
from autockpt.values.generation import SCRATCH
from autockpt.values.plan import Decision
from autockpt.values.telemetry import (
    NO_SLOT,
    WITHDRAWN,
    Degraded,
    Event,
    FailureObserved,
    IterationsTimed,
    PersistFailed,
    RunStarted,
    SaveSkipped,
    SnapshotDiscarded,
    SnapshotSealed,
)
from autockpt.values.units import format_duration
from tests.unit.reports.examples import profile_data, run_data, unprotected_data


def finding(model: ReportModel, name: str) -> Finding:
    return next(f for f in model.findings if f.id == name)


def test_a_profile_says_what_to_do_and_what_it_is_worth() -> None:
    """Interval, loss before and after, saving in the user's unit, confidence with its reason."""
    verdict = build(profile_data()).verdict

    assert verdict.headline == (
        "Checkpoint to memory every 29.7 s and to disk every 2 min 28 s. "
        "Lost time falls from 3.12 % to 0.389 %."
    )
    assert "GPU-hours a day on 8 GPUs" in verdict.cost
    assert (verdict.next_step, verdict.command) == (
        "Train under this plan.",
        "autockpt run --profile runs/p/profile.json --nproc-per-node 8 train.py --lr 1e-3",
    )
    assert verdict.assumed == (
        "The plan reckons with a failure every 12 h, because none was on record."
    )
    assert (verdict.confidence, verdict.confidence_reason) == (
        "medium",
        "the failure rate is assumed",
    )


def test_a_training_that_was_begun_anew_is_reported_alone() -> None:
    """With `--fresh`: what the former one trained, lost and waited for is in no figure."""
    data = run_data(total=720)
    again: list[Event] = []
    for event in data.events:
        later = dataclasses.replace(event, at_s=event.at_s + 86_400.0)
        if isinstance(later, RunStarted):
            later = dataclasses.replace(
                later, run_id="again", wall=later.wall.replace("11-21", "11-22")
            )
            if not later.restart_count:
                later = dataclasses.replace(later, resumed=SCRATCH, discards=True)
        again.append(later)
    alone = build(dataclasses.replace(data, events=tuple(again)))
    both = build(dataclasses.replace(data, events=(*data.events, *again)))
    assert alone.accounting is not None
    assert alone.accounting == both.accounting
    names = {field.name for field in dataclasses.fields(ReportModel)}
    differ = {name for name in names if getattr(alone, name) != getattr(both, name)}
    assert differ == {"facts"}
    (said,) = set(both.facts) - set(alone.facts)
    assert "with --fresh; the training before is not counted" in said.value


def test_a_gap_of_the_telemetry_is_a_warning() -> None:
    """Figures are made of the events that are there."""
    data = run_data(total=720)
    reason = "before this one 3 events did not fit: No space left on device"
    told = Degraded(at_s=data.events[-1].at_s, rank=-1, what="telemetry", reason=reason)
    assert not any("gap" in warning for warning in build(data).warnings)
    model = build(dataclasses.replace(data, events=(*data.events, told)))
    (said,) = [warning for warning in model.warnings if "gap" in warning]
    assert said.startswith("The telemetry of the keeper has a gap")
    assert reason in said


def test_ranks_that_are_not_shown_whole_are_counted() -> None:
    """Where the logs of all ranks are too long for one report."""
    model = build(dataclasses.replace(run_data(), thinned_ranks=56))
    assert "Times of iterations and copies lack those of 56 ranks" in " ".join(model.warnings)
    assert not any("lack those of" in warning for warning in build(run_data()).warnings)


def test_a_run_tells_its_end_its_cost_and_its_losses() -> None:
    """Every figure is the accounting's, and the shares of the parts are those of the whole."""
    model = build(run_data())
    verdict = model.verdict

    assert verdict.headline == "Finished at step 9000."
    assert verdict.cost.startswith(
        "Of 66 min 3 s, 61 min 48 s (93.6 %) went into training that counts; checkpoints "
    )
    assert model.accounting is not None
    assert f"down time {format_duration(model.accounting.down_s)} (" in verdict.cost
    assert verdict.lost.startswith(
        "2 failures cost 3 min 48 s in all: 274 steps (113 s) trained again, 115 s down."
    )
    assert [label for label, _ in verdict.lines()] == ["Cost", "Lost", "Assumed", "Next"]


def test_a_run_says_when_its_copies_pass_the_caches() -> None:
    """As its trainers found it in their environment; nothing where glibc's own rule holds."""
    data = run_data()
    bound = tuple(
        dataclasses.replace(event, non_temporal_bytes=2**20)
        if isinstance(event, RunStarted)
        else event
        for event in data.events
    )
    facts = [
        {fact.label: fact.value for fact in build(dataclasses.replace(data, events=events)).facts}
        for events in (data.events, bound)
    ]
    assert "Copies" not in facts[0]
    assert facts[1]["Copies"] == "past the caches from 1.05 MB on"


def test_an_unprotected_run_is_the_worst_finding() -> None:
    """Nothing else matters before that."""
    model = build(unprotected_data())

    assert model.verdict.tone == "bad"
    assert model.findings[0].id == "unprotected"


def test_an_unprotected_run_without_telemetry_is_still_called_unprotected() -> None:
    """An untouched script may leave no event at all."""
    data = dataclasses.replace(profile_data(), protected=False)

    model = build(data)

    assert (model.kind, model.verdict.tone) == ("run", "bad")


def test_the_model_survives_json() -> None:
    """Every field comes back equal, so reports can be compared."""
    for data in (profile_data(), run_data(), unprotected_data()):
        model = build(data)
        assert read(render(model)) == model


def test_a_report_of_another_version_is_refused() -> None:
    """A reader that guesses is worse than one that says which version it needs."""
    text = render(build(profile_data())).replace('"schema_version": 1', '"schema_version": 99', 1)

    with pytest.raises(ConfigError, match="schema_version 99"):
        read(text)


def test_kept_promises_are_kept_and_luck_is_called_luck() -> None:
    """Two failures where 0.09 were expected: the waste promise is broken, and the reason told."""
    model = build(run_data())

    verdicts = {promise.name: promise.verdict for promise in model.promises}
    assert verdicts.pop("waste") == "broken"
    assert set(verdicts.values()) == {"kept"}
    assert "failures were due and" in finding(model, "promises").evidence
    assert "nothing to tune" in finding(model, "promises").fix


def test_a_run_without_failures_does_not_judge_the_loss_to_failures() -> None:
    """0.02 failures were due: a good result proves nothing."""
    model = build(run_data(total=1440))

    (waste,) = [promise for promise in model.promises if promise.name == "waste"]
    assert waste.verdict == "not yet"
    assert waste.observed is not None


def test_a_slower_disk_than_promised_is_reported() -> None:
    """The promise of the plan is compared with the run, figure by figure."""
    data = run_data(total=2880)
    assert data.decision is not None
    expected = dataclasses.replace(data.decision.expected, persist_s=9.7 / FACTOR / 1.01)
    decision = dataclasses.replace(data.decision, expected=expected)

    model = build(dataclasses.replace(data, decision=decision))

    assert finding(model, "promises").fix.startswith("profile again")
    assert "time to durable 9.7 s for" in finding(model, "promises").evidence


def test_trouble_of_each_kind_is_found() -> None:
    """Skipped, discarded and failed checkpoints each have a finding with its reason."""
    data = run_data(total=1440)
    more: list[Event] = [
        SaveSkipped(at_s=5100.0 + i, rank=0, step=i, reason="storage is slow") for i in range(9)
    ]
    more.append(SnapshotDiscarded(at_s=5200.0, rank=0, generation="a", step=1, reason="bn.mean"))
    more.append(PersistFailed(at_s=5300.0, rank=-1, generation="b", step=2, reason="disk full"))

    model = build(dataclasses.replace(data, events=(*data.events, *more)))

    found = {f.id for f in model.findings if not f.passed}
    assert {"saves-skipped", "snapshots-discarded", "persist-failed"} <= found
    assert "storage is slow" in finding(model, "saves-skipped").evidence


def test_what_was_under_way_when_a_rank_was_lost_is_no_trouble_of_the_disk() -> None:
    """It is in the table of reasons, and nobody is told to look for free space."""
    data = run_data(total=1440)
    lost = PersistFailed(at_s=5300.0, rank=-1, generation="b", step=-1, reason="rank 0 was lost")

    model = build(dataclasses.replace(data, events=(*data.events, lost)))

    assert finding(model, "persist-failed").passed
    assert model.saves is not None
    assert (model.saves.failed, model.saves.reasons["rank 0 was lost"]) == (0, 1)


@pytest.mark.parametrize("reason", [f"not due any more; {WITHDRAWN}", NO_SLOT])
def test_a_save_that_did_not_begin_is_no_failure(reason: str) -> None:
    """A new plan gives it back, or slots are full: no advice about the storage, no row."""
    data = run_data(total=1440)
    given_back = PersistFailed(
        at_s=5300.0, rank=-1, generation="b", step=-1, reason=f"rank 0: {reason}"
    )

    model = build(dataclasses.replace(data, events=(*data.events, given_back)))

    assert finding(model, "persist-failed").passed
    assert model.saves is not None
    assert given_back.reason not in model.saves.reasons
    assert model.saves.failed == 0


def test_a_run_that_measured_few_iterations_shows_its_own_mean() -> None:
    """Two blocks of the start have no spread; the accounting has all iterations."""
    data = run_data(total=1440)
    assert data.profile is not None
    few = dataclasses.replace(data.profile.iteration_s, n=2)
    profile = dataclasses.replace(data.profile, iteration_s=few)

    page = html.render(build(dataclasses.replace(data, profile=profile)))

    assert re.search(r"on average of [\d,]+ iterations", page)
    assert "p10 to p90 spans" not in page
    assert 'id="unstable"' not in page


def test_findings_have_unique_ids_and_problems_have_a_fix() -> None:
    """Ids are anchors; a problem without a next step is a complaint."""
    for data in (profile_data(), run_data(), unprotected_data()):
        found = build(data).findings
        assert len({f.id for f in found}) == len(found) <= len(CHECKS)
        assert all(f.fix for f in found if not f.passed)
        assert [f.passed for f in found] == sorted(f.passed for f in found)


def test_a_stall_under_safe_defaults_is_not_blamed_on_a_schedule() -> None:
    """They copy beside the training already, so to pin that would change nothing."""
    data = run_data()
    events = tuple(
        dataclasses.replace(e, checkpoint_s=e.total_s / 2) if isinstance(e, IterationsTimed)
        else dataclasses.replace(e, boundary_stall_s=9.0) if isinstance(e, SnapshotSealed) else e
        for e in data.events
    )  # fmt: skip
    model = build(dataclasses.replace(data, events=events, decision=None))
    found = {f.id: f for f in model.findings}
    assert "autockpt profile" in found["stall"].fix


def test_a_decision_that_disagrees_with_the_formula_is_reported() -> None:
    """The reader learns which number to trust."""
    data = profile_data()
    assert data.decision is not None
    expected = dataclasses.replace(data.decision.expected, waste=0.01)
    decision: Decision = dataclasses.replace(data.decision, expected=expected)

    model = build(dataclasses.replace(data, decision=decision))

    assert any("the decision promised 1 %" in warning for warning in model.warnings)


def test_many_ranks_are_grouped_and_spans_bounded() -> None:
    """The chart of 512 ranks has at most 64 rows and the disk."""
    timeline = build(run_data(ranks=512, total=2880)).timeline

    assert timeline is not None
    assert (timeline.ranks, timeline.ranks_per_row) == (512, 8)
    assert len(timeline.rows) == ROWS + 1
    assert timeline.every == 1
    long = build(run_data(ranks=64, total=9000)).timeline
    assert long is not None
    assert long.every > 1
    assert sum(len(f) // 2 for row in long.rows for f in row.spans.values()) <= SPANS * 1.1


def test_ranks_that_end_with_another_one_are_one_failure() -> None:
    """The chart has one mark for a failure; a keeper that is lost behind it has its own."""

    def lost(at_s: float, what: Literal["trainer", "keeper"], rank: int) -> FailureObserved:
        return FailureObserved(at_s=at_s, rank=-1, what=what, failed_rank=rank, pid=rank, step=9,
                               detail="its connection closed")  # fmt: skip

    events = [lost(5.0, "trainer", 1), lost(6.0, "trainer", 0), lost(7.0, "keeper", -1)]
    marks = timeline(events, [], 0.0).marks
    assert [(mark.at_s, mark.kind) for mark in marks] == [(5.0, "failure"), (7.0, "failure")]


def test_tiers_of_one_interval_are_named_once() -> None:
    """A plan that writes every snapshot to disk reads as one sentence."""
    data = profile_data()
    assert data.decision is not None
    tiers = tuple(dataclasses.replace(t, interval_steps=72) for t in data.decision.plan.tiers)
    plan = dataclasses.replace(data.decision.plan, tiers=tiers)
    decision = dataclasses.replace(data.decision, plan=plan)

    headline = build(dataclasses.replace(data, decision=decision)).verdict.headline

    assert headline.startswith("Checkpoint to memory and disk every 29.7 s.")


def test_a_node_that_ends_the_job_is_named() -> None:
    """With its evidence; where none stands out there is no finding."""
    guilty = FaultyNode(node=3, began=6, of=7, nodes=4, chance=5e-3)
    found = finding(build(dataclasses.replace(run_data(), faulty=guilty)), "faulty-node")
    assert (found.severity, found.passed) == ("high", False)
    assert "node 3 began 6 of the newest 7 interruptions of 4 nodes" in found.evidence
    others = build(run_data()).findings
    assert "faulty-node" not in [one.id for one in others]


def test_three_deaths_without_a_checkpoint_are_said_loudly() -> None:
    """With how long they lived; two may be chance, and one that kept something ends the row."""

    def ended(step: int, lost: int, term: int) -> FailureRecord:
        return FailureRecord(
            wall="", kind="process", what="trainer", node=0, step=step, exposure_s=step * 0.5,
            lost_steps=lost, term=term,
        )  # fmt: skip

    deaths = (ended(60, 60, 2), ended(90, 90, 3), ended(80, 80, 4), ended(90, 10, 5))
    found = finding(build(dataclasses.replace(run_data(), failures=deaths)), "no-progress")
    assert (found.severity, found.passed) == ("high", False)
    assert found.title == "3 starts in a row ended before a checkpoint"
    assert "30 s to 45 s" in found.evidence
    fewer = build(dataclasses.replace(run_data(), failures=deaths[1:]))
    assert "no-progress" not in [one.id for one in fewer.findings]
