"""How the agent waits for its ranks, with real processes."""

import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterator

import pytest

from autockpt.launch.elastic.agent import _wait_for_end
from autockpt.launch.standby.parked import _memory_file

LONG_S = 60.0


@pytest.fixture
def ranks() -> Iterator[list["subprocess.Popen[bytes]"]]:
    """Two that live, ended with the test."""
    made = [subprocess.Popen(["sleep", "600"]) for _ in range(2)]
    yield made
    for process in made:
        process.kill()
        process.wait()


def test_the_death_of_a_rank_ends_the_wait(ranks: list["subprocess.Popen[bytes]"]) -> None:
    """During the wait, and before it."""
    pids = [process.pid for process in ranks]
    killer = threading.Timer(0.1, os.kill, (pids[1], signal.SIGKILL))
    began_s = time.monotonic()
    killer.start()
    _wait_for_end(pids, LONG_S)
    _wait_for_end(pids, LONG_S)
    assert time.monotonic() - began_s < LONG_S / 2


def test_a_rank_that_has_ended_well_ends_no_wait(ranks: list["subprocess.Popen[bytes]"]) -> None:
    """Else the launcher would never rest while the others train."""
    with subprocess.Popen(["true"]) as ended:
        os.waitid(os.P_PID, ended.pid, os.WEXITED | os.WNOWAIT)
        began_s = time.monotonic()
        _wait_for_end([ranks[0].pid, ended.pid], 0.2)
        assert time.monotonic() - began_s >= 0.2


def test_a_python_that_was_built_for_old_systems_waits_its_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Conda's and uv's have no pidfd_open, nor files in memory for the output of imports."""
    monkeypatch.delattr(os, "pidfd_open")
    monkeypatch.delattr(os, "memfd_create")
    child = subprocess.Popen(["sleep", "60"])
    try:
        began = time.monotonic()
        _wait_for_end([child.pid], 0.05)
        assert 0.04 < time.monotonic() - began < 30
    finally:
        child.kill()
        child.wait()
    descriptor = _memory_file("output")
    os.write(descriptor, b"shown")
    assert os.pread(descriptor, 9, 0) == b"shown"
    os.close(descriptor)
