"""plan.yaml: a Decision as YAML that a person can read and the same bytes come back from.

Comments repeat the reasons beside the values they explain.  Everything that a program needs is in
the data, so reading and writing again gives the same file.
"""

import textwrap
from typing import Any

import yaml

from autockpt.policies.policy_file.document import parse
from autockpt.values.errors import ConfigError
from autockpt.values.plan import Choice, Decision
from autockpt.values.record import from_data, to_data
from autockpt.values.units import format_bytes, format_duration, format_fraction, format_rate

_WIDTH = 96
"""Columns of a comment line."""
_HEADER = (
    "# The plan of autockpt: what executors follow, why, and what it promises.\n"
    "# Written by `autockpt plan`; comments are derived, edit the policy instead and plan again.\n"
)


def plan_to_yaml(decision: Decision) -> str:
    """The decision as commented YAML; the same decision gives the same bytes."""
    data = to_data(decision)
    lines = [f"schema_version: {data.pop('schema_version')}"]
    for key, value in data.items():
        lines += ["", *_emit(key, value, 0, key, decision)]
    return _HEADER + "\n".join(lines) + "\n"


def plan_from_yaml(text: str, *, file: str = "plan.yaml") -> Decision:
    """The decision that `plan_to_yaml` wrote.  Raises ConfigError naming file, line and field."""
    document = parse(text, file)
    if document.problems:
        raise ConfigError("\n".join(str(problem) for problem in document.problems))
    return from_data(Decision, document.root.plain(), where=file)


def _emit(key: str, value: Any, depth: int, path: str, decision: Decision) -> list[str]:
    """Lines of one key; `path` is where it stands in the decision."""
    pad = "  " * depth
    lines = [f"{pad}# {line}" for line in _comments(path, decision, _WIDTH - len(pad))]
    note = _note(key, value)
    if isinstance(value, dict) and value:
        lines.append(f"{pad}{key}:")
        for inner, item in value.items():
            lines += _emit(inner, item, depth + 1, f"{path}.{inner}", decision)
    elif isinstance(value, list) and value and isinstance(value[0], dict):
        lines.append(f"{pad}{key}:")
        for index, item in enumerate(value):
            lines += _entry(item, depth + 1, f"{path}[{index}]", decision)
    elif key == "warnings" and value:
        lines.append(f"{pad}{key}:")
        lines += [f"{pad}  - {_flow(item)}" for item in value]
    else:
        lines.append(f"{pad}{key}: {_flow(value)}{note}")
    return lines


def _entry(item: dict[str, Any], depth: int, path: str, decision: Decision) -> list[str]:
    """A mapping in a list: the first line of content carries the dash."""
    lines: list[str] = []
    for key, value in item.items():
        lines += _emit(key, value, depth + 1, f"{path}.{key}", decision)
    first = next(i for i, line in enumerate(lines) if not line.lstrip().startswith("#"))
    pad = "  " * depth
    lines[first] = f"{pad}- {lines[first].lstrip()}"
    return lines


def _comments(path: str, decision: Decision, width: int) -> list[str]:
    """The reason of the choice that a value of the plan comes from."""
    names = ("staging", "slots", "retention", "redundancy")
    explained = {f"plan.{name}": name for name in names}
    for index, tier in enumerate(decision.plan.tiers):
        explained[f"plan.tiers[{index}].interval_steps"] = f"{tier.tier}.interval"
        if tier.tier == "disk":
            explained[f"plan.tiers[{index}].path"] = "path"
            explained[f"plan.tiers[{index}].codec"] = "codec"
    choice = decision.choice(explained.get(path, ""))
    return [] if choice is None else _reason_lines(choice, width)


def _reason_lines(choice: Choice, width: int) -> list[str]:
    said = [f"{choice.name} = {choice.chosen}: {choice.reason}"]
    if choice.runner_up:
        said.append(f"runner-up: {choice.runner_up_text}")
    if choice.binding:
        said.append(f"bound by: {choice.binding}")
    return [line for text in said for line in textwrap.wrap(text, width, subsequent_indent="  ")]


def _note(key: str, value: Any) -> str:
    """The value in the unit people use, behind it."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return ""
    if key.endswith("_per_s"):
        return f"  # {format_rate(value)}" if key.endswith("bytes_per_s") else ""
    if key.endswith("bytes"):
        return f"  # {value // 2**20} MiB" if value % 2**20 == 0 else f"  # {format_bytes(value)}"
    if key.endswith("_s"):
        return f"  # {format_duration(value)}"
    return f"  # {format_fraction(value)}" if "waste" in key else ""


def _flow(value: Any) -> str:
    """A scalar or an empty or plain collection on one line, quoted where YAML needs it."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, list):
        return "[" + ", ".join(_flow(item) for item in value) + "]"
    if isinstance(value, dict):
        return "{}"
    return str(yaml.safe_dump(value, default_style='"', width=10**9, allow_unicode=True)).strip()
