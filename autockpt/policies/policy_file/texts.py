"""Policies as text for people: explain, diff, schema, and the starter file."""

from dataclasses import dataclass
from importlib import resources
from typing import Any

from autockpt.policies.policy_file.layers import Policy
from autockpt.policies.policy_file.model import PolicyFile


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """One key that two policies set differently."""

    path: str
    before: str
    after: str

    def __str__(self) -> str:
        return f"{self.path}: {self.before} -> {self.after}"


def explain(policy: Policy, path: str | None = None) -> str:
    """Every effective value and where it was written, as aligned lines; or those under `path`."""
    rows = [
        (value.path, value.value, value.source)
        for value in policy.values
        if path is None or value.path == path or value.path.startswith(f"{path}.")
    ]
    widths = [max((len(row[column]) for row in rows), default=0) for column in (0, 1)]
    return "\n".join(
        f"{key:<{widths[0]}}  {value:<{widths[1]}}  {source}".rstrip()
        for key, value, source in rows
    )


def diff(before: Policy, after: Policy) -> tuple[Difference, ...]:
    """The keys whose effective values differ, in the order of the schema."""
    return tuple(
        Difference(path=a.path, before=a.value, after=b.value)
        for a, b in zip(before.values, after.values, strict=True)
        if a.value != b.value
    )


def schema() -> dict[str, Any]:
    """JSON Schema of a policy file, with string patterns for quantities."""
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        **_auto_defaults(PolicyFile.model_json_schema()),
        "title": "autockpt policy",
    }


def _auto_defaults(data: Any) -> Any:
    """None stands for `auto` in the models, but null is refused in files."""
    if isinstance(data, list):
        return [_auto_defaults(item) for item in data]
    if not isinstance(data, dict):
        return data
    return {
        key: "auto" if key == "default" and value is None else _auto_defaults(value)
        for key, value in data.items()
    }


def init_text() -> str:
    """A commented policy file to start from; as it stands it is `builtin:auto`."""
    folder = resources.files("autockpt.policies.policy_file")
    return folder.joinpath("starter.yaml").read_text(encoding="utf-8")
