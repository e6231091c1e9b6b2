"""Where a directory is mounted: an empty mount point is no place for checkpoints.

`umount` leaves an empty directory behind, on another file system.  A directory that was emptied or
made again looks the same and may be used.  The table of mounts tells them apart, without touching
a file system that may hang.
"""

import os
import re

MOUNTS = "/proc/self/mountinfo"
_OCTAL = re.compile(r"\\([0-7]{3})")


def mount_points() -> frozenset[str]:
    """Every place where a file system is mounted.  Raises OSError when the table cannot be read."""
    with open(MOUNTS, "rb") as table:
        fields = [line.split(b" ") for line in table.read().splitlines()]
    return frozenset(_unescaped(os.fsdecode(field[4])) for field in fields if len(field) > 4)


def mount_point_of(path: str) -> str:
    """The mount point above `path`, "" where the system has no table.  Raises OSError."""
    try:
        points = mount_points()
    except FileNotFoundError:
        return ""
    place = os.path.realpath(path)
    while place not in points and place != os.path.dirname(place):
        place = os.path.dirname(place)
    return place


def is_mounted(point: str) -> bool:
    """Whether something is mounted at `point`; "" is not known, and counts.  Raises OSError."""
    return not point or point in mount_points()


def _unescaped(text: str) -> str:
    return _OCTAL.sub(lambda match: chr(int(match[1], 8)), text)
