"""Whether the script will still enter a loop of ours: read from the code that runs now.

With `attach` alone an iteration ends with an optimizer's step.  A script with a loop of ours may
step before it as well (a learning rate finder, a sanity check).  Those steps are not iterations of
the loop.  The code of the frames on the stack shows it: a call of the session's `steps`, `batches`
or `step` stands behind the running line.  A step without such a call is counted as with `attach`
alone, and taken back when the loop begins.
"""

import contextlib
import dis
import types
from collections.abc import Iterator, Mapping, Set
from typing import Any

LOOPS = frozenset({"steps", "batches", "step"})
"""Methods of a session that begin a loop of ours, or end an iteration of one."""
NAMED_LOOPS = frozenset({"steps", "batches"})
"""Methods that a script enters as a loop."""
DEPTH = 3
"""Functions that call functions, in which a loop is looked for."""


def is_loop_ahead(
    session: object,
    frame: types.FrameType | None,
    wanted: Set[str] = LOOPS,
    *,
    in_attach: bool = False,
) -> bool:
    """True when a frame from `frame` outwards goes on to use one of `wanted` of `session`.

    `in_attach`: the script has no session yet; it will keep it as the call's result.
    Raises nothing.
    """
    kept: set[str] = set()
    with contextlib.suppress(Exception):
        while frame is not None:
            if not frame.f_globals.get("__name__", "").startswith("autockpt."):
                known = {**frame.f_globals, **frame.f_locals}
                if in_attach:
                    kept |= set(_results_of(frame.f_code, frame.f_lasti))
                names = kept if in_attach else frozenset(_names_of(session, known))
                if names and _calls(frame.f_code, names, wanted, known, frame.f_lasti, DEPTH):
                    return True
            frame = frame.f_back
    return False


def is_in_loop(frame: types.FrameType | None) -> bool:
    """True where `frame` runs the body of a loop.  Raises nothing."""
    with contextlib.suppress(Exception):
        if frame is not None:
            return any(
                "JUMP" in instruction.opname
                and isinstance(instruction.argval, int)
                and instruction.argval <= frame.f_lasti < instruction.offset
                for instruction in dis.get_instructions(frame.f_code)
            )
    return False


def _names_of(session: object, known: Mapping[str, Any]) -> Iterator[str]:
    """Variables, and attributes of objects in variables, that are the session."""
    for name, value in known.items():
        if value is session:
            yield name
        elif not isinstance(value, type | types.ModuleType):
            kept = getattr(value, "__dict__", None)
            if isinstance(kept, dict):
                yield from (str(key) for key, item in list(kept.items()) if item is session)


def _results_of(code: types.CodeType, behind: int) -> Iterator[str]:
    """Variables and attributes that take the result of the call at the offset `behind`."""
    left = 1
    for instruction in dis.get_instructions(code):
        if instruction.offset <= behind:
            continue
        value = instruction.argval
        if instruction.opname.startswith("UNPACK_"):
            left += int(value) - 1
        elif instruction.opname.startswith("STORE_"):
            names = value if isinstance(value, tuple) else (str(value),)
            yield from names
            left -= len(names)
        elif not instruction.opname.startswith("LOAD_"):
            return
        if left <= 0:
            return


def _calls(
    code: types.CodeType,
    names: Set[str],
    wanted: Set[str],
    known: Mapping[str, Any],
    behind: int,
    depth: int,
) -> bool:
    """Behind the offset `behind` the code uses one of `wanted` of `names`, or calls what does."""
    former: Any = None
    for instruction in dis.get_instructions(code):
        value = instruction.argval
        if instruction.offset > behind and instruction.opname.startswith("LOAD_"):
            if value in wanted and former in names:
                return True
            inner = _function(known, former, value) if depth else None
            if inner is not None and inner.__code__ is not code:
                found = inner.__globals__
                if _calls(inner.__code__, names, wanted, found, -1, depth - 1):
                    return True
        former = value[-1] if isinstance(value, tuple) and value else value
    return False


def _function(known: Mapping[str, Any], owner: Any, name: Any) -> types.FunctionType | None:
    """A function of the script by its name, or a method of one of its objects."""
    if not isinstance(name, str):
        return None
    found = known.get(name)
    if found is None and isinstance(owner, str) and owner in known:
        found = getattr(type(known[owner]), name, None)
    return found if isinstance(found, types.FunctionType) else None
