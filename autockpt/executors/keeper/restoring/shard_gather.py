"""Shards of another number of ranks: this node's ranks read them from any memory.

A rank asks for chunks of a shard.  Chunks of this node are lent as they are.  The others are
fetched from the nodes that have them, each chunk once for all ranks here.  The memory for them
takes only the fetched bytes.  All places of a shard have one root, so it does not matter which of
them serves.

The keeper's loop calls the public methods; fetches wait on threads of their own.
"""

import contextlib
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future, InvalidStateError, ThreadPoolExecutor
from dataclasses import dataclass, field

from autockpt.executors.image.container import trailer_capacity
from autockpt.executors.keeper import wire
from autockpt.executors.keeper.replication.replica_slots import ReplicaSlots
from autockpt.executors.keeper.replication.shard_fetch import Copying, ShardFetch, time_for
from autockpt.executors.keeper.slots import MemoryTable
from autockpt.executors.linux.memory import Arena, page_align, require_headroom
from autockpt.executors.network.transfer.frames import spans_of
from autockpt.executors.protocol import messages as p
from autockpt.values.errors import AutockptError

FETCHERS = 8
"""Fetches at a time: heads of many shards, each a round trip and little else."""
REBUILT_S = 120.0
"""A shard that another node rebuilds from parity is there by then."""
PAUSE_S = 0.2
OVER = "the restore is over"

Answer = Callable[[wire.ChunksLent, Arena | None], None]


@dataclass(frozen=True, slots=True)
class _Failure:
    """Of one fetch from one node."""

    reason: str
    is_final: bool
    """That node does not have the chunks whole."""


@dataclass(slots=True)
class _Fetched:
    """A shard of which chunks are brought here."""

    places: list[p.ShardCopy]
    """Nodes that have it; the first one is asked."""
    arena: Arena
    image_bytes: int
    here: set[int] = field(default_factory=set)
    """Chunks that came."""
    lock: threading.Lock = field(default_factory=threading.Lock)
    """One fetch at a time."""


class Gathering:
    """The gathering of one attempt to restore; the next attempt gets another one."""

    def __init__(
        self,
        order: p.ServeShards,
        *,
        run_id: str,
        node: int,
        memory: MemoryTable,
        replicas: ReplicaSlots,
    ) -> None:
        self.attempt = (order.term, order.attempt)
        self._generation = order.generation
        self._run_id, self._node = run_id, node
        self._memory, self._replicas = memory, replicas
        self._places: dict[int, list[p.ShardCopy]] = {}
        for place in order.places:
            self._places.setdefault(place.shard.rank, []).append(place)
        self._rebuilt = frozenset(order.rebuilt)
        self._fetched: dict[int, _Fetched] = {}
        self._damaged: list[_Fetched] = []
        """Chunks from before their shard was requested elsewhere; ranks may still read them."""
        self._under_way: dict[ShardFetch, Future[_Failure | None]] = {}
        self._fetchers = ThreadPoolExecutor(FETCHERS, thread_name_prefix="autockpt-gather")
        self._over = threading.Event()

    def began(self, rank: int) -> wire.GatheringBegan:
        """Return the message to a rank about it."""
        some = next(iter(self._places.values()))[0].shard
        layouts = [""] * some.world_size
        for shard, places in self._places.items():
            layouts[shard] = places[0].shard.layout_digest
        near = tuple(sorted(shard for shard in self._places if self._here(shard) is not None))
        return wire.GatheringBegan(rank=rank, layouts=tuple(layouts), near=near)

    def wanted(self, message: wire.ChunksWanted, answer: Answer) -> None:
        """Brings chunks; `answer` is called once, maybe on another thread."""
        if self._over.is_set():
            answer(_refused(message, OVER), None)
            return
        here = None if message.elsewhere else self._here(message.shard)
        if here is not None:
            arena, image_bytes = here
            lent = wire.ChunksLent(
                rank=message.rank, number=message.number, image_bytes=image_bytes, node=self._node
            )
            answer(lent, arena)
            return
        try:
            fetched = self._of(message.shard, elsewhere=message.elsewhere)
        except (AutockptError, OSError) as error:  # the keeper's loop is not to end for it
            nowhere = message.elsewhere and isinstance(error, AutockptError)
            answer(_refused(message, str(error), lost=nowhere), None)
            return
        self._fetchers.submit(self._serve, fetched, message, answer)

    def close(self) -> None:
        """End the gathering: ranks read no more, and waiting requests are refused."""
        self._over.set()
        self._fetchers.shutdown(wait=False)
        for bringing, ended in list(self._under_way.items()):
            bringing.abort(OVER)
            _end(ended, _Failure(OVER, False))
        for fetched in (*self._fetched.values(), *self._damaged):
            fetched.arena.close()

    @property
    def total_bytes(self) -> int:
        """Memory of the fetched chunks."""
        return sum(
            len(fetched.here) * fetched.places[0].shard.chunk_bytes
            for fetched in (*self._fetched.values(), *self._damaged)
        )

    # ------------------------------------------------------------------ where it is

    def _here(self, shard: int) -> tuple[Arena, int] | None:
        """(memory, capacity of the image) of a shard that this node has."""
        roots = {place.shard.root for place in self._places.get(shard, ())}
        # What is rebuilt may lie here too, damaged.
        memory = None if shard in self._rebuilt else self._memory.ranks.get(shard)
        if memory is not None:
            for slot, index in memory.sealed().items():
                if index.root in roots:
                    return memory.slots[slot], memory.image_capacity
        replica = self._replicas.holding(shard, self._generation)
        described = None if replica is None else replica.index()
        if replica is None or described is None or described.root not in roots:
            return None
        return replica.arena, replica.image_bytes

    def _of(self, shard: int, *, elsewhere: bool) -> _Fetched:
        """A shard that is fetched; anew and from another node if what came was damaged."""
        known = self._fetched.get(shard)
        if known is not None and not elsewhere:
            return known
        places = [x for x in self._places.get(shard, ()) if x.node != self._node]
        if known is not None:
            places = [x for x in places if x.node != known.places[0].node]
        if not places:
            raise AutockptError(f"no other memory has the shard of rank {shard}")
        # Ranks of different nodes ask different ones first.
        turn = self._node % len(places)
        said = places[0].shard
        image_bytes = page_align(said.bytes)
        size = image_bytes + trailer_capacity(image_bytes, said.chunk_bytes)
        made = _Fetched(
            places=[*places[turn:], *places[:turn]], image_bytes=image_bytes,
            arena=Arena.create_sparse(size, name=f"autockpt-gathered-r{shard}"),
        )  # fmt: skip
        self._damaged += [] if known is None else [known]
        self._fetched[shard] = made
        return made

    # ------------------------------------------------------------------ on other threads

    def _serve(self, fetched: _Fetched, message: wire.ChunksWanted, answer: Answer) -> None:
        try:
            node = self._bring(fetched, message.chunks)
        except Exception as error:  # a rank waits for the answer, whatever went wrong
            is_over = self._over.is_set()
            reason = OVER if is_over else str(error) or type(error).__name__
            lost = isinstance(error, wire.LostShardError) and not is_over
            answer(_refused(message, reason, lost=lost), None)
            return
        lent = wire.ChunksLent(
            rank=message.rank, number=message.number, image_bytes=fetched.image_bytes, node=node
        )
        answer(lent, fetched.arena)

    def _bring(self, fetched: _Fetched, chunks: Iterable[int]) -> int:
        """Fetch the missing ones of `chunks`; return the node that sent them.

        Raises AutockptError, and LostShardError where no node has the shard whole.
        """
        with fetched.lock:
            missing = sorted(set(chunks) - fetched.here)
            if self._over.is_set():
                raise AutockptError(OVER)
            if missing:
                shard = fetched.places[0].shard
                require_headroom(
                    len(missing) * shard.chunk_bytes, what=f"chunks of rank {shard.rank}"
                )
                self._bring_from_any(fetched, missing)
                fetched.here.update(missing)
            return fetched.places[0].node

    def _bring_from_any(self, fetched: _Fetched, chunks: list[int]) -> None:
        """From the first node that has them; that one is asked first from now on."""
        failures: list[_Failure] = []
        waited_s = 0.0
        rank = fetched.places[0].shard.rank
        while True:
            for place in list(fetched.places):
                failure = self._fetch(place, fetched, chunks)
                if failure is None:
                    fetched.places.remove(place)
                    fetched.places.insert(0, place)
                    return
                failures.append(failure)
            awaited = rank in self._rebuilt and waited_s < REBUILT_S
            if not awaited or self._over.wait(PAUSE_S):
                reasons = "; ".join(dict.fromkeys(failure.reason for failure in failures))
                if rank not in self._rebuilt and all(failure.is_final for failure in failures):
                    raise wire.LostShardError(reasons, rank)
                raise AutockptError(reasons)
            waited_s += PAUSE_S

    def _fetch(self, place: p.ShardCopy, fetched: _Fetched, chunks: list[int]) -> "_Failure | None":
        """Why it did not work, or None."""
        ended: Future[_Failure | None] = Future()
        within_s = time_for(len(chunks) * place.shard.chunk_bytes)
        order = p.FetchShard(shard=place.shard, sources=(place,), slot=0)
        bringing = ShardFetch(
            order, Copying(order, self._run_id, spans_of(chunks)),
            complete=lambda *_: _end(ended, None),
            failed=lambda _, reason, final: _end(ended, _Failure(reason or "it failed", final)),
        )  # fmt: skip
        self._under_way[bringing] = ended
        try:
            if self._over.is_set():  # `close` may have missed this one
                raise AutockptError(OVER)
            self._replicas.bring_elsewhere(bringing, fetched.arena.view)
            return ended.result(timeout=within_s)
        except TimeoutError:
            bringing.abort("it took too long")
            return _Failure(f"node {place.node} did not send it within {within_s:.0f} s", False)
        finally:
            del self._under_way[bringing]


def _end(ended: "Future[_Failure | None]", failure: "_Failure | None") -> None:
    """The first end counts."""
    with contextlib.suppress(InvalidStateError):
        ended.set_result(failure)


def _refused(message: wire.ChunksWanted, reason: str, *, lost: bool = False) -> wire.ChunksLent:
    return wire.ChunksLent(
        rank=message.rank, number=message.number, refusal=reason,
        lost=message.shard if lost else None,
    )  # fmt: skip
