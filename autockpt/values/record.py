"""JSON round trip for the value types: strict on the way in, canonical on the way out.

A record is a frozen dataclass.  Its fields are None, bool, int, float, str, other records, tuples
of one type, dicts with string keys, `Literal`s and unions of these.  Reading refuses unknown keys,
missing fields, wrong types and unknown schema versions, and names the path of the field.  Floats
that JSON has no word for are written as the strings "inf", "-inf" and "nan".
"""

import dataclasses
import json
import math
import types
import typing
from collections.abc import Callable, Mapping
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
    kind = type(value)
    if kind in _PLAIN:
        return value
    if kind is float:
        return value if math.isfinite(value) else repr(value)
    if (names := _NAMES.get(kind)) is not None:
        return {name: to_data(getattr(value, name)) for name in names}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {name: to_data(getattr(value, name)) for name in _names(type(value))}
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
    try:
        return typing.cast(T, _reader(cls)(data))
    except _UnfitError as unfit:
        raise ConfigError(f"{where or cls.__name__}{unfit.path}: {unfit.text}") from None


def _no_constant(name: str) -> typing.NoReturn:
    raise ValueError(f"{name} is no JSON number")


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise ValueError(f"key {twice!r} stands twice")
    return result


class _UnfitError(Exception):
    """Data is not of its kind: `path` within what was read grows on the way out."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.path = ""
        self.text = text

    def within(self, step: str) -> "_UnfitError":
        """One step further out."""
        self.path = step + self.path
        return self


_Reader = Callable[[Any], Any]
"""Takes JSON data, gives the value; raises _UnfitError.

Readers are made once for every record: a large job reads thousands of messages for one checkpoint.
"""


def _reader(kind: Any) -> _Reader:
    origin = typing.get_origin(kind)
    if kind is Any:
        return _read_any
    if dataclasses.is_dataclass(kind):
        record = typing.cast(type, kind)
        if record not in _RECORDS:
            _RECORDS[record] = _RecordReader(record)
        return _RECORDS[record]
    if origin in (typing.Union, types.UnionType):
        return _union_reader(typing.get_args(kind))
    if origin is Literal:
        return _literal_reader(typing.get_args(kind))
    if origin is tuple:
        return _tuple_reader(_reader(typing.get_args(kind)[0]))
    if origin in (dict, Mapping) or origin is typing.get_origin(Mapping[str, int]):
        return _dict_reader(_reader(typing.get_args(kind)[1]))
    return _scalar_reader(kind)


class _RecordReader:
    """Reads one kind of record."""

    def __init__(self, cls: type) -> None:
        self._cls = cls
        self._fields: tuple[tuple[str, _Reader, bool], ...] | None = None
        """(name, reader, whether it has to be there); made at the first use, as records name one
        another."""
        self._known: frozenset[str] = frozenset()
        self._version: Any = None

    def _prepare(self) -> tuple[tuple[str, _Reader, bool], ...]:
        fields = dataclasses.fields(self._cls)
        hints = typing.get_type_hints(self._cls)
        missing = dataclasses.MISSING
        self._known = frozenset(field.name for field in fields)
        self._version = next((f.default for f in fields if f.name == "schema_version"), None)
        self._fields = tuple(
            (f.name, _reader(hints[f.name]), f.default is missing and f.default_factory is missing)
            for f in fields
        )
        return self._fields

    def __call__(self, data: Any) -> Any:
        fields = self._fields or self._prepare()
        if not isinstance(data, dict):
            _refuse(f"an object ({self._cls.__name__})", data)
        if self._version is not None:
            self._require_version(data.get("schema_version"))
        if not data.keys() <= self._known:
            unknown = sorted(set(data) - self._known, key=str)  # YAML has keys of every kind
            raise _UnfitError(f"unknown field {unknown[0]!r} of {self._cls.__name__}")
        values = {}
        name = ""
        try:
            for name, read, required in fields:
                if name in data:
                    values[name] = read(data[name])
                elif required:
                    break
            else:
                name = ""
        except _UnfitError as unfit:
            raise unfit.within(f".{name}") from None
        if name:
            raise _UnfitError(f"field {name!r} of {self._cls.__name__} is missing")
        try:
            return self._cls(**values)
        except ConfigError as error:
            raise _UnfitError(str(error)) from None

    def _require_version(self, got: Any) -> None:
        if got != self._version:
            raise _UnfitError(
                f"{self._cls.__name__} has schema_version {got!r}, this autockpt reads "
                f"{self._version}; write it again with this version, or install the version that "
                "wrote it"
            )


_RECORDS: dict[type, _RecordReader] = {}


def _union_reader(kinds: tuple[Any, ...]) -> _Reader:
    optional = type(None) in kinds
    rest = [kind for kind in kinds if kind is not type(None)]
    readers = [_reader(kind) for kind in rest]
    expected = " | ".join(getattr(kind, "__name__", str(kind)) for kind in rest)

    def read(data: Any) -> Any:
        if data is None and optional:
            return None
        if len(readers) == 1:
            return readers[0](data)
        for one in readers:
            try:
                return one(data)
            except _UnfitError:
                continue
        _refuse(expected, data)

    return read


def _literal_reader(allowed: tuple[Any, ...]) -> _Reader:
    def read(data: Any) -> Any:
        if data not in allowed:
            _refuse(" | ".join(map(repr, allowed)), data)
        return data

    return read


def _tuple_reader(item: _Reader) -> _Reader:
    def read(data: Any) -> Any:
        if not isinstance(data, list):
            _refuse("a list", data)
        values: list[Any] = []
        try:
            for entry in data:
                values.append(item(entry))
        except _UnfitError as unfit:
            raise unfit.within(f"[{len(values)}]") from None
        return tuple(values)

    return read


def _dict_reader(item: _Reader) -> _Reader:
    def read(data: Any) -> Any:
        if not isinstance(data, dict):
            _refuse("an object", data)
        values: dict[str, Any] = {}
        key = ""
        try:
            for key, entry in data.items():
                values[key] = item(entry)
        except _UnfitError as unfit:
            raise unfit.within(f".{key}") from None
        return values

    return read


def _scalar_reader(kind: Any) -> _Reader:
    def read(data: Any) -> Any:
        return data if type(data) is kind and kind in _AS_THEY_ARE else _read_scalar(kind, data)

    return read


_AS_THEY_ARE = frozenset((str, int, bool, float))


def _read_scalar(kind: Any, data: Any) -> Any:
    if kind is float:
        if isinstance(data, str) and data in _NON_FINITE:
            return _NON_FINITE[data]
        if isinstance(data, int | float) and not isinstance(data, bool):
            try:
                return float(data)
            except OverflowError:
                _refuse("a float", "an integer beyond 1.8e308")
    elif kind is int:
        if isinstance(data, int) and not isinstance(data, bool):
            return data
    elif kind in (bool, str) and isinstance(data, kind):
        return data
    elif kind is type(None) and data is None:
        return None
    _refuse(getattr(kind, "__name__", str(kind)), data)


def _read_any(data: Any) -> Any:
    _require_shallow(data, _ANY_DEPTH)
    return data


def _require_shallow(data: Any, depth: int) -> None:
    """Code that walks this data later must not run out of stack."""
    items = data.values() if isinstance(data, dict) else data if isinstance(data, list) else ()
    if items and depth == 0:
        raise _UnfitError(f"nested deeper than {_ANY_DEPTH}")
    for item in items:
        if isinstance(item, dict | list):
            _require_shallow(item, depth - 1)


_NAMES: dict[type, tuple[str, ...]] = {}


def _names(cls: type) -> tuple[str, ...]:
    names = _NAMES.get(cls)
    if names is None:
        names = _NAMES[cls] = tuple(field.name for field in dataclasses.fields(cls))
    return names


def _refuse(expected: str, got: Any) -> typing.NoReturn:
    shown = repr(got)
    raise _UnfitError(f"expected {expected}, got {shown[:80]}")
