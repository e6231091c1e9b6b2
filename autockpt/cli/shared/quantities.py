"""Options with units: parsed and checked, with the option in the message."""

from collections.abc import Callable, Mapping
from typing import Any

from autockpt.values.errors import ConfigError, OptionError
from autockpt.values.units import parse_duration_s, parse_fraction

Options = Mapping[str, Any]
"""Options by the names of a command's parameters; None: not given."""


def positive(options: Options, name: str, parse: Callable[[str], float], default: float) -> float:
    """More than 0; `default` where the option was not given."""
    value = default if options[name] is None else _parsed(name, options[name], parse)
    if not value > 0:
        raise OptionError(f"{flag(name)} {options[name]}: must be more than 0")
    return value


def duration(options: Options, name: str, default: float) -> float:
    """A duration, 0 among them."""
    return default if options[name] is None else _parsed(name, options[name], parse_duration_s)


def share(options: Options, name: str, default: float) -> float:
    """A fraction from 0 to 1, written in percent."""
    value = default if options[name] is None else _parsed(name, options[name], parse_fraction)
    if not 0.0 <= value <= 1.0:
        raise OptionError(f"{flag(name)} {options[name]}: must be between 0 % and 100 %")
    return value


def _parsed(name: str, text: str, parse: Callable[[str], float]) -> float:
    try:
        return parse(text)
    except ConfigError as error:
        raise OptionError(f"{flag(name)}: {error}") from None


def flag(name: str) -> str:
    """The option as one types it."""
    return "--" + name.replace("_", "-")
