"""The newest boundary, kept so that the death of another rank loses no iteration.

At a boundary this rank records its own small state in memory that its keeper sees: buffers, random
state, position in the data.  Parameters and moments stay where they are.  Another rank may
die before the next step of an optimizer.  Then a thread of ours copies them, for this rank and for
the dead one; the training thread may stand in a collective.
"""

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from autockpt.executors.image.layout.plan import Layout
from autockpt.executors.keeper import wire
from autockpt.executors.keeper.client.saves import SaveHandle
from autockpt.executors.keeper.launch import keeper_status
from autockpt.executors.keeper.saving import boundary_record as records
from autockpt.executors.keeper.saving.last_boundary import SEAL_S
from autockpt.executors.keeper.slots import CELL_HELD
from autockpt.executors.linux.memory import Arena
from autockpt.executors.linux.signal_errors import is_from_handler
from autockpt.executors.protocol import messages as p
from autockpt.executors.snapshot.held_boundary import HeldBoundary
from autockpt.session.base import RankState
from autockpt.session.place.training_position import TrainingPosition
from autockpt.session.saving import Saver
from autockpt.values.generation import Generation

LARGEST_BYTES = 64 * 2**20
"""The largest recorded boundary group: a larger one costs too much at every boundary."""
SHARE = 0.01
"""The fraction of the training's time that records may take."""
LONGEST_STRIDE = 64
COSTS = 16
GRANT_S = 2.0
LOOK_S = 0.02


class BoundaryHolder:
    """Holds the newest boundary of one rank."""

    def __init__(self, rank: RankState, position: TrainingPosition, saver: Saver) -> None:
        self._rank, self._client = rank, rank.client
        self._position, self._saver = position, saver
        job = rank.job
        self._is_on = (
            job.goal.restart.last_boundary == "on" and job.world_size > 1
            and len(set(job.nodes)) == 1 and _is_local(rank.live.others.values())
        )  # fmt: skip
        self._is_forced = job.goal.restart.last_boundary == "on"
        self._held: HeldBoundary | None = None
        self._generation: Generation | None = None
        self._lock = threading.Lock()
        """Held while the state must not change."""
        self._is_overrun = False
        """The training could wait no longer, and has changed it."""
        self._after: Callable[[], None] | None = None
        self._costs_s: deque[float] = deque(maxlen=COSTS)
        """Costs of the newest records, in seconds."""
        self._turn = 0
        self._is_settled = False

    def is_wanted(self, step: int) -> bool:
        """The state of this boundary is to be held, if it can be."""
        if not self._is_on or not self._client.slots or self._client.window_bytes:
            return False
        return step % self._stride() == 0

    def _stride(self) -> int:
        """Boundaries between two records; a power of 2, so that ranks record the same ones."""
        if self._is_forced:
            return 1
        took_s = self._rank.clock.newest_s or 0.0
        cost_s = min(self._costs_s, default=0.0)  # the least: others had the core else
        stride = 1
        while cost_s > SHARE * stride * took_s and stride < LONGEST_STRIDE:
            stride *= 2
        return stride

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
        began_s = time.monotonic()
        rng, progress = None, self._position.progress()
        if before is not None:
            rng, progress["data"] = before
        try:
            held = snapshotter.hold(progress, self._room, rng=rng)
        except Exception as error:
            if is_from_handler(error):
                raise
            self._is_on = False
            self._rank.report_degraded("last boundary", f"{type(error).__name__}: {error}")
            return False
        if held is None:
            return False
        layout = held.recipe.layout
        records.write_head(
            self._record(),
            records.RecordHead(
                generation=generation, image_bytes=layout.image_bytes,
                boundary_end=layout.boundary_end, layout_digest=layout.digest,
                replicas=held.digest, own_ranges=held.plan.own_ranges,
            ),
        )  # fmt: skip
        self._held, self._generation, self._after = held, generation, after
        self._turn += 1
        self._show(generation.step)
        if self._is_settled:  # else memory was made, and what to copy was worked out
            self._costs_s.append(time.monotonic() - began_s)
        self._is_settled = True
        return True

    def release(self) -> None:
        """The state is about to change; waits for a copy that is under way."""
        if self._held is None:
            return
        if self._lock.acquire(timeout=SEAL_S):
            self._forget()
            self._lock.release()
        else:
            self._is_overrun = True
            self._forget()
        after, self._after = self._after, None
        if after is not None:
            after()

    def _forget(self) -> None:
        self._held, self._generation = None, None
        self._show(0)

    def _show(self, step: int) -> None:
        self._client.board.view[: 8 * (CELL_HELD + 1)].cast("Q")[CELL_HELD] = step

    def _record(self) -> Arena:
        """The one whose turn it is."""
        return self._client.records[self._turn % 2]

    def _room(self, layout: Layout) -> Arena | None:
        """Where a boundary group of this size is recorded; None: nowhere."""
        if layout.boundary_end > LARGEST_BYTES or layout.image_bytes > self._client.image_bytes:
            return None
        made = self._client.records
        if not made or records.capacity_of(made[0]) < layout.image_bytes:
            size = records.record_bytes(layout.image_bytes)
            name = f"autockpt-boundary-r{self._rank.job.rank}"
            self._is_settled = False
            self._client.give_records(
                [Arena.create_sparse(size, name=f"{name}-{turn}") for turn in range(2)]
            )
        record = self._record()
        records.clear_head(record)
        return record

    # ------------------------------------------------------------------ another rank died

    def seal(self, order: wire.SealBoundary, slots: list[Arena]) -> None:
        """On the listening thread; the work is done on one of its own."""
        threading.Thread(
            target=self._answer, args=(order, slots), name="autockpt-boundary", daemon=True
        ).start()

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
        if changed or self._is_overrun:
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
        p.ReplicaProof(members=one.members, digest=one.digest(), group="", readings=())
        for one in held.replicas
    )


def _is_local(others: Any) -> bool:
    """Asking for their state is no collective: torch's own schedulers and scalers alone."""
    return all(type(other).__module__.partition(".")[0] == "torch" for other in others)
