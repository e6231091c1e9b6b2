"""torchsnapshot: `take` and `async_take` of the model and the optimizer."""

import time
from pathlib import Path
from typing import Any

from torchsnapshot import Snapshot

from benchmarks.peers.contract import Peer, Watch


class Sync(Peer):
    """Snapshot.take."""

    def _state(self) -> dict[str, Any]:
        return {"model": self.job.model, "optimizer": self.job.optimizer}

    def save(self) -> None:
        Snapshot.take(str(self.new_place()), self._state())
        self._done = time.monotonic()

    def wait(self) -> float:
        return self._done

    def unsynced(self) -> list[Path]:
        return [self.place]

    def load(self) -> None:
        Snapshot(str(self.place)).restore(self._state())


class Async(Sync):
    """Snapshot.async_take: returns when everything is staged in host memory."""

    def save(self) -> None:
        pending = Snapshot.async_take(str(self.new_place()), self._state())
        self._watch = Watch(pending.wait)

    def wait(self) -> float:
        return self._watch.ended()
