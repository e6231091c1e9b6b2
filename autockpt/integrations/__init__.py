"""Trainers of others, protected, and checkpoints in the formats of others."""

from typing import Any

from autockpt.integrations.adapters import ADAPTERS, import_adapter


def __getattr__(name: str) -> Any:
    """Adapters of frameworks are loaded on first use: each imports its framework."""
    if all(one.module != name for one in ADAPTERS):
        raise AttributeError(f"module 'autockpt.integrations' has no attribute {name!r}")
    return import_adapter(name)
