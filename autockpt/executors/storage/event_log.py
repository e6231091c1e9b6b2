"""Appends telemetry events to a file per process: one JSON line and one write each.

The writes happen on a thread of their own, because the training thread has only 20 us.  Beside a
keeper's fsync, an append to the same file system once waited 10 ms for the journal.
"""

import contextlib
import json
import os
import queue
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from autockpt import new_files
from autockpt.values.telemetry import Event, event_data

_PATIENCE_S = 10.0
"""A file system that hangs is not waited for."""


def events_in(text: bytes) -> Iterator[dict[str, Any]]:
    """The events of a file or of its end, as their JSON has them; torn lines are left out."""
    for line in text.splitlines():
        with contextlib.suppress(ValueError, RecursionError):
            data = json.loads(line)
            if isinstance(data, dict):
                yield data


def newest_bytes(path: Path, length: int, *, end: int | None = None) -> bytes:
    """The last `length` bytes of a file, or of its first `end` ones; b"" where none can be read."""
    try:
        with open(path, "rb") as file:
            end = os.fstat(file.fileno()).st_size if end is None else end
            begin = max(0, end - length)
            file.seek(begin)
            return file.read(end - begin)
    except OSError:
        return b""


def file_bytes(path: Path) -> int:
    """Length of a file; 0 where there is none."""
    try:
        return path.stat().st_size
    except OSError:
        return 0


class TelemetryWriter:
    """Append-only; a full disk silences it and never stops the training."""

    def __init__(self, path: str) -> None:
        self._fd = -1
        with contextlib.suppress(OSError):
            new_files.make_directory(os.path.dirname(path), new_files.PRIVATE_DIRECTORY)
            flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
            self._fd = new_files.private_for_long(path, flags)
        self.listener: Callable[[Event], None] | None = None
        """Also told of every event (the online controller)."""
        self._lines: queue.SimpleQueue[Event | threading.Event | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._write, name="autockpt-telemetry", daemon=True)
        self._thread.start()

    def emit(self, event: Event) -> None:
        """Writes one event soon; never raises, from any thread."""
        if self.listener is not None:
            self.listener(event)
        self._lines.put(event)

    def flush(self) -> None:
        """Waits until everything emitted so far is in the file."""
        reached = threading.Event()
        self._lines.put(reached)
        if self._thread.is_alive():
            reached.wait(_PATIENCE_S)

    def close(self) -> None:
        """Writes what is left and closes the file."""
        self._lines.put(None)
        self._thread.join(timeout=_PATIENCE_S)

    def disown(self) -> None:
        """In a forked child: the file is the parent's."""
        self.listener, self._lines = None, queue.SimpleQueue()
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _write(self) -> None:
        while (item := self._lines.get()) is not None:
            if isinstance(item, threading.Event):
                item.set()
            elif self._fd >= 0:
                line = json.dumps(event_data(item), separators=(",", ":")) + "\n"
                with contextlib.suppress(OSError):
                    os.write(self._fd, line.encode())
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
