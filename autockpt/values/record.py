"""JSON round trip for the value types: strict on the way in, canonical on the way out.

A record is a frozen dataclass whose fields are None, bool, int, float, str, other records, tuples
of one type, dicts with string keys, `Literal`s and unions of these.  Reading refuses unknown keys,
missing fields, wrong types and unknown schema versions, and names the path of the field.
Floats that JSON has no word for are written as the strings "inf", "-inf" and "nan".
"""

import dataclasses
import json
import math
import types
import typing
from collections.abc import Mapping
from typing import Any, Literal, TypeVar

from autockpt.values.errors import ConfigError

T = TypeVar("T")

_DEPTH = 100
"""Nesting of any JSON data; more could not even be shown in an error."""
_ANY_DEPTH = 16
"""Nesting of opaque JSON data (a plan on the wire, a shard's record in a COMMIT)."""

_PLAIN = frozenset((str, int, bool, type(None)))
"""Types that are their own JSON data: most of what messages and events carry."""

_NON_FINITE = {"inf": math.inf, "-inf": -math.inf, "nan": math.nan}


def to_data(value: Any) -> Any:
    """The plain JSON data (dict, list, str, number, bool, None) of a record."""
    if type(value) in _PLAIN:
        return value
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: to_data(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): to_data(item) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return [to_data(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return repr(value)
    return value


def to_json(value: Any, *, indent: int | None = None) -> str:
    """Canonical JSON text of a record: same value, same bytes."""
    separators = (",", ":") if indent is None else (",", ": ")
    return json.dumps(to_data(value), indent=indent, separators=separators, allow_nan=False)


def from_json(cls: type[T], text: str | bytes, *, where: str = "") -> T:
    """The record written by `to_json`.  Raises ConfigError naming `where` and the field's path."""
    try:
        data = parse_json(text)
    except ValueError as error:
        raise ConfigError(f"{where or cls.__name__}: not valid JSON: {error}") from None
    return from_data(cls, data, where=where)


def parse_json(text: str | bytes) -> Any:
    """JSON data, read strictly: a key once, no NaN, no endless nesting.  Raises ValueError."""
    try:
        data = json.loads(text, object_pairs_hook=_no_duplicates, parse_constant=_no_constant)
    except RecursionError:
        pass
    else:
        if _brackets(text) <= _DEPTH or not _is_deep(data):
            return data
    raise ValueError(f"nested more than {_DEPTH} deep")


def _brackets(text: str | bytes) -> int:
    """So deep it may be; most records need no second look."""
    if isinstance(text, str):
        return text.count("[") + text.count("{")
    return text.count(b"[") + text.count(b"{")


def _is_deep(data: Any) -> bool:
    level = [data]
    for _ in range(_DEPTH):
        lists = [one for one in level if isinstance(one, list)]
        lists += [list(one.values()) for one in level if isinstance(one, dict)]
        level = [item for items in lists for item in items]
        if not level:
            return False
    return True


def from_data(cls: type[T], data: Any, *, where: str = "") -> T:
    """The record whose `to_data` is `data`.  Raises ConfigError naming `where` and the path."""
    return typing.cast(T, _read(cls, data, where or cls.__name__))


def _no_constant(name: str) -> typing.NoReturn:
    raise ValueError(f"{name} is no JSON number")


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise ValueError(f"key {twice!r} stands twice")
    return result


def _read(kind: Any, data: Any, path: str) -> Any:
    origin = typing.get_origin(kind)
    if kind is Any:
        _require_shallow(data, path, _ANY_DEPTH)
        return data
    if dataclasses.is_dataclass(kind):
        return _read_record(typing.cast(type, kind), data, path)
    if origin in (typing.Union, types.UnionType):
        return _read_union(typing.get_args(kind), data, path)
    if origin is Literal:
        if data not in typing.get_args(kind):
            _refuse(path, " | ".join(map(repr, typing.get_args(kind))), data)
        return data
    if origin is tuple:
        item = typing.get_args(kind)[0]
        if not isinstance(data, list):
            _refuse(path, "a list", data)
        return tuple(_read(item, entry, f"{path}[{i}]") for i, entry in enumerate(data))
    if origin in (dict, Mapping) or origin is typing.get_origin(Mapping[str, int]):
        item = typing.get_args(kind)[1]
        if not isinstance(data, dict):
            _refuse(path, "an object", data)
        return {key: _read(item, entry, f"{path}.{key}") for key, entry in data.items()}
    return _read_scalar(kind, data, path)


def _read_scalar(kind: Any, data: Any, path: str) -> Any:
    if kind is float:
        if isinstance(data, str) and data in _NON_FINITE:
            return _NON_FINITE[data]
        if isinstance(data, int | float) and not isinstance(data, bool):
            try:
                return float(data)
            except OverflowError:
                _refuse(path, "a float", "an integer beyond 1.8e308")
    elif kind is int:
        if isinstance(data, int) and not isinstance(data, bool):
            return data
    elif kind in (bool, str) and isinstance(data, kind):
        return data
    elif kind is type(None) and data is None:
        return None
    _refuse(path, getattr(kind, "__name__", str(kind)), data)


def _read_union(kinds: tuple[Any, ...], data: Any, path: str) -> Any:
    if data is None and type(None) in kinds:
        return None
    rest = [kind for kind in kinds if kind is not type(None)]
    if len(rest) == 1:
        return _read(rest[0], data, path)
    for kind in rest:
        try:
            return _read(kind, data, path)
        except ConfigError:
            continue
    _refuse(path, " | ".join(getattr(kind, "__name__", str(kind)) for kind in rest), data)


def _read_record(cls: type, data: Any, path: str) -> Any:
    if not isinstance(data, dict):
        _refuse(path, f"an object ({cls.__name__})", data)
    fields = {field.name: field for field in dataclasses.fields(cls)}
    version = fields.get("schema_version")
    if version is not None:
        known = version.default
        got = data.get("schema_version")
        if got != known:
            raise ConfigError(
                f"{path}: {cls.__name__} has schema_version {got!r}, this autockpt reads {known}; "
                "write it again with this version, or install the version that wrote it"
            )
    unknown = sorted(set(data) - set(fields), key=str)  # YAML has keys of every kind
    if unknown:
        raise ConfigError(f"{path}: unknown field {unknown[0]!r} of {cls.__name__}")
    hints = _hints(cls)
    values = {}
    for name, field in fields.items():
        if name in data:
            values[name] = _read(hints[name], data[name], f"{path}.{name}")
        elif field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            raise ConfigError(f"{path}: field {name!r} of {cls.__name__} is missing")
    try:
        return cls(**values)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None


def _require_shallow(data: Any, path: str, depth: int) -> None:
    """Whoever walks this data later must not run out of stack."""
    if depth < 0:
        raise ConfigError(f"{path}: nested deeper than {_ANY_DEPTH}")
    for item in data.values() if isinstance(data, dict) else data if isinstance(data, list) else ():
        _require_shallow(item, path, depth - 1)


_HINTS: dict[type, dict[str, Any]] = {}


def _hints(cls: type) -> dict[str, Any]:
    if cls not in _HINTS:
        _HINTS[cls] = typing.get_type_hints(cls)
    return _HINTS[cls]


def _refuse(path: str, expected: str, got: Any) -> typing.NoReturn:
    shown = repr(got)
    raise ConfigError(f"{path}: expected {expected}, got {shown[:80]}")
