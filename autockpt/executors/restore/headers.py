"""Reads as many headers as a load plan takes: first the home shard's, then the nearest ones."""

import bisect
from collections.abc import Sequence

from autockpt.executors.restore.open_shards import OpenShards
from autockpt.executors.restore.plan.load_plan import LoadPlan
from autockpt.executors.restore.plan.planner import CheckpointHeaders, LoadPlanner, plan_load
from autockpt.executors.restore.plan.state_index import StateIndex
from autockpt.executors.restore.plan.stored import Stored
from autockpt.values.errors import CorruptCheckpointError

KEPT_OPEN = 64
"""Shards whose headers are read at once and stay open; before it looks at more it closes them, and
opens again what it needs."""


def read_plan(index: StateIndex, headers: CheckpointHeaders, shards: OpenShards) -> LoadPlan:
    """The plan of this rank, which may say that checkpoint and state do not fit.

    `headers`: of the home shard; headers of other shards are added where the plan needs them.

    Raises ConfigError for an attached optimizer that the checkpoint lacks, CorruptCheckpointError
    or StorageError for headers that cannot be read.
    """
    headers.take_home(index)
    planner = LoadPlanner(index, headers)
    if planner.home_suffices:
        return planner.plan()
    sources, as_it_was = shards.sources, planner.as_it_was
    if as_it_was and sources.near:
        _survey(index, headers, shards, sources.near, all_of_them=False)
        plan = plan_load(index, headers)
        if not plan.refusals:
            return plan
    if not sources.complete:
        raise CorruptCheckpointError(
            f"memory: {len(sources.near)} of {sources.count} shards are on this node, and the "
            "generation is not on disk"
        )
    # One rank must know what nobody takes; others, whether several ranks claim one name.
    undeclared = not as_it_was and LoadPlanner(index, headers).undeclared
    _survey(
        index, headers, shards, sources.within_reach,
        all_of_them=sources.world_size == 1 or undeclared,
    )  # fmt: skip
    return plan_load(index, headers, compare=not as_it_was)


def read_home(shards: OpenShards) -> CheckpointHeaders:
    """The header and the skeleton of the home shard.

    Raises CorruptCheckpointError or StorageError.
    """
    sources = shards.sources
    home = shards.open(sources.home)
    stored = Stored()
    stored.add(sources.home, home.header)
    return CheckpointHeaders(
        home=sources.home,
        count=sources.count,
        within_reach=len(sources.within_reach),
        world_size=sources.world_size,
        header=home.header,
        skeleton=home.skeleton(),
        stored=stored,
    )


def _survey(
    index: StateIndex,
    headers: CheckpointHeaders,
    shards: OpenShards,
    which: Sequence[int],
    *,
    all_of_them: bool,
) -> None:
    """Learns what shards hold, nearest first, until all that is wanted was seen."""
    blocks = nearest_first(which, headers.home)
    for block in blocks:
        new = [shard for shard in block if shard not in headers.stored]
        shards.open_all(new)
        for shard in new:
            headers.stored.add(shard, shards.open(shard).header)
        LoadPlanner(index, headers).read_skeletons(lambda shard: shards.open(shard).skeleton())
        if not all_of_them and LoadPlanner(index, headers).covered:
            return
        if len(blocks) > 1:
            shards.keep_only(headers.home)


def nearest_first(shards: Sequence[int], home: int) -> list[Sequence[int]]:
    """Blocks of shards, by distance from the one with the home shard.

    Shards that share tensors stand together: ranks of a node, stages, copies.  Blocks are the same
    for all ranks, so that the ranks of a node know the same and choose the same pieces.
    """
    blocks = [shards[i : i + KEPT_OPEN] for i in range(0, len(shards), KEPT_OPEN)]
    own = bisect.bisect_right([block[0] for block in blocks], home) - 1
    order = sorted(range(len(blocks)), key=lambda i: (abs(i - own), i))
    return [blocks[i] for i in order]
