"""Tensors put together from pieces: any box of any division, from real images on disk."""

import itertools
import tempfile
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import autockpt
from autockpt.executors.image.layout.boxes import Box, flat_range_boxes, whole
from autockpt.executors.storage.catalogue import ShardFileSource
from autockpt.integrations.formats.convert.committing import GenerationsOf
from autockpt.integrations.formats.convert.export import export
from autockpt.integrations.formats.convert.image_reader import Images, commit_of
from autockpt.integrations.formats.convert.image_writer import Ticket, spec_of, write_image
from autockpt.values.errors import AutockptError, ConfigError
from tests.unit.executors.states import bytes_of, random_tensor

CHUNK = 4096
"""Small, so that pieces stand across chunks."""
NOTHING = {"progress": {"step": 1}, "rng": None, "optimizers": {}, "modules": {}, "others": {}}
Parts = list[list[Box]]
"""By rank the boxes that it stores."""


def write_parts(path: str, tensor: torch.Tensor | list[torch.Tensor], parts: Parts) -> str:
    """A generation in which every rank stores its boxes of one tensor, called x; its folder.

    Ranks may see other values: then `tensor` is one for each.
    """
    seen = tensor if isinstance(tensor, list) else [tensor] * len(parts)
    return write_ranks(path, [{"x": mine} for mine in seen], [{"x": boxes} for boxes in parts])


def write_ranks(
    path: str, seen: list[dict[str, torch.Tensor]], parts: list[dict[str, list[Box]]]
) -> str:
    """A generation of what every rank sees of each tensor, and the boxes of it that it stores."""
    directory = GenerationsOf(path)
    generation = directory.begin(1)
    records = []
    for rank, (tensors, boxes) in enumerate(zip(seen, parts, strict=True)):
        ticket = Ticket(
            directory=directory.path, run_id=directory.run_id, generation=generation, step=1,
            rank=rank, world_size=len(parts), chunk_bytes=CHUNK,
        )  # fmt: skip
        held = {
            name: [tensors[name][box.slices_in(whole(tensors[name].shape))] for box in own]
            for name, own in boxes.items()
            if own
        }
        specs = [spec_of(n, tensors[n].dtype, tensors[n].shape, boxes[n]) for n in held]
        records.append(write_image(ticket, specs, {}, NOTHING, held.__getitem__))
    directory.commit(1, records)
    return f"{directory.path}/{generation.name}"


@st.composite
def divisions(draw: st.DrawFn) -> tuple[tuple[int, ...], Parts]:
    """(shape, parts): along a dimension, or flat ranges; some ranks have nothing, some several."""
    shape = tuple(draw(st.lists(st.integers(1, 40), min_size=1, max_size=3)))
    ranks = draw(st.integers(1, 4))
    parts: Parts = [[] for _ in range(ranks)]
    flat = draw(st.booleans())
    dimension = draw(st.integers(0, len(shape) - 1))
    size = int(torch.tensor(shape).prod()) if flat else shape[dimension]
    cuts = sorted({0, size, *draw(st.lists(st.integers(0, size), max_size=5))})
    for low, high in itertools.pairwise(cuts):
        owner = parts[draw(st.integers(0, ranks - 1))]
        if flat:
            owner += flat_range_boxes(low, high, shape)
        else:
            offset = tuple(low if d == dimension else 0 for d in range(len(shape)))
            length = tuple(high - low if d == dimension else n for d, n in enumerate(shape))
            owner.append(Box(offset=offset, shape=length))
    return shape, parts


def some_box(draw: st.DrawFn, shape: Sequence[int]) -> Box:
    """Any part of a tensor, also an empty one."""
    ends = [sorted((draw(st.integers(0, n)), draw(st.integers(0, n)))) for n in shape]
    return Box(offset=tuple(a for a, _ in ends), shape=tuple(b - a for a, b in ends))


@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_any_box_of_any_division_is_that_part_of_the_tensor(data: st.DataObject) -> None:
    """Bit for bit, whichever ranks store it and however it is cut."""
    shape, parts = data.draw(divisions())
    kind = data.draw(st.sampled_from(["float32", "bfloat16", "int8", "complex128"]))
    tensor = random_tensor(kind, shape, seed=data.draw(st.integers(0, 99)))
    boxes = [whole(shape), *(some_box(data.draw, shape) for _ in range(4))]
    with tempfile.TemporaryDirectory() as path:
        folder = write_parts(path, tensor, parts)
        images = Images(folder, commit_of(folder), range(len(parts)))
        lazy = images.lazy("x", images.stored.pieces("x"))
        assert (lazy.shape, lazy.dtype) == (shape, tensor.dtype)
        for box in boxes:
            expected = tensor[box.slices_in(whole(shape))]
            assert bytes_of(lazy.part(box)) == bytes_of(expected)
        images.close()


def test_only_the_chunks_of_a_box_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A row of a large tensor costs one chunk, not the image."""
    tensor = torch.arange(64 * 1024.0).view(64, 1024)
    rows = [Box(offset=(32 * r, 0), shape=(32, 1024)) for r in (0, 1)]
    folder = write_parts(str(tmp_path), tensor, [[rows[0]], [rows[1]]])
    images = Images(folder, commit_of(folder), range(2))
    asked: list[tuple[int, int]] = []
    plain = images._chunk

    def noted(rank: int, number: int) -> memoryview:
        asked.append((rank, number))
        return plain(rank, number)

    monkeypatch.setattr(images, "_chunk", noted)
    lazy = images.lazy("x", images.stored.pieces("x"))
    asked.clear()
    row = lazy.part(Box(offset=(40, 0), shape=(1, 1024)))
    assert torch.equal(row[0], tensor[40])
    assert [rank for rank, _ in asked] == [1]
    images.close()


def test_an_export_reads_every_chunk_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors in parts on three ranks, across chunks, with room for a fraction of the chunks."""
    tensors = {f"model.{n}": torch.randn(6, 900 + 200 * n) for n in range(12)}
    parts = [
        {n: [Box(offset=(2 * rank, 0), shape=(2, t.shape[1]))] for n, t in tensors.items()}
        for rank in range(3)
    ]
    folder = write_ranks(str(tmp_path / "c"), [tensors] * 3, parts)
    read: list[tuple[str, int]] = []
    plain = ShardFileSource.read

    def noted(self: ShardFileSource, chunk: int, memory: memoryview) -> memoryview:
        read.append((self.path, chunk))
        return plain(self, chunk, memory)

    monkeypatch.setattr(ShardFileSource, "read", noted)
    export(folder, str(tmp_path / "out"), "safetensors")
    assert len(read) == len(set(read)) > 3 * 8
    loaded = autockpt.load(str(tmp_path / "out"))["model"]
    assert all(torch.equal(loaded[n.removeprefix("model.")], t) for n, t in tensors.items())


def test_a_hole_is_an_error_that_names_it(tmp_path: Path) -> None:
    """No rank stores the middle; what is there can be read."""
    tensor = torch.arange(30.0)
    parts = [[Box(offset=(0,), shape=(10,))], [Box(offset=(20,), shape=(10,))]]
    folder = write_parts(str(tmp_path), tensor, parts)
    images = Images(folder, commit_of(folder), range(2))
    lazy = images.lazy("x", images.stored.pieces("x"))
    assert torch.equal(lazy.part(Box(offset=(22,), shape=(3,))), tensor[22:25])
    with pytest.raises(ConfigError, match=r"10 of 18 elements are in no shard.*\[10:20\]"):
        lazy.part(Box(offset=(8,), shape=(18,)))
    with pytest.raises(AutockptError, match="hold less of it than its shape says"):
        lazy.read()
    images.close()


def test_two_writers_of_one_directory_take_turns_by_term(tmp_path: Path) -> None:
    """The later one fences the earlier one, whose generation then does not count."""
    from autockpt.executors.storage.catalogue import list_generations
    from autockpt.values.errors import GuardError

    first = GenerationsOf(str(tmp_path))
    first.begin(1)
    second = GenerationsOf(str(tmp_path))
    with pytest.raises(GuardError, match="fenced by a newer incarnation"):
        first.commit(1, [])
    assert second.begin(1).term == 2
    assert not [r for r in list_generations(str(tmp_path)) if r.state == "committed"]
