"""CheckFreq: its manager in manual mode, a thread that copies and writes, a fence in the update.

Its sources are not packaged; where its `src` folder is on PYTHONPATH this runs.  Two things of it
assume a GPU: the copy to the host, which for a CPU tensor is the tensor itself and so no snapshot,
and the restore.
"""

import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.peers.contract import Peer, Watch

POLL_S = 0.0005


class Checkpoint(Peer):
    """CFManager.save_cpu with a thread; the file is fsynced by it."""

    def setup(self) -> None:
        import cf_checkpoint
        import cf_manager

        cf_checkpoint._to_cpu = _clone
        tracked = cf_checkpoint.CFCheckpoint(model=self.job.model, optimizer=self.job.optimizer)
        self._manager: Any = cf_manager.CFManager(
            str(self.folder / "checkfreq"), tracked, mode=cf_manager.CFMode.MANUAL
        )

    def save(self) -> None:
        self._manager.save_cpu(use_thread=True)
        self._watch = Watch(self._manager.chk_process.join)

    def join(self) -> None:
        """As its weight_update does, which spins; sleeping is kinder on two cores."""
        while self._manager.in_progress_snapshot.value == 1:
            time.sleep(POLL_S)

    def wait(self) -> float:
        return self._watch.ended()

    def load(self) -> None:
        newest = self._manager.get_latest_checkpoint()
        state = torch.load(Path(self._manager._get_full_path(newest)))
        self.job.take(state)


def _clone(value: Any, _: Any = None) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        return {key: _clone(one) for key, one in value.items()}
    if isinstance(value, list):
        return [_clone(one) for one in value]
    return value
