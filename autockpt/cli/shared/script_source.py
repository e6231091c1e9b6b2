"""The loops in the source of a training script: optimizers, models, loaders.

Only the syntax tree is looked at, with the names that a place in it sees.
"""

import ast
from collections.abc import Sequence
from dataclasses import dataclass

OPTIMIZERS = frozenset(
    {
        *("SGD", "ASGD", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "SparseAdam", "Adagrad"),
        *("Adadelta", "Adafactor", "LBFGS", "Muon", "RMSprop", "Rprop", "Lion", "Sophia"),
        *("FusedAdam", "FusedLAMB", "ZeroRedundancyOptimizer"),
    }
)
BARS = frozenset({"tqdm", "trange", "track"})
"""Calls that show the progress of their argument."""

Loop = ast.For | ast.While
Scope = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Steps:
    """Optimizers that step in one loop."""

    optimizers: tuple[str, ...]
    scope: Scope
    loops: tuple[Loop, ...]
    """Around the first step, outermost first, within its function."""


class Script:
    """Assignments and places of one syntax tree."""

    def __init__(self, source: str) -> None:
        """Raises SyntaxError where it has none."""
        self._tree = tree = ast.parse(source)
        self._lines = source.splitlines()
        self._parents = {
            child: node for node in ast.walk(tree) for child in ast.iter_child_nodes(node)
        }
        self._called = {ast.unparse(n.func) for n in ast.walk(tree) if isinstance(n, ast.Call)}
        self._values: dict[tuple[Scope, str], ast.Assign] = {}
        """By function and name its first assignment; attributes of `self` belong to none."""
        for node in ast.walk(tree):
            if isinstance(node, ast.Assign) and len(node.targets) == 1:
                target = node.targets[0]
                if isinstance(target, ast.Name | ast.Attribute):
                    name = ast.unparse(target)
                    scope = None if name.startswith("self.") else self._scope(node)
                    self._values.setdefault((scope, name), node)

    def steps(self) -> list[Steps]:
        """Loops in which optimizers step, as they stand in the source."""
        found: dict[tuple[Scope, tuple[Loop, ...]], list[tuple[int, str, tuple[Loop, ...]]]] = {}
        for node in ast.walk(self._tree):
            if not (isinstance(node, ast.Call) and last_name(node.func) == "step"):
                continue
            scope, loops = self._scope(node), self._loops(node)
            owner = [node.func.value] if isinstance(node.func, ast.Attribute) else []
            for name in map(ast.unparse, [*owner, *node.args]):
                if self._role(name, scope) == "optimizer":
                    found.setdefault((scope, loops[:1]), []).append((node.lineno, name, loops))
        every = []
        for (scope, _), calls in found.items():
            calls.sort(key=lambda call: call[0])
            names = tuple(dict.fromkeys(name for _, name, _ in calls))
            every.append((calls[0][0], Steps(optimizers=names, scope=scope, loops=calls[0][2])))
        return [steps for _, steps in sorted(every, key=lambda entry: entry[0])]

    def line(self, number: int) -> str:
        """A line as it stands, without its indentation."""
        return self._lines[number - 1].strip()

    def attach(self, steps: Steps) -> str:
        """Arguments of attach, but for `data`; empty where the models are not known there."""
        models: list[str] = []
        if self._is_of_an_epoch(steps):
            return ""
        for name in steps.optimizers:
            models += [m for m in self._models(name, steps) if m not in models]
        if not models:
            return ""
        given = [f"model={_together(models)}", f"optimizer={_together(steps.optimizers)}"]
        for role in ("scheduler", "scaler"):
            names = [n for n in self._visible(steps.scope) if self._role(n, steps.scope) == role]
            keyed = {role if len(names) == 1 else n.rpartition(".")[2]: n for n in names}
            given += [f"{key}={name}" for key, name in keyed.items()]
        return ", ".join(given)

    def _is_of_an_epoch(self, steps: Steps) -> bool:
        """The loop is in a function that is called again and again for one training."""
        scope = steps.scope
        if not isinstance(scope, ast.FunctionDef):
            return scope is not None
        own = any((scope, name) in self._values for name in steps.optimizers)
        calls = [n for n in ast.walk(self._tree) if isinstance(n, ast.Call)]
        repeated = [n for n in calls if last_name(n.func) == scope.name and self._loops(n)]
        return bool(repeated) and not own

    def value(self, name: str, scope: Scope) -> ast.expr | None:
        """Return the first value assigned to a name, as seen from a function."""
        found = self.assigned(name, scope)
        return None if found is None else found.value

    def assigned(self, name: str, scope: Scope) -> ast.Assign | None:
        """The first assignment of a name, as seen from a function."""
        if scope is not None and (scope, name) in self._values:
            return self._values[scope, name]
        if scope is not None and not isinstance(scope, ast.Lambda):
            arguments = (*scope.args.posonlyargs, *scope.args.args, *scope.args.kwonlyargs)
            if name in [argument.arg for argument in arguments]:
                return None
        return self._values.get((None, name))

    def loaders(self, scope: Scope) -> list[str]:
        """Names of DataLoaders."""
        return [name for name in self._visible(scope) if self._role(name, scope) == "data"]

    def is_loader(self, over: ast.expr, scope: Scope) -> bool:
        """Whether that is a DataLoader."""
        return is_name(over) and self._role(ast.unparse(over), scope) == "data"

    def is_list(self, over: ast.expr, scope: Scope) -> bool:
        """Whether it has a length and items by number."""
        value = self.value(ast.unparse(over), scope) if is_name(over) else over
        if isinstance(value, ast.Call):
            return last_name(value.func) in ("range", "list", "split", "chunk", "sorted")
        return isinstance(value, ast.List | ast.ListComp | ast.Tuple)

    def shown(self, over: ast.expr, scope: Scope) -> ast.expr:
        """Return the object behind a progress bar."""
        value = self.value(ast.unparse(over), scope) if is_name(over) else over
        if isinstance(value, ast.Call) and last_name(value.func) in BARS and value.args:
            return _range_of(value) or self.shown(value.args[0], scope)
        return over

    def _visible(self, scope: Scope) -> list[str]:
        return [name for place, name in self._values if place in (None, scope)]

    def _role(self, name: str, scope: Scope) -> str:
        value = self.value(name, scope)
        if not isinstance(value, ast.Call):
            return ""
        called = last_name(value.func)
        if called in OPTIMIZERS or f"{name}.zero_grad" in self._called:
            return "optimizer" if name not in self._called else ""
        if called.endswith("LR") or called in ("CosineAnnealingWarmRestarts", "get_scheduler"):
            return "scheduler"
        if called == "GradScaler":
            return "scaler"
        return "data" if called.endswith("DataLoader") else ""

    def _models(self, optimizer: str, steps: Steps) -> list[str]:
        """Whose parameters an optimizer has: the whole that is called, where it has a part."""
        value = self.value(optimizer, steps.scope)
        if value is None:
            return []
        owners = self._owners(value, steps.scope)
        if not owners and isinstance(value, ast.Call):  # made by a function: what it was given
            made = [value.func.value] if isinstance(value.func, ast.Attribute) else []
            given = [*made, *value.args, *(keyword.value for keyword in value.keywords)]
            owners = [name for name in map(ast.unparse, given) if name in self._called]
        found: list[str] = []
        for owner in owners:
            whole = owner
            while whole not in self._called and "." in whole.removeprefix("self."):
                whole = whole.rpartition(".")[0]
            model = whole if whole in self._called else owner
            if model not in found:
                found.append(model)
        return found

    def _owners(self, value: ast.expr, scope: Scope, depth: int = 3) -> list[str]:
        """`net` of `net.parameters()`, also where the parameters have a name first."""
        found: list[str] = []
        for node in ast.walk(value):
            function = node.func if isinstance(node, ast.Call) else None
            if isinstance(function, ast.Attribute) and function.attr.endswith("parameters"):
                found.append(ast.unparse(function.value))
            elif isinstance(node, ast.Name) and depth:
                named = self.value(node.id, scope)
                if named is not None and named is not value and not _is_module(named):
                    found += self._owners(named, scope, depth - 1)
        return list(dict.fromkeys(found))

    def _scope(self, node: ast.AST) -> Scope:
        while (parent := self._parents.get(node)) is not None:
            if isinstance(parent, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
                return parent
            node = parent
        return None

    def _loops(self, node: ast.AST) -> tuple[Loop, ...]:
        loops: list[Loop] = []
        while (parent := self._parents.get(node)) is not None:
            if isinstance(parent, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
                break
            if isinstance(parent, ast.For | ast.While):
                loops.insert(0, parent)
            node = parent
        return tuple(loops)


def _range_of(call: ast.Call) -> ast.Call | None:
    """`range(...)` of `trange(...)`."""
    if last_name(call.func) != "trange":
        return None
    return ast.Call(func=ast.Name(id="range", ctx=ast.Load()), args=call.args, keywords=[])


def is_name(node: ast.AST) -> bool:
    return isinstance(node, ast.Name | ast.Attribute)


def _is_module(value: ast.expr) -> bool:
    """A call of a class; its arguments are no parameters of an optimizer."""
    return isinstance(value, ast.Call) and last_name(value.func)[:1].isupper()


def last_name(function: ast.expr) -> str:
    if isinstance(function, ast.Attribute):
        return function.attr
    return function.id if isinstance(function, ast.Name) else ""


def _together(names: Sequence[str]) -> str:
    """One object, or several by their names."""
    if len(names) == 1:
        return names[0]
    return "{" + ", ".join(f'"{name.rpartition(".")[2]}": {name}' for name in names) + "}"
