"""torch.save: one file through the page cache, the training waits."""

import time
from pathlib import Path

import torch

from benchmarks.peers.contract import Peer


class TorchSave(Peer):
    """A new file each time, as the loops of most people do it; the harness fsyncs."""

    def save(self) -> None:
        torch.save(self.job.state(), self.new_place())
        self._done = time.monotonic()

    def wait(self) -> float:
        return self._done

    def unsynced(self) -> list[Path]:
        return [self.place]

    def load(self) -> None:
        self.job.take(torch.load(self.place))
