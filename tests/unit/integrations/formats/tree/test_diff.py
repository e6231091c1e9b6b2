"""`autockpt diff`: equal means equal to the bit, and a distance is the largest one."""

import math
from pathlib import Path

import pytest
import torch

from autockpt.integrations.formats.tree.diff import BLOCK, compare, distance
from autockpt.integrations.formats.tree.lazy_tree import in_memory, transformed
from autockpt.integrations.formats.tree.loading import opened
from tests.unit.executors.states import DTYPES, random_tensor
from tests.unit.integrations.trained import saved, train, trained_job


def lazies(tree: dict[str, object]) -> dict[str, object]:
    """A tree of real tensors as the readers give it."""
    made = transformed(tree, lambda x: in_memory(x) if isinstance(x, torch.Tensor) else x)
    return made  # type: ignore[no-any-return]


def test_a_generation_equals_itself_and_not_the_next(tmp_path: Path) -> None:
    """Another step of training changes weights, moments, schedule and step."""
    job = trained_job()
    first = saved(tmp_path / "a", job)
    with opened(first) as a, opened(first) as b:
        assert compare(a.tree, b.tree).equal
    train(job, 1)
    second = saved(tmp_path / "b", job)
    with opened(first) as a, opened(second) as b:
        found = compare(a.tree, b.tree)
    groups = {group.name: group for group in found.groups}
    assert not found.equal
    assert groups["model"].changed > 0
    assert groups["model"].equal > 0  # the frozen parameter
    assert groups["optimizer"].max_abs is not None
    assert "model.frozen" not in {d.name for d in found.differences}


def test_every_kind_of_difference_has_its_name() -> None:
    """Only in one, another shape, another dtype, other values, other values that are no tensors."""
    a = {"m": {"gone": torch.ones(1), "shape": torch.ones(2), "dtype": torch.ones(2),
               "values": torch.ones(2)}, "lr": 0.1, "same": 1}  # fmt: skip
    b = {"m": {"new": torch.ones(1), "shape": torch.ones(3), "dtype": torch.ones(2).double(),
               "values": torch.tensor([1.0, 1.5])}, "lr": 0.2, "same": 1}  # fmt: skip
    found = {d.name: d for d in compare(lazies(a), lazies(b)).differences}
    assert {name: d.kind for name, d in found.items()} == {
        "m.gone": "only-a", "m.new": "only-b", "m.shape": "shape", "m.dtype": "dtype",
        "m.values": "values", "lr": "value",
    }  # fmt: skip
    values = found["m.values"]
    assert (values.elements, values.max_abs) == (1, 0.5)
    assert values.max_relative == pytest.approx(1 / 3)
    assert found["lr"].a == "0.1"


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental:UserWarning")
@pytest.mark.parametrize("kind", DTYPES)
def test_every_dtype_can_be_compared(kind: str) -> None:
    """Equal bits are equal (NaN too); others are counted, with a distance if there is one."""
    a = random_tensor(kind, (50,), seed=1)
    assert distance(a, a.clone()) == (0, 0.0, 0.0)
    b = random_tensor(kind, (50,), seed=2)
    count, max_abs, _ = distance(a, b)
    assert count > 0
    assert max_abs is None or max_abs >= 0


def test_signs_of_zero_and_nan_are_bits_and_no_distance() -> None:
    """0.0 and -0.0 differ by nothing; NaN against a number by infinity."""
    zero, minus = torch.tensor([0.0]), torch.tensor([-0.0])
    assert distance(zero, minus) == (1, 0.0, 0.0)
    nan = torch.tensor([math.nan])
    assert distance(nan, zero) == (1, math.inf, math.inf)
    infinite = torch.tensor([math.inf])
    assert distance(infinite, -infinite)[1] == math.inf


def test_the_largest_distance_is_found_in_any_block() -> None:
    """Tensors longer than one block."""
    a = torch.zeros(2 * BLOCK + 10)
    b = a.clone()
    b[5], b[-1] = 0.5, -2.0
    assert distance(a, b) == (2, 2.0, 1.0)
    assert distance(torch.tensor(3), torch.tensor(5)) == (1, 2.0, 0.4)
