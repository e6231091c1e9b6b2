"""In the keepers of a test: a wall clock that jumps, and a keeper that stands still at a COMMIT.

Python imports this module at its start when its folder is on PYTHONPATH, so the keeper's own code
is what runs.  Its node's folder, XDG_RUNTIME_DIR, says what happens there, also in the middle of a
run: `clock` holds the seconds by which `time.time` and `time.time_ns` are off (the kernel's clock,
which makes the times of files, is not), and while `still-before` or `still-after` is there the
process stops itself, once, before or after `os.link` gives a COMMIT its name.
"""

import os
import signal
import threading
import time
from typing import Any

_HERE = os.environ.get("XDG_RUNTIME_DIR", "")
_link, _time, _time_ns = os.link, time.time, time.time_ns


def _off_s() -> int:
    try:
        with open(os.path.join(_HERE, "clock")) as file:
            return int(file.read() or 0)
    except FileNotFoundError:
        return 0


def _stand(when: str) -> None:
    try:
        os.unlink(os.path.join(_HERE, when))
    except FileNotFoundError:
        return
    signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)  # at once in this thread


def _linked(source: str, target: str, **more: Any) -> None:
    is_commit = os.path.basename(target) == "COMMIT"
    if is_commit:
        _stand("still-before")
    _link(source, target, **more)
    if is_commit:
        _stand("still-after")


if _HERE:
    os.link = _linked
    time.time = lambda: _time() + _off_s()
    time.time_ns = lambda: _time_ns() + 1_000_000_000 * _off_s()
