"""Frames: what was packed is read, and nothing else is."""

import json
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autockpt.executors.transfer.frames import (
    CHUNK,
    END,
    HEADER_BYTES,
    HOLD,
    MAX_CHUNKS,
    TEXT,
    Header,
    Join,
    Offer,
    Refused,
    Sealed,
    Span,
    Want,
    pack_text,
    read_header,
    read_text,
)
from autockpt.values.errors import ConfigError, ProtocolError
from tests.executors.transfer.ends import CHUNK as CHUNK_BYTES
from tests.executors.transfer.ends import GENERATION, subject

TEXTS = (
    Offer(transfer="ab", subject=subject(10**6), chunks=(Span(start=0, stop=3),), streams=2),
    Want(transfer="ab", generation=GENERATION, rank=3, root="r", chunks=(Span(start=1, stop=2),)),
    Join(transfer="ab", stream=1),
    Refused(reason="é\n"),
    Sealed(root="r"),
)


@given(
    number=st.integers(0, 2**32 - 1), length=st.integers(0, 2**64 - 1),
    digest=st.binary(min_size=16, max_size=16),
)  # fmt: skip
def test_a_header_of_a_chunk_is_read_as_packed(number: int, length: int, digest: bytes) -> None:
    """Every field."""
    header = Header(kind=CHUNK, number=number, length=length, digest=digest)
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
        Header(kind=HOLD, length=1),
        Header(kind=END, length=1),
        Header(kind=TEXT, length=5, number=1),
        Header(kind=HOLD, digest=b"x" * 16),
        Header(kind=0),
        Header(kind=5),
    ],
)
def test_fields_that_a_kind_does_not_have_are_refused(header: Header) -> None:
    """There is one way to say a thing."""
    with pytest.raises(ProtocolError, match="kind"):
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
    kind=st.sampled_from(["Offer", "Want", "Join", "Sealed", "Refused", "ImageIndex", "Path", 7]),
    body=st.recursive(
        st.none() | st.integers() | st.text() | st.floats(allow_nan=False, allow_infinity=False),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(st.sampled_from(["transfer", "subject", "root", "chunks"]), inner)
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
    assert kind in ("Sealed", "Refused")


def test_an_image_of_too_many_chunks_is_none() -> None:
    """The table of a receiver is bounded."""
    fits = replace(subject(1), image_bytes=MAX_CHUNKS * CHUNK_BYTES)
    assert fits.chunks == MAX_CHUNKS
    for changes in ({"image_bytes": fits.image_bytes + 1}, {"chunk_bytes": 0}, {"image_bytes": 0}):
        with pytest.raises(ConfigError, match="expected up to"):
            replace(fits, **changes)


@given(start=st.integers(0, 10**7), length=st.integers(1, 10**6))
def test_covering_chunks_hold_the_bytes_and_no_chunk_more(start: int, length: int) -> None:
    """A part of an image is fetched by whole chunks."""
    whole = subject(2 * 10**7)
    span = whole.covering(start, start + length)
    low, high = whole.chunk_range(span.start)[0], whole.chunk_range(span.stop - 1)[1]
    assert low <= start < low + CHUNK_BYTES
    assert high - CHUNK_BYTES < start + length <= high
