"""zstd level 1 on bytes as they stand: on numbers slower and larger than `planes`."""

import sys
from collections.abc import Iterator, Sequence

from autockpt.executors.image.codecs.interface import Frame
from autockpt.executors.image.layout.runs import Run
from autockpt.values.errors import CorruptCheckpointError

if sys.version_info >= (3, 14):
    from compression import zstd as zstd
else:
    from backports import zstd as zstd

LEVEL = 1
PIECE_BYTES = 2**18
"""Encoded at a time: the library's memory for a whole chunk is new each time, which costs 5 ms of
13 for 8 MiB.  The frame is the same."""


class ZstdCodec:
    """One zstd frame per chunk."""

    name = "zstd"

    def encode(
        self,
        raw: memoryview,
        *,
        runs: Sequence[Run] = (),
        base: memoryview | None = None,
        into: memoryview | None = None,
    ) -> memoryview:
        """The frame of a chunk; the library releases the GIL."""
        bound = len(raw) + (len(raw) >> 11) + 512  # 3 bytes in 128 KiB, and the header
        frame = into if into is not None and len(into) >= bound else memoryview(bytearray(bound))
        compressor, end = zstd.ZstdCompressor(level=LEVEL), 0
        compressor.set_pledged_input_size(len(raw))
        for start in range(0, max(1, len(raw)), PIECE_BYTES):
            last = start + PIECE_BYTES >= len(raw)
            piece = compressor.compress(
                raw[start : start + PIECE_BYTES],
                compressor.FLUSH_FRAME if last else compressor.CONTINUE,
            )
            frame[end : end + len(piece)] = piece
            end += len(piece)
        return frame[:end]

    def decode(self, frame: Frame, raw_bytes: int, *, base: memoryview | None = None) -> bytes:
        """The chunk, output capped at `raw_bytes`.  Raises CorruptCheckpointError."""
        return decompress(frame, raw_bytes)


def decompress(frame: Frame, nbytes: int) -> bytes:
    """Exactly the `nbytes` of one zstd frame; never allocates many more.

    Raises CorruptCheckpointError.
    """
    return b"".join(pieces(frame, nbytes, nbytes))


def pieces(frame: Frame, nbytes: int, piece_bytes: int) -> Iterator[bytes]:
    """The same, at most `piece_bytes` at a time."""
    # A window is memory that the frame asks for, and the library's own limit is 128 MiB.
    window = max(10, min(31, nbytes.bit_length()))
    decoder = zstd.ZstdDecompressor(options={zstd.DecompressionParameter.window_log_max: window})
    left, more = nbytes, True
    while more:
        try:
            piece = decoder.decompress(frame, max_length=min(left, piece_bytes))
        except zstd.ZstdError as error:
            raise CorruptCheckpointError(f"zstd frame: {error}") from None
        frame, left = b"", left - len(piece)
        more = bool(left and piece) and not decoder.eof
        if not more and (left or not decoder.eof or decoder.unused_data):
            rest = " and more" if not decoder.eof or decoder.unused_data else ""
            raise CorruptCheckpointError(
                f"zstd frame: expected exactly {nbytes} bytes, got {nbytes - left}{rest}"
            )
        yield piece
