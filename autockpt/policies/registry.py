"""The policies that ship with autockpt: YAML files in `presets/`, one first line each.

A preset is an ordinary policy file; `extends: builtin:NAME` starts from one.
"""

import difflib
from importlib import resources

from autockpt.values.errors import ConfigError

PREFIX = "builtin:"


def presets() -> dict[str, str]:
    """Name and one-line description of every preset, in alphabetical order."""
    return {name: _description(preset_text(name)) for name in _names()}


def preset_text(name: str) -> str:
    """The YAML text of a preset.  Raises ConfigError listing the known names for another."""
    names = _names()
    if name not in names:
        close = difflib.get_close_matches(name, names, n=1)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        raise ConfigError(f"no preset is called {name!r}; known: {', '.join(names)}{hint}")
    return _folder().joinpath(f"{name}.yaml").read_text(encoding="utf-8")


def _folder() -> resources.abc.Traversable:
    return resources.files("autockpt.policies") / "presets"


def _names() -> list[str]:
    files = (entry.name for entry in _folder().iterdir())
    return sorted(name.removesuffix(".yaml") for name in files if name.endswith(".yaml"))


def _description(text: str) -> str:
    return text.split("\n", 1)[0].lstrip("# ").strip()
