"""What does not fit is refused with its name, and not a byte of the live model has changed."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from autockpt.executors.state.live_state import LiveState
from autockpt.values.errors import AutockptError, ConfigError, CorruptCheckpointError
from tests.jobs.parallel.matrix import differences
from tests.jobs.parallel.shards import (
    G,
    Part,
    blank,
    commit,
    everything,
    numbers,
    restore,
    rows,
    saying,
)

FULL = torch.arange(24.0).view(6, 4)
OTHER = torch.arange(10.0).view(5, 2)
HALVES: list[Part] = [{"w": rows(FULL, 0, 3)}, {"w": rows(FULL, 3, 6)}]


def require_refused(
    kind: type[AutockptError], match: str, folder: str, state: LiveState, **where: int
) -> None:
    """With this error, and without a trace."""
    before = numbers(state)
    with pytest.raises(kind, match=match):
        restore(folder, state, **where)
    assert differences(before, numbers(state)) == []


def test_what_fits_is_restored(tmp_path: Path) -> None:
    """Else the refusals of this file would prove nothing."""
    folder = commit(tmp_path, HALVES)
    one = blank({"w": everything(FULL)})
    restore(folder, one)
    assert torch.equal(one.tensors["model.w"], FULL)
    for rank, (start, stop) in enumerate([(0, 1), (1, 5), (5, 6)]):
        some = blank({"w": rows(FULL, start, stop)})
        restore(folder, some, rank=rank, world_size=3)
        assert torch.equal(some.tensors["model.w"], FULL[start:stop])


def test_a_missing_tensor_is_named(tmp_path: Path) -> None:
    """The model has grown."""
    folder = commit(tmp_path, HALVES)
    grown = blank({"w": everything(FULL), "more": everything(OTHER)})
    require_refused(ConfigError, r"not in the checkpoint, first 'model\.more'", folder, grown)


@pytest.mark.parametrize("world_size", [1, 2])
def test_an_unknown_tensor_is_named(world_size: int, tmp_path: Path) -> None:
    """The model has shrunk: known to one rank, and to ranks that all hold the same."""
    part: Part = {"w": everything(FULL, (0, 1)), "gone": everything(OTHER, (0, 1))}
    folder = commit(tmp_path, [part, part])
    shrunk = blank({"w": everything(FULL, (0, 1))})
    require_refused(
        ConfigError, r"the model has not, first 'model\.gone'", folder, shrunk,
        world_size=world_size,
    )  # fmt: skip


def test_what_others_may_hold_is_not_unknown(tmp_path: Path) -> None:
    """A pipeline stage leaves the tensors of the other stages."""
    folder = commit(tmp_path, [{"w": everything(FULL), "gone": everything(OTHER)}])
    stage = blank({"w": everything(FULL)})
    restore(folder, stage, world_size=2)
    assert torch.equal(stage.tensors["model.w"], FULL)


@pytest.mark.parametrize(
    ("full", "match"),
    [
        (FULL.view(4, 6), r"model\.w: is \(4, 6\) .* now, \(6, 4\) .* in the checkpoint"),
        (FULL.view(24, 1), r"model\.w: is \(24, 1\) .* now"),
        (torch.arange(28.0).view(7, 4), r"model\.w: is \(7, 4\) .* now"),
        (FULL.double(), r"model\.w: is .*float64 now, .*float32 in the checkpoint"),
        (FULL.bfloat16(), r"model\.w: is .*bfloat16 now, .*float32 in the checkpoint"),
    ],
    ids=["turned", "flat", "longer", "wider", "narrower"],
)
@pytest.mark.parametrize("world_size", [1, 2])
def test_another_shape_or_dtype_is_refused(
    full: torch.Tensor, match: str, world_size: int, tmp_path: Path
) -> None:
    """Also by ranks that hold a part only."""
    folder = commit(tmp_path, HALVES)
    part = everything(full) if world_size == 1 else rows(full, 0, 2)
    require_refused(ConfigError, match, folder, blank({"w": part}), world_size=world_size)


def test_elements_that_nobody_saved_are_counted(tmp_path: Path) -> None:
    """A shard that says less than the whole leaves a hole."""
    folder = commit(tmp_path, [HALVES[0], {"w": rows(FULL, 4, 6)}])
    require_refused(
        ConfigError, r"4 of 24 elements are in no shard .*\[3:4, 0:4\]", folder,
        blank({"w": everything(FULL)}),
    )  # fmt: skip


LIES = {
    "outside": (saying("w", [6, 4], ([4, 0], [3, 4])), "do not fit"),
    "too few": (saying("w", [6, 4], ([3, 0], [2, 4])), "do not fit"),
    "half of the bytes": (saying("w", [6, 4], ([3, 0], [3, 2])), "holds 12 elements"),
    "one twice": (saying("w", [6, 4], ([3, 0], [2, 4]), ([4, 0], [1, 4])), "overlap"),
    "negative": (saying("w", [6, 4], ([-1, 0], [3, 4])), "no part of a tensor"),
    "another rank's": (saying("w", [6, 4], ([0, 0], [3, 4])), "in no shard"),
    "another whole": (saying("w", [9, 4], ([3, 0], [3, 4])), r"\(9, 4\) .* in the checkpoint"),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_header_that_lies_about_its_part_is_refused(lie: str, tmp_path: Path) -> None:
    """Its digests are right: whoever wrote it was wrong."""
    forge, match = LIES[lie]
    folder = commit(tmp_path, HALVES, lies={1: forge})
    require_refused(AutockptError, match, folder, blank({"w": everything(FULL)}))


def _other_generation(folder: Path, other: Path) -> None:
    for file in ("shard-00001-a1.safetensors", "idx-00001-a1.json"):
        shutil.copy(other / file, folder / file)


def _other_shard(folder: Path, other: Path) -> None:
    shutil.copy(other / "shard-00001-a1.safetensors", folder)


def _shorter(folder: Path, _: Path) -> None:
    path = folder / "shard-00001-a1.safetensors"
    path.write_bytes(path.read_bytes()[:-4096])


def _index_says(key: str, change: Callable[[int], int]) -> Callable[[Path, Path], None]:
    def damage(folder: Path, _: Path) -> None:
        path = folder / "idx-00001-a1.json"
        data = json.loads(path.read_text())
        data[key] = change(data[key])
        path.write_text(json.dumps(data))

    return damage


DAMAGE: dict[str, tuple[Callable[[Path, Path], None], str]] = {
    "shard and index of another generation": (_other_generation, "belongs to another generation"),
    "shard of another generation": (_other_shard, "expected digest"),
    "a shorter file": (_shorter, "truncated"),
    "index: a larger image": (_index_says("image_bytes", lambda n: n + 4096), "COMMIT says"),
    "index: a smaller image": (_index_says("image_bytes", lambda n: n - 4096), "COMMIT says"),
    "index: other chunks": (_index_says("chunk_bytes", lambda n: 2 * n), "COMMIT says"),
    "index: another rank": (_index_says("rank", lambda n: n + 1), "COMMIT says"),
}


@pytest.mark.parametrize("what", DAMAGE)
def test_shards_that_do_not_belong_together_are_refused(what: str, tmp_path: Path) -> None:
    """Two generations in one directory, and an index that lies about sizes."""
    damage, match = DAMAGE[what]
    folder = commit(tmp_path / "run", HALVES)
    changed: list[Part] = [{"w": (-t, held)} for t, held in (part["w"] for part in HALVES)]
    damage(Path(folder), Path(commit(tmp_path / "other", changed, step=2)))
    assert G.name in folder
    require_refused(CorruptCheckpointError, match, folder, blank({"w": everything(FULL)}))
