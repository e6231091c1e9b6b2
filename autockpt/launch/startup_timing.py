"""Measures start-up time by phase, from the birth of this process to attach.

At scale a restart is mostly this and not the reading of the checkpoint.  The boot module calls
`script_begins`, `attach` calls `attach_begins`; a plain `python train.py` has no boot module, and
what only that could see stays unknown.  Nothing here loads torch, and nothing here may fail.
"""

import contextlib
import functools
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

DECIDED = "AUTOCKPT_RESTART_DECIDED_S"
"""Variable in which the launcher leaves when it decided to restart, CLOCK_MONOTONIC."""

_TORCH, _GROUPS = "torch", "torch.distributed.distributed_c10d"


@dataclass(frozen=True, slots=True, kw_only=True)
class Startup:
    """Seconds of a process by phase until it attached.

    None was not told apart: the launch is then unknown, the others are contained in `script_s`.
    """

    launch_s: float | None
    """From the launcher's decision to the birth of the process."""
    interpreter_s: float | None
    """From birth to the script's first line."""
    torch_import_s: float | None
    process_group_s: float | None
    """In torch.distributed.init_process_group."""
    script_s: float | None
    """The rest until attach: other imports, the model, the data."""

    @property
    def since_decided_s(self) -> float | None:
        """From the launcher's decision until attach; None where there was no such launcher."""
        born_s = self.since_born_s
        return None if self.launch_s is None or born_s is None else self.launch_s + born_s

    @property
    def since_born_s(self) -> float | None:
        """From the birth of the process until attach; None where it attached before."""
        if self.script_s is None:
            return None
        parts = (self.interpreter_s, self.torch_import_s, self.process_group_s)
        return sum(part or 0.0 for part in parts) + self.script_s


_UNKNOWN = Startup(
    launch_s=None, interpreter_s=None, torch_import_s=None, process_group_s=None, script_s=None
)


class StartupTimer:
    """Notes moments of one process; the module's functions keep the one of this process."""

    def __init__(self) -> None:
        self._script_at: float | None = None
        self._attach_at: float | None = None
        self._again = False
        self._torch_s: float | None = None
        self._group_s = 0.0
        self._born_at: float | None = None
        self._watching = False
        self.process: Literal["new", "parked", "same"] = "new"
        """Whether this start has a process of its own, a parked one, or that of the last start."""

    def watch(self) -> None:
        """Torch and process groups are timed from now."""
        if _TORCH not in sys.modules and not self._watching:
            self._watching = True
            sys.meta_path.insert(0, _Watch(self._imported, self._waited))

    def reborn(self) -> None:
        """A parked process becomes a rank: its former time was no part of the start-up."""
        self._born_at = time.monotonic()
        self.process = "parked"

    def begin_anew(self) -> None:
        """The function of the script is called again, as if in a new process."""
        self._born_at = self._script_at = time.monotonic()
        self._attach_at, self._again = None, False
        self._torch_s, self._group_s = 0.0, 0.0
        self.process = "same"

    def script_begins(self) -> None:
        """The next thing that runs is the user's; torch and process groups are timed from now."""
        self._script_at = time.monotonic()
        if self._born_at is not None and _TORCH in sys.modules:
            self._torch_s = 0.0
        self.watch()

    def attach_begins(self) -> None:
        """The script called `attach`; the time before counts for the first call only."""
        self._again = self._attach_at is not None
        self._attach_at = time.monotonic()

    def startup(self) -> tuple[float, Startup]:
        """Return (when attach began, the phases before)."""
        attach_at = time.monotonic() if self._attach_at is None else self._attach_at
        if self._again:
            return attach_at, _UNKNOWN
        born_at = _born_at() if self._born_at is None else self._born_at
        script_at = self._script_at
        known = script_at is not None and self._torch_s is not None
        torch_s = self._torch_s if known else None
        group_s = self._group_s if known else None
        since = script_at if script_at is not None else born_at
        rest_s = None if since is None else attach_at - since - (torch_s or 0.0) - (group_s or 0.0)
        return attach_at, Startup(
            launch_s=_between(_decided_at(), born_at),
            interpreter_s=_between(born_at, script_at),
            torch_import_s=torch_s,
            process_group_s=group_s,
            script_s=None if rest_s is None else max(0.0, rest_s),
        )

    def _imported(self, seconds: float) -> None:
        self._torch_s = seconds

    def _waited(self, seconds: float) -> None:
        # After attach it is no part of the way there.
        if self._attach_at is None:
            self._group_s += seconds


class _Watch:
    """A finder that finds nothing by itself: it times two modules that others find."""

    def __init__(self, imported: Callable[[float], None], waited: Callable[[float], None]) -> None:
        self._imported = imported
        self._waited = waited

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        """Return the other finders' result, with a loader that takes the time."""
        if name not in (_TORCH, _GROUPS):
            return None
        for finder in sys.meta_path:
            find = getattr(finder, "find_spec", None)
            spec = find(name, path, target) if find is not None and finder is not self else None
            if spec is not None:
                self._time(spec.loader, name)
                return spec
        return None

    def _time(self, loader: Any, name: str) -> None:
        load = getattr(loader, "exec_module", None)

        def timed(module: Any) -> None:
            began = time.monotonic()
            del loader.exec_module  # only this once, and only for this loader
            load(module)  # type: ignore[misc]  # only set when there is one
            if name == _TORCH:
                self._imported(time.monotonic() - began)
            else:
                module.init_process_group = _timed(module.init_process_group, self._waited)

        if load is not None:
            with contextlib.suppress(AttributeError):
                loader.exec_module = timed


def _timed(call: Callable[..., Any], note: Callable[[float], None]) -> Callable[..., Any]:
    @functools.wraps(call)
    def timed(*args: Any, **settings: Any) -> Any:
        began = time.monotonic()
        try:
            return call(*args, **settings)
        finally:
            note(time.monotonic() - began)

    return timed


def _between(start: float | None, stop: float | None) -> float | None:
    return None if start is None or stop is None else max(0.0, stop - start)


def _decided_at() -> float | None:
    try:
        return float(os.environ[DECIDED])
    except (KeyError, ValueError):
        return None


def _born_at() -> float | None:
    """CLOCK_MONOTONIC at which the kernel made this process; to a hundredth of a second."""
    try:
        with open("/proc/self/stat", "rb") as file:
            ticks = int(file.read().rsplit(b")", 1)[1].split()[19])
        now = time.clock_gettime(time.CLOCK_BOOTTIME)
        age_s = now - ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError):
        return None
    return time.monotonic() - age_s if 0 <= age_s <= now else None


_this = StartupTimer()
script_begins, attach_begins, startup = _this.script_begins, _this.attach_begins, _this.startup
watch, reborn, begin_anew = _this.watch, _this.reborn, _this.begin_anew


def process() -> Literal["new", "parked", "same"]:
    """The kind of process that this start has; see `StartupTimer.process`."""
    return _this.process
