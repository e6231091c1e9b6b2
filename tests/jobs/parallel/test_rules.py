"""Plain tensors that are divided by hand come back on any number of ranks, as rules say."""

import pytest
import torch

from tests.jobs.parallel.matrix import SAVED_STEPS, Failed, Matrix, Seen, complaints, differences
from tests.jobs.parallel.ruled import whole

STEPS = SAVED_STEPS + 2


def without_routers(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """All but what drifts apart."""
    return {name: tensor for name, tensor in state.items() if "router" not in name}


def routers(state: dict[str, torch.Tensor], key: str = "") -> list[torch.Tensor]:
    """Every rank's own, or a tensor of its optimizer state."""
    ends = tuple(f"router.weight[{rank}]{key}" for rank in range(4))
    return [tensor for name, tensor in sorted(state.items()) if name.endswith(ends)]


@pytest.mark.parametrize(
    ("source", "target"),
    [("rules-2", "rules-1"), ("rules-2", "rules-3"), ("rules-1", "rules-3"),
     ("rules-2x2", "rules-3"), ("rules-3", "rules-2x2")],
)  # fmt: skip
def test_parts_cut_by_hand_resume_on_other_ranks(source: str, target: str, matrix: Matrix) -> None:
    """Fused, padded, transposed, numbered and replicated tensors with Adam's state, to the bit."""
    saved = matrix.source(source)
    resumed = matrix.train(target, matrix.copy(saved), steps=STEPS, end="leave")
    assert resumed.start == SAVED_STEPS
    assert len(without_routers(resumed.attached)) == 4 * (len(whole(0)) - 1)
    for before, after in ((saved.seen.saved, resumed.attached), (saved.seen.ended, resumed.ended)):
        assert differences(without_routers(before), without_routers(after)) == []
    assert complaints(saved.run_dir) == []
    _require_means(saved.seen, resumed)


def _require_means(saved: Seen, resumed: Seen) -> None:
    """Of another number of ranks every one starts with the mean, in its optimizer as well."""
    for key in ("", ".exp_avg", ".exp_avg_sq", ".step"):
        copies = routers(saved.saved, key)
        expected = torch.stack(copies).double().mean(0).float()
        for own in routers(resumed.attached, key):
            assert torch.allclose(own, expected, rtol=1e-6, atol=0)
            assert len(copies) == 1 or key or not torch.equal(own, copies[0])


@pytest.mark.parametrize("mesh", ["rules-2", "no-rules-2"])
def test_as_many_ranks_take_what_was_theirs(mesh: str, matrix: Matrix) -> None:
    """Copies that drift apart do not become a mean; without rules every rank has its own."""
    saved = matrix.source(mesh)
    resumed = matrix.train(mesh, matrix.copy(saved), steps=STEPS, end="leave")
    assert differences(saved.seen.saved, resumed.attached) == []
    assert differences(saved.seen.ended, resumed.ended) == []


def test_copies_come_back_where_another_axis_changed(matrix: Matrix) -> None:
    """As many of them as before: each is some rank's own."""
    saved = matrix.source("rules-2x2")
    resumed = matrix.train("rules-2", matrix.copy(saved), end="leave")
    assert differences(saved.seen.saved, resumed.attached) == []


def test_parts_without_rules_are_refused_with_the_rules_to_write(matrix: Matrix) -> None:
    """On other ranks nobody knows what they are parts of."""
    saved = matrix.source("no-rules-2")
    with pytest.raises(Failed, match=r"ranks 0, 1 hold different content") as refused:
        matrix.train("no-rules-1", matrix.copy(saved), end="leave")
    assert '{match: "embed.weight", sharded: {dim: 0, over: tp}}' in str(refused.value)
