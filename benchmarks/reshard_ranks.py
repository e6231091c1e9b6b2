"""One rank of the job whose loads `benchmarks.reshard` compares; started by it.

All ranks save once: through `autockpt.attach`, with torch.save, with torch DCP.  Then every way to
load takes its turn, from a cold page cache, in the same processes; a load takes as long as its
slowest rank.  The optimizer is without state before each, as in a process that has just started.
"""

import ctypes
import gc
import json
import os
import shutil
import sys
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import autockpt
from autockpt.executors.image.container import chunk_digest
from autockpt.executors.linux.memory import Arena, memory_to_read_in
from autockpt.executors.linux.restore_allocator import RestoreAllocator
from autockpt.executors.restore.apply_state import apply_state
from autockpt.executors.restore.reader import restore_shards
from autockpt.executors.restore.shard_sources import Together, shards_on_disk
from autockpt.executors.state.live_state import LiveState
from autockpt.executors.storage.catalogue import READERS, shard_path
from autockpt.executors.storage.directory.records import read_commit
from autockpt.executors.storage.shard_file import ImageReader, run_parallel
from autockpt.values.goal import Goal, Pins, Retention
from benchmarks.job import Job

NEVER = 10**9
READY_WITHIN_S = 180.0
SAVES = 3
"""Attempts: on a busy machine one may be skipped."""
NEEDED = 3
"""Bytes that a load allocates at most, in sizes of the parameters: two moments and buffers."""
PIECE_BYTES = 4 * 2**20
CHUNK_BYTES = 8 * 2**20
M_MMAP_THRESHOLD = -3


class Counted:
    """Bytes that ImageReader reads in this process."""

    def __init__(self) -> None:
        self.nbytes = 0
        plain = ImageReader.read_at

        def read_at(reader: ImageReader, offset: int, into: memoryview) -> None:
            self.nbytes += len(into)
            plain(reader, offset, into)

        ImageReader.read_at = read_at  # type: ignore[method-assign]


class RankOfJob:
    """The example under DDP, and the same model under fully_shard, which loads the former's."""

    def __init__(self, folder: str, size: str, tokens: int) -> None:
        self.folder, self.rank, self.ranks = folder, dist.get_rank(), dist.get_world_size()
        self.job = Job(size, tokens)
        self.job.model = DistributedDataParallel(self.job.model)
        self.other = Job(size, tokens)
        fully_shard(self.other.model)
        self.other.optimizer = torch.optim.AdamW(self.other.model.parameters(), lr=1e-4, fused=True)
        self.parameter_bytes = sum(parameter.nbytes for parameter in self.job.model.parameters())
        self.counted = Counted()
        self.read = 0

    # ------------------------------------------------------------------ three checkpoints

    def save(self) -> None:
        """Ours, torch.save's and DCP's, of the same state."""
        self.job.iterate()
        self.checkpoint, self.sizes, self.shards = self._save_ours(self.job, "run")
        self.other.iterate()
        self.sharded, _, self.others = self._save_ours(self.other, "run-sharded")
        self.ours(self.job, together=False)  # the training went on since
        if self.rank == 0:
            torch.save(self.full_state(), f"{self.folder}/full.pt")
        model, optimizer = get_state_dict(self.job.model, self.job.optimizer)
        dcp.save({"model": model, "optimizer": optimizer}, checkpoint_id=f"{self.folder}/dcp")
        os.sync()
        dist.barrier()

    def _save_ours(self, job: Job, name: str) -> tuple[str, list[int], list[str]]:
        """(folder of the generation, bytes of its shards, their files)."""
        pins = Pins(memory_interval_steps=NEVER, disk_interval_steps=NEVER, retune=False)
        session: Any = autockpt.attach(
            model=job.model, optimizer=job.optimizer, run_dir=f"{self.folder}/{name}",
            goal=Goal(pins=pins, retention=Retention(keep_last=1)),
        )  # fmt: skip
        deadline = time.monotonic() + READY_WITHIN_S
        while not self._all(session.ready) and time.monotonic() < deadline:
            job.iterate()
            session.step()
        durable = False
        for _ in range(SAVES):
            if durable:
                break
            session.save()
            for _ in range(2):
                job.iterate()
                session.step()
            durable = self._all(session.wait_durable(READY_WITHIN_S) > 0)
        session.close(final_checkpoint=False)
        if not durable:
            raise RuntimeError("the checkpoint did not become durable")
        checkpoint = str(max(Path(session._job.checkpoints).glob("ckpt-*")))
        records = read_commit(f"{checkpoint}/COMMIT").records
        sizes = [int(record["bytes"]) for record in records]
        return checkpoint, sizes, [shard_path(checkpoint, record) for record in records]

    def _all(self, mine: bool) -> bool:
        flag = torch.tensor(float(mine))
        dist.all_reduce(flag, op=dist.ReduceOp.MIN)
        return bool(flag)

    def full_state(self) -> dict[str, Any]:
        """Everything by name, as a user saves it by hand."""
        model = self.job.model.module
        return {"model": model.state_dict(), "optimizer": self.job.optimizer.state_dict()}

    # ------------------------------------------------------------------ ways to load

    def plain_read(self, *, digest: bool = False) -> None:
        """Each rank its share of the unique bytes, direct, into faulted memory."""
        size = self.sizes[self.rank]
        with ImageReader(self.shards[self.rank], direct=True) as reader:

            def read(start: int) -> None:
                piece = self.plain.view[start : min(start + CHUNK_BYTES, size)]
                reader.read_at(start, piece)
                if digest:
                    chunk_digest(piece)

            run_parallel(range(0, size, CHUNK_BYTES), read, workers=READERS)

    def plain_fill(self, *, digest: bool = False) -> None:
        """The plain read, and beside it what no load can do without: every rank writes its own copy
        of all bytes, parameters into memory that is there, the rest into new memory."""
        reader = threading.Thread(target=self.plain_read, kwargs={"digest": digest})
        reader.start()
        source, unique, kept = self.plain, sum(self.sizes), self.kept
        fresh = RestoreAllocator([unique - kept.nbytes]).tensor(
            (unique - kept.nbytes,), torch.uint8
        )
        for address, nbytes in ((kept.address, kept.nbytes), (fresh.data_ptr(), fresh.nbytes)):
            for start in range(0, nbytes, PIECE_BYTES):
                count = min(PIECE_BYTES, nbytes - start)
                here = start % (source.nbytes - PIECE_BYTES)
                ctypes.memmove(address + start, source.address + here, count)
        reader.join()

    def ours(self, job: Job, checkpoint: str = "", *, together: bool = True) -> None:
        """The restore of a resume, without keepers' messages; of DDP's checkpoint or another."""
        state = LiveState.of(model=job.model, optimizer=job.optimizer)
        group = Together(self.ring, tuple(range(self.ranks)), self.rank) if together else None
        shards = shards_on_disk(
            checkpoint or self.checkpoint, self.rank, self.ranks, together=group
        )
        self.counted.nbytes = 0
        apply_state(restore_shards(shards, state), state)
        self.read = self.counted.nbytes

    def broadcast(self) -> None:
        """Rank 0 reads the file and sends every tensor; all put the optimizer's state back."""
        found: list[Any] = [None]
        if self.rank == 0:
            state = torch.load(f"{self.folder}/full.pt", weights_only=True)
            found = [_forms(state)]
        dist.broadcast_object_list(found, src=0)
        if self.rank:
            state = _empty(found[0])
        for tensor in _tensors(state):
            dist.broadcast(tensor, src=0)
        self.job.model.module.load_state_dict(state["model"])
        self.job.optimizer.load_state_dict(state["optimizer"])

    def dcp(self) -> None:
        """torch DCP as its tutorial loads."""
        model, optimizer = get_state_dict(self.job.model, self.job.optimizer)
        dcp.load({"model": model, "optimizer": optimizer}, checkpoint_id=f"{self.folder}/dcp")
        set_state_dict(
            self.job.model, self.job.optimizer, model_state_dict=model,
            optim_state_dict=optimizer,
        )  # fmt: skip

    # ------------------------------------------------------------------ rounds

    def measure(self, rounds: int) -> dict[str, Any]:
        """Seconds of every way and round, the first round left out; and what ours read."""
        self.plain, self.kept = (
            Arena.anonymous(max(self.sizes)),
            Arena.anonymous(self.parameter_bytes),
        )
        ways: dict[str, Callable[[], None]] = {
            "read": self.plain_read,
            "fill": self.plain_fill,
            "digest": lambda: self.plain_fill(digest=True),
            "ours": lambda: self.ours(self.job),
            "reshard": lambda: self.ours(self.other),
            "own": lambda: self.ours(self.other, self.sharded),
            "apart": lambda: self.ours(self.job, together=False),
            "broadcast": self.broadcast,
            "dcp": self.dcp,
        }
        seconds: dict[str, list[float]] = {name: [] for name in ways}
        read: dict[str, list[int]] = {}
        for turn in range(rounds + 1):
            for name, way in ways.items():
                self._settle()
                taken = self._timed(way)
                if turn:
                    seconds[name].append(taken)
                    if name in ("ours", "reshard", "own", "apart"):
                        read.setdefault(name, []).append(self._sum(self.read))
        return {"seconds": seconds, "read": read, "sizes": self.sizes}

    def _settle(self) -> None:
        """As a new process with nothing in the page cache, and memory for reading together.

        As many free bytes as a load needs are the replica's own, as in `benchmarks.restore`.
        """
        for job in (self.job, self.other):
            job.optimizer.zero_grad(set_to_none=True)  # with gradients DCP makes no state
            job.optimizer.state.clear()
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)
        peers = (f"{self.folder}/full.pt", *Path(self.folder, "dcp").iterdir())
        for path in (*self.shards, *self.others, *peers):
            with open(path, "rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        Arena.anonymous(NEEDED * self.parameter_bytes).close()
        self._lend()

    def _lend(self) -> None:
        """What a keeper does while the trainers import."""
        where: list[Any] = [None]
        if self.rank == 0:
            self.ring = memory_to_read_in(self.ranks)
            where = [f"/proc/{os.getpid()}/fd/{self.ring.fd}"]
        dist.broadcast_object_list(where, src=0)
        if self.rank:
            self.ring = Arena.attach(os.open(where[0], os.O_RDWR), fault=False)
        dist.barrier()

    def _timed(self, way: Callable[[], None]) -> float:
        dist.barrier()
        began = time.perf_counter()
        way()
        slowest = torch.tensor(time.perf_counter() - began, dtype=torch.float64)
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
        return float(slowest)

    def _sum(self, value: int) -> int:
        total = torch.tensor(value)
        dist.all_reduce(total)
        return int(total)

    def check(self) -> None:
        """Every way left the same parameters and moments; else none of the figures counts."""
        wanted: dict[str, torch.Tensor] = {}
        for way in (self.broadcast, self.dcp, lambda: self.ours(self.job)):
            self._settle()
            way()
            found = self.job.flat()
            names = wanted.keys() ^ found.keys() if wanted else set()
            differ = [n for n in wanted if n not in names and not torch.equal(wanted[n], found[n])]
            if names or differ:
                raise RuntimeError(f"two ways to load do not agree: {sorted(names)} {differ}")
            wanted = {name: tensor.clone() for name, tensor in found.items()}


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    items = value.values() if isinstance(value, dict) else value
    if not isinstance(value, dict | list | tuple):
        return []
    return [tensor for item in items for tensor in _tensors(item)]


def _forms(value: Any) -> Any:
    """The state with every tensor as one without memory."""
    if isinstance(value, torch.Tensor):
        return value.to("meta")
    if isinstance(value, dict):
        return {key: _forms(item) for key, item in value.items()}
    return [_forms(item) for item in value] if isinstance(value, list) else value


def _empty(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return torch.empty_like(value, device="cpu")
    if isinstance(value, dict):
        return {key: _empty(item) for key, item in value.items()}
    return [_empty(item) for item in value] if isinstance(value, list) else value


def main(folder: str, size: str, tokens: int, rounds: int) -> None:
    """One rank, from the group to the figures."""
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 128 * 1024)
    os.environ["AUTOCKPT_NO_PROFILE"] = "1"
    os.environ["AUTOCKPT_SAME_JOB"] = "1"
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks
    )
    one = RankOfJob(folder, size, tokens)
    one.save()
    one.check()
    found = one.measure(rounds)
    if rank == 0:
        Path(folder, "figures.json").write_text(json.dumps(found))
        shutil.rmtree(f"{folder}/dcp", ignore_errors=True)
    dist.barrier()
    os._exit(0)  # gloo's threads may outlive the group


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
