"""Adapters at the edge: checkpoints in the formats of others, and ours through their interfaces.

Every format is read into one shape, a tree: nested dicts and lists whose tensors are `LazyTensor`s,
read one by one when needed.  Everything else (converting, comparing, loading) works on trees.  So a
format is one file, and memory stays at one tensor where the target allows it.
"""

from typing import Any

from autockpt.integrations.adapters import ADAPTERS


def __getattr__(name: str) -> Any:
    """Adapters of frameworks are loaded on first use: each imports its framework."""
    from importlib import import_module

    from autockpt.values.errors import ConfigError

    found = next((one for one in ADAPTERS if one.module.rpartition(".")[2] == name), None)
    if found is None:
        raise AttributeError(f"module 'autockpt.integrations' has no attribute {name!r}")
    try:
        return import_module(f"autockpt.integrations.{found.module}")
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("autockpt"):
            raise
        raise ConfigError(
            f"autockpt.integrations.{name}: {error.name} is not installed; "
            f"pip install 'autockpt[{found.extra}]'"
        ) from error
