"""What wrappers and optimizers know of themselves, in snapshots and restores."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from autockpt.executors.image.layout.boxes import Box
from autockpt.executors.restore.shard_sources import shards_on_disk
from autockpt.executors.sharding.adapters.zero_optimizer import MASTER, ZeroView
from autockpt.executors.sharding.local_shard import LocalShard, whole_of
from autockpt.executors.sharding.optimizers import held_state
from autockpt.executors.snapshot.optimizer_hooks import OptimizerHooks
from autockpt.executors.snapshot.replica_shares import Place
from autockpt.executors.state.live_state import LiveState
from autockpt.values.errors import ConfigError
from tests.unit.executors.sharding.covering import taken
from tests.unit.executors.sharding.simulated import Member, save
from tests.unit.executors.sharding.zeros import model_of, zero_2, zero_3

SHAPES = [(3, 5), (7,), (2, 2, 3)]
COUNTS = [(1, 3), (2, 1), (2, 3), (3, 2), (4, 4)]


def place(rank: int, count: int) -> Place | None:
    """All ranks on one node."""
    return Place(rank=rank, nodes=(0,) * count) if count > 1 else None


# --- padding -------------------------------------------------------------------------------------


class Padded(Member):
    """Five elements cut into equal ranges of a flat tensor; Adam's moments are padded with it."""

    def __init__(self, rank: int, count: int, fill: float | None = None) -> None:
        size = -(-5 // count)
        low, high = min(rank * size, 5), min((rank + 1) * size, 5)
        values = torch.full((size,), -1.0)
        values[: high - low] = torch.arange(5.0)[low:high]
        self.flat = nn.Parameter(values if fill is None else torch.full((size,), fill))
        self.optimizer = torch.optim.Adam([self.flat], lr=0.1)
        if fill is None:
            moments = {"exp_avg": values * 2, "exp_avg_sq": values * 3}
            self.optimizer.state[self.flat] = {"step": torch.tensor(4.0), **moments}
        module = nn.Module()
        module.flat = self.flat
        boxes = (Box(offset=(low,), shape=(high - low,)),) if high > low else ()
        held = {id(self.flat): LocalShard(global_shape=(5,), boxes=boxes)}
        state = LiveState({"model": module}, {"optimizer": self.optimizer}, {}, held)
        super().__init__(state, place(rank, count))
        self.low, self.high = low, high


@pytest.mark.parametrize("boundary", [False, True], ids=["lazy", "boundary"])
@pytest.mark.parametrize(("before", "after"), [*COUNTS, (4, 2), (3, 3)])
def test_padding_is_neither_saved_nor_restored(
    before: int, after: int, boundary: bool, tmp_path: Any
) -> None:
    """Elements arrive, also of tensors copied at the boundary; what pads them stays as it is."""
    ranks = [Padded(r, before) for r in range(before)]
    for rank in ranks:
        rank.state.not_lazy |= {"model.flat", "optimizer.model.flat.exp_avg"} if boundary else set()
    folder = save(str(tmp_path), ranks)
    for r in range(after):
        new = Padded(r, after, fill=9.0)
        new.restore(shards_on_disk(folder, r, after))
        count = new.high - new.low
        assert new.flat[:count].tolist() == list(range(new.low, new.high))
        assert (new.flat[count:] == 9).all()
        if count:
            state = new.optimizer.state[new.flat]
            assert state["step"] == 4
            for key, factor in (("exp_avg", 2), ("exp_avg_sq", 3)):
                assert state[key].shape == new.flat.shape
                assert state[key][:count].tolist() == [x * factor for x in range(new.low, new.high)]
                assert (state[key][count:] == 0).all()


def test_a_tensor_that_is_gathered_later_is_not_saved() -> None:
    """Its first elements are those of another part."""
    rank = Padded(1, 2)
    rank.image()
    rank.flat.data = torch.arange(5.0)
    with pytest.raises(ConfigError, match="does not hold 2 elements"):
        rank.image()


def test_memory_that_moves_between_snapshots_is_followed() -> None:
    """A cut view is made anew: wrappers put their flat tensors elsewhere."""
    rank = Padded(1, 2)
    inventory = rank.state.inventory()
    rank.flat.data = torch.tensor([3.0, 4.0, 8.0])
    assert rank.state.inventory() is inventory
    assert inventory.locals["model.flat"].data_ptr() == rank.flat.data_ptr()


# --- optimizers that divide their state ----------------------------------------------------------


class Divided(torch.optim.SGD):
    """As ZeroRedundancyOptimizer: all parameters in the groups, the state of some."""

    def __init__(self, parameters: list[nn.Parameter], rank: int, count: int) -> None:
        super().__init__(parameters, lr=0.1, momentum=0.9)
        self.rank, self._owners = rank, {p: i % count for i, p in enumerate(parameters)}
        own = [p for p in parameters if self._owners[p] == rank]
        self.optim = torch.optim.SGD([{"params": own}], lr=0.1)

    @property
    def _param_to_rank(self) -> dict[nn.Parameter, int]:
        return self._owners


class Redundancy(Member):
    """Copies of three parameters; rank i has the momentum of every `count`-th."""

    def __init__(self, rank: int, count: int, *, blank: bool = False) -> None:
        module, self.values = model_of(SHAPES)
        self.parameters = list(module.parameters())
        self.optimizer = Divided(self.parameters, rank, count)
        for number, parameter in enumerate(self.parameters):
            if blank:
                parameter.data.zero_()
            elif number % count == rank:
                self.optimizer.optim.state[parameter] = {"momentum_buffer": parameter.detach() * 2}
        holders = tuple(range(count)) if count > 1 else ()
        held = {id(p): whole_of(p, holders) for p in self.parameters}
        state = LiveState({"model": module}, {"optimizer": self.optimizer}, {}, held)
        super().__init__(state, place(rank, count))


@pytest.mark.parametrize(("before", "after"), COUNTS)
def test_state_that_one_rank_owns_arrives_at_whoever_owns_it_then(
    before: int, after: int, tmp_path: Any
) -> None:
    """It is stored by its owner, although the parameter is a copy that ranks share."""
    folder = save(str(tmp_path), [Redundancy(r, before) for r in range(before)])
    for r in range(after):
        new = Redundancy(r, after, blank=True)
        new.restore(shards_on_disk(folder, r, after))
        state = new.optimizer.optim.state
        owned = [p for i, p in enumerate(new.parameters) if i % after == r]
        assert list(state) == owned
        for parameter, value in zip(new.parameters, new.values, strict=True):
            assert np.array_equal(parameter.detach().numpy(), value)
            if parameter in state:
                assert np.array_equal(state[parameter]["momentum_buffer"].numpy(), value * 2)


def test_state_that_one_rank_owns_is_nobodys_copy() -> None:
    """Else its owner would store a part of it and trust others for the rest."""
    inventory = Redundancy(1, 2).state.inventory()
    assert inventory.holdings["model.p1"].holders == (0, 1)
    assert inventory.holdings["optimizer.model.p1.momentum_buffer"].holders == ()


# --- DeepSpeed -----------------------------------------------------------------------------------

Make = Callable[[list[tuple[int, ...]], int, int], tuple[Any, nn.Module]]
ZEROS = pytest.mark.parametrize(("source", "target"), [(zero_2, zero_2), (zero_3, zero_3),
                                                       (zero_2, zero_3), (zero_3, zero_2)],
                                ids=["2", "3", "2 to 3", "3 to 2"])  # fmt: skip


class Zero(Member):
    """A rank of DeepSpeed's."""

    def __init__(self, make: Make, rank: int, count: int, *, blank: bool = False) -> None:
        self.zero, self.module = make(SHAPES, rank, count)
        self.view = ZeroView(self.zero)
        held = {}
        for parameter in self.module.parameters():
            known: Any = parameter
            part = self.view.part(parameter)
            if hasattr(known, "ds_tensor"):
                assert part is not None
                held[id(parameter)] = part.holding
            else:
                held[id(parameter)] = whole_of(known, tuple(range(count)) if count > 1 else ())
            if blank:
                getattr(known, "ds_tensor", known.data).fill_(-5)
        if blank:
            for flat in self.view.inner.param_groups[0]["params"]:
                flat.fill_(-5)
            self.view.inner.state.clear()
        state = LiveState({"model": self.module}, {"optimizer": self.view}, {}, held)
        super().__init__(state, place(rank, count))

    def require_values(self, *, moments: bool = True) -> None:
        """Parameters, fp32 copies and moments are those of `model_of`."""
        _, values = model_of(SHAPES)
        for parameter, value in zip(self.module.parameters(), values, strict=True):
            own = self.state.holding(parameter)
            live = getattr(parameter, "ds_tensor", parameter.detach()).flatten()[: own.count]
            assert np.array_equal(live.numpy(), taken(own, value))
            part = held_state(self.view, parameter, own)
            if part.count:
                state = self.view.state[parameter]
                assert np.array_equal(state[MASTER].numpy(), taken(part, value))
                if moments:
                    assert np.array_equal(state["exp_avg"].numpy(), taken(part, value * 2))
                    assert state["step"] == state["count"] == 3


@ZEROS
@pytest.mark.parametrize(("before", "after"), COUNTS)
def test_partitions_come_back_as_those_of_any_number_of_ranks(
    source: Make, target: Make, before: int, after: int, tmp_path: Any
) -> None:
    """Parameters, fp32 copies and moments, from any stage into any."""
    folder = save(str(tmp_path), [Zero(source, r, before) for r in range(before)])
    for r in range(after):
        new = Zero(target, r, after, blank=True)
        new.restore(shards_on_disk(folder, r, after))
        new.require_values()


def test_what_a_plain_optimizer_saved_becomes_the_fp32_copy(tmp_path: Any) -> None:
    """It has no copy apart: the parameter is the most precise value there is."""
    module, _ = model_of(SHAPES)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    for parameter in module.parameters():
        optimizer.state[parameter] = {"exp_avg": parameter.detach() * 2}
    folder = save(
        str(tmp_path), [Member(LiveState({"model": module}, {"optimizer": optimizer}, {}))]
    )
    for make in (zero_2, zero_3):
        for r in range(2):
            new = Zero(make, r, 2, blank=True)
            for group in new.view.param_groups:
                group.update({k: v for k, v in optimizer.param_groups[0].items() if k != "params"})
            new.restore(shards_on_disk(folder, r, 2))
            new.require_values(moments=False)


def test_attach_sees_through_deepspeeds_optimizer() -> None:
    """`attach(optimizer=engine.optimizer)`, alone or by name; what is none is still refused."""
    zero, module = zero_2(SHAPES, 0, 1)
    for given in (zero, {"main": zero}):
        state = LiveState.of(model=module, optimizer=given)
        (view,) = state.optimizers.values()
        assert isinstance(view, ZeroView)
    with pytest.raises(ConfigError, match=r"expected a torch\.optim"):
        LiveState.of(model=module, optimizer=SimpleNamespace())  # type: ignore[arg-type]


def test_the_fence_is_called_by_the_optimizer_that_steps() -> None:
    """And named after the one that was attached: its parts are what the step changes."""
    zero, _ = zero_2(SHAPES, 0, 1)
    (flat,) = zero.single_partition_of_fp32_groups
    zero.optimizer = torch.optim.SGD([nn.Parameter(flat)], lr=0.1)
    view, seen = ZeroView(zero), list[Any]()
    hooks = OptimizerHooks([view], seen.append, lambda optimizer: seen.append((optimizer,)))
    zero.optimizer.step()
    zero.optimizer.load_state_dict(zero.optimizer.state_dict())
    hooks.remove()
    zero.optimizer.step()
    assert seen == [view, (view,), None]
