"""Two runs side by side: the better one, by how much, and the differences behind it."""

import dataclasses

import pytest

from autockpt.reports.comparison import Comparison, compare
from autockpt.reports.model import build
from autockpt.values.errors import ConfigError
from autockpt.values.record import from_json, to_json
from autockpt.values.telemetry import RunStarted
from tests.unit.reports.analysis.test_ending import block, data, durable, ended, raised, started
from tests.unit.reports.examples import profile_data, run_data

SETTINGS = ("job", "machine", "software")
"""Groups of rows that no policy decides."""


def test_the_run_with_less_loss_is_better_and_the_failures_are_named() -> None:
    """One run has two failures, the other none; every figure is the report's own."""
    failed = build(run_data())
    quiet = build(dataclasses.replace(run_data(total=2880), title="quiet"))
    said = compare(failed, quiet)
    assert (said.names, said.better) == (("gpt-1.3b", "quiet"), "quiet")
    assert failed.accounting is not None
    assert quiet.accounting is not None
    gap = (failed.accounting.waste - quiet.accounting.waste) * 100
    assert f"quiet is better by {gap:.3g} points." in said.verdict
    assert "The failures differ (2 and 0), which no policy decides." in said.verdict
    assert "the machines differ" not in said.verdict
    rows = {row.label: row for row in said.rows}
    assert (rows["failures"].first, rows["failures"].second) == ("2", "0")
    assert rows["lost after start-up"].difference == f"-{gap:.3g} points"
    assert not [row for row in said.rows if row.group in ("policy", *SETTINGS)]
    assert "of its time after start-up to checkpoints and failures" in said.verdict
    assert "The ends differ" not in said.verdict
    assert compare(quiet, failed).better == "quiet"


def test_differences_of_policy_and_machine_are_rows_and_a_warning() -> None:
    """Of runs on unequal machines that lost the same neither is better, with care."""
    one = build(run_data(total=1440))
    assert one.profile is not None
    assert one.decision is not None
    mark = dataclasses.replace(one.profile.fingerprint, storage="nfs on server")
    choices = tuple(
        dataclasses.replace(c, chosen="144 steps") if c.name == "memory.interval" else c
        for c in one.decision.choices
    )
    other = dataclasses.replace(
        one, title="other", profile=dataclasses.replace(one.profile, fingerprint=mark),
        decision=dataclasses.replace(one.decision, choices=choices),
    )  # fmt: skip
    said = compare(one, other)
    assert said.better == ""
    assert (
        ": they differ by less than 0.1 points. Compare with care: the machines differ (storage)."
        in said.verdict
    )
    assert [
        (r.group, r.label, r.second) for r in said.rows if r.group in ("policy", *SETTINGS)
    ] == [
        ("policy", "memory.interval", "144 steps"),
        ("machine", "storage", "nfs on server"),
    ]
    assert from_json(Comparison, to_json(said), where="test") == said


def test_a_profile_cannot_be_compared() -> None:
    """It has no telemetry; the error names it."""
    with pytest.raises(ConfigError, match=r"gpt-1\.3b: has no telemetry of a training"):
        compare(build(run_data(total=720)), build(profile_data()))


def test_the_failure_that_ended_a_run_counts_and_the_ends_are_told() -> None:
    """Nothing came back from it, so no restore tells it."""
    well = data(started(0), block(50, 100, 100), durable(50.1, 100), ended(50.2, 100, "finished"),
                state="finished", exit_code=0)  # fmt: skip
    badly = data(started(0), block(40, 80, 80), durable(40.1, 80), block(45, 90, 10),
                 raised(45.1, 90, "ValueError"), state="failed", exit_code=1)  # fmt: skip
    said = compare(*(
        build(dataclasses.replace(run, title=title))
        for run, title in ((well, "well"), (badly, "badly"))
    ))  # fmt: skip
    rows = {row.label: row for row in said.rows}
    assert (rows["failures"].first, rows["failures"].second) == ("0", "1")
    assert (rows["steps lost"].first, rows["steps lost"].second) == ("0", "10")
    assert said.better == "well"
    assert "The ends differ (finished and failed)." in said.verdict
    assert "The failures differ (0 and 1)" in said.verdict


def test_a_run_that_trained_nothing_is_not_compared() -> None:
    """It lost nothing, which makes it no better one."""
    nothing = build(dataclasses.replace(data(started(0), ended(5, 0, "signal")), title="nothing"))
    with pytest.raises(ConfigError, match=r"nothing: has no telemetry of a training"):
        compare(build(run_data(total=720)), nothing)


def test_another_job_is_a_difference_without_any_profile() -> None:
    """Command, ranks and state come from the run itself; a machine of which one run tells nothing
    is no difference."""
    one = dataclasses.replace(run_data(total=720), profile=None)
    other = dataclasses.replace(
        one, title="other", command="autockpt run other.py",
        events=tuple(
            dataclasses.replace(e, world_size=4, state_bytes=50_000_000_000)
            if isinstance(e, RunStarted) else e for e in one.events
        ),
    )  # fmt: skip
    said = compare(build(one), build(other))
    assert [row.label for row in said.rows if row.group == "job"] == ["command", "ranks", "state"]
    assert "Compare with care: the settings differ (command, ranks, state)." in said.verdict
    profiled = compare(build(run_data(total=720)), build(one))
    assert not [row for row in profiled.rows if row.group in SETTINGS]
