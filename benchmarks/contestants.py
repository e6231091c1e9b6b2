"""Ways to save within one process, for the benchmark that needs one process: a GPU is not shared.

`bench-engine` has its own, each in a process and an environment of its own (`benchmarks/peers`).
"""

import os
import shutil
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.job import Job


class Contestant:
    """A way to save; `begin` is the blocking part, `finish` returns when it is durable."""

    name = ""

    def __init__(self, job: Job, folder: Path) -> None:
        self.job = job
        self.folder = folder
        folder.mkdir(parents=True)

    def begin(self) -> None:
        """Starts the checkpoint; the training is blocked meanwhile."""

    def boundary(self) -> None:
        """After every iteration."""

    def stalled_s(self) -> float:
        """Stall that `begin` does not show (at the fence), since `begin`."""
        return 0.0

    def finish(self) -> float:
        """Waits until durable; CLOCK_MONOTONIC at which it was."""
        return time.monotonic()

    def close(self) -> None:
        """Lets go."""


class Nothing(Contestant):
    """No checkpoint: shows the noise of the method."""

    name = "none"


class TorchSave(Contestant):
    """torch.save to a new file, fsynced."""

    name = "torch.save"

    def begin(self) -> None:
        path = self.folder / "state.pt"
        path.unlink(missing_ok=True)
        with open(path, "wb") as file:
            torch.save(self.job.state(), file)
            file.flush()
            os.fsync(file.fileno())
        self._done = time.monotonic()

    def finish(self) -> float:
        return self._done


class DcpAsync(Contestant):
    """torch.distributed.checkpoint.async_save (thread), as documented."""

    name = "torch DCP async"

    def begin(self) -> None:
        import torch.distributed.checkpoint as dcp

        shutil.rmtree(self.folder / "dcp", ignore_errors=True)
        self._ended = [0.0]
        future: Any = dcp.async_save(
            self.job.state(), checkpoint_id=str(self.folder / "dcp"), no_dist=True
        )
        ended = self._ended

        def note(_: Any) -> None:
            ended[0] = time.monotonic()

        future.add_done_callback(note)
        self._future = future

    def finish(self) -> float:
        self._future.result()
        while not self._ended[0]:
            time.sleep(0.001)
        return self._ended[0]
