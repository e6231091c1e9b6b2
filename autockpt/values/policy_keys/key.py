"""One row of the table of policy keys, declared on the field of a Goal that it sets."""

from dataclasses import dataclass, field
from typing import Any

from autockpt.values.policy_keys.kinds import Kind

METADATA = "policy key"
"""Name under which a dataclass field carries its `Place`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Key:
    """A key of a policy file."""

    path: str
    """Section and name with a dot between, or a name at the top level."""
    kind: Kind
    doc: str
    """One line for the starter file, an editor and the documents; Markdown only for names."""
    more: str = ""
    """Further sentences for the documents, in Markdown."""
    alias: str = ""
    """A short name at the top level for the same key."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Which key a field of a Goal is set by."""

    path: str
    key: Key | None = None
    """The key's row; None where another field has it."""
    part: str = ""
    """The attribute of the key's value that this field holds; "": the value itself."""


def key(
    path: str,
    kind: Kind | None = None,
    doc: str = "",
    *,
    more: str = "",
    alias: str = "",
    part: str = "",
    default: Any = None,
) -> Any:
    """A dataclass field that a policy key sets; `default` stands for `auto`.

    A key that sets several fields has its kind and its text on one of them.
    """
    row = None if kind is None else Key(path=path, kind=kind, doc=doc, more=more, alias=alias)
    return field(default=default, metadata={METADATA: Place(path=path, key=row, part=part)})
