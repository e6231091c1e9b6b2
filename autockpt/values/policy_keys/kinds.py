"""The kinds of value that a policy key can have: how each is read, written and described.

A kind reads what YAML gave and returns seconds, bytes, fractions or counts.  It raises ValueError
with a message that names the expected value.  `auto` and null never reach a kind.
"""

import difflib
import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar, get_args

from autockpt.values.policy_keys.paths import STORES, path_problem, url_problem
from autockpt.values.units import (
    DURATION_UNITS,
    parse_duration_s,
    parse_fraction,
    parse_rate_bytes_per_s,
    parse_size_bytes,
)

T = TypeVar("T", bound=float)

MOST_STEPS, MOST_S = 10**12, 100 * 365 * 86400.0
"""Longest interval: the policies search for its divisors."""
ANY_COUNT = 10**6
"""Upper bound of a count without a natural one."""

_SIZES = {
    unit: float(parse_size_bytes(f"1 {unit}"))
    for unit in ("TiB", "GiB", "MiB", "KiB", "TB", "GB", "MB", "kB", "B")
}
_NUMBER = r"[0-9]+(\.[0-9]+)?([eE][+-]?[0-9]+)?"
_DURATION = rf"^({_NUMBER} *(us|ms|s|min|h|d) *)+$"
_SIZE = rf"^{_NUMBER} *([kKmMgGtT]i?)?[bB]$"
_PLAIN = re.compile(r"[A-Za-z/.](?:[\w./-]|:(?=\S))*")


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
    """Three letters."""


class Kind:
    """One kind of value."""

    words: tuple[str, ...] = ()
    """Words that are legal values."""
    values: tuple[str, ...] = ()
    """The legal values, or examples of them, as documents list them."""

    def read(self, value: Any) -> Any:
        """Return the value that YAML data stands for.  Raises ValueError."""
        raise NotImplementedError

    def joined(self, **parts: Any) -> Any:
        """Return the value whose attributes a Goal holds in fields of their own."""
        raise NotImplementedError

    def text(self, value: Any) -> str:
        """Return a text that `read` turns into exactly this value, as YAML and --set take it."""
        return str(value).lower() if isinstance(value, bool) else str(value)

    def schemas(self) -> list[dict[str, Any]]:
        """Return JSON schemas of the values that are no words."""
        return []


class Count(Kind):
    """A whole number from `low` to `high`."""

    def __init__(self, low: int, high: int = ANY_COUNT) -> None:
        self.low, self.high = low, high
        self.values = ("a count" if high == ANY_COUNT else f"{low} to {high}",)

    def read(self, value: Any) -> int:
        low, high = self.low, self.high
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise ValueError(f"expected auto or a whole number from {low} to {high}, got {value!r}")
        return value

    def schemas(self) -> list[dict[str, Any]]:
        return [{"type": "integer", "minimum": self.low, "maximum": self.high}]


class Words(Kind):
    """One of the words of a `Literal`."""

    def __init__(self, of: Any) -> None:
        self.words = get_args(of)
        self.values = tuple(f"`{word}`" for word in self.words)

    def read(self, value: Any) -> str:
        if isinstance(value, str) and value in self.words:
            return value
        close = difflib.get_close_matches(str(value), (*self.words, "auto"), n=1)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        raise ValueError(f"expected auto, {' or '.join(self.words)}, got {value!r}{hint}")


class Metric(Kind):
    """The name of a value that a script reports, after `min` or `max`."""

    values = ("`min loss`", "`max accuracy`")
    pattern = r"^(min|max) [A-Za-z_][\w./-]*$"

    def read(self, value: Any) -> str:
        if not isinstance(value, str) or not re.fullmatch(self.pattern, value):
            raise ValueError(f"expected min or max and a name, e.g. min loss, got {value!r:.80}")
        return value

    def schemas(self) -> list[dict[str, Any]]:
        return _strings(self.pattern)


class Switch(Kind):
    """true or false, or one of a few words beside them."""

    def __init__(self, *words: str) -> None:
        self.words = words
        self.values = tuple(f"`{word}`" for word in ("true", "false", *words))

    def read(self, value: Any) -> bool | str:
        if isinstance(value, str) and value in self.words:
            return value
        if not isinstance(value, bool):
            known = ", ".join(("true", "false", *self.words))
            raise ValueError(f"expected {known} or auto, got {value!r}")
        return value

    def schemas(self) -> list[dict[str, Any]]:
        return [{"type": "boolean"}]


# --- quantities with a unit -----------------------------------------------------------------------


class Quantity(Kind):
    """A number with a unit, more than 0."""

    pattern: ClassVar[str]
    units: ClassVar[Mapping[str, float]]

    def __init__(self, example: str) -> None:
        self.example = example
        self.values = (f"`{example}`",)

    def parse(self, text: str) -> float:
        """Return the number in its base unit.  Raises ConfigError."""
        raise NotImplementedError

    def read(self, value: Any) -> Any:
        return _positive(self.parse(_with_unit(value, self.example)), value)

    def text(self, value: Any) -> str:
        return _shortest(value, self.units, self.parse)

    def schemas(self) -> list[dict[str, Any]]:
        return _strings(self.pattern)


class Duration(Quantity):
    """`2 s`, `1 h 30 min`: seconds."""

    pattern = _DURATION
    units = DURATION_UNITS

    def parse(self, text: str) -> float:
        return parse_duration_s(text)


class Size(Quantity):
    """`64 GiB`: bytes."""

    pattern = _SIZE
    units = _SIZES

    def parse(self, text: str) -> int:
        return parse_size_bytes(text)


class Chunk(Size):
    """A size that is a power of two from 64 KiB to 1 GiB."""

    def read(self, value: Any) -> int:
        size: int = super().read(value)
        if not 2**16 <= size <= 2**30 or size & (size - 1):
            raise ValueError(f"{value!r} is not a power of two from 64 KiB to 1 GiB, e.g. 8 MiB")
        return size


class Rate(Quantity):
    """`2 GB/s`: bytes per second."""

    pattern = rf"^{_NUMBER} *([kKmMgGtT]i?)?B/s$"
    units: ClassVar = {f"{unit}/s": factor for unit, factor in _SIZES.items()}

    def parse(self, text: str) -> float:
        return parse_rate_bytes_per_s(text)


class Budget(Quantity):
    """More than 0 % and less than 100 %: a fraction."""

    pattern = rf"^{_NUMBER} *%$"

    def parse(self, text: str) -> float:
        return parse_fraction(text)

    def read(self, value: Any) -> float:
        fraction: float = super().read(value)
        if fraction >= 1:
            raise ValueError(f"{value!r} must be less than 100 %")
        return fraction

    def text(self, value: Any) -> str:
        return f"{value * 100:.15g} %"


class Share(Budget):
    """0 % to 100 %: a fraction."""

    def read(self, value: Any) -> float:
        fraction = self.parse(_with_unit(value, self.example))
        if not 0 <= fraction <= 1:
            raise ValueError(f"{value!r} must be between 0 % and 100 %")
        return fraction


class Interval(Kind):
    """`15 min` or `500 steps`: an Every."""

    def __init__(self, duration: str, steps: str) -> None:
        self.example = f"{duration} or {steps}"
        self.values = (f"`{duration}`", f"`{steps}`")

    def read(self, value: Any) -> Every:
        text = _with_unit(value, self.example)
        match = re.fullmatch(r"\s*([0-9]+)\s*steps?\s*", text)
        if match:
            return Every(steps=_at_most(int(match.group(1)), MOST_STEPS, value))
        if "step" in text:
            raise ValueError(f"{text!r} is not a whole number of steps, e.g. 500 steps")
        return Every(seconds=_at_most(parse_duration_s(text), MOST_S, value))

    def joined(self, **parts: Any) -> Every:
        return Every(**parts)

    def text(self, value: Any) -> str:
        if value.steps is not None:
            return f"{value.steps} steps"
        return _shortest(value.seconds, DURATION_UNITS, parse_duration_s)

    def schemas(self) -> list[dict[str, Any]]:
        return _strings(_DURATION, r"^[0-9]+ *steps?$")


class Price(Kind):
    """`32 USD/h` or `0.023 USD/GB-month`: a Money per hour, or per 10^9 bytes and month."""

    def __init__(self, example: str) -> None:
        self.example, self.values = example, (f"`{example}`",)
        self.unit = example.partition("/")[2]

    def read(self, value: Any) -> Money:
        per = "h" if self.unit == "h" else r"([kKmMgGtT]i?[bB])-month"
        number = r"([0-9.]+(?:[eE][+-]?[0-9]+)?)"
        text = _with_unit(value, self.example)
        match = re.fullmatch(rf"\s*{number}\s*([A-Z]{{3}})\s*/\s*{per}\s*", text)
        try:
            amount = float(match.group(1)) if match else math.nan
        except ValueError:
            amount = math.nan
        if match is None or math.isnan(amount):
            raise ValueError(f"{value!r} is not a price; write e.g. {self.example}")
        if not math.isfinite(_positive(amount, value)):
            raise ValueError(f"{value!r} is more than any price")
        if self.unit != "h":
            amount = amount * 1e9 / parse_size_bytes(f"1 {match.group(3)}")
        return Money(amount=amount, currency=match.group(2))

    def text(self, value: Any) -> str:
        return f"{value.amount!r} {value.currency}/{self.unit}"

    def schemas(self) -> list[dict[str, Any]]:
        per = "h" if self.unit == "h" else "[kKmMgGtT]i?[bB]-month"
        return _strings(rf"^{_NUMBER} *[A-Z]{{3}} */ *{per}$")


# --- places ---------------------------------------------------------------------------------------


class _Place(Kind):
    """A text that YAML may need in quotes."""

    pattern: ClassVar[str]

    def text(self, value: Any) -> str:
        return quoted(value)

    def schemas(self) -> list[dict[str, Any]]:
        return _strings(self.pattern)


class Directory(_Place):
    """A directory of this machine, or a place in an object store."""

    values = ("a directory", "`s3://bucket/run`", "`gs://`", "`az://`")
    pattern = "^.+$"

    def read(self, value: Any) -> str:
        if not isinstance(value, str):
            raise ValueError(f"expected a directory, got {value!r}")
        problem = path_problem(value)
        if problem:
            raise ValueError(problem)
        return value


class StoreUrl(_Place):
    """A place in an object store; keys have no place in it."""

    pattern = f"^({'|'.join(STORES)})://.+$"
    values = ("`s3://bucket/run-7`", "`gs://`", "`az://`", "`file:///`")

    def read(self, value: Any) -> str:
        problem = url_problem(value if isinstance(value, str) else "")
        if problem:
            raise ValueError(problem)
        return str(value).rstrip("/")


def quoted(text: str) -> str:
    """A string as YAML takes it."""
    return text if _PLAIN.fullmatch(text) else json.dumps(text, ensure_ascii=False)


# --- shared ---------------------------------------------------------------------------------------


def _strings(*patterns: str) -> list[dict[str, Any]]:
    return [{"type": "string", "pattern": pattern} for pattern in patterns]


def _with_unit(value: Any, example: str) -> str:
    if isinstance(value, bool):
        raise ValueError(f"expected a quantity such as {example}, got {str(value).lower()}")
    if isinstance(value, int | float):
        raise ValueError(f"a bare number is ambiguous; write a unit, e.g. {example}")
    return str(value)


def _positive(value: T, written: Any) -> T:
    if not value > 0:
        raise ValueError(f"{written!r} must be more than 0")
    return value


def _at_most(value: T, most: float, written: Any) -> T:
    if value > most:
        raise ValueError(f"{written!r} is longer than any training; leave it out, or say e.g. 1 d")
    return _positive(value, written)


def _shortest(value: float, units: Mapping[str, float], parse: Callable[[str], float]) -> str:
    """Return the text with the shortest number that is read as exactly this."""
    texts = [
        f"{value / factor:.{digits}g} {unit}"
        for unit, factor in units.items()
        for digits in (15, 17)
    ]
    exact = (text for text in texts if parse(text) == value)
    return min(exact, key=lambda text: len(text.split()[0]))
