"""A plan as flags of Megatron-LM, which writes its own checkpoints.

Names and rules follow `megatron/training`.  A checkpoint goes to storage every `--save-interval`
iterations.  Between two of them, one goes to a directory of each node, where the newest alone is
kept; its replica is `--replication-jump` ranks further on.
"""

import shlex
from typing import Any

from autockpt.console import Console
from autockpt.values.plan import CheckpointPlan
from autockpt.values.profile import Fingerprint

LOCAL_DIRECTORY = "/dev/shm/megatron-local"
"""Of each node's newest checkpoint; memory, unless the user names a disk."""


def megatron_flags(plan: CheckpointPlan, job: Fingerprint) -> list[list[str]]:
    """Flags with their values, one list for each flag, in the order of Megatron's help."""
    disk, memory = plan.tier("disk").interval_steps, plan.tier("memory").interval_steps
    flags = [["--ckpt-format", "torch_dist"]]
    if disk:
        flags.append(["--save-interval", str(disk)])
    if plan.staging.persist == "async":
        flags.append(["--async-save"])
    if not _is_local(disk, memory):
        return flags
    flags += [
        ["--non-persistent-save-interval", str(memory)],
        ["--non-persistent-ckpt-type", "local"],
        ["--non-persistent-local-ckpt-dir", LOCAL_DIRECTORY],
    ]
    if plan.redundancy.copies > 1 and not _unreplicated(plan, job):
        flags += [
            ["--replication"],
            ["--replication-jump", str(job.world_size // job.nodes)],
            ["--replication-factor", str(plan.redundancy.copies)],
        ]
    return flags


def megatron_notes(plan: CheckpointPlan, job: Fingerprint) -> list[str]:
    """Parts of the plan without a flag, and conditions of the flags, one sentence each."""
    disk, memory = plan.tier("disk").interval_steps, plan.tier("memory").interval_steps
    notes = ["set --save and --load yourself: they name the directory of the checkpoints"]
    if not disk:
        notes.append("the plan has no checkpoints on disk, so --save-interval is left out")
    if _is_local(disk, memory):
        notes.append(
            f"local checkpoints need nvidia-resiliency-ext, and room for two of them and their "
            f"replicas in {LOCAL_DIRECTORY} on each node"
        )
    scheme = plan.redundancy.scheme
    if scheme in ("xor", "rs"):
        notes.append(
            f"parity ({scheme}) between nodes has no flag: Megatron replicates or does not"
        )
    elif plan.redundancy.copies > 1 and (reason := _unreplicated(plan, job)):
        notes.append(f"{plan.redundancy.copies} copies are left out: {reason}")
    if plan.staging.schedule != "lazy":
        notes.append(f"the schedule {plan.staging.schedule!r} of snapshots has no flag")
    if any(tier.codec for tier in plan.tiers):
        notes.append("compression has no flag")
    return notes


def megatron_object(plan: CheckpointPlan, job: Fingerprint) -> dict[str, Any]:
    """The same for --json."""
    words = [word for flag in megatron_flags(plan, job) for word in flag]
    return {"megatron": {"flags": words, "notes": megatron_notes(plan, job)}}


def print_flags(console: Console, plan: CheckpointPlan, job: Fingerprint) -> None:
    """To be pasted behind the command line of a training, a flag a line; then the notes."""
    console.result("\nflags of Megatron-LM:\n")
    console.result(" \\\n".join(shlex.join(flag) for flag in megatron_flags(plan, job)))
    console.result("")
    for note in megatron_notes(plan, job):
        console.result(f"note: {note}")


def _is_local(disk: int, memory: int) -> bool:
    """There are checkpoints in memory between those on disk."""
    return bool(memory) and memory != disk


def _unreplicated(plan: CheckpointPlan, job: Fingerprint) -> str:
    """Why replicas cannot be a number of ranks further on; "": they can."""
    copies = plan.redundancy.copies
    if job.world_size % job.nodes:
        return f"{job.world_size} ranks are not the same number on each of {job.nodes} nodes"
    if job.nodes % copies:
        return f"{job.nodes} nodes do not divide into groups of {copies}"
    return ""
