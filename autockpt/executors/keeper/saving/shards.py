"""The shards of a node on their way from a slot to storage: one pipeline each.

Belongs to the keeper's loop: every method runs in its thread, and what pipelines report comes back
through `post`.  The protocol decides which shards are saved, dropped or tried again.
"""

import contextlib
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace

from autockpt.executors.image.container import (
    HEAD_BYTES,
    ImageIndex,
    chunk_digest,
    header_bytes,
)
from autockpt.executors.image.nan_check import Floats, floats_in, sampled_nan, sick_state
from autockpt.executors.keeper import wire
from autockpt.executors.keeper.event_recorder import EventRecorder
from autockpt.executors.keeper.saving.delta_bases import Base, Bases
from autockpt.executors.keeper.saving.drain import Drain
from autockpt.executors.keeper.saving.shard_writer import PersistTarget, ShardOutcome, ShardPipeline
from autockpt.executors.keeper.slots import MemoryTable, RankMemory
from autockpt.executors.protocol import messages as p
from autockpt.executors.storage.directory.directory import CheckpointDirectory
from autockpt.executors.storage.shard_file import is_full
from autockpt.values.errors import CorruptCheckpointError
from autockpt.values.generation import Generation
from autockpt.values.record import parse_json, to_json

PATIENCE_S = 20.0
"""A storage that takes nothing for so long hangs, until it is known to need longer."""
SLOWEST_FACTOR = 4.0
MAX_LAYOUTS = 64
"""Whose places are remembered: one per rank of the node, and a few that were replaced."""


@dataclass(slots=True)
class Shard:
    """A shard of one generation on its way."""

    slot: int
    began: wire.SnapshotBegan | None = None
    copied: bool = False
    replicas: tuple[p.ReplicaProof, ...] = ()
    index: ImageIndex | None = None
    persist_attempt: int = 0
    """The attempt that StartPersist asked for, 0: memory only."""
    pipeline: ShardPipeline | None = None
    target: PersistTarget | None = None
    """The target of the pipeline's present write."""
    sick: str = ""
    """A tensor with a NaN, or empty."""
    bases: int | None = None
    """Written to the end, and so many others are needed to read it."""
    base: Base | None = None
    """Itself, for later ones, once it is durable."""
    drain: Drain | None = None
    """It streams: no memory holds it whole."""
    sealing: p.ShardSealed | None = None
    """The report of a streamed shard, sent when its file is whole and not before."""
    stalled: bool = False
    """The keeper has reported that the storage hangs."""


@dataclass(slots=True)
class _Described:
    """The index of the image that one pipeline works on; its threads hand it on."""

    index: ImageIndex | None
    """None until the digests are known."""
    written: ImageIndex | None = None
    """The index as it stands beside the shard file."""


class ShardSaves:
    """The images that the ranks of this node have in slots, by rank and generation."""

    def __init__(
        self,
        *,
        directory: CheckpointDirectory,
        run_id: str,
        memory: MemoryTable,
        journal: EventRecorder,
        post: Callable[[Callable[[], None]], None],
        tell: Callable[[p.NodeEvent], None],
        world_size: Callable[[int], int],
        degrade: Callable[[str, str], None],
    ) -> None:
        self._directory, self._run_id = directory, run_id
        self._memory, self._journal = memory, journal
        self._post, self._tell = post, tell
        self._world_size, self._degrade = world_size, degrade
        self._all: dict[tuple[int, Generation], Shard] = {}
        self._floats: dict[tuple[str, int], tuple[Floats, ...]] = {}
        """By digest of the header and end of the boundary group."""
        """Where the numbers of a layout stand."""
        self.troubles: dict[Generation, str] = {}
        """The storage's errors for streamed generations, which end with them."""
        self._patience_s = PATIENCE_S
        self._slowest_s = 0.0
        """The longest write that ended."""
        self._objection = ""
        """The last objection to direct I/O: it is reported once."""
        self._bases = Bases()
        self._settled: dict[int, threading.Event] = {}
        """By rank, of its newest snapshot: digests are announced in the order of the snapshots.
        The event and not its pipeline, which would keep a slot alive that was replaced."""

    @property
    def busy(self) -> bool:
        """A pipeline works."""
        return any(shard.pipeline is not None for shard in self._all.values())

    def granted(self, grant: p.GrantSlot) -> None:
        """Forget the slot's former contents."""
        for (rank, generation), shard in list(self._all.items()):
            if rank == grant.rank and shard.slot == grant.slot:
                self._forget(rank, generation, shard)
        self._memory.of(grant.rank).clear(grant.slot)
        self._all[(grant.rank, grant.generation)] = Shard(slot=grant.slot)

    def look_for_stalls(self) -> None:
        """Says once of a write that the storage takes nothing of it.

        Patience grows with the storage's longest write so far and with every such stall.  So a slow
        storage is not taken for one that hangs for ever.
        """
        for (rank, generation), shard in self._all.items():
            pipeline = shard.pipeline
            if pipeline is None or shard.target is None or shard.stalled:
                continue
            if pipeline.still_s > max(self._patience_s, SLOWEST_FACTOR * self._slowest_s):
                shard.stalled = True
                self._patience_s *= 2
                self._degrade(
                    "persist",
                    f"{generation} of rank {rank}: the storage took nothing for "
                    f"{pipeline.still_s:.0f} s; memory gets its slot when it needs one",
                )
                self._tell(
                    p.PersistStalled(
                        rank=rank, generation=generation, attempt=shard.persist_attempt
                    )
                )

    def adopted(self, rank: int) -> None:
        """Slots of this rank were found sealed."""
        for slot, index in self._memory.of(rank).sealed().items():
            self._all[(rank, index.generation)] = Shard(slot=slot, copied=True, index=index)

    def leave(self, rank: int, *, sealed: bool) -> None:
        """Let go of shards being filled (their trainer died), or of everything if `sealed`."""
        for (owner, generation), shard in list(self._all.items()):
            if owner == rank and (sealed or not shard.copied):
                self._forget(rank, generation, shard)

    def snapshot_began(self, began: wire.SnapshotBegan) -> None:
        """The copy into a granted slot has begun: follow it."""
        shard = self._all.get((began.rank, began.generation))
        if shard is None or shard.slot != began.slot:
            return  # granted and withdrawn meanwhile; the trainer will be told
        shard.began = began
        self._journal.snapshot_began(began.generation, began.step, began.at_s)
        self._start_pipeline(began.rank, began.generation, shard)

    def began(self, rank: int, generation: Generation) -> wire.SnapshotBegan | None:
        """The message with which a snapshot began; None: it has not begun."""
        shard = self._all.get((rank, generation))
        return None if shard is None else shard.began

    def snapshot_copied(self, message: wire.SnapshotCopied) -> None:
        """Every byte is there, and proven."""
        shard = self._all.get((message.rank, message.generation))
        if shard is None or shard.began is None:
            return
        shard.copied, shard.replicas = True, message.replicas
        if shard.pipeline is not None:
            shard.pipeline.sealed()

    def snapshot_torn(self, message: wire.SnapshotTorn) -> None:
        """It is worthless, or was given back unused."""
        shard = self._all.get((message.rank, message.generation))
        if shard is not None:
            self._forget(message.rank, message.generation, shard)
        self._tell(
            p.ShardDiscarded(
                rank=message.rank, generation=message.generation, reason=message.reason
            )
        )

    def _forget(self, rank: int, generation: Generation, shard: Shard) -> None:
        self._all.pop((rank, generation), None)
        if shard.base is not None:
            self._bases.drop(shard.base)
        if shard.pipeline is not None:
            shard.pipeline.cancel()
            shard.pipeline = None
        memory = self._memory.of(rank)
        if shard.drain is not None and memory.streams:
            memory.clear(shard.slot)

    def durable(self, generation: Generation) -> None:
        """It is committed: later saves may be stored as differences to it."""
        for (rank, other), shard in self._all.items():
            if other != generation or shard.drain is not None:
                continue
            if shard.index is not None and shard.bases is not None:
                image = self._memory.of(rank).image(shard.slot, shard.index.image_bytes)
                shard.base = Base(image, shard.index, bases=shard.bases)
                self._bases.add(shard.base)

    def damaged(self, generation: Generation) -> None:
        """It was read back and differs, or is suspect: nothing more may need it."""
        for (_, other), shard in self._all.items():
            if other == generation and shard.base is not None:
                self._bases.drop(shard.base)

    def forget_bases(self) -> None:
        """Nothing that was durable is there any more: no later save may be a difference to it."""
        for shard in self._all.values():
            if shard.base is not None:
                self._bases.drop(shard.base)
                shard.base = None

    def _start_pipeline(self, rank: int, generation: Generation, shard: Shard) -> None:
        memory = self._memory.of(rank)
        began, index = shard.began, shard.index
        image_bytes = index.image_bytes if index is not None else 0
        if began is not None:
            image_bytes = began.image_bytes
        described = _Described(index)
        target = None
        if shard.persist_attempt:
            target = self._target(rank, generation, shard, described)
        shard.target, shard.stalled = target, False
        world_size = self._world_size(rank)
        shard.drain = self._drain(memory, shard)
        shard.pipeline = ShardPipeline(
            memory.image(shard.slot, image_bytes),
            chunk_bytes=index.chunk_bytes if index else _chunk_bytes(memory, began),
            available=lambda: memory.copied(shard.slot),
            streaming=began is None or began.streaming or memory.streams,
            drain=shard.drain,
            known=index,
            target=target,
            after=self._settled.get(rank),
            inspect=lambda image: self._inspect(shard, generation, image),
            on_digested=lambda digests: self._describe(
                rank, generation, shard, described, digests, world_size
            ),
            on_undigested=lambda error: self._post(
                lambda: self._undigested(rank, generation, shard, error)
            ),
            on_persisted=lambda outcome: self._post(
                lambda: self._persisted(rank, generation, shard, target, outcome, described)
            ),
            on_failed=lambda error: self._post(
                lambda: self._persist_failed(rank, generation, shard, target, error)
            ),
        )
        if index is None:
            self._settled[rank] = shard.pipeline.settled
        if shard.copied:
            shard.pipeline.sealed()
        shard.pipeline.start()

    def _drain(self, memory: RankMemory, shard: Shard) -> Drain | None:
        began, board = shard.began, memory.board
        if not memory.streams or began is None:
            return None
        return Drain(
            memory.slots[shard.slot], image_bytes=began.image_bytes,
            chunk_bytes=memory.chunk_bytes, beyond=began.boundary_end,
            told=lambda nbytes: memory.set_drained(board, nbytes),
        )  # fmt: skip

    def _target(
        self, rank: int, generation: Generation, shard: Shard, described: _Described
    ) -> PersistTarget:
        folder = self._directory.generation_path(generation)
        began, attempt = shard.began, shard.persist_attempt
        memory = self._memory.of(rank)
        writers = began.writers if began else 2
        if memory.room is not None and memory.streams:  # a chunk each, and one that is copied
            writers = max(1, min(writers, memory.room.window_bytes // memory.chunk_bytes - 1))
        codec = began.codec if began and not memory.streams else "none"
        base = self._base(began) if began else None
        return PersistTarget(
            path=os.path.join(folder, _shard_name(rank, attempt)),
            prepare=lambda: self._directory.create_generation(generation),
            spare=lambda: self._spare(rank, attempt),
            writers=writers,
            direct_io=began.direct_io if began else True,
            codec=codec,  # of a streamed image none: frames need more memory than the window has
            codec_ranges=began.ranges if began else (),
            base=base,
            finish=lambda outcome: self._write_index(
                os.path.join(folder, _index_name(rank, attempt)), described, outcome, codec, base
            ),
        )

    def _write_index(
        self, path: str, described: _Described, outcome: ShardOutcome, codec: str, base: Base | None
    ) -> None:
        """Write the index of a durable shard file, on the pipeline's thread.

        Raises StorageError.
        """
        assert described.index is not None
        described.written = replace(
            described.index,
            stored=outcome.stored,
            codec=codec if outcome.stored else "none",
            base=base.index.generation if base is not None and outcome.needs_base else None,
        )
        self._directory.write_index(path, to_json(described.written).encode())

    def _base(self, began: wire.SnapshotBegan) -> Base | None:
        """Return the base of this save, if it may have one."""
        return self._bases.for_save(
            began.rank, began.generation, run_id=self._run_id, image_bytes=began.image_bytes,
            chunk_bytes=_chunk_bytes(self._memory.of(began.rank), began), longest=began.chain,
        )  # fmt: skip

    def _spare(self, rank: int, attempt: int) -> str | None:
        """A retired file to write over; not after a failure, which may have been a full disk."""
        if attempt == 1:
            return self._directory.spares.take(rank)
        self._directory.spares.clear()
        return None

    def _inspect(self, shard: Shard, generation: Generation, image: memoryview) -> None:
        """On a thread of the pipeline: the verdict on the numbers."""
        if shard.began is None:
            return
        header = image[: shard.began.boundary_end]
        with contextlib.suppress(CorruptCheckpointError):
            header = header[: header_bytes(image, len(image))]
        key = (chunk_digest(header), shard.began.boundary_end)
        if key not in self._floats:
            floats = floats_in(image, beyond=shard.began.boundary_end)
            self._floats = dict([*self._floats.items(), (key, floats)][-MAX_LAYOUTS:])
        shard.sick = sampled_nan(self._floats[key], image, generation.step)

    def _describe(
        self,
        rank: int,
        generation: Generation,
        shard: Shard,
        described: _Described,
        digests: tuple[str, ...],
        world_size: int,
    ) -> None:
        """On a thread of the pipeline: the index of the image that was digested."""
        began, memory = shard.began, self._memory.of(rank)
        assert began is not None
        # Not when it is most of a chunk: that one will be read anyway.  A streamed one is gone.
        head = began.boundary_end if began.boundary_end <= HEAD_BYTES else 0
        head = 0 if shard.drain is not None else head
        described.index = index = ImageIndex(
            run_id=self._run_id,
            generation=generation,
            step=began.step,
            rank=rank,
            world_size=world_size,
            layout_digest=began.layout_digest,
            across_nodes=began.across_nodes,
            image_bytes=began.image_bytes,
            chunk_bytes=_chunk_bytes(memory, began),
            digests=digests,
            head_bytes=head,
            head_digest=chunk_digest(memory.image(shard.slot, head)) if head else "",
        )
        self._post(lambda: self._digested(rank, generation, shard, index))

    def _digested(self, rank: int, generation: Generation, shard: Shard, index: ImageIndex) -> None:
        if self._all.get((rank, generation)) is not shard or shard.began is None:
            return
        memory, shard.index = self._memory.of(rank), index
        if shard.drain is not None:
            shard.sick = shard.drain.sick
        sealed = p.ShardSealed(
            rank=rank,
            generation=generation,
            root=index.root,
            bytes=index.image_bytes,
            chunk_bytes=index.chunk_bytes,
            layout_digest=index.layout_digest,
            across_nodes=index.across_nodes,
            health="suspect" if shard.sick else "good",
            replicas=shard.replicas,
            held=shard.drain is None,
        )
        if shard.drain is not None:
            shard.sealing = sealed
            if shard.target is None:
                self._lost(rank, generation, shard, "it was to be written and is not")
        else:
            memory.seal(shard.slot, index)
            if shard.target is None:
                shard.pipeline = None
            self._tell(sealed)
        if shard.sick:
            self._degrade("health", sick_state(generation, rank, shard.sick))
        if shard.persist_attempt and shard.target is None and shard.drain is None:
            self._start_pipeline(rank, generation, shard)

    def _lost(self, rank: int, generation: Generation, shard: Shard, reason: str) -> None:
        """A streamed image that will not be on storage is nowhere."""
        self._forget(rank, generation, shard)
        torn = p.ShardDiscarded(rank=rank, generation=generation, reason=reason)
        self._post(lambda: self._tell(torn))  # the protocol may be at work

    def _undigested(
        self, rank: int, generation: Generation, shard: Shard, error: Exception
    ) -> None:
        """Give up an image whose integrity is unknown: as good as torn."""
        if self._all.get((rank, generation)) is not shard:
            return
        self._forget(rank, generation, shard)
        self._degrade("memory tier", f"{generation} of rank {rank} has no digests: {error!r}")
        self._tell(p.ShardDiscarded(rank=rank, generation=generation, reason=repr(error)))

    def _is_written(
        self, rank: int, generation: Generation, shard: Shard, target: PersistTarget | None
    ) -> bool:
        """Still, to that file: what came of it may have waited behind an abort."""
        return self._all.get((rank, generation)) is shard and shard.target is target

    def _persisted(
        self,
        rank: int,
        generation: Generation,
        shard: Shard,
        target: PersistTarget | None,
        outcome: ShardOutcome,
        described: _Described,
    ) -> None:
        """Its file and its index are durable."""
        index = described.written
        if index is None or not self._is_written(rank, generation, shard, target):
            return
        attempt = self._end_write(shard)
        if outcome.objection not in ("", self._objection):
            self._objection = outcome.objection
            self._degrade("direct I/O", f"{outcome.objection}; shards go through the page cache")
        base = target.base if target is not None and outcome.needs_base else None
        shard.bases = 0 if base is None else base.bases + 1
        record: p.Record = {
            "rank": rank,
            "file": _shard_name(rank, attempt),
            "index": _index_name(rank, attempt),
            "bytes": outcome.stored_bytes,
            "root": index.root,
            "layout_digest": index.layout_digest,
            "chunks": len(index.digests),
            "chunk_bytes": index.chunk_bytes,
            **({"across_nodes": True} if index.across_nodes else {}),
            **({"base": index.base.name} if index.base is not None else {}),
        }
        if shard.began is not None and shard.began.metrics:
            record["metrics"] = parse_json(shard.began.metrics)
        self._slowest_s = max(self._slowest_s, outcome.write_s)
        self._patience_s = PATIENCE_S
        self._journal.shard_written(
            generation, index.image_bytes, outcome.stored_bytes, outcome.write_s
        )
        sealed, shard.sealing = shard.sealing, None
        if sealed is not None:
            self._tell(sealed)
        self._tell(
            p.ShardPersisted(rank=rank, generation=generation, attempt=attempt, record=record)
        )

    def _end_write(self, shard: Shard) -> int:
        """Forget the write; return its attempt."""
        attempt, shard.persist_attempt = shard.persist_attempt, 0
        shard.pipeline = shard.target = None
        return attempt

    def _persist_failed(
        self,
        rank: int,
        generation: Generation,
        shard: Shard,
        target: PersistTarget | None,
        error: Exception,
    ) -> None:
        if not self._is_written(rank, generation, shard, target):
            return
        attempt = self._end_write(shard)
        self._degrade("persist", str(error))
        if shard.drain is not None:
            self.troubles[generation] = str(error)
            self._lost(rank, generation, shard, str(error))
            return
        failed = p.PersistFailed(
            rank=rank, generation=generation, attempt=attempt, reason=str(error),
            full=is_full(error),
        )  # fmt: skip
        self._tell(failed)

    def start_persist(self, order: p.StartPersist) -> None:
        """To storage as well: at once, or when it is sealed."""
        shard = self._all.get((order.rank, order.generation))
        if shard is None or shard.drain is not None:
            held = "the slot holds something else" if shard is None else "no memory holds it"
            failed = p.PersistFailed(
                rank=order.rank, generation=order.generation, attempt=order.attempt,
                reason=held, retryable=False,
            )  # fmt: skip
            self._post(lambda: self._tell(failed))
            return
        shard.persist_attempt = order.attempt
        if shard.index is not None:
            self._start_pipeline(order.rank, order.generation, shard)

    def abort_persist(self, order: p.AbortPersist) -> None:
        """Memory only, after all."""
        shard = self._all.get((order.rank, order.generation))
        if shard is None:
            return
        if shard.drain is not None and (shard.index is None or shard.sealing is not None):
            self._lost(order.rank, order.generation, shard, "it is not written any more")
            return
        shard.persist_attempt = 0
        if shard.target is not None and shard.pipeline is not None:
            shard.pipeline.cancel()
            shard.pipeline = shard.target = None
            if shard.index is None and shard.began is not None:
                self._start_pipeline(order.rank, order.generation, shard)


def _chunk_bytes(memory: RankMemory, began: wire.SnapshotBegan | None) -> int:
    return memory.chunk_bytes if began is None else memory.chunk_of(began.chunk_bytes)


def _shard_name(rank: int, attempt: int) -> str:
    return f"shard-{rank:05d}-a{attempt}.safetensors"


def _index_name(rank: int, attempt: int) -> str:
    return f"idx-{rank:05d}-a{attempt}.json"
