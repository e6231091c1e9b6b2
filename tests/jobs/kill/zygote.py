"""A process that has imported everything once and forks trainers in milliseconds.

It never runs a parallel operation (its children's first one would hang) and never has a second
thread.  One JSON order per line on stdin, one JSON answer per line on stdout:

    {"call": "module:function", "arguments": {...}, "out": ..., "env": {...}}  ->  {"started": pid}
    (later)                                                     {"ended": pid, "status": n}

Keepers of its trainers may be forked as well (`forked_keepers`).

`status` is the exit code, negative for a signal.  It ends, with its children, when stdin does.
What is imported beforehand are the modules on its command line; `warm()` of each runs once.
"""

import contextlib
import faulthandler
import gc
import importlib
import json
import os
import queue
import select
import signal
import subprocess
import sys
import threading
import traceback
from pathlib import Path
from typing import Any

from tests.jobs.kill.forked_keepers import ROOM, Nursery

ROOT = Path(__file__).resolve().parents[3]
TRAININGS = "tests.support.trainings"
IMPORTED = (
    "autockpt.api", "autockpt.executors.keeper.__main__", "autockpt.session.job",
    "autockpt.session.tuning.autotuner", "autockpt.session.session",
)  # fmt: skip


def environment() -> dict[str, str]:
    """One thread everywhere, our package importable, nothing of an outer launcher."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("AUTOCKPT_", "TORCHELASTIC_"))}
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        kept.pop(name, None)
    path = os.pathsep.join(filter(None, [str(ROOT), kept.get("PYTHONPATH")]))
    return {**kept, "OMP_NUM_THREADS": "1", "PYTHONPATH": path, "AUTOCKPT_NO_PROFILE": "1"}


class Zygote:
    """The test's end: orders trainers, hears how they ended."""

    START_WITHIN_S = 120.0
    """Of the first trainer: all imports are in it."""

    def __init__(self, *modules: str, python: str = sys.executable) -> None:
        """`modules`: what to import once; the trainings of the kill tests if none is named."""
        command = [python, "-m", "tests.jobs.kill.zygote", *(modules or (TRAININGS,))]
        command.append(" " * ROOM)
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment(), cwd=ROOT,
            text=True,
        )  # fmt: skip
        self._started: queue.Queue[int] = queue.Queue()
        self._ended: dict[int, int] = {}
        self._news = threading.Condition()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    @property
    def pid(self) -> int:
        """Its own process."""
        return self._process.pid

    def start(
        self, spec: dict[str, Any], run_dir: str, out: Path, *, attach: bool = True, **env: str
    ) -> int:
        """Forks one of the trainings; its pid.  Its output goes to `out`/log."""
        arguments = {"spec": spec, "run_dir": run_dir, "out": str(out), "attach": attach}
        return self.call(f"{TRAININGS}:run_order", arguments, out, **env)

    def call(self, function: str, arguments: dict[str, Any], out: Path, **env: str) -> int:
        """Forks a process for `module:function`; its pid.  Its output goes to `out`/log."""
        assert self._process.stdin is not None
        order = {"call": function, "arguments": arguments, "out": str(out), "env": env}
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        pid = self._started.get(timeout=self.START_WITHIN_S)
        assert pid, "the zygote has ended; its own output says why"
        return pid

    def status(self, pid: int, *, wait_s: float = 0.0) -> int | None:
        """Exit status of a trainer, None while it runs."""
        with self._news:
            self._news.wait_for(lambda: pid in self._ended, timeout=wait_s)
            return self._ended.get(pid)

    def kill(self, pid: int) -> None:
        """Ends a trainer that still runs, as far as is known: its status comes a moment later."""
        if self.status(pid) is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def finish(self, pid: int, log: Path, *, wait_s: float = 90.0) -> int:
        """Waits for the end of a trainer; kills one that hangs and fails with its output."""
        status = self.status(pid, wait_s=wait_s)
        if status is None:
            self.kill(pid)
            self.status(pid, wait_s=wait_s)
            raise AssertionError(f"pid {pid} hangs after {wait_s:.0f} s: {log.read_text()}")
        return status

    def close(self) -> None:
        """Ends the zygote and what it started."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(timeout=30)
        self._reader.join(timeout=30)
        self._process.stdout.close()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            answer = json.loads(line)
            if "started" in answer:
                with self._news:  # a pid may have been another child's before
                    self._ended.pop(answer["started"], None)
                self._started.put(answer["started"])
            else:
                with self._news:
                    self._ended[answer["ended"]] = answer["status"]
                    self._news.notify_all()
        self._started.put(0)  # for whoever waits for a start


# --- the process itself --------------------------------------------------------------------------


def main() -> None:
    """Import, then fork on demand."""
    import torch

    torch.set_num_threads(1)
    for name in IMPORTED:
        importlib.import_module(name)
    for name in sys.argv[1:-1]:  # the last one is room
        getattr(importlib.import_module(name), "warm", _nothing)()
    # Tests resume with it what another process of theirs has trained.
    os.environ.setdefault("AUTOCKPT_SAME_JOB", "1")
    nursery = Nursery()
    children: dict[int, int] = {}
    pending = b""
    gc.collect()
    gc.freeze()  # a collection in a child would touch, and so copy, every page of what is here
    while True:
        ready = select.select([0, nursery, *children], [], [])[0]
        if 0 in ready:
            data = os.read(0, 65536)
            if not data:
                break
            pending += data
            *lines, pending = pending.split(b"\n")
            for line in lines:
                pid = _fork(json.loads(line), nursery)
                children[os.pidfd_open(pid)] = pid
                _tell(started=pid)
        nursery.serve()  # what the dead have asked for is there when their end is told
        for ended in children.keys() & set(ready):
            pid, status = os.waitpid(children.pop(ended), 0)
            os.close(ended)
            _tell(ended=pid, status=os.waitstatus_to_exitcode(status))
    for pid in children.values():
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def _nothing() -> None:
    """For modules without `warm`."""


def _fork(order: dict[str, Any], nursery: Nursery) -> int:
    pid = os.fork()
    if pid:
        return pid
    code = 70
    try:
        os.setsid()
        log = os.open(Path(order["out"]) / "log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        nothing = os.open(os.devnull, os.O_RDONLY)
        for source, target in ((nothing, 0), (log, 1), (log, 2)):
            os.dup2(source, target)
        faulthandler.enable()
        os.environ.update(order["env"])
        nursery.leave()
        sys.argv = ["job.py"]
        module, function = order["call"].split(":")
        getattr(importlib.import_module(module), function)(**order["arguments"])
        code = 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 1
    except BaseException as error:
        traceback.print_exc()
        code = getattr(error, "exit_code", 1)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _tell(**answer: int) -> None:
    os.write(1, (json.dumps(answer) + "\n").encode())


if __name__ == "__main__":
    main()
