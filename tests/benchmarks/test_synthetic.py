"""The synthetic job is the job that it is said to be."""

import math

import pytest

from benchmarks.synthetic import LAYERS, SyntheticRank, mesh_of, stage_tensors


def test_it_has_405_billion_parameters() -> None:
    """Counted once, whatever the number of stages."""
    for stages in (1, 16):
        tensors = [t for stage in range(stages) for t in stage_tensors(stages, stage)]
        assert len({name for name, _, _ in tensors}) == len(tensors) == 9 * LAYERS + 3
        count = sum(math.prod(shape) for _, shape, _ in tensors)
        assert 405e9 < count < 406e9


def test_copies_own_every_element_of_the_optimizer_once() -> None:
    """The ranges of the copies of one place make up its weights; none is much larger."""
    mesh = mesh_of(384)
    assert (mesh.tensor, mesh.stages, mesh.copies) == (8, 16, 3)
    ranks = [SyntheticRank(mesh, mesh.rank(2, copy, 5)) for copy in range(3)]
    weights = sum(holding.count for holding in ranks[0].weights.values())
    owned = [sum(h.count for n, h in r.state.items() if n.endswith("exp_avg")) for r in ranks]
    assert sum(owned) == weights
    assert max(owned) <= weights / 3 + 1


@pytest.mark.parametrize("ranks", [8, 64, 1024])
def test_places_and_ranks_belong_together(ranks: int) -> None:
    """Ranks of a node differ in their tensor-parallel place only."""
    mesh = mesh_of(ranks)
    assert mesh.ranks == ranks
    for rank in range(ranks):
        assert mesh.rank(*mesh.place(rank)) == rank
    assert len({mesh.place(rank)[1:] for rank in range(8)}) == 1
