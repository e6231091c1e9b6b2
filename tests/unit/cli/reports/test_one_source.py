"""Each quantity has one value, on every surface of a run with two failures and a change of plan."""

import html
import json
import re
from dataclasses import replace

import pytest

from autockpt.cli.shared import plan_choice
from autockpt.cli.shared.decision_text import promise, verdict
from autockpt.cli.shared.gather import run_data
from autockpt.policies.cost_model.cost_curve import costs_of_plan
from autockpt.policies.cost_model.inputs import decided_again
from autockpt.policies.decide import decide
from autockpt.profiles.failures import estimate_rates, estimate_recovery
from autockpt.reports import model as report
from autockpt.reports.analysis.what_if import terms, waste
from autockpt.reports.data import RunData
from autockpt.reports.formats import prometheus, text
from autockpt.reports.html import html as page
from autockpt.run_directory import RunDirectory
from autockpt.tuner.online.controller import begin
from autockpt.tuner.online.outlook import Outlook
from autockpt.tuner.online.proposals import with_intervals
from autockpt.values.goal import Goal
from autockpt.values.plan import Decision
from autockpt.values.telemetry import (
    Event,
    IterationsTimed,
    PlanChanged,
    Restored,
    RunStarted,
    event_data,
)
from autockpt.values.units import format_duration, format_fraction
from tests.unit.reports.examples import a_profile, failure_records, run_events

CHANGED_AT = 7200
"""Step at which the plan changes, after both failures."""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunDirectory:
    """What such a run leaves behind: a plan that was decided again from what had happened."""
    profile, goal = a_profile(), Goal()
    records = failure_records()
    first = decide(profile, goal)
    memory = begin(
        plan=first.plan,
        failures=estimate_rates(records, nodes=profile.fingerprint.nodes),
        recovery=estimate_recovery(records),
        prior=costs_of_plan(profile, goal, first.plan),
    )
    events = started_early(blocked(told(run_events(ranks=1))))
    for event in events:
        memory.seen.observe(event)
    outlook = Outlook(seen=memory.seen, goal=goal, plan=first.plan)
    best = outlook.best()
    plan = with_intervals(first.plan, best.memory_steps, best.disk_steps)
    decided = decided_again(
        first, plan, first.choices, outlook.promised((best.memory_steps, best.disk_steps)),
        outlook.inputs(), goal,
    )  # fmt: skip
    assert format_fraction(decided.expected.waste) != format_fraction(first.expected.waste)
    directory = RunDirectory.create(tmp_path_factory.mktemp("one") / "run")
    directory.write_goal(goal)
    directory.write_profile(profile)
    plan_choice.write(directory, decided)
    for record in records:
        directory.append_failure(record)
    write(directory, sorted([*events, changed(events, decided)], key=lambda event: event.at_s))
    return directory


@pytest.fixture(scope="module")
def data(run: RunDirectory) -> RunData:
    """What a report is made of."""
    return run_data(run)


def told(events: list[Event]) -> list[Event]:
    """The ways back say how long the failures took to be noticed, as in the failure log."""
    seconds = iter(record.detect_s for record in failure_records())
    return [
        replace(event, detect_s=next(seconds)) if isinstance(event, Restored) else event
        for event in events
    ]


def blocked(events: list[Event]) -> list[Event]:
    """Each iteration boundary takes two milliseconds, also without a checkpoint."""
    return [
        replace(event, checkpoint_s=event.checkpoint_s + 2e-3 * event.count)
        if isinstance(event, IterationsTimed)
        else event
        for event in events
    ]


def started_early(events: list[Event]) -> list[Event]:
    """Five minutes pass from the start to the first iteration."""
    first = min(event.at_s for event in events)
    return [
        replace(event, at_s=event.at_s - 300.0)
        if isinstance(event, RunStarted) and event.at_s == first
        else event
        for event in events
    ]


def changed(events: list[Event], decided: Decision) -> PlanChanged:
    """The change, just after the block in which it applies."""
    memory, disk = (decided.plan.tier(name).interval_steps for name in ("memory", "disk"))
    at_s = next(e.at_s for e in events if getattr(e, "step", 0) == CHANGED_AT)
    return PlanChanged(
        at_s=at_s + 1e-3, rank=0, plan_version=decided.plan.version, step=CHANGED_AT,
        memory_interval_steps=memory, disk_interval_steps=disk, reason="decided again",
    )  # fmt: skip


def write(directory: RunDirectory, events: list[Event]) -> None:
    """The telemetry of one rank and of the keeper."""
    for name, mine in (("rank-00000", True), ("keeper-000", False)):
        lines = [json.dumps(event_data(e)) for e in events if (e.rank >= 0) is mine]
        (directory.telemetry / f"{name}.jsonl").write_text("\n".join(lines) + "\n")


def words(markup: str) -> str:
    """The text of a page, without its scripts."""
    plain = re.sub(r"(?s)<script.*?</script>|<style.*?</style>|<[^>]+>", " ", markup)
    return re.sub(r"\s+", " ", html.unescape(plain)).replace("\u202f", " ")


def test_each_quantity_has_one_value_on_all_surfaces(data: RunData) -> None:
    """The promise, the what-if, the risk, where time goes, the terminal and Prometheus agree."""
    model = report.build(data)
    decision = data.decision
    assert decision is not None
    assert decision.inputs is not None
    assert decision.current is not None
    loss = decision.expected.waste
    assert decision.inputs.boundary_s == pytest.approx(2e-3, rel=0.2)

    # The loss of the plan in force.
    assert data.what_if is not None
    assert data.risk is not None
    assert data.what_if.waste == pytest.approx(loss, rel=1e-9)
    assert waste(data.what_if.point) == pytest.approx(loss, rel=1e-9)
    assert sum(terms(data.what_if.point).values()) == pytest.approx(loss, rel=1e-9)
    assert data.risk.ways[0].promised == pytest.approx(loss, rel=1e-9)
    assert {p.name: p.promised for p in model.promises}["waste"] == loss
    shown = format_fraction(loss)
    sample = re.search(r"autockpt_expected_waste_ratio\{.*\} (\S+)", prometheus.render(model))
    assert sample is not None
    assert float(sample[1]) == loss
    assert shown in verdict(decision)
    assert shown in promise(decision.expected)[0]
    assert f"expects to lose {shown}" in model.verdict.detail
    on_page, on_terminal = words(page.render(model)), text.render(model)
    assert shown in on_page
    assert shown in " ".join(on_terminal.split())
    stale = format_fraction(decide(a_profile(), Goal()).expected.waste)
    assert stale not in on_page
    assert stale not in on_terminal

    # The habit.
    assert data.risk.ways[1].promised == pytest.approx(decision.current.waste, rel=1e-9)

    # Recovery times: measured by the two failures, and nowhere the profile's.
    recovery = decision.inputs.recovery
    assert (recovery.detect.source, recovery.detect.n) == ("measured", 2)
    noticed = recovery.detect.value_s + recovery.restart.value_s
    assert data.what_if.point["restart_s"] == pytest.approx(noticed)
    assert model.accounting is not None
    assert model.accounting.detect_s == pytest.approx(
        sum(record.detect_s or 0.0 for record in data.failures)
    )
    assert model.accounting.detect_s == pytest.approx(
        sum(restart.parts["detect"] or 0.0 for restart in model.restarts)
    )
    assert format_duration(recovery.detect.value_s) in on_page
    assert "detect 5 s" not in on_page

    # Shares of the time are of the time of the table, start-up included.
    whole_s, found = model.accounting.wall_s, {one.id: one.evidence for one in model.findings}
    assert model.accounting.other_s > 0.05 * whole_s
    for name, lost_s in (
        ("stall", model.accounting.stall_s), ("slowdown", model.accounting.slowdown_s)
    ):  # fmt: skip
        assert f"{format_fraction(lost_s / whole_s)} of the time" in found[name]

    # What was observed since the plan applies.
    seen = {p.name: p for p in model.promises}["waste"].observed
    assert seen is not None
    assert f"since it applies {format_fraction(seen)} was lost" in model.verdict.detail

    # What is no longer assumed is not called so, and the page contradicts itself nowhere.
    assert not [said for said in model.warnings if "assumed, not measured" in said]
    assert not [said for said in model.warnings if said.startswith("The what-if")]


def test_inputs_survive_the_way_through_the_file(data: RunData) -> None:
    """Costs, rates and recovery times, each with its source."""
    decision = data.decision
    assert decision is not None
    assert decision.inputs is not None
    stall = decision.inputs.costs["stall_s"]
    assert (stall.source, stall.n > 0) == ("measured", True)
    assert decision.inputs.failures.per_node.events + decision.inputs.failures.per_job.events == 2
    assert "assumed" not in {p.id for p in report.build(data).findings if not p.passed}
