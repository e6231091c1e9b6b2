"""8 bits per element, scaled by block: the mild choice for moments, and for small tensors.

The codes are the dynamic ones of 8-bit Adam and span seven decades.  Decades of small values have
few codes; the decade of the block's largest value has most.  A value above 0 never gets the
unsigned code 0.  If a second moment vanished, Adam's next step would be as long as it can be.

Source: Dettmers et al., 8-bit Optimizers via Block-wise Quantization (2022), blocks of 256.
"""

import functools

import numpy as np
import torch

from autockpt.executors.image.codecs.lossy.codebook import nearest
from autockpt.executors.image.codecs.lossy.entropy import squeezed, unsqueezed
from autockpt.values.errors import CorruptCheckpointError

BLOCK = 256
_DECADES = 7


@functools.cache
def code(*, signed: bool) -> torch.Tensor:
    """Ascending values in (-1, 1] or [0, 1] of at most 256 codes, float32."""
    values = [0.0, 1.0]
    for decade in range(_DECADES):
        steps = 2 ** (decade if signed else decade + 1)
        edges = np.linspace(0.1, 1.0, steps + 1)
        middles = (edges[:-1] + edges[1:]) / 2
        values += (10.0 ** (decade - _DECADES + 1) * middles).tolist()
    if signed:
        values += [-value for value in values if 0 < value < 1]
    return torch.tensor(sorted(values), dtype=torch.float32, device="cpu")


def quantised(values: torch.Tensor, *, signed: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """(codes uint8 [n], scales float32 [blocks]) of finite float32 values [n]."""
    table = code(signed=signed).to(values.device)
    blocks = -(-len(values) // BLOCK)
    padded = values.new_zeros(blocks * BLOCK)
    padded[: len(values)] = values
    rows = padded.view(blocks, BLOCK)
    scales = rows.abs().amax(1) if blocks else values.new_zeros(0)
    shares = rows / torch.where(scales > 0, scales, 1.0)[:, None]
    codes = nearest(shares.reshape(-1), table)[: len(values)]
    if not signed:
        codes = torch.where(values > 0, codes.clamp(min=1), codes)
    return codes, scales


def restored(codes: torch.Tensor, scales: torch.Tensor, *, signed: bool) -> torch.Tensor:
    """float32 [n]: one look-up and one product per element."""
    table = code(signed=signed).to(codes.device)
    values = table[codes.long().clamp(max=len(table) - 1)]
    spread = scales.repeat_interleave(BLOCK)[: len(values)]
    product = values * spread
    if signed:
        return product
    tiny = torch.finfo(torch.float32).tiny  # a product may underflow
    return torch.where((values > 0) & (spread > 0), product.clamp(min=tiny), product)


def to_streams(codes: torch.Tensor, scales: torch.Tensor) -> list[bytes]:
    """Compressed."""
    return [squeezed(part.cpu().numpy().tobytes()) for part in (codes, scales)]


def from_streams(streams: tuple[bytes, ...], count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(codes, scales) of `count` elements.  Raises CorruptCheckpointError."""
    if len(streams) != 2:
        raise CorruptCheckpointError(f"8-bit frame: {len(streams)} streams, expected 2")
    codes = np.frombuffer(bytearray(unsqueezed(streams[0], count)), dtype=np.uint8)
    raw = unsqueezed(streams[1], 4 * -(-count // BLOCK))
    return torch.from_numpy(codes), torch.from_numpy(np.frombuffer(bytearray(raw), dtype="<f4"))
