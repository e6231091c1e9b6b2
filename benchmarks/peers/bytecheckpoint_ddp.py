"""ByteCheckpoint: its DDP checkpointer with fast saving."""

import os
import threading
import time
from pathlib import Path
from typing import Any

import torch.distributed as dist

from benchmarks.peers.contract import Peer

LIMIT_S = 120.0


class Ddp(Peer):
    """bytecheckpoint.save(framework="ddp", fast_saving=True) of model and optimizer."""

    def setup(self) -> None:
        os.environ["TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"] = "1"
        dist.init_process_group(
            "gloo", init_method=f"file://{self.folder}/group", rank=0, world_size=1
        )
        import bytecheckpoint

        self._bytecheckpoint: Any = bytecheckpoint

    def _state(self) -> dict[str, Any]:
        return {"model": self.job.model, "optimizer": self.job.optimizer}

    def save(self) -> None:
        self._done, self._ended = threading.Event(), 0.0
        # Without a step number it never calls back.
        self._bytecheckpoint.save(
            str(self.new_place()), self._state(), "ddp", fast_saving=True, callback=self._note,
            global_steps=self._count, ignore_append_global_steps_to_folder=True,
        )  # fmt: skip

    def _note(self, *_: Any, **__: Any) -> None:
        self._ended = time.monotonic()
        self._done.set()

    def wait(self) -> float:
        if not self._done.wait(LIMIT_S):
            raise TimeoutError(f"its callback did not come within {LIMIT_S:.0f} s")
        return self._ended

    def unsynced(self) -> list[Path]:
        return [self.place]

    def load(self) -> None:
        self._bytecheckpoint.load(str(self.place), self._state(), "ddp")
