"""The exit code of a command is the one that it has found, whatever threads still run."""

import shlex
import subprocess
import sys

SCRIPT = """
import threading
from torch.distributed import TCPStore
from autockpt import cli
from autockpt.cli import app

store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
store.set("a", "b")
asked = threading.Event()

def ask():
    while True:
        store.get("a")
        asked.set()

threading.Thread(target=ask, name="RendezvousKeepAliveTimer_1", daemon=True).start()
asked.wait()
app.run = lambda argv: print("said") or 75
cli.main(["run"])
"""


def test_a_thread_of_the_rendezvous_does_not_abort_the_process() -> None:
    """A scheduler acts on 75; an interpreter that ends beside such a thread is aborted (134)."""
    ended = subprocess.run(
        [sys.executable, "-c", SCRIPT], check=False, capture_output=True, text=True, timeout=120
    )
    assert (ended.returncode, ended.stdout) == (75, "said\n"), ended.stderr


def test_nor_where_stdout_and_stderr_were_closed_at_the_start() -> None:
    """Python has None for them then."""
    command = f"exec {shlex.join([sys.executable, '-c', SCRIPT])} >&- 2>&-"
    ended = subprocess.run(["bash", "-c", command], check=False, timeout=120)
    assert ended.returncode == 75
