"""The parent's end of a contestant's process: start it, ask it, end it with all that it started."""

import contextlib
import importlib.util
import json
import os
import select
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.peers.environments import ROOT, environment
from benchmarks.peers.processes import descendants
from benchmarks.peers.registry import Entry

MALLOC = {
    "MALLOC_MMAP_THRESHOLD_": str(2**30),
    "MALLOC_TRIM_THRESHOLD_": str(4 * 2**30),
    "MALLOC_TOP_PAD_": str(64 * 2**20),
}
"""Freed memory stays in the process: else a peer that copies into fresh memory at every save pays
for first touches (5-8 times a copy) that another allocator would spare it, and iterations pay for
their own temporaries."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """The job of all contestants."""

    size: str
    tokens: int
    threads: int
    """Compute threads."""


class Failed(Exception):
    """A contestant that is absent, broke, or did not answer; the message is the reason."""


def interpreter(entry: Entry, *, install: bool) -> str:
    """The Python that a contestant runs in.  Raises Failed where it cannot run."""
    if entry.source_only and importlib.util.find_spec(entry.source_only) is None:
        raise Failed(f"absent: source only, and {entry.source_only} is not importable here")
    if entry.needs is None:
        return sys.executable
    found = environment(entry.needs, install=install)
    if found.absent:
        raise Failed(f"absent: {found.absent}")
    return found.python


def surroundings(threads: int) -> dict[str, str]:
    """Environment variables of every contestant."""
    return {
        **os.environ,
        **MALLOC,
        "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])),
        "PYTHONWARNINGS": "ignore",
        "OMP_WAIT_POLICY": "PASSIVE",
        "OMP_NUM_THREADS": str(threads),
    }


class Client:
    """One contestant.  Every method raises Failed when it fails."""

    def __init__(self, entry: Entry, python: str, folder: Path, training: Training) -> None:
        self.entry = entry
        self.folder = folder
        folder.mkdir(parents=True)
        self.pid = 0
        self.state_bytes = 0
        self._helpers: list[int] = []
        self._log = open(folder / "log", "wb")  # noqa: SIM115 - lives as long as the process
        command = [
            python, "-m", "benchmarks.peers.worker", entry.adapter, str(folder / "work"),
            training.size, str(training.tokens), str(training.threads),
        ]  # fmt: skip
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log,
            env=surroundings(training.threads), cwd=folder,
        )  # fmt: skip
        self._rest = b""

    def await_ready(self, timeout_s: float) -> None:
        """Waits for the end of the setup."""
        hello = self._answer(timeout_s)
        self.pid, self.state_bytes = hello["pid"], hello["state_bytes"]
        self._helpers = self.ask({"do": "facts"}, timeout_s)["helpers"]

    def ask(self, command: dict[str, Any], timeout_s: float) -> dict[str, Any]:
        """One command, one answer."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(command).encode() + b"\n")
            self._process.stdin.flush()
        except OSError as error:
            raise Failed(f"ended: {self._last_line()}") from error
        return self._answer(timeout_s)

    def _answer(self, timeout_s: float) -> dict[str, Any]:
        assert self._process.stdout is not None
        deadline = time.monotonic() + timeout_s
        while b"\n" not in self._rest:
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([self._process.stdout], [], [], left)[0]:
                raise Failed(f"no answer within {timeout_s:.0f} s")
            data = os.read(self._process.stdout.fileno(), 2**16)
            if not data:
                raise Failed(f"ended: {self._last_line()}")
            self._rest += data
        line, self._rest = self._rest.split(b"\n", 1)
        answer: dict[str, Any] = json.loads(line)
        if "failed" in answer:
            raise Failed(answer["failed"])
        return answer

    def _last_line(self) -> str:
        lines = (self.folder / "log").read_text(errors="replace").strip().splitlines()
        return lines[-1][:200] if lines else "without a word"

    def pids(self, helpers: list[int]) -> list[int]:
        """Of this contestant and all that belongs to it."""
        return [self.pid, *descendants(self.pid), *helpers]

    def kill(self) -> None:
        """The contestant alone, at once: what it leaves behind is what a crash leaves."""
        self._process.kill()
        self._process.wait()

    def end(self, *, graceful: bool = True) -> None:
        """Closes, then makes sure that nothing of it is left."""
        if graceful and self._process.poll() is None:
            with contextlib.suppress(Failed):
                self.ask({"do": "close"}, 60.0)
        children = descendants(self._process.pid)
        self.kill()
        for pid in [*children, *self._helpers]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for pipe in (self._process.stdin, self._process.stdout, self._log):
            with contextlib.suppress(OSError):
                if pipe is not None:
                    pipe.close()
