"""Output that has no reader any more ends no training that still has to save its last step.

Ctrl-C ends the `tee` of a pipe as well, and a closed terminal takes its output with it.  The next
`print` of the script would raise, before the boundary of its last checkpoint.
"""

import contextlib
import os
import select
import sys
from typing import Any

from autockpt.executors.linux import late_threads

_BROKEN = select.POLLERR | select.POLLHUP | select.POLLNVAL


class _Forgiving:
    """A stream of text whose writes may fail."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        """The characters of the text, written or lost."""
        with contextlib.suppress(OSError):
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        """Writes what is held, if it can be written."""
        with contextlib.suppress(OSError):
            self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def forgive() -> None:
    """From now on standard output and errors may lose their readers."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is not None and not isinstance(stream, _Forgiving):
            setattr(sys, name, _Forgiving(stream))
    with contextlib.suppress(RuntimeError):
        late_threads.start(_watch, "autockpt-output")


def _watch() -> None:
    """Writers that kept a descriptor, or a former stream, write to nowhere."""
    poll, watched = select.poll(), {1, 2}
    for descriptor in watched:
        poll.register(descriptor, 0)
    while watched:
        for descriptor, events in poll.poll():
            poll.unregister(descriptor)
            watched.discard(descriptor)
            if events & _BROKEN:
                with contextlib.suppress(OSError):
                    nowhere = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
                    os.dup2(nowhere, descriptor)
                    os.close(nowhere)
