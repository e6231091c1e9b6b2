"""What contestants are held against: nothing, a plain write, and the least that a snapshot takes.

`Floor` is what a careful hand writes with no feature at all: no digest, no proof, no commit, no
retention, no restart.  It shows how much of a cost is the machine's.
"""

import ctypes
import itertools
import mmap
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import torch

from benchmarks.peers.contract import Peer

PAGE_BYTES, LINE_BYTES = 4096, 64
_POPULATE_WRITE = 23
ALL = 10**9


class Nothing(Peer):
    """No checkpoint: shows the noise of the method."""

    def save(self) -> None:
        """Nothing."""

    def wait(self) -> float:
        return time.monotonic()

    def load(self) -> None:
        """Nothing."""


class Slot:
    """Shared memory for all tensors, faulted at once, with a process that writes it to files."""

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        sizes = [-(-tensor.nbytes // LINE_BYTES) * LINE_BYTES for tensor in tensors]
        self.nbytes = -(-sum(sizes) // PAGE_BYTES) * PAGE_BYTES
        fd = os.memfd_create("floor")
        os.ftruncate(fd, self.nbytes)
        self.memory = mmap.mmap(fd, self.nbytes)
        self.memory.madvise(_POPULATE_WRITE)
        first = ctypes.addressof(ctypes.c_char.from_buffer(self.memory))
        places = itertools.accumulate(sizes, initial=first)
        self._places = list(zip(tensors, places, strict=False))
        self._writer = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("writer.py")), str(fd), str(self.nbytes)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, pass_fds=[fd],
        )  # fmt: skip
        os.close(fd)

    def move(self, start: int, stop: int, *, into_slot: bool) -> None:
        """Copies some of the tensors; releases the interpreter while it does."""
        for tensor, at in self._places[start:stop]:
            there, here = (at, tensor.data_ptr()) if into_slot else (tensor.data_ptr(), at)
            ctypes.memmove(there, here, tensor.nbytes)

    def start_write(self, path: Path, *, new: bool) -> None:
        """Tells the writer."""
        assert self._writer.stdin is not None
        print("new" if new else "over", path, file=self._writer.stdin, flush=True)

    def written(self) -> float:
        """Waits for the writer; when it was durable."""
        assert self._writer.stdout is not None
        answer = self._writer.stdout.readline().split()
        if not answer or answer[0] == "error":
            raise RuntimeError(f"writer: {' '.join(answer) or 'ended'}")
        self.write_cpu_s = float(answer[1])
        return float(answer[0])

    def close(self) -> None:
        """Ends the writer."""
        assert self._writer.stdin is not None
        self._writer.stdin.close()
        self._writer.wait(30)


class Floor(Peer):
    """One slot; copied under the next forward and backward; two files overwritten in turn."""

    def setup(self) -> None:
        flat = self.job.flat()
        buffers = [tensor for name, tensor in flat.items() if name.startswith("buffer.")]
        others = [tensor for name, tensor in flat.items() if not name.startswith("buffer.")]
        self._buffers = len(buffers)
        self.slot = Slot([*buffers, *others])
        self._copy: threading.Thread | None = None
        self._turn = 0

    def save(self) -> None:
        self._turn += 1
        self._path = self.folder / f"floor-{self._turn % 2}"
        # The forward changes buffers; parameters and moments stand still until the optimizer.
        self.slot.move(0, self._buffers, into_slot=True)
        self._copy = threading.Thread(target=self._copy_then_write)
        self._copy.start()

    def _copy_then_write(self) -> None:
        self.slot.move(self._buffers, ALL, into_slot=True)
        self.slot.start_write(self._path, new=False)

    def join(self) -> None:
        if self._copy is not None:
            self._copy.join()
            self._copy = None

    def wait(self) -> float:
        self.join()
        return self.slot.written()

    def load(self) -> None:
        fd = os.open(self._path, os.O_RDONLY | os.O_DIRECT)
        try:
            done = 0
            while done < self.slot.nbytes:
                piece = memoryview(self.slot.memory)[done : done + 8 * 2**20]
                done += os.preadv(fd, [piece], done)
        finally:
            os.close(fd)
        self.slot.move(0, ALL, into_slot=False)

    def close(self) -> None:
        self.slot.close()


class PlainWrite(Floor):
    """Only the write, of bytes that nobody took a snapshot of, to a new file each time."""

    def save(self) -> None:
        self.slot.start_write(self.new_place(), new=True)

    def extras(self) -> dict[str, float]:
        """The two things that any checkpoint must do, in CPU seconds, both beside the training."""
        taken = {}

        def copy() -> None:
            cpu = time.thread_time()
            self.slot.move(0, ALL, into_slot=True)
            taken["copy_cpu"] = time.thread_time() - cpu

        thread = threading.Thread(target=copy)
        thread.start()
        self.job.iterate()
        thread.join()
        began = time.perf_counter()
        self.slot.move(0, ALL, into_slot=True)
        return {
            **taken, "write_cpu": self.slot.write_cpu_s, "copy_s": time.perf_counter() - began,
        }  # fmt: skip

    def load(self) -> None:
        raise NotImplementedError("it holds no snapshot")
