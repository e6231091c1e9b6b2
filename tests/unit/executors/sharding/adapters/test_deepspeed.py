"""DeepSpeed's flat partitions as state of parameters; the objects are those of `zeros.py`."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import nn

from autockpt.executors.sharding.adapters.deepspeed import is_zero, of_deepspeed, part_of
from autockpt.executors.sharding.adapters.zero_optimizer import MASTER, ZeroView
from autockpt.executors.sharding.local_memory import own_elements
from autockpt.executors.sharding.local_shard import whole_of
from autockpt.executors.sharding.optimizers import held_state, owns_state, state_of
from autockpt.executors.state.live_state import LiveState
from autockpt.values.errors import ConfigError
from tests.unit.executors.sharding.covering import taken, times_covered
from tests.unit.executors.sharding.zeros import model_of, zero_2, zero_3

SHAPES = st.lists(
    st.lists(st.integers(1, 4), min_size=1, max_size=3).map(tuple), min_size=1, max_size=4
)


BOTH = pytest.mark.parametrize("make", [zero_2, zero_3])


@BOTH
@settings(max_examples=50)
@given(shapes=SHAPES, count=st.integers(1, 4))
def test_states_of_all_ranks_cover_every_parameter_once(
    make: Any, shapes: list[tuple[int, ...]], count: int
) -> None:
    """fp32 copies and moments alike, with the right elements and without the padding."""
    _, values = model_of(shapes)
    boxes: dict[tuple[int, str], list[Any]] = {}
    for rank in range(count):
        zero, module = make(shapes, rank, count)
        assert is_zero(zero)
        view = ZeroView(zero)
        for number, parameter in enumerate(module.parameters()):
            state = state_of(view).get(parameter)
            assert (state is not None) == owns_state(view, parameter)
            holding = held_state(view, parameter, whole_of(parameter, (0, 1)))
            if state is None:
                assert holding.boxes == ()
                continue
            assert state["step"].item() == state["count"] == 3
            for key, factor in ((MASTER, 1), ("exp_avg", 2)):
                expected = taken(holding, values[number] * factor)
                assert np.array_equal(state[key].numpy(), expected)
                boxes.setdefault((number, key), []).extend(holding.boxes)
    assert len(boxes) == 2 * len(values)
    for (number, _), found in boxes.items():
        assert (times_covered(values[number].shape, found) == 1).all()


@BOTH
@pytest.mark.parametrize("stepped", [True, False])
@settings(max_examples=30)
@given(shapes=SHAPES, shift=st.integers(1, 4), count=st.integers(1, 4))
def test_restored_state_arrives_in_partitions_with_and_without_state(
    make: Any, stepped: bool, shapes: list[tuple[int, ...]], shift: int, count: int
) -> None:
    """Parts for this number of ranks, cut out of the whole, stand where the inner step reads."""
    _, values = model_of(shapes)
    for rank in range(count):
        zero, module = make(shapes, rank, count)
        inner, view = zero.optimizer, ZeroView(zero)
        if not stepped:
            inner.state.clear()
        view.state.clear()
        for number, parameter in enumerate(module.parameters()):
            part = view.part(parameter)
            if part is not None:
                own = torch.from_numpy(taken(part.holding, values[number] + 0.5))
                view.state[parameter] = {
                    MASTER: own, "exp_avg": own + shift, "step": torch.tensor(9.0), "count": 9,
                }  # fmt: skip
        for number, parameter in enumerate(module.parameters()):
            part = part_of(zero, parameter)
            if part is not None:
                expected = taken(part.holding, values[number] + 0.5)
                flat = inner.state[part.flat]
                assert np.array_equal(part.of(part.flat).numpy(), expected)
                assert np.array_equal(part.of(flat["exp_avg"]).numpy(), expected + shift)
                assert flat["step"].item() == flat["count"] == 9
                assert view.state[parameter]["count"] == 9


@settings(max_examples=50)
@given(shapes=SHAPES, count=st.integers(1, 4))
@example(shapes=[(1,)], count=2)
def test_parameters_of_zero_3_are_ranges(shapes: list[tuple[int, ...]], count: int) -> None:
    """The parameter itself is empty: its elements stand in `ds_tensor`."""
    _, values = model_of(shapes)
    boxes: list[list[Any]] = [[] for _ in values]
    for rank in range(count):
        _, module = zero_3(shapes, rank, count)
        for number, (parameter, holding) in enumerate(of_deepspeed(module)):
            own = own_elements(parameter, holding)
            assert np.array_equal(own.numpy(), taken(holding, values[number]))
            boxes[number] += holding.boxes
    for value, found in zip(values, boxes, strict=True):
        assert (times_covered(value.shape, found) == 1).all()


def test_views_stay_the_same_objects_while_the_partitions_do() -> None:
    """A walk that was taken once still holds; a replaced partition state is seen."""
    zero, module = zero_2([(2, 3)], rank=0, count=1)
    view, (parameter,) = ZeroView(zero), module.parameters()
    before = view.state[parameter]
    assert view.state[parameter] is before
    (flat,) = zero.single_partition_of_fp32_groups
    zero.optimizer.state[flat]["exp_avg"] = torch.zeros(6)
    assert view.state[parameter] is not before
    assert view.state[parameter]["exp_avg"].tolist() == [0] * 6


def test_settings_of_groups_are_deepspeeds_own() -> None:
    """A restored learning rate reaches the optimizer that steps; the flat tensors stay."""
    zero, module = zero_3([(2,), (3,)], rank=0, count=1)
    view, flats = ZeroView(zero), zero.optimizer.param_groups[0]["params"]
    (group,) = view.param_groups
    group.update({"lr": 0.5})
    assert group["params"] == list(module.parameters())
    assert set(group) == {"lr", "params"}
    assert zero.optimizer.param_groups == [{"lr": 0.5, "params": flats}]
    assert view.inner is zero.optimizer


def test_state_of_another_size_is_refused() -> None:
    """A part is never stretched or cut by guessing."""
    zero, module = zero_2([(2, 3)], rank=0, count=2)
    (parameter,) = module.parameters()
    with pytest.raises(ConfigError, match=r"exp_avg has 6 elements, .* \(2, 3\) has 3"):
        ZeroView(zero).state[parameter] = {"exp_avg": torch.zeros(6)}


def test_frozen_parameters_have_no_state() -> None:
    """Nothing of the optimizer is theirs."""
    zero, module = zero_3([(2,), (3,)], rank=0, count=1)
    del zero.grad_position[0]
    assert list(ZeroView(zero).state) == list(module.parameters())[1:]


def test_partitions_on_nvme_are_refused() -> None:
    """Their tensors are empty in memory; saving them would save nothing."""
    zero, _ = zero_3([(2,)], rank=0, count=1)
    zero._swappable_optimizer_subgroup = lambda group: True
    with pytest.raises(ConfigError, match="optimizer state is on NVMe"):
        ZeroView(zero)


def test_small_parameters_that_are_kept_whole_are_gathered_again() -> None:
    """ZeRO 3 does it after each step; a restore is no step."""
    gathered: list[Any] = []
    for make in (zero_2, zero_3):
        zero, module = make([(2,)], 0, 1)
        state = LiveState.of(model=module, optimizer=zero)
        state.refresh()
        assert gathered == []
    zero.persistent_parameters = [SimpleNamespace(all_gather=gathered.append)]
    state.refresh()
    assert gathered == [zero.persistent_parameters]


def test_other_optimizers_are_not_taken_for_deepspeeds() -> None:
    """Neither torch's own nor a wrapper around one."""
    plain = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
    assert not is_zero(plain)
    assert not is_zero(SimpleNamespace(optimizer=plain))
    assert list(of_deepspeed(nn.Linear(2, 2))) == []
