"""The user's own code among all that runs: its files, and its running frames."""

import os
import types
from collections.abc import Iterator

from autockpt.session.boundaries.loop_ahead import is_in_loop

_FOREIGN = ("site-packages", "dist-packages", os.path.dirname(os.__file__))
_OURS = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))) + os.sep


def is_script_file(file: str) -> bool:
    """No file of Python, of an installed package, or of ours."""
    path = os.path.abspath(file)
    return not path.startswith(_OURS) and not any(part in path for part in _FOREIGN)


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
    return is_script_file(frame.f_code.co_filename)
