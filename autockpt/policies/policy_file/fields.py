"""What a value of a policy file may be: one reading function for each kind of field.

A reader takes what YAML gave and returns seconds, bytes, fractions, counts; it raises ValueError
with a message that says what was expected.  `guarded` adds what holds everywhere: `auto` is legal
(None stands for it) and null is not.
"""

import difflib
import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from autockpt.values.errors import ConfigError
from autockpt.values.paths import path_problem
from autockpt.values.plan import is_chunk
from autockpt.values.units import (
    parse_duration_s,
    parse_fraction,
    parse_rate_bytes_per_s,
    parse_size_bytes,
)

MOST_STEPS, MOST_S = 10**12, 100 * 365 * 86400.0
"""Of an interval: what divides it is searched for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Every:
    """An interval as it was written: iterations or seconds."""

    steps: int | None = None
    seconds: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Money:
    """A price as it was written, per GB-month or per hour."""

    amount: float
    currency: str


def guarded(read: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """`auto` is None, null is refused, and a ConfigError becomes what pydantic collects."""

    def check(value: Any) -> Any:
        if value is None:
            raise ValueError("null is not a value; write auto, or leave the key out")
        if value == "auto":
            return None
        if isinstance(value, dict | list):
            kind = "mapping" if isinstance(value, dict) else "list"
            raise ValueError(f"expected one value, got a {kind}")
        try:
            return read(value)
        except ConfigError as error:
            raise ValueError(str(error)) from None

    return check


def _text(value: Any, example: str) -> str:
    if isinstance(value, bool):
        raise ValueError(f"expected {example}, got {str(value).lower()}")
    if isinstance(value, int | float):
        raise ValueError(f"a bare number is ambiguous; write a unit, e.g. {example}")
    return str(value)


def _positive(value: float, written: Any) -> float:
    if not value > 0:
        raise ValueError(f"{written!r} must be more than 0")
    return value


def _interval(value: float, most: float, written: Any) -> float:
    if value > most:
        raise ValueError(f"{written!r} is longer than any training; leave it out, or say e.g. 1 d")
    return _positive(value, written)


def read_interval(value: Any) -> Every:
    """`15 min` or `500 steps`."""
    text = _text(value, "15 min or 500 steps")
    match = re.fullmatch(r"\s*([0-9]+)\s*steps?\s*", text)
    if match:
        return Every(steps=int(_interval(int(match.group(1)), MOST_STEPS, value)))
    if "step" in text:
        raise ValueError(f"{text!r} is not a whole number of steps, e.g. 500 steps")
    return Every(seconds=_interval(parse_duration_s(text), MOST_S, value))


def read_duration_s(value: Any) -> float:
    """`2 s`, `1 h 30 min`."""
    return _positive(parse_duration_s(_text(value, "15 min")), value)


def read_size_bytes(value: Any) -> int:
    """`64 GiB`."""
    return int(_positive(parse_size_bytes(_text(value, "64 MiB")), value))


def read_chunk_bytes(value: Any) -> int:
    """A size that is a power of two from 64 KiB to 1 GiB."""
    size = read_size_bytes(value)
    if not is_chunk(size):
        raise ValueError(f"{value!r} is not a power of two from 64 KiB to 1 GiB, e.g. 8 MiB")
    return size


def read_rate_bytes_per_s(value: Any) -> float:
    """`2 GB/s`."""
    return _positive(parse_rate_bytes_per_s(_text(value, "2 GB/s")), value)


def read_storage_price(value: Any) -> Money:
    """`0.023 USD/GB-month`, also per TB or GiB: amount per 10^9 bytes and month."""
    money, unit = _money(value, r"([kKmMgGtT]i?[bB])-month", "0.023 USD/GB-month")
    return Money(amount=money.amount * 1e9 / parse_size_bytes(f"1 {unit}"), currency=money.currency)


def read_hourly_price(value: Any) -> Money:
    """`32 USD/h`."""
    return _money(value, "(h)", "32 USD/h")[0]


def _money(value: Any, per: str, example: str) -> tuple[Money, str]:
    match = re.fullmatch(
        rf"\s*([0-9.]+(?:[eE][+-]?[0-9]+)?)\s*([A-Z]{{3}})\s*/\s*{per}\s*", _text(value, example)
    )
    if match is None:
        raise ValueError(f"{value!r} is not a price; write e.g. {example}")
    try:
        amount = float(match.group(1))
    except ValueError:
        raise ValueError(f"{value!r} is not a price; write e.g. {example}") from None
    if not math.isfinite(_positive(amount, value)):
        raise ValueError(f"{value!r} is more than any price")
    return Money(amount=amount, currency=match.group(2)), match.group(3)


def read_budget(value: Any) -> float:
    """More than 0 % and less than 100 %."""
    fraction = _positive(parse_fraction(_text(value, "2 %")), value)
    if fraction >= 1:
        raise ValueError(f"{value!r} must be less than 100 %")
    return fraction


def read_share(value: Any) -> float:
    """0 % to 100 %."""
    fraction = parse_fraction(_text(value, "40 %"))
    if not 0 <= fraction <= 1:
        raise ValueError(f"{value!r} must be between 0 % and 100 %")
    return fraction


def read_switch(value: Any) -> bool:
    """true or false and nothing else."""
    if not isinstance(value, bool):
        raise ValueError(f"expected true, false or auto, got {value!r}")
    return value


def read_retune(value: Any) -> bool | Literal["observe"]:
    """true, false, or the word observe."""
    if value == "observe":
        return "observe"
    if not isinstance(value, bool):
        raise ValueError(f"expected true, false, observe or auto, got {value!r}")
    return value


def read_source(value: Any) -> str:
    """A policy file, or builtin:NAME."""
    if not isinstance(value, str) or not value.strip():
        raise ValueError(f"expected a policy file or builtin:NAME, got {value!r}")
    return value


def read_path(value: Any) -> str:
    """A directory of this machine."""
    if not isinstance(value, str):
        raise ValueError(f"expected a directory, got {value!r}")
    problem = path_problem(value)
    if problem:
        raise ValueError(problem)
    return value


STORES = ("s3", "gs", "az", "file")
"""Schemes of object stores; `file` is a mounted directory."""


def read_url(value: Any) -> str:
    """Where objects go; keys have no place in it."""
    where = value.partition("://") if isinstance(value, str) else ("", "", "")
    if where[0] not in STORES or not where[2].strip("/"):
        raise ValueError(
            f"expected {'://, '.join(STORES)}:// and a place there, e.g. s3://bucket/run-7"
        )
    if "@" in where[2].partition("/")[0] or "?" in where[2]:
        raise ValueError("names a user or an option; keys and options stand in the environment")
    return str(value).rstrip("/")


def count_reader(low: int, high: int) -> Callable[[Any], int]:
    """Whole numbers from `low` to `high`."""

    def read(value: Any) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise ValueError(f"expected auto or a whole number from {low} to {high}, got {value!r}")
        return value

    return read


def word_reader(*words: str) -> Callable[[Any], str]:
    """One of `words`."""

    def read(value: Any) -> str:
        if isinstance(value, str) and value in words:
            return value
        close = difflib.get_close_matches(str(value), (*words, "auto"), n=1)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        raise ValueError(f"expected auto, {' or '.join(words)}, got {value!r}{hint}")

    return read
