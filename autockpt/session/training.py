"""What a training script holds: attach(), the loop, and the wires between the rooms.

    ckpt = autockpt.attach(model=model, optimizer=optimizer, scheduler=scheduler, data=loader)
    for step, batch in ckpt.batches(total):
        ...

At every iteration boundary the session applies plan changes, starts the snapshot that is due and
asks for the next slot; at the optimizer's step the fence waits for what is not copied yet.
Whatever fails in here is said once, shows in the report, and never ends the training.
"""

import atexit
import contextlib
import os
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import torch

from autockpt.executors import birth, wire
from autockpt.executors.fence import OptimizerHooks
from autockpt.executors.keeper.launch import keeper_status
from autockpt.executors.keeper.slots import (
    CELL_COPIED,
    CELL_STARTED_NS,
    CELL_STARTED_STEP,
    CELL_STEP,
    CELL_STEP_NS,
)
from autockpt.executors.link import KeeperLink
from autockpt.executors.loaders import DataPosition
from autockpt.executors.protocol import messages as p
from autockpt.executors.resume import Resumed, resume
from autockpt.executors.signals import TerminationWatch
from autockpt.executors.snapshot import Snapshot, Snapshotter, register_with_cuda
from autockpt.executors.state import LiveState, rng_state, set_rng_state
from autockpt.executors.telemetry import TelemetryWriter
from autockpt.session.clock import IterationClock
from autockpt.session.job import Job
from autockpt.session.mind import Mind
from autockpt.session.plan_switch import PlanSwitch
from autockpt.values import telemetry as t
from autockpt.values.errors import AutockptError
from autockpt.values.generation import Generation
from autockpt.values.plan import CheckpointPlan
from autockpt.values.record import to_data

GRANT_WAIT_S = 0.02
"""A slot is asked for one iteration ahead; this is for the first save and for a busy keeper."""
SLOT_SLACK_BYTES = 4 * 4096
"""A tensor that moves to the boundary group shifts what follows by a page or two; new slots for
that would cost a checkpoint and what the old ones hold."""
FINAL_WAIT_S = 900.0
RECONNECT_WAIT_S = 10.0
"""The last checkpoint waits so long for a keeper that is being started."""
FINAL_ATTEMPTS = 200
FINAL_FAILURES = 5
"""Times that the last checkpoint is begun and dropped: ranks may need some to find each other, a
full disk needs none."""

_attached: list["Session"] = []


def attached() -> bool:
    """True when this process has called attach()."""
    return bool(_attached)


class Session:
    """The checkpointing of one rank, from attach to the end of the loop."""

    def __init__(self, job: Job, state: LiveState, data: Any) -> None:
        self._job = job
        self._state = state
        self._data = None if data is None else DataPosition(data)
        state.dry_encode()
        self._plan: CheckpointPlan = job.plan
        self._telemetry = TelemetryWriter(job.telemetry_path)
        self._step = 0
        self._start_step = 0
        self._wanted = -1
        """Boundary of a checkpoint that the script asked for."""
        self._total: int | None = None
        """The last step, where it is known: it is always made durable."""
        self._epoch = 0
        self._snapshotter: Snapshotter | None = None
        self._flight: tuple[Generation, int, bool] | None = None
        """(generation, step, disk) of the snapshot between boundary and fence."""
        self._asked: Generation | None = None
        self._asked_disk = False
        """As it was asked for, so it will be: a plan may have changed since."""
        self._asking = threading.Lock()
        self._slots_seen = 0
        self._closed = False
        self._owns_boundary = False
        self._auto_pending = False
        self._auto_rng: Any = None
        self._clock = IterationClock()
        self._disk_busy: Generation | None = None
        self._disk_newest: Generation | None = None
        self._persisting: list[Generation] = []
        """Begun for disk and not known to be there, or dropped."""
        self._fence_stall_s = 0.0
        self._asked_slots = 0
        self._warned: set[str] = set()
        self._mind: Mind | None = None
        self._link = KeeperLink(
            job.run_directory,
            job.node,
            checkpoints=job.checkpoints,
            attach=job.attach_event(),
            launcher_pid=job.launcher_pid,
            restart_count=job.restart_count,
            control_host=job.control_host,
            on_lost=lambda reason: self._degraded("keeper", reason),
        )
        self._switch = PlanSwitch(job.rank, self._link.send, self._link.wait_until)
        self._link.plan_held = lambda: self._switch.held
        self._watch = TerminationWatch(self._on_signal)
        try:
            self._begin()
        except BaseException:
            # Else the link would go on as a trainer that never trains, and start keepers for it.
            self._link.close()
            self._telemetry.close()
            raise

    # ------------------------------------------------------------------ the public face

    @property
    def step_count(self) -> int:
        """Iterations trained so far; where a loop of one's own starts."""
        return self._step

    def batches(self, total: int) -> Iterator[tuple[int, Any]]:
        """(step, batch) for the steps not yet trained; resumes the loader at the right batch.

        `data` must have been attached.  After the last step a final checkpoint is made durable.
        """
        if self._data is None:
            raise AutockptError("ckpt.batches() needs attach(data=...); or use ckpt.steps(total)")
        self._owns(total)
        source = self._data.batches()
        while self._step < total:
            step = self._step
            yield step, next(source)
            self._boundary(step + 1)
        self.close()

    def _owns(self, total: int) -> None:
        """The loop is ours and its end is known."""
        self._owns_boundary, self._total = True, total
        if self._mind is not None:
            self._mind.total = total

    def steps(self, total: int) -> Iterator[int]:
        """The steps not yet trained, for a loop that makes its own batches."""
        self._owns(total)
        while self._step < total:
            step = self._step
            yield step
            self._boundary(step + 1)
        self.close()

    def step(self) -> int:
        """Marks the end of an iteration in a loop of one's own; the new step count."""
        self._owns_boundary = True
        self._boundary(self._step + 1)
        return self._step

    def save(self) -> None:
        """Asks for a durable checkpoint at the coming boundary, beside the planned ones.

        Call it on all ranks before the same boundary.
        """
        self._wanted = self._step + 1

    @property
    def ready(self) -> bool:
        """True when the slots are there: a checkpoint can begin at the next boundary."""
        return bool(self._link.slots)

    @property
    def fence_stall_s(self) -> float:
        """Seconds the training has waited at fences so far."""
        return self._fence_stall_s

    @property
    def keeper_pid(self) -> int | None:
        """Process of this node's keeper, None while there is none."""
        status = keeper_status(self._job.run_directory, self._job.node)
        return None if status is None else status.pid

    def wait_durable(self, timeout_s: float) -> float:
        """Waits until the newest durable checkpoint that was begun is on disk; when it was.

        CLOCK_MONOTONIC seconds; 0 when there was none, it failed, or time ran out.
        """
        self._fence()
        generation, link = self._disk_newest, self._link
        if generation is None:
            return 0.0
        link.wait_until(
            lambda: link.is_durable(generation) or generation in link.dropped, timeout_s
        )
        return link.durable_s if link.is_durable(generation) else 0.0

    def fence(self) -> None:
        """Call before code that changes the state by itself, outside an optimizer's step."""
        self._fence()

    def close(self, *, final_checkpoint: bool = True) -> None:
        """Ends the protection: fences, makes a last checkpoint durable, lets the keeper go."""
        if self._closed:
            return
        try:
            self._fence()
            if final_checkpoint:
                self._final_checkpoint()
        except Exception as error:
            self._degraded("final checkpoint", repr(error))
        self._end("finished")

    # ------------------------------------------------------------------ begin

    def _begin(self) -> None:
        began = time.monotonic()
        self._link.on_message = self._on_message
        self._link.open()
        resumed = resume(self._link, self._state, self._job.checkpoints)
        self._epoch = resumed.epoch
        self._step = self._start_step = resumed.step
        applied = time.monotonic()
        self._take_progress(resumed)
        self._tell_started(resumed, began, resumed.apply_s + time.monotonic() - applied)
        self._snapshotter = Snapshotter(self._state, self._link.board.view[8 * CELL_COPIED :])
        optimizers = list(self._state.optimizers.values())
        self._hooks = OptimizerHooks(optimizers, self._fence, self._after_optimizer)
        for module in self._state.models.values():
            self._hooks.guard_module(module)
        self._watch_forward()
        self._mark_step(first=True)
        self._link.running_as(self._epoch, self._plan.version, None)
        if self._job.rank == 0:
            self._mind = Mind(
                self._job,
                self._state,
                lambda: self._snapshotter.layout if self._snapshotter else None,
                self._propose,
                self._degraded,
            )
            self._telemetry.listener = self._mind.observe
        atexit.register(self._at_exit)
        _attached.append(self)

    def _take_progress(self, resumed: Resumed) -> None:
        if resumed.progress is None:
            return
        if self._data is not None and resumed.progress.get("data") is not None:
            self._data.load(resumed.progress["data"])
            self._data.prepare()
        set_rng_state(resumed.rng)

    def _tell_started(self, resumed: Resumed, began: float, apply_s: float) -> None:
        attach_at, startup = birth.startup()
        now = time.monotonic()
        self._emit(
            t.RunStarted(
                at_s=now, rank=self._job.rank,
                wall=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
                run_id=self._job.incarnation.launch_id,
                epoch=self._epoch, world_size=self._job.world_size, pid=os.getpid(),
                plan_id=self._plan.plan_id, plan_version=self._plan.version,
                state_bytes=sum(x.nbytes for x in self._state.lazy_tensors().values()),
                restart_count=self._job.restart_count,
                launch_s=startup.launch_s, interpreter_s=startup.interpreter_s,
                torch_import_s=startup.torch_import_s, process_group_s=startup.process_group_s,
                script_s=startup.script_s, wait_s=now - attach_at - resumed.read_s - apply_s,
                read_s=resumed.read_s, apply_s=apply_s,
            )
        )  # fmt: skip
        self._link.send(
            wire.TrainerResumed(
                rank=self._job.rank, generation=resumed.generation, step=resumed.step,
                source=resumed.source, bytes=resumed.bytes,
                restore_s=time.monotonic() - began,
            )
        )  # fmt: skip
        if resumed.generation is not None:
            self._say(
                f"resumed step {resumed.step} from {resumed.source} "
                f"(generation {resumed.generation}, {time.monotonic() - began:.2f} s)"
            )

    def _watch_forward(self) -> None:
        """Without batches/steps/step the boundary is the next training forward after a step."""

        def hook(module: torch.nn.Module, _: Any) -> None:
            if self._auto_pending and module.training and not self._owns_boundary:
                self._auto_pending = False
                self._boundary(self._step + 1, rng=self._auto_rng)

        for module in self._state.models.values():
            module.register_forward_pre_hook(hook)

    # ------------------------------------------------------------------ the boundary

    def _after_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        self._state.stepped(optimizer)
        if not self._owns_boundary and not self._closed:
            self._auto_pending = True
            self._auto_rng = rng_state() if self._due(self._step + 1) else None

    def _boundary(self, step: int, rng: Any = None) -> None:
        """The iteration that makes `step` steps has ended."""
        if self._closed:
            return
        began = self._clock.boundary(self._background())
        self._step = step
        self._mark_step()
        if step == self._start_step + 1:
            self._emit(t.FirstIterated(at_s=began, rank=self._job.rank, step=step))
        try:
            if self._flight is not None:
                self._fence()  # the iteration had no optimizer step (a skipped one)
            self._change_plan(step)
            if self._due(step):
                self._snapshot(step, self._generation(step), disk=self._disk_free(step), rng=rng)
            elif self._disk_due(step):
                limit = self._plan.staging.in_flight
                self._skip(step, f"{limit} checkpoints are on their way to storage already")
            elif self._asked == self._generation(step):
                # Asked for under the plan before this one; a grant nobody uses blocks all others.
                self._withdraw(self._asked, "the plan changed")
            self._ask_ahead(step + 1)
        except Exception as error:
            self._flight = None
            self._degraded("snapshot", f"{type(error).__name__}: {error}")
        self._clock.stalled(time.monotonic() - began)
        self._report_block()
        if self._link.fenced or self._watch.requested:
            self._leave()

    def _due(self, step: int) -> bool:
        interval = self._plan.tier("memory").interval_steps
        return (interval > 0 and step % interval == 0) or self._disk_free(step)

    def _disk_due(self, step: int) -> bool:
        interval = self._plan.tier("disk").interval_steps
        if step == self._wanted:
            return True
        return interval > 0 and (step % interval == 0 or step == self._total)

    def _disk_free(self, step: int) -> bool:
        """Due on disk, and fewer are on their way there than the plan allows.

        The last checkpoint and one that the script asked for always go.
        """
        limit = self._plan.staging.in_flight
        if not self._disk_due(step) or not limit or step in (self._wanted, self._total):
            return self._disk_due(step)
        link = self._link
        self._persisting = [
            g for g in self._persisting if g not in link.dropped and not link.is_durable(g)
        ]
        return len(self._persisting) < limit

    def _generation(self, step: int, attempt: int = 0) -> Generation:
        """Named alike on all ranks without talking; attempts are of the last step only."""
        return Generation(epoch=self._epoch, seq=step - self._start_step + attempt)

    def _background(self) -> bool:
        busy = self._disk_busy
        if busy is not None and (self._link.is_durable(busy) or busy in self._link.dropped):
            self._disk_busy = busy = None
        return busy is not None or self._flight is not None

    def _ask_ahead(self, step: int) -> None:
        """Asks for the slot of the next boundary if it is due, and for slots at first."""
        if self._link.slots_changed != self._slots_seen:
            self._slots_seen = self._link.slots_changed
            for arena in self._link.slots:
                register_with_cuda(arena)
        if not self._link.slots:
            self._ask_slots()
        elif self._flight is None:
            self._ask_if_due(step)

    def _ask_if_due(self, step: int) -> None:
        if self._due(step) and step <= (self._total or step):
            self._ask(self._generation(step), step, disk=self._disk_free(step))

    def _ask_slots(self) -> None:
        """After the first step, because the optimizer's state is empty before it."""
        if self._step == self._start_step or not self._plan.snapshot_interval_steps:
            return
        assert self._snapshotter is not None
        layout = self._snapshotter.plan(self._progress())
        if layout.image_bytes == self._asked_slots:
            return
        self._asked_slots = layout.image_bytes
        self._link.want_slots(
            image_bytes=layout.image_bytes + SLOT_SLACK_BYTES,
            chunk_bytes=self._plan.staging.chunk_bytes,
            slots=max(2, self._plan.slots), limit_bytes=self._job.goal.limits.host_memory_bytes,
        )  # fmt: skip

    def _ask(self, generation: Generation, step: int, *, disk: bool) -> None:
        with self._asking:
            former = self._asked
            if former is not None and former >= generation:
                return
            self._asked, self._asked_disk = generation, disk
            if former in self._link.grants:
                self._withdraw(former, f"{generation} came first")  # it would keep its slot
            self._link.send(
                p.SaveRequested(rank=self._job.rank, generation=generation, step=step, disk=disk)
            )

    def _snapshot(
        self,
        step: int,
        generation: Generation,
        *,
        disk: bool,
        rng: Any = None,
        patience_s: float = GRANT_WAIT_S,
    ) -> bool:
        """Begins the snapshot of a generation; False when it was skipped."""
        slot = self._granted(generation, step, disk=disk, patience_s=patience_s)
        if slot is None:
            return False
        disk = self._asked_disk
        assert self._snapshotter is not None
        staging = self._plan.staging
        arena = self._link.slots[slot]
        if not staging.preallocate:
            arena.release_pages()
        lazy = staging.schedule == "lazy"
        self._snapshotter.device_clone = staging.device_clone
        try:
            self._snapshotter.begin(
                arena, self._progress(), lazy=lazy, slot=slot, rng=rng,
                capacity=self._link.image_bytes,
                began=lambda layout: self._tell_began(generation, step, slot, disk, layout),
                completed=lambda snapshot: self._copied(generation, step, snapshot),
            )  # fmt: skip
        except AutockptError as error:
            self._abandon(generation, str(error))
            self._asked_slots = 0
            self._ask_slots()
            self._skip(step, str(error))
            return False
        except Exception as error:
            self._abandon(generation, repr(error))
            raise
        self._flight = (generation, step, disk)
        if disk:
            self._disk_busy = self._disk_newest = generation
            self._persisting.append(generation)
        if not lazy or staging.persist == "sync":
            self._fence()
        if staging.persist == "sync" and disk:
            self._wait_durable(generation, FINAL_WAIT_S)
        return True

    def _granted(
        self, generation: Generation, step: int, *, disk: bool, patience_s: float
    ) -> int | None:
        link = self._link
        if not link.slots:
            self._skip(step, link.slots_refused or "the slots are still being allocated")
            return None
        self._ask(generation, step, disk=disk)
        answers = (link.grants, link.refused, link.dropped)
        if not any(generation in answer for answer in answers):
            link.wait_until(lambda: any(generation in answer for answer in answers), patience_s)
        slot = link.take_grant(generation, disk=disk or self._asked_disk)
        if slot is None:
            dropped = link.dropped.get(generation, "the keeper did not answer in time")
            self._skip(step, link.refused.pop(generation, dropped))
            self._withdraw(generation, "not granted in time")
        elif disk and not self._asked_disk:  # asked for by the script, or by a new plan, since
            self._asked_disk = True
            link.send(
                p.SaveRequested(rank=self._job.rank, generation=generation, step=step, disk=True)
            )
        return slot

    def _abandon(self, generation: Generation, reason: str) -> None:
        """Gives a slot back that may be half filled, once nobody writes into it any more."""
        assert self._snapshotter is not None
        self._snapshotter.engine.wait()
        self._snapshotter.current = self._flight = None
        self._withdraw(generation, reason)

    def _withdraw(self, generation: Generation, reason: str) -> None:
        self._link.grants.pop(generation, None)
        self._link.send(
            wire.SnapshotTorn(rank=self._job.rank, generation=generation, reason=reason)
        )

    def _tell_began(
        self, generation: Generation, step: int, slot: int, disk: bool, layout: Any
    ) -> None:
        staging, tier = self._plan.staging, self._plan.tier("disk")
        now = time.monotonic()
        self._emit(
            t.SnapshotBegan(
                at_s=now, rank=self._job.rank, generation=str(generation), step=step,
                tiers="memory+disk" if disk else "memory",
            )
        )  # fmt: skip
        codec, ranges = layout.codec_ranges(tier.codec)
        self._link.send(
            wire.SnapshotBegan(
                rank=self._job.rank, generation=generation, step=step, slot=slot,
                image_bytes=layout.image_bytes, boundary_end=layout.boundary_end,
                layout_digest=layout.digest, writers=staging.writers,
                chunk_bytes=staging.chunk_bytes, direct_io=staging.direct_io,
                streaming=staging.streaming, codec=codec, class_ranges=ranges, at_s=now,
            )
        )  # fmt: skip

    def _progress(self) -> dict[str, Any]:
        data = None if self._data is None else self._data.state()
        return {"step": self._step, "data": data}

    # ------------------------------------------------------------------ the fence

    def _fence(self, optimizer: torch.optim.Optimizer | None = None) -> None:
        """Makes it safe to change what `optimizer` changes (None: everything); never raises."""
        if self._flight is None or self._snapshotter is None:
            return
        snapshot = self._snapshotter.current
        if snapshot is None:
            self._flight = None
            return
        (generation, _, _), stalled = self._flight, snapshot.fence_stall_s
        try:
            self._snapshotter.fence(optimizer)
            if self._snapshotter.current is None:
                self._flight = None
        except Exception as error:
            self._abandon(generation, repr(error))
            self._degraded("snapshot", repr(error))
        self._clock.stalled(snapshot.fence_stall_s - stalled)
        self._fence_stall_s += snapshot.fence_stall_s - stalled

    def _copied(self, generation: Generation, step: int, snapshot: Snapshot) -> None:
        """Every byte is in the slot and proven, or is not; on the copy thread after a device."""
        if snapshot.error is not None:
            reason = f"copy into the slot failed: {snapshot.error!r}"
            self._withdraw(generation, reason)
            self._degraded("snapshot", reason)
            return
        if snapshot.changed:
            self._discard(generation, step, snapshot.changed)
            return
        self._link.send(wire.SnapshotCopied(rank=self._job.rank, generation=generation))
        self._emit(
            t.SnapshotSealed(
                at_s=time.monotonic(), rank=self._job.rank, generation=str(generation), step=step,
                bytes=snapshot.layout.image_bytes, boundary_stall_s=snapshot.boundary_stall_s,
                fence_stall_s=snapshot.fence_stall_s, copy_s=snapshot.copy_s,
            )
        )  # fmt: skip

    def _discard(self, generation: Generation, step: int, changed: list[str]) -> None:
        """State changed behind the fence: the generation is worthless, the tensors move."""
        reason = f"changed between boundary and fence: {', '.join(changed[:5])}"
        self._withdraw(generation, reason)
        known = set(self._state.lazy_tensors())
        self._state.not_lazy |= set(changed) & known or known
        self._emit(
            t.SnapshotDiscarded(
                at_s=time.monotonic(), rank=self._job.rank, generation=str(generation), step=step,
                reason=reason,
            )
        )  # fmt: skip
        self._say(f"snapshot {generation} discarded: {reason}; copied at the boundary from now on")

    # ------------------------------------------------------------------ plan changes

    def _propose(self, plan: CheckpointPlan) -> None:
        self._link.send(p.PlanProposed(version=plan.version, payload=to_data(plan)))

    def _on_message(self, message: Any) -> None:
        """On the listening thread."""
        applied = self._switch.heard(message, self._step)
        if applied is not None:
            self._link.running_as(self._epoch, *applied)
        if isinstance(message, p.AnnounceDurable | p.AnnounceMemoryCommitted) and self._mind:
            self._mind.committed(message)
        if isinstance(message, p.AnnounceMemoryCommitted) and message.generation == self._asked:
            # With a snapshot at every iteration: the next slot is free from now on.
            self._ask_if_due(self._step + 1)

    def _change_plan(self, step: int) -> None:
        plan = self._switch.due(step)
        if plan is None:
            return
        self._plan = plan
        memory = self._plan.tier("memory").interval_steps
        disk = self._plan.tier("disk").interval_steps
        reason = self._mind.reason(self._plan.version) if self._mind else "by rank 0"
        self._emit(
            t.PlanChanged(
                at_s=time.monotonic(), rank=self._job.rank, plan_version=self._plan.version,
                step=step, memory_interval_steps=memory, disk_interval_steps=disk, reason=reason,
            )
        )  # fmt: skip
        if self._mind is not None:
            self._mind.applied(self._plan)
            self._say(f"plan {self._plan.version} from step {step}: {reason}")

    # ------------------------------------------------------------------ the end

    def _final_checkpoint(self) -> None:
        """A durable checkpoint of the last step, unless there is one."""
        if self._step == self._start_step or not self._plan.tier("disk").interval_steps:
            return
        link = self._link
        if not link.slots:
            self._ask_slots()
            link.wait_until(lambda: bool(link.slots or link.slots_refused), FINAL_WAIT_S)
        if not link.slots:
            self._degraded("final checkpoint", link.slots_refused or "no slots were given in time")
            return
        generation = self._generation(self._step)
        attempt = 0 if self._disk_busy == generation or link.is_durable(generation) else 1
        if attempt and self._asked == self._generation(self._step, attempt):
            # Asked for ahead, of a step that will not come.
            self._withdraw(self._asked, "the training ended before it")
            attempt += 1
        failures, reason = 0, "no slot became free"
        while attempt < FINAL_ATTEMPTS and failures < FINAL_FAILURES:
            if attempt:
                link.wait_until(lambda: link.connected, RECONNECT_WAIT_S)
                generation = self._generation(self._step, attempt)
                if not self._snapshot(self._step, generation, disk=True, patience_s=5.0):
                    attempt += 1
                    time.sleep(0.05)
                    continue
                self._fence()
            if self._wait_durable(generation, FINAL_WAIT_S):
                return
            attempt, failures = attempt + 1, failures + 1
            reason = link.dropped.get(generation, reason)
        self._degraded("final checkpoint", f"{reason}; the last durable checkpoint is older")

    def _wait_durable(self, generation: Generation, timeout_s: float) -> bool:
        """False when the generation was dropped: the others could not save it."""
        link = self._link
        if not link.wait_until(
            lambda: link.is_durable(generation) or generation in link.dropped, timeout_s
        ):
            self._degraded("checkpoint", f"{generation} not durable after {timeout_s:.0f} s")
            return True
        return generation not in link.dropped

    def _leave(self) -> None:
        """Fenced by a newer incarnation, or told to go: leaves at a boundary."""
        self._watch.stop()
        if self._link.fenced:
            self._say(f"this process is replaced: {self._link.fenced}")
            self._end("error")
            raise SystemExit(75)
        self._end("signal")
        raise SystemExit(128 + self._watch.requested)

    def _end(self, reason: str) -> None:
        if self._closed:
            return
        self._closed = True
        self._report_block(force=True)
        self._emit(
            t.RunEnded(at_s=time.monotonic(), rank=self._job.rank, step=self._step, reason=reason)
        )
        self._link.send(wire.TrainerLeaving(rank=self._job.rank, step=self._step, reason=reason))
        if self._mind is not None:
            self._mind.close()
        self._hooks.remove()
        self._link.close()
        if self._snapshotter is not None:
            self._snapshotter.close()
        self._telemetry.close()

    def _at_exit(self) -> None:
        """The script ended without closing: a crash stays a crash, an end is an end."""
        if self._closed:
            return
        if getattr(sys, "last_value", None) is not None:
            self._telemetry.close()
            return
        self.close()

    def _on_signal(self, number: int) -> None:
        self._link.send(p.BreakpointRequested(reason=f"signal {number}"))
        self._say(f"signal {number}: newest checkpoint in memory is being made durable")

    # ------------------------------------------------------------------ telling

    def _mark_step(self, *, first: bool = False) -> None:
        cells = self._link.board.view[:64].cast("Q")
        now = time.monotonic_ns()
        if first:
            cells[CELL_STARTED_NS], cells[CELL_STARTED_STEP] = now, self._step
        cells[CELL_STEP] = self._step
        cells[CELL_STEP_NS] = now

    def _report_block(self, *, force: bool = False) -> None:
        block = self._clock.block(force=force)
        if block is not None:
            count, total_s, stall_s, quiet_s, busy_s = block
            self._emit(
                t.Iterated(
                    at_s=time.monotonic(), rank=self._job.rank, step=self._step, count=count,
                    total_s=total_s, checkpoint_s=stall_s, quiet_s=quiet_s, busy_s=busy_s,
                )
            )  # fmt: skip

    def _skip(self, step: int, reason: str) -> None:
        self._emit(
            t.SaveSkipped(at_s=time.monotonic(), rank=self._job.rank, step=step, reason=reason)
        )
        if self._link.slots_refused:
            self._degraded("memory tier", self._link.slots_refused)

    def _degraded(self, what: str, reason: str) -> None:
        self._emit(t.Degraded(at_s=time.monotonic(), rank=self._job.rank, what=what, reason=reason))
        if what not in self._warned:
            self._warned.add(what)
            self._say(f"degraded: {what}: {reason} (training goes on)", always=True)

    def _emit(self, event: t.Event) -> None:
        with contextlib.suppress(Exception):
            self._telemetry.emit(event)

    def _say(self, text: str, *, always: bool = False) -> None:
        if self._job.rank == 0 or always:
            print(f"autockpt: {text}", file=sys.stderr, flush=True)
