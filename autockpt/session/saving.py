"""One save: due, asked for, granted, begun at the boundary, fenced at the optimizer's step.

A slot is requested before the boundary that needs it.  If the slot is not there in time, the save
is skipped with its reason, and the training goes on.
"""

import json
import math
import threading
import time
from dataclasses import dataclass
from typing import Any, Literal

import torch

from autockpt.executors.image.layout.plan import Layout
from autockpt.executors.keeper import wire
from autockpt.executors.keeper.client.saves import SaveHandle
from autockpt.executors.linux.signal_errors import is_from_handler
from autockpt.executors.protocol import messages as p
from autockpt.executors.snapshot.snapshotter import Snapshot
from autockpt.executors.snapshot.streaming import Passage
from autockpt.session.base import RankState
from autockpt.session.boundaries import changing_tensors
from autockpt.session.boundaries.iterations import Iterations
from autockpt.session.place.training_position import TrainingPosition
from autockpt.session.slots import SlotRequests, pause_s
from autockpt.session.traffic import TrafficMarks
from autockpt.session.windows import IdleWindows
from autockpt.values import telemetry as t
from autockpt.values.errors import AutockptError, StorageError
from autockpt.values.generation import Generation
from autockpt.values.plan import CheckpointPlan, WriteWay

GRANT_WAIT_S = 0.02
"""A slot is asked for one iteration ahead; this is for the first save and for a busy keeper."""
FIRST_SLOTS_PART = 0.01
"""The first iteration shows the size of the state, and may be a long one.  Its checkpoint waits for
slots for this part of its time; a short one is not worth a wait."""
FINAL_WAIT_S = 900.0


@dataclass(slots=True)
class Trial:
    """A checkpoint that was taken to see what a setting costs."""

    snapshot: Snapshot
    save: SaveHandle
    decision: Literal["schedule", "write"]
    setting: str
    began_s: float
    """Its boundary, before anything was done there."""
    iterations: int = 0
    iterated_s: float = 0.0
    """Seconds of these iterations, without stalls."""


@dataclass(frozen=True, slots=True)
class Undue:
    """Behind `since` and before `until` no tier is due, under this plan and up to this end."""

    plan: CheckpointPlan
    total: int | None
    window: int
    since: int
    until: float


def _undue(plan: CheckpointPlan, total: int | None, window: int, since: int) -> Undue:
    ends = [plan.next_due(tier, since=since) for tier in ("memory", "disk")]
    ends += [None if total is None else max(total - window + 1, since + 1)]
    return Undue(plan, total, window, since, min((end for end in ends if end is not None),
                                                 default=math.inf))  # fmt: skip


class Saver:
    """Begins snapshots and follows them until the last byte is proven."""

    def __init__(
        self,
        rank: RankState,
        iterations: Iterations,
        position: TrainingPosition,
        slots: SlotRequests,
    ) -> None:
        self._rank, self._iterations, self._position = rank, iterations, position
        self._slots, self._job, self._client = slots, rank.job, rank.client
        self.windows = IdleWindows(rank.job.rank, rank.job.profile, rank.say)
        self.traffic = TrafficMarks(rank.client.board.view, rank.live.models.values())
        self.flight: SaveHandle | None = None
        """The save between its boundary and its fence."""
        self.is_saving = False
        """A save for disk was under way in this iteration, also where it has ended by now."""
        self.wanted_step: int | None = None
        """Boundary from which on a checkpoint is due that the script asked for."""
        self.boundary_s: float | None = None
        """When the boundary at hand began; None: between two."""
        self.metrics: dict[str, float] = {}
        """Values reported since the newest checkpoint for disk began, by name."""
        self._carried: list[tuple[SaveHandle, dict[str, float]]] = []
        """Values of checkpoints for disk that have begun and are not durable yet, oldest first."""
        self.fence_stall_s = 0.0
        """The training has waited at fences so long."""
        self.newest_stall_s: float | None = None
        """Training blocked by the newest snapshot."""
        self._asking = threading.Lock()
        self._asking_s = 0.0
        """Seconds to request the slot of the coming snapshot, a boundary ahead of it."""
        self._begun_here: Snapshot | None = None
        """The snapshot that began at the boundary at hand."""
        self._trial: Trial | None = None
        """The newest snapshot of a comparison, until its cost is known."""
        self._undue = _undue(rank.plan, rank.total, 1, -1)
        self._is_put_off = False
        """The boundary before ended an epoch, and the checkpoint due there waits for this one."""
        self._changing_path = changing_tensors.path_of(rank.job.run_directory, rank.job.rank)
        self._changing = set(changing_tensors.read(self._changing_path))
        """Names of tensors of which some process of this rank found that."""
        rank.live.not_lazy |= self._changing
        self._encoding: tuple[Layout, dict[str, str], str, str] | None = None
        """The newest layout and codecs by class, and the encoding computed from them."""
        self._made_s = time.monotonic()
        self._early_s = 0.0
        """Before then no checkpoint goes to disk only because nothing is there, CLOCK_MONOTONIC."""
        self._early_tries = 0
        self._stream_after_s = 0.0
        """No image streams before, CLOCK_MONOTONIC: storage stood still."""
        self._stood_still_count = 0

    def follow_traffic(self) -> None:
        """Marks traffic for the keeper, if the plan in force wants that."""
        refusal = self.traffic.follow(self._rank.plan)
        if refusal and refusal not in self._rank.warned:
            self._rank.warned.add(refusal)
            self._rank.say(f"redundancy.schedule: windows: {refusal}")

    def is_due(self, step: int) -> bool:
        """A checkpoint of this boundary, by the plan or by the script's wish."""
        if self._is_undue(step):
            return False
        if self._client.window_bytes:  # no memory holds a state: storage does, where it answers
            calm = time.monotonic() >= self._stream_after_s or self._is_last(step)
            return calm and self.is_disk_free(step)
        return self._is_reached(step, "memory") or self.is_disk_free(step)

    def _is_undue(self, step: int) -> bool:
        """No tier is due at this boundary for certain; asked several times in each iteration."""
        rank = self._rank
        if rank.open or self._is_put_off or rank.supersedes or self.wanted_step == step:
            return False
        known, window = self._undue, self._iterations.accumulation.window
        if (
            known.plan is not rank.plan
            or (known.total, known.window) != (rank.total, window)
            or step <= known.since
            or known.until <= step
        ):
            known = self._undue = _undue(rank.plan, rank.total, window, step - 1)
        return step < known.until

    def is_calm(self, step: int) -> bool:
        """At this boundary nothing of a save is due, under way, asked for, or to be asked for."""
        saves, link = self._client.saves, self._client
        asked = saves.asked
        return (
            self.flight is None
            and self._trial is None
            and self._is_undue(step)
            and self._is_undue(step + 1)
            and (asked is None or asked.generation.step != step)
            and bool(link.slots)
            and not self._slots.has_work()
        )

    def _is_reached(self, step: int, tier: str) -> bool:
        """At this boundary, or at one since the last that a checkpoint could be of."""
        since = step - 1 - self._rank.open - self._is_put_off
        return self._rank.plan.is_due(tier, step, since=since)

    def is_disk_due(self, step: int) -> bool:
        """It is to be durable."""
        if self._is_wanted(step):
            return True
        due = self._is_reached(step, "disk") or self._is_last(step) or self._is_early(step)
        return due and self._rank.plan.tier("disk").interval_steps > 0

    def _is_early(self, step: int) -> bool:
        """Nothing is durable yet: until the disk's own interval has passed once, the loss of a
        machine would cost all.  After a failure again, at growing pauses."""
        link = self._client
        if self._rank.is_safe or link.saves.durable is not None or time.monotonic() < self._early_s:
            return False
        coming = link.saves.writing - {self._rank.generation(step)}
        return not coming and self._is_reached(step, "memory")

    def _is_wanted(self, step: int) -> bool:
        wanted = self.wanted_step is not None and step - self._rank.open <= self.wanted_step <= step
        return self._rank.supersedes or wanted

    def _is_last(self, step: int) -> bool:
        """No later step of an optimizer fits in front of the end, if they come as before."""
        return (
            self._rank.total is not None
            and step <= self._rank.total < step + self._iterations.accumulation.window
        )

    def is_disk_free(self, step: int) -> bool:
        """Due on disk, and fewer are on their way there than the plan allows.

        The last checkpoint and one that the script asked for always go.  Without a limit of the
        plan two slots are left to memory, where there are so many: what hangs holds its slot.
        """
        limit = self._rank.plan.staging.in_flight or max(0, len(self._client.slots) - 2)
        if not self.is_disk_due(step):
            return False
        if not limit or self._is_wanted(step) or self._is_last(step):
            return True
        return len(self._client.saves.writing - {self._rank.generation(step)}) < limit

    def begin_boundary(self) -> float:
        """An iteration ended; the time now, CLOCK_MONOTONIC."""
        began_s = self._rank.clock.boundary(self.is_saving or self.is_busy())
        self.boundary_s, self.is_saving = began_s, bool(self._client.saves.writing)
        return began_s

    def end_boundary(self) -> None:
        """The training goes on."""
        self._note_stall()
        self.boundary_s = None

    def is_busy(self) -> bool:
        """Something of a save is under way now."""
        return bool(self._client.saves.writing) or self.flight is not None

    def ask_ahead(self, step: int) -> None:
        """Asks for the slot of the next boundary if it is due, and for slots at first."""
        link, asked, began_s = self._client, self._client.saves.asked, time.monotonic()
        self._slots.take_news()
        if link.window_bytes and self.flight is None and not link.saves.writing:
            self._slots.ask_for_more()
        if not link.slots:
            if not self._rank.open:
                self._slots.ask()
        else:
            self._slots.ask_for_another()  # also during a copy: there may be one at each boundary
            if self.flight is None:
                self.ask_if_due(step)
        if link.saves.asked is not asked:
            self._asking_s = time.monotonic() - began_s

    def keep_wish(self, step: int) -> None:
        """The script's wish for this boundary is not granted there: the next one is as good."""
        if self.wanted_step is not None and self.wanted_step <= step:
            self.wanted_step = step + 1

    def ask_if_due(self, step: int) -> None:
        """Asks for the slot of that boundary; on any thread."""
        expected = self._rank.open + 1 >= self._iterations.accumulation.window
        if expected and self.is_due(step) and step <= (self._rank.total or step):
            self.ask(self._rank.generation(step), disk=self.is_disk_free(step))

    def ask(self, generation: Generation, *, disk: bool) -> None:
        """Asks for a slot, unless a later one was asked for."""
        with self._asking:
            link, former = self._client, self._client.saves.asked
            if (former is not None and former.generation >= generation) or link.saves.is_silent:
                return
            if former is not None and former.state == "granted":
                link.withdraw(former, f"{generation} came first")  # it would keep its slot
            link.ask(generation, disk=disk)

    def begin(
        self,
        generation: Generation,
        *,
        disk: bool,
        before: tuple[Any, Any] | None = None,
        patience_s: float | None = None,
    ) -> bool:
        """Begins the snapshot of a generation; False when it was skipped.

        `before`: (random state, position of the data) of the boundary, if they have gone on since.
        """
        step = generation.step
        if self._rank.rebuilding is not None:
            self._rank.report_skip(step, "the script has not built what the last checkpoint has")
            return False
        patience_s = GRANT_WAIT_S if patience_s is None else patience_s
        save = self._granted(generation, disk=disk, patience_s=patience_s)
        if save is None:
            return False
        disk, slot = save.disk, save.slot
        assert slot is not None
        assert self._rank.snapshotter is not None
        staging = self._rank.plan.staging
        schedule = staging.schedule_of(step // max(1, self._rank.plan.snapshot_interval_steps))
        slots, passage = self._client.slots, self._passage(save)
        if slot >= len(slots):
            self._rank.report_skip(step, "the keeper is gone")
            return False
        arena = slots[slot]
        if not staging.preallocate and not arena.pinned and passage is None:
            arena.release_pages()
        lazy = schedule != "blocking" and not (passage is not None and passage.blocking)
        gate = None
        if passage is None:
            gate = self.windows.gate(schedule, staging, self._rank.snapshotter.copier)
        self._rank.snapshotter.gate = gate
        self._rank.snapshotter.device_clone = staging.device_clone
        refusal: str | None = None
        try:
            rng, progress = None, self._position.progress()
            if before is not None:
                rng, progress["data"] = before
            snapshot = self._rank.snapshotter.begin(
                arena, progress, lazy=lazy, slot=slot, rng=rng,
                capacity=self._client.image_bytes,
                began=lambda layout: self.report_began(save, layout),
                completed=lambda snapshot: self._copied(save, snapshot),
                passage=passage,
            )  # fmt: skip
        except StorageError as error:
            self._abandon(save, str(error))
            self._stood_still(str(error))
            self._rank.report_skip(step, str(error))
            return False
        except AutockptError as error:
            refusal = str(error)
        except Exception as error:
            self._abandon(save, repr(error))
            raise
        if refusal is not None:
            del arena  # larger ones may need its room
            self._abandon(save, refusal)
            self._slots.ask_anew()
            self._rank.report_skip(step, refusal)
            return False
        self.flight = save
        self._client.saves.note_began(save)
        self._begun_here = snapshot
        self._warn_of_changes(step)
        if lacks := self.lacks():
            self._rank.report_degraded("left out", lacks)
        self._rank.supersedes = False
        if staging.compare and passage is None and (gate is None or gate.learned):
            self._try(snapshot, save, "schedule", schedule)
        elif staging.compare_writes and disk and passage is None:
            self._try(snapshot, save, "write", str(self._write_way(step)))
        if disk:
            self._carried.append((save, self.metrics))
            self.metrics = {}
            if self._client.saves.durable is None:
                wait_s = pause_s(self._early_tries)
                self._early_s, self._early_tries = time.monotonic() + wait_s, self._early_tries + 1
            self.is_saving = staging.persist != "sync"
        if not lazy or staging.persist == "sync":
            self._note_stall()
            self.fence()
        if staging.persist == "sync" and disk:
            self.wait_durable(generation, FINAL_WAIT_S)
        return True

    def lacks(self) -> str:
        """A sentence about the values that the newest checkpoint lacks; "": it lacks none."""
        left_out = self._rank.live.left_out
        if not left_out:
            return ""
        why = next(iter(left_out.values())).partition(". ")[0].partition(";")[0]
        return (
            f"checkpoints lack {', '.join(left_out)}, which a restart has as the script makes it: "
            f"{why}. Keep numbers, strings, lists, dicts, tensors or arrays in a TrainState"
        )

    def _note_stall(self) -> None:
        """The stall of a snapshot is its whole boundary: request, report, copy and release."""
        snapshot = self._begun_here
        if snapshot is not None and self.boundary_s is not None:
            snapshot.boundary_stall_s = time.monotonic() - self.boundary_s + self._asking_s
            self._begun_here, self._asking_s = None, 0.0

    def _passage(self, save: SaveHandle) -> Passage | None:
        """How the image streams through the window; None: slots hold images whole."""
        link = self._client
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
        wait_s = pause_s(self._stood_still_count)
        self._stood_still_count += 1
        self._stream_after_s = time.monotonic() + wait_s
        self._rank.report_degraded("storage", f"{reason}; none is tried for {wait_s:.0f} s")

    def _warn_of_changes(self, step: int) -> None:
        """Once: the script built or removed something behind `attach`."""
        changes = [] if "structure" in self._rank.warned else self._rank.live.changes()
        if not changes:
            return
        self._rank.warned.add("structure")
        where = "before its first step; its state is put back then"
        if self._job.world_size > 1:
            where = "before attach()"
        more = f" and {len(changes) - 1} more" if len(changes) > 1 else ""
        self._rank.say(
            f"the structure of the state changed before step {step} ({changes[0]}{more}): a "
            f"restart has to build it again by ckpt.step_count, {where}"
        )

    def _granted(
        self, generation: Generation, *, disk: bool, patience_s: float
    ) -> SaveHandle | None:
        """The save, which begins in its slot now; None: it is skipped."""
        link, step = self._client, generation.step
        if not link.slots and not self._has_first_slots():
            if link.slots_refused or step > self._rank.start_step + 1:
                self._rank.report_skip(
                    step, link.slots_refused or "the slots are still being allocated"
                )
            return None
        if not link.wait_until(lambda: not link.saves.is_silent, patience_s):
            self._rank.report_skip(step, "the keeper does not answer")
            return None
        self.ask(generation, disk=disk)
        save = link.saves.get(generation)
        if save is None:  # a later one was asked for
            self._rank.report_skip(step, "the keeper did not answer in time")
            return None
        if not save.is_answered:
            link.wait_until(lambda: save.is_answered, patience_s)
        asked_disk = save.disk
        if link.saves.begin(save, disk=disk) is None:
            self._rank.report_skip(step, save.reason or "the keeper did not answer in time")
            link.withdraw(save, f"no slot was granted in time; {t.WITHDRAWN}")
            return None
        if disk and not asked_disk:  # asked for by the script, or by a new plan, since
            link.ask_for_disk(save)
        return save

    def _has_first_slots(self) -> bool:
        """Whether slots come at once behind the first iteration: a slow one is worth a wait."""
        link, rank = self._client, self._rank
        if rank.step != rank.start_step + 1 or rank.open:
            return False
        self._slots.ask()
        wait_s = FIRST_SLOTS_PART * (time.monotonic() - self._made_s)
        return link.wait_until(lambda: bool(link.slots or link.slots_refused), wait_s) and bool(
            link.slots
        )

    def _abandon(self, save: SaveHandle, reason: str) -> None:
        """Give back a slot that may be half filled, once no copy writes into it any more."""
        assert self._rank.snapshotter is not None
        self._rank.snapshotter.abandon()
        self.flight = None
        self._client.withdraw(save, reason)

    def report_began(self, save: SaveHandle, layout: Layout) -> None:
        """The copy into the slot of `save` begins; on any thread."""
        staging, tier = self._rank.plan.staging, self._rank.plan.tier("disk")
        generation, step, slot = save.generation, save.step, save.slot
        assert slot is not None
        now = save.began_s = time.monotonic()
        self._rank.emit(
            t.SnapshotBegan(
                at_s=now, rank=self._job.rank, generation=str(generation), step=step,
                tiers="memory+disk" if save.disk else "memory",
            )
        )  # fmt: skip
        codec, ranges = self._codec_of(layout, tier.codec)
        self._take_back_values()
        metrics = self.metrics
        way = staging.write_way if self._client.window_bytes else self._write_way(step)
        assert self._rank.snapshotter is not None
        shares = self._rank.snapshotter.shares
        self._client.send(
            wire.SnapshotBegan(
                rank=self._job.rank, generation=generation, step=step, slot=slot,
                image_bytes=layout.image_bytes, boundary_end=layout.boundary_end,
                layout_digest=layout.digest, writers=way.writers,
                chunk_bytes=way.chunk_bytes, direct_io=way.direct_io,
                streaming=staging.streaming, codec=codec, class_ranges=ranges,
                chain=tier.chain, at_s=now,
                metrics=json.dumps(metrics, sort_keys=True) if metrics else "",
                across_nodes=shares is not None and shares.across_nodes,
            )
        )  # fmt: skip

    def _take_back_values(self) -> None:
        """Values of a save that was dropped belong to this one, unless reported anew."""
        waiting, said = [], self.metrics
        for save, values in reversed(self._carried):
            if save.reason is not None:
                self.metrics = {
                    **{n: v for n, v in values.items() if n not in said},
                    **self.metrics,
                }
            elif save.state != "durable":
                waiting.append((save, values))
            said = {**values, **said}
        self._carried = waiting[::-1]

    def _codec_of(self, layout: Layout, by_class: dict[str, str]) -> tuple[str, str]:
        """(codec, its ranges as text), worked out once for a layout and a plan."""
        kept = self._encoding
        if kept is None or kept[0] is not layout or kept[1] != by_class:
            codec, ranges = layout.codec_ranges(by_class)
            kept = self._encoding = (layout, by_class, codec, json.dumps(ranges))
        return kept[2], kept[3]

    def _write_way(self, step: int) -> WriteWay:
        """How the checkpoint of a step is written to storage."""
        plan = self._rank.plan
        every = max(1, plan.tier("disk").interval_steps)
        return plan.staging.write_way_of(step // every)

    def _try(
        self,
        snapshot: Snapshot,
        save: SaveHandle,
        decision: Literal["schedule", "write"],
        setting: str,
    ) -> None:
        """The snapshot that has just begun shows the cost of a setting."""
        self._trial = Trial(snapshot, save, decision, setting, self._rank.clock.boundary_s)

    def report_trial(self, now_s: float) -> None:
        """At a boundary: report the cost of a comparison's checkpoint, once it has ended.

        A schedule ends with the copy, or once the next one is due: they must not be counted
        together.  A way of writing ends with the checkpoint durable.
        """
        trial = self._trial
        if trial is None:
            return
        trial.iterations += 1
        trial.iterated_s += self._rank.clock.newest_s or 0.0
        snapshot, save, saves = trial.snapshot, trial.save, self._client.saves
        durable_s, total_s = 0.0, now_s - trial.began_s
        if trial.decision == "write":
            if save.reason is None and not saves.is_durable(save.generation):
                return
            durable_s, total_s = saves.durable_s - trial.began_s, trial.iterated_s
        elif not snapshot.settled and not snapshot.void and not self.is_due(self._rank.step):
            return
        self._trial = None
        unsafe = save.reason is not None or saves.durable != save.generation
        lost = trial.decision == "write" and unsafe
        if snapshot.settled and snapshot.error is None and not snapshot.changed and not lost:
            self._rank.emit(
                t.SettingMeasured(
                    at_s=now_s, rank=self._job.rank, generation=str(save.generation),
                    step=save.step, decision=trial.decision, setting=trial.setting,
                    iterations=trial.iterations, total_s=total_s, durable_s=durable_s,
                )
            )  # fmt: skip

    def fence(self, optimizer: torch.optim.Optimizer | None = None) -> None:
        """Makes it safe to change what `optimizer` changes (None: everything).  Never raises, but
        what a signal handler of the script has."""
        if optimizer is not None:
            self.windows.step_began()
            self.traffic.step_began()
        if self.flight is None or self._rank.snapshotter is None:
            return
        snapshot = self._rank.snapshotter.current
        if snapshot is None:
            self.flight = None
            return
        save, stalled = self.flight, snapshot.fence_stall_s
        self._rank.beat("saves")
        try:
            self._rank.snapshotter.fence(optimizer)
            if self._rank.snapshotter.current is None:
                self.flight = None
                self._report_sealed(save, snapshot)
        except Exception as error:
            self._abandon(save, repr(error))
            if is_from_handler(error):
                raise
            self._rank.report_degraded("snapshot", repr(error))
        self._rank.beat("trains")
        if self.boundary_s is None:  # else it is a part of the boundary
            self._rank.clock.stalled(snapshot.fence_stall_s - stalled)
        self.fence_stall_s += snapshot.fence_stall_s - stalled

    def _copied(self, save: SaveHandle, snapshot: Snapshot) -> None:
        """Every byte is in the slot and proven, or is not; mostly on the copy thread."""
        if snapshot.error is not None:
            reason = f"copy into the slot failed: {snapshot.error!r}"
            self._client.withdraw(save, reason)
            if isinstance(snapshot.error, StorageError):
                self._stood_still(str(snapshot.error))
            else:
                self._rank.report_degraded("snapshot", reason)
            return
        if snapshot.passage is not None:
            self._stood_still_count = 0
        if snapshot.changed:
            self._discard(save, snapshot)
            return
        proofs = tuple(
            p.ReplicaProof(
                members=len(one.members), among=one.among, digest=one.digest(),
                group=one.group if one.readings else "",
                readings=tuple(
                    p.ShareReading(share=share, digests=tuple(digests))
                    for share, digests in sorted(one.readings.items())
                    if any(digests)
                ),
            )
            for one in snapshot.replicas
            if one.readings or len(one.members) > 1
        )  # fmt: skip
        self._client.report_copied(save, proofs)
        if self._rank.snapshotter is not None and self._rank.snapshotter.current is not snapshot:
            self._report_sealed(save, snapshot)

    def _report_sealed(self, save: SaveHandle, snapshot: Snapshot) -> None:
        """Once, when both the fence is passed and the verdict is known: then all is measured."""
        with snapshot.lock:  # the fence and the copy thread may come here at one time
            is_sealed = snapshot.judged and snapshot.error is None and not snapshot.changed
            if snapshot.told or not is_sealed:
                return
            snapshot.told = True
        self.newest_stall_s = snapshot.boundary_stall_s + snapshot.fence_stall_s
        self._rank.emit(
            t.SnapshotSealed(
                at_s=time.monotonic(), rank=self._job.rank, generation=str(save.generation),
                step=save.step, bytes=snapshot.layout.image_bytes,
                boundary_stall_s=snapshot.boundary_stall_s,
                fence_stall_s=snapshot.fence_stall_s, copy_s=snapshot.copy_s,
            )
        )  # fmt: skip
        if snapshot.task.use is not None:
            self._rank.emit(
                self.windows.describe_use(snapshot.task.use, str(save.generation), save.step)
            )

    def _discard(self, save: SaveHandle, snapshot: Snapshot) -> None:
        """State changed behind the fence: the generation is worthless, the tensors move."""
        changed, known = snapshot.changed, set(snapshot.recipe.tensors)
        reason = f"changed between boundary and fence: {', '.join(changed[:5])}"
        self._client.withdraw(save, reason)
        self._rank.live.not_lazy |= set(changed) & known or known
        if not self._changing >= set(changed) & known:
            self._changing |= set(changed) & known
            changing_tensors.write(self._changing_path, self._changing)
        self._rank.emit(
            t.SnapshotDiscarded(
                at_s=time.monotonic(), rank=self._job.rank, generation=str(save.generation),
                step=save.step, reason=reason,
            )
        )  # fmt: skip
        self._rank.say(
            f"snapshot {save.generation} discarded: {reason}; copied at the boundary from now on"
        )

    def wait_durable(self, generation: Generation, timeout_s: float) -> bool:
        """False when the generation was dropped: the others could not save it."""
        link = self._client
        if not link.wait_over(generation, timeout_s):
            self._rank.report_degraded(
                "checkpoint", f"{generation} not durable after {timeout_s:.0f} s"
            )
            return True
        return not link.saves.is_discarded(generation)

    def put_off(self, step: int) -> None:
        """A checkpoint is due, and gradients are being accumulated."""
        if "accumulation" not in self._rank.warned:
            self._rank.warned.add("accumulation")
            self._rank.say(
                f"no optimizer stepped in the iteration before step {step}, and a checkpoint would "
                "lose its gradients: checkpoints wait for the next optimizer's step"
            )
        self._withdraw_asked(step, f"gradients are being accumulated; {t.WITHDRAWN}")

    def waits_for_epoch(self, step: int) -> bool:
        """The checkpoint that is due here is made at the next boundary, in the next epoch.

        Else the first loop of a restart would have no batch, and a script may divide by that
        number.
        """
        waited, self._is_put_off = self._is_put_off, False
        if waited or self._is_wanted(step) or self._is_last(step):
            return False
        if self._rank.job.world_size > 1:
            return False  # ranks may see other ends, and a checkpoint needs all of them
        if self._position.is_at_epoch_end:
            self._is_put_off = True
            self._withdraw_asked(step, f"the epoch ends here; {t.WITHDRAWN}")
        return self._is_put_off

    def skip_undue(self, step: int) -> None:
        """No checkpoint is due at this boundary."""
        self._is_put_off = False
        if self.is_disk_due(step):
            limit = self._rank.plan.staging.in_flight
            self._rank.report_skip(step, f"{limit} checkpoints are on their way to storage already")
        # Asked for under the plan before this one, or while fewer were on their way; a grant that
        # nobody uses would keep its slot.
        self._withdraw_asked(step, f"not due any more; {t.WITHDRAWN}")

    def _withdraw_asked(self, step: int, reason: str) -> None:
        asked = self._client.saves.asked
        if asked is not None and asked.generation == self._rank.generation(step):
            self._client.withdraw(asked, reason)

    def names_of(self, dispute: p.Dispute) -> str:
        """Tensors among which replicas differ; empty: not known on this rank."""
        snapshotter = self._rank.snapshotter
        shares = snapshotter.shares if snapshotter is not None else None
        for group in shares.groups if shares is not None else ():
            if group.name == dispute.group and len(group.members) == dispute.members:
                names = [piece.name for piece in group.shares[dispute.share][dispute.section]]
                more = f" and {len(names) - 3} more" if len(names) > 3 else ""
                return f"{', '.join(names[:3])}{more}"
        return ""

    def stop_sharing(self, reason: str) -> None:
        """These are no replicas (local SGD, a rank that went astray): each stores its own."""
        if self._rank.snapshotter is not None and self._rank.snapshotter.place is not None:
            self._rank.snapshotter.place = None
            self._rank.report_degraded(
                "shared state", f"{reason}; every rank stores all of its own from now on"
            )
