"""The command line: one file per command, thin; everything it does can be done from Python too.

Importing this package costs nothing, because workers import it too (`autockpt.cli.script_runner`).
"""

import atexit
import contextlib
import os
import sys
import threading
from collections.abc import Sequence


def main(argv: Sequence[str] | None = None) -> None:
    """Entry point of the `autockpt` command; ends the process with its exit code."""
    from autockpt.cli.app import run

    code = run(sys.argv[1:] if argv is None else list(argv))
    if callable(code):
        # The user's script runs from here, with nothing of the command line on the stack.
        code = code()
    _leave(code)


_LEFT_BEHIND = ("RendezvousKeepAliveTimer", "autockpt-report")
"""Beginnings of the names of threads that nothing waits for at the end."""


def _leave(code: int) -> None:
    """Ends the process with this code, also where a thread still runs that could abort it.

    One of torch's rendezvous returns from C++ while the interpreter ends: exit code 134 hides the
    one that a scheduler acts on.
    """
    if any(t.name.startswith(_LEFT_BEHIND) for t in threading.enumerate()):
        atexit._run_exitfuncs()
        # None: closed when the process started.
        for stream in filter(None, (sys.stdout, sys.stderr)):
            with contextlib.suppress(OSError, ValueError):  # closed, or without a reader
                stream.flush()
        os._exit(code)
    sys.exit(code)
