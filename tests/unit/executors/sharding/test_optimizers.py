"""Whose optimizer state a rank has; the division itself is tried in `test_collectors_real.py`."""

import pytest
import torch

from autockpt.executors.sharding.local_shard import whole_of
from autockpt.executors.sharding.optimizers import held_state, owns_state, state_of
from autockpt.values.errors import ConfigError


def test_a_plain_optimizer_has_the_state_of_all_its_parameters() -> None:
    """Its state is its own, and copies of a parameter have copies of its state."""
    parameter = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    holding = whole_of(parameter, (0, 1))
    assert owns_state(optimizer, parameter)
    assert state_of(optimizer) is optimizer.state
    assert held_state(optimizer, parameter, holding) is holding


class Undecided(torch.optim.SGD):
    """ZeroRedundancyOptimizer with overlap, before the first iterations."""

    @property
    def _param_to_rank(self) -> dict[torch.Tensor, int]:
        raise AssertionError("asking divides the parameters for good")


def test_a_division_that_is_still_to_come_is_not_decided_by_asking() -> None:
    """Reading torch's property would fix another division than the one it makes later."""
    parameter = torch.nn.Parameter(torch.ones(2))
    optimizer = Undecided([parameter], lr=0.1)
    with pytest.raises(ConfigError, match=r"overlap_with_ddp=True.* attach after them"):
        owns_state(optimizer, parameter)
    assert held_state(optimizer, parameter, whole_of(parameter, (0, 1))).holders == ()
