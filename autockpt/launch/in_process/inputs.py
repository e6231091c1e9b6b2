"""The arguments of a function and the files of its script, compared with the first call's.

A new process would read both anew.  A call in the same process has them as the last call left them.
"""

import hashlib
import os
import pickle
import sys
import time
from collections.abc import Mapping
from typing import Any

from autockpt.launch.standby import imports

LARGEST_BYTES = 64 << 20
"""Arguments that are larger take too long to compare."""


class Arguments:
    """The arguments of a function, as they were before its first call."""

    def __init__(self, *given: Any) -> None:
        self._given = given
        self._before, self._reason = _digest_of(given)

    def obstacle(self) -> str:
        """Why the next call cannot have the same ones; "": it can."""
        after, reason = ("", "") if self._reason else _digest_of(self._given)
        if self._reason or reason:
            return f"the arguments of its function cannot be compared: {self._reason or reason}"
        return "" if after == self._before else "its function has changed its arguments"


class _Hash:
    """A file that keeps a digest alone.  Raises OverflowError."""

    def __init__(self) -> None:
        self.digest, self._bytes = hashlib.sha256(), 0

    def write(self, data: Any) -> int:
        view = memoryview(data)
        self._bytes += view.nbytes
        if self._bytes > LARGEST_BYTES:
            raise OverflowError(f"they take more than {LARGEST_BYTES >> 20} MiB")
        self.digest.update(view)
        return view.nbytes


def _digest_of(objects: Any) -> tuple[str, str]:
    """Digest, and why there is none; each may be ""."""
    file = _Hash()
    try:
        pickle.Pickler(file, protocol=5).dump(objects)
    except Exception as error:
        return "", f"{type(error).__name__}: {error}"
    return file.digest.hexdigest(), ""


class ScriptFiles:
    """The files of the script and of its own modules."""

    def __init__(self) -> None:
        self._stamps = {path: imports.stamp(path) for path in _own_files(sys.modules)}
        self._began_ns = imports.script_began_ns() or time.time_ns()

    def obstacle(self) -> str:
        """Which file is another one now; "": none is."""
        for path in _own_files(sys.modules):
            now = imports.stamp(path)
            # It was read after the script began, and must be older.
            is_newer = now is None or now[0] > self._began_ns
            if is_newer or now != self._stamps.get(path, now):
                return f"{os.path.basename(path)} has changed"
        return ""


def _own_files(modules: Mapping[str, Any]) -> set[str]:
    """Without modules that a library makes while it runs, such as torch's compiled code."""
    main = getattr(modules.get("__main__"), "__file__", None)
    files = {main, *(imports.file_of(module) for module in list(modules.values()))}
    return {
        file
        for file in files
        if isinstance(file, str) and os.path.isabs(file) and not imports.is_library(file)
    }
