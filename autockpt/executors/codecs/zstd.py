"""zstd level 1: on fp32 training state about 1.1-1.2x at 0.7 GB/s a core (measured).

It pays only where storage is slower than that; the policy decides by the break-even rule.
"""

import sys

from autockpt.values.errors import CorruptCheckpointError

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

LEVEL = 1


class ZstdCodec:
    """One zstd frame per chunk."""

    name = "zstd"

    def encode(self, raw: memoryview) -> bytes:
        """The frame of a chunk; the library releases the GIL."""
        return zstd.compress(raw, level=LEVEL)

    def decode(self, frame: memoryview | bytes, raw_bytes: int) -> bytes:
        """The chunk, output capped at `raw_bytes`.  Raises CorruptCheckpointError."""
        decoder = zstd.ZstdDecompressor()
        try:
            raw = decoder.decompress(frame, max_length=raw_bytes)
        except zstd.ZstdError as error:
            raise CorruptCheckpointError(f"zstd frame: {error}") from None
        if len(raw) != raw_bytes or not decoder.eof or decoder.unused_data:
            rest = " and more" if not decoder.eof or decoder.unused_data else ""
            raise CorruptCheckpointError(
                f"zstd frame: expected exactly {raw_bytes} bytes, got {len(raw)}{rest}"
            )
        return raw
