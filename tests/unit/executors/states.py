"""Small training states for tests: every dtype, names nobody should use, a model that trains."""

from collections.abc import Iterable
from typing import Any

import torch

from autockpt.executors.linux.memory import Arena, page_align
from autockpt.executors.snapshot.snapshotter import Snapshotter
from autockpt.executors.state.live_state import LiveState

DTYPES = (
    "float64", "float32", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8",
    "uint16", "uint32", "uint64", "bool", "complex64", "complex128", "complex32", "float8_e4m3fn",
    "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu", "float4_e2m1fn_x2",
)  # fmt: skip
"""All that `dtypes` can store."""

ODD_NAMES = ('a "quoted" name', "two\nlines", "gewöhnlich-ß-模型-🧊", "back\\slash", " ", "x" * 300)


class Holder:
    """A stateful object that holds what it is given."""

    def __init__(self, state: Any) -> None:
        self.state = state

    def state_dict(self) -> Any:
        return self.state

    def load_state_dict(self, state: Any) -> None:
        self.state = state


def random_tensor(dtype: str, shape: tuple[int, ...], seed: int = 0) -> torch.Tensor:
    """A tensor of random bytes (NaN payloads too); booleans are 0 or 1."""
    kind = getattr(torch, dtype)
    count = kind.itemsize
    for size in shape:
        count *= size
    generator = torch.Generator().manual_seed(seed)
    raw = torch.randint(0, 2 if dtype == "bool" else 256, (count,), generator=generator)
    return raw.to(torch.uint8).view(kind).view(shape) if count else torch.empty(shape, dtype=kind)


def bytes_of(tensor: torch.Tensor) -> bytes:
    """The elements' bytes in row-major order."""
    return bytes(tensor.detach().contiguous().view(-1).view(torch.uint8).numpy())


class Module(torch.nn.Module):
    """Parameters of given tensors, in order, none of which needs a gradient."""

    def __init__(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        super().__init__()
        for name, tensor in tensors:
            setattr(self, name, torch.nn.Parameter(tensor, requires_grad=False))


def trained() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """A small model with a buffer and an AdamW that has stepped once."""
    torch.manual_seed(7)
    model = torch.nn.Sequential(
        torch.nn.Linear(40, 64), torch.nn.BatchNorm1d(64), torch.nn.Linear(64, 3)
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    step(model, optimizer)
    return model, optimizer


def step(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """One iteration on random data."""
    optimizer.zero_grad()
    model(torch.randn(8, 40)).square().sum().backward()
    optimizer.step()


def snapshot(
    state: LiveState, *, lazy: bool = True, arena: Arena | None = None, progress: Any = None
) -> tuple[Arena, Snapshotter]:
    """One finished snapshot of `state`; the caller closes both."""
    shooter = Snapshotter(state, memoryview(bytearray(64)))
    layout = shooter.plan(progress or {"step": 1})
    arena = arena or Arena.anonymous(page_align(layout.image_bytes) + 2**16)
    shooter.begin(arena, progress or {"step": 1}, lazy=lazy)
    assert shooter.fence() == []
    return arena, shooter
