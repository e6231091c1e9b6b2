"""Objects shaped like Megatron's ShardedTensor, which `of_megatron` knows by their attributes."""

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from autockpt.executors.sharding.adapters.megatron import megatron_names, of_megatron, placed
from autockpt.values.errors import ConfigError
from tests.unit.executors.sharding.covering import taken, times_covered


@dataclass
class ShardedTensor:
    """The fields that Megatron's class has, as far as they matter here."""

    key: str
    data: torch.Tensor
    local_shape: tuple[int, ...]
    global_shape: tuple[int, ...]
    global_offset: tuple[int, ...]
    prepend_axis_num: int = 0
    replica_id: Any = 0
    flattened_range: slice | None = None


class Stage(nn.Module):
    """Two layers of a pipeline stage, numbered from 0, the second and third of four."""

    def __init__(self, *, detached: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(3, 2, bias=False) for _ in range(2)])
        self._detached = detached

    def sharded_state_dict(self) -> dict[str, Any]:
        """Nested, with an object that is no tensor."""
        layers = [layer.weight for layer in self.layers]
        found: dict[str, Any] = {
            f"layers.{i}.weight": ShardedTensor(
                key="decoder.layers.weight",
                data=weight.detach() if self._detached else weight,
                local_shape=(2, 3),
                global_shape=(4, 4, 3),
                global_offset=(1 + i, 2, 0),
                prepend_axis_num=1,
            )
            for i, weight in enumerate(layers)
        }
        return {"model": [found, {"extra": object()}]}


@pytest.mark.parametrize("detached", [False, True])
def test_layers_are_numbered_in_names_and_columns_in_boxes(detached: bool) -> None:
    """The prepended axis counts layers over all stages; the rest is the tensor-parallel part."""
    stage = Stage(detached=detached)
    names, known = megatron_names(stage), {id(p): h for p, h in of_megatron(stage)}
    assert [names[id(layer.weight)] for layer in stage.layers] == [
        "decoder.layers.weight[1]",
        "decoder.layers.weight[2]",
    ]
    for layer in stage.layers:
        holding = known[id(layer.weight)]
        assert holding.global_shape == (4, 3)
        assert [str(box) for box in holding.boxes] == ["[2:4, 0:3]"]


@dataclass
class Factory:
    """A ShardedTensorFactory: SwiGLU's halves, each cut by itself."""

    key: str
    data: torch.Tensor
    build_fn: Callable[[torch.Tensor], Any]

    def build(self) -> Any:
        """The parts."""
        return self.build_fn(self.data)


class Gated(nn.Module):
    """The second of two tensor-parallel ranks."""

    def __init__(self, names: tuple[str, str] = ("up", "up"), *, swapped: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.arange(12.0).view(4, 3))
        self._names, self._swapped = names, swapped

    def sharded_state_dict(self) -> dict[str, Any]:
        """One factory."""

        def halves(tensor: torch.Tensor) -> list[ShardedTensor]:
            parts = [
                ShardedTensor(name, part, (2, 3), (8, 3), (offset, 0))
                for name, part, offset in zip(self._names, tensor.chunk(2), (2, 6), strict=True)
            ]
            return parts[::-1] if self._swapped else parts

        return {"up": Factory("up", self.weight, halves)}


def test_halves_of_a_factory_are_boxes_of_one_tensor() -> None:
    """SwiGLU: the gate's rows and the value's rows, cut by tensor parallelism each."""
    module = Gated()
    ((parameter, holding),) = of_megatron(module)
    assert parameter is module.weight
    assert [str(box) for box in holding.boxes] == ["[2:4, 0:3]", "[6:8, 0:3]"]
    assert megatron_names(module) == {id(module.weight): "up"}


@pytest.mark.parametrize("module", [Gated(("gate", "value")), Gated(swapped=True)])
def test_a_factory_that_makes_other_tensors_is_left_to_a_rule(module: Gated) -> None:
    """Parts under names of their own, or in another order than in memory, are not guessed at."""
    assert list(of_megatron(module)) == []


@given(
    shape=st.lists(st.integers(1, 5), min_size=1, max_size=3),
    ranks=st.integers(1, 4),
    cuts=st.lists(st.integers(0, 60), max_size=3),
)
def test_flattened_ranges_of_all_ranks_cover_the_tensor_once(
    shape: list[int], ranks: int, cuts: list[int]
) -> None:
    """A distributed optimizer cuts the flat local part; a range may be empty."""
    full = (shape[0] * ranks, *shape[1:])
    whole, size, boxes = np.arange(np.prod(full)).reshape(full), int(np.prod(shape)), []
    edges = [0, *sorted(min(cut, size) for cut in cuts), size]
    for rank in range(ranks):
        local = whole[rank * shape[0] : (rank + 1) * shape[0]].ravel()
        for start, stop in itertools.pairwise(edges):
            part = ShardedTensor(
                key="w", data=torch.from_numpy(local[start:stop]), local_shape=tuple(shape),
                global_shape=full, global_offset=(rank * shape[0], *(0 for _ in shape[1:])),
                flattened_range=slice(start, stop),
            )  # fmt: skip
            name, holding = placed(part)
            assert name == "w"
            assert np.array_equal(taken(holding, whole), local[start:stop])
            boxes += holding.boxes
    assert (times_covered(full, boxes) == 1).all()


def test_a_description_that_does_not_fit_its_data_is_refused() -> None:
    """The counts are named; nothing is saved under wrong coordinates."""
    wrong = ShardedTensor("w", torch.ones(5), (2, 3), (4, 3), (0, 0))
    with pytest.raises(ConfigError, match=r"describes 6 elements, .* holds 5"):
        placed(wrong)


def test_a_module_without_a_description_is_left_alone() -> None:
    """Plain modules have no sharded_state_dict."""
    assert list(of_megatron(nn.Linear(2, 2))) == []
