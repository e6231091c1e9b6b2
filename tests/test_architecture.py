"""The walls of the house: which room may import what, read from the source without importing it.

`ROOMS` is the import table of `docs/concepts/design.md`, with the reason for each row.  The longest
row that fits a module judges it.  Every import counts: `import` and `from`, relative ones, those
inside functions and under TYPE_CHECKING, and `import_module("name")`.  Three rules cross the rooms:
the keeper's process never loads torch, some constructs are banned, and modules form no import
cycle.  The second half feeds the checker synthetic trees, so that it is known to fail when it
should.
"""

import ast
import builtins
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

PACKAGE = "autockpt"
ROOT = Path(__file__).resolve().parent.parent

# --- the table -----------------------------------------------------------------------------------

CLOCKS = ("time", "datetime", "timeit", "sched")
CHANCE = ("random", "secrets", "uuid")
FILES = ("os", "io", "pathlib", "shutil", "tempfile", "glob", "fcntl", "mmap", "sqlite3", "open")
SOCKETS = ("socket", "socketserver", "select", "selectors", "ssl", "asyncio", "http", "urllib")
PROCESSES = ("subprocess", "multiprocessing", "threading", "_thread", "concurrent", "signal")
NOW = tuple(f"datetime.{name}" for name in ("datetime.now", "datetime.utcnow", "date.today"))

ANY = ("*",)
"""Stands for no restriction."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """One row of the table: what the modules under a name may import, and why only that."""

    name: str
    """Module name below `autockpt`; covers everything under it; "" is `autockpt/__init__.py`."""

    rooms: tuple[str, ...]
    """Rows whose modules it may import; its own row is always among them."""

    libraries: tuple[str, ...] = ()
    """Third-party packages it may import."""

    without: tuple[str, ...] = ()
    """Standard-library modules it may not import, and dotted names or builtins it may not use."""

    reason: str

    def __str__(self) -> str:
        """Show the rule as a person would state it."""
        libraries = ", ".join(self.libraries) or "no third-party package"
        rule = f"{self.name or PACKAGE} may import {', '.join(self.rooms)}; {libraries}"
        return (
            rule
            + "; the standard library"
            + (f" without {', '.join(self.without)}" if self.without else "")
        )


POLICIES_REASON = (
    "a decision is a pure function of profile and goal, so that it can be replayed and explained"
)
TUNER_REASON = (
    "one core runs online, in the simulator and in tests: time is an argument, measurements come in"
)
PROTOCOL_REASON = (
    "events in, instructions out: the same code runs on sockets and files and in a seeded simulator"
)
EDGE_REASON = "the edges wire the rooms together"

ROOMS = (
    Room(
        name="values",
        rooms=("values",),
        reason="every room imports the nouns, so whatever they import everybody imports",
    ),
    Room(
        name="profiles",
        rooms=("values", "profiles", "profiles.samples"),
        libraries=("numpy",),
        without=(*FILES, *CLOCKS),
        reason="estimators turn samples into a profile; only probes touch the machine",
    ),
    Room(
        name="profiles.samples",
        rooms=("values", "profiles.samples"),
        without=(*FILES, *CLOCKS),
        reason="samples are the nouns between probes and estimators; both sides import them",
    ),
    Room(
        name="profiles.probes",
        rooms=("values", "profiles.probes", "profiles.samples"),
        libraries=("torch", "psutil", "pynvml"),
        reason="probes time the movers they are handed, so that what is measured is what will run",
    ),
    Room(
        name="policies",
        rooms=("values", "policies", "policies.policy_file"),
        without=(*CLOCKS, *CHANCE, "logging"),
        reason=POLICIES_REASON,
    ),
    Room(
        name="policies.policy_file",
        rooms=("values", "policies", "policies.policy_file", "yaml_text"),
        libraries=("yaml",),
        without=(*CLOCKS, *CHANCE, "logging"),
        reason=f"the only reader of policy files; otherwise {POLICIES_REASON}",
    ),
    Room(
        name="tuner",
        rooms=("values", "policies", "tuner", "tuner.search"),
        libraries=("numpy",),
        without=(*FILES, *CLOCKS),
        reason=TUNER_REASON,
    ),
    Room(
        name="tuner.search",
        rooms=("values", "policies", "tuner", "tuner.search"),
        libraries=("numpy", "optuna"),
        without=(*FILES, *CLOCKS),
        reason=f"the only user of optuna, which is slow to import; otherwise {TUNER_REASON}",
    ),
    Room(
        name="executors",
        rooms=("values", "executors", "executors.image.layout", "executors.protocol", "new_files"),
        libraries=("torch", "numpy", "psutil", "xxhash", "backports", "obstore"),
        reason="executors do what a plan says: they never know how it was chosen or is reported",
    ),
    Room(
        name="executors.image.layout",
        rooms=("values", "executors.image.layout"),
        without=(*FILES, *SOCKETS, *CLOCKS, *CHANCE, *PROCESSES),
        reason="boxes and chunk tables are arithmetic: readable by any reader, equal on all ranks",
    ),
    Room(
        name="executors.protocol",
        rooms=("values", "executors.protocol"),
        without=(*FILES, *SOCKETS, *CLOCKS, *CHANCE, *PROCESSES),
        reason=PROTOCOL_REASON,
    ),
    Room(
        name="reports",
        rooms=("values", "reports"),
        libraries=("pandas", "jinja2"),
        # io (StringIO) and datetime (formatting a given instant) have harmless uses; clocks do not.
        without=(
            *(name for name in FILES if name != "io"),
            *SOCKETS,
            *PROCESSES,
            *CHANCE,
            *(name for name in CLOCKS if name != "datetime"),
            *NOW,
        ),
        reason="a report is text made from values: the caller writes it, and it can be made again",
    ),
    Room(
        name="yaml_text",
        rooms=("values",),
        libraries=("yaml",),
        reason="text that is no YAML, or hostile, is met in one place, whoever reads it",
    ),
    Room(
        name="new_files",
        rooms=(),
        reason="the modes of what a run writes are set in one place, whoever writes it",
    ),
    Room(
        name="run_directory",
        rooms=("values", "new_files", "yaml_text"),
        libraries=("yaml",),
        reason="the one place that knows a run's files; the edges use it, the rooms do not",
    ),
    Room(
        name="job_directory",
        rooms=("values", "run_directory"),
        reason="session and command line must find a job's directory by the same rule",
    ),
    Room(
        name="console",
        rooms=("values", "console"),
        libraries=("rich",),
        reason="the one place that writes to a terminal, whoever launches; it knows no room",
    ),
    Room(name="launch", rooms=ANY, libraries=ANY, reason=EDGE_REASON),
    Room(name="api", rooms=ANY, libraries=ANY, reason=EDGE_REASON),
    Room(name="session", rooms=ANY, libraries=ANY, reason=EDGE_REASON),
    Room(name="profiling", rooms=ANY, libraries=ANY, reason=EDGE_REASON),
    Room(name="cli", rooms=ANY, libraries=ANY, reason=EDGE_REASON),
    Room(name="integrations", rooms=ANY, libraries=ANY, reason=EDGE_REASON),
    Room(name="__main__", rooms=ANY, libraries=ANY, reason=EDGE_REASON),
    Room(name="", rooms=ANY, libraries=ANY, reason=EDGE_REASON),
)

TORCH_FREE = (
    "values", "executors.keeper", "executors.image.layout", "executors.protocol",
    "executors.network",
)  # fmt: skip
IN_TRAINER = ("executors.keeper.client", "executors.network.device_path")
"""Parts of these rooms that run in the trainer alone, and may load torch."""

TORCH_FREE_REASON = (
    "the keeper outlives the trainer and must start at once and stay small; torch costs seconds"
)

PICKLE_REASON = "a checkpoint is hostile input, and unpickling runs its code"
BANNED = {
    **dict.fromkeys(("pickle", "_pickle", "cPickle", "dill", "cloudpickle"), PICKLE_REASON),
    **dict.fromkeys(("marshal", "shelve", "pandas.read_pickle"), PICKLE_REASON),
    **dict.fromkeys(("torch.load", "torch.save", "torch.serialization"), PICKLE_REASON),
    **dict.fromkeys(("eval", "builtins.eval"), "text becomes code"),
    **dict.fromkeys(("exec", "builtins.exec"), "text becomes code"),
    **dict.fromkeys(("os.system", "os.popen"), "a shell splits paths and host names into commands"),
    "shell=True": "a shell splits paths and host names into commands",
    "allow_pickle=True": PICKLE_REASON,
}
"""Modules, dotted names, builtins and keyword arguments that no module uses, and why."""

BANNED_EXCEPT = {
    "exec": ("cli.script_runner",),
    "pickle": ("integrations.dcp.metadata", "launch.in_process.inputs"),
    "torch.load": ("integrations.formats.files.torch_file",),
    "torch.save": ("integrations.formats.files.torch_file",),
}
"""Where a banned construct is the purpose: `cli/script_runner.py` runs the user's script; torch's
files are read with weights_only=True, and DCP's metadata by an unpickler for which no name is a
real one.  `launch/in_process/inputs.py` pickles arguments to compare them, and
unpickles nothing."""

STANDARD_LIBRARY = sys.stdlib_module_names | {"compression"}  # `compression` is new in 3.14


# --- reading the source --------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Reference:
    """One place where a module names another module, or a dotted name in one."""

    line: int
    target: str
    """Absolute dotted name; the submodule where `from package import submodule` names one."""

    is_import: bool
    """False for a use: `datetime.datetime.now`, `eval`, `shell=True`."""

    on_load: bool
    """Whether importing the module executes it: not in a function, not under TYPE_CHECKING."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Module:
    """A source file and everything it names."""

    name: str
    """Below the package: "" for its `__init__`, else like "policies.interval"."""

    path: str
    """Relative to the tree's root, for messages."""

    references: tuple[Reference, ...]


Tree = Mapping[str, Module]


def read_tree(root: Path) -> Tree:
    """Read every module of the package under `root`, by name."""
    package = root / PACKAGE
    files: dict[str, Path] = {}
    for file in sorted(package.rglob("*.py")):
        parts = file.relative_to(package).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        files[name] = file
    return {
        name: Module(
            name=name,
            path=file.relative_to(root).as_posix(),
            references=tuple(_Reader(name, file, frozenset(files)).references),
        )
        for name, file in files.items()
    }


class _Reader(ast.NodeVisitor):
    """Collects the references of one file."""

    def __init__(self, name: str, file: Path, known: frozenset[str]) -> None:
        self.references: list[Reference] = []
        self._known = known
        self._package = [PACKAGE, *filter(None, name.split("."))]
        if file.name != "__init__.py":
            self._package.pop()
        self._aliases: dict[str, str] = {}
        self._shadowed: set[str] = set()  # names the file binds itself: a parameter called `time`
        self._depth = 0  # functions and TYPE_CHECKING blocks around the current node
        tree = ast.parse(file.read_text(encoding="utf-8"), str(file))
        for node in ast.walk(tree):  # bindings first: a function may use a name bound further down
            self._bind(node)
        self.visit(tree)

    def _bind(self, node: ast.AST) -> None:
        """Remember what names stand for: imports give aliases, the rest hides builtins."""
        if isinstance(node, ast.Import):
            for alias in node.names:
                top = alias.name.partition(".")[0]
                self._aliases[alias.asname or top] = alias.name if alias.asname else top
        elif isinstance(node, ast.ImportFrom):
            base = self._absolute(node.module or "", node.level)
            for alias in node.names:
                self._aliases[alias.asname or alias.name] = f"{base}.{alias.name}"
        elif isinstance(node, ast.arg):
            self._shadowed.add(node.arg)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            self._shadowed.add(node.id)

    def _absolute(self, module: str, level: int) -> str:
        """Resolve a relative module name against the package of this file."""
        parents = self._package[: len(self._package) - level + 1] if level else []
        return ".".join([*parents, *filter(None, [module])])

    def _add(self, node: ast.AST, target: str, *, is_import: bool) -> None:
        line = getattr(node, "lineno", 0)
        on_load = self._depth == 0
        self.references.append(
            Reference(line=line, target=target, is_import=is_import, on_load=on_load)
        )

    def _dotted(self, node: ast.AST) -> str | None:
        """Return the absolute name an expression stands for, if it is imported or a builtin."""
        if isinstance(node, ast.Name):
            builtin = hasattr(builtins, node.id) and node.id not in self._shadowed
            return self._aliases.get(node.id, node.id if builtin else None)
        if isinstance(node, ast.Attribute) and (base := self._dotted(node.value)):
            return f"{base}.{node.attr}"
        return None

    def visit_Import(self, node: ast.Import) -> None:
        for alias in node.names:
            self._add(node, alias.name, is_import=True)

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        base = self._absolute(node.module or "", node.level)
        for alias in node.names:
            full = f"{base}.{alias.name}"
            ours = base == PACKAGE or base.startswith(f"{PACKAGE}.")
            is_module = not ours or full.removeprefix(f"{PACKAGE}.") in self._known
            self._add(node, full if is_module else base, is_import=True)

    def visit_Call(self, node: ast.Call) -> None:
        called = self._dotted(node.func)
        if called in {"__import__", "importlib.import_module"} and node.args:
            match node.args[0]:
                case ast.Constant(value=str(name)):
                    bare = name.lstrip(".")
                    target = self._absolute(bare, len(name) - len(bare))
                    self._add(node, target, is_import=True)
        for keyword in node.keywords:
            match keyword:
                case ast.keyword(arg=str(arg), value=ast.Constant(value=True)):
                    self._add(node, f"{arg}=True", is_import=False)
        self.generic_visit(node)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        if dotted := self._dotted(node):
            self._add(node, dotted, is_import=False)
        else:
            self.generic_visit(node)

    def visit_Name(self, node: ast.Name) -> None:
        if isinstance(node.ctx, ast.Load) and (dotted := self._dotted(node)):
            self._add(node, dotted, is_import=False)

    def visit_If(self, node: ast.If) -> None:
        typing_only = self._dotted(node.test) == "typing.TYPE_CHECKING"
        self._deferred([*node.body] if typing_only else [])
        rest = node.orelse if typing_only else [node.test, *node.body, *node.orelse]
        for child in rest:
            self.visit(child)

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        for child in [*node.decorator_list, node.args, *filter(None, [node.returns])]:
            self.visit(child)
        self._deferred(node.body)

    def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> None:
        self.visit_FunctionDef(node)

    def visit_Lambda(self, node: ast.Lambda) -> None:
        self.visit(node.args)
        self._deferred([node.body])

    def _deferred(self, nodes: list[ast.stmt] | list[ast.expr]) -> None:
        """Visit what importing the module does not execute."""
        self._depth += 1
        for node in nodes:
            self.visit(node)
        self._depth -= 1


# --- judging it ----------------------------------------------------------------------------------


def covers(prefix: str, name: str) -> bool:
    """Whether a dotted name is `prefix` or lies under it."""
    return name == prefix or name.startswith(f"{prefix}.")


def room_of(name: str) -> Room | None:
    """Return the longest row that covers a module name, or None if no row does."""
    fitting = [room for room in ROOMS if covers(room.name, name)]
    return max(fitting, key=lambda room: len(room.name), default=None)


def own_name(target: str) -> str | None:
    """Return the name below the package, or None for somebody else's module."""
    if not covers(PACKAGE, target):
        return None
    return target.removeprefix(PACKAGE).removeprefix(".")


def complaint(module: Module, reference: Reference, rule: object, reason: str) -> str:
    """Say what is wrong, where, by which rule and why."""
    verb = "imports" if reference.is_import else "uses"
    where = f"{module.path}:{reference.line}: {verb} {reference.target}"
    return f"{where}\n    rule: {rule}\n    because {reason}"


def allowed(room: Room, reference: Reference) -> bool:
    """Whether a row of the table permits a reference."""
    target = reference.target
    if any(covers(name, target) for name in room.without):
        return False
    if not reference.is_import:
        return True
    if (name := own_name(target)) is not None:
        other = room_of(name)
        return room.rooms == ANY or (other is not None and other.name in room.rooms)
    if target.partition(".")[0] in STANDARD_LIBRARY:
        return True
    return room.libraries == ANY or any(covers(library, target) for library in room.libraries)


def broken_walls(tree: Tree, room: Room) -> list[str]:
    """Judge the modules of one room by its row; one complaint for each line and target."""
    return unique(
        complaint(module, reference, room, room.reason)
        for module in tree.values()
        if room_of(module.name) is room
        for reference in module.references
        if not allowed(room, reference)
        # The import of a module is the complaint; each use of it would only repeat that.
        and (reference.is_import or not imports_forbidden_root(module, room, reference))
    )


def imports_forbidden_root(module: Module, room: Room, use: Reference) -> bool:
    """Whether the module a use belongs to is already complained about as an import."""
    root = use.target.partition(".")[0]
    return any(
        other.is_import and other.target.partition(".")[0] == root and not allowed(room, other)
        for other in module.references
    )


def homeless(tree: Tree) -> list[str]:
    """Find modules that no row of the table covers."""
    return [
        f"{module.path}: belongs to no room; the rooms are "
        f"{', '.join(room.name for room in ROOMS if room.name)}; put it in one or add a row"
        for module in tree.values()
        if room_of(module.name) is None
    ]


def torch_in_process(tree: Tree, start: str) -> list[str]:
    """Find where the modules under `start` name torch, and where loading them would load it."""
    rule = f"{start} is torch-free, and so is everything it loads"
    outside = [part for part in IN_TRAINER if part != start]
    inside = [
        name for name in tree
        if covers(start, name) and not any(covers(part, name) for part in outside)
    ]  # fmt: skip
    came_from: dict[str, str | None] = dict.fromkeys(inside)
    queue = list(inside)
    complaints = []
    for name in queue:  # grows while it is walked
        for reference in tree[name].references:
            if not reference.is_import or not (reference.on_load or name in inside):
                continue
            if covers("torch", reference.target):
                way = " <- ".join(_way_back(came_from, name, tree))
                reason = f"{TORCH_FREE_REASON}; loaded by {way}"
                complaints.append(complaint(tree[name], reference, rule, reason))
        for other in _loaded_by(tree, name):
            if other not in came_from:
                came_from[other] = name
                queue.append(other)
    return unique(complaints)


def _loaded_by(tree: Tree, name: str) -> Iterator[str]:
    """Yield the modules that loading one module loads: its parents, its imports and theirs."""
    imports = [ref for ref in tree[name].references if ref.is_import and ref.on_load]
    for own in [name, *(own_name(reference.target) for reference in imports)]:
        if own is not None:
            parts = own.split(".")
            prefixes = [".".join(parts[:end]) for end in range(len(parts) + 1)]
            yield from (prefix for prefix in prefixes if prefix in tree)


def _way_back(came_from: Mapping[str, str | None], name: str, tree: Tree) -> Iterator[str]:
    """Yield the paths from a module back to where the process began."""
    at: str | None = name
    while at is not None:
        yield tree[at].path
        at = came_from[at]


def banned_uses(tree: Tree, construct: str) -> list[str]:
    """Find every use of one banned construct."""
    return unique(
        complaint(module, reference, f"no module uses {construct}", BANNED[construct])
        for module in tree.values()
        if module.name not in BANNED_EXCEPT.get(construct, ())
        for reference in module.references
        if covers(construct, reference.target)
    )


def import_cycles(tree: Tree) -> list[str]:
    """Find groups of modules that import each other (Tarjan's components).

    Imports in functions and for types count.  No edge are the implied import of a package's
    `__init__`, which may re-export its modules, and what the root hands out on demand.
    """
    edges = {
        name: {
            own: reference.line
            for reference in module.references
            if reference.is_import and name
            if (own := own_name(reference.target)) is not None and own in tree and own != name
        }
        for name, module in tree.items()
    }
    return [_describe_cycle(tree, edges, group) for group in _components(edges) if len(group) > 1]


def _describe_cycle(tree: Tree, edges: Mapping[str, Mapping[str, int]], group: set[str]) -> str:
    lines = [
        f"    {tree[name].path}:{line}: imports {PACKAGE}{'.' * bool(other)}{other}"
        for name in sorted(group)
        for other, line in edges[name].items()
        if other in group
    ]
    return "\n".join(["import cycle; move what both need into a third module:", *lines])


def _components(edges: Mapping[str, Mapping[str, int]]) -> list[set[str]]:
    """Return the strongly connected components of a graph."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[set[str]] = []

    def enter(node: str) -> None:
        index[node] = low[node] = len(index)
        stack.append(node)
        for other in edges[node]:
            if other not in index:
                enter(other)
                low[node] = min(low[node], low[other])
            elif other in stack:
                low[node] = min(low[node], index[other])
        if low[node] == index[node]:
            at = stack.index(node)
            found.append(set(stack[at:]))
            del stack[at:]

    for node in edges:
        if node not in index:
            enter(node)
    return found


def unique(complaints: Iterator[str] | list[str]) -> list[str]:
    """Drop repetitions, keep the order."""
    return list(dict.fromkeys(complaints))


def expect_none(complaints: list[str]) -> None:
    """Fail with all complaints, one below the other."""
    if complaints:
        pytest.fail(f"{len(complaints)} broken:\n\n" + "\n\n".join(complaints), pytrace=False)


# --- the house as it stands ----------------------------------------------------------------------


@pytest.fixture(scope="module")
def house() -> Tree:
    """The package of this checkout, read once."""
    tree = read_tree(ROOT)
    assert tree, f"no module found under {ROOT / PACKAGE}"
    return tree


def room_id(room: Room) -> str:
    """Name a row in test output."""
    return room.name or PACKAGE


@pytest.mark.parametrize("room", ROOMS, ids=room_id)
def test_room_imports_only_what_its_row_permits(house: Tree, room: Room) -> None:
    """Each module keeps to the row of the import table that covers it."""
    expect_none(broken_walls(house, room))


MOST_ENTRIES = 12
CROWDED = {
    "": 18, "values": 20, "session": 15, "policies": 13, "policies/presets": 14,
    "executors/keeper": 14, "reports/analysis": 13,
}  # fmt: skip
"""Folders with more entries than a person takes in at once; a number here may only fall."""


def is_left(entry: Path) -> bool:
    """A folder that git has moved away: only its compiled code is still there."""
    return entry.is_dir() and all(
        inner.name == "__pycache__" or is_left(inner) for inner in entry.iterdir()
    )


def test_a_folder_has_at_most_a_dozen_entries() -> None:
    """A crowded one is divided, as a deliberate step with a note in docs/decisions/."""
    folders = [ROOT / PACKAGE, *(path for path in (ROOT / PACKAGE).rglob("*") if path.is_dir())]
    crowded = {}
    for folder in folders:
        entries = [
            entry.name for entry in folder.iterdir()
            if entry.name not in ("__init__.py", "__pycache__", "py.typed") and not is_left(entry)
        ]  # fmt: skip
        name = folder.relative_to(ROOT / PACKAGE).as_posix().removeprefix(".")
        if folder.name != "__pycache__" and len(entries) > CROWDED.get(name, MOST_ENTRIES):
            crowded[name] = len(entries)
    assert crowded == {}


def test_every_module_belongs_to_a_room(house: Tree) -> None:
    """A new folder or file at the top is a decision, made by adding a row."""
    expect_none(homeless(house))


@pytest.mark.parametrize("start", TORCH_FREE)
def test_keeper_process_never_loads_torch(house: Tree, start: str) -> None:
    """Neither the torch-free modules nor anything they load names torch."""
    expect_none(torch_in_process(house, start))


@pytest.mark.parametrize("construct", BANNED)
def test_banned_construct_is_not_used(house: Tree, construct: str) -> None:
    """No module unpickles, evaluates text or starts a shell."""
    expect_none(banned_uses(house, construct))


def test_modules_form_no_import_cycle(house: Tree) -> None:
    """Modules can be loaded in any order."""
    expect_none(import_cycles(house))


# --- the checker can fail ------------------------------------------------------------------------

Check = Callable[[Tree], list[str]]


def every_wall(tree: Tree) -> list[str]:
    """Judge all rooms."""
    return [line for room in ROOMS for line in broken_walls(tree, room)]


def every_torch(tree: Tree) -> list[str]:
    """Judge all torch-free modules."""
    return [line for start in TORCH_FREE for line in torch_in_process(tree, start)]


def every_ban(tree: Tree) -> list[str]:
    """Judge all banned constructs."""
    return [line for construct in BANNED for line in banned_uses(tree, construct)]


def build(root: Path, files: Mapping[str, str]) -> Tree:
    """Write a synthetic package and read it."""
    for name, source in {"__init__.py": "", **files}.items():
        file = root / PACKAGE / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(source, encoding="utf-8")
    return read_tree(root)


WALL_VIOLATIONS = [
    ("values/plan.py", "import numpy", "imports numpy"),
    ("values/plan.py", "from autockpt.policies import interval", "imports autockpt.policies"),
    ("profiles/links.py", "import torch", "imports torch"),
    ("profiles/links.py", "from pathlib import Path", "imports pathlib.Path"),
    ("profiles/links.py", "import time", "imports time"),
    ("profiles/links.py", "rows = open('x').read()", "uses open"),
    ("profiles/links.py", "from .probes import disk", "imports autockpt.profiles.probes.disk"),
    ("profiles/samples.py", "import numpy", "imports numpy"),
    ("profiles/probes/gpu.py", "from ..links import fit", "imports autockpt.profiles.links"),
    ("profiles/probes/gpu.py", "from ...policies import interval", "imports autockpt.policies"),
    ("profiles/probes/gpu.py", "import autockpt.tuner.core", "imports autockpt.tuner.core"),
    ("profiles/probes/gpu.py", "import autockpt.executors.disk", "imports autockpt.executors"),
    ("policies/interval.py", "import torch.nn as nn", "imports torch.nn"),
    ("policies/interval.py", "from datetime import date", "imports datetime.date"),
    ("policies/interval.py", "import random", "imports random"),
    ("policies/interval.py", "import logging", "imports logging"),
    ("policies/interval.py", "import yaml", "imports yaml"),
    ("policies/policy_file.py", "import time", "imports time"),
    ("tuner/core.py", "import torch", "imports torch"),
    ("tuner/core.py", "import os.path", "imports os.path"),
    ("tuner/core.py", "import time as t", "imports time"),
    ("tuner/core.py", "import optuna", "imports optuna"),
    ("tuner/core.py", "from autockpt.executors import disk", "imports autockpt.executors"),
    ("tuner/search.py", "import torch", "imports torch"),
    ("executors/image/layout/boxes.py", "import torch", "imports torch"),
    (
        "executors/image/layout/boxes.py",
        "from ...protocol import commit",
        "imports autockpt.executors.pr",
    ),
    ("executors/image/layout/boxes.py", "from ... import disk", "imports autockpt.executors.disk"),
    ("executors/protocol/commit.py", "import socket", "imports socket"),
    ("executors/protocol/commit.py", "import threading", "imports threading"),
    ("executors/protocol/commit.py", "from random import Random", "imports random.Random"),
    ("executors/protocol/commit.py", "import io", "imports io"),
    ("executors/disk.py", "from autockpt.policies import interval", "imports autockpt.policies"),
    ("executors/disk.py", "from autockpt import reports", "imports autockpt.reports"),
    ("executors/disk.py", "from autockpt import attach", "imports autockpt"),
    ("executors/disk.py", "import autockpt.tuner.core", "imports autockpt.tuner.core"),
    ("executors/disk.py", "import autockpt.profiles.links", "imports autockpt.profiles.links"),
    ("executors/disk.py", "import autockpt.session", "imports autockpt.session"),
    ("executors/disk.py", "import autockpt.cli", "imports autockpt.cli"),
    ("run_directory.py", "from autockpt import reports", "imports autockpt.reports"),
    ("reports/html.py", "import subprocess", "imports subprocess"),
    ("reports/html.py", "import socket", "imports socket"),
    ("reports/html.py", "from threading import Thread", "imports threading.Thread"),
    ("reports/html.py", "import time", "imports time"),
    ("reports/html.py", "import torch", "imports torch"),
    (
        "reports/html.py",
        "from datetime import datetime\n\nmade = datetime.now()",
        "html.py:3: uses datetime.datetime.now",
    ),
    ("tuner/core.py", "def late():\n    import torch", "core.py:2: imports torch"),
    (
        "policies/interval.py",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import torch",
        "interval.py:3: imports torch",
    ),
    (
        "policies/interval.py",
        "import importlib\nimportlib.import_module('torch')",
        "interval.py:2: imports torch",
    ),
    ("policies/interval.py", "x = __import__('torch')", "imports torch"),
]

NEIGHBOURS = dict.fromkeys(
    (
        "policies/__init__.py",
        "policies/interval.py",
        "profiles/links.py",
        "profiles/probes/disk.py",
        "executors/disk.py",
        "executors/protocol/commit.py",
        "reports/__init__.py",
    ),
    "",
)
"""What the imports above point at: `from package import name` depends on what is a module."""


@pytest.mark.parametrize(
    ("file", "source", "expected"),
    WALL_VIOLATIONS,
    ids=[f"{file}: {source.splitlines()[-1].strip()}" for file, source, _ in WALL_VIOLATIONS],
)
def test_broken_wall_is_reported(tmp_path: Path, file: str, source: str, expected: str) -> None:
    """One violation gives one complaint, with place, rule and reason."""
    (found,) = every_wall(build(tmp_path, {**NEIGHBOURS, file: source}))

    assert found.startswith(f"{PACKAGE}/{file}:")
    assert expected in found
    assert " may import " in found
    assert "\n    because " in found


def test_permitted_imports_are_not_reported(tmp_path: Path) -> None:
    """The checker does not cry wolf: every row's permitted imports pass."""
    files = {
        "__init__.py": "def attach():\n    from autockpt import session",
        "session.py": "import torch, time, yaml\nfrom autockpt.tuner import core",
        "cli/__init__.py": "import click\nfrom autockpt.reports import html",
        "integrations/lightning.py": "import lightning\nfrom autockpt import session",
        "values/plan.py": "import json\nfrom . import units\nfrom .units import parse",
        "values/units.py": "def parse(): ...",
        "run_directory.py": "import os, yaml\nfrom autockpt.values import plan",
        "profiles/links.py": "import numpy as np\nfrom ..values.plan import Plan",
        "profiles/probes/gpu.py": "import os, time, torch, psutil, pynvml\nfrom .. import samples",
        "profiles/samples.py": "from dataclasses import dataclass",
        "policies/__init__.py": "from autockpt.policies.policy_file import read",
        "policies/interval.py": "import math\n\nmodel.eval()\nself.time = row.open()",
        "policies/policy_file.py": "import yaml",
        "tuner/core.py": "import numpy\ndef step(time, open):\n    return time.last, open[0]",
        "tuner/search.py": "def run():\n    import optuna",
        "executors/disk.py": "import os, time, torch, xxhash\nfrom .image.layout import boxes",
        "executors/keeper/serve.py": "import socket\nfrom autockpt.executors import protocol",
        "executors/image/layout/boxes.py": "import math\nfrom autockpt.values.plan import Plan",
        "executors/protocol/__init__.py": "from dataclasses import dataclass",
        "reports/html.py": "import io, html\nfrom datetime import UTC, datetime\nimport pandas",
    }
    tree = build(tmp_path, files)

    assert every_wall(tree) + homeless(tree) + every_torch(tree) + every_ban(tree) == []


def test_module_outside_every_room_is_reported(tmp_path: Path) -> None:
    """A file beside the rooms is found, whatever it imports."""
    (found,) = homeless(build(tmp_path, {"helpers.py": ""}))

    assert found.startswith("autockpt/helpers.py: belongs to no room")


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        pytest.param(
            {"executors/keeper/main.py": "import torch"},
            "autockpt/executors/keeper/main.py:1: imports torch",
            id="directly",
        ),
        pytest.param(
            {"executors/keeper/main.py": "def late():\n    from torch import nn"},
            "autockpt/executors/keeper/main.py:2: imports torch.nn",
            id="inside a function",
        ),
        pytest.param(
            {
                "executors/keeper/main.py": "from autockpt.executors import disk",
                "executors/disk.py": "import torch",
            },
            "autockpt/executors/disk.py:1: imports torch",
            id="through another module",
        ),
        pytest.param(
            {"executors/keeper/main.py": "", "executors/__init__.py": "import torch"},
            "autockpt/executors/__init__.py:1: imports torch",
            id="through a parent package",
        ),
        pytest.param(
            {
                "executors/keeper/main.py": "",
                "__init__.py": "from .session import attach",
                "session.py": "import torch",
            },
            "loaded by autockpt/session.py <- autockpt/__init__.py <- autockpt/executors/keeper",
            id="through the front door",
        ),
    ],
)
def test_torch_in_the_keeper_is_reported(
    tmp_path: Path, files: dict[str, str], expected: str
) -> None:
    """Torch is found wherever loading the keeper would load it, with the way it came."""
    found = every_torch(build(tmp_path, files))

    assert len(found) == 1
    assert expected in found[0]
    assert TORCH_FREE_REASON in found[0]


def test_lazy_torch_behind_the_keeper_is_permitted(tmp_path: Path) -> None:
    """What a loaded module imports later, in a function or for types, does not load torch."""
    lazy = (
        "from typing import TYPE_CHECKING\n"
        "if TYPE_CHECKING:\n    import torch\n"
        "def __getattr__(name):\n    import torch\n"
    )
    tree = build(tmp_path, {"__init__.py": lazy, "executors/keeper/main.py": "import socket"})

    assert every_torch(tree) == []


@pytest.mark.parametrize(
    ("source", "construct"),
    [
        ("import pickle", "pickle"),
        ("from pickle import loads", "pickle"),
        ("def late():\n    import marshal", "marshal"),
        ("import shelve as s", "shelve"),
        ("eval('1')", "eval"),
        ("import builtins\nbuiltins.eval('1')", "builtins.eval"),
        ("exec('1')", "exec"),
        ("run = exec", "exec"),
        ("import torch\ntorch.load('x')", "torch.load"),
        ("import torch as t\nt.save({}, 'x')", "torch.save"),
        ("from torch import load as read", "torch.load"),
        ("import torch.serialization", "torch.serialization"),
        ("import subprocess\nsubprocess.run('ls', shell=True)", "shell=True"),
        ("from os import system\nsystem('ls')", "os.system"),
        ("import numpy\nnumpy.load('x', allow_pickle=True)", "allow_pickle=True"),
    ],
    ids=lambda value: value.splitlines()[-1].strip(),
)
def test_banned_construct_is_reported(tmp_path: Path, source: str, construct: str) -> None:
    """Each banned construct is found by its name, under an alias too."""
    found = every_ban(build(tmp_path, {"session.py": source}))

    assert found
    assert all(f"rule: no module uses {construct}" in line for line in found)


def test_only_the_boot_module_runs_a_script(tmp_path: Path) -> None:
    """`exec` is permitted where the user's script is run, and there only."""
    sources = {"cli/script_runner.py": "exec('1')", "cli/run.py": "exec('1')"}
    (found,) = every_ban(build(tmp_path, sources))

    assert found.startswith("autockpt/cli/run.py:1: uses exec")


def test_import_cycle_is_reported_with_its_lines(tmp_path: Path) -> None:
    """A cycle over three modules is one complaint that names each edge in it."""
    sources = {
        "values/a.py": "\nfrom autockpt.values.b import x",
        "values/b.py": "from . import c",
        "values/c.py": "import autockpt.values.a",
        "values/d.py": "import autockpt.values.a",
    }
    (found,) = import_cycles(build(tmp_path, sources))

    assert "autockpt/values/a.py:2: imports autockpt.values.b" in found
    assert "autockpt/values/b.py:1: imports autockpt.values.c" in found
    assert "autockpt/values/c.py:1: imports autockpt.values.a" in found
    assert "d.py" not in found


@pytest.mark.parametrize(
    "late",
    [
        "def late():\n    from autockpt.values import a\n",
        "import typing\nif typing.TYPE_CHECKING:\n    from autockpt.values.a import x\n",
    ],
)
def test_cycle_that_loading_never_walks_is_reported(tmp_path: Path, late: str) -> None:
    """An import in a function, or for types only, hides a cycle and does not open it."""
    sources = {"values/a.py": "from autockpt.values.b import y", "values/b.py": late}

    (found,) = import_cycles(build(tmp_path, sources))

    assert "autockpt/values/a.py:1: imports autockpt.values.b" in found


def test_re_exports_form_no_cycle(tmp_path: Path) -> None:
    """Neither those of a package nor those of the root on demand."""
    sources = {
        "__init__.py": "def __getattr__(name):\n    from autockpt.values import a\n",
        "values/__init__.py": "from autockpt.values.a import x\nfrom autockpt.values import b",
        "values/a.py": "import autockpt\nfrom autockpt.values.b import y",
        "values/b.py": "",
    }

    assert import_cycles(build(tmp_path, sources)) == []


# --- modes of new files --------------------------------------------------------------------------


def _unset(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Calls that make a file or directory and leave its mode to the umask."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        called, named = ast.unparse(node.func), {keyword.arg for keyword in node.keywords}
        given = ast.unparse(ast.Tuple([*node.args, *(k.value for k in node.keywords)], ast.Load()))
        name = called.rpartition(".")[2]
        if called in ("open", "os.fdopen", "io.open"):
            how = [a.value for a in node.args[1:2] if isinstance(a, ast.Constant)]
            makes = any(set(str(mode)) & set("wax") for mode in how)
            there = "/proc/" in given or "devnull" in given
            if makes and called != "os.fdopen" and "opener" not in named and not there:
                yield node.lineno, f"{called} of a new file without an opener"
        elif called == "os.open" and "O_CREAT" in given and len(node.args) < 3:
            yield node.lineno, "os.open of a new file without a mode"
        elif name in ("makedirs", "touch") and called.startswith(("os.", "path.")):
            yield node.lineno, f"{called}: parents or files get the umask's mode"
        elif name == "mkdir" and ("parents" in named or not _has_mode(called, node)):
            yield node.lineno, f"{called} without a mode"
        elif name == "FileHandler":
            yield node.lineno, f"{called}: its file gets the umask's mode"
        elif called.endswith((".write_bytes", "shutil.copy", "shutil.copyfile", "copytree")):
            yield node.lineno, f"{called} of a new file"


def _has_mode(called: str, node: ast.Call) -> bool:
    return len(node.args) >= (2 if called == "os.mkdir" else 1)


def test_every_new_file_has_a_mode() -> None:
    """In the whole package: who needs a file takes an opener, or names the mode."""
    found = [
        f"{file.relative_to(ROOT)}:{line}: {what}; see autockpt/new_files.py"
        for file in sorted((ROOT / PACKAGE).rglob("*.py"))
        for line, what in _unset(ast.parse(file.read_text(encoding="utf-8")))
    ]
    assert found == []


@pytest.mark.parametrize(
    "call",
    [
        "open(p, 'w')", "open(p, 'ab')", "open(p, 'x', encoding='utf-8')", "os.makedirs(p, 0o755)",
        "os.mkdir(p)", "path.mkdir()", "path.mkdir(0o755, parents=True)", "path.touch()",
        "os.open(p, os.O_WRONLY | os.O_CREAT)", "logging.FileHandler(p)", "shutil.copy(a, b)",
    ],
)  # fmt: skip
def test_a_mode_that_is_left_to_the_umask_is_seen(call: str) -> None:
    """The reader of the sources fails when it should."""
    assert list(_unset(ast.parse(call)))


# --- torch's defaults ----------------------------------------------------------------------------

FACTORIES = frozenset({
    "empty", "zeros", "ones", "full", "tensor", "as_tensor", "asarray", "arange", "linspace",
    "rand", "randn", "randint", "randperm", "scalar_tensor", "eye", "empty_strided",
})  # fmt: skip
"""Functions of torch that follow `set_default_device` and, all but some, `set_default_dtype`."""


def _left_to_defaults(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Calls that make a tensor and leave its device or type to the script's defaults."""
    for node in ast.walk(tree):
        called = ast.unparse(node.func) if isinstance(node, ast.Call) else ""
        room, _, name = called.rpartition(".")
        if room == "torch" and name in FACTORIES and isinstance(node, ast.Call):
            missing = {"device", "dtype"} - {keyword.arg for keyword in node.keywords}
            if missing:
                yield node.lineno, f"{called} without {' and '.join(sorted(missing))}"


def test_no_tensor_is_made_where_a_script_may_say_where() -> None:
    """A script with a default device or type would get our tensors there, or of that type."""
    found = [
        f"{file.relative_to(ROOT)}:{line}: {what}"
        for file in sorted((ROOT / PACKAGE).rglob("*.py"))
        for line, what in _left_to_defaults(ast.parse(file.read_text(encoding="utf-8")))
    ]
    assert found == []
    assert [*_left_to_defaults(ast.parse("torch.empty(3, device='cpu')"))]
