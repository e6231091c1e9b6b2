"""safetensors: one file of tensors by name, the training waits."""

import time
from pathlib import Path

from safetensors.torch import load_file, save_file

from benchmarks.peers.contract import Peer


class Safetensors(Peer):
    """A new file each time; the harness fsyncs."""

    def save(self) -> None:
        save_file(self.job.flat(), self.new_place())
        self._done = time.monotonic()

    def wait(self) -> float:
        return self._done

    def unsynced(self) -> list[Path]:
        return [self.place]

    def load(self) -> None:
        self.job.take_flat(load_file(self.place))
