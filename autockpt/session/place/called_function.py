"""The function that a process was made for: multiprocessing, a pool or an executor calls it there.

A sweep may give each of its trainings a process and the arguments of a function, and all of them
have one command line.  So what the function was called with counts like options do.  It is read
from the stack, where every kind of pool leaves it.
"""

import functools
import hashlib
import numbers
import os
import sys
import types
from collections.abc import Iterator, Mapping
from enum import Enum
from multiprocessing.process import BaseProcess
from typing import Any

_MACHINERY = (
    "multiprocessing", "concurrent", "threading", "torch.multiprocessing", "joblib", "loky",
    "functools", "contextlib",
)  # fmt: skip
"""Packages whose functions stand between a process and the function that it is made for."""
_DEPTH = 4
_ITEMS = 16
_TEXT_CHARS = 200
_SCALARS = (str, bytes, bool, numbers.Number, type(None), os.PathLike, Enum)
_OPAQUE = (type, types.ModuleType, types.FunctionType, types.MethodType, types.BuiltinFunctionType)


def call_arguments() -> tuple[str, ...]:
    """Return `name=value` of each argument that tells calls apart; () in a process of its own.

    Variables of an enclosing function count too.  An object counts by its public attributes.
    """
    called, frame = None, sys._getframe()
    while frame.f_code is not BaseProcess._bootstrap.__code__:  # type: ignore[attr-defined]
        module = str(frame.f_globals.get("__name__"))
        if not any(module == name or module.startswith(f"{name}.") for name in _MACHINERY):
            called = frame
        if frame.f_back is None:
            return ()
        frame = frame.f_back
    if called is None or called.f_code.co_name == "<module>":
        return ()
    return tuple(f"{name}={value}" for name, value in _of_call(called))


def _of_call(frame: types.FrameType) -> Iterator[tuple[str, str]]:
    """Yield the arguments of a call, and the variables that its function has from outside."""
    code = frame.f_code
    count = code.co_argcount + code.co_kwonlyargcount
    count += bool(code.co_flags & 0x04) + bool(code.co_flags & 0x08)  # *args and **kwargs
    for name in (*code.co_varnames[:count], *code.co_freevars):
        yield from _named(name, frame.f_locals.get(name), _DEPTH)


def _named(name: str, value: Any, depth: int) -> Iterator[tuple[str, str]]:
    """Yield a value, or its parts by names with dots."""
    if isinstance(value, functools.partial):
        bound = {"func": value.func, "args": value.args, **value.keywords}
        for key, part in bound.items():
            yield from _named(f"{name}.{key}", part, depth - 1)
    elif isinstance(value, _SCALARS):
        yield name, _short(value)
    elif isinstance(value, _OPAQUE):
        yield name, str(getattr(value, "__qualname__", getattr(value, "__name__", "")))
    elif (parts := _parts(value)) is not None and depth and len(parts) <= _ITEMS:
        for key, part in parts.items():
            yield from _named(f"{name}.{key}", part, depth - 1)
    else:
        yield name, _digest(value)


def _parts(value: Any) -> dict[str, Any] | None:
    """Return what a container or an object of settings holds; None: it is no such thing."""
    if isinstance(value, Mapping):
        return {str(key): part for key, part in value.items()}
    if isinstance(value, list | tuple):
        return {str(index): part for index, part in enumerate(value)}
    if isinstance(value, set | frozenset):
        return {str(index): part for index, part in enumerate(sorted(map(str, value)))}
    if type(value).__module__.partition(".")[0] in ("torch", "numpy", *_MACHINERY):
        return None
    return {k: v for k, v in getattr(value, "__dict__", {}).items() if not k.startswith("_")}


def _digest(value: Any) -> str:
    """Return few characters for a large value; the type of one that has no value to compare."""
    kind = type(value).__qualname__
    if hasattr(value, "tobytes") and not getattr(getattr(value, "dtype", None), "hasobject", True):
        return f"{kind}-{_hash(value.tobytes())}"
    parts = _parts(value)
    if parts is None or not all(isinstance(part, _SCALARS) for part in parts.values()):
        return kind
    return f"{kind}-{_hash(repr([(k, _short(v)) for k, v in parts.items()]).encode())}"


def _short(value: Any) -> str:
    text = os.fspath(value) if isinstance(value, os.PathLike) else value
    text = text.decode("latin-1") if isinstance(text, bytes) else str(text)
    return text if len(text) <= _TEXT_CHARS else f"{text[:40]}-{_hash(text.encode())}"


def _hash(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]
