"""Two runs side by side: the better one, by how much, and the differences behind it."""

import dataclasses

import pytest

from autockpt.reports.comparison import Comparison, compare
from autockpt.reports.model import build
from autockpt.values.errors import ConfigError
from autockpt.values.record import from_json, to_json
from tests.unit.reports.examples import profile_data, run_data


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
    assert rows["lost in all"].difference == f"-{gap:.3g} points"
    assert not [row for row in said.rows if row.group in ("policy", "machine")]
    assert compare(quiet, failed).better == "quiet"


def test_differences_of_policy_and_machine_are_rows_and_a_warning() -> None:
    """Equal runs on unequal machines are called equal, with care."""
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
    assert ": they are equal. Compare with care: the machines differ (storage)." in said.verdict
    assert [
        (r.group, r.label, r.second) for r in said.rows if r.group in ("policy", "machine")
    ] == [
        ("policy", "memory.interval", "144 steps"),
        ("machine", "storage", "nfs on server"),
    ]
    assert from_json(Comparison, to_json(said), where="test") == said


def test_a_profile_cannot_be_compared() -> None:
    """It has no telemetry; the error names it."""
    with pytest.raises(ConfigError, match=r"gpt-1\.3b: has no telemetry of a training"):
        compare(build(run_data(total=720)), build(profile_data()))
