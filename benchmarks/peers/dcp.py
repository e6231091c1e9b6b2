"""torch.distributed.checkpoint: blocking, and asynchronous as documented in three forms."""

import importlib
import time
from concurrent.futures import Future
from typing import Any

import torch.distributed as dist

from benchmarks.peers.contract import Peer

dcp: Any = importlib.import_module("torch.distributed.checkpoint")  # it re-exports nothing by name


class Sync(Peer):
    """dcp.save of the nested state."""

    def save(self) -> None:
        dcp.save(self.job.state(), checkpoint_id=str(self.new_place()), no_dist=True)
        self._done = time.monotonic()

    def wait(self) -> float:
        return self._done

    def load(self) -> None:
        state = self.job.state()
        no_dist = not dist.is_initialized()
        dcp.load(state, checkpoint_id=str(self.place), no_dist=no_dist)
        self.job.take(state)


class AsyncThread(Sync):
    """dcp.async_save with its default stager and a thread."""

    def save(self) -> None:
        self._follow(self._start())

    def _start(self) -> Any:
        return dcp.async_save(self.job.state(), checkpoint_id=str(self.new_place()), no_dist=True)

    def _follow(self, future: "Future[Any]") -> None:
        """Notes when it ends, on the thread that ends it."""
        ended = [0.0]
        future.add_done_callback(lambda _: ended.__setitem__(0, time.monotonic()))
        self._future, self._ended = future, ended

    def wait(self) -> float:
        self._future.result()
        while not self._ended[0]:
            time.sleep(0.001)
        return self._ended[0]


class AsyncStaged(AsyncThread):
    """Staging memory shared and kept, copied by a thread; joined before the optimizer's step."""

    def setup(self) -> None:
        from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

        self._stager = DefaultStager(
            StagingOptions(
                use_pinned_memory=False,
                use_shared_memory=True,
                use_async_staging=True,
                use_non_blocking_copy=False,
            )
        )
        self._staged: Any = None

    def _start(self) -> Any:
        response: Any = dcp.async_save(
            self.job.state(),
            checkpoint_id=str(self.new_place()),
            no_dist=True,
            async_stager=self._stager,
        )
        self._staged = response.staging_completion
        return response.upload_completion

    def join(self) -> None:
        if self._staged is not None:
            self._staged.result()
            self._staged = None

    def close(self) -> None:
        self._stager.close()


class AsyncProcess(AsyncThread):
    """A process writes; it needs a process group, here of one rank."""

    def setup(self) -> None:
        dist.init_process_group(
            "gloo", init_method=f"file://{self.folder}/group", rank=0, world_size=1
        )

    def _start(self) -> Any:
        from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

        return dcp.async_save(
            self.job.state(),
            checkpoint_id=str(self.new_place()),
            async_checkpointer_type=AsyncCheckpointerType.PROCESS,
        )

    def close(self) -> None:
        dist.destroy_process_group()
