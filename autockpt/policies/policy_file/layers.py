"""Policies in layers: built-in < extends < file < environment < --set, each with its place.

Every layer is checked by itself, so that all mistakes of all files are reported at once; then the
trees are merged and the result becomes a Goal whose every value still knows where it was written.
"""

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard, TypeVar

from pydantic import ValidationError

from autockpt.policies.policy_file import document
from autockpt.policies.policy_file.document import Document, Mark, Node, Problem
from autockpt.policies.policy_file.model import (
    Override,
    PolicyFile,
    Section,
    Settings,
    goal_of,
    keys,
    settings_of,
)
from autockpt.policies.registry import PREFIX, preset_text, presets
from autockpt.values.errors import ConfigError
from autockpt.values.goal import Goal

S = TypeVar("S", bound=Section)

ENVIRONMENT = "AUTOCKPT_"
"""Prefix of variables that set a key: AUTOCKPT_DISK_WRITERS is disk.writers."""
DEFAULT = "default"


@dataclass(frozen=True, slots=True, kw_only=True)
class EffectiveValue:
    """One key of a policy after all layers."""

    path: str
    value: str
    """As it was written; `auto` if nobody wrote it."""
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
) -> Policy:
    """The policy of `builtin:NAME` or a file, under environment variables and `key=value` settings.

    `facts` (world_size, nodes) decide which override applies; without them none does.
    Raises ConfigError with every problem, one per line as `file:line:col: error: path: message`.
    """
    problems: list[Problem] = []
    try:
        text = _read(source)
    except ConfigError as error:
        raise ConfigError(f"{source}: error: {error}") from None
    tree = _file_layers(source, text, problems, seen=())
    return _finish(source, tree, problems, environment or {}, settings, dict(facts or {}))


def parse_policy(
    text: str,
    *,
    file: str = "policy.yaml",
    environment: Mapping[str, str] | None = None,
    settings: Sequence[str] = (),
    facts: Mapping[str, int] | None = None,
) -> Policy:
    """`load_policy` for a text that is at hand; `file` is its name in messages."""
    problems: list[Problem] = []
    tree = _file_layers(file, text, problems, seen=())
    return _finish(file, tree, problems, environment or {}, settings, dict(facts or {}))


def _finish(
    name: str,
    tree: Node,
    problems: list[Problem],
    environment: Mapping[str, str],
    settings: Sequence[str],
    facts: dict[str, int],
) -> Policy:
    tree = _overridden(tree, problems, facts)
    for layer in (_from_environment(environment, problems), _from_settings(settings, problems)):
        tree = document.merge(tree, layer)
    if problems:
        raise ConfigError("\n".join(str(problem) for problem in problems))
    merged = Settings.model_validate(_settable(tree).plain())
    _check_combined(merged, tree)
    return Policy(name=name, goal=goal_of(merged, name), values=_effective(tree))


def with_settings(goal: Goal, settings: Sequence[str]) -> Goal:
    """A goal that was decided on before, under `key=value` settings; `auto` takes a value back.

    Raises ConfigError as `load_policy`.
    """
    problems: list[Problem] = []
    layer = _from_settings(settings, problems)
    if problems:
        raise ConfigError("\n".join(str(problem) for problem in problems))
    given, merged = Settings.model_validate(layer.plain()), settings_of(goal)
    tree = document.merge(_as_tree(merged), layer)
    for path, _ in layer.leaves():
        merged = _taken(merged, given, path.split("."))
    _check_combined(merged, tree)
    return goal_of(merged, goal.policy)


def _as_tree(section: Section) -> Node:
    """What a section says, without what is `auto`."""
    mark = Mark(file="the goal of the run")
    values = {name: value for name, value in section if value is not None}
    children = {
        name: _as_tree(value) if isinstance(value, Section) else Node(mark=mark, scalar=value)
        for name, value in values.items()
    }
    return Node(mark=mark, children=children)


def _taken(section: S, given: S, path: Sequence[str]) -> S:
    """`section` with the value that `given` has at a path."""
    name, *rest = path
    value = getattr(given, name)
    if rest:
        value = _taken(getattr(section, name), value, rest)
    return section.model_copy(update={name: value})


# --- layers ---------------------------------------------------------------------------------------


def _read(source: str) -> str:
    if source.startswith(PREFIX):
        return preset_text(source.removeprefix(PREFIX))
    try:
        return Path(source).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise ConfigError(
            f"cannot be read: {reason}; give a file or one of "
            f"{', '.join(PREFIX + name for name in presets())}"
        ) from None


def _file_layers(file: str, text: str, problems: list[Problem], *, seen: tuple[str, ...]) -> Node:
    """The tree of a file on top of what it extends."""
    parsed = document.parse(text, file)
    problems += _ordered(parsed.problems + _validate(PolicyFile, parsed))
    tree = _canonical(parsed.root, problems)
    extends = tree.find(("extends",))
    if extends is None or not isinstance(extends.scalar, str):
        return tree
    base = _resolve(extends.scalar, file)
    if base in (*seen, file):
        chain = " -> ".join((*seen, file, base))
        problems.append(
            Problem(mark=extends.mark, path="extends", message=f"extends itself: {chain}")
        )
        return tree
    try:
        below = _read(base)
    except ConfigError as error:
        problems.append(Problem(mark=extends.mark, path="extends", message=str(error)))
        return tree
    return document.merge(_file_layers(base, below, problems, seen=(*seen, file)), tree)


def _resolve(extends: str, file: str) -> str:
    """A relative path is relative to the file that names it."""
    if extends.startswith(PREFIX) or file.startswith(PREFIX):
        return extends
    return str(Path(file).parent / extends)


def _canonical(tree: Node, problems: list[Problem]) -> Node:
    """`interval` is short for `disk.interval`; from here on only the long form exists."""
    children = dict(tree.children or {})
    short = children.pop("interval", None)
    if short is None:
        return tree
    disk = children.get("disk") or Node(mark=short.mark, key_mark=short.key_mark, children={})
    if disk.children is None:
        return tree
    if "interval" in disk.children:
        mark = short.key_mark or short.mark
        message = "the same as disk.interval, which is given too; keep one"
        problems.append(Problem(mark=mark, path="interval", message=message))
    children["disk"] = Node(
        mark=disk.mark, key_mark=disk.key_mark, children={"interval": short, **disk.children}
    )
    return Node(mark=tree.mark, key_mark=tree.key_mark, children=children)


def _overridden(tree: Node, problems: list[Problem], facts: dict[str, int]) -> Node:
    """The first override whose conditions hold, on top of the files."""
    overrides = tree.find(("overrides",))
    if problems or overrides is None:
        return tree
    for entry in overrides.items or ():
        if Override.model_validate(entry.plain()).when.holds(facts):
            chosen = entry.find(("set",))
            return tree if chosen is None else document.merge(tree, _canonical(chosen, problems))
    return tree


def _from_environment(environment: Mapping[str, str], problems: list[Problem]) -> Node:
    """Variables named after keys; others with our prefix belong to other parts of autockpt."""
    names = {ENVIRONMENT + key.upper().replace(".", "_"): key for key in keys()}
    found = {name: environment[name] for name in names if name in environment}
    root = Node(mark=Mark(file="environment"), children={})
    for name, text in found.items():
        root = document.merge(root, _one(names[name], text, f"{name}={text}", problems))
    return root


def _from_settings(settings: Sequence[str], problems: list[Problem]) -> Node:
    root = Node(mark=Mark(file="--set"), children={})
    for setting in settings:
        key, equals, text = setting.partition("=")
        where = f"--set {setting}"
        if not equals:
            message = "expected key=value, e.g. disk.writers=4"
            problems.append(Problem(mark=Mark(file=where), path="", message=message))
        elif key.strip() not in keys():
            message = "unknown field" + _suggestion(key.strip(), keys())
            problems.append(Problem(mark=Mark(file=where), path=key.strip(), message=message))
        else:
            root = document.merge(root, _one(key.strip(), text.strip(), where, problems))
    return root


def _one(key: str, text: str, where: str, problems: list[Problem]) -> Node:
    """A tree with one value, validated."""
    mark = Mark(file=where)
    node = Node(mark=mark, key_mark=mark, scalar=document.scalar(text))
    for part in reversed(key.split(".")):
        node = Node(mark=mark, key_mark=mark, children={part: node})
    problems += _validate(Settings, Document(root=node))
    return _canonical(node, problems)


# --- checks ---------------------------------------------------------------------------------------


def _validate(model: type[Section], parsed: Document) -> list[Problem]:
    """Everything pydantic finds, at the place where it was written."""
    known = {problem.path for problem in parsed.problems}
    try:
        model.model_validate(parsed.root.plain())
    except ValidationError as error:
        found = [_problem(dict(detail), parsed.root) for detail in error.errors()]
        return [problem for problem in found if problem.path not in known]
    return []


def _problem(detail: dict[str, Any], root: Node) -> Problem:
    location: tuple[str | int, ...] = detail["loc"]
    node = root.find(location)
    path = _dotted(location)
    if detail["type"] == "extra_forbidden":
        siblings = _known_keys(location[:-1])
        mark = (node.key_mark or node.mark) if node is not None else root.mark
        return Problem(
            mark=mark,
            path=path,
            message="unknown field" + _suggestion(str(location[-1]), siblings),
        )
    if detail["type"] == "missing":
        parent = root.find(location[:-1]) or root
        message = "missing; every policy file starts with `version: 1`"
        if path != "version":
            message = "missing; an override has `when` and `set`"
        return Problem(mark=parent.mark, path=path, message=message)
    message = str(detail["msg"]).removeprefix("Value error, ")
    return Problem(mark=node.mark if node is not None else root.mark, path=path, message=message)


def _check_combined(merged: Settings, tree: Node) -> None:
    """Raises ConfigError for what no layer shows alone."""
    problems: list[Problem] = []
    _check_together(tree, problems)
    _check_currency(merged, tree, problems)
    if problems:
        raise ConfigError("\n".join(str(problem) for problem in problems))


def _check_together(tree: Node, problems: list[Problem]) -> None:
    """Combinations that contradict each other whatever the profile says."""
    enabled, interval = tree.find(("memory", "enabled")), tree.find(("memory", "interval"))
    off = enabled is not None and enabled.scalar is False
    if off and interval is not None and interval.scalar != "auto":
        message = "memory.enabled is false, so no interval can be kept; remove one of them"
        problems.append(Problem(mark=interval.mark, path="memory.interval", message=message))
    notice, every = tree.find(("failures", "notice")), tree.find(("failures", "preemption"))
    if _written(notice) and not _written(every):
        message = "says how long ahead; failures.preemption, how often, is missing"
        problems.append(Problem(mark=notice.mark, path="failures.notice", message=message))
    codec, lossy = tree.find(("archive", "codec")), tree.find(("archive", "lossy"))
    wanted = lossy is not None and lossy.scalar is True
    if codec is not None and codec.scalar not in ("auto", "none") and not wanted:
        message = (
            f"{codec.scalar} loses a part of what was trained; say that this is wanted with "
            "archive.lossy: true, or use none"
        )
        problems.append(Problem(mark=codec.mark, path="archive.codec", message=message))


def _check_currency(settings: Settings, tree: Node, problems: list[Problem]) -> None:
    """Prices are added up, so they are in one currency."""
    disk, node = settings.prices.disk, settings.prices.node
    written = tree.find(("prices", "node"))
    if disk is None or node is None or written is None or disk.currency == node.currency:
        return
    message = f"in {node.currency}, and prices.disk is in {disk.currency}; write both in one"
    problems.append(Problem(mark=written.mark, path="prices.node", message=message))


def _written(node: Node | None) -> TypeGuard[Node]:
    return node is not None and node.scalar != "auto"


def _known_keys(location: tuple[str | int, ...]) -> tuple[str, ...]:
    """Names of the fields that are legal beside a location."""
    model: Any = PolicyFile
    for part in location:
        if isinstance(part, int):
            model = Override
            continue
        info = model.model_fields.get(part)
        inner = info.annotation if info is not None else None
        if isinstance(inner, type) and issubclass(inner, Section):
            model = inner
    return tuple(model.model_fields)


def _suggestion(name: str, known: Sequence[str]) -> str:
    close = difflib.get_close_matches(name, known, n=1)
    if close:
        return f"; did you mean {close[0]!r}?"
    inner = [key for key in keys() if key.rsplit(".", 1)[-1] == name]
    if inner:
        return f"; did you mean {inner[0]!r}?"
    return f"; known: {', '.join(known)}"


def _dotted(location: tuple[str | int, ...]) -> str:
    path = ""
    for part in location:
        path += f"[{part}]" if isinstance(part, int) else f".{part}" if path else part
    return path


def _ordered(problems: list[Problem]) -> list[Problem]:
    return sorted(problems, key=lambda problem: (problem.mark.line, problem.mark.column))


# --- results --------------------------------------------------------------------------------------


def _settable(tree: Node) -> Node:
    """Without the keys that steer the reading."""
    steering = ("version", "extends", "overrides")
    children = {k: v for k, v in (tree.children or {}).items() if k not in steering}
    return Node(mark=tree.mark, children=children)


def _effective(tree: Node) -> tuple[EffectiveValue, ...]:
    written = dict(_settable(tree).leaves())
    return tuple(
        EffectiveValue(
            path=key,
            value=_shown(written[key].scalar) if key in written else "auto",
            source=written[key].mark.where if key in written else DEFAULT,
        )
        for key in keys()
        if key != "interval"
    )


def _shown(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
