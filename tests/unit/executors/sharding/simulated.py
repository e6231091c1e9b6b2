"""Checkpoints of several ranks without processes: each rank is a state that knows its place."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from autockpt.executors.linux.memory import Arena, page_align
from autockpt.executors.restore.apply_state import RestoredState, apply_state
from autockpt.executors.restore.reader import restore_shards
from autockpt.executors.restore.shard_sources import ShardSources
from autockpt.executors.sharding.local_shard import LocalShard, whole_of
from autockpt.executors.snapshot.replica_shares import Place
from autockpt.executors.snapshot.snapshotter import Snapshotter
from autockpt.executors.state.live_state import LiveState
from autockpt.executors.storage.directory.directory import CheckpointDirectory
from autockpt.values.generation import Generation
from tests.unit.executors.checkpoints import commit_images
from tests.unit.executors.states import Holder, bytes_of, step

G = Generation(term=1, step=1)


class Member:
    """One rank of several: a state, and where it stands."""

    def __init__(self, state: LiveState, place: Place | None = None) -> None:
        self.state, self.place = state, place

    def image(self) -> tuple[memoryview, int, str]:
        """(image, bytes of its head, digest of its layout) of a snapshot of now."""
        shooter = Snapshotter(self.state, memoryview(bytearray(64)), place=self.place)
        layout = shooter.plan({"step": 1, "mesh": self.state.mesh()})
        arena = Arena.anonymous(page_align(layout.image_bytes) + 2**16)
        shooter.begin(arena, {"step": 1, "mesh": self.state.mesh()}, lazy=True)
        assert shooter.fence() == []
        shooter.close()
        return arena.view[: layout.image_bytes], layout.boundary_end, layout.digest

    def restore(self, shards: ShardSources) -> RestoredState:
        """All of it."""
        restored = restore_shards(shards, self.state)
        apply_state(restored, self.state)
        return restored

    def contents(self) -> dict[str, bytes]:
        """Every tensor's bytes."""
        return {name: bytes_of(tensor) for name, tensor in self.state.tensors.items()}


class Rank(Member):
    """One rank of data parallelism: a model that all hold alike, random numbers of its own."""

    def __init__(
        self, rank: int, nodes: Sequence[int], *, seed: int = 7, width: int = 64, note: int = 0
    ) -> None:
        """`note`: elements of a tensor that only this rank has."""
        torch.manual_seed(7)
        self.model = torch.nn.Sequential(
            torch.nn.Linear(40, width), torch.nn.BatchNorm1d(width), torch.nn.Linear(width, 3)
        )
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        torch.manual_seed(seed)
        step(self.model, self.optimizer)
        with torch.no_grad():  # a buffer: nobody says that others hold the same
            self.model[1].running_mean += rank  # type: ignore[assignment,operator]
        place = Place(rank=rank, nodes=tuple(nodes)) if len(nodes) > 1 else None
        held = self._held(len(nodes))
        others = {"note": Holder({"t": torch.ones(note)})}
        state = LiveState({"model": self.model}, {"optimizer": self.optimizer}, others, held)
        super().__init__(state, place)

    def _held(self, ranks: int) -> dict[int, LocalShard]:
        holders = tuple(range(ranks)) if ranks > 1 else ()
        return {id(p): whole_of(p, holders) for p in self.model.parameters()}


def save(folder: str, ranks: Sequence[Member], **how: Any) -> str:
    """Commits a generation of all ranks; its folder."""
    directory = CheckpointDirectory(folder)
    run_id = directory.open()
    directory.claim(run_id, "launch", 0, force=False)
    images, heads, layouts = zip(*(rank.image() for rank in ranks), strict=True)
    return commit_images(
        directory, run_id, G, list(images), heads=list(heads), layouts=list(layouts), **how
    )


def shared_alike(a: Mapping[str, bytes], b: Mapping[str, bytes]) -> bool:
    """Two ranks hold the same, beside the buffers that are their own."""
    return {n: v for n, v in a.items() if "running" not in n} == {
        n: v for n, v in b.items() if "running" not in n
    }
