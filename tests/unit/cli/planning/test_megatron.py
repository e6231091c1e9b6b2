"""Flags of Megatron-LM that a plan becomes."""

from dataclasses import replace
from pathlib import Path

import pytest

from autockpt.cli.planning.megatron import LOCAL_DIRECTORY, megatron_flags, megatron_notes
from autockpt.values.plan import CheckpointPlan, Staging, TierPlan
from autockpt.values.profile import Fingerprint
from autockpt.values.record import to_json
from autockpt.values.redundancy import Redundancy
from tests.support.profiles import example_profile
from tests.unit.cli.shared.test_commands import object_of, text_of

REAL = {
    "--ckpt-format", "--save-interval", "--async-save", "--non-persistent-save-interval",
    "--non-persistent-ckpt-type", "--non-persistent-local-ckpt-dir", "--replication",
    "--replication-jump", "--replication-factor",
}  # fmt: skip
"""As megatron/training/arguments.py and its config classes name them."""


def plan_of(memory: int, disk: int, **changes: object) -> CheckpointPlan:
    """With these intervals, 0: off."""
    tiers = (
        TierPlan(tier="memory", interval_steps=memory),
        TierPlan(tier="disk", interval_steps=disk),
    )
    plan = CheckpointPlan(plan_id="plan-1", version=1, fingerprint="", tiers=tiers)
    return replace(plan, **changes)  # type: ignore[arg-type]


def job_of(world_size: int, nodes: int) -> Fingerprint:
    """The example's machine at another scale."""
    return replace(example_profile().fingerprint, world_size=world_size, nodes=nodes)


def test_two_tiers_are_a_local_checkpoint_between_those_on_storage() -> None:
    """Each flag with its value."""
    flags = megatron_flags(plan_of(10, 200), job_of(8, 1))
    assert flags == [
        ["--ckpt-format", "torch_dist"],
        ["--save-interval", "200"],
        ["--async-save"],
        ["--non-persistent-save-interval", "10"],
        ["--non-persistent-ckpt-type", "local"],
        ["--non-persistent-local-ckpt-dir", LOCAL_DIRECTORY],
    ]
    assert {flag[0] for flag in flags} <= REAL


def test_copies_are_replicas_on_the_next_nodes() -> None:
    """The jump is the ranks of a node."""
    copies = Redundancy(scheme="replicas", copies=2)
    flags = megatron_flags(plan_of(10, 200, redundancy=copies), job_of(32, 4))
    assert flags[-3:] == [
        ["--replication"],
        ["--replication-jump", "8"],
        ["--replication-factor", "2"],
    ]
    assert {flag[0] for flag in flags} <= REAL


@pytest.mark.parametrize(("world", "nodes"), [(24, 3), (30, 4)])
def test_copies_that_megatron_cannot_place_are_left_out_and_said(world: int, nodes: int) -> None:
    """Three nodes in pairs; nodes of unequal size."""
    plan = plan_of(10, 200, redundancy=Redundancy(scheme="replicas", copies=2))
    assert ["--replication"] not in megatron_flags(plan, job_of(world, nodes))
    assert any(
        "2 copies are left out" in note for note in megatron_notes(plan, job_of(world, nodes))
    )


def test_a_plan_without_memory_or_async_has_neither_flag() -> None:
    """Where each snapshot goes to disk there is nothing between."""
    for plan in (plan_of(0, 50), plan_of(50, 50)):
        names = [flag[0] for flag in megatron_flags(plan, job_of(8, 1))]
        assert names == ["--ckpt-format", "--save-interval", "--async-save"]
    waits = plan_of(0, 50, staging=Staging(persist="sync", schedule="blocking"))
    assert ["--async-save"] not in megatron_flags(waits, job_of(8, 1))
    assert any("'blocking'" in note for note in megatron_notes(waits, job_of(8, 1)))


def test_the_command_prints_them(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Behind the decision, and in its JSON object."""
    path = tmp_path / "profile.json"
    path.write_text(to_json(example_profile()))
    words = ("plan", "--profile", str(path), "--for", "megatron")
    assert "--save-interval" in text_of(capsys, *words)
    assert "--save-interval" in object_of(capsys, *words)["megatron"]["flags"]
