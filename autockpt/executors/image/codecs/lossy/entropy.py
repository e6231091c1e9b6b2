"""Symbols to bytes and back: bit packing, then zstd, which finds the runs and the frequencies.

Decoding never makes more than was asked for: lengths come from the caller, not from the stream.
"""

import sys
from typing import Any

import numpy as np
import torch

from autockpt.executors.image.codecs.zstd import ZstdCodec

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

LEVEL = 19
"""Archives are written once, and after pruning the streams are short."""
_CODEC = ZstdCodec()


def squeezed(data: bytes | memoryview, level: int = LEVEL) -> bytes:
    """Bytes, compressed; the library releases the GIL."""
    return zstd.compress(data, level=level)


def unsqueezed(data: bytes | memoryview, count: int) -> bytes:
    """Exactly `count` bytes.  Raises CorruptCheckpointError."""
    return _CODEC.decode(data, count)


def pack_nibbles(symbols: torch.Tensor) -> bytes:
    """Symbols below 16, two in a byte, compressed."""
    flat: Any = symbols.cpu().numpy()
    even = np.zeros(len(flat) + len(flat) % 2, dtype=np.uint8)
    even[: len(flat)] = flat
    return squeezed((even[0::2] | even[1::2] << 4).tobytes())


def unpack_nibbles(data: bytes | memoryview, count: int) -> torch.Tensor:
    """`count` symbols, uint8.  Raises CorruptCheckpointError."""
    packed = np.frombuffer(unsqueezed(data, -(-count // 2)), dtype=np.uint8)
    symbols = np.empty(2 * len(packed), dtype=np.uint8)
    symbols[0::2], symbols[1::2] = packed & 15, packed >> 4
    return torch.from_numpy(symbols[:count])
