"""The output of ranks: on the terminal, or in two files per attempt and rank.

A full or read-only disk ends no training.  A start whose files cannot be made has its output
elsewhere, and a warning names the place.  Text that a file does not take is lost.
"""

import contextlib
import errno
import io
import os
import stat
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from autockpt import new_files

SHOWN_LINES = 200
"""Lines to show from the log of a failed rank whose output did not go to the terminal."""
SHOWN_BYTES = 2**16
"""Of that log: a rank may have printed for weeks."""
FULL = frozenset((errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO, errno.EFBIG, errno.ESTALE))
"""Errors of a disk, which say nothing about the training."""


class OutputFiles:
    """Where the ranks of one launcher write."""

    def __init__(self, directory: Path, warn: Callable[[str], object]) -> None:
        self._directory, self._warn = directory, warn
        self._started = time.strftime("%Y%m%d-%H%M%S")
        self._said = False
        self._other: Path | None = None
        """The directory that is used where the first cannot be written."""
        self._errors: dict[int, str] = {}
        """The newest file of each rank's errors."""

    def specs(self) -> Any:
        """As torchelastic takes them: local rank 0 speaks on the terminal, others into files."""
        from torch.distributed.elastic.multiprocessing.api import LogsDest, LogsSpecs

        directory, fill = str(self._directory), self._fill

        class RankLogs(LogsSpecs):
            @property
            def root_log_dir(self) -> str:
                return directory

            def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
                destination = LogsDest()
                fill(destination, envs)
                return destination

        return RankLogs(log_dir=directory)

    def _fill(self, destination: Any, envs: dict[int, dict[str, str]]) -> None:
        for local, variables in envs.items():
            count = int(variables.get("TORCHELASTIC_RESTART_COUNT", "0"))
            attempt = f"{self._started}-attempt-{count:03d}"
            rank = int(variables["RANK"])
            folder, made = self._folder(attempt, rank, with_files=local > 0)
            name = f"{folder / f'rank-{rank:05d}'}"
            destination.stdouts[local] = f"{name}.out" if local and made else ""
            destination.stderrs[local] = f"{name}.err" if local and made else ""
            destination.error_files[local] = f"{name}.error.json"
            variables["TORCHELASTIC_ERROR_FILE"] = f"{name}.error.json"
            self._errors[rank] = destination.stderrs[local]
            # After a change of membership the same attempt number starts again.
            with contextlib.suppress(OSError):
                Path(f"{name}.error.json").unlink(missing_ok=True)

    def _folder(self, attempt: str, rank: int, *, with_files: bool) -> tuple[Path, bool]:
        """(directory of an attempt, whether the files of the rank are there)."""
        first = self._directory / attempt
        try:
            _make_files(first, rank, with_files=with_files)
            return first, True
        except OSError as error:
            reason = error.strerror
        try:
            other = self._elsewhere()
            _make_files(other / attempt, rank, with_files=with_files)
            found, where = (other / attempt, True), str(other)
        except OSError:
            found, where = (first, False), "the terminal"
        if not self._said:
            self._said = True
            self._warn(f"{first}: cannot be written: {reason}; output of ranks goes to {where}")
        return found

    def _elsewhere(self) -> Path:
        """A directory of this launcher outside of the run.  Raises OSError."""
        import tempfile

        if self._other is None:
            self._other = Path(tempfile.mkdtemp(prefix="autockpt-output-"))
        return self._other

    def end_of_errors(self, rank: int) -> tuple[str, str]:
        """(file, its last lines) of the errors of a rank; ("", "") for one on the terminal."""
        path = self._errors.get(rank, "")
        if not path:
            return "", ""
        try:
            with open(path, "rb") as file:
                file.seek(max(0, file.seek(0, 2) - SHOWN_BYTES))
                text = file.read().decode(errors="replace")
        except OSError as error:
            return path, f"(cannot be read: {error.strerror})"
        return path, "\n".join(text.splitlines()[-SHOWN_LINES:])


def _make_files(folder: Path, rank: int, *, with_files: bool) -> None:
    """Raises OSError."""
    new_files.make_directory(folder, new_files.PRIVATE_DIRECTORY)
    for kind in ("out", "err") if with_files else ():
        path = str(folder / f"rank-{rank:05d}.{kind}")
        os.close(new_files.private(path, os.O_WRONLY | os.O_CREAT))


# --- in a rank ------------------------------------------------------------------------------------


class _File(io.FileIO):
    """Standard output or errors: a disk that takes nothing loses text, and raises nothing."""

    lost_bytes = 0

    def write(self, data: Any) -> int:
        """As of FileIO."""
        try:
            if self.lost_bytes and stat.S_ISREG(os.fstat(self.fileno()).st_mode):
                told = f"\n[autockpt: {self.lost_bytes} bytes of output were lost: a full disk]\n"
                super().write(told.encode())
            written = super().write(data)
        except OSError as error:
            if error.errno not in FULL or not stat.S_ISREG(os.fstat(self.fileno()).st_mode):
                raise
            self.lost_bytes += len(data)
            return len(data)
        self.lost_bytes = 0
        return written


def survive_full_disks() -> None:
    """From now on output of this process into files may be lost, and ends nothing.

    Only unbuffered streams (`python -u`), as a launcher starts its ranks.
    """
    for name, descriptor in (("stdout", 1), ("stderr", 2)):
        stream = getattr(sys, name)
        raw = getattr(stream, "buffer", None)
        if not isinstance(stream, io.TextIOWrapper) or type(raw) is not io.FileIO:
            continue
        file = _File(descriptor, "w", closefd=False)
        file.name = raw.name
        made = io.TextIOWrapper(
            file, encoding=stream.encoding, errors=stream.errors, newline="\n",
            line_buffering=stream.line_buffering, write_through=True,
        )  # fmt: skip
        made.mode = "w"  # type: ignore[misc]
        setattr(sys, name, made)
        setattr(sys, f"__{name}__", made)
