"""Live state -> slot: boundary tensors inside the stall, the rest under forward and backward.

What to copy from where is worked out once and kept as long as the state consists of the same
tensors at the same places; a snapshot then costs a comparison of those, the small tensors of the
boundary and a start of the copy thread.  The state is copied part by part in the order in which
optimizers step, so that each step waits only for what it is about to change.
"""

import contextlib
import ctypes
import json
import math
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch

from autockpt.executors.copying import (
    CopyEngine,
    CopyJob,
    CopyTask,
    ProgressCounter,
    copy_tensors,
)
from autockpt.executors.device import DeviceCopier
from autockpt.executors.dtypes import true_dtype
from autockpt.executors.fence import SAMPLE_BYTES, CanaryGroup, StateProof, canary_groups
from autockpt.executors.inventory import Geometry, Inventory, geometry
from autockpt.executors.layout import EXTRA, PAGE_BYTES, Entry, Layout, plan_layout
from autockpt.executors.memory import Arena
from autockpt.executors.state import LiveState, describe, local_part
from autockpt.values.errors import ConfigError

EXTRA_SLACK = 2
"""The skeleton of the state may grow to this multiple before the layout is planned again."""


@dataclass(slots=True)
class Part:
    """What one optimizer changes."""

    names: tuple[str, ...]
    end: int
    """Prefix of the image that holds it."""
    canaries: list[CanaryGroup]


@dataclass(slots=True)
class Recipe:
    """How a state is copied, for as long as its tensors stay where they are."""

    inventory: Inventory
    places: Geometry
    layout: Layout
    boundary: Any
    """Fingerprint of the boundary tensors."""
    tensors: dict[str, torch.Tensor]
    """Lazy tensors, local parts."""
    entries: list[Entry]
    """Their places, without empty ones."""
    parts: dict[str, Part]
    on_device: bool
    jobs: weakref.WeakKeyDictionary[Arena, list[CopyJob]] = field(
        default_factory=weakref.WeakKeyDictionary
    )


@dataclass(slots=True)
class Snapshot:
    """A snapshot in flight."""

    layout: Layout
    arena: Arena
    recipe: Recipe
    began_s: float
    task: CopyTask
    proofs: dict[str, StateProof] = field(default_factory=dict)
    """By part, those not yet fenced."""
    events: list[tuple[int, Any]] = field(default_factory=list)
    """(end in the image, event behind it) of what a device copies out of the live tensors."""
    late: list[Callable[[], list[str]]] = field(default_factory=list)
    """Comparisons that wait for a device."""
    completed: Callable[["Snapshot"], None] | None = None
    changed: list[str] = field(default_factory=list)
    """Names of tensors that changed behind the fence, [] if the snapshot is good."""
    error: BaseException | None = None
    boundary_stall_s: float = 0.0
    fence_stall_s: float = 0.0
    copy_s: float = 0.0
    """From the boundary to the last byte."""


class Snapshotter:
    """Takes snapshots of a LiveState into slots; used from the training thread only."""

    def __init__(
        self, state: LiveState, counters: memoryview, *, device: DeviceCopier | None = None
    ) -> None:
        self.state = state
        self.counters = ProgressCounter(counters)
        self.engine = CopyEngine()
        self.layout: Layout | None = None
        self._recipe: Recipe | None = None
        self._extra_bytes = 0
        self._rotation = 0
        self._headers: weakref.WeakKeyDictionary[Arena, bytes] = weakref.WeakKeyDictionary()
        """The header that stands in each slot; by object, because ids and digests recur."""
        self._device = device
        self.device_clone: Literal["auto", "on", "off"] = "auto"
        """Clone on the device first; auto: when its free memory allows."""
        self.current: Snapshot | None = None
        self._tasks: dict[int, CopyTask] = {}
        """The newest copy into each slot."""

    # ------------------------------------------------------------------ what to copy

    def plan(self, progress: dict[str, Any]) -> Layout:
        """The layout of the state as it is now, kept until its structure changes."""
        inventory = self.state.inventory()
        boundary, text = self._gather(inventory, progress, None)
        return self._planned(inventory, boundary, text).layout

    def _gather(
        self, inventory: Inventory, progress: dict[str, Any], rng: Any
    ) -> tuple[dict[str, torch.Tensor], bytes]:
        """(boundary tensors, skeleton as text)."""
        skeleton, boundary = self.state.extra(progress, rng=rng, inventory=inventory)
        for name in self.state.not_lazy:
            if name in inventory.lazy:
                boundary[name] = inventory.lazy[name]
        return boundary, json.dumps(skeleton, separators=(",", ":")).encode()

    def _planned(
        self, inventory: Inventory, boundary: dict[str, torch.Tensor], text: bytes
    ) -> Recipe:
        kept = self._recipe
        places = geometry(list(inventory.locals.values()))
        shape = _boundary_key(boundary, dict.fromkeys(places[0]))
        if (
            kept is not None
            and kept.inventory is inventory
            and kept.places == places
            and kept.boundary == shape
            and len(text) <= kept.layout.extra_bytes
        ):
            return kept
        layout = self._laid_out(inventory, boundary, text)
        tensors = {n: t for n, t in inventory.locals.items() if n not in self.state.not_lazy}
        self._recipe = Recipe(
            inventory=inventory, places=places, layout=layout, boundary=shape, tensors=tensors,
            entries=[e for e in layout.entries if e.spec.lazy and e.spec.nbytes],
            parts=_parts(inventory, layout, tensors),
            on_device=any(tensor.is_cuda for tensor in tensors.values()),
        )  # fmt: skip
        return self._recipe

    def _laid_out(
        self, inventory: Inventory, boundary: dict[str, torch.Tensor], text: bytes
    ) -> Layout:
        if len(text) > self._extra_bytes:
            self._extra_bytes = -(-len(text) * EXTRA_SLACK // PAGE_BYTES) * PAGE_BYTES
        lazy = {n: t for n, t in inventory.lazy.items() if n not in self.state.not_lazy}
        owners = {name: part for part, names in inventory.parts.items() for name in names}
        specs, aliases = describe(lazy, boundary, self.state, owners)
        layout = plan_layout(specs, aliases=aliases, extra_bytes=self._extra_bytes)
        if self.layout is None or layout.digest != self.layout.digest or layout != self.layout:
            self.layout = layout
        return self.layout

    # ------------------------------------------------------------------ the boundary

    def begin(
        self,
        arena: Arena,
        progress: dict[str, Any],
        *,
        lazy: bool,
        slot: int = 0,
        capacity: int | None = None,
        began: Callable[[Layout], None] = lambda layout: None,
        completed: Callable[[Snapshot], None] | None = None,
        rng: Any = None,
    ) -> Snapshot:
        """Copies the boundary group now and starts (or, not `lazy`, completes) the rest.

        `began` is called when the layout is known and nothing is copied yet; `completed` once, when
        every byte is there and proven or the copy failed: by `fence`, or from the copy thread when
        a device has to come so far first.  `rng` replaces the random state of now.  Raises
        ConfigError when the state grew beyond `capacity` bytes: a new layout needs new slots.
        """
        start = time.monotonic()
        counter = self.counters.of(slot)
        former = self._tasks.get(slot)
        if former is not None and former.copied != math.inf:
            self.engine.wait()  # withdrawn, and a device still copies into this slot
        counter.set(0)
        inventory = self.state.inventory()
        boundary, text = self._gather(inventory, progress, rng)
        recipe = self._planned(inventory, boundary, text)
        layout = recipe.layout
        capacity = arena.nbytes if capacity is None else capacity
        if layout.image_bytes > capacity:
            raise ConfigError(
                f"state: the image grew to {layout.image_bytes} bytes, the slot has {capacity}; "
                "new slots are being allocated"
            )
        began(layout)
        self._write_boundary(arena, layout, boundary, text)
        counter.set(layout.boundary_end)
        snapshot = Snapshot(
            layout=layout, arena=arena, recipe=recipe, began_s=start, completed=completed,
            task=CopyTask(jobs=self._jobs(recipe, arena), publish=counter),
        )  # fmt: skip
        self._tasks[slot] = snapshot.task
        self._start(snapshot, lazy=lazy)
        self.current = snapshot
        snapshot.boundary_stall_s = time.monotonic() - start
        return snapshot

    def _start(self, snapshot: Snapshot, *, lazy: bool) -> None:
        """Hands the copies out, and remembers what the tensors look like if they may change."""
        recipe = snapshot.recipe
        if recipe.on_device:
            self._issue(snapshot)
        if lazy:
            for name, part in recipe.parts.items():
                tensors = {n: recipe.tensors[n] for n in part.names}
                snapshot.proofs[name] = StateProof(
                    tensors, groups=part.canaries, reader=self._device
                )
        self.engine.start(snapshot.task)
        if not lazy:
            self.engine.wait()

    def _write_boundary(
        self, arena: Arena, layout: Layout, boundary: dict[str, torch.Tensor], text: bytes
    ) -> None:
        if self._headers.get(arena) != layout.header:
            arena.view[: len(layout.header)] = layout.header
            self._headers[arena] = layout.header
        targets, sources = [], []
        for entry in layout.entries:
            if entry.spec.lazy:
                break
            if entry.spec.name == EXTRA:
                padded = text + b" " * (layout.extra_bytes - len(text))
                arena.view[entry.offset : entry.end] = padded
            elif entry.spec.nbytes:
                targets.append(slot_tensor(arena, entry))
                sources.append(local_part(boundary[entry.spec.name]).detach())
        if targets:
            copy_tensors(targets, sources)

    def _jobs(self, recipe: Recipe, arena: Arena) -> list[CopyJob]:
        jobs = recipe.jobs.get(arena)
        if jobs is None:
            jobs = recipe.jobs[arena] = copy_jobs(recipe.layout, recipe.tensors, arena)
        return jobs

    def _issue(self, snapshot: Snapshot) -> None:
        """Gives the device its copies; a clone of the live tensors is safe from the next step."""
        recipe, task = snapshot.recipe, snapshot.task
        if self._device is None:
            self._device = DeviceCopier(
                next(t for t in recipe.tensors.values() if t.is_cuda).device
            )
        device, jobs = self._device, task.jobs
        sources = [job.tensors[1][0] for job in jobs if _is_device(job) and job.tensors]
        clones = self._clones(device, sources)
        cloned, sources = clones is not None, clones or sources
        device.follow()
        rest, task.jobs = iter(sources), []
        for job in jobs:
            if not _is_device(job) or job.tensors is None:
                task.first.append(job)
                task.jobs.append(CopyJob(job.end, 0, 0, 0))
                continue
            target, source = job.tensors[0][0], next(rest)
            event = device.copy(target, source)
            # The job holds the source: a clone lives until it is copied.
            task.jobs.append(replace(job, tensors=([target], [source]), event=event))
            if not cloned:
                snapshot.events.append((job.end, event))

    def _clones(
        self, device: DeviceCopier, sources: list[torch.Tensor]
    ) -> list[torch.Tensor] | None:
        wanted = self.device_clone == "on" or (
            self.device_clone == "auto"
            and device.has_room(sum(source.nbytes for source in sources))
        )
        try:
            return device.clone(sources) if wanted else None
        except torch.OutOfMemoryError:
            return None

    # ------------------------------------------------------------------ the fence

    def fence(self, optimizer: torch.optim.Optimizer | None = None) -> list[str]:
        """Makes it safe to change what `optimizer` changes (None: everything).

        Waits for host copies that are not done, makes a device wait for its own.  When nothing of
        the snapshot is left to change it is completed, `current` is None, and the names of changed
        tensors are returned; [] if it is good or goes on.
        """
        snapshot = self.current
        assert snapshot is not None
        began = time.monotonic()
        inventory = self.state.inventory()
        for name in self._wanted(snapshot, optimizer):
            self._fence_part(snapshot, name, inventory)
        if set(snapshot.proofs) <= {""}:
            if snapshot.proofs:
                self._fence_part(snapshot, "", inventory)
            self._finish(snapshot)
        snapshot.fence_stall_s += time.monotonic() - began
        if self.current is None and not snapshot.recipe.on_device:
            self._complete(snapshot)
        return snapshot.changed if self.current is None else []

    def _wanted(self, snapshot: Snapshot, optimizer: torch.optim.Optimizer | None) -> list[str]:
        needs = snapshot.recipe.inventory.needs
        for prefix, known in self.state.optimizers.items():
            if known is optimizer and prefix in needs:
                return [name for name in needs[prefix] if name in snapshot.proofs]
        return list(snapshot.proofs)

    def _fence_part(self, snapshot: Snapshot, name: str, inventory: Inventory) -> None:
        part, task = snapshot.recipe.parts[name], snapshot.task
        if snapshot.recipe.on_device:
            self.engine.wait_for(lambda: task.first_done)
            event = next((e for end, e in snapshot.events if end >= part.end), None)
            if event is None and snapshot.events:
                event = snapshot.events[-1][1]
            if event is not None and self._device is not None:
                self._device.order(event)
        else:
            self.engine.wait_for(lambda: task.copied >= part.end)
        proof = snapshot.proofs.pop(name)
        snapshot.changed += proof.changed(self._tensors_now(snapshot.recipe, part, inventory))
        snapshot.late.append(proof.late_changes)

    def _tensors_now(
        self, recipe: Recipe, part: Part, inventory: Inventory
    ) -> dict[str, torch.Tensor] | None:
        """The tensors that stand where those of a part stood; None when it is the same ones."""
        if inventory is recipe.inventory:
            return None
        if set(inventory.lazy) != set(recipe.inventory.lazy):
            return dict(inventory.locals)  # tells what came and what went
        return {name: inventory.locals[name] for name in part.names}

    def _finish(self, snapshot: Snapshot) -> None:
        """Nothing may change any more without harm; what a device still does is waited for
        elsewhere."""
        self.current = None
        task = snapshot.task
        if not snapshot.recipe.on_device:
            self.engine.wait_for(lambda: task.copied == math.inf)
            return
        last = CopyTask(jobs=[], publish=ProgressCounter(memoryview(bytearray(8))))
        last.last = lambda _: self._complete(snapshot)
        self.engine.start(last)

    def _complete(self, snapshot: Snapshot) -> None:
        """The verdict: on the training thread, or on the copy thread after a device."""
        task = snapshot.task
        snapshot.error = task.error
        if snapshot.error is None:
            try:
                self._compare(snapshot)
            except Exception as error:
                snapshot.error = error
        task.publish.set(snapshot.layout.image_bytes)
        snapshot.copy_s = max(0.0, task.ended_s - snapshot.began_s)
        if snapshot.completed is not None:
            snapshot.completed(snapshot)

    def _compare(self, snapshot: Snapshot) -> None:
        changed = list(snapshot.changed)
        for late in snapshot.late:
            changed += late()
        if not snapshot.recipe.on_device and snapshot.late:
            changed = changed or self._sample_changes(snapshot)
            if changed:
                changed += self._name_changes(snapshot)
        snapshot.changed = sorted(set(changed))

    def close(self) -> None:
        """Ends the copy thread."""
        self.engine.close()

    def _sample_changes(self, snapshot: Snapshot) -> list[str]:
        """Compares a rotating sample of the source with the slot, byte for byte."""
        entries, tensors = snapshot.recipe.entries, snapshot.recipe.tensors
        budget = SAMPLE_BYTES
        for _ in range(len(entries)):
            entry = entries[self._rotation % len(entries)]
            if budget < SAMPLE_BYTES and entry.spec.nbytes > budget:
                break
            self._rotation += 1
            budget -= entry.spec.nbytes
            if not _same_bytes(snapshot.arena, entry, tensors[entry.spec.name], SAMPLE_BYTES):
                return [entry.spec.name]
        return []

    def _name_changes(self, snapshot: Snapshot) -> list[str]:
        """Full comparison, only after a change was noticed: which tensors are they?"""
        now = self.state.inventory().locals
        return [
            entry.spec.name
            for entry in snapshot.recipe.entries
            if entry.spec.name in now
            and tuple(now[entry.spec.name].shape) == true_shape(entry)
            and not _same_bytes(snapshot.arena, entry, now[entry.spec.name], None)
        ]


def _boundary_key(boundary: dict[str, torch.Tensor], lazy_places: dict[int, None]) -> Any:
    """What the layout depends on: forms, and which of them share memory with what.

    A tensor that stops sharing memory must not stay an alias.
    """
    owners: dict[int, str] = {}
    key = []
    for name, tensor in boundary.items():
        place = local_part(tensor).data_ptr()
        shared = "lazy" if place in lazy_places else owners.setdefault(place, name)
        key.append((name, tensor.shape, tensor.dtype, shared))
    return key


def _parts(
    inventory: Inventory, layout: Layout, tensors: dict[str, torch.Tensor]
) -> dict[str, Part]:
    ends = {entry.spec.name: entry.end for entry in layout.entries}
    ends |= {alias: ends[name] for alias, name in layout.aliases if name in ends}
    parts = {}
    for part, all_names in inventory.parts.items():
        names = tuple(name for name in all_names if name in tensors)
        parts[part] = Part(
            names=names,
            end=max((ends[name] for name in names), default=0),
            canaries=canary_groups({name: tensors[name] for name in names}),
        )
    return parts


def copy_jobs(layout: Layout, tensors: dict[str, torch.Tensor], arena: Arena) -> list[CopyJob]:
    """The jobs that bring every lazy tensor to its place, in the order of the image."""
    jobs: list[CopyJob] = []
    batch: list[tuple[Entry, torch.Tensor]] = []
    for entry in layout.entries:
        if not entry.spec.lazy or not entry.spec.nbytes:
            continue
        source = tensors[entry.spec.name]
        if source.device.type == "cpu" and entry.spec.nbytes < PAGE_BYTES:
            batch.append((entry, source))
            continue
        jobs += _batched(batch, arena)
        batch = []
        plain = source.device.type == "cpu" and source.is_contiguous()
        jobs += [_plain_job(entry, source, arena)] if plain else _batched([(entry, source)], arena)
    return jobs + _batched(batch, arena)


def _plain_job(entry: Entry, source: torch.Tensor, arena: Arena) -> CopyJob:
    destination = arena.address + entry.offset
    return CopyJob(entry.end, destination, source.data_ptr(), entry.spec.nbytes)


def _batched(batch: list[tuple[Entry, torch.Tensor]], arena: Arena) -> list[CopyJob]:
    if not batch:
        return []
    targets = [slot_tensor(arena, entry) for entry, _ in batch]
    tensors = (targets, [source.data for _, source in batch])  # `.data`: see canary_groups
    nbytes = sum(entry.spec.nbytes for entry, _ in batch)
    return [CopyJob(batch[-1][0].end, 0, 0, nbytes, tensors)]


def _is_device(job: CopyJob) -> bool:
    return job.tensors is not None and job.tensors[1][0].is_cuda


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


_libc = ctypes.CDLL(None)
_libc.memcmp.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)


def _same_bytes(arena: Arena, entry: Entry, source: torch.Tensor, limit: int | None) -> bool:
    if source.device.type != "cpu" or not source.is_contiguous():
        return torch.equal(
            slot_tensor(arena, entry).contiguous().view(-1).view(torch.uint8),
            source.detach().cpu().contiguous().view(-1).view(torch.uint8),
        )
    count = entry.spec.nbytes if limit is None else min(limit, entry.spec.nbytes)
    return bool(_libc.memcmp(arena.address + entry.offset, source.data_ptr(), count) == 0)


def register_with_cuda(arena: Arena) -> bool:
    """Pins a slot for DMA when there is a GPU; False when that is not possible."""
    if not torch.cuda.is_available():
        return False
    with contextlib.suppress(RuntimeError):
        code = torch.cuda.cudart().cudaHostRegister(arena.address, arena.nbytes, 1)
        return int(code) == 0
    return False
