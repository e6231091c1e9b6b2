"""After the death of a rank: the boundary that the others still hold becomes a checkpoint.

The keeper answers for the dead rank.  To the protocol this is a save as any other, and a loss that
it hears of a little later.  The bytes come from the record of the dead rank, and from a rank that
holds the same parameters and moments.  Where anything does not fit, the protocol hears of the loss
at once.
"""

import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from autockpt.executors.keeper import wire
from autockpt.executors.keeper.saving.boundary_record import copy_own, fill_slot, whole_records
from autockpt.executors.keeper.saving.shards import ShardSaves
from autockpt.executors.keeper.slots import CELL_HELD, MemoryTable
from autockpt.executors.protocol import messages as p
from autockpt.executors.protocol.node.state import NodeState
from autockpt.values.generation import Generation

SEAL_S = 5.0
"""Survivors that have not sealed by then are ended as they always were."""
REACH_S = 1.0
"""A survivor may still be within the step that the dead rank had ended."""
FOLLOW_S = 0.3
"""Survivors that hold the boundary before the dead rank's newest one may still reach that."""


class Lost(Protocol):
    """A trainer, as far as it matters here."""

    rank: int
    leaving: str


def choose(
    recorded: Collection[Collection[Generation]], held: Collection[int], waited_s: float
) -> Generation | str | None:
    """The boundary to seal, or why there is none; None: look again.

    `recorded`: by dead rank the boundaries of its records.  `held`: by survivor the step of the
    boundary whose state it has, 0 while it has none.
    """
    common = set.intersection(*map(set, recorded)) if recorded else set()
    if not common:
        return "the dead ranks left no record of one boundary"
    newest = max(common)
    if any(step > newest.step for step in held):
        return "a survivor is ahead of the dead rank's last boundary"
    at = {generation.step: generation for generation in common}
    if len(set(held)) == 1 and (step := next(iter(held))) in at:
        follows = step < newest.step and waited_s < FOLLOW_S
        return None if follows else at[step]
    return None if waited_s < REACH_S else "a survivor had begun a step of its optimizer"


@dataclass(slots=True)
class _Attempt:
    """One boundary that is being sealed."""

    dead: dict[int, Lost]
    began_s: float
    generation: Generation | None = None
    """None: it is not known yet."""
    unwritten: set[int] = field(default_factory=set)
    """Dead ranks whose shard is not written yet."""


class LastBoundary:
    """One of a keeper; every method runs in its thread."""

    def __init__(
        self,
        *,
        state: Callable[[], NodeState],
        memory: MemoryTable,
        shards: ShardSaves,
        tell: Callable[[p.NodeEvent], None],
        send: Callable[[int, Any, tuple[int, ...]], None],
        lost: Callable[[Any], None],
        report: Callable[[Generation | None, tuple[int, ...], float, str], None],
    ) -> None:
        """`lost` gets each dead trainer in the end, and `report` the outcome."""
        self._state, self._memory, self._shards = state, memory, shards
        self._tell, self._send, self._lost, self._report = tell, send, lost, report
        self._attempt: _Attempt | None = None

    @property
    def is_active(self) -> bool:
        """A boundary is being sealed, or may be."""
        return self._attempt is not None

    def put_off(self, gone: Lost, trainers: Mapping[int, Lost]) -> bool:
        """True: `lost` gets this trainer later."""
        attempt = self._attempt
        if attempt is not None and gone.rank in attempt.dead:
            return attempt.dead[gone.rank] is gone
        obstacle = self._obstacle(trainers)
        if gone.leaving or obstacle:
            if attempt is None and not gone.leaving:
                self._tell_unsealed(gone, trainers, obstacle)
            self.end("another rank was lost")
            return False
        if attempt is None:
            if not whole_records(self._memory.of(gone.rank).records):
                self._tell_unsealed(gone, trainers, "it left no whole record")
                return False
            self._attempt = _Attempt(dead={gone.rank: gone}, began_s=time.monotonic())
        elif attempt.generation is not None:
            self.end(f"rank {gone.rank} died as well")
            return False
        else:
            attempt.dead[gone.rank] = gone
        if len(self._attempt.dead if self._attempt else ()) == len(trainers):
            self.end("no rank is left")
            return True
        self.look(trainers)
        return True

    def _obstacle(self, trainers: Mapping[int, Lost]) -> str:
        """Why none can be sealed; "": all ranks are here, and train."""
        state = self._state()
        if len(set(state.nodes)) != 1 or len(trainers) != len(state.nodes):
            return "other ranks are missing here"
        if state.phase != "open":
            return "the ranks were not training"
        leaving = any(trainer.leaving for trainer in trainers.values())
        return "another rank was leaving" if leaving else ""

    def _tell_unsealed(self, gone: Lost, trainers: Mapping[int, Lost], reason: str) -> None:
        """Of the first death of a start, where the rank was to record its boundaries.

        The launcher ends the other ranks behind it.
        """
        is_first = len(trainers) == len(self._state().nodes)
        if is_first and self._memory.of(gone.rank).records:
            self._report(None, (gone.rank,), 0.0, reason)

    def look(self, trainers: Mapping[int, Lost]) -> None:
        """Goes on where it can; called often while it is active."""
        attempt = self._attempt
        if attempt is None:
            return
        waited_s = time.monotonic() - attempt.began_s
        if attempt.generation is None:
            held = [self._memory.of(r).cell(CELL_HELD) for r in trainers if r not in attempt.dead]
            recorded = [whole_records(self._memory.of(rank).records) for rank in attempt.dead]
            chosen = choose(recorded, held, waited_s)
            if isinstance(chosen, str):
                self.end(chosen)
            elif chosen is not None:
                self._order(attempt, chosen, trainers)
            return
        committed = self._state().memory_committed
        if committed is not None and committed >= attempt.generation:
            self.end("")
        elif waited_s > SEAL_S:
            self.end(f"the survivors did not seal it within {SEAL_S:.0f} s")

    def _order(
        self, attempt: _Attempt, generation: Generation, trainers: Mapping[int, Lost]
    ) -> None:
        attempt.generation = generation
        descriptors: list[int] = []
        heads: list[str] = []
        for rank in sorted(attempt.dead):
            slot = self._granted(rank, generation)
            if slot is None:
                if self._state().ranks[rank].slots.sealed(generation) is None:
                    self.end(f"no slot of rank {rank} may be overwritten")
                    return
                continue
            memory = self._memory.of(rank)
            head, record = whole_records(memory.records)[generation]
            arena = memory.slots[slot]
            if head.image_bytes > memory.image_capacity or arena.fd is None:
                self.end(f"the image of rank {rank} has outgrown its slot")
                return
            began = self._shards.began(rank, generation)
            if began is None:
                memory.set_copied(slot, 0)
                fill_slot(arena, head, record)
            elif began.layout_digest == head.layout_digest:  # its boundary group was copied first
                copy_own(arena, head, record)
            else:
                self.end(f"the image of rank {rank} has another form")
                return
            attempt.unwritten.add(rank)
            descriptors.append(arena.fd)
            heads.append(head.replicas)
        for rank in [rank for rank in trainers if rank not in attempt.dead]:
            order = wire.SealBoundary(
                rank=rank, generation=generation, ranks=tuple(sorted(attempt.unwritten)),
                replicas=tuple(heads),
            )  # fmt: skip
            self._send(rank, order, tuple(descriptors))

    def _granted(self, rank: int, generation: Generation) -> int | None:
        """The slot of the dead rank for this boundary, asked for in its place."""
        self._tell(p.SaveRequested(rank=rank, generation=generation, step=generation.step))
        slot = self._state().ranks[rank].slots.writing(generation)
        return None if slot is None or slot.doomed else slot.index

    def answered(self, message: wire.BoundarySealed) -> None:
        """A survivor has sealed its own shard and written shards of dead ranks; or it cannot."""
        attempt = self._attempt
        if attempt is None or attempt.generation != message.generation:
            return
        if message.refusal:
            self.end(f"rank {message.rank}: {message.refusal}")
            return
        for rank in set(message.ranks) & attempt.unwritten:
            attempt.unwritten.discard(rank)
            self._seal(rank, message)

    def _seal(self, rank: int, message: wire.BoundarySealed) -> None:
        """The shard of a dead rank is whole: the keeper reports it in the place of the rank."""
        memory, generation = self._memory.of(rank), message.generation
        found = whole_records(memory.records).get(generation)
        slot = self._state().ranks[rank].slots.writing(generation)
        like = self._shards.began(message.rank, generation)
        if found is None or slot is None or like is None:
            self.end(f"the slot of rank {rank} is gone")
            return
        head = found[0]
        if self._shards.began(rank, generation) is None:
            began = replace(
                like, rank=rank, slot=slot.index, image_bytes=head.image_bytes,
                boundary_end=head.boundary_end, layout_digest=head.layout_digest, codec="none",
                class_ranges="[]", metrics="",
            )  # fmt: skip
            self._shards.snapshot_began(began)
        memory.set_copied(slot.index, head.image_bytes)
        self._shards.snapshot_copied(
            wire.SnapshotCopied(rank=rank, generation=generation, replicas=message.replicas)
        )

    def end(self, reason: str) -> None:
        """Tells of the losses; `reason`: why the boundary is not sealed, "" where it is."""
        attempt, self._attempt = self._attempt, None
        if attempt is None:
            return
        took_s = time.monotonic() - attempt.began_s
        self._report(attempt.generation, tuple(sorted(attempt.dead)), took_s, reason)
        for trainer in attempt.dead.values():
            self._lost(trainer)
