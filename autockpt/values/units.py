"""Quantities with units: parsed from what people write, printed as people read them.

Sizes are binary (KiB .. PiB) or decimal (kB .. PB, MB = 10^6).  Durations are us, ms, s, min, h, d
and compounds such as `1 h 30 min`.  Rates are a size per second, and fractions are written with %.
A bare number is refused (0 excepted), because it could be seconds or steps.
"""

import difflib
import math
import re

from autockpt.values.errors import ConfigError

SIZE_UNITS = {
    "b": 1,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
    "kib": 2**10,
    "mib": 2**20,
    "gib": 2**30,
    "tib": 2**40,
    "pb": 10**15,
    "pib": 2**50,
}
DURATION_UNITS = {
    "us": 1e-6,
    "ms": 1e-3,
    "s": 1.0,
    "min": 60.0,
    "h": 3600.0,
    "d": 86400.0,
}

WRITTEN_OUT = {
    "us": ("microsecond", "microseconds"),
    "ms": ("millisecond", "milliseconds"),
    "s": ("sec", "secs", "second", "seconds"),
    "min": ("mins", "minute", "minutes"),
    "h": ("hr", "hrs", "hour", "hours"),
    "d": ("day", "days"),
}
"""Units of time as people write them out."""
_SPELLED = {word: unit for unit, words in WRITTEN_OUT.items() for word in words}

_TERM = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?)\s*([A-Za-z%/]*)\s*")


def parse_size_bytes(text: str) -> int:
    """Bytes in `text`, e.g. "64 MiB".  Raises ConfigError for a bare number or an unknown unit."""
    number, unit = _single(text, "a size, e.g. 64 MiB")
    return round(_finite(number * _factor(unit, SIZE_UNITS, text, {"m": "MB or MiB"}), text))


def parse_duration_s(text: str) -> float:
    """Seconds in `text`, e.g. "1 h 30 min".  Raises ConfigError as `parse_size_bytes`."""
    terms = _terms(text, "a duration, e.g. 15 min")
    seconds = sum(
        number * _factor(_spelled(unit), DURATION_UNITS, text, {"m": "min (minutes)"})
        for number, unit in terms
    )
    return _finite(seconds, text)


def parse_rate_bytes_per_s(text: str) -> float:
    """Bytes per second in `text`, e.g. "2 GB/s".

    Raises ConfigError as `parse_size_bytes`, and for Gb/s: links are sold in bits.
    """
    if not text.strip().endswith("/s"):
        raise ConfigError(f"{text!r} is not a rate; write a size per second, e.g. 2 GB/s")
    size = text.strip()[: -len("/s")]
    rate = float(parse_size_bytes(size))
    if size.rstrip().endswith("b"):
        raise ConfigError(
            f"{text!r}: bits or bytes? write {format_rate(rate / 8)} for bits, "
            f"{format_rate(rate)} for bytes"
        )
    return rate


def parse_fraction(text: str) -> float:
    """The fraction in `text`, e.g. "2 %" is 0.02."""
    number, unit = _single(text, "a percentage, e.g. 2 %")
    if unit != "%":
        raise ConfigError(f"{text!r} is not a percentage; write e.g. 2 %")
    return _finite(number, text) / 100.0


def format_bytes(count: float) -> str:
    """`count` bytes for people, e.g. "0.72 GB"; decimal units, three digits."""
    for unit, factor in (("PB", 1e15), ("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if abs(count) >= factor * 0.9995:
            return f"{count / factor:.3g} {unit}"
    return f"{count:.0f} B"


def format_duration(seconds: float) -> str:
    """`seconds` for people, e.g. "84 ms" or "1 h 30 min"."""
    if seconds < 0:
        return f"-{format_duration(-seconds)}"
    if seconds < 1e-3:
        return f"{seconds * 1e6:.3g} us"
    if seconds < 1:
        return f"{seconds * 1e3:.3g} ms"
    if seconds < 120:
        return f"{seconds:.3g} s"
    if seconds < 7200:
        minutes, rest = divmod(round(seconds), 60)
        return f"{minutes} min" + (f" {rest} s" if rest else "")
    if seconds < 172800:
        hours, rest = divmod(round(seconds / 60), 60)
        return f"{hours} h" + (f" {rest} min" if rest else "")
    return f"{seconds / 86400:.3g} d"


def format_rate(bytes_per_s: float) -> str:
    """`bytes_per_s` for people, e.g. "2.7 GB/s"."""
    return f"{format_bytes(bytes_per_s)}/s"


def format_fraction(fraction: float) -> str:
    """`fraction` as a percentage, e.g. "0.34 %"; just below 1 with up to six nines more."""
    if abs(fraction) >= 9.995:
        return f"{fraction * 100:,.0f} %"
    shown = f"{fraction * 100:.3g}"
    if fraction < 1.0 and shown == "100":
        near = (f"{fraction * 100:.{digits}f}" for digits in range(1, 7))
        shown = next((text for text in near if float(text) < 100.0), shown)
    return f"{shown} %"


def format_multiple(fraction: float) -> str:
    """`fraction` of a quantity: a percentage up to 100 %, e.g. "1.6 times" above."""
    return format_fraction(fraction) if abs(fraction) <= 1.0 else f"{fraction:.2g} times"


def _spelled(unit: str) -> str:
    return _SPELLED.get(unit.lower(), unit)


def _single(text: str, example: str) -> tuple[float, str]:
    terms = _terms(text, example)
    if len(terms) != 1:
        raise ConfigError(f"{text!r} is not {example}")
    return terms[0]


def _finite(number: float, text: str) -> float:
    if not math.isfinite(number):
        raise ConfigError(f"{text!r}: must be finite")
    return number


def _terms(text: str, example: str) -> list[tuple[float, str]]:
    if re.match(r"\s*-\s*[0-9]", text):
        raise ConfigError(f"{text!r} is not {example}; it is negative")
    terms: list[tuple[float, str]] = []
    position = 0
    while position < len(text):
        match = _TERM.match(text, position)
        if match is None or match.end() == position:
            raise ConfigError(f"{text!r} is not {example}")
        terms.append((float(match.group(1)), match.group(2)))
        position = match.end()
    if not terms:
        raise ConfigError(f"an empty text is not {example}")
    return terms


def _factor(
    unit: str, units: dict[str, int] | dict[str, float], text: str, hints: dict[str, str]
) -> float:
    key = unit.lower()
    if key in units:
        return float(units[key])
    if not unit:
        if re.fullmatch(r"\s*0+(\.0+)?\s*", text):
            return 1.0
        known = ", ".join(units)
        raise ConfigError(f"{text!r}: a bare number is ambiguous; write a unit ({known})")
    close = difflib.get_close_matches(key, units, n=1)
    advice = hints.get(key) or (close[0] if close else ", ".join(units))
    raise ConfigError(f"{text!r}: unknown unit {unit!r}; did you mean {advice}?")
