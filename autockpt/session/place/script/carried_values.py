"""Values that a script's loops carry from one iteration to the next, beside the attached state.

A loop may fetch a batch ahead, or hand a hidden state on.  A checkpoint does not contain them, so
the iteration behind a restart uses the values from before the loop.  The source of the running
loops shows them: a name that is read before it is assigned, and is given to a model.

Numbers are carried in the same way: a best accuracy, a patience, a rate that is divided by hand.
One that is compared, or multiplied on, decides something.  One that is only summed up is for show.
"""

import ast
import contextlib
import functools
import inspect
import linecache
import os
import types
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from autockpt.executors.state.data.epoch_loader import EpochLoader
from autockpt.session.place.script.frames import CONVERTS, SHOWS, name_of, script_frames

MOST_SHOWN = 4
"""Names in one notice."""
_MOST_ITEMS = 50
"""Items of a list or dict that are looked at for tensors."""

_CLOCKS = frozenset(("time", "monotonic", "perf_counter", "process_time", "time_ns", "now"))
"""Names of functions that give the time: a number of the process, not of the training."""

REDUCES = frozenset(
    (
        "len", "sum", "fsum", "mean", "fmean", "median", "std", "stdev", "average", "max", "min",
        "array", "tensor", "plot", "dump", "dumps", "save", "savetxt", "to_csv", "DataFrame",
    )
)  # fmt: skip
"""Names of functions that tell about values, or write them down."""
TELLS = SHOWS | CONVERTS | REDUCES | {"range", "enumerate", "append", "time"}

Function = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
Loop = ast.For | ast.AsyncFor | ast.While


@dataclass(frozen=True, slots=True)
class CarriedValues:
    """Names of one loop."""

    names: tuple[str, ...]
    file: str
    line: int
    """Where the loop assigns the first of them."""

    @property
    def warning(self) -> str:
        """For the user."""
        these, is_one = " and ".join(self.names), len(self.names) == 1
        return (
            f"the loop carries {these} from one iteration to the next "
            f"({os.path.basename(self.file)}, line {self.line}), and a checkpoint does not contain "
            f"{'it' if is_one else 'them'}: the first iteration after a restart takes what the "
            f"script assigns before its loop, so it differs. Assign {these} at the beginning of "
            f"the iteration, or keep {'it' if is_one else 'them'} in an autockpt.TrainState "
            "(docs/howto/loops.md)"
        )


@dataclass(frozen=True, slots=True)
class CarriedNumbers(CarriedValues):
    """Numbers of one or more loops, by which the script decides something."""

    @property
    def notice(self) -> str:
        """For the user."""
        shown = self.names if len(self.names) <= MOST_SHOWN else (*self.names[:MOST_SHOWN], "...")
        first, is_one = self.names[0], len(self.names) == 1
        return (
            f"{', '.join(shown)} ({os.path.basename(self.file)}, line {self.line}) "
            f"{'is' if is_one else 'are'} not in a checkpoint, so a restart begins "
            f"{'it' if is_one else 'them'} anew. To keep a value: state = autockpt.TrainState("
            f"{first}=...), attach(..., state=state), and state.{first} instead of {first}"
        )


def carried_numbers(frame: types.FrameType | None) -> CarriedNumbers | None:
    """Of all loops of the script around `frame`, the innermost first.  Raises nothing."""
    found: dict[str, tuple[str, int]] = {}
    with contextlib.suppress(Exception):
        for each in script_frames(frame):
            for name, line in _numbers_in(each).items():
                found.setdefault(name, (each.f_code.co_filename, line))
    if not found:
        return None
    return CarriedNumbers(tuple(found), *next(iter(found.values())))


def counted_batches(frame: types.FrameType | None) -> str:
    """A sentence where a loop around `frame` counts batches of a loader of ours from 0, or takes a
    fixed number of them; else "".

    A number that is only shown does not matter.  Raises nothing.
    """
    with contextlib.suppress(Exception):
        for each in script_frames(frame):
            known = {**each.f_globals, **each.f_locals}
            for loop in loops_around(each)[1]:
                place = f"({os.path.basename(each.f_code.co_filename)}, line {loop.lineno})"
                if advice := _fixed_number(loop, known):
                    return (
                        f"the loop {place} takes a fixed number of batches, also in the rest of an "
                        f"epoch behind a restart. For the number of then: {advice}"
                    )
                counter, first = _counter(loop, known)
                if first and counter in _used(loop):
                    return (
                        f"{counter} {place} counts the batches of an epoch from 0, also in the "
                        "rest of an epoch behind a restart. To go on with the number of then: "
                        f"enumerate(loader, {first})"
                    )
    return ""


def _fixed_number(loop: Loop, known: Mapping[str, Any]) -> str:
    """The iterable for a rest of an epoch, in a loop over `islice(loader, n)`, or over a `range`
    whose body takes `next` of a pass."""
    match loop:
        case ast.For(iter=ast.Call(func=called, args=[ast.Name(id=name), most])):
            first = _first_batch(known.get(name))
            if name_of(called) == "islice" and first:
                return f"islice(loader, {ast.unparse(most)} - {first})"
        case ast.For(iter=ast.Call(func=ast.Name(id="range"), args=[most])):
            loops = (one for one in own_nodes(loop) if isinstance(one, Loop))
            inner = {id(node) for one in loops for node in ast.walk(one)}
            calls = (one for one in own_nodes(loop) if isinstance(one, ast.Call))
            for call in (one for one in calls if id(one) not in inner):
                taken = call.args[0] if name_of(call.func) == "next" and call.args else None
                iterator = known.get(taken.id) if isinstance(taken, ast.Name) else None
                if getattr(iterator, "gi_code", None) in _PASSES:
                    return f"range(loader.first_batch, {ast.unparse(most)})"
    return ""


_PASSES = tuple(
    one.__code__ for one in vars(EpochLoader).values()
    if inspect.isgeneratorfunction(one)
)  # fmt: skip
"""Code of the iterators that loaders of ours make."""


def _counter(loop: Loop, known: Mapping[str, Any]) -> tuple[str, str]:
    """(its name, an expression for its start) in `for name, batch in enumerate(...)` over a loader
    of ours."""
    match loop:
        case ast.For(
            target=ast.Tuple(elts=[ast.Name(id=name), *_]),
            iter=ast.Call(func=ast.Name(id="enumerate"), args=[counted], keywords=[]),
        ):
            for each in _names(counted):
                if first := _first_batch(known.get(each.id)):
                    return name, first
    return "", ""


def _first_batch(loader: Any) -> str:
    """The expression for the number of its first batch; "" for no loader of ours.

    A framework's loader that stays in use has one of ours inside: its adapter knows the number.
    """
    inside = [type(one) for one in getattr(loader, "__dict__", {}).values()]
    if inspect.getattr_static(type(loader), "first_batch", None) is not None:
        return "loader.first_batch" if is_ours(loader) else ""
    return "ckpt.first_batch" if EpochLoader in inside else ""


def _used(loop: Loop) -> set[str]:
    """Names that a loop reads for more than to show them."""
    read = (one for one in _outside(SHOWS, loop.body) if isinstance(one, ast.Name))
    return {name.id for name in read if isinstance(name.ctx, ast.Load)}


def _outside(calls: Collection[str], body: Iterable[ast.AST]) -> Iterator[ast.AST]:
    """The nodes of `body`, but for these calls, texts, and functions and classes in it."""
    row = list(body)
    while row:
        node = row.pop()
        if isinstance(node, ast.Call) and name_of(node.func) in calls:
            continue
        yield node
        if not isinstance(node, ast.JoinedStr | Function | ast.ClassDef):
            row += ast.iter_child_nodes(node)


def carried_values(frame: types.FrameType | None) -> CarriedValues | None:
    """Of the innermost script's loop around `frame` that has any.  Raises nothing."""
    with contextlib.suppress(Exception):
        for each in script_frames(frame):
            for found in _in_frame(each):
                return found
    return None


def parsed(file: str, variables: dict[str, Any] | None = None) -> ast.Module:
    """The source of a file; `variables` of its module know where it is no file."""
    return _parsed("".join(linecache.getlines(file, variables)))


@functools.lru_cache(maxsize=2)
def _parsed(source: str) -> ast.Module:
    return ast.parse(source)


def loops_around(frame: types.FrameType) -> tuple[ast.AST | None, list[Loop]]:
    """The function that runs, and its loops around the running line, the outermost first."""
    line = frame.f_lineno
    scope = _scope(parsed(frame.f_code.co_filename, frame.f_globals), frame.f_code)
    loops = [] if scope is None else [one for one in own_nodes(scope) if isinstance(one, Loop)]
    return scope, [one for one in loops if one.lineno <= line <= (one.end_lineno or 0)]


def _in_frame(frame: types.FrameType) -> Iterator[CarriedValues]:
    known = {**frame.f_globals, **frame.f_locals}
    scope, loops = loops_around(frame)
    for loop in loops:
        carried = {
            name: at
            for name, at in _assigned_late(loop).items()
            if _has_tensor(known.get(name)) and name in _given_to_models(loop, known)
        }
        for name in _kept(loop, scope, known):
            carried.pop(name, None)
        if carried:
            names = tuple(sorted(carried, key=lambda name: (carried[name], name)))
            yield CarriedValues(names, frame.f_code.co_filename, carried[names[0]])


def _numbers_in(frame: types.FrameType) -> dict[str, int]:
    """Name -> line of its assignment in a loop."""
    known = {**frame.f_globals, **frame.f_locals}
    scope, loops = loops_around(frame)
    found: dict[str, int] = {}
    for loop in reversed(loops):
        deciding = _deciding(loop)
        for name, line in _assigned_late(loop).items():
            is_number = isinstance(known.get(name), bool | int | float | None)
            if name in deciding and name in known and is_number:
                found.setdefault(name, line)
    ours = _from_us(scope, known) if found and scope is not None else set()
    return {name: line for name, line in found.items() if name not in ours}


def _deciding(loop: Loop) -> set[str]:
    """Names that a test compares as they are, and names that are reckoned on from themselves.
    Names in the arguments of a function as well, unless it only shows them."""
    found: set[str] = _given(loop)
    for node in [loop, *own_nodes(loop)]:
        if isinstance(node, ast.If | ast.While | ast.IfExp):
            for test in ast.walk(node.test):
                if isinstance(test, ast.Compare):
                    sides = [test.left, *test.comparators]
                    found |= {side.id for side in sides if isinstance(side, ast.Name)}
        elif isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Name):
            if not isinstance(node.op, ast.Add):
                found.add(node.target.id)
        elif isinstance(node, ast.Assign) and len(node.targets) == 1:
            target, value = node.targets[0], node.value
            sums = any(isinstance(each, ast.Add) for each in ast.walk(value))
            if isinstance(target, ast.Name) and not sums and not asks_clock(value):
                found |= {target.id} & {name.id for name in _names(value)}
    return found - {name for node in own_nodes(loop) for name in _timed(node)}


def _given(loop: Loop) -> set[str]:
    """Names in the arguments of the loop's calls, but for calls that show or convert them."""
    calls = (one for one in _outside(TELLS, [loop]) if isinstance(one, ast.Call))
    given = (each for call in calls for each in (*call.args, *(k.value for k in call.keywords)))
    return {name.id for each in given for name in _shown_not(each)}


def _shown_not(node: ast.AST) -> Iterator[ast.Name]:
    """Names in an argument; not those in a text, and none that a remainder is taken of."""
    if isinstance(node, ast.JoinedStr | ast.Call | ast.Compare):
        return
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mod):
        return
    if isinstance(node, ast.Name):
        yield node
    for child in ast.iter_child_nodes(node):
        yield from _shown_not(child)


def _timed(node: ast.AST) -> set[str]:
    """Names that an assignment gives a time."""
    if not isinstance(node, ast.Assign) or not asks_clock(node.value):
        return set()
    return {name.id for target in node.targets for name in _names(target)}


def asks_clock(value: ast.AST) -> bool:
    attributes = (one.attr for one in ast.walk(value) if isinstance(one, ast.Attribute))
    names = (name.id for name in _names(value))
    return any(one in _CLOCKS for one in (*attributes, *names))


def _from_us(scope: ast.AST, known: Mapping[str, Any]) -> set[str]:
    """Names that the script assigns from a session or another object of ours."""
    ours = {name for name, value in known.items() if is_ours(value)}
    assigns = [one for one in own_nodes(scope) if isinstance(one, ast.Assign | ast.AnnAssign)]
    size = -1
    while size != len(ours):
        size = len(ours)
        for one in assigns:
            if one.value is not None and any(name.id in ours for name in _names(one.value)):
                targets = one.targets if isinstance(one, ast.Assign) else [one.target]
                ours |= {name.id for target in targets for name in _names(target)}
    return ours


def _kept(loop: Loop, scope: ast.AST | None, known: Mapping[str, Any]) -> set[str]:
    """Names that the loop stores in attributes of an object of ours, and that the script takes from
    the same attributes."""
    stored: dict[str, set[str]] = {}
    taken: dict[str, set[str]] = {}
    nodes = [] if scope is None else [*own_nodes(scope)]
    inside = {id(node) for node in own_nodes(loop)}
    for one in (node for node in nodes if isinstance(node, ast.Assign)):
        values = {name.id for name in _names(one.value)}
        targets = {name.id for target in one.targets for name in _names(target)}
        for attribute in _attributes_of_ours(one.value, known):
            taken.setdefault(attribute, set()).update(targets)
        if id(one) in inside:
            for target in one.targets:
                for attribute in _attributes_of_ours(target, known):
                    stored.setdefault(attribute, set()).update(values)
    return {
        name for attribute, names in stored.items() for name in names & taken.get(attribute, set())
    }


def _attributes_of_ours(node: ast.AST, known: Mapping[str, Any]) -> set[str]:
    """The attributes that it reads or sets, as in the source."""
    return {
        ast.unparse(one) for one in ast.walk(node)
        if isinstance(one, ast.Attribute) and is_ours(_value(one.value, known))
    }  # fmt: skip


def is_ours(value: Any) -> bool:
    module = str(getattr(type(value), "__module__", ""))
    return module.startswith("autockpt.") and not isinstance(value, types.ModuleType)


def _scope(tree: ast.Module, code: types.CodeType) -> ast.AST | None:
    if code.co_name == "<module>":
        return tree
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name == code.co_name:
            first = min([node.lineno, *(each.lineno for each in node.decorator_list)])
            if first == code.co_firstlineno:
                return node
    return None


def own_nodes(node: ast.AST) -> Iterator[ast.AST]:
    """What stands in a node without the functions and classes in it, in the order of the source."""
    for child in ast.iter_child_nodes(node):
        yield child
        if not isinstance(child, Function | ast.ClassDef):
            yield from own_nodes(child)


def assigned_anew(loop: Loop) -> set[str]:
    """Names that each iteration assigns before it reads them."""
    read: set[str] = set()
    lines: dict[str, int] = {}
    _follow([loop], set(), read, lines)
    return lines.keys() - read


def _assigned_late(loop: Loop) -> dict[str, int]:
    """Names that an iteration may read before it assigns them: name -> line of an assignment."""
    read: set[str] = set()
    lines: dict[str, int] = {}
    _follow([loop], set(), read, lines)
    return {name: line for name, line in lines.items() if name in read}


def _follow(
    body: list[ast.stmt], before: set[str], read: set[str], lines: dict[str, int]
) -> set[str]:
    """The names that are assigned behind `body`: inner loops run, and nothing is raised.

    `before`: those in front of it.  `read` gets the names that may be read unassigned, and `lines`
    the first line that assigns each name.
    """
    assigned = set(before)

    def use(node: ast.AST) -> None:
        for name, line, stores in _uses(node):
            if stores:
                lines.setdefault(name, line)
                assigned.add(name)
            elif name not in assigned:
                read.add(name)

    def follow(part: list[ast.stmt]) -> set[str]:
        return _follow(part, assigned, read, lines)

    for node in body:
        match node:
            case ast.If():
                use(node.test)
                assigned |= follow(node.body) & follow(node.orelse)
            case ast.For() | ast.AsyncFor():
                use(node.iter)
                use(node.target)
                assigned |= follow(node.body)
                assigned |= follow(node.orelse)
            case ast.While():
                use(node.test)
                assigned |= follow(node.body)
                assigned |= follow(node.orelse)
            case ast.With() | ast.AsyncWith():
                for item in node.items:
                    use(item)
                assigned |= follow(node.body)
            case ast.Try():
                for handler in node.handlers:
                    follow(handler.body)
                assigned |= follow([*node.body, *node.orelse, *node.finalbody])
            case _:
                use(node)
    return assigned


def _uses(node: ast.AST) -> Iterator[tuple[str, int, bool]]:
    """(name, line, whether it is assigned), in the order in which they happen."""
    if isinstance(node, Function | ast.ClassDef):
        return
    if isinstance(node, ast.Name):
        yield node.id, node.lineno, not isinstance(node.ctx, ast.Load)
        return
    if isinstance(node, ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp):
        own = {one.id for each in node.generators for one in _names(each.target)}
        yield from (use for part in _parts(node) for use in _uses(part) if use[0] not in own)
        return
    if isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Name):
        yield node.target.id, node.lineno, False
    for part in _parts(node):
        yield from _uses(part)


def _parts(node: ast.AST) -> list[ast.AST]:
    """The children, values before the targets that take them."""
    children = list(ast.iter_child_nodes(node))
    if isinstance(node, ast.Assign | ast.AugAssign | ast.AnnAssign | ast.NamedExpr | ast.For):
        taking = node.targets if isinstance(node, ast.Assign) else [node.target]
        value = node.iter if isinstance(node, ast.For) else node.value
        first = [] if value is None else [value]
        return [*first, *taking, *(c for c in children if c not in first and c not in taking)]
    return children


def _names(node: ast.AST) -> Iterator[ast.Name]:
    return (each for each in ast.walk(node) if isinstance(each, ast.Name))


def _given_to_models(loop: Loop, known: Mapping[str, Any]) -> set[str]:
    """Names in the arguments of calls of a module, or of calls that get a module as well."""
    found: set[str] = set()
    for call in own_nodes(loop):
        if not isinstance(call, ast.Call):
            continue
        given = [*call.args, *(each.value for each in call.keywords)]
        if any(isinstance(_value(each, known), torch.nn.Module) for each in [call.func, *given]):
            found |= {name.id for each in given for name in _names(each)}
    return found


def _value(node: ast.expr, known: Mapping[str, Any]) -> Any:
    """Of a name, or of an attribute of one; no code of the script runs for it."""
    if isinstance(node, ast.Name):
        return known.get(node.id)
    if isinstance(node, ast.Attribute):
        owner = _value(node.value, known)
        if isinstance(owner, torch.nn.Module) and node.attr in owner._modules:
            return owner._modules[node.attr]
        return inspect.getattr_static(owner, node.attr, None)
    return None


def _has_tensor(value: Any, depth: int = 2) -> bool:
    if isinstance(value, torch.nn.Parameter):
        return False
    if isinstance(value, torch.Tensor | np.ndarray):
        return True
    if depth and isinstance(value, Mapping):
        value = list(value.values())
    if depth and isinstance(value, list | tuple):
        return any(_has_tensor(one, depth - 1) for one in value[:_MOST_ITEMS])
    return False
