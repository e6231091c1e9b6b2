"""How commands speak: results on stdout, everything else on stderr, JSON as one object.

Colour goes through rich, which honours NO_COLOR and FORCE_COLOR; it is loaded only when something
is printed with style.
"""

import contextlib
import json
import os
import shlex
import shutil
import sys
import time
import traceback
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TextIO

from autockpt.console import progress
from autockpt.values.errors import StorageError
from autockpt.values.table import columns, table

SCHEMA_VERSION = 1
"""Of the objects that --json prints."""


@dataclass(slots=True, kw_only=True)
class Console:
    """The output of one command, in the style that was asked for."""

    json: bool = False
    verbosity: int = 0
    """-1 quiet, 0 normal, 1 and 2 verbose."""
    color: bool = True
    debug: bool = False
    out: TextIO | None = None
    """Where results go; None: the process's stdout at the time of printing."""

    def say(self, text: str, *, verbosity: int = 0) -> None:
        """Tell a person something that is no result: stderr, not when quieter than `verbosity`."""
        if self.verbosity >= verbosity:
            _tell(f"autockpt: {text}")

    def warn(self, text: str) -> None:
        """Tell a person what is wrong and how to mend it; printed even with --quiet."""
        _tell(f"autockpt: warning: {text}")

    def block(self, text: str) -> None:
        """Tell a person something of several lines that must not be missed: stderr, as it is."""
        _tell(text)

    def next(self, command: str | Sequence[str], *, note: str = "") -> None:
        """Print the command that a person would type next, so that a shell takes it as it stands.

        Words are quoted here; a string is a command line already.  `note` says something of
        it on the line above, because a prompt of zsh knows no comments.
        """
        if not self.json:
            line = command if isinstance(command, str) else shlex.join(command)
            if note:
                self.say(f"the command below {note}")
            self.say(f"next: {line}")

    def progress(self, label: str, *, unit: str = "bytes") -> progress.Progress:
        """Show where work stands that may take longer than two seconds; not with --quiet."""
        return progress.Progress(label, unit=unit, enabled=self.verbosity >= 0)

    def result(self, text: str) -> None:
        """Print a part of the result; nothing in JSON mode."""
        if not self.json:
            progress.erase()
            with _output():
                print(text, file=self._out)

    def object(self, command: str, data: Mapping[str, Any]) -> None:
        """Print the whole result in JSON mode; nothing otherwise."""
        if self.json:
            body = {"schema_version": SCHEMA_VERSION, "command": command, **data}
            with _output():
                print(json.dumps(body, indent=2, allow_nan=False, default=str), file=self._out)

    def table(self, headers: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
        """Print a table as a part of the result, numbers to the right."""
        if self.json:
            return
        for number, line in enumerate(table(headers, rows, width=self.width)):
            self.styled(line, "bold") if number == 0 else self.result(line)

    def columns(self, rows: Iterable[Sequence[str]]) -> None:
        """Print rows without headers as a part of the result, the last column wrapped."""
        for line in columns(rows, width=self.width):
            self.result(line)

    @property
    def width(self) -> int | None:
        """Characters of a line of a terminal, COLUMNS first; None: a file or a pipe, no limit."""
        if not progress.is_terminal(self._out):
            return None  # a shell may export COLUMNS, and a log or a pipe has no edge
        return shutil.get_terminal_size().columns

    def styled(self, text: str, style: str) -> None:
        """Print a line of the result in a style, where there is a terminal that shows it."""
        out = self._out
        shown = progress.is_terminal(out) or os.environ.get("FORCE_COLOR")
        if self.json or not self.color or not shown:
            self.result(text)
            return
        import rich.console

        progress.erase()
        console = rich.console.Console(file=out, highlight=False, soft_wrap=True)
        with _output():
            console.print(text, style=style, markup=False)

    def fail(self, error: BaseException, *, exit_code: int, kind: str) -> int:
        """Print an error as text or as an object; returns the exit code."""
        if self.debug:
            traceback.print_exception(error)
        if self.json:
            body = {"kind": kind, "message": str(error), "exit_code": exit_code}
            with contextlib.suppress(StorageError):  # stderr has it all the same
                self.object("error", {"error": body})
        # Mistakes in a file say their place first, where editors and parsers look for it.
        has_place = ": error: " in str(error).partition("\n")[0]
        _tell(str(error) if has_place else f"autockpt: error: {error}")
        return exit_code

    @property
    def _out(self) -> TextIO:
        return self.out or sys.stdout


@contextlib.contextmanager
def _output() -> Iterator[None]:
    """Raises StorageError where the file behind stdout takes no more."""
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as error:
        raise no_output(error) from None


def no_output(error: OSError) -> StorageError:
    """The error of a result that has no place, as on a full disk."""
    return StorageError(f"the result cannot be written to stdout: {error.strerror or error}")


def save_traceback(error: BaseException) -> str:
    """Keep the traceback of a bug of ours in a file; returns its path."""
    import tempfile

    try:
        with tempfile.NamedTemporaryFile(
            "w", prefix="autockpt-error-", suffix=".txt", delete=False, encoding="utf-8"
        ) as file:
            file.write(f"command: {sys.argv}\npython: {sys.version}\n\n")
            traceback.print_exception(error, file=file)
            return file.name
    except OSError:  # a read-only root, a full disk
        _tell("".join(traceback.format_exception(error)))
        return "above"


def _tell(text: str) -> None:
    """On stderr; a terminal that is gone ends no training."""
    with contextlib.suppress(Exception):
        progress.erase()
        if sys.stderr is not None:  # else `print` takes stdout, where results stand
            print(text, file=sys.stderr, flush=True)


def local_time(at_s: float) -> str:
    """Of a moment since 1970, seconds; "-" for none."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at_s)) if at_s else "-"
