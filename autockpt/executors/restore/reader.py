"""Shards -> live state: headers, then a plan, then every chunk verified on its way into place.

Restored tensors live in private memory, never in a slot or a mapped file.  The tensors that the
live state expects and the tensors in the shards must agree before a byte is written.
"""

import contextlib
import itertools
import threading
from collections.abc import Callable
from typing import Any

import torch

from autockpt.executors.restore.apply_state import RestoredState
from autockpt.executors.restore.headers import read_home, read_plan
from autockpt.executors.restore.open_shards import OpenShards
from autockpt.executors.restore.plan.load_plan import Comparison, LoadPlan
from autockpt.executors.restore.plan.moves import Loading, Want, moves_for
from autockpt.executors.restore.plan.state_index import StateIndex
from autockpt.executors.restore.shard_sources import ShardSources
from autockpt.executors.restore.target import RestoreTarget
from autockpt.executors.sharding.local_shard import LocalShard
from autockpt.executors.state.live_state import LiveState
from autockpt.executors.storage.shard_file import run_parallel
from autockpt.values.errors import ConfigError

Report = Callable[[int, int], None]
"""Hears how many bytes are in place and how many there are in all; from several threads."""


def silent(done: int, total: int) -> None:
    """Where no one waits for the restore."""


def restore_shards(
    sources: ShardSources,
    state: LiveState,
    ready: Callable[[int], int] = lambda nbytes: 0,
    report: Report = silent,
) -> RestoredState:
    """Copies shards into the live parameters and buffers and into new tensors for the rest.

    `ready(nbytes)`: address of new memory that was made ahead, or 0.

    Raises ConfigError when the state changed shape since the checkpoint (nothing is written then),
    CorruptCheckpointError when a chunk does not match.
    """
    with torch.no_grad(), contextlib.closing(OpenShards(sources)) as shards:
        return execute(_planned(shards, state, ahead=True), shards, state, ready, report)


def plan_restore(sources: ShardSources, state: LiveState) -> LoadPlan:
    """The plan of a restore, which reads headers only and changes nothing.

    Raises ConfigError, CorruptCheckpointError or StorageError where no plan can be made.
    """
    with torch.no_grad(), contextlib.closing(OpenShards(sources)) as shards:
        return _planned(shards, state, ahead=False)


def _planned(shards: OpenShards, state: LiveState, *, ahead: bool) -> LoadPlan:
    headers = read_home(shards)
    if ahead:
        shards.read_ahead(headers.home)
    pieces = {name: headers.stored.pieces(name) for name in _reshaped(headers.skeleton)}
    state.module_state.take_forms(
        {name: (some[0].shape, some[0].dtype) if some else None for name, some in pieces.items()}
    )
    return read_plan(StateIndex.of(state, headers.world_size), headers, shards)


def _reshaped(skeleton: Any) -> list[str]:
    """Buffers that a forward had filled, emptied, or given another form."""
    names: list[str] = skeleton.get("changed", {}).get("reshaped", [])
    return names


def execute(
    plan: LoadPlan,
    shards: OpenShards,
    state: LiveState,
    ready: Callable[[int], int],
    report: Report = silent,
) -> RestoredState:
    """Carries out a plan.

    Raises ConfigError when the plan says that the state does not fit (nothing is written then),
    CorruptCheckpointError when a chunk does not match.
    """
    shards.end_read_ahead()
    for comparison in plan.compared:
        _require_equal(comparison, shards)
    if plan.refusals:
        raise ConfigError(plan.refusals[0])
    target = RestoreTarget(state, plan, ready)
    loading = Loading(target.moves())
    _read(loading, shards, report, together=True)
    loading.finish()
    return RestoredState(
        skeleton=plan.skeleton,
        optimizers=dict(plan.optimizers),
        tensors=target.finish(),
        placed=plan.placed,
        exact=plan.exact,
        by_rank={shard: shards.open(shard).private() for shard in plan.merged},
        as_built=plan.as_built,
        awaited=None if plan.awaited is None else dict(plan.awaited),
        bytes=shards.image_bytes,
    )


def _require_equal(comparison: Comparison, shards: OpenShards) -> None:
    """Raises ConfigError when ranks stored different values as their own under one name."""
    pieces = comparison.pieces
    if not comparison.alike:
        raise ConfigError(comparison.refusal)
    copies = [torch.empty(piece.shape, dtype=piece.dtype, device="cpu") for piece in pieces]
    part = LocalShard(global_shape=pieces[0].global_shape, boxes=pieces[0].boxes)
    wants = [
        Want(name=f"{comparison.name} {i}", holding=part, memory=copy)
        for i, copy in enumerate(copies)
    ]
    moves = [moves_for(want, [piece]) for want, piece in zip(wants, pieces, strict=True)]
    _read(Loading(move for some in moves for move in some), shards, together=False)
    if not all(_same_bytes(copies[0], copy) for copy in copies[1:]):
        raise ConfigError(comparison.refusal)


def _read(loading: Loading, shards: OpenShards, report: Report = silent, *, together: bool) -> None:
    """Puts every chunk that holds something wanted.

    `together`: with the other ranks of this node, where there are some.
    """
    jobs, workers = _jobs(loading, shards)
    group = shards.sources.together if together else None
    total = sum(_chunk_bytes(shards, job) for job in jobs)
    put_bytes, counting = 0, threading.Lock()
    report(0, total)

    def put(job: tuple[int, int], data: memoryview) -> None:
        nonlocal put_bytes
        shard, chunk = job
        start, stop = shards.open(shard).chunks.index.chunk_range(chunk)
        loading.put(shard, start, data[: stop - start])
        with counting:
            put_bytes += stop - start
            report(put_bytes, total)

    if group is None:

        def work(number: int) -> None:
            put(jobs[number], shards.read(*jobs[number]))

        run_parallel(range(len(jobs)), work, workers=min(workers, max(1, len(jobs))))
    else:
        first = shards.sources.first_chunks
        numbers = {first[shard] + chunk: (shard, chunk) for shard, chunk in jobs}
        group.deliver(
            sorted(numbers),
            lambda number, place: shards.read(*numbers[number], place),
            lambda number, data: put(numbers[number], data),
            readers=workers,
        )


def _chunk_bytes(shards: OpenShards, job: tuple[int, int]) -> int:
    start, stop = shards.open(job[0]).chunks.index.chunk_range(job[1])
    return stop - start


def _jobs(loading: Loading, shards: OpenShards) -> tuple[list[tuple[int, int]], int]:
    """(shard, chunk) of all to read once the heads are put, and by how many threads.

    Each rank begins at its own place: ranks that need the same ask different nodes at a time.
    """
    for shard in loading.shards:
        opened = shards.open(shard)
        if opened.head:
            loading.put_head(shard, opened.head)
    jobs = [
        (shard, number)
        for shard in loading.shards
        for number in loading.chunks(shard, shards.open(shard).chunks.index)
    ]
    first = int(shards.sources.turn * len(jobs))
    jobs = jobs[first:] + jobs[:first]
    for shard, group in itertools.groupby(jobs, key=lambda job: job[0]):
        shards.open(shard).chunks.expect([number for _, number in group])
    return jobs, max((shards.open(s).chunks.workers for s in loading.shards), default=1)


def _same_bytes(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors are equal to the bit: 0.0 is not -0.0, and NaN equals itself."""
    return torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))
