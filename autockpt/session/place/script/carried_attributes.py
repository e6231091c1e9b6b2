"""Attributes and lists of the script that the training changes, and by which it decides something.

A trainer class counts iterations, remembers the best value, and stops early; a memory of samples
fills.  No checkpoint contains them.  Values are compared between two boundaries, so one that each
iteration begins anew is not among them.  The source tells what a changed one is for: the rules
are those for numbers (`carried_values`).
"""

import ast
import contextlib
import os
import sys
import types
from collections import deque
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from autockpt.session.place.script.carried_values import (
    MOST_SHOWN,
    TELLS,
    Function,
    Loop,
    asks_clock,
    assigned_anew,
    is_ours,
    loops_around,
    parsed,
)
from autockpt.session.place.script.frames import name_of, script_frames
from autockpt.session.place.script.objects import DEPTH, MOST_ITEMS, MOST_OBJECTS, is_own, parts

_PLAIN = (bool, int, float, str, type(None))
_GROWING = (list, deque, dict, set)
_CHANGES = frozenset(
    (
        "append", "appendleft", "extend", "insert", "add", "update", "setdefault", "pop", "popleft",
        "popitem", "remove", "discard", "clear", "sort", "reverse",
    )
)  # fmt: skip
_BEGINS = frozenset(("__init__", "__post_init__", "__new__", "setup"))
Mark = tuple[Any, ...]
Kept = Collection[tuple[int, str]]
"""(id of an object, attribute) that an attached object saves; of its own attributes "" says it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """A value of the script, as of one boundary."""

    owner: str
    """The variable in which it, or the object around it, stands."""
    name: str
    """Of the attribute, dotted from the owner; "": the variable itself."""
    key: str
    """The variable, or the attribute with a dot in front."""
    file: str
    """Of the class that has the attribute, or of the script."""
    mark: Mark

    @property
    def shown(self) -> str:
        """As the script would write it."""
        return f"{self.owner}.{self.name}" if self.name else self.owner


class CarriedAttributes:
    """Compares the values of a boundary with the values of an earlier boundary."""

    def __init__(self) -> None:
        self._outer: types.CodeType | None = None
        """Of the function with the outermost loop, and"""
        self._fresh: frozenset[str] = frozenset()
        """names that each of its iterations assigns before it reads them."""
        self._begins = _BEGINS
        """Names of functions that assign before the loop."""
        self._before: dict[str, Found] = {}
        self._judged: set[str] = set()
        self._uses: dict[str, _Uses] = {}
        """By file."""

    def look(self, frame: types.FrameType | None, kept: Kept = frozenset()) -> str:
        """A sentence about values that changed since the first look, each once; else "".

        Raises nothing.
        """
        with contextlib.suppress(Exception):
            if self._outer is None:
                self._begin(frame)
            here = {one.shown: one for one in self._found(frame, kept)}
            changed = [
                one for name, one in here.items()
                if name in self._before and self._before[name].mark != one.mark
            ]  # fmt: skip
            self._before = {**here, **self._before}
            return self._judge([one for one in changed if one.shown not in self._judged])
        return ""

    def _begin(self, frame: types.FrameType | None) -> None:
        frames = list(script_frames(frame))
        for i, each in reversed(list(enumerate(frames))):
            loops = loops_around(each)[1]
            if loops:
                self._outer = each.f_code
                self._fresh = frozenset(assigned_anew(loops[0]))
                self._begins = _BEGINS | {one.f_code.co_name for one in frames[i:]}
                return

    def _found(self, frame: types.FrameType | None, kept: Kept) -> Iterator[Found]:
        while frame is not None and frame.f_code is not self._outer:
            frame = frame.f_back
        if frame is None:
            return
        file = frame.f_code.co_filename
        fresh: Collection[str] = self._fresh
        seen: set[int] = set()
        for each in script_frames(frame):
            for name, value in list(each.f_locals.items()):
                if name not in fresh and not name.startswith("__") and not is_ours(value):
                    yield from _values(name, value, file, seen, kept)
            fresh = ()
        main = sys.modules.get("__main__")
        for name, value in list(vars(main).items()) if main is not None else []:
            if not name.startswith("__") and name not in self._fresh and not is_ours(value):
                yield from _values(name, value, file, seen, kept)

    def _judge(self, changed: list[Found]) -> str:
        named = []
        for one in changed:
            self._judged.add(one.shown)
            if one.file not in self._uses:
                self._uses[one.file] = _Uses.of(one.file, self._begins)
            uses = self._uses[one.file]
            if one.key in uses.again:
                continue
            line = (uses.handed if one.mark[0] == "many" else uses.deciding).get(one.key)
            if line is not None:
                named.append((one, line))
        return _sentence(named) if named else ""


def _sentence(named: list[tuple[Found, int]]) -> str:
    first, line = named[0]
    shown = [one.shown for one, _ in named]
    listed = ", ".join(shown if len(shown) <= MOST_SHOWN else (*shown[:MOST_SHOWN], "..."))
    is_one = len(named) == 1
    own = [one.name for one, _ in named if one.owner == first.owner and one.name]
    if own:
        names = ", ".join(f'"{name}"' for name in own[:MOST_SHOWN])
        way = f"attach(..., state=autockpt.TrainState.of({first.owner}, {names}))"
    else:
        way = (
            f"state = autockpt.TrainState({first.owner}=...), attach(..., state=state), and "
            f"state.{first.owner} instead of {first.owner}"
        )
    return (
        f"{listed} ({os.path.basename(first.file)}, line {line}) {'is' if is_one else 'are'} not "
        f"in a checkpoint, so a restart begins {'it' if is_one else 'them'} anew. To keep "
        f"{'it' if is_one else 'them'}: {way}"
    )


def _values(owner: str, root: Any, file: str, seen: set[int], kept: Kept) -> Iterator[Found]:
    """Values of a variable and of the objects in it, breadth first."""
    if type(root) in _GROWING:
        yield Found(owner=owner, name="", key=owner, file=file, mark=_mark(root) or ("many",))
    row: list[tuple[str, Any]] = [("", root)]
    for _ in range(DEPTH + 1):
        coming: list[tuple[str, Any]] = []
        for path, one in row:
            if (
                id(one) in seen
                or (id(one), "") in kept
                or len(seen) >= MOST_OBJECTS
                or is_ours(one)
            ):
                continue
            of_objects = _attributes(one)
            if of_objects:
                seen.add(id(one))
            for key, value, has_attribute in of_objects:
                name = f"{path}.{key}" if path else key
                mark = _mark(value) if has_attribute else None
                if mark is not None and (id(one), key) not in kept:
                    yield Found(
                        owner=owner, name=name, key=f".{key}", file=_file_of(one) or file, mark=mark
                    )
                coming.append((name, value))
        row = coming


def _attributes(one: Any) -> list[tuple[str, Any, bool]]:
    """(name, value, whether it is an attribute and no item) of each part."""
    if isinstance(one, torch.nn.Module):
        own = list(vars(one).items()) if is_own(type(one)) else []
        plain = [(key, v, True) for key, v in own if key[0] != "_" and key != "training"]
        children = list(one._modules.items())[:MOST_ITEMS]
        return plain + [(key, child, False) for key, child in children if child is not None]
    is_item = type(one) in (dict, list, tuple)
    return [(key, value, not is_item) for key, value in parts(one)]


def _file_of(one: Any) -> str:
    module = sys.modules.get(type(one).__module__)
    return str(getattr(module, "__file__", None) or "")


def _mark(value: Any) -> Mark | None:
    """Another one where the value has changed; None where it is not looked at."""
    if type(value) in _PLAIN:
        return ("one", type(value), value)
    if type(value) in (list, deque):
        return ("many", len(value), id(value[-1]) if value else 0)
    if type(value) is dict:
        few = list(value.items())[:MOST_ITEMS]
        return ("many", len(value), *((k, v) for k, v in few if type(v) in _PLAIN))
    return ("many", len(value)) if type(value) is set else None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Uses:
    """How the source of one file uses attributes and variables, by name."""

    deciding: Mapping[str, int]
    """Line of a use by which a number decides something."""
    handed: Mapping[str, int]
    """Line of a use of a list that does more than tell about it."""
    again: frozenset[str]
    """Assigned without a condition while the loop runs, so nothing is carried on."""

    @staticmethod
    def of(file: str, begins: Collection[str]) -> "_Uses":
        tree = parsed(file)
        deciding: dict[str, int] = {}
        handed: dict[str, int] = {}
        for node, above in _with_parents(tree):
            for name, line in _decides(node):
                deciding.setdefault(name, line)
            name = _name(node)
            if name and isinstance(getattr(node, "ctx", None), ast.Load):
                if _is_given(node, above):
                    deciding.setdefault(name, node.lineno)  # type: ignore[attr-defined]
                if not _is_told(node, above):
                    handed.setdefault(name, node.lineno)  # type: ignore[attr-defined]
        again = _assigned_again(tree, begins)
        return _Uses(deciding=deciding, handed=handed, again=frozenset(again))


def _name(node: ast.AST) -> str:
    """Of an attribute with a dot in front."""
    if isinstance(node, ast.Attribute):
        return f".{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def _called(above: tuple[ast.AST, ...]) -> Iterator[str]:
    """Names of the functions that get a node, or what is made of it."""
    return (name_of(each.func) for each in above if isinstance(each, ast.Call))


def _with_parents(tree: ast.AST) -> Iterator[tuple[ast.AST, tuple[ast.AST, ...]]]:
    """Each node with those around it, the innermost first."""
    row: list[tuple[ast.AST, tuple[ast.AST, ...]]] = [(tree, ())]
    while row:
        node, above = row.pop()
        yield node, above
        row += [(child, (node, *above)) for child in ast.iter_child_nodes(node)]


def _decides(node: ast.AST) -> Iterator[tuple[str, int]]:
    """Names that are compared as they are, or reckoned on from themselves, not by sums."""
    match node:
        case ast.Compare():
            for side in (node.left, *node.comparators):
                if _name(side):
                    yield _name(side), node.lineno
        case ast.AugAssign() if not isinstance(node.op, ast.Add) and _name(node.target):
            yield _name(node.target), node.lineno
        case ast.Assign(targets=[target], value=value) if _name(target) and not asks_clock(value):
            sums = any(isinstance(each, ast.Add) for each in ast.walk(value))
            own = any(_name(each) == _name(target) for each in ast.walk(value))
            if own and not sums:
                yield _name(target), node.lineno


def _is_given(node: ast.AST, above: tuple[ast.AST, ...]) -> bool:
    """A function other than of `SHOWS` gets the number as it is, or it is an exponent."""
    parent = above[0]
    if isinstance(parent, ast.BinOp):
        return isinstance(parent.op, ast.Pow)
    if isinstance(parent, ast.keyword):
        parent = above[1]
    is_argument = isinstance(parent, ast.Call) and node is not parent.func
    return is_argument and not any(name in TELLS for name in _called(above))


def _is_told(node: ast.AST, above: tuple[ast.AST, ...]) -> bool:
    """A list is changed or shown there, or only its size or a mean is asked for."""
    parent = above[0]
    if isinstance(parent, ast.Attribute):
        return parent.attr in _CHANGES
    if isinstance(parent, ast.Subscript) and not isinstance(parent.ctx, ast.Load):
        return True
    if isinstance(parent, ast.If | ast.While | ast.BoolOp | ast.UnaryOp | ast.JoinedStr):
        return True  # whether there are any
    return any(name in TELLS for name in _called(above))


def _assigned_again(tree: ast.AST, begins: Collection[str]) -> set[str]:
    found: set[str] = set()
    for function in [tree, *ast.walk(tree)]:
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef | ast.Module):
            runs_before = isinstance(function, ast.Module) or function.name in begins
            found |= _plainly_assigned(function, in_loop=not runs_before)
    return found


def _plainly_assigned(body: ast.AST, *, in_loop: bool) -> set[str]:
    """Attributes that are assigned there in each run, from something else than themselves."""
    found: set[str] = set()
    for node in ast.iter_child_nodes(body):
        if isinstance(node, Function | ast.ClassDef | ast.If | ast.IfExp | ast.Try | ast.Match):
            continue
        if isinstance(node, Loop):
            if isinstance(node, ast.For | ast.AsyncFor):
                found |= {_name(each) for each in _attributes_in(node.target)}
            found |= _plainly_assigned(node, in_loop=True)
        elif isinstance(node, ast.With | ast.AsyncWith):
            found |= _plainly_assigned(node, in_loop=in_loop)
        elif in_loop and isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names = {_name(each) for target in targets for each in _attributes_in(target)}
            found |= names - {_name(each) for each in _attributes_in(node.value)}
    return found


def _attributes_in(node: ast.AST) -> list[ast.Attribute]:
    return [each for each in ast.walk(node) if isinstance(each, ast.Attribute)]
