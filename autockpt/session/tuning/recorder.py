"""Recordings of the controller on disk: `controller/000001.jsonl`, the newest few, of bounded size.

Written by the thinking thread only.  A disk that takes nothing more silences it: a recording is
for explaining, and no reason to think worse.
"""

import contextlib
import json
import os
from pathlib import Path
from typing import IO, Any

from autockpt import new_files

RECORDING_BYTES = 4 * 2**20
"""A recording of this size is ended and the next one begun: six hours of a busy run."""
KEPT = 8
"""Newest recordings that are kept: 32 MiB, however long a run."""

_encode = json.JSONEncoder(separators=(",", ":")).encode
"""`json.dumps` would make an encoder for each line."""


class Recorder:
    """Where a `RecordedController` writes; every process of a run begins a recording of its own."""

    def __init__(self, folder: Path, *, recording_bytes: int = RECORDING_BYTES) -> None:
        self._folder = folder
        self._limit = recording_bytes
        self._file: IO[str] | None = None
        self._written = 0
        with contextlib.suppress(OSError):
            new_files.make_directory(folder, new_files.PRIVATE_DIRECTORY)
            self._begin()

    def __call__(self, line: dict[str, Any]) -> bool:
        """Writes one line; True when the recording is full, and another was begun."""
        if self._file is None:
            return False
        text = _encode(line) + "\n"
        try:
            self._file.write(text)
            if "asked" in line:
                self._file.flush()
            self._written += len(text)
            if self._written < self._limit or "opening" in line:
                return False
            self._begin()
        except OSError:
            self.close()
            return False
        return True

    def close(self) -> None:
        """Ends the recording."""
        if self._file is not None:
            with contextlib.suppress(OSError):
                self._file.close()
        self._file = None

    def disown(self) -> None:
        """In a forked child: leave unflushed lines to the parent, which will write them."""
        file, self._file = self._file, None
        if file is not None:
            with contextlib.suppress(OSError, ValueError), open(os.devnull, "w") as nothing:
                os.dup2(nothing.fileno(), file.fileno(), inheritable=False)

    def _begin(self) -> None:
        self.close()
        found = recordings(self._folder)
        number = int(found[-1].stem) + 1 if found else 1
        for old in found[: max(0, len(found) - KEPT + 1)]:
            old.unlink(missing_ok=True)
        path = self._folder / f"{number:06d}.jsonl"
        self._file = open(path, "w", encoding="utf-8", opener=new_files.private_for_long)  # noqa: SIM115 - open as long as it is written
        self._written = 0


def recordings(folder: Path) -> list[Path]:
    """The recordings in a folder, oldest first."""
    return sorted(path for path in folder.glob("*.jsonl") if path.stem.isdigit())
