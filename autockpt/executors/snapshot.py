"""Live state -> slot: boundary tensors inside the stall, the rest under forward and backward.

One copy thread of plain priority, memcpy in pieces of 4 MiB for contiguous host tensors (the GIL is
released, Python is re-entered 180 times for 0.7 GB), `copy_` for the rest; on a GPU a side stream
into the CUDA-registered slot.  Nothing faster was found that survives in a whole pipeline; a copy
thread of low priority stalls the fence instead.  Progress is one 64-bit counter, a prefix of the
image, that the keeper polls.
"""

import contextlib
import ctypes
import json
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from autockpt.executors.dtypes import true_dtype
from autockpt.executors.fence import SAMPLE_BYTES, StateProof
from autockpt.executors.layout import EXTRA, Entry, Layout, plan_layout
from autockpt.executors.memory import Arena
from autockpt.executors.state import LiveState, describe, local_part
from autockpt.values.errors import AutockptError, ConfigError

PIECE_BYTES = 4 * 2**20
"""Bytes per memcpy call: small enough to publish progress, large enough for full bandwidth."""

EXTRA_SLACK = 2
"""The skeleton of the state may grow to this multiple before the layout is planned again."""


@dataclass(frozen=True, slots=True)
class CopyJob:
    """One contiguous copy: host address to host address, or tensor to tensor."""

    end: int
    """Prefix of the image that is complete after this job."""
    destination: int
    source: int
    nbytes: int
    tensors: tuple[torch.Tensor, torch.Tensor] | None = None
    """(destination view, source) when a plain memcpy cannot do it."""
    event: Any = None
    """CUDA event behind a copy that was issued to the device already."""


class CopyEngine:
    """A thread that works through copy jobs and publishes how far it came."""

    def __init__(self, publish: "ProgressCounter") -> None:
        self._publish = publish
        self._jobs: list[CopyJob] = []
        self._wake = threading.Semaphore(0)
        self._done = threading.Event()
        self._done.set()
        self._stopping = False
        self.error: BaseException | None = None
        self.ended_s = 0.0
        self._thread = threading.Thread(target=self._work, name="autockpt-copy", daemon=True)
        self._thread.start()

    def start(self, jobs: list[CopyJob]) -> None:
        """Begins copying in the background; the former jobs must have ended."""
        self.wait()
        self.error = None
        self._jobs = jobs
        self._done.clear()
        self._wake.release()

    @property
    def busy(self) -> bool:
        """True while a copy is under way."""
        return not self._done.is_set()

    def wait(self) -> float:
        """Blocks until the jobs are done; seconds waited."""
        if self._done.is_set():
            return 0.0
        began = time.monotonic()
        self._done.wait()
        return time.monotonic() - began

    def close(self) -> None:
        """Ends the thread after the jobs under way."""
        self._stopping = True
        self._wake.release()
        self._thread.join(timeout=30)

    def _work(self) -> None:
        while True:
            self._wake.acquire()
            if self._stopping:
                return
            try:
                run_jobs(self._jobs, self._publish)
            except BaseException as error:  # reported at the fence, the training goes on
                self.error = error
            self.ended_s = time.monotonic()
            self._jobs = []
            self._done.set()


def run_jobs(jobs: list[CopyJob], publish: "ProgressCounter") -> None:
    """Copies in order; what a device copies by itself is only waited for."""
    for job in jobs:
        if job.event is not None:
            job.event.synchronize()
        elif job.tensors is not None:
            job.tensors[0].copy_(job.tensors[1].detach())
        else:
            _memcpy(job, publish)
        publish.set(job.end)


def _memcpy(job: CopyJob, publish: "ProgressCounter") -> None:
    start = job.end - job.nbytes
    for done in range(0, job.nbytes, PIECE_BYTES):
        count = min(PIECE_BYTES, job.nbytes - done)
        ctypes.memmove(job.destination + done, job.source + done, count)
        publish.set(start + done + count)


class ProgressCounter:
    """A 64-bit counter in memory shared with the keeper; one aligned store, no lock."""

    def __init__(self, view: memoryview) -> None:
        self._cells = view[:16].cast("Q")

    def set(self, copied: int) -> None:
        """Publishes the copied prefix of the image."""
        self._cells[0] = copied

    def get(self) -> int:
        """The copied prefix."""
        return self._cells[0]


@dataclass(slots=True)
class Snapshot:
    """A snapshot in flight."""

    layout: Layout
    arena: Arena
    proof: StateProof | None
    began_s: float
    boundary_stall_s: float = 0.0
    fence_stall_s: float = 0.0
    copy_s: float = 0.0
    """From the boundary to the last byte."""


class Snapshotter:
    """Takes snapshots of a LiveState into slots; used from the training thread only."""

    def __init__(self, state: LiveState, counter: memoryview) -> None:
        self.state = state
        self.counter = ProgressCounter(counter)
        self.engine = CopyEngine(self.counter)
        self.layout: Layout | None = None
        self._key: Any = None
        self._extra_bytes = 0
        self._rotation = 0
        self._headers: weakref.WeakKeyDictionary[Arena, bytes] = weakref.WeakKeyDictionary()
        """The header that stands in each slot; by object, because ids and digests recur."""
        self._views: dict[int, tuple[str, torch.Tensor]] = {}
        self._stream: Any = None
        self.current: Snapshot | None = None

    def plan(self, progress: dict[str, Any]) -> Layout:
        """The layout of the state as it is now, cached until its structure changes."""
        lazy, boundary, text = self._gather(progress, None)
        return self._plan(lazy, boundary, len(text))

    def _gather(
        self, progress: dict[str, Any], rng: Any
    ) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor], bytes]:
        skeleton, boundary = self.state.extra(progress, rng=rng)
        text = json.dumps(skeleton, separators=(",", ":")).encode()
        lazy = self.state.lazy_tensors()
        for name in self.state.not_lazy & set(lazy):
            boundary[name] = lazy.pop(name)
        return lazy, boundary, text

    def _plan(
        self, lazy: dict[str, torch.Tensor], boundary: dict[str, torch.Tensor], text_bytes: int
    ) -> Layout:
        owners: dict[int, str] = {}
        key = (
            [(name, t.shape, t.dtype, t.data_ptr()) for name, t in lazy.items()],
            # Which of them share memory: a tensor that stops doing so must not stay an alias.
            [
                (name, t.shape, t.dtype, owners.setdefault(local_part(t).data_ptr(), name))
                for name, t in (*lazy.items(), *boundary.items())
            ],
        )
        if self.layout is None or key != self._key or text_bytes > self.layout.extra_bytes:
            if text_bytes > self._extra_bytes:
                self._extra_bytes = -(-text_bytes * EXTRA_SLACK // 4096) * 4096
            specs, aliases = describe(lazy, boundary, self.state)
            self.layout = plan_layout(specs, aliases=aliases, extra_bytes=self._extra_bytes)
            self._key = key
        return self.layout

    def begin(
        self,
        arena: Arena,
        progress: dict[str, Any],
        *,
        lazy: bool,
        capacity: int | None = None,
        began: Callable[[Layout], None] = lambda layout: None,
        rng: Any = None,
    ) -> Snapshot:
        """Copies the boundary group now and starts (or, not `lazy`, completes) the rest.

        `began` is called when the layout is known and nothing is copied yet; `rng` replaces the
        random state of now.  Raises ConfigError when the state grew beyond `capacity` bytes: a new
        layout needs new slots.
        """
        start = time.monotonic()
        self.counter.set(0)
        tensors, boundary, text = self._gather(progress, rng)
        layout = self._plan(tensors, boundary, len(text))
        capacity = arena.nbytes if capacity is None else capacity
        if layout.image_bytes > capacity:
            raise ConfigError(
                f"state: the image grew to {layout.image_bytes} bytes, the slot has {capacity}; "
                "new slots are being allocated"
            )
        began(layout)
        self._write_boundary(arena, layout, boundary, text)
        self.counter.set(layout.boundary_end)
        locals_ = {name: local_part(tensor) for name, tensor in tensors.items()}
        proof = StateProof(locals_) if lazy else None
        snapshot = Snapshot(layout=layout, arena=arena, proof=proof, began_s=start)
        self._start(self._jobs(layout, locals_, arena))
        if not lazy:
            self.engine.wait()
        self.current = snapshot
        snapshot.boundary_stall_s = time.monotonic() - start
        return snapshot

    def fence(self) -> list[str]:
        """Waits for the copy in flight and proves it; names of changed tensors, [] if it is good.

        Raises AutockptError when the copy itself failed.
        """
        snapshot = self.current
        assert snapshot is not None
        began = time.monotonic()
        self.engine.wait()
        self.current = None
        if self.engine.error is not None:
            raise AutockptError(f"copy into the slot failed: {self.engine.error!r}")
        changed: list[str] = []
        if snapshot.proof is not None:
            now = {n: local_part(t) for n, t in self._lazy_now().items()}
            changed = snapshot.proof.changed(now) or self._sample_changes(snapshot, now)
            if changed:
                changed = sorted({*changed, *self._name_changes(snapshot, now)})
        self.counter.set(snapshot.layout.image_bytes)
        snapshot.fence_stall_s = time.monotonic() - began
        snapshot.copy_s = max(0.0, self.engine.ended_s - snapshot.began_s)
        return changed

    def _lazy_now(self) -> dict[str, torch.Tensor]:
        lazy = self.state.lazy_tensors()
        return {name: t for name, t in lazy.items() if name not in self.state.not_lazy}

    def close(self) -> None:
        """Ends the copy thread."""
        self.engine.close()

    def _write_boundary(
        self, arena: Arena, layout: Layout, boundary: dict[str, torch.Tensor], text: bytes
    ) -> None:
        if self._headers.get(arena) != layout.header:
            arena.view[: len(layout.header)] = layout.header
            self._headers[arena] = layout.header
        for entry in layout.entries:
            if entry.spec.lazy:
                break
            if entry.spec.name == EXTRA:
                padded = text + b" " * (layout.extra_bytes - len(text))
                arena.view[entry.offset : entry.end] = padded
            elif entry.spec.nbytes:
                slot_tensor(arena, entry).copy_(local_part(boundary[entry.spec.name]).detach())

    def _jobs(
        self, layout: Layout, tensors: dict[str, torch.Tensor], arena: Arena
    ) -> list[CopyJob]:
        return [
            copy_job(entry, tensors[entry.spec.name], arena)
            for entry in layout.entries
            if entry.spec.lazy and entry.spec.nbytes
        ]

    def _start(self, jobs: list[CopyJob]) -> None:
        if any(job.tensors is not None and job.tensors[1].is_cuda for job in jobs):
            jobs = self._issue(jobs)
        self.engine.start(jobs)

    def _issue(self, jobs: list[CopyJob]) -> list[CopyJob]:
        """Hands all device copies to a side stream that follows the compute stream."""
        if self._stream is None:
            self._stream = torch.cuda.Stream()
        self._stream.wait_stream(torch.cuda.current_stream())
        issued = []
        with torch.cuda.stream(self._stream):
            for job in jobs:
                if job.tensors is not None and job.tensors[1].is_cuda:
                    job.tensors[0].copy_(job.tensors[1].detach(), non_blocking=True)
                    event = torch.cuda.Event()
                    event.record()
                    job = replace(job, event=event)
                issued.append(job)
        return issued

    def _sample_changes(self, snapshot: Snapshot, now: dict[str, torch.Tensor]) -> list[str]:
        """Compares a rotating sample of the source with the slot, byte for byte."""
        entries = [e for e in snapshot.layout.entries if e.spec.lazy and e.spec.nbytes]
        budget = SAMPLE_BYTES
        for _ in range(len(entries)):
            if budget <= 0:
                break
            entry = entries[self._rotation % len(entries)]
            self._rotation += 1
            if entry.spec.nbytes > SAMPLE_BYTES and budget < SAMPLE_BYTES:
                continue
            budget -= entry.spec.nbytes
            if not _same_bytes(snapshot.arena, entry, now[entry.spec.name], limit=SAMPLE_BYTES):
                return [entry.spec.name]
        return []

    def _name_changes(self, snapshot: Snapshot, now: dict[str, torch.Tensor]) -> list[str]:
        """Full comparison, only after a change was noticed: which tensors are they?"""
        return [
            entry.spec.name
            for entry in snapshot.layout.entries
            if entry.spec.lazy
            and entry.spec.name in now
            and tuple(now[entry.spec.name].shape) == true_shape(entry)
            and not _same_bytes(snapshot.arena, entry, now[entry.spec.name], limit=None)
        ]


def copy_job(entry: Entry, source: torch.Tensor, arena: Arena) -> CopyJob:
    """The job that brings one tensor to its place."""
    plain = source.device.type == "cpu" and source.is_contiguous()
    return CopyJob(
        end=entry.end,
        destination=arena.address + entry.offset,
        source=source.data_ptr() if plain else 0,
        nbytes=entry.spec.nbytes,
        tensors=None if plain else (slot_tensor(arena, entry), source),
    )


def slot_tensor(arena: Arena, entry: Entry) -> torch.Tensor:
    """A view of a slot with the true dtype and shape of an entry."""
    raw = torch.frombuffer(
        arena.view, dtype=torch.uint8, count=entry.spec.nbytes, offset=entry.offset
    )
    return raw.view(true_dtype(entry.spec.true_dtype)).view(true_shape(entry))


def true_shape(entry: Entry) -> tuple[int, ...]:
    """Shape under the true dtype (complex numbers are stored as pairs)."""
    if entry.spec.true_dtype in ("complex128", "complex32"):
        return entry.spec.shape[:-1]
    return entry.spec.shape


def _same_bytes(arena: Arena, entry: Entry, source: torch.Tensor, *, limit: int | None) -> bool:
    if source.device.type != "cpu" or not source.is_contiguous():
        return torch.equal(
            slot_tensor(arena, entry).contiguous().view(-1).view(torch.uint8),
            source.detach().cpu().contiguous().view(-1).view(torch.uint8),
        )
    count = entry.spec.nbytes if limit is None else min(limit, entry.spec.nbytes)
    slot = torch.frombuffer(arena.view, dtype=torch.uint8, count=count, offset=entry.offset)
    return torch.equal(slot, source.detach().view(-1).view(torch.uint8)[:count])


def register_with_cuda(arena: Arena) -> bool:
    """Pins a slot for DMA when there is a GPU; False when that is not possible."""
    if not torch.cuda.is_available():
        return False
    with contextlib.suppress(RuntimeError):
        code = torch.cuda.cudart().cudaHostRegister(arena.address, arena.nbytes, 1)
        return int(code) == 0
    return False
