"""New memory that is touched before it is needed: while the keepers still decide what to restore.

The first touch of new memory is the slowest part of a restore where a hypervisor has to find the
pages.  Measured: 0.3-0.7 GB/s, against 7-13 for pages that the virtual machine already has.
Between `attach` and the decision a trainer is idle.  The size of the newest commit predicts how
much a restore will allocate.  The restore itself touches pages that were not touched in time;
unused pages are given back.
"""

import contextlib
import ctypes
import os
import threading
import time
from collections.abc import Mapping

import torch

from autockpt.executors.image.container import ImageHeader
from autockpt.executors.image.layout.plan import EXTRA
from autockpt.executors.linux.memory import (
    HUGE_BYTES,
    map_memory,
    page_align,
    require_headroom,
    unmap_memory,
)
from autockpt.executors.linux.restore_allocator import OWN_PAGES_BYTES
from autockpt.executors.restore.open_shards import OpenedShard
from autockpt.executors.state.live_state import LiveState, local_part
from autockpt.executors.storage.catalogue import open_shard
from autockpt.executors.storage.directory.records import read_commit
from autockpt.executors.storage.shard_file import run_parallel
from autockpt.values.policy_keys.paths import is_store_url

TOUCHERS = 2
"""Threads: 0.63 GB/s of a hypervisor's pages, where one got 0.36."""
STEP_S = 0.002
"""Seconds of a thread's own time per step.  Between two steps it waits for the interpreter, for
longer than that while the rank plans."""
SLACK = 4
"""A guess may be too small by this part of it; the rest is address space and no memory."""


class PrefaultedMemory:
    """Memory for one restore; a failure means that there is none."""

    def __init__(self, checkpoints: str, state: LiveState, rank: int, *, ranks: int) -> None:
        """Begins.  `ranks`: how many of this node do the same, for the limit of its memory."""
        live = {**state.parameters(), **state.buffers()}
        self._live = {name: local_part(tensor) for name, tensor in live.items()}
        self._checkpoints, self._rank, self._ranks = checkpoints, rank, ranks
        self._address = self._room = 0
        self._over = False
        self._handed_out = 0
        """Bytes that a thread has touched or will."""
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._work, name="autockpt-ahead", daemon=True)
        self._thread.start()

    def take(self, nbytes: int) -> int:
        """Address of a mapping of `nbytes` (whole pages), the caller's own; 0: there is none.

        Only the first caller gets it.
        """
        with self._lock:
            self._over = True
            address, room = self._address, self._room
            self._address = self._room = 0
        if room:
            self._thread.join()
        kept = nbytes if nbytes <= room else 0
        if room > kept:
            unmap_memory(address + kept, room - kept)
        return address if kept else 0

    def close(self) -> None:
        """Give back the memory if no restore took it."""
        self.take(0)

    def _work(self) -> None:
        # Whatever is wrong with the checkpoint is for the restore to say.
        with contextlib.suppress(Exception):
            self._touch(new_bytes(self._checkpoints, self._rank, self._live))

    def _touch(self, nbytes: int) -> None:
        if not nbytes:
            return
        require_headroom(nbytes * self._ranks, what="memory for a restore")
        with self._lock:
            if self._over:
                return
            self._room = page_align(nbytes + nbytes // SLACK)
            self._address = address = map_memory(self._room)

        run_parallel(range(TOUCHERS), lambda _: self._walk(address, nbytes), workers=TOUCHERS)

    def _walk(self, address: int, nbytes: int) -> None:
        """One thread, in steps that grow as long as they are short."""
        count = HUGE_BYTES
        while not self._over:
            with self._lock:
                start = self._handed_out
                self._handed_out += count
            if start >= nbytes:
                return
            began = time.thread_time()
            # A write and not madvise, beside which nobody else could map memory.
            ctypes.memset(address + start, 0, min(count, nbytes - start))
            count = 2 * count if time.thread_time() - began < STEP_S else HUGE_BYTES


def new_bytes(checkpoints: str, rank: int, live: Mapping[str, torch.Tensor]) -> int:
    """Bytes that a restore of the newest commit will probably allocate in pages of its own.

    `live`: a rank's parameters and buffers, by name; tensors outside host memory go through new
    memory, too.  A shard holds a share of what ranks have in common: its proportions count and not
    its size.  0 where nothing is committed, and in an object store.  Raises AutockptError or
    OSError for what cannot be read.
    """
    if is_store_url(checkpoints):  # a restore waits for the network, not for pages
        return 0
    for name in sorted(os.listdir(checkpoints), reverse=True):
        path = os.path.join(checkpoints, name, "COMMIT")
        if name.startswith("ckpt-") and os.path.exists(path):
            commit = read_commit(path)
            record = commit.records[rank if rank < len(commit.records) else 0]
            opened = OpenedShard(open_shard(os.path.join(checkpoints, name), record, commit))
            with contextlib.closing(opened):
                return _in_proportion(opened.header, live)
    return 0


def _in_proportion(header: ImageHeader, live: Mapping[str, torch.Tensor]) -> int:
    sizes = {name: place.stop - place.start for name, place in header.tensors.items()}
    known = sum(size for name, size in sizes.items() if name in live)
    new = sum(
        size for name, size in sizes.items()
        if name not in live and name != EXTRA and size >= OWN_PAGES_BYTES
    )  # fmt: skip
    away = sum(tensor.nbytes for tensor in live.values() if tensor.device.type != "cpu")
    return away + (new * sum(tensor.nbytes for tensor in live.values()) // known if known else 0)
