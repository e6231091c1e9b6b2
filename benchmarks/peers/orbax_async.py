"""Orbax: AsyncCheckpointer over numpy views of the tensors."""

from pathlib import Path
from typing import Any

import torch

from benchmarks.peers.contract import Peer, Watch


class Async(Peer):
    """StandardCheckpointHandler in its asynchronous wrapper."""

    def setup(self) -> None:
        import orbax.checkpoint as ocp

        self._orbax = ocp
        self._saver: Any = ocp.AsyncCheckpointer(ocp.StandardCheckpointHandler())

    def save(self) -> None:
        tree = {name: tensor.numpy() for name, tensor in self.job.flat().items()}
        self._saver.save(self.new_place(), args=self._orbax.args.StandardSave(tree))
        self._watch = Watch(self._saver.wait_until_finished)

    def wait(self) -> float:
        return self._watch.ended()

    def unsynced(self) -> list[Path]:
        return [self.place]

    def load(self) -> None:
        tree = {name: tensor.numpy() for name, tensor in self.job.flat().items()}
        found = self._saver.restore(self.place, args=self._orbax.args.StandardRestore(tree))
        self.job.take_flat({name: torch.from_numpy(value.copy()) for name, value in found.items()})

    def close(self) -> None:
        self._saver.close()
