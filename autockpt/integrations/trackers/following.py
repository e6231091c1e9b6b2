"""Reads what the telemetry files of a run get, and hands it on; the training never waits for it."""

import atexit
import contextlib
import json
import sys
import threading
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from autockpt.integrations.trackers.sent import Sent
from autockpt.integrations.trackers.sinks import Sink, wall_s
from autockpt.integrations.trackers.values import OF_A_RESUME, charted
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
    tracker that fails is given up and logged once; the training goes on.  Call it once, with all
    trackers: one file notes the values that they have.
    """
    ckpt = getattr(ckpt, "session", ckpt)  # of an adapter's object
    job = getattr(ckpt, "_job", None)
    if job is None or job.rank != 0:
        return None
    restored, sent = ckpt.restored, _sent(job)
    step = restored.step if restored else 0
    following = Following(job.run_directory, sinks, step=step, sent=sent)
    following.start()
    of_this_process.ends_with(following.stop)
    return following


def run_id(ckpt: Any) -> str:
    """32 hex digits that name the run, the same after every restart; for `wandb.init(id=...)`.

    A training that began anew in the same run (`fresh`) has a number behind them.
    """
    job = getattr(ckpt, "session", ckpt)._job
    return _run_id(job.run_directory, _sent(job).training)


class Following:
    """A thread that follows one run."""

    def __init__(
        self, run_dir: str, sinks: tuple[Sink, ...], *, step: int, sent: Sent | None = None
    ) -> None:
        """`step`: where the training goes on; `sent`: what trackers have of former processes."""
        self._run_dir, self._step = run_dir, step
        self._sinks = list(sinks)
        self._sent = Sent.read(run_dir) if sent is None else sent
        self._began: dict[str, int] = {}
        """By telemetry file its bytes when this process began."""
        self._begun, self._ended = threading.Event(), threading.Event()
        self._until_s: float | None = None
        """When the end of the process waits no more; of the monotonic clock."""
        self._thread = threading.Thread(target=self._follow, name="autockpt-trackers", daemon=True)

    def start(self) -> None:
        """Send from where the former process has ended; without one from here on."""
        is_known = bool(self._sent.offsets)
        for file in self._files():
            size = self._began[file.name] = file.stat().st_size
            offset = self._sent.offsets.get(file.name, 0 if is_known else size)
            self._sent.offsets[file.name] = min(offset, size)
        self._sent.write(self._run_dir)  # a tracker may take long to start
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
        try:
            self._send_until_the_end()
        except Exception as error:  # of ours: sinks have their own
            print(
                f"autockpt: degraded: trackers: {error!r:.300} (they get no more values; training "
                "goes on)", file=sys.stderr, flush=True,
            )  # fmt: skip
        finally:
            self._begun.set()

    def _send_until_the_end(self) -> None:
        name = _run_id(self._run_dir, self._sent.training)
        self._each(lambda sink: sink.begin(self._step, name))
        # Trackers have hooks of their own now.  The last hook runs first: values before farewells.
        atexit.unregister(self.stop)
        atexit.register(self.stop)
        self._begun.set()
        last = False
        while self._sinks and not last:
            last = self._ended.wait(POLL_S)
            self._hand_on(self._new_events())
        self._each(lambda sink: sink.end())

    def _hand_on(self, events: list[Event]) -> None:
        for event in events:
            found = None
            with contextlib.suppress(ArithmeticError, TypeError, ValueError):  # a damaged line
                found = charted(event)
            if found is not None:
                self._send(*found, event)
        if events and self._sinks:
            self._sent.write(self._run_dir)

    def _send(self, step: int, values: dict[str, float], event: Event) -> None:
        at_s = wall_s(event.at_s)
        unsent = values if isinstance(event, OF_A_RESUME) else self._sent.unsent(step, values)
        for sink in list(self._sinks):
            chosen = unsent if getattr(sink, "appends", False) else values
            if chosen:
                self._call(sink, partial(_send, step=step, values=chosen, at_s=at_s))
        self._sent.note(step, values)

    def _each(self, call: Callable[[Sink], Any]) -> None:
        for sink in list(self._sinks):
            self._call(sink, call)

    def _call(self, sink: Sink, call: Callable[[Sink], Any]) -> None:
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
        """Return whole lines, without lines from another version.

        Lines of a former process are left out too, if their steps are trained again.
        """
        events: list[Event] = []
        offsets, began = self._sent.offsets, self._began.get(file.name, 0)
        with contextlib.suppress(OSError), open(file, "rb") as opened:
            at = opened.seek(offsets.get(file.name, 0))
            for line in opened:
                if not line.endswith(b"\n"):
                    break
                is_former, at = at < began, at + len(line)
                with contextlib.suppress(Exception):
                    event = event_from_data(json.loads(line))
                    if not (is_former and getattr(event, "step", 0) > self._step):
                        events.append(event)
            offsets[file.name] = at
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


def _send(sink: Sink, *, step: int, values: Mapping[str, float], at_s: float) -> None:
    sink.send(step, values, at_s)


def _sent(job: Any) -> Sent:
    """Return the record of this run; a training that begins anew is noted once."""
    sent = Sent.read(job.run_directory)
    if job.fresh and job.run_directory not in _begun_anew:
        _begun_anew.add(job.run_directory)
        if sent.steps:
            sent.begin_anew()
            sent.write(job.run_directory)
    return sent


_begun_anew = set[str]()
"""Run directories in which this process has begun a training anew."""


def _run_id(run_dir: str, training: int) -> str:
    """Return the id in run.json; a run without a launcher is named by its directory."""
    info = None
    with contextlib.suppress(Exception):
        info = RunDirectory(run_dir).read_info()
    name = info.run_id if info is not None else Path(run_dir).resolve().name
    return name if training == 1 else f"{name}-{training}"
