"""Does the main thread stand in a collective that nothing ends?

A rank that dies within a message leaves the receiver waiting.  When gloo (torch 2.13) loses the
connection, it forgets the message under way.  A time limit of half an hour then ends the wait.
"""

import sys
import threading
import time
from types import FrameType

from autockpt.executors.keeper.hangs.evidence import Frame, is_collective

STANDS_S = 1.0
"""Behind the aborts a collective ends within milliseconds, or not at all."""
MOVED_S = 0.002
"""A thread that has used a core for longer has moved."""
WALKED = 50
"""Frames that are looked at, innermost first."""


class Standing:
    """Of one thread, from now on."""

    def __init__(self, thread: threading.Thread | None = None) -> None:
        """`thread`: None for the main one."""
        self._thread = (thread or threading.main_thread()).ident or 0
        self._clock = time.pthread_getcpuclockid(self._thread)
        self._used_s, self._since_s = time.clock_gettime(self._clock), time.monotonic()

    def place(self) -> str:
        """Where it has stood for `STANDS_S`, if that is a collective; else ""."""
        used_s, now_s = time.clock_gettime(self._clock), time.monotonic()
        if used_s > self._used_s + MOVED_S:
            self._used_s, self._since_s = used_s, now_s
        inner = sys._current_frames().get(self._thread)
        if now_s < self._since_s + STANDS_S or inner is None:
            return ""
        frames = [_frame(one) for one in _walk(inner)]
        if not is_collective(frames):
            return ""
        own = next((one for one in frames if "/site-packages/" not in one.file), frames[0])
        return f"{own}, within {frames[0].name}"


def _walk(frame: FrameType | None) -> list[FrameType]:
    found: list[FrameType] = []
    while frame is not None and len(found) < WALKED:
        found.append(frame)
        frame = frame.f_back
    return found


def _frame(one: FrameType) -> Frame:
    return Frame(file=one.f_code.co_filename, line=one.f_lineno, name=one.f_code.co_name)
