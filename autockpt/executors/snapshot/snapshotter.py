"""Live state -> slot: boundary tensors inside the stall, the rest under forward and backward.

The copy plan is computed once and kept as long as the state consists of the same tensors at the
same places.  A snapshot then costs a comparison of those tensors, the small tensors of the boundary
and a start of the copy thread.  The state is copied part by part in the order in which optimizers
step.  Each step waits only for the tensors that it will change.
"""

import contextlib
import ctypes
import math
import random
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch

from autockpt.executors.image.layout.plan import EXTRA, PAGE_BYTES, Entry, Layout, plan_layout
from autockpt.executors.linux.memory import Arena
from autockpt.executors.linux.signal_errors import is_from_handler
from autockpt.executors.snapshot.copy_engine import (
    CopyEngine,
    CopyJob,
    CopyTask,
    ProgressCounter,
    copy_tensors,
    run_jobs,
)
from autockpt.executors.snapshot.copy_plan import (
    CopyPlan,
    Part,
    boundary_key,
    copied_at_once,
    copy_jobs,
    elsewhere,
    is_device,
    is_plain,
    offsets_of,
    parts_of,
    slot_tensor,
    stored_of,
    tensors_now,
)
from autockpt.executors.snapshot.device import DeviceCopier, DeviceRead, GatedCopy, device_of
from autockpt.executors.snapshot.held_boundary import HeldBoundary, HoldPlan
from autockpt.executors.snapshot.optimizer_hooks import CanaryGroup, StateProof
from autockpt.executors.snapshot.replica_check import ReplicaReader, finish_device
from autockpt.executors.snapshot.replica_shares import Agreement, Place, Shares, take_shares
from autockpt.executors.snapshot.streaming import Passage
from autockpt.executors.snapshot.tear_check import (
    SAMPLE_BYTES,
    DeviceProbe,
    Probe,
    TearChecker,
    by_part,
    entries_of,
    part_differs,
    sample_differs,
)
from autockpt.executors.snapshot.tensor_specs import describe
from autockpt.executors.state.live_state import LiveState, local_part
from autockpt.executors.state.skeleton import SkeletonText
from autockpt.executors.state.tensor_index import TensorIndex, geometry
from autockpt.executors.throttle.idle_windows import IdleWindowThrottle, WindowUse
from autockpt.values.errors import ConfigError

EXTRA_SLACK = 2
"""The skeleton of the state may grow to this multiple before the layout is planned again."""

# Not through CDLL: who gives the interpreter's lock away for a few bytes may wait 5 ms for it.
_memmove = ctypes.PyDLL(None).memmove
_memmove.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
_memmove.restype = None


@dataclass(slots=True)
class Snapshot:
    """A snapshot in flight."""

    layout: Layout
    arena: Arena
    recipe: CopyPlan
    began_s: float
    task: CopyTask
    boundary: tuple[list[torch.Tensor], list[torch.Tensor]]
    """(views of the slot, tensors) of the boundary group on a device, still to be copied."""
    proofs: dict[str, StateProof] = field(default_factory=dict)
    """By part, those not yet fenced."""
    sample: dict[str, list[Entry]] | None = None
    """By part, tensors whose bytes are compared with the slot; chosen with its first proof."""
    probed: dict[str, list[Entry]] = field(default_factory=dict)
    """By part, tensors that were kept at the boundary and are compared whole at its fence."""
    device_probe: DeviceProbe | None = None
    """The kept copies of them, when a device copies the state."""
    events: list[tuple[int, Any]] = field(default_factory=list)
    """(end in the image, event behind it or `GatedCopy`) of a device's copies out of the live
    tensors."""
    cloned: bool = False
    """The device copies a clone: the live tensors may change."""
    late: list[Callable[[], list[str]]] = field(default_factory=list)
    """Comparisons that wait for a device."""
    replicas: list[Agreement] = field(default_factory=list)
    """The state shared with other ranks, as it was at the boundary."""
    seen: bool = False
    """The copy thread has tried to prove all of it."""
    reading: bool = False
    """The copy thread reads sections of replicas, and gives the verdict behind that."""
    read_until_s: float = math.inf
    """Shares of others are read from the live tensors so long, CLOCK_MONOTONIC."""
    others_read: bool = False
    device_sections: list[Any] = field(default_factory=list)
    """Sections of others on their way from a device."""
    completed: Callable[["Snapshot"], None] | None = None
    changed: list[str] = field(default_factory=list)
    """Names of tensors that changed behind the fence, [] if the snapshot is good."""
    error: BaseException | None = None
    lock: threading.Lock = field(default_factory=threading.Lock)
    """Held while a part is being proven: by the copy thread, or at its fence."""
    settled: bool = False
    """The verdict is being given, or known."""
    judged: bool = False
    """It is known: `error`, `changed` and `copy_s` stay as they are."""
    told: bool = False
    """Its seal has been reported, under `lock`."""
    void: bool = False
    """Given up: there will be no verdict."""
    boundary_stall_s: float = 0.0
    fence_stall_s: float = 0.0
    copy_s: float = 0.0
    """From the boundary to the last byte."""
    passage: Passage | None = None
    """How the image streams through a window; None: the slot holds it whole."""

    def may_tear(self, tensor: torch.Tensor) -> bool:
        """A change of it before its fence would be in the image."""
        return not self.cloned or device_of(tensor) is None


class Snapshotter:
    """Takes snapshots of a LiveState into slots; used from the training thread only."""

    def __init__(
        self,
        state: LiveState,
        counters: memoryview,
        *,
        device: DeviceCopier | None = None,
        place: Place | None = None,
    ) -> None:
        """`place`: this rank among the others, with whom it shares what all hold; None: alone."""
        self.state = state
        self.place = place
        self.counters = ProgressCounter(counters)
        self.engine = CopyEngine()
        self.layout: Layout | None = None
        self._recipe: CopyPlan | None = None
        self._hold_plan: HoldPlan | None = None
        self._extra_bytes = 0
        self._text = SkeletonText()
        self._sampler, self._probe = TearChecker(), Probe()
        self._draw = random.Random()  # never the script's generators
        self._headers: weakref.WeakKeyDictionary[Arena, bytes] = weakref.WeakKeyDictionary()
        """The header that stands in each slot; by object, because ids and digests recur."""
        self._device = device
        self.device_clone: Literal["auto", "on", "off"] = "auto"
        """Clone on the device first; auto: when its free memory allows."""
        self.gate: IdleWindowThrottle | None = None
        """When bytes of a lazy snapshot may move, or be given to a device; None: at once."""
        self.current: Snapshot | None = None
        self._tasks: dict[int, CopyTask] = {}
        """The newest copy into each slot."""
        self.compares_replicas = True
        """Every byte of what several ranks hold alike is compared, in turn."""
        self._reader = ReplicaReader()

    @property
    def copier(self) -> DeviceCopier | None:
        """The device that copies the state, as far as it is planned; None: the copy thread does."""
        if self._device is None and self._recipe is not None and self._recipe.on_device:
            places = (device_of(tensor) for tensor in self._recipe.tensors.values())
            self._device = next((DeviceCopier(p) for p in places if p is not None), None)
        return self._device

    @property
    def shares(self) -> Shares | None:
        """The parts that this rank stores of state that others hold too, as planned last."""
        return self._recipe.shares if self._recipe is not None else None

    # ------------------------------------------------------------------ what to copy

    def plan(self, progress: dict[str, Any]) -> Layout:
        """The layout of the state as it is at this boundary, kept until its structure changes."""
        inventory = self.state.at_boundary()
        boundary, text, held = self._gather(inventory, progress, None)
        return self._planned(inventory, boundary, text, held).layout

    def _gather(
        self, inventory: TensorIndex, progress: dict[str, Any], rng: Any
    ) -> tuple[dict[str, torch.Tensor], bytes, frozenset[str]]:
        """(boundary tensors, skeleton as text, lazy tensors that are among the former).

        Looked up once, because behind a device the copy thread adds to `not_lazy`.  A tensor that
        is lazy here and not there would be in no image at all.
        """
        skeleton, boundary = self.state.extra(progress, rng=rng, inventory=inventory)
        held = frozenset(name for name in self.state.not_lazy if name in inventory.lazy)
        boundary |= {name: inventory.locals[name] for name in sorted(held)}
        return boundary, self._text.of(skeleton), held

    def _planned(
        self,
        inventory: TensorIndex,
        boundary: dict[str, torch.Tensor],
        text: bytes,
        held: frozenset[str],
    ) -> CopyPlan:
        kept = self._recipe
        places = geometry(inventory.locals.values())
        same = kept is not None and kept.inventory is inventory and kept.places == places
        lazy_places = kept.lazy_places if kept is not None and same else dict.fromkeys(places[0])
        shape = boundary_key(boundary, lazy_places)
        if (
            kept is not None
            and same
            and kept.place is self.place
            and kept.boundary == shape
            and len(text) <= kept.layout.extra_bytes
        ):
            return kept
        lazy = {n: t for n, t in inventory.locals.items() if n not in held}
        place = self.place
        shares = take_shares(place, lazy, inventory.holdings)
        layout = self._laid_out(inventory, boundary, text, held, shares)
        tensors = {n: t for n, t in lazy.items() if n not in elsewhere(shares)}
        sources = {n: stored_of(n, t, shares) for n, t in tensors.items()}
        self._recipe = CopyPlan(
            inventory=inventory, places=places, place=place, layout=layout, boundary=shape,
            extra=layout.entry(EXTRA), at_once=copied_at_once(layout),
            held=held, tensors=tensors, lazy_places=lazy_places, shares=shares, sources=sources,
            entries=[e for e in layout.entries if e.spec.lazy and e.spec.nbytes],
            parts=parts_of(inventory, layout, tensors, sources),
            on_device=any(t.numel() and device_of(t) is not None for t in tensors.values()),
            offsets=offsets_of(layout, tensors, shares) if shares.groups else {},
        )  # fmt: skip
        return self._recipe

    def _laid_out(
        self,
        inventory: TensorIndex,
        boundary: dict[str, torch.Tensor],
        text: bytes,
        held: frozenset[str],
        shares: Shares,
    ) -> Layout:
        if len(text) > self._extra_bytes:
            self._extra_bytes = -(-len(text) * EXTRA_SLACK // PAGE_BYTES) * PAGE_BYTES
        others = held | elsewhere(shares)
        lazy = {n: t for n, t in inventory.lazy.items() if n not in others}
        owners = {name: part for part, names in inventory.parts.items() for name in names}
        specs, aliases = describe(
            lazy, boundary, self.state, owners, inventory.holdings, shares.ranges
        )
        own = self.place is not None and any(n not in inventory.holdings for n in lazy)
        layout = plan_layout(
            specs, aliases=aliases, extra_bytes=self._extra_bytes,
            owner=self.place.rank if own and self.place is not None else None,
            known_nan=self.state.known_nan,
        )  # fmt: skip
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
        passage: Passage | None = None,
    ) -> Snapshot:
        """Copies the boundary group now and starts (or, not `lazy`, completes) the rest.

        `passage`: `arena` is no slot but a window that the image streams through.

        `began` is called when the layout is known and nothing is copied yet.  `completed` is called
        once, mostly from the copy thread: when every byte is there and proven, or the copy failed.
        `rng` replaces the random state of now.  Raises ConfigError when the state grew beyond
        `capacity` bytes: a new layout needs new slots.
        """
        start = time.monotonic()
        counter = self.counters.of(slot)
        former = self._tasks.get(slot)
        if former is not None and former.copied != math.inf:
            self.engine.wait()  # withdrawn, and a device still copies into this slot
        counter.set(0)
        inventory = self.state.at_boundary()
        boundary, text, held = self._gather(inventory, progress, rng)
        recipe = self._planned(inventory, boundary, text, held)
        layout = recipe.layout
        capacity = arena.nbytes if capacity is None else capacity
        if layout.image_bytes > capacity:
            raise ConfigError(
                f"state: the image grew to {layout.image_bytes} bytes, the slot has {capacity}; "
                "new slots are being allocated"
            )
        jobs: list[CopyJob] = []
        late: tuple[list[torch.Tensor], list[torch.Tensor]] = ([], [])
        gate = None
        if passage is not None:
            passage.begin()
            began(layout)
            passage.write_boundary(recipe, boundary, text, arena, counter)
        else:
            began(layout)
            late = self._write_boundary(arena, recipe, boundary, text, wait=not recipe.on_device)
            if not late[0]:  # else when the device is done with them
                counter.set(layout.boundary_end)
            jobs, gate = self._jobs(recipe, arena), self.gate if lazy else None
        snapshot = Snapshot(
            layout=layout, arena=arena, recipe=recipe, began_s=start, completed=completed,
            task=CopyTask(jobs=jobs, publish=counter, gate=gate), boundary=late, passage=passage,
        )  # fmt: skip
        snapshot.replicas = [group.take(self._read_canaries) for group in recipe.shares.groups]
        self._tasks[slot] = snapshot.task
        self.current = snapshot  # before the copy thread can have a verdict on it
        if passage is not None:
            self._stream(snapshot, passage, lazy=lazy)
        else:
            self._start(snapshot, lazy=lazy)
        snapshot.boundary_stall_s = time.monotonic() - start
        return snapshot

    def hold(
        self,
        progress: dict[str, Any],
        room: Callable[[Layout], Arena | None],
        *,
        rng: Any = None,
    ) -> HeldBoundary | str:
        """Copies the boundary group alone, to where `room` says.

        Only where every lazy tensor is in host memory, and another rank of this node holds it too.
        `rng` replaces the random state of now.  A text says why nothing is held; "": `room` gave
        none.
        """
        if self._recipe is not None and (obstacle := self._holds(self._recipe).obstacle):
            return obstacle
        inventory = self.state.at_boundary()
        boundary, text, held = self._gather(inventory, progress, rng)
        recipe = self._planned(inventory, boundary, text, held)
        plan = self._holds(recipe)
        if plan.obstacle:
            return plan.obstacle
        record = room(recipe.layout)
        if record is None:
            return ""
        self._write_boundary(record, recipe, boundary, text, wait=True)
        plan.record_own(record)
        replicas = [group.take(self._read_canaries) for group in recipe.shares.groups]
        return HeldBoundary(plan, record, replicas)

    def _holds(self, recipe: CopyPlan) -> HoldPlan:
        if self._hold_plan is None or self._hold_plan.recipe is not recipe:
            self._hold_plan = HoldPlan(recipe)
        return self._hold_plan

    def _read_canaries(self, group: CanaryGroup) -> bytes | DeviceRead:
        """Canaries as of now, on the host or on their way to it."""
        device = device_of(group.views[0])
        if device is None:
            return group.take()
        if self._device is None:
            self._device = DeviceCopier(device)
        return self._device.read(group.gather())

    def _stream(self, snapshot: Snapshot, passage: Passage, *, lazy: bool) -> None:
        """Through the window, in the background or, where a device has the state, at once."""
        recipe, task = snapshot.recipe, snapshot.task
        task.last = lambda _: self._copied(snapshot)
        if lazy and not passage.blocking and not recipe.on_device:
            self._note(snapshot)
            task.stream = lambda went: passage.copy(recipe, snapshot.arena, task.publish, went)
            self.engine.start(task)
            return
        try:
            passage.copy(recipe, snapshot.arena, task.publish)
        except Exception as error:  # reported with the verdict, the training goes on
            task.error = error
        self.engine.start(task)
        self.engine.wait()
        if task.error is not None and is_from_handler(task.error):
            raise task.error

    def _note(self, snapshot: Snapshot) -> None:
        """Record the tensors as they are now, because they may change before they are copied."""
        for name, part in snapshot.recipe.parts.items():
            groups = [g for g in part.canaries if snapshot.may_tear(g.views[0])]
            snapshot.proofs[name] = StateProof(
                part.tensors, groups=groups, places=part.places, reader=self._device
            )

    def _start(self, snapshot: Snapshot, *, lazy: bool) -> None:
        """Hands the copies out, and remembers what the tensors look like if they may change."""
        if not snapshot.recipe.on_device:
            snapshot.task.last = lambda _: self._copied(snapshot)
        try:
            lazy = self._prepare(snapshot, lazy=lazy)
        except BaseException:
            snapshot.void = True
            raise
        finally:
            # After an error too: what a device was given already has to be waited for.
            self.engine.start(snapshot.task)
        if not lazy:
            self._wait_copied(snapshot)

    def _wait_copied(self, snapshot: Snapshot) -> None:
        """Until every byte is in the slot; not for the comparison of replicas."""
        self.engine.wait_for(lambda: snapshot.seen or snapshot.task.copied == math.inf)

    def _prepare(self, snapshot: Snapshot, *, lazy: bool) -> bool:
        """All of it that is done before the copy thread begins; False when it must not be lazy."""
        recipe, task = snapshot.recipe, snapshot.task
        if lazy and not recipe.on_device:
            try:
                self._keep_probes(snapshot)
            except Exception as error:  # reported at the fence, the training goes on
                if is_from_handler(error):
                    raise
                task.error, task.jobs = error, []
        self._hold_back(task, on_device=recipe.on_device)
        if recipe.on_device:
            lazy &= self._issue(snapshot, lazy=lazy)
            self._copy_others(snapshot)
        if lazy:
            self._note(snapshot)
        return lazy

    def _keep_probes(self, snapshot: Snapshot) -> None:
        """Copy the probed tensors at once, to detect writes before the others are copied."""
        task, entries = snapshot.task, snapshot.recipe.entries
        jobs = list(task.jobs)
        for index in self._probe.next([job.nbytes for job in jobs]):
            job = jobs[index]
            run_jobs([job], None)
            jobs[index] = CopyJob(job.end, 0, 0, 0)
            start = jobs[index - 1].end if index else snapshot.layout.boundary_end
            for part, found in by_part(entries_of(entries, start, job.end)).items():
                snapshot.probed.setdefault(part, []).extend(found)
        task.jobs = jobs

    def _keep_device_probes(self, snapshot: Snapshot, device: DeviceCopier) -> None:
        """The same of a device, which keeps them in its own memory."""
        recipe = snapshot.recipe
        entries = [e for e in recipe.entries if device_of(recipe.sources[e.spec.name]) is not None]
        chosen = [entries[i] for i in self._probe.next([e.spec.nbytes for e in entries])]
        try:
            snapshot.device_probe = DeviceProbe(
                {e.spec.name: recipe.sources[e.spec.name] for e in chosen},
                has_room=device.has_room, draw=self._draw,
            )  # fmt: skip
        except RuntimeError:  # no memory for it, or a kind of tensor that has no bytes
            return
        snapshot.probed = by_part(chosen)

    def _hold_back(self, task: CopyTask, *, on_device: bool) -> None:
        """Asks the gate, if there is one, how it will let the bytes pass."""
        gate = task.gate
        if gate is None:
            return
        nbytes = sum(job.nbytes for job in task.jobs if not on_device or is_device(job))
        if on_device and self.engine.busy:
            gate.hurry()
            task.use = WindowUse(nbytes=nbytes, reason="the snapshot before is still being copied")
        else:
            task.use = gate.begin(nbytes)
        if on_device and task.use.reason:  # it is given everything at once, as without a gate
            task.use.passed["overlap"] = nbytes
            task.gate = None

    def _write_boundary(
        self,
        arena: Arena,
        recipe: CopyPlan,
        boundary: dict[str, torch.Tensor],
        text: bytes,
        *,
        wait: bool,
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Copy the boundary group; return (slot views, tensors) that a device still has to copy.

        `wait`: that too, now.  To read a device is to wait for all that it has been given.
        """
        layout = recipe.layout
        there = arena.view[:8] == layout.header[:8]  # or zeros: its pages were given back
        if not there or self._headers.get(arena) != layout.header:
            arena.view[: len(layout.header)] = layout.header
            self._headers[arena] = layout.header
        now: tuple[list[torch.Tensor], list[torch.Tensor]] = ([], [])
        late: tuple[list[torch.Tensor], list[torch.Tensor]] = ([], [])
        extra = recipe.extra
        arena.view[extra.offset : extra.end] = text.ljust(layout.extra_bytes)
        for entry, nbytes in recipe.at_once:
            source = local_part(boundary[entry.spec.name])
            if is_plain(source, nbytes):
                _memmove(arena.address + entry.offset, source.data_ptr(), nbytes)
                continue
            targets, sources = now if wait or device_of(source) is None else late
            targets.append(slot_tensor(arena, entry))
            sources.append(source.detach())
        if now[0]:
            copy_tensors(*now)
        return late

    def _jobs(self, recipe: CopyPlan, arena: Arena) -> list[CopyJob]:
        jobs = recipe.jobs.get(arena)
        if jobs is None:
            jobs = recipe.jobs[arena] = copy_jobs(recipe.layout, recipe.sources, arena)
        return jobs

    def _issue(self, snapshot: Snapshot, *, lazy: bool) -> bool:
        """Gives the device its copies; a clone of the live tensors is safe from the next step.

        False when everything was copied already.
        """
        task, jobs = snapshot.task, snapshot.task.jobs
        sources = [s for job in jobs if is_device(job) and job.tensors for s in job.tensors[1]]
        devices = {device_of(source) for source in sources}
        devices |= {device_of(source) for source in snapshot.boundary[1]}
        if len(devices) > 1:
            # A side stream follows and delays one device's training only.
            if snapshot.boundary[0]:
                copy_tensors(*snapshot.boundary)
            run_jobs(jobs, None)
            task.jobs, task.gate, task.use = [], None, None
            return False
        if self._device is None:
            self._device = DeviceCopier(sources[0].device)
        device = self._device
        clones = self._clones(device, sources)
        snapshot.cloned, sources = clones is not None, clones or sources
        if lazy and not snapshot.cloned:
            self._keep_device_probes(snapshot, device)
        # The next forward changes buffers; a copy of them on the device is small and at once.
        kept = device.clone(snapshot.boundary[1]) if snapshot.boundary[0] else []
        device.follow()
        rest, task.jobs = iter(sources), []
        gate = task.gate
        if gate is not None:  # a piece that waits for the boundary would look slow
            end = 0 if kept else snapshot.layout.boundary_end
            task.jobs.append(CopyJob(end, 0, 0, 0, event=device.mark()))
        if kept:
            event = device.copy(snapshot.boundary[0], kept)
            pair = (snapshot.boundary[0], kept)
            task.jobs.append(CopyJob(snapshot.layout.boundary_end, 0, 0, 0, pair, event))
        for job in jobs:
            if not is_device(job) or job.tensors is None:
                task.first.append(job)
                task.jobs.append(CopyJob(job.end, 0, 0, 0))
                continue
            targets = job.tensors[0]
            given = [next(rest) for _ in targets]
            copy: Any = (
                device.copy(targets, given)
                if gate is None
                else GatedCopy(device, targets, given, gate)
            )
            # The job holds the sources: a clone lives until it is copied.
            task.jobs.append(replace(job, tensors=(targets, given), event=copy))
            if not snapshot.cloned:
                snapshot.events.append((job.end, copy))
        if self.engine.busy:
            # Behind the device's copy of an earlier snapshot they would keep the fence waiting.
            run_jobs(task.first, None)
            task.first, task.first_done = [], True
        return True

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

        Waits for host copies that are not done, makes a device wait for its own.  `current` is None
        when nothing of the snapshot is left to change.  Then the result has the known names of
        tensors that changed too early: [] if the snapshot is good or goes on.
        """
        snapshot = self.current
        if snapshot is None:
            return []
        began = time.monotonic()
        wanted = self._parts_of(snapshot, optimizer)
        for name in wanted:
            self._wait_part(snapshot, snapshot.recipe.parts[name])
        self._prove(snapshot, wanted)
        if set(snapshot.proofs) <= {""}:
            self._finish(snapshot)
        self._end_reading(snapshot)
        snapshot.fence_stall_s += time.monotonic() - began
        return snapshot.changed if self.current is None else []

    def abandon(self) -> None:
        """Give up the snapshot in flight: no verdict, and no more writes into its slot."""
        if self.current is not None:
            self.current.void, self.current.read_until_s = True, 0.0
        self.engine.wait()
        self.current = None

    def _parts_of(self, snapshot: Snapshot, optimizer: torch.optim.Optimizer | None) -> list[str]:
        """Names of the parts that an optimizer changes; all of them where it is not known."""
        needs = snapshot.recipe.inventory.needs
        for prefix, known in self.state.optimizers.items():
            if known is optimizer and prefix in needs:
                return [name for name in needs[prefix] if name in snapshot.proofs]
        return list(snapshot.proofs)

    def _wait_part(self, snapshot: Snapshot, part: Part) -> None:
        """Wait until a part is in the slot; a device waits by itself."""
        task = snapshot.task
        if not snapshot.recipe.on_device:
            self.engine.wait_for(lambda: task.copied >= part.end)
            return
        self.engine.wait_for(lambda: task.first_done, hurry=False)
        event = self._device_event(snapshot, part.end)
        if event is not None and self._device is not None:
            self._device.order(event)

    def _device_event(self, snapshot: Snapshot, end: int) -> Any:
        """The event behind what a device copies out of live tensors up to `end`; issued by now."""
        gate, event = snapshot.task.gate, None
        if gate is not None and snapshot.events:
            gate.hurry()
        for at, copy in snapshot.events:
            event = copy.give() if isinstance(copy, GatedCopy) else copy
            if at >= end:
                break
        return event

    def _finish(self, snapshot: Snapshot) -> None:
        """Nothing is left that may change too early; a device is waited for elsewhere."""
        task = snapshot.task
        if not snapshot.recipe.on_device:
            self._wait_copied(snapshot)
            self._prove(snapshot, list(snapshot.proofs))
            self.current = None
            if not snapshot.reading:
                self._settle(snapshot)
            return
        for name in list(snapshot.proofs):
            self._wait_part(snapshot, snapshot.recipe.parts[name])
        self._prove(snapshot, list(snapshot.proofs))
        self.current = None
        last = CopyTask(jobs=[], publish=ProgressCounter(memoryview(bytearray(8))), gate=task.gate)
        last.last = lambda _: self._settle_device(snapshot)
        self._tasks[task.publish.slot] = last  # it publishes there once more
        self.engine.start(last)

    # ------------------------------------------------------------------ the proof

    def _copied(self, snapshot: Snapshot) -> None:
        """On the copy thread, when the last byte is in the slot: later changes do no harm.

        The sooner it is proven the sooner it counts.  Tensors added or replaced meanwhile are left
        to the fence: the walk belongs to the training thread.  So are tensors that only moved:
        while FSDP1's state is read, a parameter briefly has other memory, without a write.
        """
        recipe, task = snapshot.recipe, snapshot.task
        try:
            if task.error is None and snapshot.proofs and not recipe.inventory.holds():
                return
            for name in list(snapshot.proofs):
                self._prove_part(snapshot, name, recipe.inventory, patient=True)
            with snapshot.lock:
                proven = not snapshot.settled and not snapshot.proofs and not snapshot.changed
                snapshot.reading = proven and task.error is None and self._compares(snapshot)
        except RuntimeError:  # a dict changed under us: the fence will see what it was
            return
        finally:
            snapshot.seen = True
            self.engine.tell()
        if snapshot.reading:
            self._read_replicas(snapshot)
        self._settle(snapshot)

    # ------------------------------------------------------------------ replicas

    def _compares(self, snapshot: Snapshot) -> bool:
        return self.compares_replicas and bool(snapshot.replicas) and snapshot.passage is None

    def _read_replicas(self, snapshot: Snapshot) -> None:
        """Reads the sections by which replicas are compared, on the copy thread."""
        recipe = snapshot.recipe
        groups, tensors = recipe.shares.groups, recipe.inventory.locals
        try:
            self._reader.read_others(
                groups, snapshot.replicas, tensors,
                lambda: time.monotonic() < snapshot.read_until_s,
            )  # fmt: skip
        except Exception:  # a kind of tensor that has no bytes: less is compared
            snapshot.read_until_s = 0.0
        snapshot.others_read = True
        self.engine.tell()
        self._read_own(snapshot)

    def _read_own(self, snapshot: Snapshot) -> None:
        recipe = snapshot.recipe
        with contextlib.suppress(Exception):  # less is compared
            self._reader.read_own(
                recipe.shares.groups, snapshot.replicas, snapshot.arena.address, recipe.offsets
            )

    def _end_reading(self, snapshot: Snapshot) -> None:
        """Ends the reading of live tensors before they change; waits briefly for it."""
        patience_s = self._reader.patience_s() if snapshot.reading else 0.0
        snapshot.read_until_s = min(snapshot.read_until_s, time.monotonic() + patience_s)
        if snapshot.reading:
            self.engine.wait_for(lambda: snapshot.others_read, hurry=False)

    def _copy_others(self, snapshot: Snapshot) -> None:
        """Has the device copy sections of others at the boundary."""
        if not self._compares(snapshot) or self._device is None:
            return
        recipe = snapshot.recipe
        with contextlib.suppress(RuntimeError):  # no memory for it: less is compared
            snapshot.device_sections = self._reader.copy_from_device(
                recipe.shares.groups, snapshot.replicas, recipe.inventory.locals, self._device
            )

    def _settle_device(self, snapshot: Snapshot) -> None:
        """On the copy thread, when a device has copied all of it."""
        if self._compares(snapshot) and snapshot.task.error is None:
            with contextlib.suppress(RuntimeError):
                finish_device(snapshot.device_sections)
            self._read_own(snapshot)
        self._settle(snapshot)

    def _prove(self, snapshot: Snapshot, names: list[str]) -> None:
        """Compares parts before they change, unless the copy thread has done it."""
        names = [name for name in names if name in snapshot.proofs]
        if not names:
            return
        # Confirmed once a snapshot: 400 optimizers inside a backward would do it 400 times, 1 ms
        # each.  What was replaced since the boundary is copied from where it was then.
        last = snapshot.proofs.keys() - names <= {""}
        inventory = self.state.inventory() if last else snapshot.recipe.inventory
        for name in names:
            self._prove_part(snapshot, name, inventory)

    def _prove_part(
        self, snapshot: Snapshot, name: str, inventory: TensorIndex, *, patient: bool = False
    ) -> None:
        with snapshot.lock:
            proof = snapshot.proofs.get(name)
            if proof is None:
                return
            recipe = snapshot.recipe
            changed, moved = proof.compare(tensors_now(recipe, name, inventory))
            if moved and patient and not changed:
                return
            changed = list(dict.fromkeys([*changed, *moved]))
            if snapshot.cloned:
                kept = recipe.tensors
                changed = [n for n in changed if n in kept and snapshot.may_tear(kept[n])]
            if snapshot.passage is not None:
                if snapshot.task.error is None:
                    changed = changed or snapshot.passage.differing(recipe, name)
            elif not recipe.on_device and snapshot.task.error is None:
                # Before its own step: what an earlier optimizer changed since is no news.
                if snapshot.sample is None:
                    snapshot.sample = self._sampler.next(recipe.entries)
                for sample, limit in (
                    (snapshot.probed.get(name, ()), None),
                    (snapshot.sample.get(name, ()), SAMPLE_BYTES),
                ):
                    changed = changed or sample_differs(recipe, snapshot.arena, sample, limit)
                if changed:
                    changed += part_differs(recipe, snapshot.arena, name, inventory.locals)
            snapshot.changed += changed
            snapshot.late.append(proof.late_changes)
            if snapshot.device_probe is not None and snapshot.probed.get(name):
                snapshot.late.append(self._compare_on_device(snapshot, name))
            del snapshot.proofs[name]

    def _compare_on_device(self, snapshot: Snapshot, part: str) -> Callable[[], list[str]]:
        """Issues the comparison in front of the step; its outcome, for when the device is there."""
        assert snapshot.device_probe is not None
        assert self._device is not None
        names = [entry.spec.name for entry in snapshot.probed[part]]
        read = self._device.read(snapshot.device_probe.differing(names))
        return lambda: [n for n, f in zip(names, read.wait().tolist(), strict=True) if f]

    def _settle(self, snapshot: Snapshot) -> None:
        """The verdict, once: on the copy thread, or at the fence that found the last proof."""
        with snapshot.lock:
            if snapshot.settled or snapshot.void or (snapshot.proofs and not snapshot.task.error):
                return
            snapshot.settled = True
        task = snapshot.task
        snapshot.error = task.error
        if snapshot.error is None:
            try:
                late = [name for changes in snapshot.late for name in changes()]
                snapshot.changed = sorted({*snapshot.changed, *late})
            except Exception as error:
                snapshot.error = error
        if snapshot.passage is None or snapshot.error is None:  # else pages would come of nothing
            task.publish.set(snapshot.layout.image_bytes)
        snapshot.copy_s = max(0.0, task.ended_s - snapshot.began_s)
        snapshot.judged = True
        if snapshot.completed is not None:
            snapshot.completed(snapshot)

    def close(self) -> None:
        """Ends the copy thread."""
        self.engine.close()
