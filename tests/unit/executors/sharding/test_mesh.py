"""Coordinates of ranks in a grid."""

import itertools
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from autockpt.executors.sharding.mesh import Coordinates
from autockpt.values.errors import ConfigError


@given(sizes=st.lists(st.integers(1, 4), min_size=1, max_size=4), data=st.data())
def test_coordinates_agree_with_the_grid(sizes: list[int], data: st.DataObject) -> None:
    """Places and neighbours are those of an array of the ranks, in any order of ranks."""
    count = int(torch.tensor(sizes).prod())
    order = data.draw(st.permutations(range(count)))
    grid = torch.tensor(order).view(sizes)
    names = [f"a{i}" for i in range(len(sizes))]
    moving = data.draw(st.sets(st.sampled_from(names)))
    rank = data.draw(st.sampled_from(order))
    here = (grid == rank).nonzero()[0].tolist()
    at = Coordinates(axes=dict(zip(names, sizes, strict=True)), rank=rank, ranks=tuple(order))
    assert [at.at(name) for name in names] == here
    choices = [range(n) if a in moving else [h] for a, n, h in zip(names, sizes, here, strict=True)]
    found = sorted(int(grid[place]) for place in itertools.product(*choices))
    assert at.along(moving) == (tuple(found) if len(found) > 1 else ())


def test_a_device_mesh_gives_the_coordinates() -> None:
    """Names and order of ranks are the mesh's."""
    mesh = SimpleNamespace(mesh_dim_names=("dp", "tp"), mesh=torch.tensor([[0, 2], [1, 3]]))
    at = Coordinates.of(mesh, rank=2)
    assert (at.at("dp"), at.at("tp"), at.along(["dp"])) == (0, 1, (2, 3))


def test_ranks_that_do_not_fill_the_grid_are_refused() -> None:
    """A wrong size would put every part in the wrong place."""
    with pytest.raises(ConfigError, match="are 4 ranks, got 4 ranks and asked for rank 4"):
        Coordinates(axes={"dp": 2, "tp": 2}, rank=4)
    with pytest.raises(ConfigError, match="are 4 ranks, got 3"):
        Coordinates(axes={"dp": 4}, rank=0, ranks=(0, 1, 2))


def test_an_unknown_axis_is_refused_with_the_known_ones() -> None:
    """An axis that this job does not use is given one rank, not guessed."""
    with pytest.raises(ConfigError, match=r"no axis 'ep'; this job has dp; .*'ep': 1"):
        Coordinates(axes={"dp": 2}, rank=0).along(["ep"])
