"""Frames refuse whatever is not exactly what was made."""

import contextlib
import tracemalloc

import pytest
import torch
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from autockpt.executors.image.codecs.lossy import entropy, frame
from autockpt.executors.image.codecs.lossy.coding import decode, encode_lossless, form_of
from autockpt.executors.image.codecs.lossy.frame import Form
from autockpt.values.errors import CorruptCheckpointError
from tests.unit.executors.image.codecs.lossy.groups import Group, coded, trained_group

QUICK = settings(max_examples=150, deadline=None)
GROUP, BASE = trained_group()
SMALL, SMALL_BASE = trained_group((40,))
FRAMES: list[tuple[bytes, tuple[torch.Tensor, ...], torch.Tensor | None]] = [
    (coded(GROUP, BASE).frames[0], GROUP, BASE),
    (coded(SMALL, SMALL_BASE).frames[0], SMALL[:1], SMALL_BASE),
    (coded(SMALL, SMALL_BASE).frames[1], SMALL[1:2], None),
    (coded(SMALL, SMALL_BASE).frames[2], SMALL[2:], None),
    (encode_lossless(SMALL[0]).frames[0], SMALL[:1], None),
    (encode_lossless(SMALL[0], SMALL[0]).frames[0], SMALL[:1], SMALL[0]),
]
"""One of each kind: (frame, tensors that it is of, base)."""


def forms(tensors: tuple[torch.Tensor, ...]) -> list[Form]:
    """Of tensors."""
    return [form_of(tensor) for tensor in tensors]


def signed(body: bytes) -> bytes:
    """With a digest that fits, as somebody would write it on purpose."""
    return body + xxhash.xxh3_128_digest(body)


def test_there_is_a_frame_of_every_kind() -> None:
    """The tests below miss none."""
    assert {frame.parse(data).kind for data, _, _ in FRAMES} == set(frame.KINDS)


@pytest.mark.parametrize("number", range(len(FRAMES)))
def test_every_flipped_bit_and_every_cut_is_refused(number: int) -> None:
    """Wherever it stands."""
    data, tensors, base = FRAMES[number]
    for at in range(0, len(data), max(1, len(data) // 150)):
        damaged = bytearray(data)
        damaged[at] ^= 1 << at % 8
        for wrong in (bytes(damaged), data[:at], data + data[: at + 1]):
            with pytest.raises(CorruptCheckpointError, match="frame"):
                decode(wrong, forms(tensors), base)


@QUICK
@given(
    number=st.integers(0, len(FRAMES) - 1), at=st.integers(0, 10**6), new=st.binary(max_size=40),
    drop=st.integers(0, 40),
)  # fmt: skip
def test_forged_frames_are_refused_or_come_out_right(
    number: int, at: int, new: bytes, drop: int
) -> None:
    """A digest can be made to fit; then what comes out is compared, and nothing else is raised."""
    data, tensors, base = FRAMES[number]
    body = bytearray(data[: -frame.DIGEST_BYTES])
    at %= len(body)
    body[at : at + drop] = new
    with contextlib.suppress(CorruptCheckpointError):
        out = decode(signed(bytes(body)), forms(tensors), base)
        assert [form_of(tensor) for tensor in out] == forms(tensors)


@QUICK
@given(data=st.binary(max_size=300), sign=st.booleans())
def test_garbage_is_corrupt(data: bytes, sign: bool) -> None:
    """Never another exception."""
    with pytest.raises(CorruptCheckpointError, match="frame"):
        decode(signed(data) if sign else data, forms(GROUP), BASE)


@pytest.mark.parametrize("number", [0, 1, 5])
def test_a_wrong_or_missing_base_is_refused(number: int) -> None:
    """One element that differs in its last bit is enough."""
    data, tensors, base = FRAMES[number]
    assert base is not None
    other = base.clone()
    other.view(torch.int32).view(-1)[7] ^= 1
    for wrong in (None, other, base.double(), base.reshape(-1)[:3]):
        with pytest.raises(CorruptCheckpointError, match="against another tensor"):
            decode(data, forms(tensors), wrong)


@pytest.mark.parametrize("number", range(len(FRAMES)))
def test_a_frame_of_other_tensors_is_refused(number: int) -> None:
    """Shape and dtype are what the reader expects, whatever the frame says."""
    data, tensors, base = FRAMES[number]
    bigger = [Form(dtype=t.dtype, shape=(2, *t.shape)) for t in tensors]
    other = [Form(dtype=torch.float16, shape=tuple(t.shape)) for t in tensors]
    for wrong in (bigger, other, forms(tensors) * 2, []):
        with pytest.raises(CorruptCheckpointError, match="frame"):
            decode(data, wrong, base)


@pytest.mark.parametrize("number", range(len(FRAMES)))
def test_a_bomb_takes_no_memory(number: int) -> None:
    """Streams that claim gigabytes are cut where the tensor ends."""
    data, tensors, base = FRAMES[number]
    parsed = frame.parse(data)
    bomb = entropy.squeezed(bytes(2**28), 1)
    streams = [bomb] * len(parsed.streams)
    forged = frame.pack(parsed.kind, tensors, streams, parsed.base)
    tracemalloc.start()
    try:
        if parsed.streams:
            with pytest.raises(CorruptCheckpointError, match="frame"):
                decode(forged, forms(tensors), base)
        assert tracemalloc.get_traced_memory()[1] < 2**22
    finally:
        tracemalloc.stop()


def test_another_version_says_so() -> None:
    """Kinds and magics of the future."""
    body = bytearray(FRAMES[0][0][: -frame.DIGEST_BYTES])
    for at, value in ((4, ord("2")), (5, 99), (6, 99), (7, 99)):
        changed = bytearray(body)
        changed[at] = value
        with pytest.raises(CorruptCheckpointError, match="use the version that wrote it"):
            decode(signed(bytes(changed)), forms(GROUP), BASE)


def test_a_group_is_a_tuple_of_three() -> None:
    """The helpers speak of the same thing."""
    group: Group = GROUP
    assert len(group) == 3
