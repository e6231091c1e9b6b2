"""Presets: each is a policy file that decides, and differs from its base by its mechanism alone."""

import json

import pytest

from autockpt.cli import app
from autockpt.policies.decide import decide
from autockpt.policies.default_plan import plan_without_profile
from autockpt.policies.policy_file import (
    diff,
    explain,
    load_policy,
    plan_from_yaml,
    plan_to_yaml,
)
from autockpt.policies.registry import preset_text, presets
from autockpt.values.goal import Goal
from autockpt.values.plan import CheckpointPlan
from autockpt.values.record import from_json, to_json
from tests.support.profiles import example_profile

SYSTEMS = (
    "sync", "async", "dlrover", "easyckpt", "baft", "datastates", "checkfreq", "pccheck",
    "fastpersist", "bytecheckpoint-pipeline", "gemini", "reft", "excp",
)  # fmt: skip

MECHANISMS = {
    ("sync", "async"): {
        "staging.persist": "async",
        "staging.in_flight": "1",
    },
    ("auto", "excp"): {
        "archive.codec": "excp-published",
        "archive.lossy": "true",
    },
    ("async", "dlrover"): {
        "memory.enabled": "true",
        "staging.preallocate": "true",
    },
    ("dlrover", "easyckpt"): {
        "staging.schedule": "lazy",
    },
    ("easyckpt", "baft"): {
        "staging.schedule": "windows",
    },
    ("sync", "datastates"): {
        "memory.slots": "2",
        "staging.schedule": "lazy",
        "staging.persist": "async",
        "staging.streaming": "true",
        "staging.preallocate": "true",
    },
    ("async", "checkfreq"): {
        "staging.schedule": "lazy",
        "staging.device_clone": "auto",
        "limits.overhead": "3.5 %",
        "rule": "checkfreq",
    },
    ("datastates", "pccheck"): {
        "memory.slots": "4",
        "disk.writers": "2",
        "staging.in_flight": "3",
    },
    ("easyckpt", "gemini"): {
        "memory.interval": "1 step",
        "disk.interval": "3 h",
        "redundancy.scheme": "replicas",
        "redundancy.copies": "2",
        "redundancy.placement": "mixed",
        "redundancy.path": "device",
    },
    ("easyckpt", "reft"): {
        "redundancy.scheme": "xor",
        "redundancy.set_size": "8",
        "redundancy.path": "host",
    },
    ("sync", "fastpersist"): {
        "disk.writers": "4",
        "disk.chunk": "32 MiB",
        "disk.direct": "true",
    },
    ("sync", "bytecheckpoint-pipeline"): {
        "memory.slots": "2",
        "staging.persist": "async",
        "staging.streaming": "true",
        "staging.preallocate": "true",
    },
}
"""What a preset sets differently from another one: its mechanism, and nothing else."""


def goal_of(name: str) -> Goal:
    return load_policy(f"builtin:{name}").goal


def plan_of(name: str) -> CheckpointPlan:
    """What the preset decides for a measured job."""
    return decide(example_profile(), goal_of(name)).plan


def test_every_system_has_its_preset() -> None:
    """The list of the documents is the list of the files."""
    assert set(presets()) == {"auto", *SYSTEMS}


@pytest.mark.parametrize(("before", "after"), MECHANISMS)
def test_a_preset_differs_from_its_base_by_its_mechanism(before: str, after: str) -> None:
    """`policy diff` is a table of exactly what an ablation compares."""
    found = diff(load_policy(f"builtin:{before}"), load_policy(f"builtin:{after}"))
    assert {one.path: one.after for one in found} == MECHANISMS[before, after]


@pytest.mark.parametrize("name", SYSTEMS)
def test_a_preset_says_what_it_switches_on_and_what_not(name: str) -> None:
    """The comment above the keys, not the name, says what of the system is here."""
    comment = preset_text(name).split("version:")[0]
    assert "Here:" in comment
    assert "Not here:" in comment.replace("Not\n# here:", "Not here:")


@pytest.mark.parametrize("name", sorted(presets()))
def test_a_preset_decides_with_and_without_a_profile(name: str) -> None:
    """Pins hold in both plans, and every choice has its reason."""
    goal = goal_of(name)
    decision = decide(example_profile(), goal)
    unmeasured = plan_without_profile(goal)
    for pin, value in (
        ("schedule", goal.pins.schedule), ("persist", goal.pins.persist),
        ("streaming", goal.pins.streaming), ("preallocate", goal.pins.preallocate),
        ("writers", goal.pins.writers), ("direct_io", goal.pins.direct_io),
        ("chunk_bytes", goal.pins.chunk_bytes), ("in_flight", goal.pins.in_flight),
        ("device_clone", goal.pins.device_clone),
    ):  # fmt: skip
        for plan in (decision.plan, unmeasured):
            assert value is None or getattr(plan.staging, pin) == value, pin
    assert all(choice.reason for choice in decision.choices)


@pytest.mark.parametrize("name", sorted(presets()))
def test_a_preset_survives_its_files(name: str) -> None:
    """goal.json and plan.yaml come back as they went."""
    goal = goal_of(name)
    assert from_json(Goal, to_json(goal)) == goal
    decision = decide(example_profile(), goal)
    text = plan_to_yaml(decision)
    assert plan_from_yaml(text) == decision
    assert plan_to_yaml(plan_from_yaml(text)) == text


@pytest.mark.parametrize("name", sorted(presets()))
def test_a_preset_is_checked_and_explained_by_the_command(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """`policy check` has nothing to say; `policy explain` names the file of every value."""
    assert app.run(["policy", "check", f"builtin:{name}", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["ok"] is True
    assert app.run(["policy", "explain", f"builtin:{name}"]) == 0
    assert f"builtin:{name}:" in capsys.readouterr().out


def test_explain_leads_to_the_file_that_pins_a_value() -> None:
    """What a preset inherits stands in its base."""
    text = explain(load_policy("builtin:easyckpt"), "staging")
    rows = {line.split()[0]: line.split()[1:] for line in text.splitlines()}
    assert rows["staging.schedule"][1].startswith("builtin:easyckpt:")
    assert rows["staging.preallocate"][1].startswith("builtin:dlrover:")
    assert rows["staging.persist"][1].startswith("builtin:async:")
    assert rows["staging.streaming"][1].startswith("builtin:sync:")
    assert rows["staging.path"] == ["auto", "default"]


def test_a_file_gives_back_what_the_base_pins() -> None:
    """`auto` in a file that extends a preset leaves writers and O_DIRECT to the profile again."""
    policy = load_policy("builtin:datastates", settings=["disk.writers=auto", "disk.direct=auto"])
    staging = decide(example_profile(), policy.goal).plan.staging
    assert (staging.writers, staging.direct_io) == (2, True)
    assert staging.streaming


def test_slots_follow_what_is_in_flight() -> None:
    """PCcheck's N + 1; DLRover keeps a sealed image beside; one in flight needs two."""
    assert (plan_of("pccheck").slots, plan_of("pccheck").staging.in_flight) == (4, 3)
    assert (plan_of("dlrover").slots, plan_of("dlrover").staging.in_flight) == (3, 1)
    assert (plan_of("async").slots, plan_of("async").staging.in_flight) == (2, 1)
    assert plan_of("auto").staging.in_flight == 0
