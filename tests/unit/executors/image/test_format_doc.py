"""docs/reference/format.md is enough: the reader printed there reads checkpoints of the keeper."""

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from autockpt.executors.image.container import read_index, write_trailer
from autockpt.executors.keeper.saving.delta_bases import Base
from autockpt.executors.linux.memory import Arena
from autockpt.executors.state.live_state import LiveState
from autockpt.executors.storage.directory.directory import CheckpointDirectory
from autockpt.values.generation import Generation
from tests.unit.executors.checkpoints import commit_images
from tests.unit.executors.image.test_container import index
from tests.unit.executors.states import Holder, bytes_of, snapshot, step, trained

PAGE = Path(__file__).resolve().parents[4] / "docs" / "reference" / "format.md"


@pytest.fixture(scope="module")
def reader() -> Callable[[str], dict[tuple[int, str], tuple[str, list[int], bytes]]]:
    """`read_checkpoint` as the page prints it."""
    block = PAGE.read_text().split("## A reader\n")[1]
    code = "\n".join(line[4:] for line in block.splitlines())
    if sys.version_info >= (3, 14):
        code = code.replace("from backports import zstd", "from compression import zstd")
    names: dict[str, Any] = {}
    exec(compile(code, str(PAGE), "exec"), names)
    found: Callable[[str], Any] = names["read_checkpoint"]
    return found


@pytest.fixture(params=["none", "zstd", "planes", "delta"])
def checkpoint(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, LiveState]:
    """Two generations of a trained job with tied weights, and its state at the newer one."""
    model, optimizer = trained()
    model.tied = next(model.parameters())
    state = LiveState.of(model=model, optimizer=optimizer, other=Holder({"best": (1.5, "x")}))
    directory = CheckpointDirectory(str(tmp_path))
    run_id = directory.open()
    directory.claim(run_id, "launch", 0, force=False)
    codec, base = request.param.replace("delta", "planes"), None
    for number in (9, 10):
        step(model, optimizer)
        arena, shooter = snapshot(state, progress={"step": number})
        shooter.close()
        assert shooter.layout is not None
        classes = dict.fromkeys(("parameters", "moments"), request.param)
        generation, image = (
            Generation(term=1, step=number),
            arena.view[: shooter.layout.image_bytes],
        )
        folder = commit_images(
            directory, run_id, generation, [image], codec=codec, step=number, base=base,
            codec_ranges=shooter.layout.codec_ranges(classes)[1],
        )  # fmt: skip
        if request.param == "delta":
            text = Path(folder, "idx-00000-a1.json").read_bytes()
            base = Base(image, read_index(text, where="index"), bases=0)
    return tmp_path, state


def test_a_stranger_reads_every_tensor(
    checkpoint: tuple[Path, LiveState], reader: Callable[[str], Any]
) -> None:
    """Names, dtypes, shapes and bytes; tied names too."""
    path, state = checkpoint
    found = reader(str(path))
    for name, tensor in state.tensors.items():
        dtype, shape, data = found[0, name]
        assert data == bytes_of(tensor)
        assert shape == list(tensor.shape)
        assert dtype in ("F32", "I64")
    assert found[0, "model.tied"] == found[0, "model.0.weight"]


def test_a_stranger_reads_the_skeleton(
    checkpoint: tuple[Path, LiveState], reader: Callable[[str], Any]
) -> None:
    """Progress and marks as the page says."""
    path, _ = checkpoint
    skeleton = json.loads(reader(str(path))[0, "__extra"][2])
    assert set(skeleton) == {"progress", "rng", "optimizers", "modules", "others"}
    assert skeleton["progress"] == {"step": 10}
    assert skeleton["others"]["other"] == {"best": {"$tuple": [1.5, "x"]}}


@pytest.mark.parametrize("name", ["COMMIT", "idx-00000-a1.json", "shard-00000-a1.safetensors"])
def test_a_stranger_notices_damage(
    checkpoint: tuple[Path, LiveState], reader: Callable[[str], Any], name: str
) -> None:
    """A digit in COMMIT or index, a byte in a shard."""
    path, _ = checkpoint
    file = path / "ckpt-t0001-step-00000010" / name
    data = bytearray(file.read_bytes())
    if name.startswith("shard"):
        stored = json.loads(file.with_name("idx-00000-a1.json").read_text())["stored"]
        data[stored[0]["offset"] + 30 if stored else 30] ^= 1
    else:
        data = bytearray(re.sub(rb'"term":1', b'"term":2', bytes(data), count=1))
    file.write_bytes(data)
    with pytest.raises(Exception, match=r"damaged|not the one that was committed|corruption"):
        reader(str(path))


def test_the_page_lists_every_key_that_is_written(checkpoint: tuple[Path, LiveState]) -> None:
    """A new field without a word about it fails here."""
    path, _ = checkpoint
    text = PAGE.read_text()
    folder = path / "ckpt-t0001-step-00000010"
    commit = json.loads((folder / "COMMIT").read_text())
    index_keys = set(json.loads((folder / "idx-00000-a1.json").read_text()))
    for key in (
        *commit,
        *commit["records"][0],
        *index_keys,
        *json.loads((path / "RUN").read_text()),
    ):
        assert f"`{key}`" in text or f'"{key}"' in text, key
    for name in (entry.name for entry in path.iterdir()):
        assert name in text or name.startswith("ckpt-"), name


def test_the_trailer_is_what_the_page_says() -> None:
    """Magic, length, sha256, text."""
    import hashlib

    arena = Arena.anonymous(4096)
    write_trailer(arena.view, index())
    assert bytes(arena.view[:8]) == b"ACKPTTR1"
    length = int.from_bytes(arena.view[8:16], "little")
    text = bytes(arena.view[48 : 48 + length])
    assert hashlib.sha256(text).digest() == bytes(arena.view[16:48])
    assert json.loads(text)["run_id"] == "r" * 32


def test_every_mark_of_the_skeleton_is_on_the_page() -> None:
    """Read from the source that writes them."""
    from autockpt.executors.state import state_tree

    source = Path(state_tree.__file__).read_text()
    for mark in set(re.findall(r'"(\$[a-z_]+)"', source)):
        assert f'"{mark}"' in PAGE.read_text(), mark
