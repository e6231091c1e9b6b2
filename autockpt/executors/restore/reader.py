"""Shards -> live state: every chunk verified while it is copied into place.

Restored tensors live in private memory, never in a slot or a mapped file.  Headers say where
everything stands; what the live state expects and what the shards hold must agree before a byte is
written.
"""

import bisect
import contextlib
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from autockpt.executors.linux.memory import Arena
from autockpt.executors.restore.apply_state import RestoredState
from autockpt.executors.restore.cooperative_read import CooperativeRead
from autockpt.executors.restore.plan.moves import Loading, Move, Want, moves_for
from autockpt.executors.restore.plan.stored import Piece, Stored
from autockpt.executors.restore.plan.wanted import Wanted
from autockpt.executors.restore.shard_sources import Chunks, OneShard, OpenedShard, ShardSources
from autockpt.executors.sharding.local_shard import LocalShard
from autockpt.executors.sharding.rules.plain_tensors import seen_name
from autockpt.executors.sharding.rules.rules import missing_rule
from autockpt.executors.state.live_state import LiveState
from autockpt.executors.storage.shard_file import run_parallel
from autockpt.values.errors import ConfigError, CorruptCheckpointError

HEADER_READERS = 8
"""Threads that open shards to learn what they hold: each waits for storage twice a shard."""
AHEAD = 4
"""Chunks that a rank reads while it plans what to take: about as many as it has time for."""
KEPT_OPEN = 64
"""Shards whose headers are read at once and stay open; before it looks at more it closes them, and
opens again what it needs."""


def restore_tensors(chunks: Chunks, state: LiveState) -> RestoredState:
    """`restore_shards` from one shard; closes it."""
    return restore_shards(OneShard(chunks), state)


def restore_shards(
    shards: ShardSources, state: LiveState, ready: Callable[[int], int] = lambda nbytes: 0
) -> RestoredState:
    """Copies shards into the live parameters and buffers and into new tensors for the rest.

    `ready(nbytes)`: address of new memory that was made ahead, or 0.

    Raises ConfigError when the state changed shape since the checkpoint (nothing is written then),
    CorruptCheckpointError when a chunk does not match.
    """
    with torch.no_grad(), contextlib.closing(_Restore(shards, state, ready)) as restore:
        return restore.run()


class _Restore:
    """From headers to a plan, from the plan to bytes in place."""

    def __init__(self, shards: ShardSources, state: LiveState, ready: Callable[[int], int]) -> None:
        self._shards = shards
        self._ready = ready
        self._state = state
        # Not the optimizer's state: it may exist already (Adagrad), and it is replaced as a whole.
        self._live = {**state.parameters(), **state.buffers()}
        self._opened: dict[int, OpenedShard] = {}
        self._stored = Stored()
        self._mine = threading.local()
        self._buffers: list[Arena] = []
        self._planned = threading.Event()
        self._ahead: threading.Thread | None = None

    def run(self) -> RestoredState:
        """All of it."""
        home = self._open(self._shards.home)
        skeleton = home.skeleton()
        self._begin_to_read(home)
        same_mesh = skeleton["progress"].get("mesh", "") == self._state.mesh()
        wanted = Wanted(
            self._state, self._live, self._stored, home.header, skeleton, same_mesh=same_mesh,
            ready=self._ready,
            later=bool(skeleton.get("rebuilt")) and self._shards.world_size == 1
            and not self._shards.regrouped,
        )  # fmt: skip
        if not self._shards.regrouped:
            wanted.adopt()
        world_size = self._shards.world_size
        exact = world_size == 1 or self._state.is_alike(world_size)
        as_it_was = same_mesh and not self._shards.regrouped
        # Of other ranks than these one shard may lack state that another one has.
        alone = len(self._shards.within_reach) == 1 or (as_it_was and wanted.suffices)
        if alone:
            moves = wanted.moves(exact=exact)
        else:
            moves = self._from_several(wanted, exact=exact, as_it_was=as_it_was)
        loading = Loading(moves)
        self._end_reading_ahead()
        self._read(loading)
        loading.finish()
        return RestoredState(
            skeleton=skeleton, optimizers=wanted.optimizers, tensors=wanted.finish(),
            placed=frozenset(wanted.placed),
            exact=alone and exact and not skeleton.get("partial"),
            by_rank=self._by_rank(same_mesh=same_mesh),
            as_built=tuple(wanted.as_built(exact=exact)),
            awaited=wanted.awaited,
            bytes=sum(o.chunks.index.image_bytes for o in self._opened.values()),
        )  # fmt: skip

    def _begin_to_read(self, home: OpenedShard) -> None:
        """The first chunks of the home shard, which are most likely needed, by another thread."""
        shards, group, first = self._shards, self._shards.together, 0
        if not home.chunks.room_bytes or shards.home not in shards.within_reach:
            return  # all of it is here, or somebody else's replica is taken
        if group is not None:
            first = shards.first_chunks[shards.home]

        def read(chunk: int) -> None:
            if group is None:
                home.held(chunk)
            else:
                group.read_ahead(
                    first + chunk,
                    lambda _, place: self._verified(shards.home, chunk, place),
                )

        def work() -> None:
            # Whatever is wrong is met again by whoever needs the chunk.
            with contextlib.suppress(Exception):
                for chunk in range(min(AHEAD, len(home.chunks.index.digests))):
                    if not self._planned.is_set():
                        read(chunk)

        self._ahead = threading.Thread(target=work, name="autockpt-first-chunks", daemon=True)
        self._ahead.start()

    def _end_reading_ahead(self) -> None:
        self._planned.set()
        if self._ahead is not None:
            self._ahead.join()

    def _from_several(self, wanted: Wanted, *, exact: bool, as_it_was: bool) -> list[Move]:
        """From those in memory if ranks and mesh are what they were, else from all there are."""
        shards = self._shards
        if as_it_was and shards.near:
            self._survey(wanted, shards.near, all_of_them=False)
            with contextlib.suppress(ConfigError):
                return wanted.moves(exact=exact)
        if not shards.complete:
            raise CorruptCheckpointError(
                f"memory: {len(shards.near)} of {shards.count} shards are on this node, and the "
                "generation is not on disk"
            )
        # One rank must know what nobody takes; others, whether several ranks claim one name.
        alone = shards.world_size == 1 or (not as_it_was and wanted.undeclared)
        self._survey(wanted, shards.within_reach, all_of_them=alone)
        if not as_it_was:
            self._require_equal(wanted.ambiguous())
        return wanted.moves(exact=exact)

    def _require_equal(self, parameter_of: Mapping[str, str]) -> None:
        """What several ranks stored as their own must be the same, else nobody knows whose to take.

        `parameter_of`: by name of such a tensor whose state it is, or itself.  Nothing is written
        into the live state.  Raises ConfigError naming the first that differs.
        """
        for name, parameter in parameter_of.items():
            pieces = [piece for piece in self._stored.pieces(name) if not piece.declared]
            if len({(piece.global_shape, piece.dtype) for piece in pieces}) > 1:
                raise _whose(parameter, pieces)
            copies = [torch.empty(piece.shape, dtype=piece.dtype) for piece in pieces]
            part = LocalShard(global_shape=pieces[0].global_shape, boxes=pieces[0].boxes)
            wants = [Want(name=f"{name} {i}", holding=part, memory=c) for i, c in enumerate(copies)]
            moves = [moves_for(w, [piece]) for w, piece in zip(wants, pieces, strict=True)]
            self._read_alone(Loading(move for some in moves for move in some))
            if not all(_same_bytes(copies[0], copy) for copy in copies[1:]):
                raise _whose(parameter, pieces)

    def _by_rank(self, *, same_mesh: bool) -> dict[int, dict[str, Any]]:
        """What is private to each rank, when none of those that read is what it was."""
        if same_mesh and not self._shards.regrouped:
            return {}
        return {shard: self._open(shard).private() for shard in range(self._shards.count)}

    def _open(self, shard: int) -> OpenedShard:
        if shard not in self._opened:
            self._opened[shard] = OpenedShard(self._shards.open(shard))
            if shard not in self._stored:
                self._stored.add(shard, self._opened[shard].header)
        return self._opened[shard]

    def _survey(self, wanted: Wanted, shards: Sequence[int], *, all_of_them: bool) -> None:
        """Learns what shards hold, nearest first, until all that is wanted was seen."""
        blocks = _nearest_first(shards, self._shards.home)
        for block in blocks:
            self._look_into([shard for shard in block if shard not in self._stored])
            wanted.complete(lambda shard: self._open(shard).skeleton())
            if not all_of_them and wanted.covered:
                return
            if len(blocks) > 1:
                for shard in set(self._opened) - {self._shards.home}:
                    self._opened.pop(shard).close()

    def _look_into(self, shards: Sequence[int]) -> None:
        found: dict[int, OpenedShard] = {}

        def look(number: int) -> None:
            found[number] = OpenedShard(self._shards.open(shards[number]))

        try:
            run_parallel(range(len(shards)), look, workers=HEADER_READERS)
        finally:
            self._opened |= {shards[number]: opened for number, opened in found.items()}
        for shard in shards:
            self._stored.add(shard, self._opened[shard].header)

    def _read(self, loading: Loading) -> None:
        if self._shards.together is not None:
            self._read_together(self._shards.together, loading)
        else:
            self._read_alone(loading)

    def _jobs(self, loading: Loading) -> tuple[list[tuple[int, int]], int]:
        """(shard, chunk) of all to read once the heads are put, and by how many threads."""
        for shard in loading.shards:
            opened = self._open(shard)
            if opened.head:
                loading.put_head(shard, opened.head)
        jobs = []
        for shard in loading.shards:
            chunks = self._opened[shard].chunks
            numbers = loading.chunks(shard, chunks.index)
            chunks.expect(numbers)
            jobs += [(shard, number) for number in numbers]
        return jobs, max((self._opened[s].chunks.workers for s in loading.shards), default=1)

    def _read_alone(self, loading: Loading) -> None:
        jobs, workers = self._jobs(loading)

        def work(number: int) -> None:
            self._put(loading, *jobs[number], self._verified(*jobs[number]))

        run_parallel(range(len(jobs)), work, workers=min(workers, max(1, len(jobs))))

    def _read_together(self, group: CooperativeRead, loading: Loading) -> None:
        """With the other ranks of this node; chunks are numbered alike by all."""
        jobs, workers = self._jobs(loading)
        numbers = {
            self._shards.first_chunks[shard] + chunk: (shard, chunk) for shard, chunk in jobs
        }
        group.join(sorted(numbers))

        def work(thread: int) -> None:
            group.run(
                lambda number, place: self._verified(*numbers[number], place),
                lambda number, data: self._put(loading, *numbers[number], data),
                takes=thread == 0,
            )

        threads = group.threads(workers)
        run_parallel(range(threads), work, workers=threads)

    def _verified(self, shard: int, chunk: int, place: memoryview | None = None) -> memoryview:
        """A chunk, from what was read before or from its source, by way of `place` if it fits."""
        opened = self._opened[shard]
        data = opened.take(chunk)
        if data is None:
            room = opened.chunks.room_bytes
            if place is None or len(place) < room:
                place = self._buffer(room)
            data = opened.chunks.read(chunk, place)
        return data

    def _put(self, loading: Loading, shard: int, chunk: int, data: memoryview) -> None:
        start, stop = self._opened[shard].chunks.index.chunk_range(chunk)
        loading.put(shard, start, data[: stop - start])

    def _buffer(self, nbytes: int) -> memoryview:
        """Memory of this thread, enough for a chunk of any shard so far."""
        buffer: Arena | None = getattr(self._mine, "buffer", None)
        if buffer is None or buffer.nbytes < nbytes:
            self._mine.buffer = buffer = Arena.anonymous(nbytes)
            self._buffers.append(buffer)
        return buffer.view

    def close(self) -> None:
        """Lets the buffers go, the shards that were opened here, and those who read with us."""
        self._end_reading_ahead()
        if self._shards.together is not None:
            self._shards.together.leave()
        for arena in self._buffers:
            arena.close()
        for opened in self._opened.values():
            opened.close()


def _same_bytes(a: torch.Tensor, b: torch.Tensor) -> bool:
    """To the bit: 0.0 is not -0.0, and what is no number equals itself."""
    return torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))


def _whose(parameter: str, pieces: Sequence[Piece]) -> ConfigError:
    shapes = {piece.shard: piece.shape for piece in pieces}
    return ConfigError(
        f"{missing_rule(seen_name(parameter), shapes)}\n"
        "This checkpoint was written without one: resume it on the ranks that wrote it, with "
        "attach(rules=..., axes=...), and save again"
    )


def _nearest_first(shards: Sequence[int], home: int) -> list[Sequence[int]]:
    """Blocks of shards, by distance from the one with the home shard.

    What shares tensors stands together: ranks of a node, stages, copies.  Blocks are the same for
    all ranks, so that those of a node know the same and choose the same pieces.
    """
    blocks = [shards[i : i + KEPT_OPEN] for i in range(0, len(shards), KEPT_OPEN)]
    own = bisect.bisect_right([block[0] for block in blocks], home) - 1
    order = sorted(range(len(blocks)), key=lambda i: (abs(i - own), i))
    return [blocks[i] for i in order]
