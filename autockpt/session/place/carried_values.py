"""Values that a script's loop carries from one iteration to the next, beside the attached state.

A loop may fetch a batch ahead, or hand a hidden state on.  A checkpoint does not contain them, so
the iteration behind a restart uses the values from before the loop.  The source of the running
loops shows them: a name that is read before it is assigned, and is given to a model.
"""

import ast
import contextlib
import inspect
import linecache
import os
import types
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from autockpt.session.place.script_frames import script_frames

_MOST_ITEMS = 50
"""Items of a list or dict that are looked at for tensors."""

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
            "the iteration, or attach an object that keeps "
            f"{'it' if is_one else 'them'}, with state_dict() and load_state_dict()"
        )


def carried_values(frame: types.FrameType | None) -> CarriedValues | None:
    """Of the innermost script's loop around `frame` that has any.  Raises nothing."""
    with contextlib.suppress(Exception):
        for each in script_frames(frame):
            for found in _in_frame(each):
                return found
    return None


def _in_frame(frame: types.FrameType) -> Iterator[CarriedValues]:
    file, line = frame.f_code.co_filename, frame.f_lineno
    tree = ast.parse("".join(linecache.getlines(file, frame.f_globals)))
    scope = _scope(tree, frame.f_code)
    if scope is None:
        return
    known = {**frame.f_globals, **frame.f_locals}
    for loop in _own(scope):
        if not isinstance(loop, Loop) or not loop.lineno <= line <= (loop.end_lineno or 0):
            continue
        carried = {
            name: at
            for name, at in _assigned_late(loop).items()
            if _has_tensor(known.get(name)) and name in _given_to_models(loop, known)
        }
        if carried:
            names = tuple(sorted(carried, key=lambda name: (carried[name], name)))
            yield CarriedValues(names, file, carried[names[0]])


def _scope(tree: ast.Module, code: types.CodeType) -> ast.AST | None:
    if code.co_name == "<module>":
        return tree
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name == code.co_name:
            first = min([node.lineno, *(each.lineno for each in node.decorator_list)])
            if first == code.co_firstlineno:
                return node
    return None


def _own(node: ast.AST) -> Iterator[ast.AST]:
    """What stands in a node without the functions and classes in it, in the order of the source."""
    for child in ast.iter_child_nodes(node):
        yield child
        if not isinstance(child, Function | ast.ClassDef):
            yield from _own(child)


def _assigned_late(loop: Loop) -> dict[str, int]:
    """Names that an iteration reads before it assigns them: name -> line of the assignment."""
    read: set[str] = set()
    found: dict[str, int] = {}
    assigned: set[str] = set()
    for name, line, stores in _uses(loop):
        if not stores:
            read.add(name)
        elif name not in assigned:
            assigned.add(name)
            if name in read:
                found[name] = line
    return found


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
    for call in _own(loop):
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
