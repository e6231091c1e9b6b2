"""Byte planes: what they gain, what a base gains, and what is refused."""

import base64
import contextlib
import hashlib
import json
import random
import struct
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autockpt.executors.image.codecs.planes import PlanesCodec, entropy, packing
from autockpt.executors.image.codecs.planes.frame import CODED, NIBBLES, parse_header
from autockpt.executors.image.codecs.zstd import ZstdCodec
from autockpt.executors.image.layout.runs import BYTES, Kind, Run, runs_of
from autockpt.values.errors import ConfigError, CorruptCheckpointError

CODEC = PlanesCodec()
FLOATS = Kind(4, True, True)


def weights(count: int, seed: int = 0) -> np.ndarray:
    """As trained weights are: normal, of a small scale."""
    return (np.random.default_rng(seed).standard_normal(count) * 0.02).astype("<f4")


def view(values: np.ndarray) -> memoryview:
    """Its bytes."""
    return memoryview(np.ascontiguousarray(values)).cast("B")


def encoded(raw: memoryview, kind: Kind, base: memoryview | None = None) -> bytes:
    """As one run; decoded and compared on the way."""
    frame = bytes(CODEC.encode(raw, runs=[Run(len(raw), kind)], base=base))
    assert CODEC.decode(frame, len(raw), base=base) == raw
    return frame


def test_described_floats_shrink_more_than_bytes_do() -> None:
    """Normal fp32: the exponent has 2.6 bits of entropy, so 26.6 of 32 bits are left: 1.20."""
    raw = view(weights(2**18))
    described, plain = encoded(raw, Kind(4, True)), ZstdCodec().encode(raw)
    assert len(described) < len(raw) / 1.2 < len(plain)


def test_the_sign_is_not_in_the_way_of_the_exponent() -> None:
    """Smaller than planes of the bytes as they stand; 1.3 % on trained weights."""
    raw = view(weights(2**18))
    assert len(encoded(raw, Kind(4, True))) < 0.997 * len(encoded(raw, Kind(4)))


def test_noise_costs_next_to_nothing() -> None:
    """It is copied: a header and no more."""
    raw = memoryview(np.random.default_rng(1).bytes(2**20))
    assert len(encoded(raw, Kind(4))) < len(raw) + 100


def test_a_small_step_is_stored_in_half() -> None:
    """Differences in the last 12 bits of fp32: two of four planes are zeros."""
    old = weights(2**18).view("<u4")
    new = old + np.random.default_rng(2).integers(-2000, 2000, len(old)).astype("<u4")
    against, alone = encoded(view(new), FLOATS, view(old)), encoded(view(new), FLOATS)
    assert len(against) < 0.55 * len(alone)


def test_few_changed_rows_cost_what_they_hold() -> None:
    """An embedding of which 1 % of the rows changed: 1 % of its bytes and half a percent more."""
    old = weights(2**20).reshape(-1, 512)
    new = old.copy()
    rows = np.random.default_rng(3).choice(len(old), len(old) // 100, replace=False)
    new[rows] += 1.0
    raw = view(new)
    assert len(encoded(raw, FLOATS, view(old))) < 0.015 * len(raw)


def test_a_base_that_does_not_help_is_left_alone() -> None:
    """Differences of unrelated numbers are larger than the numbers; then no base is needed."""
    raw, other = view(weights(2**16)), view(weights(2**16, seed=9))
    frame = encoded(raw, FLOATS, other)
    assert CODEC.decode(frame, len(raw)) == raw


def test_what_may_not_be_a_difference_is_none() -> None:
    """A kind without `delta` decodes alone, whatever base there was."""
    raw = view(weights(2**16))
    assert CODEC.decode(encoded(raw, Kind(4, True), raw), len(raw)) == raw


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from([1, 2, 4, 8]).flatmap(
        lambda width: st.tuples(
            st.just(width),
            st.lists(
                st.tuples(
                    st.integers(0, 2 ** (8 * width) - 1), st.integers(0, 2 ** (8 * width) - 1)
                ),
                max_size=50,
            ),
        )
    )
)
def test_a_difference_is_exact_for_all_bits(case: tuple[int, list[tuple[int, int]]]) -> None:
    """Modulo the width of the element, in both directions."""
    width, pairs = case
    new, old = (view(np.array([pair[i] for pair in pairs], f"<u{width}")) for i in (0, 1))
    encoded(new, Kind(width, False, True), old)


@pytest.mark.parametrize("nbytes", [0, 2**16 - 4, 2**16 + 4, None])
def test_a_frame_of_differences_refuses_a_base_of_another_length(nbytes: int | None) -> None:
    """Missing, shorter, longer."""
    old = weights(2**14)
    frame = encoded(view(old * 1.0001), FLOATS, view(old))
    base = None if nbytes is None else memoryview(bytes(nbytes))
    with pytest.raises(CorruptCheckpointError, match="needs a base of 65536 bytes"):
        CODEC.decode(frame, 2**16, base=base)


def test_a_wrong_base_of_the_right_length_gives_wrong_bytes() -> None:
    """That is for the digest to find: the codec keeps the length."""
    old = weights(2**14)
    raw = view(old * 1.0001)
    frame = encoded(raw, FLOATS, view(old))
    got = CODEC.decode(frame, len(raw), base=memoryview(bytes(len(raw))))
    assert len(got) == len(raw)
    assert got != raw


@pytest.mark.parametrize(
    ("frame", "complaint"),
    [
        (b"", "unpack"),
        (b"XX\x01\x00\0\0\0\0", "begins with"),
        (b"PL\x01\x00\x01\x00\x01\x00", "its header needs"),
        (b"PL\x01\x00\x01\x00\x00\x00\x03" + bytes(15), "elements of 3 bytes"),
        (b"PL\x01\x00\x01\x00\x00\x00\xc1" + bytes(5), "no kind of element"),
        (struct.pack("<4sHHBIHBI", b"PL\1\0", 1, 1, 1, 65, 0, 0, 0), "chunk of 65 bytes"),
        (struct.pack("<4sHHBIHBI", b"PL\1\0", 1, 1, 1, 64, 7, 0, 64), "in group 7"),
        (struct.pack("<4sHHBIHBI", b"PL\1\0", 1, 1, 1, 64, 0, 0, 63), "for planes of 63"),
        (struct.pack("<4sHHBIHBI", b"PL\1\0", 1, 1, 1, 64, 0, 0, 2) + b"ab", "plane of 2 bytes"),
        (struct.pack("<4sHHBIHBI", b"PL\1\0", 1, 1, 1, 64, 0, 4, 0), "plane of 0 bytes"),
        (struct.pack("<4sHHBIHBI", b"PL\1\0", 1, 1, 1, 64, 0, 3, 0), "plane of 0 bytes"),
        (struct.pack("<4sHHBIHBI", b"PL\1\0", 1, 1, 1, 64, 0, 2, 0), "0 bytes of nibbles"),
        (struct.pack("<4sHHBBIHBI", b"PL\2\0", 1, 1, 4, 1, 64, 0, 0, 0), "1 low bytes of"),
        (
            struct.pack("<4sHHBBIHBI", b"PL\2\0", 1, 1, 4, 4, 64, 0, 1, 0) + bytes(3),
            "plane of 0 bytes",
        ),
        (b"PL\2\0\1\0\0\0\1", "its header needs"),
        (struct.pack("<4sHHBIHBI", b"PL\1\0", 1, 1, 1, 64, 0, 1, 2) + b"ab", "zstd frame"),
    ],
)
def test_a_forged_header_is_refused(frame: bytes, complaint: str) -> None:
    """Before anything is allocated by it; the message says what is wrong."""
    with pytest.raises(CorruptCheckpointError, match=complaint):
        CODEC.decode(frame, 64)


def test_a_plane_that_grows_is_refused_in_bounded_memory() -> None:
    """A zstd frame of 64 MiB where 64 KiB belong."""
    bomb = ZstdCodec().encode(memoryview(bytes(2**26)))
    frame = struct.pack("<4sHHBIHBI", b"PL\1\0", 1, 1, 1, 2**16, 0, 1, len(bomb)) + bomb
    tracemalloc.start()
    try:
        with pytest.raises(CorruptCheckpointError, match="zstd frame"):
            CODEC.decode(frame, 2**16)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 2**20


def test_flipped_bytes_of_a_difference_are_refused_or_keep_the_length() -> None:
    """In header, planes and codes."""
    old = weights(4096)
    raw = view(old * 1.001)
    frame, chance = bytearray(encoded(raw, FLOATS, view(old))), random.Random(5)
    for _ in range(500):
        place, bit = chance.randrange(len(frame)), 1 << chance.randrange(8)
        frame[place] ^= bit
        with contextlib.suppress(CorruptCheckpointError):
            assert len(CODEC.decode(bytes(frame), len(raw), base=view(old))) == len(raw)
        frame[place] ^= bit


@given(
    values=st.lists(st.integers(0, 255), min_size=1, max_size=300),
    lowest=st.integers(0, 255),
    piece_bytes=st.integers(2, 40),
)
def test_nibbles_give_back_every_plane(values: list[int], lowest: int, piece_bytes: int) -> None:
    """Whatever is beyond the 15 values, however it is cut; odd counts too."""
    plane = np.array(values, np.uint8)
    packer = packing.Nibbles(lowest, np.empty(len(plane) + len(plane) % 2, np.uint8))
    for start in range(0, len(plane), piece_bytes):
        packer.add(plane[start : start + piece_bytes])
    ended = packer.end()
    assert packer.plane(len(plane)).tolist() == values
    far = sum((value - lowest) % 256 >= 15 for value in values)
    if ended is None:
        assert far > (len(values) + 1) // 2
        return
    packed, escapes = ended
    assert escapes == far
    frame = packing.HEAD.pack(lowest, escapes) + entropy.compress(packed, entropy.PLAIN)
    pieces = list(packing.unpack(memoryview(frame), len(plane), piece_bytes))
    assert np.concatenate(pieces).tolist() == values


@pytest.mark.parametrize(
    ("escapes", "made", "complaint"),
    [
        (65, bytes(97), "65 escapes for 64 elements"),
        (1, bytes(33), "1 escapes for other nibbles"),
        (0, b"\xff" * 32, "0 escapes for other nibbles"),
        (0, bytes(31), "zstd frame: expected exactly 32 bytes"),
    ],
)
def test_escapes_that_do_not_fit_are_refused(escapes: int, made: bytes, complaint: str) -> None:
    """Too many, too few, and nibbles that are not there."""
    part = packing.HEAD.pack(3, escapes) + ZstdCodec().encode(memoryview(made))
    frame = struct.pack("<4sHHBBIHBI", b"PL\2\0", 1, 1, 1, 0, 64, 0, 2, len(part)) + bytes(3) + part
    with pytest.raises(CorruptCheckpointError, match=complaint):
        CODEC.decode(frame, 64)


def test_exponents_are_coded_in_pairs() -> None:
    """Half as many symbols for Huffman, and not a byte more."""
    raw = view(weights(2**18))
    header = parse_header(memoryview(encoded(raw, Kind(4, True))), len(raw), 0)
    assert [coding for coding, _ in header.parts] == [0, 0, 2]
    assert header.groups[0].widths == (2, 1, 1)


def test_rows_of_their_own_scale_have_codes_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Exponents of a matrix lie at other places in every row: 2 % smaller than with long blocks."""
    scales = np.exp2(np.random.default_rng(7).uniform(-8, 8, (32, 1)))
    raw = view((weights(2**20).reshape(32, -1) * scales).astype("<f4"))
    short = len(encoded(raw, Kind(4, True)))
    monkeypatch.setattr(entropy, "ROWS_BITS", (9.0, 9.0))
    assert short < 0.98 * len(encoded(raw, Kind(4, True)))


def test_rows_that_look_alike_are_matched() -> None:
    """Second moments are nearly products of a row and a column: exponents repeat 2560 on."""
    rng = np.random.default_rng(8)
    values = np.exp2(rng.integers(0, 2, (399, 1)) + rng.normal(0, 6, 2560)).astype("<f4")
    raw = view((values.view("<u4") >> 16).astype("<u2"))
    exponents = np.bincount((values.view("<u4") >> 23).ravel(), minlength=256) / values.size
    alone = -sum(part * np.log2(part) for part in exponents[exponents > 0]) / 8 * values.size
    header = parse_header(memoryview(encoded(raw, Kind(2, True))), len(raw), 0)
    assert header.parts[-1][1] < 0.5 * alone


def test_more_is_taken_out_of_nibbles_where_matches_pay() -> None:
    """5 % beyond the 15 values: rows that look alike are matched in pairs of elements, and smaller
    than Huffman makes the same exponents in another order, which stay bytes."""
    rng = np.random.default_rng(8)
    alike = np.exp2(rng.integers(0, 2, (399, 1)) + rng.normal(0, 3.75, 2560)).astype("<f4")
    codings = []
    for values in (alike, rng.permutation(alike.ravel())):
        raw = view((values.view("<u4") >> 16).astype("<u2"))
        codings.append(parse_header(memoryview(encoded(raw, Kind(2, True))), len(raw), 0).parts[-1])
    (matched, size), (alone, other_size) = codings
    assert (matched, alone) == (NIBBLES, CODED)
    assert size < 0.5 * other_size


def test_a_plane_that_its_sample_does_not_show_is_coded_all_the_same() -> None:
    """Few values where the sample looks, all of them elsewhere."""
    noise = np.random.default_rng(6).integers(0, 256, 2**20, np.uint8)
    for start in range(0, 2**20, 2**18):
        noise[start + 2**17 - 2048 : start + 2**17 + 2048] = 7
    assert len(encoded(view(noise), Kind(1))) < len(noise) * 1.01


def test_frames_of_the_first_version_are_read_for_ever() -> None:
    """Written by the release before halves and nibbles; the digest is of what it was given."""
    for case in json.loads((Path(__file__).parent / "frames_1.json").read_text()):
        frame, base = base64.b64decode(case["frame"]), base64.b64decode(case["base"])
        assert frame[:4] == b"PL\1\0"
        raw = CODEC.decode(frame, case["raw_bytes"], base=memoryview(base) if base else None)
        assert hashlib.sha256(raw).hexdigest() == case["sha256"], case["name"]


def test_a_chunk_of_very_many_runs_is_taken_as_bytes() -> None:
    """The header counts to 65535."""
    runs = [Run(1, Kind(1), i % 2) for i in range(70_000)]
    raw = memoryview(bytes(70_000))
    assert CODEC.decode(CODEC.encode(raw, runs=runs), 70_000) == raw


def test_runs_must_cover_the_chunk() -> None:
    """An error of ours, and not a silent loss."""
    with pytest.raises(ConfigError, match="runs of 8 bytes for a chunk of 12"):
        CODEC.encode(memoryview(bytes(12)), runs=[Run(8)])


def test_without_the_unstable_options_frames_are_read_all_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A zstd that refuses them gives somewhat larger frames of the same format."""
    raw = view(weights(2**16))
    best = encoded(raw, Kind(4, True))
    monkeypatch.setattr(entropy, "_is_known", lambda option, value: False)
    assert len(best) <= len(encoded(raw, Kind(4, True))) < 1.01 * len(best)


@given(
    rows=st.lists(
        st.tuples(st.integers(0, 300), st.integers(0, 100), st.sampled_from([1, 2, 4, 20]))
    )
)
def test_runs_of_chunks_cover_them_in_whole_elements(rows: list[tuple[int, int, int]]) -> None:
    """Whatever the ranges and wherever a chunk is cut."""
    ranges, at = [], 0
    for gap, count, code in rows:
        width = code & 15
        start = -(-(at + gap) // width) * width
        at = start + count * width
        ranges.append((start, at, code, 0))
    end = at + 50
    for low in range(0, end, 64):
        high = min(low + 64, end)
        runs = runs_of(ranges, low, high)
        assert sum(run.nbytes for run in runs) == (high - low if runs else 0)
        assert all(run.nbytes > 0 and run.nbytes % run.kind.width == 0 for run in runs)


def test_what_nobody_described_is_bytes() -> None:
    """Header, pads and classes without a codec."""
    got = runs_of([(8, 16, Kind(4, True).code, 1)], 0, 20)
    assert got == [Run(8, BYTES, 0), Run(8, Kind(4, True), 1), Run(4, BYTES, 0)]
    assert runs_of([(8, 16, Kind(4, True).code, 1)], 16, 20) == []
