"""A published system's plan, with intervals and chunks that a test can wait for."""

from dataclasses import fields

from autockpt.policies.default_plan import plan_without_profile
from autockpt.policies.policy_file import load_policy
from autockpt.values.plan import CheckpointPlan
from tests.support import trainings


def preset_plan(name: str, *, memory: int, disk: int) -> CheckpointPlan:
    """What `builtin:NAME` does to a job that nobody has measured: its staging and its slots."""
    plan = plan_without_profile(load_policy(f"builtin:{name}").goal)
    staging = {f.name: getattr(plan.staging, f.name) for f in fields(plan.staging)}
    del staging["chunk_bytes"]
    return trainings.plan(memory=memory, disk=disk, slots=plan.slots, **staging)
