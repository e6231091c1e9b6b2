"""Parameters with their Adam moments, as a late training has them, and as nobody should."""

import torch

from autockpt.executors.image.codecs.lossy.coding import (
    Coded,
    Method,
    decode,
    encode_group,
    form_of,
)
from autockpt.executors.image.codecs.lossy.thresholds import Thresholds

Group = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
LATE = Thresholds(alpha=0.5)
"""With gradients of the size of these groups: the clamp decides, as late in a training."""


def trained_group(
    shape: tuple[int, ...] = (96, 64), seed: int = 0, dtype: torch.dtype = torch.float32
) -> tuple[Group, torch.Tensor]:
    """((weight, first, second moment), predecessor of the weight); rows are of unequal size."""
    made = torch.Generator().manual_seed(seed)
    size = torch.rand(shape[0], generator=made).mul(6).exp().view(-1, *[1] * (len(shape) - 1))
    gradient = torch.randn(shape, generator=made) * size * 1e-4
    base = torch.randn(shape, generator=made) * 0.02
    weight = base + torch.randn(shape, generator=made) * 1e-4
    first = gradient * torch.rand(shape, generator=made)
    second = gradient.square() * (0.5 + torch.rand(shape, generator=made))
    return (weight.to(dtype), first.to(dtype), second.to(dtype)), base.to(dtype)


def coded(group: Group, base: torch.Tensor | None, method: Method = "excp") -> Coded:
    """With the thresholds of a late training."""
    return encode_group(*group, base, method, LATE)


def decoded(frames: tuple[bytes, ...], like: Group, base: torch.Tensor | None) -> Group:
    """As an archive does it: one frame of three tensors, or one frame each."""
    forms = [form_of(tensor) for tensor in like]
    if len(frames) == 1:
        weight, first, second = decode(frames[0], forms, base)
        return weight, first, second
    (weight,) = decode(frames[0], forms[:1], base)
    (first,), (second,) = (
        decode(data, [form], None) for data, form in zip(frames[1:], forms[1:], strict=True)
    )
    return weight, first, second
