"""What it costs a rank of a large job to plan its part, and to find out from where it loads.

Ours is no coordinator's plan: every rank plans for itself, from what it holds.  So the figures are
per rank, and what the whole job reads and writes for it stands beside them.
"""

import time
import tracemalloc
from collections.abc import Callable, Iterable
from typing import Any

import torch

from autockpt.executors.image.container import read_header
from autockpt.executors.image.layout.plan import Layout
from autockpt.executors.restore.plan.moves import Move, Want, moves_for
from autockpt.executors.restore.plan.stored import Stored
from autockpt.executors.sharding.local_shard import LocalShard
from benchmarks.harness import Row, row
from benchmarks.synthetic import Mesh, SyntheticRank, index_bytes, mesh_of

SCALES = (8, 64, 128, 1024, 4096, 8960, 16384)
SMOKE_SCALES = (8,)
PLAN_TARGET_S, PLAN_TARGET_BYTES = 5.0, 2 * 2**30
SAMPLE = 24
"""Ranks of a mesh that are planned for the figures of one of them."""
SURVEY_LIMIT = 1024
"""Headers that are really parsed; the rest is a multiple, since each is parsed by itself."""
MIB = 2**20


def timed(work: Callable[[], Any]) -> tuple[float, Any]:
    """(seconds, result)."""
    began = time.perf_counter()
    result = work()
    return time.perf_counter() - began, result


def peak_bytes(work: Callable[[], Any]) -> int:
    """Largest memory of Python objects while it runs."""
    tracemalloc.start()
    work()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return peak


def wants_of(rank: SyntheticRank) -> Iterable[Want]:
    """Everything a rank has to fill; memory without bytes."""
    for holdings, dtype in ((rank.weights, torch.bfloat16), (rank.state, torch.float32)):
        for name, holding in holdings.items():
            memory = torch.empty(holding.count, dtype=dtype, device="meta")
            yield Want(name=name, holding=holding, memory=memory)


def moves_of(rank: SyntheticRank, stored: Stored) -> list[Move]:
    """From where it loads each of them, as `Wanted` decides it."""
    found = []
    for want in wants_of(rank):
        pieces = stored.pieces(want.name)
        first = sorted(pieces, key=lambda piece: piece.shard) if want.holding.holders else pieces
        found += moves_for(want, first)
    return found


def spread(ranks: int, count: int) -> list[int]:
    """Some ranks of all places."""
    return sorted({number * ranks // count for number in range(min(count, ranks))})


def plan_rows(mesh: Mesh) -> tuple[list[Row], float]:
    """Of the save plan; and the mean header's bytes."""
    nodes = tuple(rank // mesh.tensor for rank in range(mesh.ranks))
    seconds, headers, indexes = [], [], []
    for number in spread(mesh.ranks, SAMPLE):
        rank = SyntheticRank(mesh, number)
        taken, layout = timed(lambda r=rank: r.layout(r.shares(nodes)))  # type: ignore[misc]
        seconds.append(taken)
        headers.append(len(layout.header))
        indexes.append(index_bytes(layout, number, mesh.ranks))
    first = SyntheticRank(mesh, 0)
    peak = peak_bytes(lambda: first.layout(first.shares(nodes)))
    name, mean = f"{mesh.ranks} ranks", sum(headers) / len(headers)
    both = (sum(headers) + sum(indexes)) / len(headers)
    return [
        row(name, "save plan of a rank", seconds, "s", at_most=PLAN_TARGET_S),
        row(name, "its memory", [peak / MIB], "MiB", at_most=PLAN_TARGET_BYTES / MIB),
        row(name, "header", [h / 1024 for h in headers], "KiB"),
        row(name, "index", [i / 1024 for i in indexes], "KiB"),
        row(name, "headers and indexes in all", [both * mesh.ranks / MIB], "MiB"),
    ], mean


def survey(mesh: Mesh, numbers: Iterable[int]) -> tuple[float, Stored]:
    """(seconds of parsing and taking in their headers, what they hold)."""
    nodes = tuple(rank // mesh.tensor for rank in range(mesh.ranks))
    stored, seconds = Stored(), 0.0
    for number in numbers:
        rank = SyntheticRank(mesh, number)
        layout: Layout = rank.layout(rank.shares(nodes))

        def take(number: int = number, layout: Layout = layout) -> None:
            stored.add(number, read_header(layout.header, layout.image_bytes))

        seconds += timed(take)[0]
    return seconds, stored


def node_of(mesh: Mesh, rank: int) -> list[int]:
    """Ranks of the node of a rank: with it, they hold all that it needs on the same mesh."""
    first = rank // mesh.tensor * mesh.tensor
    return list(range(first, first + mesh.tensor))


def load_rows(mesh: Mesh) -> list[Row]:
    """Of knowing from where to load, on the same mesh and on half as many copies or stages."""
    name, middle = f"{mesh.ranks} ranks", mesh.ranks // 2
    few, stored = survey(mesh, node_of(mesh, middle))
    same, _ = timed(lambda: moves_of(SyntheticRank(mesh, middle), stored))
    rows = [
        row(name, "8 headers of a node", [few], "s"),
        row(name, "moves, same mesh", [same], "s"),
    ]
    every = range(mesh.ranks)
    counted = [n for n in every if n % -(-mesh.ranks // SURVEY_LIMIT) == 0]
    parsing, _ = survey(mesh, counted)
    share = mesh.ranks / len(counted)
    note = "" if share == 1 else f"{len(counted)} of {mesh.ranks} headers parsed"
    rows.append(row(name, "all headers", [parsing * share], "s", note=note))
    needed, other, target = _other(mesh)
    _, stored = survey(mesh, needed)
    another, found = timed(lambda: moves_of(SyntheticRank(other, target), stored))
    rows += [
        row(name, "moves, other mesh", [another], "s"),
        row(name, "shards it takes from", [len({move.piece.shard for move in found})], ""),
    ]
    return rows


def _other(mesh: Mesh) -> tuple[list[int], Mesh, int]:
    """(shards that hold it, another mesh, a rank of it): half the copies, or half the stages."""
    if mesh.copies > 1:
        other = Mesh(tensor=mesh.tensor, stages=mesh.stages, copies=max(1, mesh.copies // 2))
    else:
        other = Mesh(tensor=mesh.tensor, stages=max(1, mesh.stages // 2), copies=1)
    target = SyntheticRank(other, other.ranks // 2)
    names = {**target.weights, **target.state}
    stages = {
        mesh.place(rank)[2] for rank in range(mesh.ranks) if _has(mesh, rank, names)
    }  # fmt: skip
    return [r for r in range(mesh.ranks) if mesh.place(r)[2] in stages], other, other.ranks // 2


def _has(mesh: Mesh, rank: int, names: dict[str, LocalShard]) -> bool:
    tensor, copy, _ = mesh.place(rank)
    if tensor or copy:
        return False
    return not names.keys().isdisjoint(SyntheticRank(mesh, rank).weights)


def measure(scales: Iterable[int]) -> list[Row]:
    """All scales."""
    rows: list[Row] = []
    for ranks in scales:
        mesh = mesh_of(ranks)
        began = time.perf_counter()
        plan, _ = plan_rows(mesh)
        rows += [*plan, *load_rows(mesh)]
        print(f"{ranks} ranks: {time.perf_counter() - began:.1f} s", flush=True)
    return rows
