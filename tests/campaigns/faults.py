"""A layer between the product and the operating system that counts operations and spoils some.

It replaces functions of `os`, and `fallocate`: all that the storage back end calls, in every thread
of the process.  A campaign has its process for itself.
"""

import contextlib
import errno
import fcntl
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

from autockpt.executors.storage import shard_file

CHANGING = (
    "write", "pwrite", "fsync", "ftruncate", "link", "unlink", "rename", "mkdir", "rmdir",
    "fallocate", "close",
)  # fmt: skip
READING = ("read", "preadv", "listdir", "scandir", "stat", "lstat")
MOVING = ("write", "pwrite", "read", "preadv")
"""They may move fewer bytes than asked for."""
WRITABLE = os.O_WRONLY | os.O_RDWR | os.O_CREAT
UNREADABLE = (errno.EIO, errno.ESTALE, errno.EACCES)
"""Of a medium, a server or a permission that is gone; what is full or read-only still reads."""
CODES = (errno.ENOSPC, errno.EROFS, errno.EDQUOT, *UNREADABLE)


@dataclass(frozen=True, slots=True)
class Call:
    """One operation that is about to happen."""

    name: str
    changes: bool
    number: int


class Rule(Protocol):
    """Decides about an operation: let it pass, carry it out in another way, raise, or die."""

    def __call__(self, call: Call, real: Callable[..., Any], args: Any, more: Any) -> Any: ...


class Layer:
    """Operations in a block, counted; each goes through a rule."""

    def __init__(self, rule: Rule) -> None:
        self._rule = rule
        self._lock = threading.Lock()
        self.changes: list[bool] = []
        """Of every operation so far, whether it changes anything."""
        self.failed: list[str] = []
        """Files and folders of operations that ended in an error."""

    @contextmanager
    def armed(self) -> Iterator["Layer"]:
        """Only inside this block."""
        names = (*CHANGING, *READING, "open")
        homes = {name: shard_file if name == "fallocate" else os for name in names}
        real = {name: getattr(home, name) for name, home in homes.items()}
        try:
            for name, function in real.items():
                setattr(homes[name], name, self._wrap(name, function))
            yield self
        finally:
            for name, function in real.items():
                setattr(homes[name], name, function)

    def _wrap(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **more: Any) -> Any:
            changes = name in CHANGING
            if name == "open":
                changes = bool(args[1] & WRITABLE)
            elif name in ("close", "fsync"):
                changes = name == "fsync" or bool(fcntl.fcntl(args[0], fcntl.F_GETFL) & WRITABLE)
            with self._lock:
                number = len(self.changes)
                self.changes.append(changes)
            closing = _files(args) if name == "close" else []  # after it nobody knows
            try:
                return self._rule(Call(name, changes, number), real, args, more)
            except FileNotFoundError:
                raise  # the world as it is
            except OSError:
                self.failed += closing or _files(args)
                raise

        return call


def _files(args: Any) -> list[str]:
    """What a call is about: its paths, or that of its descriptor."""
    if isinstance(args[0], int):
        with contextlib.suppress(OSError):
            return [os.readlink(f"/proc/self/fd/{args[0]}")]
    return [one for one in args[:2] if isinstance(one, str)]


def passing(call: Call, real: Callable[..., Any], args: Any, more: Any) -> Any:
    """The rule that spoils nothing."""
    return real(*args, **more)


@dataclass(frozen=True, slots=True)
class Errno:
    """Operation number `at` fails; `sticky`: all later ones too."""

    at: int
    code: int
    sticky: bool

    def __call__(self, call: Call, real: Callable[..., Any], args: Any, more: Any) -> Any:
        struck = call.number >= self.at if self.sticky else call.number == self.at
        reads = call.name != "close" and self.code in UNREADABLE
        if not struck or not (call.changes or reads):
            return real(*args, **more)
        if call.name == "close":
            real(*args, **more)  # the descriptor is gone whatever close says
        raise OSError(self.code, os.strerror(self.code), *args[:1])


@dataclass(frozen=True, slots=True)
class Short:
    """Operation number `at` moves a part of its bytes; `sticky`: all later ones too."""

    at: int
    sticky: bool

    def __call__(self, call: Call, real: Callable[..., Any], args: Any, more: Any) -> Any:
        struck = call.number >= self.at if self.sticky else call.number == self.at
        if not struck or call.name not in MOVING:
            return real(*args, **more)
        return _part(call.name, real, args)


@dataclass(frozen=True, slots=True)
class Sudden:
    """The process is killed before operation number `at`, or with it half done."""

    at: int
    half: bool

    def __call__(self, call: Call, real: Callable[..., Any], args: Any, more: Any) -> Any:
        if call.number == self.at:
            if self.half:
                _half(call.name, real, args, more)
            os.kill(os.getpid(), signal.SIGKILL)
        return real(*args, **more)


def _part(name: str, real: Callable[..., Any], args: Any) -> Any:
    """The same call for about half of its bytes, at least one."""
    if name == "read":
        return real(args[0], max(1, args[1] // 2))
    if name == "preadv":
        (into,) = args[1]
        return real(args[0], [into[: max(1, len(into) // 2)]], *args[2:])
    data = memoryview(args[1])
    return real(args[0], data[: max(1, len(data) // 2)], *args[2:])


def _half(name: str, real: Callable[..., Any], args: Any, more: Any) -> None:
    """As much of the call as can have happened when the process died in it."""
    try:
        if name in ("write", "pwrite"):
            _part(name, real, args)
        else:
            real(*args, **more)
    except OSError:
        pass
