"""DeepSpeed FastPersist: torch.save into its O_DIRECT writer, the training waits.

Its asynchronous I/O is compiled at first use and needs libaio's headers.  Two things that it takes
from its CUDA helpers are stood in for: the view of a tensor as bytes, and pinned buffers.
"""

import time
from typing import Any

import torch

from benchmarks.peers.contract import Peer

BUFFER_BYTES, BLOCK_BYTES, QUEUE_DEPTH, THREADS = 128 * 2**20, 8 * 2**20, 32, 2


class FastPersist(Peer):
    """FastFileWriter with a double buffer; it fsyncs."""

    def setup(self) -> None:
        from deepspeed.io import fast_file_writer
        from deepspeed.ops.op_builder import AsyncIOBuilder

        fast_file_writer.UtilsBuilder = _Utils
        self._module: Any = fast_file_writer
        self._handle = (
            AsyncIOBuilder()
            .load()
            .aio_handle(
                block_size=BLOCK_BYTES,
                queue_depth=QUEUE_DEPTH,
                single_submit=False,
                overlap_events=True,
                intra_op_parallelism=THREADS,
            )
        )
        self._buffer = torch.zeros(BUFFER_BYTES, dtype=torch.uint8)

    def save(self) -> None:
        config = self._module.FastFileWriterConfig(
            dnvme_handle=self._handle, pinned_tensor=self._buffer
        )
        writer = self._module.FastFileWriter(str(self.new_place()), config)
        # The old format: the new one would go through its slow path.
        torch.save(self.job.state(), writer, _use_new_zipfile_serialization=False)
        writer.close()
        self._done = time.monotonic()

    def wait(self) -> float:
        return self._done

    def load(self) -> None:
        self.job.take(torch.load(self.place))


class _Utils:
    """Stands in for the helper that it compiles for the view as bytes."""

    def load(self) -> "_Utils":
        return self

    def cast_to_byte_tensor(self, value: Any) -> Any:
        """The bytes of one tensor or of several."""
        if isinstance(value, torch.Tensor):
            return value.contiguous().view(-1).view(torch.uint8)
        return [self.cast_to_byte_tensor(one) for one in value]
