"""The running frames of the user's own code."""

import os
import types
from collections.abc import Iterator

from autockpt.session.boundaries.loop_ahead import is_in_loop

_FOREIGN = ("site-packages", "dist-packages", os.path.dirname(os.__file__))


def script_frames(frame: types.FrameType | None) -> Iterator[types.FrameType]:
    """From `frame` outwards, without frames of installed packages; the innermost first."""
    return (each for each in _outwards(frame) if _is_script(each))


def is_within_loop(frame: types.FrameType | None) -> bool:
    """A function from `frame` outwards runs the body of a loop: the script's, or a library's that
    the script has called."""
    between: list[types.FrameType] = []
    for each in _outwards(frame):
        if not _is_script(each):
            between.append(each)
            continue
        of_file = not each.f_code.co_filename.startswith("<")
        if is_in_loop(each) or (of_file and any(is_in_loop(one) for one in between)):
            return True
        between.clear()
    return False


def _outwards(frame: types.FrameType | None) -> Iterator[types.FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def _is_script(frame: types.FrameType) -> bool:
    name, file = str(frame.f_globals.get("__name__", "")), frame.f_code.co_filename
    return name.split(".")[0] != "autockpt" and not any(part in file for part in _FOREIGN)
