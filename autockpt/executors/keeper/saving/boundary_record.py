"""The small state that a rank leaves in shared memory at a boundary, for the case that it dies.

Two records in turn, so that one is whole at any instant.  Each is an image with holes: header,
boundary group, and small tensors of this rank alone.  Holes take no memory.  The last pages
describe the record, with a first word that is written last.
"""

import json
from collections.abc import Iterable
from dataclasses import dataclass

from autockpt.executors.linux.memory import Arena
from autockpt.values.generation import Generation

HEAD_BYTES = 65536
_LENGTH = slice(8, 16)
_TEXT = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordHead:
    """Describes one record."""

    generation: Generation
    """The boundary."""
    image_bytes: int
    boundary_end: int
    """So many bytes of the image are in the record."""
    layout_digest: str
    replicas: str
    """Digest of a few elements of each tensor that other ranks hold too."""
    own_ranges: tuple[tuple[int, int], ...] = ()
    """[start, stop) of the image behind the boundary group that are recorded too."""


def record_bytes(image_bytes: int) -> int:
    """Size of a record; it takes memory where it is written."""
    return image_bytes + HEAD_BYTES


def capacity_of(record: Arena) -> int:
    """Bytes of image that fit a record."""
    return record.nbytes - HEAD_BYTES


def clear_head(record: Arena) -> None:
    """The record is about to change."""
    _head(record)[:8] = bytes(8)


def write_head(record: Arena, head: RecordHead) -> bool:
    """The record is whole; one whose process dies before stays empty.

    False: the head is too long, and there is no record.
    """
    named = head.generation
    text = json.dumps([
        named.term, named.step, named.attempt, head.image_bytes, head.boundary_end,
        head.layout_digest, head.replicas, head.own_ranges,
    ]).encode()  # fmt: skip
    page = _head(record)
    if _TEXT + len(text) > len(page):
        return False
    page[_TEXT : _TEXT + len(text)] = text
    page[_LENGTH] = len(text).to_bytes(8, "little")
    page[:8] = b"boundary"
    return True


def read_head(record: Arena) -> RecordHead | None:
    """None: the record is not whole."""
    page = bytes(_head(record))
    if page[:8] != b"boundary":
        return None
    try:
        text = page[_TEXT : _TEXT + int.from_bytes(page[_LENGTH], "little")]
        term, step, attempt, image, end, layout, replicas, own = json.loads(text)
        return RecordHead(
            generation=Generation(term=term, step=step, attempt=attempt), image_bytes=image,
            boundary_end=end, layout_digest=layout, replicas=replicas,
            own_ranges=tuple((start, stop) for start, stop in own),
        )  # fmt: skip
    except ValueError:
        return None


def fill_slot(slot: Arena, head: RecordHead, record: Arena) -> None:
    """Copies all that is recorded to its place in a slot."""
    slot.view[: head.boundary_end] = record.view[: head.boundary_end]
    copy_own(slot, head, record)


def copy_own(slot: Arena, head: RecordHead, record: Arena) -> None:
    """Copies what no other rank holds to its place in a slot."""
    for start, stop in head.own_ranges:
        slot.view[start:stop] = record.view[start:stop]


def whole_records(records: Iterable[Arena]) -> dict[Generation, tuple[RecordHead, Arena]]:
    """The whole ones by boundary."""
    heads = ((read_head(record), record) for record in records)
    return {head.generation: (head, record) for head, record in heads if head is not None}


def _head(record: Arena) -> memoryview:
    return record.view[record.nbytes - HEAD_BYTES :]
