"""The user's own code among all that runs: its files, its running frames, and its uses of a count.

The position of the running instruction gives the expression in the source, and the source says what
becomes of it.  Where there is no source, a count that is read may be used for anything.
"""

import ast
import contextlib
import functools
import linecache
import os
import sys
import types
from collections.abc import Iterator
from pathlib import Path

from autockpt.session.boundaries.loop_ahead import is_in_loop

_FOREIGN = ("site-packages", "dist-packages", os.path.dirname(os.__file__))
_OURS = str(Path(__file__).resolve().parents[3]) + os.sep
SHOWS = frozenset(
    (
        "print", "pprint", "rprint", "echo", "write", "log", "debug", "info", "warning", "warn",
        "error", "exception", "critical", "set_description", "set_postfix", "set_postfix_str",
        "add_scalar", "log_metric", "log_metrics",
    )
)  # fmt: skip
"""Names of functions and methods that show what they are given."""
CONVERTS = frozenset(("str", "repr", "int", "float", "round", "format", "dict"))
"""Names of functions that only give a value another form."""


def is_script_file(file: str) -> bool:
    """No file of Python, of an installed package, or of ours."""
    path = os.path.abspath(file)
    if path.startswith(_OURS) or any(part in path for part in _FOREIGN):
        return False
    # sys.path[0] is the script's own folder.
    around = [root for root in sys.path[1:] if root and path.startswith(os.path.join(root, ""))]
    root = max(around, key=len, default="")
    return not root or root == sys.path[0] or not _has_packages(root)


@functools.lru_cache(maxsize=64)
def _has_packages(folder: str) -> bool:
    """pip has installed into it, as `pip install --target` does."""
    with contextlib.suppress(OSError):
        return any(name.endswith(".dist-info") for name in os.listdir(folder))
    return False


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


def is_only_shown(frame: types.FrameType | None) -> bool:
    """True where one of `SHOWS` gets the expression that `frame` runs, as it is or in a text.

    Another function may begin there with it.  Raises nothing.
    """
    with contextlib.suppress(Exception):
        if frame is not None:
            names = [name for name in _calls_around(frame) if name not in CONVERTS]
            return bool(names) and names[0] in SHOWS
    return False


def _calls_around(frame: types.FrameType) -> list[str]:
    """Names of the functions that get the running expression, the innermost one first."""
    first, last, left, right = list(frame.f_code.co_positions())[frame.f_lasti // 2]
    source = "".join(linecache.getlines(frame.f_code.co_filename, frame.f_globals))
    if first is None or last is None or left is None or right is None:
        return []
    inner = (first, left), (last, right)
    found = [
        (node.lineno, node.col_offset, name_of(node.func))
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Call) and _is_argument(node, *inner)
    ]
    return [name for _, _, name in sorted(found, reverse=True)]


def _is_argument(call: ast.Call, begin: tuple[int, int], end: tuple[int, int]) -> bool:
    parts = [*call.args, *(keyword.value for keyword in call.keywords)]
    return any(
        (part.lineno, part.col_offset) <= begin
        and end <= (part.end_lineno or 0, part.end_col_offset or 0)
        for part in parts
    )


def name_of(called: ast.expr) -> str:
    """The function's or the method's; "" of another expression."""
    return called.id if isinstance(called, ast.Name) else str(getattr(called, "attr", ""))
