"""Shard files of retired generations, kept for their blocks.

Overwriting a file's existing blocks is 1.7 times as fast as writing new ones (no extents to
convert, less journal).  Nothing has to be freed.  The files here were listed by a COMMIT that is
durably gone, so no restore can want them.  A power cut in the middle of the next write leaves a
generation without a COMMIT, which is trash under either name.  `ImageFile` checks, when it takes a
file, that no other process still reads it.
"""

import contextlib
import os
import re
import secrets

from autockpt import new_files
from autockpt.values.policy_keys.paths import is_store_url

KEPT_PER_RANK = 3
"""Where saves come faster than they are read back, as many retire at once."""
TIGHT_SHARE = 0.1
"""A disk with less free space than this share is for checkpoints, not for conveniences."""
_OURS = re.compile(r"(r\d{5,}|taken)-[0-9a-f]{12}")


def is_spare(name: str) -> bool:
    """Whether a file of `spare/` is one that we put there."""
    return bool(_OURS.fullmatch(name))


def is_tight(path: str) -> bool:
    """Whether the file system at `path` is nearly full, or does not say; never an object store."""
    if is_store_url(path):
        return False
    try:
        room = os.statvfs(path)
    except OSError:
        return True
    return room.f_bavail < TIGHT_SHARE * room.f_blocks


class ReusableFiles:
    """The folder `spare/` of a checkpoint directory.

    Taken from any thread and by the keepers of several nodes; whose rename comes first has it.
    """

    def __init__(self, directory: str) -> None:
        self._path = os.path.join(directory, "spare")
        self._has_blocks = not is_store_url(directory)
        """False in an object store: its files are not written over."""

    def keep(self, rank: int, path: str) -> bool:
        """Moves a retired file here; False when there are enough, or no room, or it cannot be."""
        try:
            if not self._has_blocks or len(self._of(rank)) >= KEPT_PER_RANK or is_tight(path):
                return False
            new_files.make_directory(self._path)
            os.rename(path, os.path.join(self._path, f"r{rank:05d}-{secrets.token_hex(6)}"))
        except OSError:
            return False
        return True

    def take(self, rank: int) -> str | None:
        """Path of a file of this rank, renamed for this writer alone; None without one."""
        for name in self._of(rank):
            mine = os.path.join(self._path, f"taken-{secrets.token_hex(6)}")
            with contextlib.suppress(OSError):
                os.rename(os.path.join(self._path, name), mine)
                return mine
        return None

    def clear(self) -> None:
        """Gives the space back: at the start and the end of a keeper, and when a disk is full.

        Files of others stay.
        """
        if not self._has_blocks:
            return
        with contextlib.suppress(OSError):
            for name in filter(is_spare, os.listdir(self._path)):
                with contextlib.suppress(OSError):
                    os.unlink(os.path.join(self._path, name))
            os.rmdir(self._path)

    def _of(self, rank: int) -> list[str]:
        if not self._has_blocks:
            return []
        try:
            return [
                name
                for name in os.listdir(self._path)
                if name.startswith(f"r{rank:05d}-") and is_spare(name)
            ]
        except OSError:
            return []
