"""Shards of one generation made in this process: each rank's part of a model, sealed and committed.

A part may be told to lie: the header of its image is changed before it is digested, so that nothing
but what it says is wrong.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from autockpt.executors.image.container import header_bytes
from autockpt.executors.image.layout.boxes import Box, whole
from autockpt.executors.restore.reader import restore_shards
from autockpt.executors.restore.shard_sources import shards_on_disk
from autockpt.executors.sharding.local_shard import LocalShard
from autockpt.executors.state.live_state import LiveState
from autockpt.executors.storage.directory.directory import CheckpointDirectory
from autockpt.values.generation import Generation
from tests.unit.executors.checkpoints import commit_images
from tests.unit.executors.states import Module, snapshot

G = Generation(term=1, step=1)
Part = dict[str, tuple[torch.Tensor, LocalShard]]
"""By name a rank's tensor and what it is a part of."""
Lie = Callable[[dict[str, Any]], None]
"""Changes the table of a header."""


def rows(full: torch.Tensor, start: int, stop: int, holders: tuple[int, ...] = ()) -> Any:
    """(tensor, holding) of some rows of a matrix."""
    box = Box(offset=(start, 0), shape=(stop - start, full.shape[1]))
    return full[start:stop].clone(), LocalShard(
        global_shape=tuple(full.shape), boxes=(box,), holders=holders
    )


def everything(full: torch.Tensor, holders: tuple[int, ...] = ()) -> Any:
    """(tensor, holding) of all of it."""
    shape = tuple(full.shape)
    return full.clone(), LocalShard(global_shape=shape, boxes=(whole(shape),), holders=holders)


def live(part: Part) -> LiveState:
    """The state of a rank that holds these tensors."""
    module = Module((name, tensor) for name, (tensor, _) in part.items())
    holdings = {id(p): part[name][1] for name, p in module.named_parameters()}
    return LiveState({"model": module}, {}, {}, holdings)


def blank(part: Part) -> LiveState:
    """The same with other numbers in it: what a new process has."""
    return live({name: (torch.full_like(t, 7), held) for name, (t, held) in part.items()})


def commit(
    folder: Path, parts: list[Part], *, lies: dict[int, Lie] | None = None, step: int = 1
) -> str:
    """A committed generation; its folder."""
    directory = CheckpointDirectory(str(folder))
    run_id = directory.open()
    directory.claim(run_id, "launch", 0, force=False)
    images = [_image(part) for part in parts]
    for rank, lie in (lies or {}).items():
        _forge(images[rank], lie)
    return commit_images(directory, run_id, Generation(term=1, step=step), images)


def _image(part: Part) -> memoryview:
    arena, shooter = snapshot(live(part))
    assert shooter.layout is not None
    shooter.close()
    return arena.view[: shooter.layout.image_bytes]


def _forge(image: memoryview, lie: Lie) -> None:
    room = header_bytes(image, len(image)) - 8
    table = json.loads(bytes(image[8 : 8 + room]))
    lie(table)
    text = json.dumps(table, separators=(",", ":")).encode()
    assert len(text) <= room
    image[8 : 8 + room] = text.ljust(room)


def saying(name: str, of: list[int], *boxes: tuple[list[int], list[int]]) -> Lie:
    """A header that says something else of a part."""

    def lie(table: dict[str, Any]) -> None:
        table["__metadata__"][f"part:model.{name}"] = json.dumps({"of": of, "at": boxes})

    return lie


def restore(folder: str, state: LiveState, rank: int = 0, world_size: int = 1) -> None:
    """Into a state, as one of `world_size` ranks."""
    restore_shards(shards_on_disk(folder, rank, world_size), state)


def numbers(state: LiveState) -> dict[str, torch.Tensor]:
    """Copies of all tensors."""
    return {name: tensor.detach().clone() for name, tensor in state.tensors.items()}
