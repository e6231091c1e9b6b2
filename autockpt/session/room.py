"""Is there room for the checkpoints that the plan keeps?  Said before the first one is written."""

import os
import threading
from collections.abc import Callable

from autockpt.values.units import format_bytes


def look_for_room(
    checkpoints: str, *, state_bytes: int, kept: int, say: Callable[[str], None]
) -> threading.Thread:
    """Compares what is free with what the plan needs, on a thread: the storage may hang.

    `state_bytes`: of all ranks; `kept`: checkpoints that retention keeps.
    """

    def look() -> None:
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

    thread = threading.Thread(target=look, name="autockpt-room", daemon=True)
    thread.start()
    return thread


def shortage(
    checkpoints: str, *, free_bytes: int, stored_bytes: int, state_bytes: int, kept: int
) -> str:
    """What is missing, in words; "" where all fits.

    The next checkpoint is written before an older one goes; what is stored already counts as room.
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
        if entry.name.startswith("gen-") and entry.is_dir(follow_symlinks=False):
            files = os.scandir(entry.path)
            total += sum(file.stat(follow_symlinks=False).st_size for file in files)
    return total
