"""Warm processes: what a program can see of its start is what it sees of a cold one."""

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from autockpt.launch.owner import is_alive
from tests.support.warm_python import Nursery, warm_starts
from tests.unit.cli import scripts
from tests.unit.cli.scripts import environment, warm, write
from tests.unit.launch.sidecars.test_sidecar import until

SEEN = """
import atexit, hashlib, json, os, random, signal, sys, threading
import numpy, torch
atexit.register(lambda: print("left", flush=True))
main = sys.modules["__main__"]
here = os.path.realpath
print(json.dumps({
    "argv": sys.argv, "path": sys.path, "name": __name__, "file": globals().get("__file__"),
    "main": main.__dict__ is globals(), "builtins": type(__builtins__).__name__,
    "cwd": os.getcwd(), "parent": os.getppid(), "session": os.getsid(0) == os.getpid(),
    "group": os.getpgrp() == os.getpgid(os.getppid()), "umask": os.umask(0),
    "own": sorted(k for k in os.environ if k.startswith("OWN_")),
    "descriptors": sorted(int(n) for n in os.listdir("/proc/self/fd") if int(n) < 900),
    "files": [(s.encoding, s.errors, s.line_buffering, s.write_through)
              for s in (sys.stdin, sys.stdout, sys.stderr)],
    "handlers": {n.name: str(signal.getsignal(n)).split(" at ")[0]
                 for n in sorted(signal.valid_signals() - {9, 19}) if n < 32},
    "blocked": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, ())),
    "threads": threading.active_count(), "torch_threads": torch.get_num_threads(),
    "words": open("/proc/self/cmdline").read().rstrip("\\0").split("\\0"),
}))
sys.stdout.flush()
"""


def _started(words: list[str], cwd: Path, **settings: Any) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, *words], cwd=cwd, capture_output=True, text=True, timeout=120, check=False,
        **{"env": environment(OWN_NAME="1"), **settings},
    )  # fmt: skip


@pytest.fixture
def served() -> Nursery:
    """The nursery of this process."""
    return scripts._nursery()


@pytest.mark.parametrize(
    "kind",
    [
        "script",
        pytest.param("code", marks=pytest.mark.slow),
        pytest.param("module", marks=pytest.mark.slow),
    ],
)
def test_a_program_sees_what_it_sees_of_a_cold_start(
    kind: str, tmp_path: Path, served: Nursery
) -> None:
    """Arguments, paths, streams, signals, session, descriptors, numbers drawn, exit."""
    write(tmp_path, "seen.py", SEEN)
    start = {"script": ["-u", "seen.py"], "code": ["-c", SEEN], "module": ["-m", "seen"]}[kind]
    threads = environment(OWN_NAME="1", OMP_NUM_THREADS="1")
    for settings in ({}, {"start_new_session": True, "env": threads}):
        before = served.started
        cold = _started([*start, "a", "b c"], tmp_path, **settings)
        assert served.started == before
        with warm():
            done = _started([*start, "a", "b c"], tmp_path, **settings)
        assert served.started == before + 1
        assert (done.returncode, done.stderr) == (cold.returncode, cold.stderr) == (0, "")
        told, expected = (x.stdout.splitlines() for x in (done, cold))
        assert json.loads(told[0]) == json.loads(expected[0])
        assert told[1:] == expected[1:] == ["left"]


@pytest.mark.parametrize(
    "source",
    [
        "import sys; sys.exit(7)",
        "import sys; sys.exit('why')",
        "def f():\n    1 / 0\nf()",
        "import os, signal; os.kill(os.getpid(), signal.SIGKILL)",
        "import os, signal; os.kill(os.getpid(), signal.SIGTERM)",
        "import os, signal; os.kill(os.getpid(), signal.SIGINT)",
        "import os; print('lost', end=''); os._exit(3)",
        "print(",
        "import random, numpy; random.random(); numpy.random.random()",
        "import atexit, sys; atexit.register(lambda: print(sys.last_value)); 1 / 0",
        "import atexit, os; mine = [os.dup(1) for _ in range(40)]\n"
        "atexit.register(lambda: print([os.fstat(number).st_mode for number in mine]))",
    ],
)
def test_a_program_ends_as_from_a_cold_start(source: str, tmp_path: Path) -> None:
    """Status and output."""
    write(tmp_path, "s.py", source)
    cold = _started(["s.py"], tmp_path)
    with warm():
        done = _started(["s.py"], tmp_path)
    assert (done.returncode, done.stdout) == (cold.returncode, cold.stdout)
    if "SIGINT" not in source:  # the frames of what ran it are shown too
        assert done.stderr == cold.stderr


def test_processes_draw_numbers_of_their_own(tmp_path: Path) -> None:
    """Where nothing was seeded."""
    source = (
        "import random, numpy, torch\n"
        "print(random.random(), numpy.random.random(), float(torch.rand(())), torch.initial_seed())"
    )
    with warm():
        lines = {_started(["-c", source], tmp_path).stdout for _ in range(3)}
    assert len({word for line in lines for word in line.split()}) == 12


@pytest.mark.parametrize(
    ("words", "more"),
    [
        (["-c", "0"], {"PYTHONHASHSEED": "1"}),
        (["-c", "0"], {"OMP_WAIT_POLICY": "ACTIVE"}),
        (["-I", "-c", "0"], {}),
    ],
)
def test_what_is_read_once_starts_cold(
    words: list[str], more: dict[str, str], tmp_path: Path, served: Nursery
) -> None:
    """Another variable that libraries read when loaded, another option of the interpreter."""
    before = served.started
    with warm():
        assert _started(words, tmp_path, env=environment(**more)).returncode == 0
    assert served.started == before


def test_a_missing_directory_or_a_dead_nursery_is_as_without_one(tmp_path: Path) -> None:
    """The error is Python's own; a start without the nursery is a cold one."""
    with warm(), pytest.raises(FileNotFoundError, match="gone"):
        _started(["-c", "0"], tmp_path / "gone")
    here, there = socket.socketpair()
    there.close()
    dead = Nursery(here, environment())
    with warm_starts(dead):
        assert _started(["-c", "print(1)"], tmp_path).stdout == "1\n"
    assert dead.started == 0


def test_ranks_are_warm_children_of_their_launcher(tmp_path: Path) -> None:
    """They end with it, and the launcher's exit leaves no process behind."""
    source = """
import json, os, sys, time
with open(f"told-{os.environ['RANK']}.part", "w") as out:
    warm = "torch" in sys.modules
    json.dump({"pid": os.getpid(), "parent": os.getppid(), "warm": warm}, out)
os.rename(out.name, out.name[:-5])
time.sleep(300)
"""
    write(tmp_path, "s.py", source)
    command = [sys.executable, "-m", "autockpt", "run", "--nproc-per-node", "2", "s.py"]
    with warm(), subprocess.Popen(
        command, cwd=tmp_path, env=environment(), stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL, start_new_session=True,
    ) as launcher:  # fmt: skip
        until(lambda: len(list(tmp_path.glob("told-?"))) == 2)
        told = [json.loads(path.read_text()) for path in tmp_path.glob("told-?")]
        os.kill(launcher.pid, signal.SIGKILL)
        launcher.wait(60)
    assert [(one["parent"], one["warm"]) for one in told] == [(launcher.pid, True)] * 2
    until(lambda: not any(is_alive(one["pid"]) for one in told))
