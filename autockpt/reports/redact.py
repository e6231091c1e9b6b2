"""The same data without paths and hosts, for a report that leaves the house.

Everything is redacted before the report is built, so the page, the text and the embedded JSON are
clean alike.  Equal things get equal tokens ([path-1], [host-2]), so that a reader can still follow.
What cannot be recognised as a path or host (a project's name in a title) stays: look before you
send.
"""

import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import Any, cast

from autockpt.reports.data import RunData

_HOST_ENDINGS = "com|net|org|io|edu|gov|ai|dev|cloud|local|internal|lan|corp|intra|home|svc"
_PATTERN = re.compile(
    r"(?P<uri>\b[a-zA-Z][a-zA-Z0-9+.-]*://[^\s'\"<>,;]+)"
    r"|(?P<user>\b[\w.+-]+@[\w.-]+)"
    r"|(?P<path>(?:(?<![\w./])|(?<=[=:(\[]))(?:~[\w.-]*|\.{1,2})?/[\w.@%+~-][^\s'\"<>,;)\]]*)"
    r"|(?P<windows>\b[A-Za-z]:\\[^\s'\"<>,;]+|\\\\[\w.-]+\\[^\s'\"<>,;]+)"
    r"|(?P<ip>\b\d{1,3}(?:\.\d{1,3}){3}\b(?!\.))"
    r"|(?P<ip6>\b(?:[0-9a-fA-F]{1,4}:){3,7}[0-9a-fA-F]{1,4}\b|\b[0-9a-fA-F]{1,4}(?::[0-9a-fA-F]{0,4}){0,6}::[0-9a-fA-F:]*)"
    rf"|(?P<name>\b(?:[a-zA-Z0-9_-]+\.)+(?:{_HOST_ENDINGS})\b)"
)
_COMMAND_PATH = re.compile(r"(?<![\w\]])[\w.@%+~-]+(?:/[\w.@%+~-]+)+/?")
"""A relative path with a folder in it; only in commands, as prose has "and/or"."""
_HOSTLIKE = ("uri", "user", "ip", "ip6", "name")


class _Tokens:
    """Hands out one token per secret."""

    def __init__(self, hosts: tuple[str, ...]) -> None:
        known = sorted((host for host in hosts if host), key=len, reverse=True)
        names = "|".join(re.escape(host) for host in known)
        pattern = rf"(?<![\w-])(?:{names})(?![\w-])"
        self._hosts = re.compile(pattern, re.IGNORECASE) if names else None
        self._tokens: dict[tuple[str, str], str] = {}

    def clean(self, text: str, *, command: bool) -> str:
        """`text` with every path and host replaced."""
        text = _PATTERN.sub(self._replace, text)
        if command:
            text = _COMMAND_PATH.sub(lambda m: self._token("path", m.group()), text)
        if self._hosts is not None:
            text = self._hosts.sub(lambda m: self._token("host", m.group().lower()), text)
        return text

    def _replace(self, match: re.Match[str]) -> str:
        kind = "host" if match.lastgroup in _HOSTLIKE else "path"
        return self._token(kind, match.group())

    def _token(self, kind: str, secret: str) -> str:
        count = sum(1 for known, _ in self._tokens if known == kind)
        return self._tokens.setdefault((kind, secret), f"[{kind}-{count + 1}]")


_COMMANDS = frozenset({"command", "argv", "resume", "train", "title"})


def redact(data: RunData) -> RunData:
    """`data` with paths, addresses and host names replaced in every text, keys included."""
    return redact_together((data,))[0]


def redact_together(runs: Sequence[RunData]) -> tuple[RunData, ...]:
    """The same of several runs with one set of tokens: what differs between them still does."""
    tokens = _Tokens(tuple(host for data in runs for host in data.hosts))
    cleaned = [cast(RunData, _walk(data, tokens, command=False)) for data in runs]
    return tuple(dataclasses.replace(data, hosts=()) for data in cleaned)


def _walk(value: Any, tokens: _Tokens, *, command: bool) -> Any:
    if isinstance(value, str):
        return tokens.clean(value, command=command)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        changed = {
            f.name: _walk(getattr(value, f.name), tokens, command=f.name in _COMMANDS)
            for f in dataclasses.fields(value)
        }
        return dataclasses.replace(value, **changed)
    if isinstance(value, Mapping):
        return {
            _walk(key, tokens, command=False): _walk(item, tokens, command=command)
            for key, item in value.items()
        }
    if isinstance(value, tuple | list):
        return type(value)(_walk(item, tokens, command=command) for item in value)
    return value
