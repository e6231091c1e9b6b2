"""The image in a slot keeps the image contract; trailer, index and hostile headers."""

import json
import os
import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from autockpt.executors.image.container import (
    MAX_INDEX_BYTES,
    ImageIndex,
    StoredChunk,
    chunk_digest,
    clear_trailer,
    header_bytes,
    read_header,
    read_index,
    read_trailer,
    trailer_capacity,
    write_trailer,
)
from autockpt.executors.image.layout.plan import plan_layout
from autockpt.executors.linux.memory import Arena
from autockpt.executors.snapshot.snapshotter import Snapshotter
from autockpt.executors.state.live_state import LiveState
from autockpt.values.errors import ConfigError, CorruptCheckpointError
from autockpt.values.generation import Generation
from autockpt.values.plan import MAX_CHUNK_BYTES
from autockpt.values.record import to_json
from tests.contracts.image_contract import ImageContract
from tests.contracts.layout_contract import spec
from tests.unit.executors.states import Holder, Module, bytes_of, snapshot


def lazy_image(state: LiveState) -> bytes:
    """Copied under compute."""
    return _image(state, lazy=True)


def blocking_image(state: LiveState) -> bytes:
    """Copied inside the boundary."""
    return _image(state, lazy=False)


def _image(state: LiveState, *, lazy: bool) -> bytes:
    arena, shooter = snapshot(state, lazy=lazy)
    assert shooter.layout is not None
    image = bytes(arena.view[: shooter.layout.image_bytes])
    shooter.close()
    arena.close()
    return image


class TestLazyImage(ImageContract):
    """The default schedule."""

    image = staticmethod(lazy_image)


class TestBlockingImage(ImageContract):
    """The schedule of a presets that blocks."""

    image = staticmethod(blocking_image)


# --- slots are used again ------------------------------------------------------------------------


def places(arena: Arena) -> dict[str, bytes]:
    """Tensors as the image's own header finds them."""
    length = header_bytes(arena.view, arena.nbytes)
    header = read_header(bytes(arena.view[:length]), arena.nbytes)
    found = {n: bytes(arena.view[p.start : p.stop]) for n, p in header.tensors.items()}
    return found | {alias: found[name] for alias, name in header.aliases.items()}


def test_a_tensor_moved_to_the_boundary_moves_in_the_header_too() -> None:
    """After a discarded snapshot the layout has the same digest and other places."""
    model = Module([("a", torch.randn(100, 30)), ("b", torch.randn(7, 300))])
    state = LiveState.of(model=model)
    arena, shooter = snapshot(state)
    state.not_lazy.add("model.b")
    shooter.begin(arena, {"step": 2}, lazy=True)
    assert shooter.fence() == []
    found = places(arena)
    assert found["model.a"] == bytes_of(model.a)
    assert found["model.b"] == bytes_of(model.b)
    shooter.close()


def test_new_slots_get_a_header_whatever_object_they_replace() -> None:
    """Python reuses the id of a closed slot; the header must be written again all the same."""
    state = LiveState.of(model=Module([("a", torch.randn(10))]))
    shooter = Snapshotter(state, memoryview(bytearray(64)))
    for _ in range(5):
        arena = Arena.anonymous(2**16)
        shooter.begin(arena, {"step": 1}, lazy=False)
        assert shooter.fence() == []
        assert "model.a" in places(arena)
        arena.close()
        shooter.current = None
        del arena
    shooter.close()


def test_tensors_that_stop_sharing_memory_stop_being_aliases() -> None:
    """An EMA that begins as a reference to the weights and becomes a copy is saved as the copy."""
    weight = torch.zeros(50)
    ema = Holder({"now": weight, "best": weight})
    state = LiveState.of(model=Module([("w", torch.ones(3))]), ema=ema)
    arena, shooter = snapshot(state)
    assert places(arena)["ema.best"] == bytes_of(weight)
    ema.state = {"now": torch.full((50,), 2.0), "best": torch.full((50,), 3.0)}
    shooter.begin(arena, {"step": 2}, lazy=True)
    assert shooter.fence() == []
    found = places(arena)
    assert found["ema.now"] == bytes_of(ema.state["now"])
    assert found["ema.best"] == bytes_of(ema.state["best"])
    shooter.close()


def test_a_state_that_outgrew_its_slot_is_refused_before_a_byte_is_copied() -> None:
    """The slot keeps what it held."""
    state = LiveState.of(model=Module([("a", torch.randn(100_000))]))
    shooter = Snapshotter(state, memoryview(bytearray(64)))
    arena = Arena.anonymous(2**14)
    with pytest.raises(ConfigError, match="the image grew to"):
        shooter.begin(arena, {"step": 1}, lazy=True)
    assert bytes(arena.view) == bytes(arena.nbytes)
    shooter.close()


# --- index and trailer ---------------------------------------------------------------------------


def index(**changes: Any) -> ImageIndex:
    """A valid index of three chunks, the last one short."""
    values: dict[str, Any] = {
        "run_id": "r" * 32, "generation": Generation(term=2, step=5), "step": 40, "rank": 1,
        "world_size": 4, "layout_digest": "ab" * 16, "image_bytes": 2 * 2**16 + 4096,
        "chunk_bytes": 2**16,
        "digests": tuple(chunk_digest(memoryview(bytes([i]) * 9)) for i in range(3)),
    }  # fmt: skip
    return ImageIndex(**values | changes)


def test_every_identity_is_bound_into_the_root() -> None:
    """A perfect chunk at another place, of another run, generation, rank or layout fails."""
    base = index()
    changed = [
        index(run_id="s" * 32),
        index(generation=Generation(term=2, step=6)),
        index(generation=Generation(term=3, step=5)),
        index(rank=2),
        index(world_size=5),
        index(layout_digest="ba" * 16),
        index(image_bytes=2 * 2**16 + 8192),
        index(chunk_bytes=2**17, image_bytes=2 * 2**17 + 4096),
        index(digests=(base.digests[1], base.digests[0], base.digests[2])),
        index(digests=(*base.digests[:2], "0" * 32)),
    ]
    assert len({base.root, *(one.root for one in changed)}) == len(changed) + 1
    assert replace(base, step=41).root == base.root  # a label, never an identity


def test_chunks_tile_the_image() -> None:
    """Ranges meet, and the last one ends with the image."""
    base = index()
    ranges = [base.chunk_range(i) for i in range(3)]
    assert ranges == [(0, 2**16), (2**16, 2**17), (2**17, 2**17 + 4096)]


def test_a_chunk_that_differs_names_everything_needed_to_find_it() -> None:
    """Where, which chunk of which generation, expected and got."""
    base = index()
    base.check(1, memoryview(bytes([1]) * 9), source="shard")
    with pytest.raises(
        CorruptCheckpointError, match=r"shard: rank 1, chunk 1 of .* step 5 \(term 2\): expected"
    ):
        base.check(1, memoryview(bytes([2]) * 9), source="shard")


@pytest.mark.parametrize(
    "changes",
    [
        {"digests": ()},
        {"image_bytes": 0, "digests": ()},
        {"image_bytes": -1},
        {"chunk_bytes": 0},
        {"chunk_bytes": -4096},
        {"chunk_bytes": 2 * MAX_CHUNK_BYTES, "digests": ("00",)},
        {"stored": (StoredChunk(offset=0, length=1, digest=""),)},
    ],
)
def test_an_index_that_does_not_add_up_is_refused(changes: dict[str, Any]) -> None:
    """Nobody allocates or loops by a size that contradicts the digests."""
    with pytest.raises(ConfigError, match="index of rank 1"):
        index(**changes)


def test_an_index_reads_back_or_is_corrupt() -> None:
    """The reader's error is the restore's: take an older one."""
    text = to_json(index()).encode()
    assert read_index(text, where="idx") == index()
    with pytest.raises(CorruptCheckpointError, match="idx: not valid JSON"):
        read_index(text[:-5], where="idx")
    with pytest.raises(CorruptCheckpointError, match="is not plausible"):
        read_index(bytes(MAX_INDEX_BYTES + 1), where="idx")


def test_a_trailer_makes_a_slot_self_describing() -> None:
    """Written, read, cleared; a longer one replaces a shorter one."""
    region = memoryview(bytearray(trailer_capacity(2**18, 2**16)))
    assert read_trailer(region) is None
    write_trailer(region, index())
    assert read_trailer(region) == index()
    write_trailer(region, index(run_id="another"))
    assert read_trailer(region) == index(run_id="another")
    clear_trailer(region)
    assert read_trailer(region) is None


def test_a_damaged_trailer_is_none_whichever_byte_it_is() -> None:
    """Every byte that is read counts: magic, length, digest, text."""
    region = memoryview(bytearray(trailer_capacity(2**18, 2**16)))
    write_trailer(region, index())
    used = 48 + len(to_json(index()))
    for place in range(used):
        region[place] ^= 1 << (place % 8)
        assert read_trailer(region) is None, place
        region[place] ^= 1 << (place % 8)
    assert read_trailer(region) == index()


@pytest.mark.parametrize("size", [0, 1, 8, 47, 48])
def test_a_region_too_short_for_a_trailer_holds_none(size: int) -> None:
    """A hostile or old slot may have any size."""
    assert read_trailer(memoryview(bytearray(b"ACKPTTR1" + bytes(40))[:size])) is None


def test_the_capacity_holds_any_index_of_that_many_chunks() -> None:
    """Long run ids and numbers fit; an absurd one is refused before the slot is touched."""
    image_bytes, chunk_bytes = 50 * 2**16, 2**16
    region = memoryview(bytearray(trailer_capacity(image_bytes, chunk_bytes)))
    long = index(
        image_bytes=image_bytes, chunk_bytes=chunk_bytes, digests=("f" * 32,) * 50,
        generation=Generation(term=999_999, step=999_999_999), step=2**53, world_size=10**6,
    )  # fmt: skip
    write_trailer(region, long)
    assert read_trailer(region) == long
    with pytest.raises(ConfigError, match="does not fit"):
        write_trailer(region, replace(long, run_id="x" * 10_000))


# --- hostile headers -----------------------------------------------------------------------------

BASE = 4096
IMAGE = 4 * 4096


def packed(table: Any) -> bytes:
    """A header region of one page."""
    text = table if isinstance(table, bytes) else json.dumps(table).encode()
    return (BASE - 8).to_bytes(8, "little") + text.ljust(BASE - 8)


def row(start: Any = 0, stop: Any = 16, shape: Any = (4,), dtype: Any = "F32") -> dict[str, Any]:
    """One tensor of a header."""
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, stop]}


HOSTILE: dict[str, Any] = {
    "no JSON": b"\xff\xfe",
    "empty": b"",
    "a list": [],
    "a number": 3,
    "deep": b"[" * 3000,
    "deep object": b'{"a":' * 600,
    "name twice": b'{"a":'
    + json.dumps(row()).encode()
    + b',"a":'
    + json.dumps(row()).encode()
    + b"}",
    "NaN": b'{"a":NaN}',
    "row is a list": {"a": []},
    "row is null": {"a": None},
    "no dtype": {"a": {"shape": [4], "data_offsets": [0, 16]}},
    "unknown dtype": {"a": row(dtype="F4096")},
    "dtype is a list": {"a": row(dtype=["F32"])},
    "unknown dtype of an empty tensor": {"a": row(0, 0, (0,), "nope")},
    "negative start": {"a": row(-16, 0)},
    "backwards": {"a": row(16, 0)},
    "beyond the image": {"a": row(IMAGE - BASE - 8, IMAGE - BASE + 8)},
    "far beyond": {"a": row(0, 2**62, (2**60,))},
    "wrong count": {"a": row(0, 12)},
    "negative size": {"a": row(0, 16, (-2, -2))},
    "huge sizes": {"a": row(0, 16, (10**4000, 10**4000))},
    "many sizes": {"a": row(0, 4, (1,) * 400)},
    "sizes are text": {"a": row(0, 16, ["4"])},
    "shape is text": {"a": row(0, 16, "4")},
    "shape is an object": {"a": row(0, 4, {})},
    "fractions": {"a": row(0.0, 16.0)},
    "truth": {"a": row(False, 4, (1,))},
    "one offset": {"a": {"dtype": "F32", "shape": [4], "data_offsets": [0]}},
    "overlap": {"a": row(0, 16), "b": row(12, 28)},
    "same bytes": {"a": row(0, 16), "b": row(0, 16)},
    "overlap with a pad": {"a": row(0, 16), "__pad.0": row(8, 24, (16,), "U8")},
    "metadata is a list": {"__metadata__": []},
    "metadata of numbers": {"__metadata__": {"view:a": 7}},
    "aliases are no JSON": {"__metadata__": {"aliases": "{"}},
    "aliases are a list": {"__metadata__": {"aliases": "[]"}},
    "aliases of numbers": {"a": row(), "__metadata__": {"aliases": '{"b":1}'}},
    "alias of nothing": {"a": row(), "__metadata__": {"aliases": '{"b":"c"}'}},
    "alias of a tensor": {"a": row(), "__metadata__": {"aliases": '{"a":"a"}'}},
}


@pytest.mark.parametrize("table", HOSTILE.values(), ids=HOSTILE)
def test_a_hostile_header_is_corrupt_and_nothing_else(table: Any) -> None:
    """One exception type, so that the restore tries the next source."""
    with pytest.raises(CorruptCheckpointError, match="image header is malformed"):
        read_header(packed(table), IMAGE)


def test_a_header_that_is_sound_is_read() -> None:
    """The attacks above differ from this in one thing each."""
    meta = {"aliases": '{"b":"a"}', "view:a": "float32"}
    header = read_header(
        packed({"__metadata__": meta, "a": row(), "__pad.1": row(16, 20, (4,), "U8")}), IMAGE
    )
    assert (header.tensors["a"].start, header.tensors["a"].stop) == (BASE, BASE + 16)
    assert header.aliases == {"b": "a"}
    assert header.true_dtypes == {"a": "float32"}
    assert set(header.tensors) == {"a"}


@pytest.mark.parametrize("length", [0, 1, IMAGE - 7, 2**31, MAX_INDEX_BYTES + 1, 2**63, 2**64 - 1])
def test_a_claimed_header_length_is_checked_before_anybody_reads_by_it(length: int) -> None:
    """Neither below the smallest JSON nor beyond the image nor beyond the bound."""
    first = memoryview(length.to_bytes(8, "little") + bytes(100))
    with pytest.raises(CorruptCheckpointError, match=f"header claims {length}"):
        header_bytes(first, IMAGE)


def test_short_beginnings_are_no_header() -> None:
    """An image of a few bytes has no room for one."""
    for size in range(8):
        with pytest.raises(CorruptCheckpointError, match="header claims"):
            header_bytes(memoryview(bytes(size)), size)


def _mutations() -> list[Callable[[random.Random, bytearray], None]]:
    def flip(chance: random.Random, data: bytearray) -> None:
        data[chance.randrange(8, len(data))] ^= 1 << chance.randrange(8)

    def noise(chance: random.Random, data: bytearray) -> None:
        at = chance.randrange(8, len(data))
        data[at : at + 9] = os.urandom(0) + chance.randbytes(len(data[at : at + 9]))

    def digits(chance: random.Random, data: bytearray) -> None:
        at = [i for i in range(8, len(data)) if data[i : i + 1].isdigit()]
        data[chance.choice(at)] = ord(chance.choice("0123456789-.eE"))

    return [flip, noise, digits]


def test_no_damage_makes_a_header_anything_but_corrupt_or_consistent() -> None:
    """4,000 mutated headers: CorruptCheckpointError, or places inside the image."""
    chance = random.Random(20261121)
    specs = [spec(f"t{i}", "F32", (i, 7), lazy=bool(i % 2)) for i in range(6)]
    layout = plan_layout(specs, aliases={"tied": "t2"}, extra_bytes=64)
    text = layout.header.rstrip(b" ")
    refused = 0
    for _ in range(4000):
        data = bytearray(text)
        for _ in range(chance.randint(1, 3)):
            chance.choice(_mutations())(chance, data)
        padded = bytes(data).ljust(len(layout.header))
        try:
            header = read_header(padded, layout.image_bytes)
        except CorruptCheckpointError:
            refused += 1
            continue
        for place in header.tensors.values():
            assert len(padded) <= place.start <= place.stop <= layout.image_bytes
    assert refused > 2000
