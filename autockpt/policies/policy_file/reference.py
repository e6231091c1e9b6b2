"""The table of keys for people and editors: JSON schema, starter file, documents."""

import textwrap
from typing import Any

from autockpt.policies.policy_file.table import KEYS, KeyTable
from autockpt.policies.policy_file.validate import CONDITION, FACTS, OVERRIDE, VERSION
from autockpt.values.policy_keys.key import Key
from autockpt.values.table import markdown

_COMMENT = 29
"""Column at which the comments of the starter file begin."""
_WIDTH = 100
_HEADER = f"""\
# A policy of autockpt.  Every key may be left out or be `auto`: autockpt then decides from the
# profile and says why.  Check with `autockpt policy check FILE`.
version: {VERSION}
extends: builtin:auto        # or another builtin:NAME, or a file; this file wins
"""
_FOOTER = """
# overrides:                 # the first that matches is applied
#   - when: {world_size: ">=512"}
#     set: {disk: {writers: 8}}
"""


def schema(table: KeyTable = KEYS) -> dict[str, Any]:
    """JSON Schema of a policy file; quantities have a pattern, so that an editor marks a unit."""
    settings = _properties(table, "")
    settings |= {name: {"$ref": f"#/$defs/{name.title()}"} for name in table.sections}
    sections = {
        name.title(): _mapping(_properties(table, name), description=comment)
        for name, comment in table.sections.items()
    }
    condition = {"type": ["string", "integer"], "pattern": f"^{CONDITION}$"}
    override = {"when": {"$ref": "#/$defs/When"}, "set": {"$ref": "#/$defs/Settings"}}
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "autockpt policy",
        **_mapping(
            {
                "version": {"const": VERSION},
                "extends": {"type": "string"},
                **settings,
                "overrides": {"type": "array", "items": {"$ref": "#/$defs/Override"}},
            },
            required=["version"],
        ),
        "$defs": {
            **sections,
            "Settings": _mapping(settings),
            "When": _mapping(dict.fromkeys(FACTS, condition)),
            "Override": _mapping(override, required=list(OVERRIDE)),
        },
    }


def init_text(table: KeyTable = KEYS) -> str:
    """A commented policy file to start from; as it stands it is `builtin:auto`."""
    lines = [_HEADER.rstrip("\n")]
    for section, comment in {"": "", **table.sections}.items():
        lines += ["", *(_commented(f"{section}:", comment) if section else ())]
        for name, row in _rows(table, section):
            if section and row.alias:
                continue  # its alias stands at the top, and a file may have one of the two
            values = " | ".join(value.strip("`") for value in row.kind.values)
            lines += _commented(f"{'  ' * bool(section)}{name}: auto", f"{_plain(row)} ({values})")
    return "\n".join(lines) + "\n" + _FOOTER


def keys_table(table: KeyTable = KEYS) -> str:
    """The table of all keys in Markdown."""
    rows = []
    for section in ("", *table.sections):
        for name, row in _rows(table, section):
            key = f"{section}.{name}" if section else name
            short = f"; short for `{row.path}`" if key != row.path else ""
            meaning = ". ".join(filter(None, (row.doc + short, row.more)))
            rows.append((f"`{key}`", ", ".join(row.kind.values), meaning))
    return "\n".join(markdown(("key", "values", "meaning"), rows)) + "\n"


def _rows(table: KeyTable, section: str) -> list[tuple[str, Key]]:
    """Names of a section's keys, and of its aliases, with their rows."""
    paths = ((name, f"{section}.{name}" if section else name) for name in table.names(section))
    return [(name, row) for name, path in paths if (row := table.row(path)) is not None]


def _plain(row: Key) -> str:
    return row.doc.replace("`", "")


def _properties(table: KeyTable, section: str) -> dict[str, Any]:
    return {
        name: {
            "anyOf": [{"enum": ["auto", *row.kind.words]}, *row.kind.schemas()],
            "default": "auto",
            "description": _plain(row),
        }
        for name, row in _rows(table, section)
    }


def _mapping(properties: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"type": "object", "additionalProperties": False, "properties": properties, **more}


def _commented(text: str, comment: str) -> list[str]:
    """A line of YAML with its comment beside it, on as many lines as it takes."""
    lines = textwrap.wrap(comment, _WIDTH - _COMMENT - 2)
    return [
        f"{left:<{_COMMENT}}# {line}"
        for left, line in zip([text, *[""] * (len(lines) - 1)], lines, strict=True)
    ]
