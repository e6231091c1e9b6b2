"""Is there room for the checkpoints: on disk for the plan's, in memory for the smallest?

The shortage is reported before the first one is written.
"""

import os
from collections.abc import Callable

from autockpt.executors.image.layout.room import smallest_window
from autockpt.executors.linux.memory import Headroom, headroom
from autockpt.values.plan import CheckpointPlan
from autockpt.values.policy_keys.paths import is_store_url
from autockpt.values.units import format_bytes


def look_for_room(
    checkpoints: str, *, state_bytes: int, kept: int, say: Callable[[str], None]
) -> None:
    """Compare the free room with the plan's need; the storage may hang.

    `state_bytes`: of all ranks; `kept`: checkpoints that retention keeps.
    """
    if is_store_url(checkpoints):
        return  # it has no end
    try:
        disk = os.statvfs(checkpoints)
        stored = _stored_bytes(checkpoints)
    except OSError:
        return  # the first save says it
    free = disk.f_bavail * disk.f_frsize
    text = shortage(
        checkpoints, free_bytes=free, stored_bytes=stored, state_bytes=state_bytes, kept=kept
    )
    if text:
        say(text)


def shortage(
    checkpoints: str, *, free_bytes: int, stored_bytes: int, state_bytes: int, kept: int
) -> str:
    """Return the shortage in words; "" where all fits.

    The next checkpoint is written before an older one goes; the stored ones already count as room.
    """
    needed = (max(1, kept) + 1) * state_bytes
    if needed <= free_bytes + stored_bytes:
        return ""
    return (
        f"{checkpoints}: {format_bytes(free_bytes)} free and {format_bytes(stored_bytes)} stored, "
        f"expected {format_bytes(needed)} for {max(1, kept)} checkpoints of "
        f"{format_bytes(state_bytes)} and the one being written; free space, lower keep.last, or "
        "name another disk.path"
    )


def _stored_bytes(checkpoints: str) -> int:
    """Of generations that are there.  Raises OSError."""
    total = 0
    for entry in os.scandir(checkpoints):
        if entry.name.startswith("ckpt-") and entry.is_dir(follow_symlinks=False):
            files = os.scandir(entry.path)
            total += sum(file.stat(follow_symlinks=False).st_size for file in files)
    return total


def lack_of_memory(
    plan: CheckpointPlan, *, state_bytes: int, ranks: int, limit_bytes: int | None,
    left: Headroom | None = None,
) -> str:  # fmt: skip
    """Why not even the least checkpoint of `plan` fits beside the training, "" where one may.

    `state_bytes`: the least bytes of a rank; `ranks`: of this node; `limit_bytes`: of the node,
    from the policy.
    """
    if not plan.snapshot_interval_steps:
        return ""
    window = smallest_window(plan.staging.chunk_bytes)[0]
    least = ranks * (min(window, state_bytes) if plan.tier("disk").interval_steps else state_bytes)
    left = left or headroom()
    available = max(0, left.beside_reserve())
    missing = least - available
    needs = f"the least checkpoint of {ranks} rank{'s' * (ranks > 1)} needs {format_bytes(least)}"
    if limit_bytes is not None and limit_bytes < min(least, available):
        return (
            f"{needs} of host memory, the policy allows {format_bytes(limit_bytes)}: "
            f"{format_bytes(least - limit_bytes)} are missing; raise limits.host_memory"
        )
    if missing <= 0:
        return ""
    return (
        f"{needs} of host memory, and {left.binding} has {format_bytes(left.available_bytes)} "
        f"left, of which {format_bytes(available)} may be taken: {format_bytes(missing)} are "
        "missing; free them, or raise that limit"
    )


def refusal(lack: str) -> str:
    """Return the message of `autockpt run` about a training that it does not begin."""
    return (
        f"no checkpoint of this training can be made: {lack}. To train without any, start the "
        "script without `autockpt run`"
    )
