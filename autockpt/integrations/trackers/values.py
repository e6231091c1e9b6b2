"""Choose the numbers of an event for a chart, and their step."""

from collections.abc import Mapping

from autockpt.values import telemetry as t

_FIELDS: Mapping[type[t.Event], Mapping[str, str]] = {
    t.SnapshotSealed: {
        "snapshot_bytes": "bytes", "snapshot_copy_s": "copy_s", "fence_stall_s": "fence_stall_s",
        "boundary_stall_s": "boundary_stall_s",
    },
    t.CheckpointDurable: {
        "durable_latency_s": "latency_s", "durable_bytes": "stored_bytes", "write_s": "write_s",
    },
    t.Restored: {
        "lost_steps": "lost_steps", "lost_s": "lost_s", "down_s": "down_s",
        "restore_s": "restore_s",
    },
    t.PlanChanged: {
        "memory_interval_steps": "memory_interval_steps",
        "disk_interval_steps": "disk_interval_steps",
    },
}  # fmt: skip
"""By event: name in a chart -> field."""


def charted(event: t.Event) -> tuple[int, dict[str, float]] | None:
    """(step, values by name) of an event of rank 0, or of a keeper; None for all others."""
    if event.rank > 0:
        return None
    if isinstance(event, t.IterationsTimed):
        return event.step, {
            "iteration_s": event.total_s / event.count,
            "checkpoint_stall_s": event.checkpoint_s / event.count,
        }
    fields = _FIELDS.get(type(event))
    if fields is None:
        return None
    values = {name: float(getattr(event, field)) for name, field in fields.items()}
    return int(getattr(event, "step")), values  # noqa: B009


OF_A_RESUME = (t.Restored,)
"""Events of a resume, and not of the step that it goes on from: two may have the same step."""
