"""The keeper's look at its ranks."""

import subprocess
import sys
import time
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
