"""Warnings for people: each stands once, and one sentence has all of a kind.

A warning is `subject: circumstances; advice`.  Equal advice is given once for all its subjects.
"""

from collections.abc import Iterable, Sequence

UNMEASURED = (" was not measured: ", " were not measured: ")


def grouped(warnings: Iterable[str]) -> tuple[str, ...]:
    """Return the warnings in their order; a group stands where its first member stood."""
    every = tuple(dict.fromkeys(warnings))
    groups: dict[str, list[str]] = {}
    for warning in every:
        groups.setdefault(_kind(warning), []).append(warning)
    return tuple(_told(kind, members) for kind, members in groups.items())


def _kind(warning: str) -> str:
    """Advice at the end, or that nothing was measured; else the warning itself."""
    if any(words in warning for words in UNMEASURED):
        return UNMEASURED[0]
    _, separator, advice = warning.rpartition("; ")
    return advice if separator else warning


def _told(kind: str, members: Sequence[str]) -> str:
    if len(members) == 1:
        return members[0]
    if kind == UNMEASURED[0]:
        return f"{len(members)} quantities were not measured: {'; '.join(map(_missing, members))}"
    subjects = "; ".join(member.removesuffix(f"; {kind}") for member in members)
    return f"{len(members)} times: {kind}. It concerns {subjects}"


def _missing(warning: str) -> str:
    words = next(words for words in UNMEASURED if words in warning)
    what, _, instead = warning.partition(words)
    return f"{what} ({instead})"
