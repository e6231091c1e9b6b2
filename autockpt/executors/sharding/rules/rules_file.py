"""Rules as data, as they stand in a YAML file.

copies: [dp]
rules:
  - {match: "*.norm.weight", replicated: [tp]}
  - {match: "*.qkv.weight", sharded: {dim: 0, over: tp}, sub_parameters: [4096, 1024, 1024]}
  - {match: "*.gate_up.weight", sharded: {dim: 0, over: tp}, sub_parameters: 2}
  - {match: "embed.weight", sharded: {dim: 0, over: tp}, padded_vocabulary: {rows: 50257}}
  - {match: "*.experts.*", expert: {over: ep, total: 64}}
  - {match: "re:.*router[.]bias", averaged: [tp]}
  - {match: "noise", unique: [dp, tp]}
"""

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

from autockpt.executors.sharding.rules.rules import Expert, PaddedVocabulary, Rule, Rules, Sharded
from autockpt.values.errors import ConfigError
from autockpt.values.record import from_data

T = TypeVar("T")


def load_rules(data: Any) -> Rules:
    """Rules from the data of a YAML or JSON file.  Raises ConfigError naming the bad entry."""
    given = _mapping(data, "rules file", ("rules", "copies"))
    entries = given.get("rules") or []
    if not isinstance(entries, list):
        raise ConfigError(f"rules: expected a list, got {type(entries).__name__}")
    return Rules(
        rules=tuple(_rule(entry, f"rules[{i}]") for i, entry in enumerate(entries)),
        copies=_axes(given.get("copies") or [], "copies"),
    )


def _rule(entry: Any, where: str) -> Rule:
    given = _mapping(entry, where, [field.name for field in dataclasses.fields(Rule)])
    match = given.get("match")
    if not isinstance(match, str):
        raise ConfigError(f"{where}.match: expected a pattern of names, got {match!r}")
    try:
        rule = Rule(
            match=match,
            sharded=_inner(Sharded, given, "sharded", where),
            sub_parameters=_parts(given.get("sub_parameters", 1), f"{where}.sub_parameters"),
            padded_vocabulary=_inner(PaddedVocabulary, given, "padded_vocabulary", where),
            expert=_inner(Expert, given, "expert", where),
            replicated=_axes(given.get("replicated", []), f"{where}.replicated"),
            averaged=_axes(given.get("averaged", []), f"{where}.averaged"),
            unique=_axes(given.get("unique", []), f"{where}.unique"),
        )
        rule.matches("")  # compiles an expression
    except ConfigError as error:
        at = "" if str(error).startswith(where) else f"{where}: "
        raise ConfigError(f"{at}{error}") from None
    return rule


def _inner(kind: type[T], given: Mapping[str, Any], key: str, where: str) -> T | None:
    return from_data(kind, given[key], where=f"{where}.{key}") if key in given else None


def _mapping(data: Any, where: str, keys: Iterable[str]) -> Mapping[str, Any]:
    if not isinstance(data, Mapping):
        raise ConfigError(f"{where}: expected keys and values, got {type(data).__name__}")
    unknown = [key for key in data if key not in (known := list(keys))]
    if unknown:
        raise ConfigError(f"{where}: unknown key {unknown[0]!r}; known: {', '.join(known)}")
    return data


def _axes(value: Any, where: str) -> tuple[str, ...]:
    if not isinstance(value, list) or not all(isinstance(axis, str) for axis in value):
        raise ConfigError(f"{where}: expected a list of axes as [dp, tp], got {value!r}")
    return tuple(value)


def _parts(value: Any, where: str) -> int | tuple[int, ...]:
    widths = value if isinstance(value, list) else [value]
    if not widths or not all(type(width) is int and width > 0 for width in widths):
        raise ConfigError(
            f"{where}: expected a number of equal parts or their widths [8, 4, 4], got {value!r}"
        )
    return tuple(widths) if isinstance(value, list) else int(value)
