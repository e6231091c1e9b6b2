"""An operating system that fails where the test says: errors, short counts, sudden death."""

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from autockpt.executors.storage import shard_file

CALLS = (
    "open", "close", "write", "pwrite", "read", "fsync", "ftruncate", "link", "unlink", "rename",
    "mkdir", "listdir", "fallocate", "rmdir",
)  # fmt: skip
"""What writers call; `fstat` and `stat` are left alone because pytest and tempfile need them."""


class Killed(BaseException):
    """The process is gone: no handler of ours may stop it."""


class Death:
    """Counts operating-system calls of this thread and dies before call number `at`.

    After it every call dies too: a dead process cleans nothing up.
    """

    def __init__(self, at: int) -> None:
        self.at = at
        self.calls = 0

    @contextmanager
    def armed(self) -> Iterator["Death"]:
        """Only inside this block, only on this thread."""
        mine = threading.get_ident()
        with pytest.MonkeyPatch.context() as patch:
            for name in CALLS:
                home = shard_file if name == "fallocate" else os
                patch.setattr(home, name, self._wrap(getattr(home, name), mine))
            yield self

    def _wrap(self, real: Callable[..., Any], mine: int) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if threading.get_ident() == mine:
                self.calls += 1
                if self.calls > self.at:
                    raise Killed(f"before call {self.at}: {real.__name__}")
            return real(*args, **kwargs)

        return call


class Failure:
    """Makes call number `at` of this thread fail once with an error number."""

    def __init__(self, at: int, code: int) -> None:
        self.at = at
        self.code = code
        self.calls = 0

    @contextmanager
    def armed(self) -> Iterator["Failure"]:
        """Only inside this block, only on this thread."""
        mine = threading.get_ident()
        with pytest.MonkeyPatch.context() as patch:
            for name in CALLS:
                home = shard_file if name == "fallocate" else os
                patch.setattr(home, name, self._wrap(getattr(home, name), mine))
            yield self

    def _wrap(self, real: Callable[..., Any], mine: int) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if threading.get_ident() == mine:
                self.calls += 1
                if self.calls == self.at + 1:
                    if real.__name__ == "close":
                        real(*args, **kwargs)  # the descriptor is gone whatever close says
                    raise OSError(self.code, os.strerror(self.code))
            return real(*args, **kwargs)

        return call


def open_descriptors() -> int:
    """How many this process has."""
    return len(os.listdir("/proc/self/fd"))
