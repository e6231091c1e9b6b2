"""NaN in what is trained makes a generation suspect, wherever it stands; infinities do not."""

import json
import random
import tracemalloc

import numpy as np
import pytest

from autockpt.executors.image.nan_check import (
    BLOCK_BYTES,
    SAMPLED,
    SMALL_BYTES,
    NanScan,
    first_nan,
    floats_in,
    sampled_nan,
)

WIDTHS = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}
NAN = {
    "F64": b"\0\0\0\0\0\0\xf8\x7f", "F32": b"\0\0\xc0\xff", "F16": b"\x01\x7c", "BF16": b"\x81\xff",
}  # fmt: skip
INFINITY = {
    "F64": b"\0\0\0\0\0\0\xf0\x7f", "F32": b"\0\0\x80\xff", "F16": b"\0\x7c", "BF16": b"\x80\xff",
}  # fmt: skip


def image(**tensors: tuple[str, bytes]) -> bytearray:
    """A header of a page, then the tensors."""
    table, offset = {}, 0
    for name, (dtype, data) in tensors.items():
        shape = [len(data) // WIDTHS.get(dtype, 1)]
        table[name] = {"dtype": dtype, "shape": shape, "data_offsets": [offset, offset + len(data)]}
        offset += len(data)
    text = json.dumps(table).encode().ljust(4096 - 8)
    return bytearray((4088).to_bytes(8, "little") + text + b"".join(d for _, d in tensors.values()))


def look(data: bytearray, *, beyond: int = 0) -> str:
    """In chunks of sizes that fit nothing, smaller and larger than the header."""
    found = set()
    for size in (8, 1000, 5000, len(data)):
        scan = NanScan(len(data), beyond=beyond)
        for start in range(0, len(data), size):
            scan.take(start, memoryview(data)[start : start + size])
        found.add(scan.found)
    (one,) = found
    return one


@pytest.mark.parametrize("dtype", ["F32", "BF16"])
def test_no_piece_is_copied(dtype: str) -> None:
    """A streamed image is looked at where no memory is left for copies."""
    data = memoryview(image(w=(dtype, bytes(2**23))))
    NanScan(len(data), beyond=0).take(0, data)  # imports what it needs
    tracemalloc.start()
    NanScan(len(data), beyond=0).take(0, data)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2**19


@pytest.mark.parametrize("dtype", sorted(WIDTHS))
def test_a_nan_is_found_at_every_place_and_an_infinity_is_none(dtype: str) -> None:
    """First, last and random elements, of either sign."""
    width, rng = WIDTHS[dtype], random.Random(1)
    for place in (0, 699, *(rng.randrange(700) for _ in range(20))):
        for bits, expected in ((NAN, "w"), (INFINITY, "")):
            data = bytearray(700 * width)
            data[place * width : (place + 1) * width] = bits[dtype]
            assert look(image(w=(dtype, bytes(data)), z=(dtype, bytes(8)))) == expected, place


def test_infinities_of_both_signs_add_to_no_nan() -> None:
    """Their sum is NaN, and neither of them."""
    assert look(image(w=("F32", INFINITY["F32"] + b"\0\0\x80\x7f"))) == ""


def test_a_signalling_nan_is_one_too() -> None:
    """Arithmetic that made it quiet never ran on these bytes."""
    ones = np.ones(100, dtype="<f4").tobytes()
    assert look(image(w=("F32", ones + b"\x01\0\x80\x7f" + ones))) == "w"


def test_numbers_whose_sum_overflows_are_sound() -> None:
    """Large is not sick."""
    assert look(image(w=("F32", np.full(100, 3e38, dtype="<f4").tobytes()))) == ""


def test_integers_and_what_stands_before_the_border_are_not_judged() -> None:
    """Bytes that look like NaN; a buffer of the boundary group."""
    data = image(mask=("F32", NAN["F32"]), ids=("U8", NAN["F32"]), w=("F32", bytes(8)))
    assert look(data, beyond=4100) == ""
    assert look(data) == "mask"


def test_a_nan_everywhere_is_found_by_every_sample() -> None:
    """As after one step with a NaN gradient."""
    numbers = np.full(SMALL_BYTES // 2, np.nan, dtype="<f4").tobytes()
    data = image(w=("F32", numbers))
    floats = floats_in(memoryview(data), beyond=0)
    for turn in range(SAMPLED):
        assert sampled_nan(floats, memoryview(data), turn) == "w"


def test_a_single_nan_is_found_within_as_many_turns_as_there_are_samples() -> None:
    """Each looks at other blocks."""
    data = image(w=("F32", bytes(2 * SMALL_BYTES)))
    data[20 * BLOCK_BYTES : 20 * BLOCK_BYTES + 4] = NAN["F32"]
    floats = floats_in(memoryview(data), beyond=0)
    found = [sampled_nan(floats, memoryview(data), turn) for turn in range(SAMPLED)]
    assert found.count("w") == 1


def test_what_has_no_sound_header_is_not_judged() -> None:
    """Whoever checks digests says what is wrong with it."""
    assert floats_in(memoryview(bytes(5000)), beyond=0) == ()
    assert look(bytearray(random.Random(0).randbytes(5000))) == ""
    assert first_nan((), 0, memoryview(NAN["F32"])) == ""
