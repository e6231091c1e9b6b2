"""Where a profile stands, on stderr: a bar on a terminal, a line per stage elsewhere.

Redrawn only between iterations, from the training thread: a refresh thread would disturb what is
measured.
"""

import contextlib
import sys
import time
from typing import Any

REDRAW_S = 0.2


class Progress:
    """Stages with a share of the whole; silent on ranks that write nothing."""

    def __init__(self, *, enabled: bool) -> None:
        self._enabled = enabled
        self._began = time.monotonic()
        self._stage = ""
        self._drawn = 0.0
        self._bar: Any = None
        self._task: Any = None
        if enabled and sys.stderr.isatty():
            with contextlib.suppress(Exception):  # a terminal that rich cannot draw on
                self._bar, self._task = _bar()

    def stage(self, text: str, fraction: float) -> None:
        """A new stage begins; `fraction` of the profile lies behind it."""
        self._stage = text
        if not self._enabled:
            return
        if self._bar is None:
            self.line(text)
            return
        self._drawn = 0.0
        self.at(fraction)

    def at(self, fraction: float) -> None:
        """How much of the profile is done, 0..1."""
        now = time.monotonic()
        if self._bar is not None and now - self._drawn > REDRAW_S:
            self._drawn = now
            self._bar.update(self._task, completed=100 * fraction, description=self._stage)
            self._bar.refresh()

    def line(self, text: str) -> None:
        """One line for the user."""
        if self._enabled:
            seconds = time.monotonic() - self._began
            with contextlib.suppress(OSError, ValueError):
                print(f"autockpt profile: {seconds:5.1f} s  {text}", file=sys.stderr, flush=True)

    def close(self) -> None:
        """Takes the bar away."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None


def _bar() -> tuple[Any, Any]:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    bar = Progress(
        TextColumn("autockpt profile"),
        BarColumn(bar_width=24),
        TextColumn("{task.percentage:3.0f} %"),
        TimeElapsedColumn(),
        TextColumn("{task.description}"),
        console=Console(stderr=True),
        auto_refresh=False,
        transient=True,
        redirect_stdout=False,
        redirect_stderr=False,
    )
    bar.start()
    return bar, bar.add_task("warm-up", total=100)
