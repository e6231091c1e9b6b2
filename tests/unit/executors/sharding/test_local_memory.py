"""The live memory of a holding."""

import pytest
import torch

from autockpt.executors.image.layout.boxes import Box
from autockpt.executors.sharding.local_memory import own_elements
from autockpt.executors.sharding.local_shard import LocalShard, whole_of
from autockpt.values.errors import ConfigError

THREE = LocalShard(global_shape=(3,), boxes=(Box(offset=(0,), shape=(3,)),))


def test_a_tensor_without_padding_is_itself() -> None:
    """Shape and strides stay as they are."""
    tensor = torch.ones(2, 3).t()
    assert own_elements(tensor, whole_of(tensor)) is tensor


def test_padding_at_the_end_is_left_out_without_a_copy() -> None:
    """What is written to the elements is written to the tensor."""
    tensor = torch.zeros(2, 2)
    own_elements(tensor, THREE).fill_(1)
    assert tensor.tolist() == [[1, 1], [1, 0]]


@pytest.mark.parametrize(
    "tensor",
    [torch.ones(2), torch.ones(2, 2).t(), torch.ones(2, 3)],
    ids=["too few", "padding in between", "gathered"],
)
def test_memory_that_cannot_be_the_holding_is_refused(tensor: torch.Tensor) -> None:
    """The first elements of it would be others than those of the boxes."""
    row = LocalShard(global_shape=(2, 3), boxes=(Box(offset=(1, 0), shape=(1, 3)),))
    with pytest.raises(ConfigError, match="does not hold 3 elements"):
        own_elements(tensor, row)
