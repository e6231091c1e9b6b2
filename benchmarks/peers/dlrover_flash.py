"""DLRover Flash Checkpoint: shared memory in the caller, a process of its own writes it.

Without its launcher it starts its saver process by itself.  A save that comes while the former is
being persisted is skipped without an error, so `save` looks at what it was told.
"""

import os
import time
from pathlib import Path

import torch

from benchmarks.peers.contract import Peer

POLL_S = 0.01
LIMIT_S = 120.0
SHARED_MEMORY = Path("/dev/shm")


class Flash(Peer):
    """DdpCheckpointer, storage type disk."""

    def setup(self) -> None:
        # Names its sockets and shared memory after this: two contestants must not share them.
        os.environ["TORCHELASTIC_RUN_ID"] = f"bench-{os.getpid()}"
        from dlrover.trainer.torch.flash_checkpoint.ddp import DdpCheckpointer

        self._checkpointer = DdpCheckpointer(str(self.folder / "dlrover"))
        self._step = 0

    def save(self) -> None:
        from dlrover.trainer.torch.flash_checkpoint.checkpointer import StorageType

        self._step += 1
        self._checkpointer.save_checkpoint(
            self._step, self.job.state(), storage_type=StorageType.DISK
        )
        if self._checkpointer._engine._cached_step != self._step:
            raise RuntimeError("skipped silently: the former save is still being persisted")

    def wait(self) -> float:
        """Its tracker file names the step once it is committed; its time tells when."""
        tracker = self.folder / "dlrover" / "dlrover_latest.txt"
        deadline = time.monotonic() + LIMIT_S
        while not tracker.exists() or tracker.read_text().strip() != str(self._step):
            if time.monotonic() > deadline:
                raise TimeoutError(f"not committed within {LIMIT_S:.0f} s")
            time.sleep(POLL_S)
        self._places = [self._file(step) for step in range(1, self._step + 1)]
        return time.monotonic() - (time.time() - tracker.stat().st_mtime)

    def _file(self, step: int) -> Path:
        return self.folder / "dlrover" / str(step) / "rank_0.pt"

    def unsynced(self) -> list[Path]:
        return [self._file(self._step)]

    def load(self) -> None:
        """From the file: its own load would take what its shared memory still holds."""
        self.job.take(torch.load(self._file(self._step)))

    def close(self) -> None:
        """Its shared memory outlives its processes."""
        for segment in SHARED_MEMORY.glob(f"bench-{os.getpid()}_*"):
            segment.unlink(missing_ok=True)
