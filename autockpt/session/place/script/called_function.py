"""The function that a process was made for: multiprocessing, a pool or an executor calls it there.

A sweep may give each of its trainings a process and the arguments of a function, and all of them
have one command line.  So what the function was called with counts like options do.  It is read
from the stack, where every kind of pool leaves it.
"""

import contextlib
import datetime
import functools
import hashlib
import itertools
import numbers
import os
import re
import sys
import types
from collections.abc import Iterable, Iterator, Mapping
from enum import Enum
from multiprocessing.process import BaseProcess
from typing import Any

_MACHINERY = (
    "multiprocessing", "concurrent", "threading", "torch.multiprocessing", "joblib", "loky",
    "functools", "contextlib",
)  # fmt: skip
"""Packages whose functions stand between a process and the function that it is made for."""
_OF_SETTINGS = ("types", "argparse", "collections", "configparser")
"""Modules of the standard library whose objects hold settings.  Its other objects do not count:
they hold locks, descriptors and identities of one process."""
_PASSING = re.compile(
    r"(?:.*-)?(?:port|pid|ppid|fd|uuid|timestamp|start-?time|started-?at|created(?:-?at)?|now)"
    r"|(?:.*-)?(?:tmp|temp|temporary|scratch|log|logs|logging|tensorboard|cache)"
    r"-?(?:dir|directory|path|file|folder|root)"
)
"""Names of arguments that are new at every start of one job, besides the names in `same_job`."""
_DEPTH = 8
_VALUES = 512
"""Values of one call that are looked at; more tell no more trainings of a sweep apart."""
_ITEMS = 64
"""Items of a sequence or an array that are looked at."""
_OWN_REFERENCES = 3
"""Of a snapshot of variables: the frame, our variable, the argument of `sys.getrefcount`."""
_TEXT_CHARS = 200
_EDGE_CHARS = 4096
_SCALARS = (
    str, bytes, bool, numbers.Number, type(None), os.PathLike, Enum, range, datetime.date,
    datetime.time, datetime.timedelta,
)  # fmt: skip
_OPAQUE = (type, types.ModuleType, types.FunctionType, types.MethodType, types.BuiltinFunctionType)


def call_arguments() -> tuple[str, ...]:
    """Return `name=value` of each argument that tells calls apart; () in a process of its own.

    Variables of an enclosing function count too.  An object counts by its public attributes.  What
    raises counts by its type.  Never raises.
    """
    with contextlib.suppress(Exception):
        called = _called()
        if called is not None:
            values = _Values()
            for name, value in _of_call(called).items():
                values.take(name, value, _DEPTH)
            return tuple(f"{name}={value}" for name, value in values.found)
    return ()


def _called() -> types.FrameType | None:
    """Return the call of the function that this process was made for; None: for none."""
    called, frame = None, sys._getframe()
    while frame.f_code is not BaseProcess._bootstrap.__code__:  # type: ignore[attr-defined]
        module = str(frame.f_globals.get("__name__"))
        if not any(module == name or module.startswith(f"{name}.") for name in _MACHINERY):
            called = frame
        if frame.f_back is None:
            return None
        frame = frame.f_back
    return None if called is None or called.f_code.co_name == "<module>" else called


def _of_call(frame: types.FrameType) -> dict[str, Any]:
    """Return the arguments of a call, and the variables that its function has from outside."""
    code = frame.f_code
    count = code.co_argcount + code.co_kwonlyargcount
    count += bool(code.co_flags & 0x04) + bool(code.co_flags & 0x08)  # *args and **kwargs
    names = (*code.co_varnames[:count], *code.co_freevars)
    if not names:
        return {}
    snapshot = frame.f_locals
    try:
        return {name: snapshot[name] for name in names if name in snapshot}
    finally:
        # Before Python 3.13 the frame keeps a snapshot of all variables, which keeps them alive.
        # Where the function has called `locals()`, that is the dictionary it was given.
        if type(snapshot) is dict and sys.getrefcount(snapshot) <= _OWN_REFERENCES:
            snapshot.clear()


class _Values:
    """Names and texts of the arguments, up to a number."""

    def __init__(self) -> None:
        self.found: list[tuple[str, str]] = []
        self._left = _VALUES

    def take(self, name: str, value: Any, depth: int) -> None:
        """Add a value, or its parts by names with dots."""
        self._left -= 1
        if self._left < 0 or _PASSING.fullmatch(_plain(name)):
            return
        try:
            text, parts = _read(value, depth)
        except Exception:  # of code of the user's: a property, a method
            text, parts = type(value).__qualname__, ()
        if text is not None:
            self.found.append((name, text))
        for key, part in parts:
            self.take(f"{name}.{key}", part, depth - 1)


def _read(value: Any, depth: int) -> tuple[str | None, Iterable[tuple[str, Any]]]:
    """Return (text that stands for a value, the parts that count beside it)."""
    if isinstance(value, _SCALARS):
        return _short(value), ()
    if isinstance(value, functools.partial):
        return None, {"func": value.func, "args": value.args, **value.keywords}.items()
    if isinstance(value, _OPAQUE):
        return str(getattr(value, "__qualname__", getattr(value, "__name__", ""))), ()
    kind = type(value).__qualname__
    if not depth:
        return kind, ()
    if isinstance(value, Mapping):
        items = itertools.islice(value.items(), _VALUES)
        parts = [(str(key), part) for key, part in items if isinstance(key, _SCALARS)]
        return (None if parts else f"{kind}-{len(value)}"), parts
    if isinstance(value, list | tuple):
        if len(value) <= _ITEMS:
            return (None if value else kind), [(str(at), one) for at, one in enumerate(value)]
        return f"{kind}-{len(value)}-{_hash(map(_scalar, _sample(value, len(value))))}", ()
    if isinstance(value, set | frozenset):
        texts = sorted(map(_scalar, value)) if len(value) <= _ITEMS else ()
        return f"{kind}-{len(value)}-{_hash(texts)}", ()
    package = type(value).__module__.partition(".")[0]
    if package in ("torch", "numpy"):
        return _array(value, kind), ()
    if package in _MACHINERY or (
        package in sys.stdlib_module_names and package not in _OF_SETTINGS
    ):
        return None, ()
    return None, list(_fields(value))


def _fields(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the public attributes of an object, slots too."""
    slots = (getattr(kind, "__slots__", ()) for kind in type(value).__mro__)
    names = [name for one in slots for name in ([one] if isinstance(one, str) else one)]
    names += itertools.islice(getattr(value, "__dict__", ()), _VALUES)
    for name in dict.fromkeys(map(str, names)):
        if not name.startswith("_"):
            try:
                yield name, getattr(value, name)
            except Exception:  # a slot without a value, or code of the user's
                continue


def _array(value: Any, kind: str) -> str:
    """Return few characters for an array; weights and data on devices are never read."""
    shape, dtype = getattr(value, "shape", None), getattr(value, "dtype", None)
    if shape is None or dtype is None:
        return kind
    text = f"{kind}-{'x'.join(map(str, shape))}-{dtype}"
    flat = getattr(value, "flat", None)
    if flat is None or getattr(dtype, "hasobject", True):
        return text
    return f"{text}-{_hash(map(str, _sample(flat, len(flat))))}"


def _sample(items: Any, count: int) -> Iterator[Any]:
    """Yield few of `count` items, evenly spread, with the first and the last one."""
    few = min(count, _ITEMS)
    for at in range(few):
        yield items[at * (count - 1) // max(1, few - 1)]


def _scalar(value: Any) -> str:
    return _short(value) if isinstance(value, _SCALARS) else type(value).__qualname__


def _short(value: Any) -> str:
    text = os.fspath(value) if isinstance(value, os.PathLike) else value
    if not isinstance(text, str | bytes):
        text = str(text)
    if len(text) > _TEXT_CHARS:
        edges = _text(text[:_EDGE_CHARS]), _text(text[-_EDGE_CHARS:])
        return f"{edges[0][:40]}-{len(text)}-{_hash(edges)}"
    return _text(text)


def _text(value: str | bytes) -> str:
    return value.decode("latin-1") if isinstance(value, bytes) else value


def _plain(name: str) -> str:
    """Return the last part of a name, as `same_job` compares it."""
    return name.rpartition(".")[2].replace("_", "-").lower()


def _hash(texts: Iterable[str]) -> str:
    return hashlib.sha256("\0".join(texts).encode("utf-8", "replace")).hexdigest()[:16]
