"""Tensors that wrap others, as quantized ones do, in the optimizer and in the model."""

import itertools
from typing import Any

import pytest
import torch

from autockpt.executors.restore.apply_state import apply_state
from autockpt.executors.state.live_state import LiveState
from autockpt.executors.state.state_tree import StandIns, decode, encode
from autockpt.values.errors import ConfigError
from tests.unit.executors.checkpoints import restore_shard
from tests.unit.executors.restore.test_reader import in_memory

STEPS, SAVED = 6, 3


class Coded(torch.Tensor):
    """Bytes, and a scale for each row: no memory of its own, as torchao's quantized tensors."""

    codes: torch.Tensor
    scale: torch.Tensor

    @staticmethod
    def __new__(cls, codes: torch.Tensor, scale: torch.Tensor, zero: int) -> "Coded":
        """Looks like float32."""
        return torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=torch.float32)

    def __init__(self, codes: torch.Tensor, scale: torch.Tensor, zero: int) -> None:
        self.codes, self.scale, self.zero = codes, scale, zero

    def __tensor_flatten__(self) -> tuple[list[str], list[Any]]:
        return ["codes", "scale"], [self.zero, (torch.float32, None)]

    @classmethod
    def __tensor_unflatten__(
        cls, parts: dict[str, torch.Tensor], form: Any, shape: Any, stride: Any
    ) -> "Coded":
        assert form[1] == (torch.float32, None)
        assert tuple(shape) == tuple(parts["codes"].shape)
        assert len(stride) == 2
        return cls(parts["codes"], parts["scale"], form[0])

    def plain(self) -> torch.Tensor:
        """The values."""
        return (self.codes.float() - self.zero) * self.scale

    def put(self, value: torch.Tensor) -> None:
        """Codes another value in place."""
        self.scale.copy_(value.abs().amax(1, keepdim=True).clamp_min(1e-12) / 127)
        self.codes.copy_((value / self.scale + self.zero).round().clamp(0, 255))

    @classmethod
    def of(cls, value: torch.Tensor) -> "Coded":
        """A value, coded."""
        made = cls(torch.zeros_like(value, dtype=torch.uint8), torch.ones(len(value), 1), 128)
        made.put(value)
        return made

    @classmethod
    def __torch_dispatch__(cls, call: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if call in (torch.ops.aten.detach.default, torch.ops.aten.view.default):
            return cls(args[0].codes, args[0].scale, args[0].zero)
        raise NotImplementedError(f"{call}")


class Odd(Coded):
    """Says of itself what no skeleton can say."""

    def __tensor_flatten__(self) -> tuple[list[str], list[Any]]:
        return ["codes", "scale"], [object()]


class Momentum(torch.optim.Optimizer):
    """SGD whose momentum is coded."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.05})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """One step."""
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                if not state:
                    state.update(step=0, momentum=Coded.of(torch.zeros_like(parameter)))
                state["step"] += 1
                whole = 0.9 * state["momentum"].plain() + parameter.grad
                state["momentum"].put(whole)
                parameter.add_(whole, alpha=-group["lr"] / state["step"])


class Model(torch.nn.Module):
    """A frozen coded layer, and one that is trained."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = torch.nn.Parameter(Coded.of(torch.randn(8, 6)), requires_grad=False)
        self.register_buffer("table", Coded.of(torch.randn(8, 8)))
        self.trained = torch.nn.Parameter(torch.randn(4, 8))

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        """Both layers."""
        frozen: Any = self.frozen
        table: Any = self.table
        return torch.tanh(batch @ frozen.plain().T @ table.plain()) @ self.trained.T


def built(seed: int) -> tuple[Model, Momentum, LiveState]:
    """A model that no other seed makes."""
    torch.manual_seed(seed)
    model = Model()
    optimizer = Momentum([model.trained])
    return model, optimizer, LiveState.of(model=model, optimizer=optimizer)


def train(model: Model, optimizer: Momentum, steps: range) -> None:
    """The same batches whenever a step is trained."""
    for step in steps:
        batch = torch.randn(5, 6, generator=torch.Generator().manual_seed(step))
        model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def values(model: Model, optimizer: Momentum) -> list[torch.Tensor]:
    """All of it, uncoded."""
    frozen: Any = model.frozen
    table: Any = model.table
    momentum = [state["momentum"] for state in optimizer.state.values()]
    parts = itertools.chain.from_iterable((m.codes, m.scale) for m in (frozen, table, *momentum))
    return [model.trained.detach().clone(), *(part.clone() for part in parts)]


def test_a_training_with_coded_tensors_goes_on_bit_for_bit() -> None:
    """Of a model and an optimizer that were built anew, with other values."""
    model, optimizer, state = built(1)
    train(model, optimizer, range(SAVED))
    saved = in_memory(state)
    train(model, optimizer, range(SAVED, STEPS))
    whole = values(model, optimizer)

    model, optimizer, state = built(2)
    frozen = model.frozen
    apply_state(restore_shard(saved, state), state)
    assert model.frozen is frozen
    assert isinstance(optimizer.state[model.trained]["momentum"], Coded)
    train(model, optimizer, range(SAVED, STEPS))
    assert all(map(torch.equal, values(model, optimizer), whole))


def test_names_say_which_part_a_tensor_is() -> None:
    """In the model and in the optimizer."""
    model, optimizer, state = built(1)
    train(model, optimizer, range(1))
    assert set(state.tensors) == {
        "model.frozen.codes", "model.frozen.scale", "model.table.codes", "model.table.scale",
        "model.trained", "optimizer.model.trained.momentum.codes",
        "optimizer.model.trained.momentum.scale",
    }  # fmt: skip


def test_a_walk_is_kept_until_a_part_or_the_form_is_another_one() -> None:
    """A walk of many tensors would hold the training up at every checkpoint."""
    model, optimizer, state = built(1)
    train(model, optimizer, range(2))
    kept = state.inventory()
    train(model, optimizer, range(2, 3))
    momentum = optimizer.state[model.trained]["momentum"]
    assert state.inventory() is not kept  # the step count is a number
    del optimizer.state[model.trained]["step"]
    kept = state.inventory()
    assert state.inventory() is kept
    momentum.zero = 127
    assert state.inventory() is not kept
    kept = state.inventory()
    momentum.scale = momentum.scale.clone()
    assert state.inventory() is not kept


def test_on_a_mesh_of_one_rank_parts_are_no_dtensors() -> None:
    """The part of a parameter is the whole there, and has its shape."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard, distribute_tensor

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))

        def made() -> tuple[Any, LiveState]:
            model: Any = torch.nn.Module()
            model.w = torch.nn.Parameter(distribute_tensor(torch.ones(4, 3), mesh, [Shard(0)]))
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            return optimizer, LiveState.of(model=model, optimizer=optimizer)

        optimizer, state = made()
        (parameter,) = optimizer.param_groups[0]["params"]
        coded = DTensor.from_local(Coded.of(torch.randn(4, 3)), mesh, [Shard(0)])
        optimizer.state[parameter] = {"moment": coded, "plain": torch.ones_like(parameter)}
        saved, local = in_memory(state), coded._local_tensor
        optimizer, state = made()
        apply_state(restore_shard(saved, state), state)
        (parameter,) = optimizer.param_groups[0]["params"]
        back = optimizer.state[parameter]
        assert type(back["moment"]) is DTensor
        assert type(back["moment"]._local_tensor.codes) is torch.Tensor
        assert torch.equal(back["moment"]._local_tensor.codes, local.codes)
        assert type(back["plain"]) is DTensor
    finally:
        dist.destroy_process_group()


def test_parts_that_were_replaced_are_saved() -> None:
    """A coded tensor may get other parts, and is the same object."""
    model, optimizer, state = built(1)
    train(model, optimizer, range(SAVED))
    in_memory(state)
    momentum = optimizer.state[model.trained]["momentum"]
    momentum.codes, momentum.scale = momentum.codes + 1, momentum.scale * 2
    frozen: Any = model.frozen
    frozen.codes = frozen.codes + 1
    saved, whole = in_memory(state), values(model, optimizer)
    model, optimizer, state = built(2)
    apply_state(restore_shard(saved, state), state)
    assert all(map(torch.equal, values(model, optimizer), whole))


def test_without_its_class_the_parts_are_read() -> None:
    """No class is imported for a checkpoint, and none that is no tensor is called."""
    tensors: dict[str, torch.Tensor] = {}
    skeleton = encode({"weight": Coded.of(torch.randn(3, 4))}, "root", tensors)
    assert isinstance(decode(skeleton, tensors)["weight"], Coded)
    assert decode(skeleton, StandIns())["weight"].keys() == {"codes", "scale"}
    for name in (
        "os:path",
        "gone.module:Coded",
        f"{__name__}:built",
        "builtins:dict",
        "torch:Gone",
    ):
        skeleton["weight"]["$compound"]["class"] = name
        assert decode(skeleton, tensors)["weight"].keys() == {"codes", "scale"}


def test_a_form_that_cannot_be_written_is_named() -> None:
    """The words of an object may be anything."""

    with pytest.raises(ConfigError, match=r"^root\.<form>\.0: a builtins\.object cannot be saved"):
        encode(Odd(torch.zeros(2, 2, dtype=torch.uint8), torch.ones(2, 1), 0), "root", {})
