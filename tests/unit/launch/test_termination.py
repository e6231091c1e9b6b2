"""A signal is for the process that it was sent to, and for the script if that has a handler."""

import signal
from pathlib import Path

import pytest

from autockpt.launch.termination import TerminationWatch
from tests.conftest import heard_by_children
from tests.unit.cli.scripts import python, write

HEAD = """
import multiprocessing, os, signal, sys, threading, time
from autockpt.launch import termination

def first(number):
    print("told", number, flush=True)
    if ENDS: os._exit(128 + number)
def again(number):
    print("again", number, flush=True)
    os._exit(128 + number)
ENDS = True
watch = termination.TerminationWatch(first, again)
watch.start()
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
    def mine(number):
        print("child told", number, flush=True)
        os._exit(128 + number)
    termination.TerminationWatch(mine, again).start()
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


def test_a_thread_that_cannot_run_a_handler_is_heard(tmp_path: Path) -> None:
    """It sits in a system call that Python begins again after every signal."""
    source = """
threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGTERM)).start()
reader, _ = os.pipe()
while True:
    os.read(reader, 1)
"""
    done = python("s.py", cwd=write(tmp_path, "s.py", HEAD + source).parent)
    assert (done.returncode, done.stdout) == (143, "told 15\n"), done.stderr


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT", "SIGHUP", "SIGUSR1", "SIGUSR2"])
def test_every_signal_that_announces_an_end_is_heard(tmp_path: Path, name: str) -> None:
    """SIGINT too: it was an exception wherever the script was, and nothing was saved."""
    source = f"os.kill(os.getpid(), signal.{name}); time.sleep(60)"
    done = python("s.py", cwd=write(tmp_path, "s.py", HEAD + source).parent)
    number = getattr(signal, name)
    assert (done.returncode, done.stdout) == (128 + number, f"told {int(number)}\n"), done.stderr


@pytest.mark.parametrize(
    ("second", "pause_s", "said"),
    [
        ("SIGTERM", 0.0, "told 15\n"),  # `timeout` sends it to the process and to its group
        ("SIGTERM", 1.5, "told 15\nagain 15\n"),
        ("SIGINT", 0.0, "told 15\nagain 2\n"),
    ],
)
def test_a_second_signal_is_told_apart_from_one_that_was_sent_twice(
    tmp_path: Path, second: str, pause_s: float, said: str
) -> None:
    """The same within a second is one announcement."""
    source = f"""
ENDS = False
os.kill(os.getpid(), signal.SIGTERM)
while watch._heard is None: time.sleep(0.001)
time.sleep({pause_s})
os.kill(os.getpid(), signal.{second})
time.sleep(2)
print("goes on")
"""
    done = python("s.py", cwd=write(tmp_path, "s.py", HEAD + source).parent)
    goes_on = "again" not in said
    assert done.stdout == said + "goes on\n" * goes_on, done.stderr


def test_a_signal_that_a_library_handles_is_its_own(tmp_path: Path) -> None:
    """faulthandler's handler is none of Python's: nobody but the kernel knows of it."""
    source = """
import faulthandler
watch.close()
faulthandler.register(signal.SIGUSR1)
termination.TerminationWatch(first, again).start()
os.kill(os.getpid(), signal.SIGUSR1)
time.sleep(0.5)
print("goes on", flush=True)
os.kill(os.getpid(), signal.SIGUSR2)
time.sleep(60)
"""
    done = python("s.py", cwd=write(tmp_path, "s.py", HEAD + source).parent)
    assert done.stdout == f"goes on\ntold {int(signal.SIGUSR2)}\n", done.stderr
    assert "most recent call first" in done.stderr


def test_after_the_session_signals_do_what_they_did_before(tmp_path: Path) -> None:
    """An interrupt is an exception again."""
    source = """
assert signal.getsignal(signal.SIGINT) is not signal.default_int_handler
watch.close()
for number in termination.WATCHED:
    before = signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
    assert signal.getsignal(number) is before
try:
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(60)
except KeyboardInterrupt:
    print("interrupted")
"""
    done = python("s.py", cwd=write(tmp_path, "s.py", HEAD + source).parent)
    assert done.stdout == "interrupted\n", done.stderr


def test_an_interrupt_reaches_the_main_thread_when_it_is_wanted(tmp_path: Path) -> None:
    """Ctrl-C and no boundary in time: the script hears of it as ever."""
    source = """
ENDS = False
came_out = []
asking = threading.Timer(0.2, lambda: came_out.append(watch.interrupt(60.0)))
asking.start()
try:
    while True:
        time.sleep(0.05)
except KeyboardInterrupt:
    asking.join()
    print("interrupted", came_out, flush=True)
"""
    done = python("s.py", cwd=write(tmp_path, "s.py", HEAD + source).parent)
    assert done.stdout == "interrupted [True]\n", done.stderr


def test_an_interrupt_that_nothing_catches_is_the_exit_code_of_one(tmp_path: Path) -> None:
    """As after a boundary: 130, without a traceback."""
    source = """
ENDS = False
threading.Timer(0.2, lambda: watch.interrupt(60.0)).start()
while True:
    time.sleep(0.05)
"""
    done = python("s.py", cwd=write(tmp_path, "s.py", HEAD + source).parent)
    assert (done.returncode, done.stderr) == (130, "")


def test_the_end_of_the_launcher_is_told(tmp_path: Path) -> None:
    """Of the process that looks after this one, however it ends."""
    source = """
import subprocess
launcher = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
told = threading.Event()
other = termination.TerminationWatch(
    first, again, launcher=launcher.pid, launcher_ended=told.set
)
other.start()
assert not told.wait(0.3)
launcher.kill()
assert told.wait(60)
print("told")
"""
    done = python("s.py", cwd=write(tmp_path, "s.py", HEAD + source).parent)
    assert done.stdout == "told\n", done.stderr


def test_the_tests_can_be_run_where_signals_are_ignored(tmp_path: Path) -> None:
    """By `nohup` or in the background: what they start is as on a terminal, they themselves not."""
    numbers = (signal.SIGINT, signal.SIGHUP)
    before = [signal.signal(number, signal.SIG_IGN) for number in numbers]
    try:
        with heard_by_children():
            for number in numbers:
                signal.raise_signal(number)
            source = "import signal; print(*map(signal.getsignal, (signal.SIGINT, signal.SIGHUP)))"
            done = python("-c", source, cwd=tmp_path)
        assert [signal.getsignal(number) for number in numbers] == [signal.SIG_IGN] * 2
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)
    assert "default_int_handler" in done.stdout, done.stderr
    assert done.stdout.endswith(f" {signal.SIG_DFL!s}\n")


def test_a_closed_watch_that_is_put_back_passes_signals_on() -> None:
    """As Lightning does behind a fit: it keeps the handlers of before."""
    formers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGUSR1)}
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's `&` ignores it
    watch = TerminationWatch(lambda number: None, lambda number: None)
    watch.start()
    ours = signal.getsignal(signal.SIGINT)
    try:
        assert ours != signal.default_int_handler
        watch.close()
        signal.signal(signal.SIGINT, ours)
        with pytest.raises(KeyboardInterrupt, match=r"^$"):
            signal.raise_signal(signal.SIGINT)
        assert signal.getsignal(signal.SIGINT) == signal.default_int_handler
    finally:
        for number, former in formers.items():
            signal.signal(number, former)
