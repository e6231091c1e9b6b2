"""The keeper's look at its ranks."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from autockpt.executors.keeper.hangs.pace import DOINGS
from autockpt.executors.keeper.hangs.watch import HangWatch, Watched
from autockpt.executors.keeper.slots import CELL_BEAT_NS, CELL_BEATS, CELL_DOING

HANGS = """
lock = threading.Lock()
lock.acquire()
def work():
    while True:
        time.sleep(0.05)
threading.Thread(target=work, daemon=True).start()
print("up", flush=True)
lock.acquire()
"""


class Page:
    """The cells that a rank's shared page has of its marks."""

    def __init__(self) -> None:
        self.cells = {CELL_BEATS: 1, CELL_BEAT_NS: 0, CELL_DOING: DOINGS.index("trains")}

    def cell(self, number: int) -> int:
        """One of them."""
        return self.cells.get(number, 0)

    def mark(self, now_s: float) -> None:
        """Progress."""
        self.cells[CELL_BEATS] += 1
        self.cells[CELL_BEAT_NS] = int(now_s * 1e9)


def test_a_rank_that_was_asked_for_its_stacks_is_told_once(tmp_path: Path) -> None:
    """The signal that asks wakes its main thread, which is no progress."""
    (tmp_path / "logs").mkdir()
    answers = "from autockpt.executors.keeper.hangs import stack_dumps\n"
    answers += f"stack_dumps.answer_with_stacks({str(tmp_path)!r}, 0)\n"
    code = f"import socket, threading, time\n{answers}{HANGS}"
    told: list[str] = []
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == b"up\n"
            watch, page = HangWatch(str(tmp_path), 0, lambda text, where: told.append(text)), Page()
            memory: Any = page
            ranks = {0: Watched(pid=process.pid, memory=memory)}
            for tenth in range(300):  # ten seconds of training, then twenty of silence
                now_s = 1000.0 + tenth / 10
                if tenth < 100:
                    page.mark(now_s)
                watch.look(now_s, ranks, alone=True, kill=lambda: False)
                deadline = time.monotonic() + 20.0
                while tenth == 250 and not told and time.monotonic() < deadline:
                    time.sleep(0.05)
        finally:
            process.kill()
    assert len(told) == 1
    assert "rank 0 is stuck" in told[0]


LAUNCHES = """
import subprocess, sys
rank = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print(rank.pid, flush=True)
rank.wait()
"""


def test_a_job_that_a_person_has_stopped_is_not_stuck(tmp_path: Path) -> None:
    """Rank and launcher are stopped; its time begins anew when both go on.  One alone is stuck."""
    (tmp_path / "logs").mkdir()
    told: list[str] = []
    watch, page = HangWatch(str(tmp_path), 0, lambda text, where: told.append(text)), Page()
    memory: Any = page
    now_s = 1000.0

    def look_for(seconds: float, *, marks: bool = False) -> None:
        nonlocal now_s
        for _ in range(int(seconds * 2)):
            now_s += 0.5
            if marks:
                page.mark(now_s)
            watch.look(now_s, ranks, alone=True, kill=lambda: False)

    with subprocess.Popen([sys.executable, "-c", LAUNCHES], stdout=subprocess.PIPE) as launcher:
        assert launcher.stdout is not None
        rank = int(launcher.stdout.readline())
        ranks = {0: Watched(pid=rank, memory=memory)}
        try:
            look_for(10.0, marks=True)
            send(signal.SIGSTOP, launcher.pid, rank)
            look_for(100.0)
            send(signal.SIGCONT, launcher.pid, rank)
            look_for(5.0)
            settle()
            assert told == []
            look_for(10.0, marks=True)
            send(signal.SIGSTOP, rank)
            look_for(10.0)
            wait_until(lambda: bool(told))
        finally:
            os.kill(rank, signal.SIGKILL)
    assert len(told) == 1
    assert "stopped by a signal" in told[0]


def send(number: int, *pids: int) -> None:
    """To each, and waits until the kernel shows it."""
    for pid in pids:
        os.kill(pid, number)
    stopped = number == signal.SIGSTOP
    wait_until(lambda: all((_state(pid) == "T") == stopped for pid in pids))


def _state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def settle() -> None:
    """Until nobody gathers evidence."""
    wait_until(lambda: all(one.name != "autockpt-incident" for one in threading.enumerate()))


def wait_until(done: Callable[[], bool]) -> None:
    """Polls with a deadline."""
    deadline = time.monotonic() + 20.0
    while not done():
        assert time.monotonic() < deadline
        time.sleep(0.01)
