"""Whether a script reads a count only to show it: then it does not begin its loop there.

The position of the running instruction gives the expression in the source, and the source says what
becomes of it.  Where there is no source, the count may be used for anything.
"""

import ast
import contextlib
import linecache
import types
from collections.abc import Iterator

SHOWS = frozenset(
    (
        "print", "pprint", "rprint", "echo", "write", "log", "debug", "info", "warning", "warn",
        "error", "exception", "critical", "set_description", "set_postfix", "set_postfix_str",
        "add_scalar", "log_metric", "log_metrics",
    )
)  # fmt: skip
"""Names of functions and methods that show what they are given."""


def is_only_shown(frame: types.FrameType | None) -> bool:
    """True where the expression that `frame` runs is a part of a text, or given to one of `SHOWS`.

    Raises nothing.
    """
    with contextlib.suppress(Exception):
        if frame is not None:
            return any(_shows(node) for node in _around(frame))
    return False


def _around(frame: types.FrameType) -> Iterator[ast.AST]:
    """The expressions around the running one, within its statement."""
    positions = list(frame.f_code.co_positions())
    first, last, left, right = positions[frame.f_lasti // 2]
    source = "".join(linecache.getlines(frame.f_code.co_filename, frame.f_globals))
    if None in (first, last, left, right) or not source:
        return
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call | ast.JoinedStr) and _contains(node, first, left, last, right):
            yield node


def _contains(node: ast.expr, *inner: int | None) -> bool:
    first, left, last, right = inner
    begins, ends = (node.lineno, node.col_offset), (node.end_lineno, node.end_col_offset)
    is_itself = (begins, ends) == ((first, left), (last, right))
    return not is_itself and begins <= (first, left) and ends >= (last, right)


def _shows(node: ast.AST) -> bool:
    if isinstance(node, ast.JoinedStr):
        return True
    called = node.func if isinstance(node, ast.Call) else None
    name = called.id if isinstance(called, ast.Name) else getattr(called, "attr", "")
    return name in SHOWS
