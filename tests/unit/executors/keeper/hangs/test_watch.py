"""A process that moves data is told from one that hangs."""

import subprocess
import sys
import time
from pathlib import Path

import pytest

from autockpt.executors.keeper.hangs.watch import HangWatch

LOOKS = 6
RECEIVES = """
a, b = socket.socketpair()
def send():
    while True:
        b.send(b"x")
        time.sleep(2.0)
threading.Thread(target=send, daemon=True).start()
print("up", flush=True)
while True:
    a.recv(1)
"""
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


@pytest.mark.parametrize(("body", "moves"), [(RECEIVES, True), (HANGS, False)])
def test_a_main_thread_that_sends_or_receives_is_busy(
    body: str, moves: bool, tmp_path: Path
) -> None:
    """It computes next to nothing.  Other threads of a rank that hangs may go on."""
    code = f"import socket, threading, time{body}"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == b"up\n"
            watch = HangWatch(str(tmp_path), 0, lambda text, where: None)
            watch._is_busy(time.monotonic(), process.pid)
            time.sleep(0.3)  # it has come to where it stays
            seen = [_look(watch, process.pid) for _ in range(LOOKS)]
        finally:
            process.kill()
    assert seen[3:] == [moves] * (LOOKS - 3)


def _look(watch: HangWatch, pid: int) -> bool:
    time.sleep(1.1)
    return watch._is_busy(time.monotonic(), pid)
