"""One decision for all ranks, carried out by this one: restore, verify, report, go on.

The keepers decide which generation and from where.  If a source turns out bad, the rank reports it,
the keepers strike it out, and they decide again for all ranks.
"""

import contextlib
import os
import queue
import sys
import time
from dataclasses import dataclass
from typing import Any

from autockpt.executors.image.container import read_trailer
from autockpt.executors.keeper.client.client import KeeperClient, RestoreBuffers
from autockpt.executors.keeper.wire import ChunksLent, LostShardError
from autockpt.executors.linux.memory import Arena
from autockpt.executors.protocol import messages as p
from autockpt.executors.protocol.deadlines import Deadlines
from autockpt.executors.restore.apply_state import RestoredState, apply_state, left_as_built
from autockpt.executors.restore.gathered_source import farthest, gathered_shards, passed_on
from autockpt.executors.restore.prefault import PrefaultedMemory
from autockpt.executors.restore.progress import merge_progress
from autockpt.executors.restore.reader import Report, restore_shards, silent
from autockpt.executors.restore.shard_sources import (
    ShardSources,
    SlotSource,
    Together,
    shards_of_node,
    shards_on_disk,
)
from autockpt.executors.state.live_state import LiveState
from autockpt.values.errors import (
    AutockptError,
    ConfigError,
    CorruptCheckpointError,
    DirectoryBusyError,
    NoCheckpointError,
    RestartError,
    StorageError,
)
from autockpt.values.generation import Generation
from autockpt.values.policy_keys.paths import is_store_url

_LIMITS = Deadlines()
DIRECTORY_S = 300.0
"""A claim and a decision have no limit in the protocol; slow storage takes minutes at worst."""
PATIENCE_S = _LIMITS.attach_s + _LIMITS.inventory_s + _LIMITS.restore_s + DIRECTORY_S
"""A trainer may hear nothing while all others attach and the slowest one restores.  The protocol
ends every wait before this, unless no coordinator can be reached."""
QUIET_S = 300.0
"""After so long the rank logs that it is waiting."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Resumed:
    """Where the training goes on."""

    term: int
    step: int
    generation: Generation | None
    """None: from scratch."""
    source: str
    """memory, peer, parity, disk, or "" from scratch."""
    bytes: int
    progress: dict[str, Any] | None
    rng: Any
    notices: tuple[str, ...] = ()
    """Differences from the saved state: sentences for the user."""
    lossy: str = ""
    """The loss of precision before the generation was written, in words; "": none, it is exact."""
    attempt: int = 0
    """Later checkpoints of the term have this attempt or a greater one."""
    durable: bool = False
    """Some checkpoint of this run is on disk, wherever this start resumed from."""
    read_s: float = 0.0
    """Verifying and copying the bytes into place, bad sources included."""
    awaiting: RestoredState | None = None
    """State that waits for a structure that the script builds in its loop."""
    apply_s: float = 0.0
    """Putting optimizers and stateful objects together."""


def resume(
    link: KeeperClient,
    state: LiveState,
    checkpoints: str,
    ahead: PrefaultedMemory,
    report: Report = silent,
    *,
    read_once: bool = True,
) -> Resumed:
    """Waits for the decision and carries it out, in memory that was made ready meanwhile.

    `report` hears how far the reading is.  `read_once`: see `CheckpointPlan`.

    Raises DirectoryBusyError (another live run), NoCheckpointError (durable once, nothing can be
    restored), RestartError (another start may), ConfigError (the state does not fit).
    """
    restored: RestoredState | None = None
    source = ""
    read_s = 0.0
    has_read = False
    while True:
        match _next_order(link):
            case p.RestoreShard() as order:
                began, has_read = time.monotonic(), True
                restored, source = _carry_out(
                    link, state, checkpoints, order, ahead, report, read_once=read_once
                )
                read_s += time.monotonic() - began
            case p.StartFresh(reason=reason) if has_read:
                # Its tensors are no more as the script built them; a new process has them.
                said = reason or "nothing is left"
                raise RestartError(
                    f"{checkpoints}: the training begins at step 0 ({said}), and this process has "
                    "read a checkpoint into its state already"
                )
            case p.StartFresh(term=term, reason=reason):
                notices = (f"begins at step 0: {reason}",) if reason else ()
                return Resumed(
                    term=term, step=0, generation=None, source="", bytes=0, progress=None,
                    rng=None, notices=notices,
                )  # fmt: skip
            case p.Resume() as message if restored is not None:
                return _finish(link, state, message, source, restored, read_s)
            case p.AttachRefused(reason=reason):
                named = reason if checkpoints in reason else f"{checkpoints}: {reason}"
                raise DirectoryBusyError(named)
            case p.RestoreRefused(reason=reason, retryable=True):
                raise RestartError(f"{checkpoints}: {reason}")
            case p.RestoreRefused(reason=reason):
                raise NoCheckpointError(
                    f"{checkpoints}: {reason}; start over on purpose with --fresh, or roll back "
                    "with --resume-from"
                )


def _next_order(link: KeeperClient) -> Any:
    """Return the keepers' next order.  Raises AutockptError when they say nothing."""
    where = "is a rank missing? see logs/keeper-*.log in the run directory"
    with contextlib.suppress(queue.Empty):
        return link.restore_orders.get(timeout=QUIET_S)
    with contextlib.suppress(OSError, ValueError):
        print(
            f"autockpt: rank {link.rank}: waiting for the other ranks to attach and restore "
            f"({QUIET_S:.0f} s so far); {where}",
            file=sys.stderr, flush=True,
        )  # fmt: skip
    with contextlib.suppress(queue.Empty):
        return link.restore_orders.get(timeout=PATIENCE_S - QUIET_S)
    raise AutockptError(
        f"rank {link.rank}: no decision from the keepers within {PATIENCE_S:.0f} s; {where}"
    )


def _carry_out(
    link: KeeperClient,
    state: LiveState,
    checkpoints: str,
    order: p.RestoreShard,
    ahead: PrefaultedMemory,
    report: Report,
    *,
    read_once: bool,
) -> tuple[RestoredState | None, str]:
    """Return the restored state (None if the source is bad) and its place."""
    try:
        with contextlib.closing(link.take_lent(order)) as lent:
            shards, used = _open(link, lent, checkpoints, order, read_once=read_once)
            restored = restore_shards(shards, state, ahead.take, report)
    except (CorruptCheckpointError, StorageError, OSError) as error:
        # On a disk an error of reading does not pass; a store may only be out of reach.
        passing = not isinstance(error, CorruptCheckpointError | FileNotFoundError)
        from_store = is_store_url(checkpoints) and order.source.kind in ("disk", "reshard")
        lost = error.shard if isinstance(error, LostShardError) else None
        _bad(link, order, str(error), unread=passing and from_store, lost=lost)
        return None, ""
    except ConfigError as error:
        if order.source.kind != "memory" or link.world_size == 1:
            raise
        # As many ranks with another mesh: a slot holds one rank's part, the disk has all of them.
        _bad(link, order, f"memory: {error}")
        return None, ""
    link.send(p.ShardVerified(rank=link.rank, term=order.term, attempt=order.attempt))
    return restored, farthest(used)


def _bad(
    link: KeeperClient,
    order: p.RestoreShard,
    detail: str,
    *,
    unread: bool = False,
    lost: int | None = None,
) -> None:
    told = p.ShardBad(
        rank=link.rank, term=order.term, attempt=order.attempt, detail=detail, unread=unread,
        lost=lost,
    )  # fmt: skip
    link.send(told)


def _open(
    link: KeeperClient,
    lent: RestoreBuffers,
    checkpoints: str,
    order: p.RestoreShard,
    *,
    read_once: bool,
) -> tuple[ShardSources, set[str]]:
    """The shards that an order names, and the kinds of source that are used, which may grow."""
    source, folder = order.source, os.path.join(checkpoints, order.generation.name)
    passing = None
    if read_once and is_store_url(checkpoints) and link.has_other_nodes:
        passing = passed_on(
            _Gathering(link, order, stored=True), _Gathering(link, order, stored=True, alone=True)
        )
    if source.copied:
        kind = "parity" if source.rebuilt else "peer"
        return _open_copy(link, lent, folder, order), {kind}
    if source.kind == "memory":
        slot = source.slot
        if slot is None or not link.wait_until(lambda: slot < len(link.slots), 30.0):
            raise CorruptCheckpointError(f"memory: slot {slot} was not handed over")
        arena = link.slots[slot]
        index = read_trailer(arena.view[link.image_bytes :])
        if index is None or index.root != source.root or index.generation != order.generation:
            raise CorruptCheckpointError(f"memory: slot {slot} does not hold {order.generation}")
        own = SlotSource(arena, index)
        return shards_of_node(link.rank, own, lent.neighbours, folder), {"memory"}
    if source.kind == "gather":
        if lent.gathering is None:
            raise CorruptCheckpointError("memory: the order to restore names no shards to gather")
        return gathered_shards(
            link.rank, link.world_size, order.generation, lent.gathering, _Gathering(link, order),
            folder, passing,
        )  # fmt: skip
    together = None
    if lent.reading is not None:
        together = Together(lent.reading, order.readers, link.rank)
    return shards_on_disk(
        folder, link.rank, link.world_size, source.root, together, patient=True, passing=passing
    ), {"disk"}


@dataclass(frozen=True, slots=True)
class _Gathering:
    """The keeper, as far as one order to gather goes."""

    link: KeeperClient
    order: p.RestoreShard
    stored: bool = False
    """From the store, by way of the node that reads there."""
    alone: bool = False
    """By this node."""

    def want(self, shard: int, chunks: tuple[int, ...], *, elsewhere: bool) -> int:
        """Asks for chunks of a shard; the number of the request."""
        return self.link.want_chunks(
            self.order, shard, chunks, elsewhere=elsewhere, stored=self.stored, alone=self.alone
        )

    def take(self, number: int) -> tuple[ChunksLent, Arena]:
        """The answer; the caller closes the memory.  Raises CorruptCheckpointError: none came."""
        return self.link.take_chunks(number)


def _open_copy(
    link: KeeperClient, lent: RestoreBuffers, folder: str, order: p.RestoreShard
) -> ShardSources:
    """Open this rank's shard, fetched from another node and lent like its neighbours' shards."""
    if link.rank not in lent.neighbours:
        raise CorruptCheckpointError("peer: the keeper did not hand over the fetched shard")
    arena, capacity = lent.neighbours[link.rank]
    index = read_trailer(arena.view[capacity:])
    if index is None or index.root != order.source.root or index.generation != order.generation:
        raise CorruptCheckpointError(f"peer: the fetched shard is not of {order.generation}")
    return shards_of_node(link.rank, SlotSource(arena, index), lent.neighbours, folder)


def _finish(
    link: KeeperClient,
    state: LiveState,
    message: p.Resume,
    source: str,
    restored: RestoredState,
    read_s: float,
) -> Resumed:
    began = time.monotonic()
    applied = apply_state(restored, state)
    state.refresh()
    progress, rng = applied["progress"], applied["rng"]
    notices: tuple[str, ...] = ()
    if restored.by_rank and rng is not None:
        same = progress.get("mesh", "") == state.mesh()
        merged = merge_progress(restored.by_rank, link.rank, link.world_size, same_mesh=same)
        progress, rng, notices = merged.progress, merged.rng, merged.notices
    notices += left_as_built(restored, state)
    step = int(progress["step"])
    if step != message.step:
        raise CorruptCheckpointError(
            f"checkpoint {message.generation}: its state says step {step}, its commit says "
            f"{message.step}"
        )
    return Resumed(
        term=message.term,
        step=step,
        generation=message.generation,
        source=source,
        bytes=restored.bytes,
        progress=progress,
        rng=rng,
        notices=notices,
        lossy=str(restored.skeleton.get("lossy", "")),
        attempt=message.attempt,
        durable=message.durable,
        read_s=read_s,
        awaiting=None if restored.awaited is None else restored,
        apply_s=time.monotonic() - began,
    )
