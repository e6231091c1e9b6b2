"""The newest boundary, kept so that the death of another rank loses no iteration.

At a boundary this rank records its own small state in memory that its keeper sees: buffers, random
state, position in the data.  Parameters and moments stay where they are.  Another rank may
die before the next step of an optimizer.  Then a thread of ours copies them, for this rank and for
the dead one; the training thread may stand in a collective.
"""

import threading
import time
from collections.abc import Callable
from typing import Any

from autockpt.executors.image.layout.plan import Layout
from autockpt.executors.keeper import wire
from autockpt.executors.keeper.client.saves import SaveHandle
from autockpt.executors.keeper.launch import keeper_status
from autockpt.executors.keeper.saving import boundary_record as records
from autockpt.executors.keeper.saving.last_boundary import SEAL_S
from autockpt.executors.keeper.slots import CELL_HELD
from autockpt.executors.linux import late_threads
from autockpt.executors.linux.memory import Arena, require_headroom
from autockpt.executors.linux.signal_errors import is_from_handler
from autockpt.executors.protocol import messages as p
from autockpt.executors.snapshot.held_boundary import OWN_BYTES, HeldBoundary
from autockpt.executors.state.live_state import inner_objects
from autockpt.session.base import RankState
from autockpt.session.job import Job
from autockpt.session.place.training_position import TrainingPosition
from autockpt.session.saving import Saver
from autockpt.values.generation import Generation
from autockpt.values.units import format_bytes

LARGEST_BYTES = 64 * 2**20
"""Of a boundary group that is recorded: a larger one costs too much at every boundary."""
GRANT_S = 2.0
LOOK_S = 0.02


class BoundaryHolder:
    """Holds the newest boundary of one rank."""

    def __init__(self, rank: RankState, position: TrainingPosition, saver: Saver) -> None:
        self._rank, self._client = rank, rank.client
        self._position, self._saver = position, saver
        job = rank.job
        self._is_on = job.goal.restart.last_boundary == "on"
        self._obstacle = _obstacle(job, rank.live.others.values())
        """Why this job can hold none; "": it may be able to."""
        self._told: set[str] = set()
        """Reasons why a boundary was not held."""
        self._held: HeldBoundary | None = None
        self._generation: Generation | None = None
        self._lock = threading.Lock()
        """Held while the state must not change."""
        self._after: Callable[[], None] | None = None
        self._turn = 0

    def is_wanted(self) -> bool:
        """The state of the coming boundary is to be held, if it can be."""
        if not self._is_on or not self._client.slots:
            return False
        streams = "the image streams through a window" if self._client.window_bytes else ""
        obstacle = self._obstacle or streams
        if obstacle:
            self._tell(obstacle)
        return not obstacle

    def _tell(self, reason: str) -> None:
        """Why a boundary is not held; each reason once."""
        if reason not in self._told:
            self._told.add(reason)
            self._rank.report_degraded("last boundary", reason)

    def hold(
        self,
        generation: Generation,
        before: tuple[Any, Any] | None,
        after: Callable[[], None],
    ) -> bool:
        """At a boundary: records it.  `after` is called when it is held no more.

        False: it is not held, and `after` is not called.
        """
        snapshotter = self._rank.snapshotter
        if snapshotter is None or self._rank.rebuilding is not None:
            return False
        if self._lock.locked():  # a copy of an earlier one is still under way
            return False
        rng, progress = None, self._position.progress()
        if before is not None:
            rng, progress["data"] = before
        try:
            held = snapshotter.hold(progress, self._room, rng=rng)
        except Exception as error:
            if is_from_handler(error):
                raise
            self._is_on = False
            self._tell(f"{type(error).__name__}: {error}")
            return False
        if isinstance(held, str):
            if held:
                self._tell(held)
            return False
        layout = held.recipe.layout
        head = records.RecordHead(
            generation=generation, image_bytes=layout.image_bytes,
            boundary_end=layout.boundary_end, layout_digest=layout.digest,
            replicas=held.digest, own_ranges=held.plan.own_ranges,
        )  # fmt: skip
        if not records.write_head(self._record(), head):
            self._tell("too many tensors that no other rank holds, in too many places")
            return False
        self._held, self._generation, self._after = held, generation, after
        self._turn += 1
        self._show(generation.step)
        return True

    def release(self) -> None:
        """The state is about to change; waits for a copy that is under way.

        Never raises, but what a signal handler of the script has.
        """
        if self._held is None:
            return
        is_idle = self._lock.acquire(timeout=SEAL_S)
        self._forget()  # a copy that is still under way finds that, and is refused
        if is_idle:
            self._lock.release()
        after, self._after = self._after, None
        if after is None:
            return
        try:
            after()
        except Exception as error:
            if is_from_handler(error):
                raise
            self._rank.report_degraded("snapshot", f"{type(error).__name__}: {error}")

    def _forget(self) -> None:
        self._held, self._generation = None, None
        self._show(0)

    def _show(self, step: int) -> None:
        self._client.board.view[: 8 * (CELL_HELD + 1)].cast("Q")[CELL_HELD] = step

    def _record(self) -> Arena:
        """The one whose turn it is."""
        return self._client.records[self._turn % 2]

    def _room(self, layout: Layout) -> Arena | None:
        """Where a boundary group of this size is recorded; None: nowhere.

        Raises GuardError where the host has no memory for it.
        """
        if layout.boundary_end > LARGEST_BYTES:
            self._tell(f"buffers and the like take more than {format_bytes(LARGEST_BYTES)}")
            return None
        if layout.image_bytes > self._client.image_bytes:
            return None  # larger slots are on their way
        made = self._client.records
        if not made or records.capacity_of(made[0]) < layout.image_bytes:
            size = records.record_bytes(layout.image_bytes)
            name = f"autockpt-boundary-r{self._rank.job.rank}"
            written = layout.boundary_end + OWN_BYTES + records.HEAD_BYTES
            require_headroom(2 * written, what=name)
            self._client.give_records(
                [Arena.create_sparse(size, name=f"{name}-{turn}", huge=False) for turn in range(2)]
            )
        record = self._record()
        records.clear_head(record)
        return record

    # ------------------------------------------------------------------ another rank died

    def seal(self, order: wire.SealBoundary, slots: list[Arena]) -> None:
        """On the listening thread; the work is done on one of its own."""
        late_threads.start(lambda: self._answer(order, slots), "autockpt-boundary")

    def _answer(self, order: wire.SealBoundary, slots: list[Arena]) -> None:
        wrote: tuple[int, ...] = ()
        proofs: tuple[p.ReplicaProof, ...] = ()
        try:
            with self._lock:
                held = self._held
                if held is None or self._generation != order.generation:
                    refusal = "it has begun a step of its optimizer since"
                else:
                    proofs = _proofs(held)
                    refusal, wrote = self._seal(held, order, slots, proofs)
        except Exception as error:
            refusal = f"{type(error).__name__}: {error}"
        for slot in slots:
            slot.close()
        self._client.send(
            wire.BoundarySealed(
                rank=self._rank.job.rank, generation=order.generation, ranks=wrote,
                replicas=proofs, refusal=refusal,
            )
        )  # fmt: skip

    def _seal(
        self,
        held: HeldBoundary,
        order: wire.SealBoundary,
        slots: list[Arena],
        proofs: tuple[p.ReplicaProof, ...],
    ) -> tuple[str, tuple[int, ...]]:
        """(why it is impossible, dead ranks whose shards were written)."""
        digest = held.digest
        if any(theirs != digest for theirs in order.replicas):
            return "the dead rank held other values", ()
        save, slot = self._own_save(order.generation)
        if save is None:
            return "no slot for its own shard", ()
        if slot is not None:
            assert self._rank.snapshotter is not None
            counter = self._rank.snapshotter.counters.of(slot)
            counter.set(0)
            self._saver.report_began(save, held.recipe.layout)
            held.copy_into(self._client.slots[slot])
        refusal = ""
        for rank, theirs in zip(order.ranks, slots, strict=True):
            refusal = held.copy_for(rank, theirs, self._rank.live)
            if refusal:
                break
        changed = held.changed()
        if changed or self._held is not held:
            refusal = f"changed since the boundary: {', '.join(changed[:5]) or 'by a step'}"
        if slot is not None and refusal:
            self._client.withdraw(save, refusal)
        elif slot is not None:
            counter.set(held.recipe.layout.image_bytes)
            self._client.report_copied(save, proofs)
        return refusal, () if refusal else order.ranks

    def _own_save(self, generation: Generation) -> tuple[SaveHandle | None, int | None]:
        """(the save of this boundary, its slot where it is to be copied now)."""
        saves = self._client.saves
        save = saves.get(generation)
        if save is not None and save.began_s is not None and save.reason is None:
            return save, None  # an ordinary one, which its own threads end
        save = self._client.ask(generation, disk=False)
        self._client.wait_until(lambda: save.is_answered, GRANT_S)
        slot = saves.begin(save, disk=False)
        return (None, None) if slot is None else (save, slot)

    def await_seal(self) -> None:
        """This rank fails, maybe because another one died: it lives until its state is copied."""
        deadline = time.monotonic() + SEAL_S + GRANT_S
        while self._held is not None and time.monotonic() < deadline:
            status = keeper_status(self._rank.job.run_directory, self._rank.job.node)
            if status is None or not status.sealing:
                return
            time.sleep(LOOK_S)


def _proofs(held: HeldBoundary) -> tuple[p.ReplicaProof, ...]:
    return tuple(
        p.ReplicaProof(
            members=len(one.members), among=one.among, digest=one.digest(), group="", readings=()
        )
        for one in held.replicas
    )


def _obstacle(job: Job, others: Any) -> str:
    """Why no rank of this job can hold a boundary.

    Asking for the state of `others` must be no collective: torch's own schedulers and scalers.
    """
    if job.world_size == 1:
        return "there is no other rank"
    if len(set(job.nodes)) > 1:
        return "the ranks are on several nodes"
    foreign = [
        other
        for other in inner_objects(others)
        if type(other).__module__.partition(".")[0] != "torch"
    ]
    return f"{type(foreign[0]).__name__}, which is attached, is not torch's own" if foreign else ""
