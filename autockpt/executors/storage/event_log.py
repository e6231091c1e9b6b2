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
from autockpt.values.telemetry import Degraded, Event, event_data

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
    """Append-only; a full disk silences it and never stops the training.

    When the file takes events again, the first one says how many are missing.
    """

    def __init__(self, path: str) -> None:
        self._path, self._fd = path, -1
        self._missing = 0
        """Events that the file lacks since it last said so,"""
        self._why = ""
        """and the error of the newest one."""
        self._is_torn = False
        """The file ends within a line."""
        try:
            new_files.make_directory(os.path.dirname(path), new_files.PRIVATE_DIRECTORY)
            flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
            self._fd = new_files.private_for_long(path, flags)
        except OSError as error:
            self._why = error.strerror or repr(error)
        self.listener: Callable[[Event], None] | None = None
        """Also told of every event (the online controller)."""
        self._lines: queue.SimpleQueue[Event | threading.Event | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._write, name="autockpt-telemetry", daemon=True)
        self._thread.start()

    @property
    def gap(self) -> str:
        """A sentence about events that the file lacks and does not mention; "": it lacks none."""
        if not self._missing:
            return ""
        return f"{self._path} lacks {_counted(self._missing)}: {self._why}; the report lacks them"

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
            else:
                self._append(item)
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _append(self, event: Event) -> None:
        if self._missing:
            reason = f"before this one {_counted(self._missing)} did not fit: {self._why}"
            if self._put(
                Degraded(at_s=event.at_s, rank=event.rank, what="telemetry", reason=reason)
            ):
                self._missing = 0
        if self._missing or not self._put(event):
            self._missing += 1

    def _put(self, event: Event) -> bool:
        """Whether the whole line is in the file."""
        text = "\n" * self._is_torn + json.dumps(event_data(event), separators=(",", ":")) + "\n"
        line = text.encode()
        if self._fd < 0:
            return False
        try:
            written = os.write(self._fd, line)
        except OSError as error:
            self._why = error.strerror or repr(error)
            return False
        self._is_torn = 0 < written < len(line) or (self._is_torn and not written)
        if written < len(line):
            self._why = "a line did not fit"
        return written == len(line)


def _counted(events: int) -> str:
    return "1 event" if events == 1 else f"{events} events"
