"""A process that moves data is told from one that polls, and from one that hangs."""

import contextlib
import subprocess
import sys
import time
from pathlib import Path

import pytest

from autockpt.executors.keeper.hangs import activity
from autockpt.executors.keeper.hangs.activity import Activities, Activity
from tests.unit.executors.keeper.hangs.test_watch import HANGS

LOOKS = 4
CONNECTED = """
with socket.create_server(("127.0.0.1", 0)) as listener:
    theirs = socket.create_connection(listener.getsockname())
    ours, _ = listener.accept()
"""
"""Two sockets of one process."""
BODIES: dict[str, tuple[str, Activity]] = {
    "receives by TCP": (CONNECTED + """
def send():
    while True:
        ours.sendall(bytes(20_000))
        time.sleep(0.1)
threading.Thread(target=send, daemon=True).start()
while True:
    theirs.recv(65536)
""", "moves data"),
    "receives on a Unix socket": ("""
ours, theirs = socket.socketpair()
def send():
    while True:
        ours.send(b"x")
        time.sleep(0.4)
threading.Thread(target=send, daemon=True).start()
while True:
    theirs.recv(1)
""", "moves data"),
    "reads a file slowly": ("""
file = open(sys.executable, "rb", buffering=0)
while True:
    if not file.read(20_000):
        file.seek(0)
    time.sleep(0.1)
""", "moves data"),
    "has a child that writes": ("""
if os.fork() == 0:
    with open("child", "wb", buffering=0) as out:
        for _ in range(200):
            out.write(bytes(20_000))
            out.seek(0)
            time.sleep(0.1)
    os._exit(0)
os.wait()
""", "moves data"),
    "hangs beside a busy thread": (HANGS, ""),
    "polls for a file": ("""
while not os.path.exists("never"):
    time.sleep(0.01)
""", ""),
    "polls by TCP": (CONNECTED + """
def answer():
    while True:
        ours.sendall(ours.recv(65536))
threading.Thread(target=answer, daemon=True).start()
while True:
    theirs.sendall(b"is it there?")
    theirs.recv(64)
    time.sleep(0.01)
""", ""),
    "prints while it waits": ("""
while True:
    print("still waiting for the others", file=sys.stderr, flush=True)
    time.sleep(0.05)
""", ""),
    "computes": ("""
while True:
    sum(range(100_000))
""", "computes"),
}  # fmt: skip
"""What a process does, and what is found."""


def test_what_moves_data_is_told_from_what_polls(tmp_path: Path) -> None:
    """All at once; each is looked at several times."""
    imports = "import os, socket, sys, threading, time\nprint('up', flush=True)"
    with contextlib.ExitStack() as ends:
        processes: dict[str, subprocess.Popen[bytes]] = {}
        for name, (body, _) in BODIES.items():
            processes[name] = ends.enter_context(
                subprocess.Popen(
                    [sys.executable, "-c", imports + body], stdout=subprocess.PIPE,
                    stderr=subprocess.DEVNULL, cwd=tmp_path,
                )
            )  # fmt: skip
            ends.callback(processes[name].kill)
        for process in processes.values():
            assert process.stdout is not None
            assert process.stdout.readline() == b"up\n"
        time.sleep(0.3)  # it has come to where it stays
        found: dict[str, set[Activity]] = {name: set() for name in BODIES}
        activities = Activities()
        for look in range(LOOKS):
            for name, process in processes.items():
                seen = activities.look(time.monotonic(), process.pid)
                if look:  # the first one has no rate
                    found[name].add(seen)
            time.sleep(activity.SAMPLE_S)
    assert found == {name: {expected} for name, (_, expected) in BODIES.items()}


FORK_SERVER = """
import multiprocessing, sys

def work(up):
    up.send_bytes(b"up")
    while True:
        sum(range(100_000))

if __name__ == "__main__":
    context = multiprocessing.get_context("forkserver")
    here, there = context.Pipe()
    worker = context.Process(target=work, args=(there,), daemon=True)
    worker.start()
    here.recv_bytes()
    print(worker.pid, flush=True)
    sys.stdin.read()
"""


@pytest.mark.parametrize("schedstat", [True, False])
def test_a_worker_of_a_fork_server_computes_for_its_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, schedstat: bool
) -> None:
    """It is no child of the rank; a kernel without schedstat tells its ticks."""
    if not schedstat:
        read = activity.text_of
        monkeypatch.setattr(
            activity, "text_of", lambda path: "" if path.endswith("schedstat") else read(path)
        )
    (tmp_path / "loads.py").write_text(FORK_SERVER)
    with subprocess.Popen(
        [sys.executable, "loads.py"], cwd=tmp_path, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert int(process.stdout.readline()) in activity.family_of(process.pid)[1:]
        time.sleep(0.5)  # the fork server and its tracker have read their modules
        before = activity.sample_of(time.monotonic(), process.pid)
        time.sleep(activity.SAMPLE_S)
        now = activity.sample_of(time.monotonic(), process.pid)
        process.communicate()
    assert activity.core_share(before, now) > activity.COMPUTES_SHARE
    if schedstat:
        assert not activity.moves_data(before, now)


def test_where_bytes_are_not_told_waking_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As for another user's processes: too much patience is better than too little."""
    monkeypatch.setattr(activity, "text_of", lambda path: "")
    before = activity.Sample(at_s=1.0, bytes=None, wakes=1)
    assert activity.sample_of(1.0, 1).bytes is None
    assert activity.moves_data(before, activity.Sample(at_s=2.0, bytes=None, wakes=2))
    assert not activity.moves_data(before, activity.Sample(at_s=2.0, bytes=None, wakes=1))
