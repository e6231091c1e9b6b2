"""Lightning: AsyncCheckpointIO over TorchCheckpointIO, without a Trainer around it."""

from pathlib import Path

from benchmarks.peers.contract import Peer, Watch


class Async(Peer):
    """One thread; the tensors are cloned in the caller."""

    def setup(self) -> None:
        from lightning.pytorch.plugins.io import AsyncCheckpointIO, TorchCheckpointIO

        self._io = AsyncCheckpointIO(TorchCheckpointIO())

    def save(self) -> None:
        self._io.save_checkpoint(self.job.state(), self.new_place())
        executor = self._io._executor
        assert executor is not None
        # It hands out no future; its only thread takes this when the save is done.
        self._watch = Watch(executor.submit(lambda: None).result)

    def wait(self) -> float:
        return self._watch.ended()

    def unsynced(self) -> list[Path]:
        return [self.place]

    def load(self) -> None:
        self.job.take(self._io.load_checkpoint(self.place))

    def close(self) -> None:
        self._io.teardown()
