"""Telemetry as a table: one row per event, one column per field of any event; and as CSV.

A spreadsheet runs a cell that begins with = + - or @ as a formula, and reasons and details come
from outside.  Such text gets an apostrophe in front, as spreadsheets do themselves, and loses it
again when read back.  Several numbers of one field stand in one cell, with blanks between them.
"""

import io
import typing
from collections.abc import Iterable, Sequence
from dataclasses import fields
from typing import Any

import pandas as pd

from autockpt.values.errors import ConfigError
from autockpt.values.telemetry import EVENTS, Event, columns, event_data, event_from_data

RISKY = ("=", "+", "-", "@", "\t", "\r", "'")
"""First characters that need the apostrophe; the apostrophe itself, so that reading is exact."""


def telemetry_frame(events: Iterable[Event]) -> pd.DataFrame:
    """One row per event in the order given; fields that an event lacks are missing values."""
    rows = [event_data(event) for event in events]
    frame = pd.DataFrame(rows, columns=list(columns()), dtype=object)
    kinds = _kinds()
    for name in frame.columns:
        frame[name] = frame[name].astype(_DTYPES[kinds[name]])
    return frame


def to_csv(events: Iterable[Event]) -> str:
    """The table as CSV with a header line; floats in full precision."""
    frame = telemetry_frame(events)
    for name, kind in _kinds().items():
        if kind is str:
            frame[name] = frame[name].map(_guard, na_action="ignore")
        elif kind is tuple:
            frame[name] = frame[name].map(_several)
    text = frame.to_csv(index=False, lineterminator="\n")
    return str(text)


def from_csv(text: str) -> tuple[Event, ...]:
    """The events of `to_csv`.  Raises ConfigError for another header or a malformed cell."""
    frame = pd.read_csv(io.StringIO(text), dtype=str, keep_default_na=False, na_filter=False)
    if tuple(frame.columns) != columns():
        raise ConfigError(f"CSV columns {list(frame.columns)[:4]}... are not telemetry fields")
    names = list(frame.columns)
    return tuple(
        _event(dict(zip(names, row, strict=True)), f"CSV line {i + 2}")
        for i, row in enumerate(frame.itertuples(index=False, name=None))
    )


def summary(events: Sequence[Event]) -> pd.DataFrame:
    """Count, first and last time of each kind of event: the quick look at a run."""
    frame = telemetry_frame(events)
    grouped = frame.groupby("event", sort=False)["at_s"]
    return grouped.agg(["count", "min", "max"]).rename(columns={"min": "first", "max": "last"})


_DTYPES: dict[type, Any] = {
    str: "object", float: "Float64", int: "Int64", bool: "boolean", tuple: "object"
}  # fmt: skip


def _event(cells: dict[str, str], where: str) -> Event:
    """Cells of the event's own fields, each in its type; the rest must be empty."""
    kind = EVENTS.get(cells["event"])
    if kind is None:
        raise ConfigError(f"{where}: unknown event {cells['event']!r}")
    hints = typing.get_type_hints(kind)
    data: dict[str, Any] = {"event": cells["event"]}
    for field in fields(kind):
        cell = cells[field.name]
        try:
            data[field.name] = _unguard(cell) if hints[field.name] is str else _scalar(
                hints[field.name], cell
            )  # fmt: skip
        except (KeyError, ValueError) as error:
            raise ConfigError(f"{where}: {field.name}: {error}") from None
    return event_from_data(data, where=where)


def _scalar(kind: Any, cell: str) -> int | float | list[float] | None:
    if kind == tuple[float, ...]:
        return [float(number) for number in cell.split()]
    if kind == float | None:
        return float(cell) if cell else None
    if kind in (bool, bool | None):
        return {"True": True, "False": False, "": None}[cell]
    if kind is int:
        return int(cell)
    if kind is float:
        return float(cell)
    raise TypeError(f"events hold text, numbers and truths, not {kind}")


def _several(numbers: Any) -> Any:
    """Of an event that has them; another event's cell is missing and stays so."""
    return " ".join(map(repr, numbers)) if isinstance(numbers, list | tuple) else numbers


def _guard(text: Any) -> Any:
    return f"'{text}" if isinstance(text, str) and text.startswith(RISKY) else text


def _unguard(text: str) -> str:
    return text[1:] if text.startswith("'") else text


def _kinds() -> dict[str, type]:
    """Column -> str, int, float, bool or tuple (of floats); a name has one type in all events."""
    plain = {float | None: float, bool | None: bool, tuple[float, ...]: tuple}
    kinds: dict[str, type] = {"event": str}
    for kind in EVENTS.values():
        for name, hint in typing.get_type_hints(kind).items():
            kinds[name] = plain.get(hint, hint)
    return {name: kinds[name] for name in columns()}
