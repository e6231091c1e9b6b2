"""The checks of a policy file: every mistake at the place where it was written.

Unknown keys are errors.  Each value is read by the kind of its key.
"""

import difflib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from autockpt.policies.policy_file.document import Mark, Node, Problem
from autockpt.policies.policy_file.table import KeyTable
from autockpt.values.errors import ConfigError
from autockpt.values.plan import interval_conflict
from autockpt.values.policy_keys.paths import is_store_url
from autockpt.values.units import format_duration

VERSION = 1
CONDITION = r"\s*(>=|<=|==|>|<)?\s*([0-9]+)\s*"
FACTS = ("world_size", "nodes")
"""Properties of the job that an override may depend on."""
OVERRIDE = ("when", "set")
STEERING = ("version", "extends", "overrides")
"""Keys that steer the reading and set nothing."""


def file_problems(table: KeyTable, root: Node) -> list[Problem]:
    """Everything wrong with the keys and values of a whole file."""
    found = list(_settings(table, root, "", more=STEERING))
    children = root.children or {}
    if "version" not in children:
        message = "missing; every policy file starts with `version: 1`"
        found.append(Problem(mark=root.mark, path="version", message=message))
    else:
        found += _checked(children["version"], "version", _version)
    if "extends" in children:
        found += _checked(children["extends"], "extends", _source)
    if "overrides" in children:
        found += _overrides(table, children["overrides"])
    return found


def settings_problems(table: KeyTable, root: Node) -> list[Problem]:
    """Everything wrong with a tree of settings alone."""
    return list(_settings(table, root, ""))


def read_values(table: KeyTable, root: Node) -> dict[str, Any]:
    """The values by key of a tree without problems; `auto` is left out."""
    rows = ((path, table.row(path), node.scalar) for path, node in root.leaves())
    return {
        row.path: row.kind.read(scalar)
        for _, row, scalar in rows
        if row is not None and scalar != "auto"
    }


def holds(when: Node | None, facts: Mapping[str, int]) -> bool:
    """Whether `facts` satisfy every condition; an unknown fact satisfies none."""
    conditions = (when.children if when is not None else None) or {}
    return all(
        name in facts and _compare(facts[name], str(node.scalar))
        for name, node in conditions.items()
    )


def combined_problems(values: Mapping[str, Any], mark: Callable[[str], Mark]) -> list[Problem]:
    """Values by key that contradict each other under any profile."""
    found: list[tuple[str, str]] = []
    if values.get("memory.enabled") is False and "memory.interval" in values:
        message = "memory.enabled is false, so no interval can be kept; remove one of them"
        found.append(("memory.interval", message))
    memory, disk = values.get("memory.interval"), values.get("disk.interval")
    if memory is not None and disk is not None:
        message = interval_conflict(memory.steps or 0, disk.steps or 0)
        message = message.removeprefix("disk.interval ")
        found += [("disk.interval", message)] if message else []
    often, most_s = getattr(disk, "seconds", None), values.get("limits.lost_time")
    if often is not None and most_s is not None and often > most_s:
        message = (
            f"{format_duration(often)} between checkpoints may lose more than limits.lost_time "
            f"{format_duration(most_s)}; nearest: disk.interval {format_duration(most_s)}"
        )
        found.append(("disk.interval", message))
    if "failures.notice" in values and "failures.preemption" not in values:
        message = "says how long ahead; failures.preemption, how often, is missing"
        found.append(("failures.notice", message))
    for path, needed in (("keep.ttl", "keep.every"), ("keep.metric", "keep.best")):
        if path in values and needed not in values:
            found.append((path, f"says more about {needed}, which is missing"))
    codec = values.get("archive.codec", "none")
    if codec != "none" and values.get("archive.lossy") is not True:
        message = (
            f"{codec} loses a part of what was trained; say that this is wanted with "
            "archive.lossy: true, or use none"
        )
        found.append(("archive.codec", message))
    if is_store_url(str(values.get("disk.path", ""))):
        found += [(path, why) for path, value, why in _IN_STORE if _is_wanted(values, path, value)]
    stored, node = values.get("prices.disk"), values.get("prices.node")
    if stored is not None and node is not None and stored.currency != node.currency:
        message = f"in {node.currency}, and prices.disk is in {stored.currency}; write both in one"
        found.append(("prices.node", message))
    return [Problem(mark=mark(path), path=path, message=message) for path, message in found]


_IN_STORE: tuple[tuple[str, Any, str], ...] = (
    ("disk.codec", "delta", "delta reads the checkpoint before from a disk, and disk.path is an "
     "object store; use planes or none"),
    ("disk.direct", True, "O_DIRECT is of file systems, and disk.path is an object store; remove "
     "it"),
    ("staging.path", "direct", "writes to a disk past host memory, and disk.path is an object "
     "store; remove it"),
    ("archive.codec", ..., "an archive is made of checkpoints in a directory, and disk.path is an "
     "object store; remove one of them"),
    ("remote.url", ..., "copies the checkpoints of a directory, and disk.path is an object store "
     "already; remove remote.url"),
)  # fmt: skip
"""Settings that do not go together with an object store, their values (...: any) and why."""


def _is_wanted(values: Mapping[str, Any], path: str, value: Any) -> bool:
    got = values.get(path)
    return got is not None and (value is ... or got == value)


def suggestion(table: KeyTable, name: str, known: Sequence[str]) -> str:
    """The end of a message about an unknown name."""
    close = difflib.get_close_matches(name, known, n=1)
    if close:
        return f"; did you mean {close[0]!r}?"
    inner = [key for key in table.known if key.rsplit(".", 1)[-1] == name]
    if inner:
        return f"; did you mean {inner[0]!r}?"
    return f"; known: {', '.join(known)}"


# --- parts of a file ------------------------------------------------------------------------------


def _settings(
    table: KeyTable, root: Node, at: str, *, more: tuple[str, ...] = ()
) -> Iterator[Problem]:
    """Problems of the keys and sections below `root`; `at` is the dotted place of it, or ""."""
    yield from _unknown(table, root, at, (*more, *table.names()))
    for name, node in (root.children or {}).items():
        if name in table.sections:
            yield from _section(table, node, name, _dotted(at, name))
        elif row := table.row(name):
            yield from _checked(node, _dotted(at, name), _reader(row.kind.read))


def _section(table: KeyTable, section: Node, name: str, at: str) -> Iterator[Problem]:
    if section.children is None:
        yield _no_mapping(section, at)
        return
    yield from _unknown(table, section, at, table.names(name))
    for inner, node in section.children.items():
        if row := table.rows.get(f"{name}.{inner}"):
            yield from _checked(node, _dotted(at, inner), _reader(row.kind.read))


def _overrides(table: KeyTable, node: Node) -> Iterator[Problem]:
    if node.items is None:
        message = f"expected a list of {{when: ..., set: ...}}, got {node.plain()!r}"
        yield Problem(mark=node.mark, path="overrides", message=message)
    for index, entry in enumerate(node.items or ()):
        at = f"overrides[{index}]"
        if entry.children is None:
            yield _no_mapping(entry, at)
            continue
        yield from _unknown(table, entry, at, OVERRIDE)
        for name in OVERRIDE:
            part, where = entry.children.get(name), f"{at}.{name}"
            if part is None:
                message = "missing; an override has `when` and `set`"
                yield Problem(mark=entry.mark, path=where, message=message)
            elif part.children is None:
                yield _no_mapping(part, where)
            elif name == "set":
                yield from _settings(table, part, where)
            else:
                yield from _unknown(table, part, where, FACTS)
                for fact, condition in part.children.items():
                    if fact in FACTS:
                        yield from _checked(condition, f"{where}.{fact}", _condition)


def _unknown(table: KeyTable, mapping: Node, at: str, known: tuple[str, ...]) -> Iterator[Problem]:
    for name, node in (mapping.children or {}).items():
        if name not in known:
            message = "unknown field" + suggestion(table, name, known)
            yield Problem(mark=node.key_mark or node.mark, path=_dotted(at, name), message=message)


def _no_mapping(node: Node, at: str) -> Problem:
    message = f"expected a mapping of keys to values, got {node.plain()!r}"
    return Problem(mark=node.mark, path=at, message=message)


def _checked(node: Node, path: str, read: Callable[[Any], Any]) -> Iterator[Problem]:
    try:
        read(node.plain())
    except (ValueError, ConfigError) as error:
        yield Problem(mark=node.mark, path=path, message=str(error))


def _dotted(at: str, name: str) -> str:
    return f"{at}.{name}" if at else name


# --- single values --------------------------------------------------------------------------------


def _reader(read: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """`auto` is legal for every key, null for none."""

    def check(value: Any) -> Any:
        if value is None:
            raise ValueError("null is not a value; write auto, or leave the key out")
        if isinstance(value, dict | list):
            kind = "mapping" if isinstance(value, dict) else "list"
            raise ValueError(f"expected one value, got a {kind}")
        return None if value == "auto" else read(value)

    return check


def _version(value: Any) -> None:
    whole = isinstance(value, int) and not isinstance(value, bool)
    if whole and value > VERSION:
        raise ValueError(f"version {value} needs a newer autockpt; this one reads {VERSION}")
    if not whole or value != VERSION:
        raise ValueError(f"expected {VERSION}, got {value!r}")


def _source(value: Any) -> None:
    if not isinstance(value, str) or not value.strip():
        raise ValueError(f"expected a policy file or builtin:NAME, got {value!r}")


def _condition(value: Any) -> None:
    if isinstance(value, bool) or re.fullmatch(CONDITION, str(value)) is None:
        raise ValueError(f'expected a comparison, e.g. ">=512", got {value!r}')


def _compare(fact: int, condition: str) -> bool:
    match = re.fullmatch(CONDITION, condition)
    assert match is not None, "validated by _condition"
    sign, bound = match.group(1) or "==", int(match.group(2))
    return {
        ">=": fact >= bound,
        "<=": fact <= bound,
        ">": fact > bound,
        "<": fact < bound,
        "==": fact == bound,
    }[sign]
