"""The file of an encoded shard: frames in page-aligned places behind a safetensors header."""

import json
import mmap
from collections.abc import Sequence

import numpy as np

from autockpt.executors.image.codecs.interface import Codec
from autockpt.executors.image.codecs.planes import needs_base
from autockpt.executors.image.container import StoredChunk, chunk_digest
from autockpt.executors.image.layout.runs import Run
from autockpt.executors.linux.memory import PAGE_BYTES, page_align

FRAME_SLACK = 2**16
"""Beyond the chunk, for a codec that builds its frame in place: header, and what grew."""


class FrameBuffer:
    """Page-aligned memory for encoded frames, one a writer: fresh pages cost as much as zstd."""

    def __init__(self) -> None:
        self._memory = memoryview(b"")
        self._there = 0
        """Its address."""

    def room(self, nbytes: int) -> memoryview:
        """Memory of at least so many bytes; its former contents are gone."""
        size = max(PAGE_BYTES, page_align(nbytes))
        if len(self._memory) < size:
            self._memory = memoryview(mmap.mmap(-1, size))
            self._there = np.frombuffer(self._memory, np.uint8).ctypes.data
        return self._memory

    def aligned(self, frame: memoryview | bytes) -> memoryview:
        """The frame padded to pages; valid until the next call.  Copied unless it is here."""
        size = max(PAGE_BYTES, page_align(len(frame)))
        if np.frombuffer(frame, np.uint8).ctypes.data != self._there or size > len(self._memory):
            self.room(size)[: len(frame)] = frame
        self._memory[len(frame) : size] = bytes(size - len(frame))
        return self._memory[:size]


def encode_chunk(
    codec: Codec,
    data: memoryview,
    frames: FrameBuffer,
    *,
    runs: Sequence[Run],
    digest: str,
    old: memoryview | None,
    against: str,
) -> tuple[memoryview, StoredChunk]:
    """(frame, or nothing where the bytes are stored as they are; how it is stored, not yet where).

    `old`: the base's chunk, whose digest is `against`.  Without runs nothing is encoded.
    """
    if digest == against:  # unchanged: it is on disk already
        return memoryview(b""), StoredChunk(offset=0, length=0, digest="", base=against)
    frame = memoryview(b"")
    if runs:
        into = frames.room(len(data) + FRAME_SLACK)
        frame = memoryview(codec.encode(data, runs=runs, base=old, into=into))
    if not frame or len(frame) >= len(data):
        return memoryview(b""), StoredChunk(offset=0, length=len(data), digest=digest)
    base = against if against and needs_base(frame) else ""
    return frame, StoredChunk(offset=0, length=len(frame), digest=chunk_digest(frame), base=base)


def encoded_header(stored: tuple[StoredChunk, ...], length: int, header_bytes: int) -> bytes:
    """A safetensors header in which every frame is a U8 tensor and gaps are pads."""
    table: dict[str, object] = {"__metadata__": {"format": "autockpt-encoded-1"}}
    end = header_bytes
    there = [pair for pair in enumerate(stored) if pair[1].length]
    for index, chunk in sorted(there, key=lambda pair: pair[1].offset):
        if chunk.offset > end:
            table[f"__pad.{end:x}"] = _row(end, chunk.offset, header_bytes)
        end = chunk.offset + chunk.length
        table[f"__chunk@enc.{index}"] = _row(chunk.offset, end, header_bytes)
    if length > end:
        table[f"__pad.{end:x}"] = _row(end, length, header_bytes)
    text = json.dumps(table, separators=(",", ":")).encode()
    room = header_bytes - 8
    return room.to_bytes(8, "little") + text + b" " * (room - len(text))


def _row(start: int, stop: int, base: int) -> dict[str, object]:
    return {"dtype": "U8", "shape": [stop - start], "data_offsets": [start - base, stop - base]}


def align_header(chunks: int) -> int:
    """Bytes of the header of a file of so many chunks, in whole pages."""
    return page_align(8 + 200 + 240 * chunks)
