"""The running frames of the user's own code."""

import os
import types
from collections.abc import Iterator

from autockpt.session.boundaries.loop_ahead import is_in_loop

_FOREIGN = ("site-packages", "dist-packages", os.path.dirname(os.__file__))


def script_frames(frame: types.FrameType | None) -> Iterator[types.FrameType]:
    """From `frame` outwards, without frames of installed packages; the innermost first."""
    while frame is not None:
        name, file = str(frame.f_globals.get("__name__", "")), frame.f_code.co_filename
        if name.split(".")[0] != "autockpt" and not any(part in file for part in _FOREIGN):
            yield frame
        frame = frame.f_back


def is_within_loop(frame: types.FrameType | None) -> bool:
    """One of the script's functions from `frame` outwards runs the body of a loop."""
    return any(is_in_loop(each) for each in script_frames(frame))
