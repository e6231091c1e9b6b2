"""Which two lines protect a script: read from its source, with its own names in them.

Only the syntax tree is looked at; what cannot be recognised is shown with the usual names.
"""

import ast
import os
from collections.abc import Iterator
from dataclasses import dataclass

OPTIMIZERS = frozenset(
    {
        *("SGD", "ASGD", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "SparseAdam", "Adagrad"),
        *("Adadelta", "Adafactor", "LBFGS", "Muon", "RMSprop", "Rprop", "Lion", "Sophia"),
        *("FusedAdam", "FusedLAMB", "ZeroRedundancyOptimizer"),
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Lines:
    """The two lines, and the loop that the second replaces."""

    attach: str
    loop: str
    line: int | None = None
    """Line of the loop in the source, None when it was not found."""
    replaces: str = ""
    """The loop as it stands."""


GENERIC = Lines(
    attach="ckpt = autockpt.attach(model=model, optimizer=optimizer, data=loader)",
    loop="for step, batch in ckpt.batches(total_steps):",
)


def advice(path: str) -> str:
    """What to print after a script ran that never attached."""
    name = os.path.basename(path)
    try:
        with open(path, encoding="utf-8") as file:
            lines = lines_to_add(file.read())
    except (OSError, ValueError):
        lines = GENERIC
    where = f"before the loop in line {lines.line}" if lines.line else "before the training loop"
    instead = f"instead of: {lines.replaces}" if lines.replaces else "as the training loop"
    width = max(len(lines.attach), len(lines.loop))
    return (
        f"autockpt: UNPROTECTED: {name} never called autockpt.attach, so nothing was saved.\n"
        f"autockpt: `import autockpt` and two lines protect it:\n\n"
        f"    {lines.attach:<{width}}  # {where}\n"
        f"    {lines.loop:<{width}}  # {instead}\n"
    )


def lines_to_add(source: str) -> Lines:
    """The lines for one source text.  Raises SyntaxError (a ValueError for ast) if it has none."""
    try:
        tree = ast.parse(source)
    except SyntaxError:
        return GENERIC
    names = _names(tree)
    if "optimizer" not in names:
        return GENERIC
    arguments = [f"{role}={names[role]}" for role in _ROLES if role in names]
    attach = f"ckpt = autockpt.attach({', '.join(arguments)})"
    loops = _loops_around_step(tree, names["optimizer"])
    if not loops:
        return Lines(attach=attach, loop=GENERIC.loop)
    replaced = loops[-1]
    loop = _loop(loops, names.get("data"))
    return Lines(attach=attach, loop=loop, line=loops[0].lineno, replaces=_header(replaced))


_ROLES = ("model", "optimizer", "scheduler", "data")


def _names(tree: ast.AST) -> dict[str, str]:
    """The variable that plays each role, the first of each."""
    names: dict[str, str] = {}
    for node in ast.walk(tree):
        if not (isinstance(node, ast.Assign) and isinstance(node.value, ast.Call)):
            continue
        target, called = node.targets[0], _last_name(node.value.func)
        if not isinstance(target, ast.Name | ast.Attribute):
            continue
        role = _role(called)
        if role:
            names.setdefault(role, ast.unparse(target))
        if role == "optimizer":
            model = _model_of(node.value)
            if model:
                names.setdefault("model", model)
    return names


def _role(called: str) -> str:
    if called in OPTIMIZERS:
        return "optimizer"
    if called.endswith("LR") or called in ("CosineAnnealingWarmRestarts", "get_scheduler"):
        return "scheduler"
    return "data" if called.endswith("DataLoader") else ""


def _model_of(call: ast.Call) -> str:
    """`net` of `SGD(net.parameters(), ...)`."""
    for node in ast.walk(call):
        function = node.func if isinstance(node, ast.Call) else None
        if isinstance(function, ast.Attribute) and function.attr.endswith("parameters"):
            return ast.unparse(function.value)
    return ""


def _loops_around_step(tree: ast.AST, optimizer: str) -> list[ast.For]:
    """The loops around the first `optimizer.step()`, outermost first."""
    for loops, node in _walk_with_loops(tree, []):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == f"{optimizer}.step" and loops:
            return loops
    return []


def _walk_with_loops(
    node: ast.AST, loops: list[ast.For]
) -> Iterator[tuple[list[ast.For], ast.AST]]:
    yield loops, node
    inside = [*loops, node] if isinstance(node, ast.For) else loops
    for child in ast.iter_child_nodes(node):
        yield from _walk_with_loops(child, inside)


def _loop(loops: list[ast.For], data: str | None) -> str:
    """The loop over steps or batches that stands for the two innermost ones."""
    inner, outer = loops[-1], loops[-2] if len(loops) > 1 else None
    steps = _count(inner.iter)
    if steps is not None:
        return f"for {ast.unparse(inner.target)} in ckpt.steps({steps}):"
    batch, over = _batches(inner)
    name = ast.unparse(over) if isinstance(over, ast.Name | ast.Attribute) else data or "loader"
    epochs = _count(outer.iter) if outer is not None else "1"
    total = "total_steps" if epochs is None else f"{epochs} * len({name})".removeprefix("1 * ")
    return f"for step, {batch} in ckpt.batches({total}):"


def _batches(loop: ast.For) -> tuple[str, ast.expr]:
    """What the loop calls a batch, and what it draws them from; sees through enumerate."""
    target, over = loop.target, loop.iter
    if isinstance(over, ast.Call) and _last_name(over.func) == "enumerate" and over.args:
        over = over.args[0]
        if isinstance(target, ast.Tuple) and len(target.elts) == 2:
            target = target.elts[1]
    return ast.unparse(target), over


def _count(over: ast.expr) -> str | None:
    """N of `range(N)` or `range(0, N)`."""
    if isinstance(over, ast.Call) and _last_name(over.func) in ("range", "trange") and over.args:
        return ast.unparse(over.args[0] if len(over.args) == 1 else over.args[1])
    return None


def _header(loop: ast.For) -> str:
    return f"for {ast.unparse(loop.target)} in {ast.unparse(loop.iter)}:"


def _last_name(function: ast.expr) -> str:
    if isinstance(function, ast.Attribute):
        return function.attr
    return function.id if isinstance(function, ast.Name) else ""
