"""ML Flashpoint: its DCP storage writer and reader over /dev/shm, no replicas.

Its buffers are compiled at installation with sources that it fetches.
"""

import importlib
import os
import shutil
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.peers.contract import Peer, Watch

dcp: Any = importlib.import_module("torch.distributed.checkpoint")  # it re-exports nothing by name


class Flashpoint(Peer):
    """dcp.async_save with MemoryStorageWriter."""

    def setup(self) -> None:
        from ml_flashpoint.adapter.pytorch.memory_storage_writer import MemoryStorageWriter
        from ml_flashpoint.checkpoint_object_manager.checkpoint_object_manager import (
            CheckpointObjectManager,
        )
        from ml_flashpoint.core.checkpoint_saver import DefaultMLFlashpointCheckpointSaver

        dist.init_process_group(
            "gloo", init_method=f"file://{self.folder}/group", rank=0, world_size=1
        )
        self._memory = Path("/dev/shm") / f"bench-flashpoint-{os.getpid()}"
        self._objects = CheckpointObjectManager()
        self._saver = DefaultMLFlashpointCheckpointSaver(
            global_rank_getter=lambda: 0, local_rank_getter=lambda: 0,
            global_barrier_func=lambda: None, ckpt_obj_manager=self._objects,
            replication_manager=_NoReplicas(),
        )  # fmt: skip
        spawn: Any = torch.multiprocessing.get_context("spawn")
        manager = ThreadPoolExecutor(1).submit(spawn.Manager)
        self._writer = MemoryStorageWriter(self._saver, manager)

    def _id(self) -> str:
        return str(self._memory / f"step-{self._count}_ckpt")

    def save(self) -> None:
        self._count += 1
        response: Any = dcp.async_save(
            self.job.state(), checkpoint_id=self._id(), storage_writer=self._writer
        )
        self._watch = Watch(lambda: self._finish(response))

    def _finish(self, response: "Future[Any]") -> None:
        from ml_flashpoint.core.checkpoint_id_types import CheckpointContainerId

        response.result()
        deletion = self._saver.finalize_checkpoint(CheckpointContainerId(self._id()))
        if deletion is not None:
            deletion.wait()

    def wait(self) -> float:
        return self._watch.ended()

    def files(self) -> list[Path]:
        return [self._memory]

    def load(self) -> None:
        from ml_flashpoint.adapter.pytorch.memory_storage_reader import MemoryStorageReader
        from ml_flashpoint.core.checkpoint_loader import DefaultMLFlashpointCheckpointLoader

        loader = DefaultMLFlashpointCheckpointLoader(
            self._objects, _NoReplicas(), global_rank_getter=lambda: 0,
            local_rank_getter=lambda: 0, broadcast_object_list_func=dist.broadcast_object_list,
            all_gather_object_func=dist.all_gather_object, world_size_getter=lambda: 1,
        )  # fmt: skip
        state = self.job.state()
        dcp.load(state, storage_reader=MemoryStorageReader(self._id(), loader))
        self.job.take(state)

    def close(self) -> None:
        shutil.rmtree(self._memory, ignore_errors=True)


class _NoReplicas:
    """Stands in for the replication manager, which wants peers."""

    def async_replicate(self, _: Any) -> list[Any]:
        """Nobody to send to."""
        return []
