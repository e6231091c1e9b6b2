"""What a contestant implements.  One class per way of saving, one small file per system.

A contestant lives in a process of its own (`worker`), in its own environment, and sees nothing but
a `Job` and a folder.  It never measures: the worker does.
"""

import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.job import Job


class Watch:
    """A thread that waits for a save to end and notes when; asleep in the meantime."""

    def __init__(self, wait: Callable[[], Any]) -> None:
        self._wait = wait
        self._ended = 0.0
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._wait()
        except BaseException as error:  # re-raised where it is asked for
            self._error = error
        self._ended = time.monotonic()

    def ended(self) -> float:
        """CLOCK_MONOTONIC of the end; waits for it.  Raises what the save raised."""
        self._thread.join()
        if self._error is not None:
            raise self._error
        return self._ended


class Peer:
    """A way to checkpoint.  `save` blocks the training; everything else should not."""

    def __init__(self, job: Job, folder: Path) -> None:
        self.job = job
        self.folder = folder
        self._count = 0
        self._places: list[Path] = []

    def setup(self) -> None:
        """Once, after the first iterations: what a user pays at the start of a job."""

    def save(self) -> None:
        """Right behind an iteration, in the place of `boundary`; the blocking part."""
        raise NotImplementedError

    def join(self) -> None:
        """The last call before every optimizer step: waits for what must not change any more."""

    def boundary(self) -> None:
        """After every iteration that no `save` follows."""

    def stalled_s(self) -> float:
        """Seconds blocked inside iterations so far, where `join` does not see them."""
        return 0.0

    def wait(self) -> float:
        """Returns when the system calls the last save done; CLOCK_MONOTONIC at which it was."""
        raise NotImplementedError

    def finished(self) -> bool:
        """Nothing of the last save is left to do, where that rests in between."""
        return True

    def unsynced(self) -> list[Path]:
        """Files and folders of the last save that the system does not fsync by itself."""
        return []

    def files(self) -> list[Path]:
        """What a load reads, to drop it from the page cache before."""
        return [self.folder]

    def load(self) -> None:
        """The last save back into the job."""
        raise NotImplementedError

    def new_place(self) -> Path:
        """A name for the next save.  Removing old ones inside `save` would be charged to it."""
        self._count += 1
        self._places.append(self.folder / f"save-{self._count}")
        return self._places[-1]

    @property
    def place(self) -> Path:
        """Where the last save stands."""
        return self._places[-1]

    def tidy(self) -> None:
        """Removes all saves but the last; between rounds, outside the figures."""
        while len(self._places) > 1:
            old = self._places.pop(0)
            if old.is_dir():
                shutil.rmtree(old, ignore_errors=True)
            else:
                old.unlink(missing_ok=True)

    def helpers(self) -> list[int]:
        """Processes of the system that are no descendants of this one."""
        return []

    def saved(self) -> dict[str, int]:
        """Counts of checkpoints so far by tier, where a system skips some by itself."""
        return {}

    def extras(self) -> dict[str, float]:
        """Figures of its own after a round; only references have any."""
        return {}

    def close(self) -> None:
        """Lets go."""
