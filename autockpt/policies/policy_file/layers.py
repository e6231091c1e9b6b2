"""Policies in layers: built-in < extends < file < environment < --set, each with its place.

Every layer is checked by itself, so that all mistakes of all files are reported at once.  Then the
trees are merged into a Goal whose every value still knows where it was written.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autockpt.policies.policy_file import document
from autockpt.policies.policy_file.document import Mark, Node, Problem
from autockpt.policies.policy_file.table import KEYS, KeyTable
from autockpt.policies.policy_file.validate import (
    STEERING,
    combined_problems,
    file_problems,
    holds,
    read_values,
    settings_problems,
    suggestion,
)
from autockpt.policies.registry import PREFIX, preset_text, presets
from autockpt.values.errors import ConfigError
from autockpt.values.goal import Goal

ENVIRONMENT = "AUTOCKPT_"
"""Prefix of variables that set a key: AUTOCKPT_DISK_WRITERS is disk.writers."""
DEFAULT = "default"


@dataclass(frozen=True, slots=True, kw_only=True)
class EffectiveValue:
    """One key of a policy after all layers."""

    path: str
    value: str
    """The value as it was written; `auto` if it was not."""
    source: str
    """`file:line`, the option or variable, or `default`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """A policy that was read: the Goal, and where each value comes from."""

    name: str
    goal: Goal
    values: tuple[EffectiveValue, ...]


def load_policy(
    source: str = "builtin:auto",
    *,
    environment: Mapping[str, str] | None = None,
    settings: Sequence[str] = (),
    facts: Mapping[str, int] | None = None,
    table: KeyTable = KEYS,
) -> Policy:
    """The policy of `builtin:NAME` or a file, under environment variables and `key=value` settings.

    `facts` (world_size, nodes) decide which override applies; without them none does.
    Raises ConfigError with every problem, one per line as `file:line:col: error: path: message`.
    """
    try:
        text = _read(source)
    except ConfigError as error:
        raise ConfigError(f"{source}: error: {error}") from None
    return parse_policy(
        text, file=source, environment=environment, settings=settings, facts=facts, table=table
    )


def parse_policy(
    text: str,
    *,
    file: str = "policy.yaml",
    environment: Mapping[str, str] | None = None,
    settings: Sequence[str] = (),
    facts: Mapping[str, int] | None = None,
    table: KeyTable = KEYS,
) -> Policy:
    """`load_policy` for a text that is at hand; `file` is its name in messages."""
    reader = _Layers(table)
    tree = reader.overridden(reader.file(file, text), facts or {})
    for layer in (reader.environment(environment or {}), reader.settings(settings)):
        tree = document.merge(tree, layer)
    reader.refuse()
    values = read_values(table, tree)
    reader.combine(values, tree, file)
    return Policy(name=file, goal=table.goal_of(values, file), values=_effective(table, tree))


def with_settings(goal: Goal, settings: Sequence[str], table: KeyTable = KEYS) -> Goal:
    """A goal that was decided on before, under `key=value` settings; `auto` takes a value back.

    Raises ConfigError as `load_policy`.
    """
    reader = _Layers(table)
    return reader.over(goal, reader.settings(settings))


def goal_of_environment(
    environment: Mapping[str, str], kept: Goal | None = None, table: KeyTable = KEYS
) -> Goal | None:
    """A goal under the variables that are named after keys; None: there are none.

    `kept`: an earlier goal of the run.  Raises ConfigError as `load_policy`.
    """
    if not variables(table).keys() & environment.keys():
        return None
    if kept is None:
        return load_policy(environment=environment, table=table).goal
    reader = _Layers(table)
    return reader.over(kept, reader.environment(environment))


def variables(table: KeyTable = KEYS) -> dict[str, str]:
    """By variable its key."""
    return {ENVIRONMENT + key.upper().replace(".", "_"): key for key in table.known}


# --- layers ---------------------------------------------------------------------------------------


def _read(source: str) -> str:
    if source.startswith(PREFIX):
        return preset_text(source.removeprefix(PREFIX))
    try:
        return Path(source).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"is no text in UTF-8: byte {error.object[error.start]:#04x} at offset {error.start}; "
            "save the file as UTF-8"
        ) from None
    except OSError as error:
        raise ConfigError(
            f"cannot be read: {error.strerror}; give a file or one of "
            f"{', '.join(PREFIX + name for name in presets())}"
        ) from None


class _Layers:
    """Reads layers by one table and collects their problems."""

    def __init__(self, table: KeyTable) -> None:
        self._table = table
        self._problems: list[Problem] = []

    def refuse(self) -> None:
        """Raises ConfigError with every problem so far."""
        if self._problems:
            raise ConfigError("\n".join(str(problem) for problem in self._problems))

    def over(self, goal: Goal, layer: Node) -> Goal:
        """A goal under one more layer."""
        self.refuse()
        given, values = read_values(self._table, layer), self._table.values_of(goal)
        for path, _ in layer.leaves():
            values.pop(path, None)
        self.combine(values | given, layer, "the goal of the run")
        return self._table.goal_of(values | given, goal.policy)

    def combine(self, values: Mapping[str, Any], tree: Node, name: str) -> None:
        """Raises ConfigError for values that no layer shows to be wrong alone."""

        def mark(path: str) -> Mark:
            node = tree.find(tuple(path.split(".")))
            return Mark(file=name) if node is None else node.mark

        self._problems += combined_problems(values, mark)
        self.refuse()

    def file(self, file: str, text: str, *, seen: tuple[str, ...] = ()) -> Node:
        """The tree of a file on top of the one it extends."""
        parsed = document.parse(text, file)
        known = {problem.path for problem in parsed.problems}
        found = [p for p in file_problems(self._table, parsed.root) if p.path not in known]
        if "" in known:  # no YAML: what it lacks says nothing
            found = []
        self._problems += _ordered(parsed.problems + found)
        tree = self._canonical(parsed.root)
        extends = tree.find(("extends",))
        if extends is None or not isinstance(extends.scalar, str):
            return tree
        base = _resolve(extends.scalar, file)
        if base in (*seen, file):
            chain = " -> ".join((*seen, file, base))
            self._fail(extends.mark, "extends", f"extends itself: {chain}")
            return tree
        try:
            below = _read(base)
        except ConfigError as error:
            self._fail(extends.mark, "extends", str(error))
            return tree
        return document.merge(self.file(base, below, seen=(*seen, file)), tree)

    def overridden(self, tree: Node, facts: Mapping[str, int]) -> Node:
        """The first override whose conditions hold, on top of the files."""
        overrides = tree.find(("overrides",))
        if self._problems or overrides is None:
            return tree
        for entry in overrides.items or ():
            if holds(entry.find(("when",)), facts):
                chosen = entry.find(("set",))
                return tree if chosen is None else document.merge(tree, self._canonical(chosen))
        return tree

    def environment(self, environment: Mapping[str, str]) -> Node:
        """Variables named after keys; others with our prefix belong to other parts of autockpt."""
        names = variables(self._table)
        root = Node(mark=Mark(file="environment"), children={})
        for name, key in names.items():
            if name in environment:
                text = environment[name]
                root = document.merge(root, self._one(key, text, f"{name}={text}"))
        return root

    def settings(self, settings: Sequence[str]) -> Node:
        """The values of `--set`."""
        root = Node(mark=Mark(file="--set"), children={})
        for setting in settings:
            key, equals, text = (part.strip() for part in setting.partition("="))
            where = f"--set {setting}"
            if not equals:
                self._fail(Mark(file=where), "", "expected key=value, e.g. disk.writers=4")
            elif key not in self._table.known:
                close = suggestion(self._table, key, self._table.known)
                self._fail(Mark(file=where), key, f"unknown field{close}")
            else:
                root = document.merge(root, self._one(key, text, where))
        return root

    def _one(self, key: str, text: str, where: str) -> Node:
        """A tree with one value, validated."""
        mark = Mark(file=where)
        node = Node(mark=mark, key_mark=mark, scalar=document.scalar(text))
        for part in reversed(key.split(".")):
            node = Node(mark=mark, key_mark=mark, children={part: node})
        self._problems += settings_problems(self._table, node)
        return self._canonical(node)

    def _canonical(self, tree: Node) -> Node:
        """A tree in which the long form stands for each alias."""
        children = dict(tree.children or {})
        for alias, path in self._table.aliases.items():
            section, _, name = path.partition(".")
            short = children.pop(alias, None)
            long = children.get(section)
            if short is None or (long is not None and long.children is None):
                continue
            inner = {} if long is None else long.children or {}
            if name in inner:
                message = f"the same as {path}, which is given too; keep one"
                self._fail(short.key_mark or short.mark, alias, message)
            at = long or short
            children[section] = Node(
                mark=at.mark, key_mark=at.key_mark, children={name: short, **inner}
            )
        return Node(mark=tree.mark, key_mark=tree.key_mark, children=children)

    def _fail(self, mark: Mark, path: str, message: str) -> None:
        self._problems.append(Problem(mark=mark, path=path, message=message))


def _resolve(extends: str, file: str) -> str:
    """A relative path is relative to the file that names it."""
    if extends.startswith(PREFIX) or file.startswith(PREFIX):
        return extends
    return str(Path(file).parent / extends)


def _ordered(problems: list[Problem]) -> list[Problem]:
    return sorted(problems, key=lambda problem: (problem.mark.line, problem.mark.column))


# --- results --------------------------------------------------------------------------------------


def _effective(table: KeyTable, tree: Node) -> tuple[EffectiveValue, ...]:
    leaves = tree.leaves()
    written = {path: node for path, node in leaves if path.partition(".")[0] not in STEERING}
    return tuple(
        EffectiveValue(
            path=key,
            value=_shown(written[key].scalar) if key in written else "auto",
            source=written[key].mark.where if key in written else DEFAULT,
        )
        for key in table.rows
    )


def _shown(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
