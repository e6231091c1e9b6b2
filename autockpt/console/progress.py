"""Progress of work that takes longer than two seconds: on stderr, in one style for every command.

On a terminal one line is redrawn: share, amount, rate, remaining time.  Elsewhere plain lines
appear at growing pauses, so that the log of an hour holds about ten of them.  A script that trains
owns its terminal: beside one, progress is plain lines there, too.
"""

import contextlib
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Protocol, TextIO

from autockpt.values.units import format_bytes, format_duration

SILENT_S = 2.0
"""Work that ends within this time shows nothing."""
REDRAW_S = 0.2
GROWTH = 2.0
"""The next plain line comes when this many times the time of the last one has passed."""
LONGEST_PAUSE_S = 600.0
BAR_WIDTH = 20
LEAST_WIDTH = 20
ERASE = "\r\x1b[K"

_on_terminal: "Progress | None" = None
"""The one whose line stands on the terminal now."""


def erase() -> None:
    """Take the line off the terminal, before something else is printed there."""
    if _on_terminal is not None:
        _on_terminal.erase()


class Progress:
    """Where one piece of work stands; called from any thread, and never raises.

    `at` says how much is done.  Nothing is shown in the first two seconds, and nothing at all
    where it is not `enabled` or the process has no stderr.
    """

    def __init__(
        self,
        label: str,
        *,
        unit: str = "bytes",
        enabled: bool = True,
        beside_script: bool = False,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`unit` is `bytes` or a plural noun; `beside_script` asks for plain lines always."""
        self._stream: TextIO | None = stream or sys.stderr  # None under pythonw and some services
        enabled = enabled and self._stream is not None
        self._label, self._unit, self._enabled = label, unit, enabled
        self._clock = clock
        self._lock = threading.Lock()
        self._redraws = enabled and not beside_script and _redraws(self._stream)
        self._done = 0.0
        self._begin()

    def _begin(self) -> None:
        self._began_s = self._clock()
        self._next_s = self._began_s + SILENT_S

    def __enter__(self) -> "Progress":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def stage(self, text: str, *, unit: str = "steps") -> None:
        """Another part of the work begins, with an amount and a rate of its own."""
        with self._lock:
            self._label, self._unit = text, unit
            self._begin()

    def add(self, amount: float, total: float | None = None) -> None:
        """`amount` more is done."""
        with self._lock:
            self._at(self._done + amount, total)

    def at(self, done: float, total: float | None = None) -> None:
        """`done` of `total` is done; without a total there is no remaining time.

        With 0 the work begins now, and not when this was made.
        """
        with self._lock:
            self._at(done, total)

    def _at(self, done: float, total: float | None) -> None:
        self._done = done
        if not done:
            self._begin()
        total = None if total and done > total else total
        now_s = self._clock()
        if not self._enabled or now_s < self._next_s:
            return
        elapsed_s = now_s - self._began_s
        parts = list(_parts(done, total, elapsed_s, self._unit))
        if self._redraws:
            self._next_s = now_s + REDRAW_S
            self._draw(parts, None if not total else min(1.0, done / total))
        else:
            self._next_s = now_s + min(elapsed_s * (GROWTH - 1.0), LONGEST_PAUSE_S)
            self._write(f"autockpt: {self._label}: {', '.join(parts)}\n")

    def _draw(self, parts: list[str], share: float | None) -> None:
        global _on_terminal
        _on_terminal = self
        width = max(LEAST_WIDTH, shutil.get_terminal_size().columns) - 1
        self._write(ERASE + drawn(self._label, parts, share, width))

    def erase(self) -> None:
        """Take the line off the terminal; the next report draws it again."""
        global _on_terminal
        if _on_terminal is self:
            _on_terminal = None
            self._write(ERASE)

    def close(self) -> None:
        """The work is over: nothing of it stays on the terminal."""
        with self._lock:
            self._enabled = False
            self.erase()

    def _write(self, text: str) -> None:
        with contextlib.suppress(Exception):  # a terminal that is gone ends no work
            if self._stream is not None:
                self._stream.write(text)
                self._stream.flush()


class Gate(Protocol):
    """A throttle, as far as counting goes."""

    longest_wait_s: float

    def wait(self, nbytes: int) -> float:
        """Blocks until `nbytes` may move; seconds blocked."""


class Counted:
    """Shows the bytes that pass: as a throttle in front of another one, or told of them."""

    def __init__(self, progress: Progress, *, total: int = 0, gate: Gate | None = None) -> None:
        self._progress, self._total, self._gate = progress, total, gate
        self._moved = 0
        self._lock = threading.Lock()
        self.longest_wait_s = 0.0 if gate is None else gate.longest_wait_s

    def expect(self, nbytes: int) -> None:
        """So many more bytes will come than have come."""
        self._total = self._moved + nbytes

    def wait(self, nbytes: int) -> float:
        """Waits as the other throttle does, seconds."""
        waited_s = 0.0 if self._gate is None else self._gate.wait(nbytes)
        self.moved(nbytes)
        return waited_s

    def moved(self, nbytes: int) -> None:
        """So many bytes have come."""
        with self._lock:
            self._moved += nbytes
            self._progress.at(self._moved, self._total or None)


def drawn(label: str, parts: list[str], share: float | None, width: int) -> str:
    """Return the line for a terminal of `width` columns: less of it where that is narrow."""
    bar = ""
    if share is not None:
        filled = round(share * BAR_WIDTH)
        bar = f"[{'#' * filled}{'.' * (BAR_WIDTH - filled)}]"
    # Percentage and remaining time stay longest, then the amount, the bar, the rate.
    head, *more = parts
    last = [more[-1]] if more and more[-1].endswith("left") else []
    middle = more[: len(more) - len(last)]
    for words in (
        [label, bar, head, *middle, *last],
        [label, bar, head, *last],
        [label, head, *last],
        [label, head],
    ):
        line = "  ".join(filter(None, words))
        if len(line) <= width:
            return line
    return line[:width]


def _parts(done: float, total: float | None, elapsed_s: float, unit: str) -> Iterator[str]:
    """Yield percentage, amount, rate and remaining time, as far as they are known."""
    rate = done / elapsed_s if elapsed_s > 0 else 0.0
    if total:
        yield f"{100 * min(1.0, done / total):.0f} %"
        yield f"{_amount(done, unit)} of {_amount(total, unit, named=True)}"
    else:
        yield _amount(done, unit, named=True)
    if rate > 0:
        yield f"{format_bytes(rate)}/s" if unit == "bytes" else _pace(rate)
    if total and rate > 0:
        yield f"{format_duration(_rounded_s(max(0.0, total - done) / rate))} left"


def _amount(value: float, unit: str, *, named: bool = False) -> str:
    if unit == "bytes":
        return format_bytes(value)
    shown = f"{value:.0f}" if value == round(value) or value >= 10 else f"{value:.1f}"
    return f"{shown} {unit}" if named else shown


def _pace(rate: float) -> str:
    """Of things that are counted: a second or, where they are slow, a minute."""
    return f"{rate:.3g}/s" if rate >= 1.0 else f"{60 * rate:.3g}/min"


def _rounded_s(seconds: float) -> float:
    """A guess does not need fractions of a second."""
    return float(max(1, round(seconds)))


def _redraws(stream: TextIO | None) -> bool:
    """Whether a line on `stream` can be erased and written again."""
    return is_terminal(stream) and os.environ.get("TERM", "") != "dumb"


def is_terminal(stream: TextIO | None) -> bool:
    """Whether a stream is one; a script may have put anything in the place of stderr."""
    with contextlib.suppress(Exception):
        return stream is not None and stream.isatty()
    return False
