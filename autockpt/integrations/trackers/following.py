"""Reads what the telemetry files of a run get, and hands it on; the training never waits for it."""

import atexit
import contextlib
import json
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from autockpt.integrations.trackers.sinks import Sink, wall_s
from autockpt.integrations.trackers.values import charted
from autockpt.run_directory import RunDirectory
from autockpt.session.attaches import of_this_process
from autockpt.values.telemetry import Event, event_from_data

POLL_S = 1.0
"""How often the files are looked at."""
LAST_S = 20.0
"""The end of the process waits at most this long for trackers to start and take the last values."""


def follow(ckpt: Any, *sinks: Sink) -> "Following | None":
    """Sends values of the run of `ckpt` to trackers, from now until it ends.

    On ranks other than 0, and while a profile is taken, it does nothing and returns None.  A
    tracker that fails is given up and logged once; the training goes on.
    """
    ckpt = getattr(ckpt, "session", ckpt)  # of an adapter's object
    job = getattr(ckpt, "_job", None)
    if job is None or job.rank != 0:
        return None
    restored = ckpt.restored
    following = Following(job.run_directory, sinks, step=restored.step if restored else 0)
    following.start()
    of_this_process.ends_with(following.stop)
    return following


def run_id(ckpt: Any) -> str:
    """32 hex digits that name the run, the same after every restart; for `wandb.init(id=...)`."""
    return _run_id(getattr(ckpt, "session", ckpt)._job.run_directory)


class Following:
    """A thread that follows one run."""

    def __init__(self, run_dir: str, sinks: tuple[Sink, ...], *, step: int) -> None:
        """`step`: where the training goes on."""
        self._run_dir, self._step = run_dir, step
        self._sinks = list(sinks)
        self._offsets: dict[Path, int] = {}
        self._begun, self._ended = threading.Event(), threading.Event()
        self._until_s: float | None = None
        """When the end of the process waits no more; of the monotonic clock."""
        self._thread = threading.Thread(target=self._follow, name="autockpt-trackers", daemon=True)

    def start(self) -> None:
        """Send from here on; former processes have sent the older lines."""
        for file in self._files():
            self._offsets[file] = file.stat().st_size
        _when_the_script_ends(self._await_begin)
        atexit.register(self.stop)  # before the thread, which registers it anew
        self._thread.start()

    def stop(self) -> None:
        """Sends what there is, and ends; waits at most LAST_S for the trackers."""
        atexit.unregister(self.stop)
        if not self._thread.is_alive():  # also in a forked child
            return
        self._ended.set()
        self._thread.join(self._left_s())
        if self._thread.is_alive():
            print(
                f"autockpt: degraded: trackers: they did not take the last values within {LAST_S:g}"
                " s; those are missing in the charts", file=sys.stderr, flush=True,
            )  # fmt: skip

    def _await_begin(self) -> None:
        """A tracker that is still starting needs threads, which Python soon starts no more.

        Its hooks stand in front of ours as well, until it has begun.
        """
        if self._thread.is_alive():
            self._begun.wait(self._left_s())

    def _left_s(self) -> float:
        now_s = time.monotonic()
        if self._until_s is None:
            self._until_s = now_s + LAST_S
        return max(self._until_s - now_s, 0.0)

    # ------------------------------------------------------------------ on the thread

    def _follow(self) -> None:
        name = _run_id(self._run_dir)
        self._each(lambda sink: sink.begin(self._step, name))
        # Trackers have hooks of their own now.  The last hook runs first: values before farewells.
        atexit.unregister(self.stop)
        atexit.register(self.stop)
        self._begun.set()
        last = False
        while self._sinks and not last:
            last = self._ended.wait(POLL_S)
            for event in self._new_events():
                found = charted(event)
                if found is not None:
                    self._send(*found, event)
        self._each(lambda sink: sink.end())

    def _send(self, step: int, values: dict[str, float], event: Event) -> None:
        at_s = wall_s(event.at_s)
        self._each(lambda sink: sink.send(step, values, at_s))

    def _each(self, call: Any) -> None:
        for sink in list(self._sinks):
            try:
                call(sink)
            except Exception as error:
                self._sinks.remove(sink)
                print(
                    f"autockpt: degraded: tracker {type(sink).__name__}: {error!r:.300} (it gets "
                    "no more values; training goes on)", file=sys.stderr, flush=True,
                )  # fmt: skip

    def _new_events(self) -> list[Event]:
        """In the order of time, over all files."""
        found: list[Event] = []
        for file in self._files():
            found += self._read(file)
        return sorted(found, key=lambda event: event.at_s)

    def _read(self, file: Path) -> list[Event]:
        """Return whole lines, without lines from another version."""
        events: list[Event] = []
        with contextlib.suppress(OSError), open(file, "rb") as opened:
            opened.seek(self._offsets.get(file, 0))
            whole, newline, _ = opened.read().rpartition(b"\n")
            self._offsets[file] = self._offsets.get(file, 0) + len(whole) + len(newline)
            for line in whole.splitlines():
                with contextlib.suppress(Exception):
                    events.append(event_from_data(json.loads(line)))
        return events

    def _files(self) -> list[Path]:
        with contextlib.suppress(OSError):
            return sorted(RunDirectory(self._run_dir).telemetry.glob("*.jsonl"))
        return []


def _when_the_script_ends(call: Callable[[], None]) -> None:
    """Calls it ahead of all hooks of atexit, while threads can be started.

    Python has no public hook for that.  Without this one, hooks of atexit are the first.
    """
    # Their hooks end the pools: they run behind ours if they are registered ahead of it.
    import concurrent.futures.process
    import concurrent.futures.thread  # noqa: F401

    register = getattr(threading, "_register_atexit", None)
    if register is not None:
        with contextlib.suppress(RuntimeError):  # the script has ended
            register(call)


def _run_id(run_dir: str) -> str:
    """Return the id in run.json; a run without a launcher is named by its directory."""
    info = None
    with contextlib.suppress(Exception):
        info = RunDirectory(run_dir).read_info()
    return info.run_id if info is not None else Path(run_dir).resolve().name
