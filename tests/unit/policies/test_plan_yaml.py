"""plan.yaml: readable, commented with reasons, and the same bytes on a round trip."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autockpt.policies.decide import decide
from autockpt.policies.policy_file import plan_from_yaml, plan_to_yaml
from autockpt.values.errors import ConfigError
from autockpt.values.goal import Goal, Limits
from tests.support.profiles import example_failures, example_profile, example_storage


@settings(max_examples=20, deadline=None)
@given(st.floats(min_value=60.0, max_value=1e7), st.floats(min_value=0.05, max_value=4.0))
def test_round_trip_gives_the_same_decision_and_bytes(mtbf_s, gb_per_s):
    """For decisions with and without codecs, bindings and warnings."""
    profile = example_profile(
        failures=example_failures(mtbf_s=mtbf_s), storage=example_storage(peak_gb_per_s=gb_per_s)
    )
    decision = decide(profile, Goal(limits=Limits(overhead=0.02)))
    text = plan_to_yaml(decision)
    assert plan_from_yaml(text) == decision
    assert plan_to_yaml(plan_from_yaml(text)) == text


def test_values_carry_their_reasons():
    """The comment above the disk interval is the reason of its choice."""
    text = plan_to_yaml(decide(example_profile(), Goal()))
    lines = text.splitlines()
    tier = lines.index('    - tier: "disk"')
    assert lines[tier + 1].startswith("      # disk.interval = ")
    assert "chunk_bytes: 8388608  # 8 MiB" in text
    assert all(len(line) <= 100 for line in lines if line.lstrip().startswith("#"))


def test_quotes_and_colons_survive():
    """Reasons are free text."""
    decision = decide(example_profile(command='train.py --name "a: b" # c'), Goal())
    assert plan_from_yaml(plan_to_yaml(decision)) == decision


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("interval_steps: ", "interval_stepz: "), "unknown field 'interval_stepz'"),
        (("schema_version: 1", "schema_version: 9"), "schema_version 9"),
        (("plan:", "plan: ]"), "plan.yaml:5:7: error: not valid YAML"),
    ],
)
def test_a_damaged_plan_is_refused_with_its_place(change, message):
    """File, line or field."""
    text = plan_to_yaml(decide(example_profile(), Goal()))
    with pytest.raises(ConfigError, match=message):
        plan_from_yaml(text.replace(*change, 1))
