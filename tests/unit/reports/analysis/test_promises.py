"""Promised against observed: under the plan that promised, and said where they part."""

from dataclasses import replace

from autockpt.reports.analysis.promises import FEW, in_force, parted, promises
from autockpt.reports.data import RunData
from autockpt.reports.html.html import render
from autockpt.reports.model import build
from autockpt.values.plan import Staging
from autockpt.values.telemetry import IterationsTimed, PlanChanged, SnapshotSealed
from tests.unit.reports.examples import profile_data, run_data


def changed(at_s: float, version: int) -> PlanChanged:
    """All ranks follow another plan."""
    return PlanChanged(
        at_s=at_s, rank=0, plan_version=version, step=1, memory_interval_steps=1,
        disk_interval_steps=1, reason="cheaper",
    )  # fmt: skip


def test_only_what_came_after_the_change_counts() -> None:
    """From the first word of the version on; everything, for the plan that the run began with."""
    events = [changed(1.0, 2), changed(2.0, 2), changed(3.0, 3)]
    assert in_force(events, 2) == events
    assert in_force(events, 3) == events[2:]
    assert in_force(events, 1) == events


def test_stalls_of_an_earlier_plan_break_no_promise_of_a_later_one() -> None:
    """The same run, with a change of the plan after its dear half."""
    data = run_data(ranks=1)
    assert data.decision is not None
    half = data.events[len(data.events) // 2].at_s
    dear = tuple(
        replace(event, fence_stall_s=event.fence_stall_s + 60.0)
        if isinstance(event, SnapshotSealed) and event.at_s < half
        else event
        for event in data.events
    )
    version = data.decision.plan.version + 1
    plan = replace(data.decision.plan, version=version)
    marked = [event for event in dear if event.at_s < half]
    marked += [changed(half, version), *(event for event in dear if event.at_s >= half)]
    old = build(replace(data, events=dear))
    new = build(replace(data, events=tuple(marked), decision=replace(data.decision, plan=plan)))
    stalls = [
        next(promise for promise in model.promises if promise.name == "stall_s")
        for model in (old, new)
    ]
    assert stalls[0].n > stalls[1].n
    assert stalls[1].verdict in ("kept", "better")


def waiting(data: RunData) -> RunData:
    """The same under `staging.persist: sync`, with a promise that has the wait in it."""
    assert data.decision is not None
    plan = replace(data.decision.plan, staging=Staging(persist="sync"))
    expected = replace(data.decision.expected, stall_s=9.7)
    return replace(data, decision=replace(data.decision, plan=plan, expected=expected))


def test_training_that_waits_for_the_disk_is_stalled_until_durable() -> None:
    """Tile, promise, section: 9.1 s and more to durable, of which the snapshot stalls 4 ms."""
    data = waiting(run_data(ranks=1))
    model = build(data)
    assert model.saves is not None
    assert model.saves.stall == model.saves.durable
    stall = next(promise for promise in model.promises if promise.name == "stall_s")
    assert stall.verdict == "kept"
    assert next(tile for tile in model.tiles if tile.label == "Stall").value == "9.7 s"
    page = render(model)
    assert "waits until the checkpoint is durable, 9.7 s, most of it for the write." in page
    assert "Training waits 9.7 s and goes on" not in page
    assert "training waits (until durable)" in page
    assert "and goes on. The checkpoint is durable" in render(build(run_data(ranks=1)))
    measured = replace(profile_data(), decision=data.decision)
    assert "hidden under" not in render(build(measured))


def test_saves_that_training_waits_for_are_mended_by_not_waiting() -> None:
    """Lazy copies would change nothing."""
    data = run_data(ranks=1)
    dear = tuple(
        replace(event, checkpoint_s=10.0) if isinstance(event, IterationsTimed) else event
        for event in data.events
    )
    found = {f.id: f for f in build(waiting(replace(data, events=dear))).findings}
    assert "persist: async" in found["stall"].fix
    assert "until they are durable" in found["stall"].evidence


def test_each_broken_promise_is_a_warning_with_both_figures() -> None:
    """And none for those that were kept."""
    data = run_data()
    assert data.decision is not None
    expected = replace(data.decision.expected, stall_s=1e-9, persist_s=1e9)
    model = build(replace(data, decision=replace(data.decision, expected=expected)))
    warnings = parted(model.promises)
    broken = [promise for promise in model.promises if promise.verdict == "broken"]
    assert len(warnings) == len(broken) > 0
    assert any(
        text.startswith("stall per checkpoint: ") and "promised" in text for text in warnings
    )


def test_two_checkpoints_break_no_promise() -> None:
    """A run that made one checkpoint more at its end is no reason to profile again."""
    data = run_data()
    model = build(data)
    assert model.saves is not None
    assert model.saves.stall is not None
    assert model.accounting is not None
    assert data.decision is not None
    stall = replace(model.saves.stall, n=FEW - 1, p50_s=1e3)
    seen = replace(model.saves, sealed=FEW - 1, stall=stall)
    judged = promises(data.decision.expected, model.accounting, seen, (), interruptions_per_s=0.0)
    verdicts = {promise.name: promise.verdict for promise in judged}
    assert verdicts["stall_s"] == verdicts["checkpoint_waste"] == "not yet"
    assert "less than 0.01 failures were due" in next(p.note for p in judged if p.name == "waste")
