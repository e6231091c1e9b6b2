"""The table of policy keys, gathered from the fields of a Goal, and the Goal that values make.

A key's value is what its kind reads: an Every, a Money, a number, a word.  A missing key is `auto`.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

from autockpt.values.goal import SECTIONS, Goal
from autockpt.values.policy_keys.key import METADATA, Key, Place


@dataclass(frozen=True, slots=True)
class _Field:
    """A field that a key sets."""

    place: Place
    default: Any
    value: Any
    """In the goal that the fields were listed of."""


class KeyTable:
    """All keys, in the order of the documents.

    `goal` is a Goal of defaults; `sections` are the headings and their comments.
    """

    def __init__(self, goal: Goal, sections: Mapping[str, str] = SECTIONS) -> None:
        self.sections = {name: comment for name, comment in sections.items() if name}
        self._goal = goal
        rows = [field.place.key for field in _fields(goal) if field.place.key is not None]
        order = list(sections)
        rows.sort(key=lambda row: order.index(row.path.rpartition(".")[0]))
        self.rows: dict[str, Key] = {row.path: row for row in rows}
        """By dotted path."""
        self.aliases = {row.alias: row.path for row in rows if row.alias}
        """Long form by short form."""
        self.known = (*self.aliases, *self.rows)
        """Every settable key, dotted, aliases first."""

    def row(self, path: str) -> Key | None:
        """The row of a key or of an alias; None for an unknown key."""
        return self.rows.get(self.aliases.get(path, path))

    def names(self, section: str = "") -> tuple[str, ...]:
        """Names that are legal in a section; "": keys, aliases and sections of the top."""
        inner = tuple(
            name
            for above, _, name in (path.rpartition(".") for path in self.rows)
            if above == section
        )
        return inner if section else (*self.aliases, *inner, *self.sections)

    def goal_of(self, values: Mapping[str, Any], name: str) -> Goal:
        """The Goal of values by key; `name` is the policy they came from."""
        return _built(self._goal, values, policy=name)  # type: ignore[no-any-return]

    def values_of(self, goal: Goal) -> dict[str, Any]:
        """The values that make a Goal: `goal_of` the other way round."""
        found: dict[str, Any] = {}
        parts: dict[str, dict[str, Any]] = {}
        for field in _fields(goal):
            path, part = field.place.path, field.place.part
            if field.value == field.default:
                continue
            if part:
                parts.setdefault(path, {})[part] = field.value
            else:
                found.setdefault(path, field.value)
        joined = {path: self.rows[path].kind.joined(**given) for path, given in parts.items()}
        return found | joined

    def texts_of(self, goal: Goal) -> dict[str, str]:
        """Every key of a Goal as YAML and --set take it."""
        values = self.values_of(goal)
        return {
            path: row.kind.text(values[path]) if path in values else "auto"
            for path, row in self.rows.items()
        }


def _fields(record: Any) -> Iterator[_Field]:
    """The fields of a record, and of the records within, that keys set."""
    for field in fields(record):
        place, value = field.metadata.get(METADATA), getattr(record, field.name)
        if place is not None:
            yield _Field(place, field.default, value)
        elif is_dataclass(value):
            yield from _fields(value)


def _built(record: Any, values: Mapping[str, Any], **changes: Any) -> Any:
    """A record like `record` with the fields that `values` set."""
    for field in fields(record):
        place, inner = field.metadata.get(METADATA), getattr(record, field.name)
        if place is None:
            if is_dataclass(inner):
                changes[field.name] = _built(inner, values)
            continue
        value = values.get(place.path)
        if value is not None and place.part:
            value = getattr(value, place.part)
        changes[field.name] = field.default if value is None else value
    return type(record)(**changes)


KEYS = KeyTable(Goal())
"""The keys of policy files."""
