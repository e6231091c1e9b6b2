"""Tensor parallelism by hand: plain tensors that differ by rank, and rules that say how.

Gradients are parts of random ones of the whole model, so that every number of ranks trains the
same model to the bit: Adam works element by element.
"""

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from tests.jobs.parallel.meshes import Tensors, Training

ROWS, WIDTH, EXPERTS = 11, 6, 6
QKV = (6, 3, 3)
"""Rows of the query, the key and the value in one fused weight."""
RULES: dict[str, Any] = {
    "copies": ["dp"],
    "rules": [
        {
            "match": "embed.weight", "sharded": {"dim": 0, "over": "tp"},
            "padded_vocabulary": {"rows": ROWS},
        },
        {
            "match": "*.qkv.weight", "sharded": {"dim": 0, "over": "tp"},
            "sub_parameters": list(QKV),
        },
        {"match": "*.down.weight", "sharded": {"dim": 1, "over": "tp"}},
        {"match": "*.experts.*", "expert": {"over": "tp", "total": EXPERTS}},
        {"match": "*.norm.*", "replicated": ["tp"]},
        {"match": "re:.*router[.]weight", "averaged": ["tp"]},
    ],
}  # fmt: skip
"""`scale` has none: it is equal on all ranks, and nobody says so."""


def whole(seed: int) -> Tensors:
    """Random numbers for every parameter of the whole model."""
    generator = torch.Generator().manual_seed(seed)
    shapes: dict[str, tuple[int, ...]] = {
        "embed.weight": (ROWS, WIDTH), "block.qkv.weight": (sum(QKV), WIDTH),
        "block.down.weight": (WIDTH, 12), "block.norm.weight": (WIDTH,),
        "block.router.weight": (4, WIDTH), "block.scale": (3,),
        **{f"block.experts.{i}.weight": (2, WIDTH) for i in range(EXPERTS)},
    }  # fmt: skip
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def parts(full: Tensors, number: int, count: int) -> Iterator[tuple[str, str, torch.Tensor]]:
    """(name here, name in the whole, this rank's part) of every parameter."""
    each = EXPERTS // count
    for name, tensor in full.items():
        here, part = name, tensor
        if name == "embed.weight":
            part = tensor[number * rows(count) : (number + 1) * rows(count)]
        elif name.endswith("qkv.weight"):
            part = torch.cat([_chunk(fused, number, count) for fused in tensor.split(QKV)])
        elif name.endswith("down.weight"):
            part = _chunk(tensor.t(), number, count).t()
        elif "experts" in name:
            expert = int(name.split(".")[2])
            if expert // each != number:
                continue
            here = name.replace(f".{expert}.", f".{expert % each}.")
        yield here, name, part.contiguous()


def rows(count: int) -> int:
    """Of the vocabulary on each rank: more than there are words for."""
    return -(-ROWS // count) + 1


def _chunk(tensor: torch.Tensor, number: int, count: int) -> torch.Tensor:
    size = -(-len(tensor) // count)
    return tensor[number * size : (number + 1) * size]


class Shard(nn.Module):
    """What a rank has."""

    def __init__(self, full: Tensors, number: int, count: int) -> None:
        super().__init__()
        for path, _, part in parts(full, number, count):
            *folders, name = path.split(".")
            module: nn.Module = self
            for folder in folders:
                if folder not in module._modules:
                    module.add_module(folder, nn.Module())
                module = module.get_submodule(folder)
            module.register_parameter(name, nn.Parameter(padded(path, part, count)))


def padded(path: str, part: torch.Tensor, count: int) -> torch.Tensor:
    """The same number of rows of the vocabulary on every rank."""
    if path != "embed.weight":
        return part.clone()
    full = torch.zeros(rows(count), WIDTH)
    full[: len(part)] = part
    return full


@dataclass(slots=True, kw_only=True)
class Ruled(Training):
    """One rank of a model that is divided by hand."""

    number: int
    count: int

    def full_state(self) -> Tensors:
        """Put together from the parts of all ranks; of routers, which drift apart, each one's."""
        every: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(every, list(self._own()))
        found: Tensors = {}
        for called, shape, places, tensor in itertools.chain(*every):
            if not tensor.dim():
                found[called] = tensor
                continue
            full = found.setdefault(called, torch.full(shape, torch.nan))
            full.view(-1)[places] = tensor.reshape(-1)[: len(places)]
        return found

    def _own(self) -> Iterator[tuple[str, Any, torch.Tensor, torch.Tensor]]:
        """(name, shape of the whole, places in it, tensor) of parameters and their state."""
        shapes = {name: tensor.shape for name, tensor in whole(0).items()}
        places = {n: torch.arange(shape.numel()).view(shape) for n, shape in shapes.items()}
        for path, name, place in parts(places, self.number, self.count):
            parameter = self.model.get_parameter(path)
            called = f"{name}[{self.number}]" if "router" in name else name
            yield called, shapes[name], place.reshape(-1), parameter.detach().clone()
            for key, tensor in self.optimizer.state[parameter].items():
                yield f"{called}.{key}", shapes[name], place.reshape(-1), tensor.clone()


def _build(count: int, seed: int, **attach: Any) -> Ruled:
    number = dist.get_rank() % count
    model = Shard(whole(seed), number, count)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)

    def gradients(step: int) -> float:
        for path, _, part in parts(whole(1000 + step), number, count):
            drift = number if "router" in path else 0
            model.get_parameter(path).grad = padded(path, part, count) * (1 - 2 * drift)
        return 0.0

    return Ruled(
        model=model, optimizer=optimizer, forward_backward=gradients,
        scheduler=torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.9),
        attach=attach, number=number, count=count,
    )  # fmt: skip


@dataclass(frozen=True)
class Ruling:
    """A number of ranks, and what they train from a seed."""

    ranks: int
    build: Callable[[int], Ruled]


def _ruled(dp: int, tp: int) -> Ruling:
    axes = {"dp": dp, "tp": tp}
    return Ruling(ranks=dp * tp, build=lambda seed: _build(tp, seed, rules=RULES, axes=axes))


RULED = {
    "rules-1": _ruled(1, 1), "rules-2": _ruled(1, 2), "rules-3": _ruled(1, 3),
    "rules-2x2": _ruled(2, 2), "no-rules-1": Ruling(ranks=1, build=lambda seed: _build(1, seed)),
    "no-rules-2": Ruling(ranks=2, build=lambda seed: _build(2, seed)),
}  # fmt: skip
