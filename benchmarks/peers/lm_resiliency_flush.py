"""lm-resiliency: its checkpoint manager, capture and flush of the same step.

Its own periodic flush writes the checkpoint before the last one; to be durable at this step the
flush is asked for by hand, as its public method allows.
"""

import shutil

from benchmarks.peers.contract import Peer, Watch


class Flush(Peer):
    """InMemoryCheckpointManager, CRC on, no peers (one rank)."""

    def setup(self) -> None:
        from lm_resiliency.checkpointing import InMemoryCheckpointManager, InMemoryCkptConfig

        self._manager = InMemoryCheckpointManager(
            InMemoryCkptConfig(
                interval=1,
                disk_flush_interval=0,
                disk_folder=str(self.folder / "shards"),
                run_id="bench",
                verify_integrity=True,
                pin_memory=False,
            )
        )
        self._step = 0

    def save(self) -> None:
        self._step += 1
        self._manager.save_tensors(list(self.job.flat().values()), self._step)
        self._manager.maybe_wait()
        self._manager.flush_to_disk(self._step)
        self._watch = Watch(self._manager._disk.wait)

    def wait(self) -> float:
        return self._watch.ended()

    def tidy(self) -> None:
        """It keeps every step's file for ever."""
        for old in (self.folder / "shards").rglob("step-*"):
            if old.name != f"step-{self._step}":
                shutil.rmtree(old, ignore_errors=True)

    def load(self) -> None:
        """From its file: its own load would take what its buffers still hold."""
        found = self._manager._disk.load(self._step)
        if found is None:
            raise RuntimeError("the flushed step is not there")
        for tensor, saved in zip(self.job.flat().values(), found[1], strict=True):
            tensor.copy_(saved)

    def close(self) -> None:
        self._manager.close()
