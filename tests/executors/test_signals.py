"""SIGTERM is for the process that it was sent to, and for the script if that has a handler."""

import signal
from pathlib import Path

import pytest

from tests.cli.scripts import python, write

HEAD = """
import multiprocessing, os, signal, sys, threading, time
from autockpt.executors import signals
signals.GRACE_S = 0.3

watch = signals.TerminationWatch(lambda number: print("told", number, flush=True))
"""

FORKED = """
def work():
    time.sleep(9)
for pause_s in (0.0, 0.3):
    child = multiprocessing.get_context("fork").Process(target=work)
    {start}
    time.sleep(pause_s)
    child.terminate()
    child.join(3)
    print("child", child.exitcode)
time.sleep(1)
print("requested", watch.requested)
"""


@pytest.mark.parametrize(
    "start", ["child.start()", "t = threading.Thread(target=child.start); t.start(); t.join()"]
)
def test_a_forked_child_dies_of_its_own_sigterm_alone(tmp_path: Path, start: str) -> None:
    """At once or later, forked by whichever thread: the training goes on."""
    write(tmp_path, "s.py", HEAD + FORKED.format(start=start))
    done = python("s.py", cwd=tmp_path)
    died = f"child {-signal.SIGTERM}\n"
    assert (done.returncode, done.stdout) == (0, f"{died}{died}requested 0\n"), done.stderr


def test_a_child_can_have_a_watch_of_its_own(tmp_path: Path) -> None:
    """A forked trainer attaches as any other; the parent's is as it was."""
    source = """
def work():
    signals.TerminationWatch(lambda number: print("child told", number, flush=True))
    ready.set()
    time.sleep(9)
context = multiprocessing.get_context("fork")
ready = context.Event()
child = context.Process(target=work)
child.start()
assert ready.wait(20)
child.terminate()
child.join(3)
print("child", child.exitcode, flush=True)
os.kill(os.getpid(), signal.SIGTERM)
time.sleep(20)
"""
    done = python("s.py", cwd=write(tmp_path, "s.py", HEAD + source).parent)
    assert done.stdout == "child told 15\nchild 143\ntold 15\n", done.stderr
    assert done.returncode == 143


def test_a_handler_that_the_script_installs_later_is_the_only_one(tmp_path: Path) -> None:
    """The process ends as the script wants; once the handler is taken away, as before."""
    source = """
before = signal.signal(signal.SIGTERM, lambda *_: print("script told", flush=True))
os.kill(os.getpid(), signal.SIGTERM)
time.sleep(1)
print("requested", watch.requested, flush=True)
signal.signal(signal.SIGTERM, before)
os.kill(os.getpid(), signal.SIGTERM)
time.sleep(20)
"""
    done = python("s.py", cwd=write(tmp_path, "s.py", HEAD + source).parent)
    assert done.stdout == "script told\nrequested 0\ntold 15\n", done.stderr
    assert done.returncode == 143


def test_a_thread_that_cannot_run_a_handler_is_ended(tmp_path: Path) -> None:
    """The keeper is told, and the process leaves after the grace."""
    source = """
threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGTERM)).start()
reader, _ = os.pipe()
while True:
    os.read(reader, 1)
"""
    done = python("s.py", cwd=write(tmp_path, "s.py", HEAD + source).parent)
    assert (done.returncode, done.stdout) == (143, "told 15\n"), done.stderr
