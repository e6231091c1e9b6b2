"""status.json while the run lasts, on a thread of its own: the run directory may hang too."""

import contextlib
import os
import queue
import threading
import time

from autockpt import new_files
from autockpt.values.record import to_json
from autockpt.values.status import RunStatus

CLOSE_S = 2.0
"""A keeper that leaves waits no longer for a run directory that hangs."""


class StatusFile:
    """Replaces the file by the newest status; what comes while a write hangs is overtaken."""

    def __init__(self, run_directory: str) -> None:
        self._path = os.path.join(run_directory, "status.json")
        self._newest: queue.Queue[RunStatus] = queue.Queue(maxsize=1)
        self._thread: threading.Thread | None = None

    def write(self, status: RunStatus) -> None:
        """Never waits and never raises."""
        with contextlib.suppress(queue.Empty):
            self._newest.get_nowait()
            self._newest.task_done()
        with contextlib.suppress(queue.Full):
            self._newest.put_nowait(status)
        if self._thread is None:
            self._thread = threading.Thread(target=self._serve, name="autockpt-status", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """Waits a moment for the last one."""
        deadline_s = time.monotonic() + CLOSE_S
        while self._newest.unfinished_tasks and time.monotonic() < deadline_s:
            time.sleep(0.01)

    def _serve(self) -> None:
        temporary = f"{self._path}.{os.getpid()}.tmp"
        while True:
            text = to_json(self._newest.get(), indent=2) + "\n"
            with contextlib.suppress(OSError):
                with open(temporary, "w", encoding="utf-8", opener=new_files.readable) as file:
                    file.write(text)
                os.replace(temporary, self._path)
            self._newest.task_done()
