"""Layout: where every byte stands.  Checked against safetensors' own reader, not against ours."""

import json
import math
from collections.abc import Callable
from dataclasses import replace
from typing import ClassVar

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import deserialize

from autockpt.executors.image.layout.boxes import Box
from autockpt.executors.image.layout.plan import (
    ELEMENT_BYTES,
    EXTRA,
    NATURAL_DTYPE,
    PAGE_BYTES,
    Layout,
    TensorSpec,
)
from autockpt.executors.image.layout.runs import Kind
from autockpt.values.errors import ConfigError

Plan = Callable[..., Layout]
Boxes = Callable[[int, int, tuple[int, ...]], list[Box]]

QUICK = settings(max_examples=120, deadline=None, suppress_health_check=list(HealthCheck))
FEW = settings(max_examples=30, deadline=None, suppress_health_check=list(HealthCheck))

NAMES = st.text(min_size=1, max_size=20).filter(lambda name: not name.startswith("__"))
SHAPES = st.lists(st.integers(0, 9), max_size=4).map(tuple) | st.sampled_from(
    [(1024,), (33, 64), (5000,), (64, 1024), (0, 7), ()]
)


def spec(
    name: str, dtype: str = "F32", shape: tuple[int, ...] = (3,), *, lazy: bool = True
) -> TensorSpec:
    """A tensor as `describe` would list it."""
    return TensorSpec(
        name=name, dtype=dtype, shape=shape, true_dtype=NATURAL_DTYPE[dtype], lazy=lazy,
        tensor_class="parameters" if lazy else "other",
    )  # fmt: skip


SPECS = st.lists(
    st.builds(spec, NAMES, st.sampled_from(sorted(ELEMENT_BYTES)), SHAPES, lazy=st.booleans()),
    max_size=12,
    unique_by=lambda one: one.name,
)


class LayoutContract:
    """Subclass and set `plan` (as `plan_layout`) and `boxes` (as `flat_range_boxes`)."""

    plan: ClassVar[Plan]
    boxes: ClassVar[Boxes]

    @QUICK
    @given(specs=SPECS, extra_bytes=st.sampled_from([0, 1, 4095, 4096, 10_000]))
    def test_entries_are_disjoint_aligned_and_inside(
        self, specs: list[TensorSpec], extra_bytes: int
    ) -> None:
        """No two tensors share a byte; large ones start on a page, small ones on their element."""
        layout = self.plan(specs, aliases={}, extra_bytes=extra_bytes)
        assert layout.image_bytes % PAGE_BYTES == 0
        assert len(layout.header) % PAGE_BYTES == 0
        assert {e.spec.name for e in layout.entries} == {EXTRA, *(s.name for s in specs)}
        end = len(layout.header)
        for entry in layout.entries:
            assert entry.offset >= end
            unit = PAGE_BYTES if entry.spec.nbytes >= PAGE_BYTES else 1
            assert entry.offset % max(unit, ELEMENT_BYTES[entry.spec.dtype]) == 0
            end = entry.end
        assert end <= layout.image_bytes

    @QUICK
    @given(specs=SPECS)
    def test_the_boundary_group_is_a_prefix(self, specs: list[TensorSpec]) -> None:
        """One counter tells how far the image is complete: boundary tensors never follow lazy."""
        layout = self.plan(specs, aliases={}, extra_bytes=4096)
        assert layout.boundary_end % PAGE_BYTES == 0
        for entry in layout.entries:
            if entry.spec.lazy:
                assert entry.offset >= layout.boundary_end
            else:
                assert entry.end <= layout.boundary_end

    @FEW
    @given(specs=SPECS)
    def test_another_reader_opens_it_and_finds_exactly_these_names(
        self, specs: list[TensorSpec]
    ) -> None:
        """safetensors refuses gaps, overlaps and unknown dtypes, so its consent proves it."""
        layout = self.plan(specs, aliases={}, extra_bytes=100)
        image = layout.header + bytes(layout.image_bytes - len(layout.header))
        found = dict(deserialize(image))
        names = {name for name in found if not name.startswith("__pad.")}
        assert names == {EXTRA, *(one.name for one in specs)}
        for one in specs:
            assert found[one.name]["dtype"] == one.dtype
            assert tuple(found[one.name]["shape"]) == one.shape

    @FEW
    @given(specs=SPECS)
    def test_the_header_says_where_the_entries_are(self, specs: list[TensorSpec]) -> None:
        """Offsets in the JSON are those of the entries, less the header."""
        layout = self.plan(specs, aliases={}, extra_bytes=100)
        length = int.from_bytes(layout.header[:8], "little")
        assert length == len(layout.header) - 8
        table = json.loads(layout.header[8:])
        for entry in layout.entries:
            start, stop = table[entry.spec.name]["data_offsets"]
            assert (start + 8 + length, stop + 8 + length) == (entry.offset, entry.end)
            assert layout.entry(entry.spec.name) is entry

    @FEW
    @given(specs=SPECS, data=st.data())
    def test_the_digest_does_not_depend_on_order(
        self, specs: list[TensorSpec], data: st.DataObject
    ) -> None:
        """The same state walked in another order is the same structure."""
        other = data.draw(st.permutations(specs))
        aliases = {"tied": "a", "again": "b"}
        turned = dict(reversed(aliases.items()))
        first = self.plan(specs, aliases=aliases, extra_bytes=1).digest
        assert first == self.plan(other, aliases=turned, extra_bytes=9999).digest

    @FEW
    @given(specs=SPECS.filter(bool), data=st.data())
    def test_the_digest_changes_with_every_structural_change(
        self, specs: list[TensorSpec], data: st.DataObject
    ) -> None:
        """Name, shape, dtype, true dtype, boxes, aliases, one tensor more or less."""
        from dataclasses import replace

        one = data.draw(st.sampled_from(specs))
        rest = [each for each in specs if each is not one]
        box = Box(offset=tuple(0 for _ in one.shape), shape=one.shape)
        changed = [
            replace(one, name=one.name + "'"),
            replace(one, shape=(*one.shape, 2)),
            replace(one, dtype="U8" if one.dtype != "U8" else "I8"),
            replace(one, true_dtype="float8_e8m0fnu"),
            replace(one, global_shape=(*one.shape, 9), boxes=(box,)),
            replace(one, global_shape=(*one.shape, 9), boxes=(box, box)),
        ]
        variants = [
            specs, rest, [*specs, spec(one.name + "+")],
            *([*rest, each] for each in changed if each.name not in {r.name for r in rest}),
        ]  # fmt: skip
        digests = [self.plan(v, aliases={}, extra_bytes=1).digest for v in variants]
        digests.append(self.plan(specs, aliases={"tied": one.name}, extra_bytes=1).digest)
        assert len(set(digests)) == len(digests)

    def test_tied_names_lead_to_one_entry(self) -> None:
        """Bytes are stored once; both names find them, an unknown one does not."""
        layout = self.plan([spec("wte")], aliases={"lm_head": "wte"}, extra_bytes=1)
        assert layout.entry("lm_head") is layout.entry("wte")
        assert [e.spec.name for e in layout.entries if e.spec.name != EXTRA] == ["wte"]
        with pytest.raises(KeyError, match="nobody"):
            layout.entry("nobody")

    def test_thousands_of_tied_names_fit_the_header(self) -> None:
        """The header's bound counts aliases, whose JSON stands inside JSON."""
        aliases = {f'module."{i}".é.weight': "wte" for i in range(3000)}
        layout = self.plan([spec("wte")], aliases=aliases, extra_bytes=1)
        assert json.loads(json.loads(layout.header[8:])["__metadata__"]["aliases"]) == aliases

    def test_states_beyond_this_machine_have_a_layout(self) -> None:
        """Petabytes and 32 dimensions: layout is arithmetic."""
        big = spec("big", "F64", (2**40, 2**4))
        deep = spec("deep", "U8", (10**6, *(1 for _ in range(31))))
        layout = self.plan([big, deep], aliases={}, extra_bytes=4096)
        assert layout.image_bytes > 2**47
        assert json.loads(layout.header[8:])["big"]["shape"] == [2**40, 2**4]

    @pytest.mark.parametrize(
        ("specs", "message"),
        [
            ([spec("a"), spec("a")], "'a' stands twice"),
            ([spec("__pad.1")], "'__pad.1' stands twice or is reserved"),
            ([spec(EXTRA)], "reserved"),
            ([spec("a\ud800")], "no Unicode text"),
        ],
    )
    def test_unusable_names_are_refused(self, specs: list[TensorSpec], message: str) -> None:
        """A name that our own entries use would be lost."""
        with pytest.raises(ConfigError, match=message):
            self.plan(specs, aliases={}, extra_bytes=1)

    def test_a_codec_covers_its_class_and_nothing_else(self) -> None:
        """A class that this state lacks encodes nothing instead of everything."""
        layout = self.plan([spec("w", shape=(4096,))], aliases={}, extra_bytes=1)
        assert layout.codec_ranges({"moments": "zstd"}) == ("none", ())
        name, (row,) = layout.codec_ranges({"parameters": "zstd"})
        entry = layout.entry("w")
        assert (name, row) == ("zstd", (entry.offset, entry.end, Kind().code, 0))

    def test_planes_know_kind_and_role_of_every_element(self) -> None:
        """Both moments are one class and two distributions; only a delta may use a base."""
        names = [f"optimizer.{p}.{key}" for p in "ab" for key in ("exp_avg", "exp_avg_sq")]
        moments = [replace(spec(name, shape=(4096,)), tensor_class="moments") for name in names]
        weights = spec("w", "BF16", shape=(4096,))
        layout = self.plan([weights, *moments], aliases={}, extra_bytes=1)
        name, rows = layout.codec_ranges({"parameters": "delta", "moments": "planes"})
        single, half = Kind(4, True).code, Kind(2, True, True).code
        assert name == "planes"
        assert [row[2:] for row in rows] == [
            (half, 0), (single, 1), (single, 2), (single, 1), (single, 2),
        ]  # fmt: skip

    def test_neighbours_of_one_kind_are_one_range(self) -> None:
        """A message for a thousand small tensors stays small."""
        layout = self.plan(
            [spec(f"w{i}", shape=(64,)) for i in range(100)], aliases={}, extra_bytes=1
        )
        assert len(layout.codec_ranges({"parameters": "planes"})[1]) == 1

    # ----------------------------------------------------------------- boxes of flat ranges

    def test_boxes_cover_a_flat_range_exactly(self) -> None:
        """20,000 random ranges: at most 2n-1 boxes, every element once, in flat order."""
        random = np.random.default_rng(20261121)
        for _ in range(20_000):
            shape = tuple(int(n) for n in random.integers(1, 5, size=random.integers(0, 5)))
            total = math.prod(shape)
            start, stop = sorted(int(n) for n in random.integers(0, total + 1, size=2))
            boxes = self.boxes(start, stop, shape)
            assert len(boxes) <= max(1, 2 * len(shape) - 1)
            at = start
            for box in boxes:
                at = _follow(box, shape, at)
            assert at == stop

    @pytest.mark.parametrize("shape", [(2, 3), (3, 1, 4), (5,), (2, 2, 2, 2)])
    def test_boxes_hold_the_elements_they_claim(self, shape: tuple[int, ...]) -> None:
        """Against numpy's own slicing, every range of a small tensor."""
        flat = np.arange(math.prod(shape))
        whole = flat.reshape(shape)
        for start in range(len(flat) + 1):
            for stop in range(start, len(flat) + 1):
                parts = [
                    whole[tuple(slice(o, o + n) for o, n in zip(b.offset, b.shape, strict=True))]
                    for b in self.boxes(start, stop, shape)
                ]
                held = np.concatenate([part.ravel() for part in parts] or [flat[:0]])
                assert held.tolist() == flat[start:stop].tolist()

    def test_empty_and_scalar_ranges(self) -> None:
        """Nothing is no box; a scalar is one of no dimension."""
        assert self.boxes(0, 0, (0, 4)) == []
        assert self.boxes(2, 2, (4,)) == []
        assert self.boxes(0, 1, ()) == [Box(offset=(), shape=())]

    @pytest.mark.parametrize(("start", "stop"), [(-1, 2), (0, 13), (5, 4)])
    def test_ranges_outside_the_tensor_are_refused(self, start: int, stop: int) -> None:
        """A wrong slice is an error and no silent piece."""
        with pytest.raises(ConfigError, match="does not fit a tensor of 12 elements"):
            self.boxes(start, stop, (3, 4))


def _follow(box: Box, shape: tuple[int, ...], at: int) -> int:
    """End of a box that must be contiguous in flat order and begin at `at`."""
    assert all(n >= 1 for n in box.shape), "an empty box"
    strides = [math.prod(shape[d + 1 :]) for d in range(len(shape))]
    assert sum(o * s for o, s in zip(box.offset, strides, strict=True)) == at
    assert all(o + n <= full for o, n, full in zip(box.offset, box.shape, shape, strict=True))
    partial = [d for d in range(len(shape)) if box.shape[d] != shape[d]]
    last = max(partial, default=-1)
    assert all(n == 1 for n in box.shape[: max(0, last)])
    return at + math.prod(box.shape)
