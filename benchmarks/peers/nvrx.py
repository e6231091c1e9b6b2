"""NVIDIA Resiliency Extension: the DCP plan in the caller, a forked or a kept process writes.

Three CUDA calls that it makes unconditionally are stubbed; nothing else of it is changed.
"""

import functools
import importlib
import os
import time
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.peers import cuda_stub
from benchmarks.peers.contract import Peer, Watch

dcp: Any = importlib.import_module("torch.distributed.checkpoint")  # it re-exports nothing by name

WRITERS = 2


class Fork(Peer):
    """AsyncCallsQueue(persistent=False): a forked child is the snapshot."""

    persistent = False

    def setup(self) -> None:
        os.environ[cuda_stub.WANTED] = "1"  # for the process that it spawns
        cuda_stub.apply()
        from nvidia_resiliency_ext.checkpointing.async_ckpt.core import AsyncCallsQueue

        dist.init_process_group(
            "gloo", init_method=f"file://{self.folder}/group", rank=0, world_size=1
        )
        self._queue: Any = AsyncCallsQueue(persistent=self.persistent)

    def _state(self) -> dict[str, Any]:
        return self.job.state()

    def save(self) -> None:
        from nvidia_resiliency_ext.checkpointing.async_ckpt import filesystem_async as files
        from nvidia_resiliency_ext.checkpointing.async_ckpt import state_dict_saver as saver
        from nvidia_resiliency_ext.checkpointing.async_ckpt.core import AsyncRequest

        writer = files.FileSystemWriterAsync(str(self.new_place()), thread_count=WRITERS)
        planned = saver.save_state_dict_async_plan(
            self._state(), writer, None, planner=dcp.DefaultSavePlanner()
        )
        function, preload, arguments = writer.get_save_function_and_args()
        finish = functools.partial(saver.save_state_dict_async_finalize, *planned)
        request = AsyncRequest(function, arguments, [finish], preload_fn=preload)
        self._queue.schedule_async_request(request)
        self._watch = Watch(self._written)

    def _written(self) -> None:
        """Of the process only: the metadata is for the training thread to write."""
        process = self._queue.async_calls[0].async_caller.process
        process.join()

    def wait(self) -> float:
        ended = self._watch.ended()
        before = time.monotonic()
        self._queue.maybe_finalize_async_calls(blocking=True, no_dist=True)
        return ended + (time.monotonic() - before)

    def load(self) -> None:
        state = self.job.state()
        dcp.load(state, checkpoint_id=str(self.place))
        self.job.take(state)


class Persistent(Fork):
    """AsyncCallsQueue(persistent=True): one process for all saves."""

    persistent = True

    def _state(self) -> dict[str, Any]:
        """A copy: the worker would share the live CPU tensors and read them later."""
        state: dict[str, Any] = _cloned(self.job.state())
        return state

    def _written(self) -> None:
        self._queue.maybe_finalize_async_calls(blocking=True, no_dist=True)

    def wait(self) -> float:
        return self._watch.ended()


def _cloned(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.clone()
    if isinstance(value, dict):
        return {key: _cloned(one) for key, one in value.items()}
    return value
