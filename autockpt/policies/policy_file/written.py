"""Values as one writes them in a policy: `fields` the other way round, without loss."""

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from autockpt.policies.policy_file.fields import Every, Money
from autockpt.policies.policy_file.model import keys, settings_of
from autockpt.values.goal import Goal
from autockpt.values.units import (
    DURATION_UNITS,
    parse_duration_s,
    parse_rate_bytes_per_s,
    parse_size_bytes,
)

_SIZES = {
    unit: parse_size_bytes(f"1 {unit}")
    for unit in ("TiB", "GiB", "MiB", "KiB", "TB", "GB", "MB", "kB", "B")
}
_SIZED = ("disk.chunk", "limits.host_memory", "limits.disk")
_RATED = ("redundancy.rate", "remote.rate")
_SHARES = ("limits.overhead", "failures.process_share")
_PLAIN = re.compile(r"[A-Za-z/.](?:[\w./-]|:(?=\S))*")


def settings_between(before: Goal, after: Goal) -> dict[str, str]:
    """The values by key that make `after` of `before`, each as YAML and --set take it."""
    old, new = _texts(before), _texts(after)
    return {key: text for key, text in new.items() if text != old[key]}


def as_yaml(settings: Mapping[str, str]) -> list[str]:
    """Lines of a policy file with these values."""
    lines: list[str] = []
    sections = dict.fromkeys(key.rpartition(".")[0] for key in settings)
    for section in sorted(sections, key=bool):
        lines += [f"{section}:"] if section else []
        for key, text in settings.items():
            above, _, name = key.rpartition(".")
            lines += [f"{'  ' * bool(section)}{name}: {text}"] if above == section else []
    return lines


def quoted(text: str) -> str:
    """A string as YAML takes it."""
    return text if _PLAIN.fullmatch(text) else json.dumps(text, ensure_ascii=False)


def _texts(goal: Goal) -> dict[str, str]:
    settings = settings_of(goal)
    found: dict[str, str] = {}
    for key in keys():
        value: Any = settings
        for name in key.split("."):
            value = getattr(value, name)
        found[key] = _text(key, value)
    return found


def _text(key: str, value: Any) -> str:
    if value is None:
        return "auto"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return quoted(value)
    if isinstance(value, Every):
        return _duration(value.seconds) if value.steps is None else f"{value.steps} steps"
    if isinstance(value, Money):
        return f"{value.amount!r} {value.currency}/{'h' if key == 'prices.node' else 'GB-month'}"
    if key in _SIZED:
        return _shortest(value, _SIZES, parse_size_bytes)
    if key in _RATED:
        rates = {f"{unit}/s": factor for unit, factor in _SIZES.items()}
        return _shortest(value, rates, parse_rate_bytes_per_s)
    if key in _SHARES:
        return f"{value * 100:.15g} %"
    return str(value) if isinstance(value, int) else _duration(value)


def _duration(seconds: float | None) -> str:
    assert seconds is not None, "an interval has one of the two"
    return _shortest(seconds, DURATION_UNITS, parse_duration_s)


def _shortest(value: float, units: Mapping[str, float], parse: Callable[[str], float]) -> str:
    """The text with the shortest number that is read as exactly this."""
    texts = [
        f"{value / factor:.{digits}g} {unit}"
        for unit, factor in units.items()
        for digits in (15, 17)
    ]
    exact = (text for text in texts if parse(text) == value)
    return min(exact, key=lambda text: len(text.split()[0]))
