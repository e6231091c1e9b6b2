"""One save: due, asked for, granted, begun at the boundary, fenced at the optimizer's step.

A slot is asked for before the boundary that needs it; whatever is not there in time skips the save,
with its reason, and the training goes on.
"""

import copy
import json
import time
from dataclasses import dataclass
from typing import Any

import torch

from autockpt.executors.image.layout.plan import Layout
from autockpt.executors.keeper import wire
from autockpt.executors.keeper.client.saves import SaveHandle
from autockpt.executors.protocol import messages as p
from autockpt.executors.snapshot.device import register_with_cuda
from autockpt.executors.snapshot.snapshotter import Snapshot
from autockpt.executors.snapshot.streaming import Passage
from autockpt.executors.state.rng import rng_state
from autockpt.session.base import RankState
from autockpt.session.room import look_for_room
from autockpt.values import telemetry as t
from autockpt.values.errors import AutockptError, StorageError
from autockpt.values.generation import Generation

GRANT_WAIT_S = 0.02
"""A slot is asked for one iteration ahead; this is for the first save and for a busy keeper."""
SLOT_SLACK_BYTES = 4 * 4096
"""A tensor that moves to the boundary group shifts what follows by a page or two; new slots for
that would cost a checkpoint and what the old ones hold."""
FINAL_WAIT_S = 900.0
FIRST_PAUSE_S, LONGEST_PAUSE_S = 10.0, 600.0
"""Before slots are asked for again that the host had no room for, and before a first durable
checkpoint is tried again that failed: twice as long each time."""


@dataclass(slots=True)
class Trial:
    """A snapshot that was taken to see what its schedule costs."""

    snapshot: Snapshot
    save: SaveHandle
    schedule: str
    began_s: float
    """Its boundary, before anything was done there."""
    iterations: int = 0


class Saving(RankState):
    """Begins snapshots and follows them until the last byte is proven."""

    _trial: Trial | None = None
    """The newest snapshot of a comparison, until its cost is known."""
    _encoding: tuple[Layout, dict[str, str], str, str] | None = None
    """The newest layout and codecs by class, and what they make together."""

    _boundary_s: float | None = None
    """When the boundary at hand began; None: between two."""
    _begun_here: Snapshot | None = None
    """The snapshot that began at the boundary at hand."""
    _asking_s: float = 0.0
    """What it took to ask for the slot of the coming snapshot, a boundary ahead of it."""

    _newest_stall_s: float | None = None
    """Training blocked by the newest snapshot."""

    def _due(self, step: int) -> bool:
        if self._link.window_bytes:  # no memory holds a state: storage does, where it answers
            calm = time.monotonic() >= self._stream_after_s or self._is_last(step)
            return calm and self._disk_free(step)
        return self._reached(step, self._plan.tier("memory").interval_steps) or self._disk_free(
            step
        )

    def _reached(self, step: int, interval: int) -> bool:
        """At this boundary, or at one since the last that a checkpoint could be of."""
        return interval > 0 and step // interval > (step - 1 - self._open) // interval

    def _disk_due(self, step: int) -> bool:
        interval = self._plan.tier("disk").interval_steps
        if self._is_wanted(step):
            return True
        due = self._reached(step, interval) or self._is_last(step) or self._is_early(step)
        return interval > 0 and due

    def _is_early(self, step: int) -> bool:
        """Nothing is durable yet: until the disk's own interval has passed once, the loss of a
        machine would cost all.  After a failure again, at growing pauses."""
        link = self._link
        if self._is_safe or link.saves.durable is not None or time.monotonic() < self._early_s:
            return False
        coming = link.saves.writing - {self._generation(step)}
        return not coming and self._reached(step, self._plan.tier("memory").interval_steps)

    def _is_wanted(self, step: int) -> bool:
        return self._supersedes or step - self._open <= self._wanted <= step

    def _is_last(self, step: int) -> bool:
        """No later step of an optimizer fits in front of the end, if they come as before."""
        return self._total is not None and step <= self._total < step + self._accumulation.window

    def _disk_free(self, step: int) -> bool:
        """Due on disk, and fewer are on their way there than the plan allows.

        The last checkpoint and one that the script asked for always go.  Without a limit of the
        plan two slots are left to memory, where there are so many: what hangs holds its slot.
        """
        limit = self._plan.staging.in_flight or max(0, len(self._link.slots) - 2)
        if not self._disk_due(step):
            return False
        if not limit or self._is_wanted(step) or self._is_last(step):
            return True
        return len(self._link.saves.writing - {self._generation(step)}) < limit

    def _generation(self, step: int, attempt: int = 0) -> Generation:
        """Named alike on all ranks without talking; `attempt` is of the last step only."""
        return Generation(term=self._term, step=step, attempt=self._attempt + attempt)

    def _background(self) -> bool:
        """Something of a save is under way now."""
        return bool(self._link.saves.writing) or self._flight is not None

    def _ask_ahead(self, step: int) -> None:
        """Asks for the slot of the next boundary if it is due, and for slots at first."""
        if self._link.slots_changed != self._slots_seen:
            self._slots_seen = self._link.slots_changed
            self._slots_came()
        if self._link.window_bytes and self._flight is None and not self._link.saves.writing:
            self._ask_for_more()
        if not self._link.slots:
            if not self._open:
                self._ask_slots()
        elif self._flight is None:
            self._ask_if_due(step)

    def _slots_came(self) -> None:
        link = self._link
        if link.window_bytes:
            self._degraded("memory tier", link.note)
            return
        if link.note:
            self._say(f"memory: {link.note}", always=True)
        if self._asked_again:
            self._asked_again = 0
            self._warned.discard("memory tier")
            self._say("there is room for checkpoints again", always=True)
        for arena in link.slots:
            register_with_cuda(arena)

    def _ask_for_more(self) -> None:
        """A window is little, and there may be room for slots by now."""
        if not self._open and time.monotonic() > self._link.given_s + self._pause_s():
            self._asked_again += 1
            self._asked_slots = None
            self._ask_slots()

    def _pause_s(self) -> float:
        """Before slots are asked for again."""
        return float(min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2**self._asked_again))

    def _ask_if_due(self, step: int) -> None:
        expected = self._open + 1 >= self._accumulation.window
        if expected and self._due(step) and step <= (self._total or step):
            self._ask(self._generation(step), disk=self._disk_free(step))

    def _ask_slots(self, *, at_once: bool = False) -> None:
        """After the first step, because the optimizer's state is empty before it.

        `at_once`: also where a pause after a refusal has not passed.
        """
        if self._step == self._start_step or not self._plan.snapshot_interval_steps:
            return
        assert self._snapshotter is not None
        layout = self._snapshotter.plan(self._progress())
        # One is planned where no more fits; two may all the same, and serve better.
        slots = max(2, self._plan.slots)
        asked = (layout.image_bytes, slots)
        if asked == self._asked_slots and not self._asks_again(at_once):
            return
        if self._asked_slots is None and self._job.rank == 0:
            self._look_for_room(layout.image_bytes)
        self._asked_slots = asked
        self._link.want_slots(
            image_bytes=layout.image_bytes + SLOT_SLACK_BYTES,
            chunk_bytes=self._plan.staging.chunk_bytes,
            slots=slots, limit_bytes=self._job.goal.limits.host_memory_bytes,
            may_stream=self._plan.tier("disk").interval_steps > 0,
        )  # fmt: skip

    def _look_for_room(self, image_bytes: int) -> None:
        """Once, when the size of a checkpoint is known."""
        if self._plan.tier("disk").interval_steps:
            look_for_room(
                self._job.checkpoints, state_bytes=image_bytes * self._job.world_size,
                kept=self._job.goal.retention.keep_last, say=self._say,
            )  # fmt: skip

    def _asks_again(self, at_once: bool) -> bool:
        """What the host had no room for it may have room for later; a policy does not change."""
        refused_s = self._link.no_room_s
        if refused_s is None:
            return False
        if not at_once and time.monotonic() < refused_s + self._pause_s():
            return False
        self._asked_again += 1
        return True

    def _ask(self, generation: Generation, *, disk: bool) -> None:
        with self._asking:
            link, former = self._link, self._link.saves.asked
            if (former is not None and former.generation >= generation) or link.saves.is_silent:
                return
            if former is not None and former.state == "granted":
                link.withdraw(former, f"{generation} came first")  # it would keep its slot
            link.ask(generation, disk=disk)

    def _snapshot(
        self,
        step: int,
        generation: Generation,
        *,
        disk: bool,
        before: tuple[Any, Any] | None = None,
        patience_s: float | None = None,
    ) -> bool:
        """Begins the snapshot of a generation; False when it was skipped.

        `before`: (random state, position of the data) of the boundary, if they have gone on since.
        """
        if self._rebuilding is not None:
            self._skip(step, "the script has not built what the last checkpoint has")
            return False
        patience_s = GRANT_WAIT_S if patience_s is None else patience_s
        save = self._granted(generation, disk=disk, patience_s=patience_s)
        if save is None:
            return False
        disk, slot = save.disk, save.slot
        assert slot is not None
        assert self._snapshotter is not None
        staging = self._plan.staging
        schedule = staging.schedule_of(step // max(1, self._plan.snapshot_interval_steps))
        slots, passage = self._link.slots, self._passage(save)
        if slot >= len(slots):
            self._skip(step, "the keeper is gone")
            return False
        arena = slots[slot]
        if not staging.preallocate and not arena.pinned and passage is None:
            arena.release_pages()
        lazy = schedule != "blocking" and not (passage is not None and passage.blocking)
        gate = None
        if passage is None:
            gate = self._windows.gate(schedule, staging, self._snapshotter.copier)
        self._snapshotter.gate = gate
        self._snapshotter.device_clone = staging.device_clone
        rng, progress = None, self._progress()
        if before is not None:
            rng, progress["data"] = before
        refusal: str | None = None
        try:
            snapshot = self._snapshotter.begin(
                arena, progress, lazy=lazy, slot=slot, rng=rng,
                capacity=self._link.image_bytes,
                began=lambda layout: self._tell_began(save, layout),
                completed=lambda snapshot: self._copied(save, snapshot),
                passage=passage,
            )  # fmt: skip
        except StorageError as error:
            self._abandon(save, str(error))
            self._stood_still(str(error))
            self._skip(step, str(error))
            return False
        except AutockptError as error:
            refusal = str(error)
        except Exception as error:
            self._abandon(save, repr(error))
            raise
        if refusal is not None:
            del arena  # larger ones may need its room
            self._abandon(save, refusal)
            self._asked_slots = None
            self._ask_slots()
            self._skip(step, refusal)
            return False
        self._flight = save
        self._link.saves.note_began(save)
        self._begun_here = snapshot
        self._tell_changes(step)
        self._supersedes = False
        if staging.compare and passage is None and (gate is None or gate.learned):
            self._trial = Trial(snapshot, save, schedule, self._clock.boundary_s)
        if disk:
            if self._link.saves.durable is None:
                pause_s = min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2**self._early_tries)
                self._early_s, self._early_tries = time.monotonic() + pause_s, self._early_tries + 1
            self._saving = staging.persist != "sync"
        if not lazy or staging.persist == "sync":
            self._note_stall()
            self._fence()
        if staging.persist == "sync" and disk:
            self._wait_durable(generation, FINAL_WAIT_S)
        return True

    def _note_stall(self) -> None:
        """The stall of a snapshot is its whole boundary: request, report, copy and release."""
        snapshot = self._begun_here
        if snapshot is not None and self._boundary_s is not None:
            snapshot.boundary_stall_s = time.monotonic() - self._boundary_s + self._asking_s
            self._begun_here, self._asking_s = None, 0.0

    def _passage(self, save: SaveHandle) -> Passage | None:
        """How the image streams through the window; None: slots hold images whole."""
        link = self._link
        if not link.window_bytes:
            return None

        def gone() -> str:
            if not link.connected:
                return "the keeper is gone"
            return save.reason or ""

        return Passage(
            link.board.view, window_bytes=link.window_bytes, gone=gone, blocking=link.blocking
        )

    def _stood_still(self, reason: str) -> None:
        """The training waited for a storage in vain: it is left alone for a while."""
        pause_s = min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2**self._stood_still_count)
        self._stood_still_count += 1
        self._stream_after_s = time.monotonic() + pause_s
        self._degraded("storage", f"{reason}; none is tried for {pause_s:.0f} s")

    def _tell_changes(self, step: int) -> None:
        """Once: the script built or removed something behind `attach`."""
        changes = [] if "structure" in self._warned else self._state.changes()
        if not changes:
            return
        self._warned.add("structure")
        where = "before its first step; its state is put back then"
        if self._job.world_size > 1:
            where = "before attach()"
        more = f" and {len(changes) - 1} more" if len(changes) > 1 else ""
        self._say(
            f"the structure of the state changed before step {step} ({changes[0]}{more}): a "
            f"restart has to build it again by ckpt.step_count, {where}"
        )

    def _granted(
        self, generation: Generation, *, disk: bool, patience_s: float
    ) -> SaveHandle | None:
        """The save, which begins in its slot now; None: it is skipped."""
        link, step = self._link, generation.step
        if not link.slots:
            self._skip(step, link.slots_refused or "the slots are still being allocated")
            return None
        if not link.wait_until(lambda: not link.saves.is_silent, patience_s):
            self._skip(step, "the keeper does not answer")
            return None
        self._ask(generation, disk=disk)
        save = link.saves.get(generation)
        if save is None:  # a later one was asked for
            self._skip(step, "the keeper did not answer in time")
            return None
        if not save.is_answered:
            link.wait_until(lambda: save.is_answered, patience_s)
        asked_disk = save.disk
        if link.saves.begin(save, disk=disk) is None:
            self._skip(step, save.reason or "the keeper did not answer in time")
            link.withdraw(save, "not granted in time")
            return None
        if disk and not asked_disk:  # asked for by the script, or by a new plan, since
            link.ask_for_disk(save)
        return save

    def _abandon(self, save: SaveHandle, reason: str) -> None:
        """Gives a slot back that may be half filled, once nobody writes into it any more."""
        assert self._snapshotter is not None
        self._snapshotter.abandon()
        self._flight = None
        self._link.withdraw(save, reason)

    def _tell_began(self, save: SaveHandle, layout: Layout) -> None:
        staging, tier = self._plan.staging, self._plan.tier("disk")
        generation, step, slot = save.generation, save.step, save.slot
        assert slot is not None
        now = save.began_s = time.monotonic()
        self._emit(
            t.SnapshotBegan(
                at_s=now, rank=self._job.rank, generation=str(generation), step=step,
                tiers="memory+disk" if save.disk else "memory",
            )
        )  # fmt: skip
        codec, ranges = self._codec_of(layout, tier.codec)
        self._link.send(
            wire.SnapshotBegan(
                rank=self._job.rank, generation=generation, step=step, slot=slot,
                image_bytes=layout.image_bytes, boundary_end=layout.boundary_end,
                layout_digest=layout.digest, writers=staging.writers,
                chunk_bytes=staging.chunk_bytes, direct_io=staging.direct_io,
                streaming=staging.streaming, codec=codec, class_ranges=ranges,
                chain=tier.chain, at_s=now,
            )
        )  # fmt: skip

    def _codec_of(self, layout: Layout, by_class: dict[str, str]) -> tuple[str, str]:
        """(codec, its ranges as text), worked out once for a layout and a plan."""
        kept = self._encoding
        if kept is None or kept[0] is not layout or kept[1] != by_class:
            codec, ranges = layout.codec_ranges(by_class)
            kept = self._encoding = (layout, by_class, codec, json.dumps(ranges))
        return kept[2], kept[3]

    def _progress(self) -> dict[str, Any]:
        lead = self._lead_resumed + self._lead
        return {
            "step": self._step, "lead": lead, "data": self._position(), "mesh": self._mesh,
            "nan": self._known_nan,
        }  # fmt: skip

    def _kept(self) -> tuple[Any, Any] | None:
        """(random state, position of the data) as of now; the loader's own may go on meanwhile."""
        try:
            return rng_state(), copy.deepcopy(self._position())
        except Exception as error:
            self._degraded("data", f"its position cannot be kept: {error!r}")
            return None

    def _position(self) -> dict[str, Any] | None:
        return None if self._data is None else self._data.state()

    def _tell_tried(self, now_s: float) -> None:
        """At a boundary: what the snapshot of a comparison has cost, once its copy has ended.

        Or once the next one is due: they must not be counted together.
        """
        trial = self._trial
        if trial is None:
            return
        trial.iterations += 1
        snapshot = trial.snapshot
        if not snapshot.settled and not snapshot.void and not self._due(self._step):
            return
        self._trial = None
        if snapshot.settled and snapshot.error is None and not snapshot.changed:
            self._emit(
                t.ScheduleMeasured(
                    at_s=now_s, rank=self._job.rank, generation=str(trial.save.generation),
                    step=trial.save.step, schedule=trial.schedule, iterations=trial.iterations,
                    total_s=now_s - trial.began_s,
                )
            )  # fmt: skip

    # ------------------------------------------------------------------ the fence

    def _fence(self, optimizer: torch.optim.Optimizer | None = None) -> None:
        """Makes it safe to change what `optimizer` changes (None: everything); never raises."""
        if optimizer is not None:
            self._windows.step_began()
            self._traffic.step_began()
        if self._flight is None or self._snapshotter is None:
            return
        snapshot = self._snapshotter.current
        if snapshot is None:
            self._flight = None
            return
        save, stalled = self._flight, snapshot.fence_stall_s
        self._beat("saves")
        try:
            self._snapshotter.fence(optimizer)
            if self._snapshotter.current is None:
                self._flight = None
                self._tell_sealed(save, snapshot)
        except Exception as error:
            self._abandon(save, repr(error))
            self._degraded("snapshot", repr(error))
        self._beat("trains")
        if self._boundary_s is None:  # else it is a part of the boundary
            self._clock.stalled(snapshot.fence_stall_s - stalled)
        self._fence_stall_s += snapshot.fence_stall_s - stalled

    def _copied(self, save: SaveHandle, snapshot: Snapshot) -> None:
        """Every byte is in the slot and proven, or is not; mostly on the copy thread."""
        if snapshot.error is not None:
            reason = f"copy into the slot failed: {snapshot.error!r}"
            self._link.withdraw(save, reason)
            if isinstance(snapshot.error, StorageError):
                self._stood_still(str(snapshot.error))
            else:
                self._degraded("snapshot", reason)
            return
        if snapshot.passage is not None:
            self._stood_still_count = 0
        if snapshot.changed:
            self._discard(save, snapshot)
            return
        proofs = [p.ReplicaProof(members=a.members, digest=a.digest()) for a in snapshot.replicas]
        self._link.report_copied(save, tuple(proofs))
        if self._snapshotter is not None and self._snapshotter.current is not snapshot:
            self._tell_sealed(save, snapshot)

    def _tell_sealed(self, save: SaveHandle, snapshot: Snapshot) -> None:
        """Once, when both the fence is passed and the verdict is known: then all is measured."""
        if not snapshot.settled or snapshot.error is not None or snapshot.changed:
            return
        self._newest_stall_s = snapshot.boundary_stall_s + snapshot.fence_stall_s
        self._emit(
            t.SnapshotSealed(
                at_s=time.monotonic(), rank=self._job.rank, generation=str(save.generation),
                step=save.step, bytes=snapshot.layout.image_bytes,
                boundary_stall_s=snapshot.boundary_stall_s,
                fence_stall_s=snapshot.fence_stall_s, copy_s=snapshot.copy_s,
            )
        )  # fmt: skip
        if snapshot.task.use is not None:
            self._emit(self._windows.told(snapshot.task.use, str(save.generation), save.step))

    def _discard(self, save: SaveHandle, snapshot: Snapshot) -> None:
        """State changed behind the fence: the generation is worthless, the tensors move."""
        changed, known = snapshot.changed, set(snapshot.recipe.tensors)
        reason = f"changed between boundary and fence: {', '.join(changed[:5])}"
        self._link.withdraw(save, reason)
        self._state.not_lazy |= set(changed) & known or known
        self._emit(
            t.SnapshotDiscarded(
                at_s=time.monotonic(), rank=self._job.rank, generation=str(save.generation),
                step=save.step, reason=reason,
            )
        )  # fmt: skip
        self._say(
            f"snapshot {save.generation} discarded: {reason}; copied at the boundary from now on"
        )

    def _wait_durable(self, generation: Generation, timeout_s: float) -> bool:
        """False when the generation was dropped: the others could not save it."""
        link = self._link
        if not link.wait_over(generation, timeout_s):
            self._degraded("checkpoint", f"{generation} not durable after {timeout_s:.0f} s")
            return True
        return not link.saves.is_discarded(generation)
