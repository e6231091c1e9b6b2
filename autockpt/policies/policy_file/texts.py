"""Policies as text for people: explain and diff."""

from dataclasses import dataclass

from autockpt.policies.policy_file.layers import Policy
from autockpt.values.table import columns


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """One key that two policies set differently."""

    path: str
    before: str
    after: str

    def __str__(self) -> str:
        return f"{self.path}: {self.before} -> {self.after}"


def explain(policy: Policy, path: str | None = None, *, width: int | None = None) -> str:
    """Every effective value and where it was written, as aligned lines; or those under `path`."""
    rows = [
        (value.path, value.value, value.source)
        for value in policy.values
        if path is None or value.path == path or value.path.startswith(f"{path}.")
    ]
    return "\n".join(columns(rows, width=width))


def diff(before: Policy, after: Policy) -> tuple[Difference, ...]:
    """The keys whose effective values differ, in the order of the schema."""
    return tuple(
        Difference(path=a.path, before=a.value, after=b.value)
        for a, b in zip(before.values, after.values, strict=True)
        if a.value != b.value
    )
