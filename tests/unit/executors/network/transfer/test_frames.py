"""Frames: what was packed is read, and nothing else is."""

import json
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autockpt.executors.network.transfer.frames import (
    CHUNK,
    HEADER_BYTES,
    MAX_CHUNKS,
    TEXT,
    Header,
    Refused,
    Span,
    Verified,
    Want,
    numbers_of,
    pack_text,
    read_header,
    read_text,
    spans_of,
)
from autockpt.values.errors import ConfigError, ProtocolError
from tests.unit.executors.network.transfer.ends import CHUNK as CHUNK_BYTES
from tests.unit.executors.network.transfer.ends import GENERATION, subject

TEXTS = (
    Want(generation=GENERATION, rank=3, root="r", chunks=(Span(start=1, stop=2),)),
    Refused(reason="é\n"),
    Verified(root="r"),
)


@given(number=st.integers(0, 2**32 - 1), length=st.integers(0, 2**64 - 1))
def test_a_header_of_a_chunk_is_read_as_packed(number: int, length: int) -> None:
    """Every field."""
    header = Header(kind=CHUNK, number=number, length=length)
    assert read_header(header.pack()) == header
    assert len(header.pack()) == HEADER_BYTES


@given(data=st.binary(min_size=HEADER_BYTES, max_size=HEADER_BYTES))
def test_other_bytes_are_no_header(data: bytes) -> None:
    """Whatever a header is read from, packing it gives the same bytes."""
    for candidate in (data, b"ackf" + data[4:], b"ackf\x01\0\0\0" + data[8:]):
        try:
            assert read_header(candidate).pack() == candidate
        except ProtocolError:
            continue


@pytest.mark.parametrize(
    "header",
    [
        Header(kind=TEXT, length=5, number=1),
        Header(kind=0),
        Header(kind=3),
    ],
)
def test_fields_that_a_kind_does_not_have_are_refused(header: Header) -> None:
    """There is one way to say a thing."""
    with pytest.raises(ProtocolError, match=r"kind|only a chunk"):
        read_header(header.pack())


@pytest.mark.parametrize("text", TEXTS, ids=lambda text: type(text).__name__)
def test_a_text_is_read_as_packed(text: object) -> None:
    """Behind a header with its length."""
    data = pack_text(text)  # type: ignore[arg-type]
    header = read_header(data[:HEADER_BYTES])
    assert header.length == len(data) - HEADER_BYTES
    assert read_text(data[HEADER_BYTES:]) == text


@given(data=st.binary(max_size=200))
def test_bytes_that_are_no_text_are_a_protocol_error(data: bytes) -> None:
    """And no other error."""
    with pytest.raises(ProtocolError, match="malformed"):
        read_text(data)


@settings(max_examples=40, deadline=None)
@given(
    kind=st.sampled_from(["Want", "Verified", "Refused", "ImageIndex", "Path", 7]),
    body=st.recursive(
        st.none() | st.integers() | st.text() | st.floats(allow_nan=False, allow_infinity=False),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(st.sampled_from(["generation", "rank", "root", "chunks"]), inner)
        ),
    ),
)
def test_json_of_another_shape_is_a_protocol_error(kind: object, body: object) -> None:
    """Fields too many, too few, of other types, nested."""
    text = json.dumps({"type": kind, "body": body}).encode()
    try:
        read_text(text)
    except ProtocolError:
        return
    assert kind in ("Verified", "Refused")


def test_an_image_of_too_many_chunks_is_none() -> None:
    """What is kept about chunks to come is bounded."""
    fits = replace(subject(1), image_bytes=MAX_CHUNKS * CHUNK_BYTES)
    assert fits.chunks == MAX_CHUNKS
    for changes in ({"image_bytes": fits.image_bytes + 1}, {"chunk_bytes": 0}, {"image_bytes": 0}):
        with pytest.raises(ConfigError, match="expected up to"):
            replace(fits, **changes)


@given(numbers=st.sets(st.integers(0, 60)))
def test_runs_of_chunks_are_the_chunks(numbers: set[int]) -> None:
    """In order, each once, and as few runs as there are gaps."""
    spans = spans_of(sorted(numbers))
    assert list(numbers_of(spans)) == sorted(numbers)
    assert len(spans) == sum(number - 1 not in numbers for number in numbers)
