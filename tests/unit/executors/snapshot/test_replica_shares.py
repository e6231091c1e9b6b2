"""Which ranks share, what each takes, and how they find out that they hold different things."""

import itertools

import pytest
import torch

from autockpt.executors.sharding.local_shard import LocalShard, whole_of
from autockpt.executors.snapshot.replica_shares import Place, Shares, take_shares

Tensors = dict[str, torch.Tensor]


def replicated() -> Tensors:
    """What a rank of DDP holds: the same numbers on each."""
    torch.manual_seed(1)
    return {
        "wide": torch.randn(300, 40), "long": torch.randn(5000), "one": torch.randn(()),
        "turned": torch.randn(90, 50).t(), "half": torch.randn(77).half(),
    }  # fmt: skip


def holdings(tensors: Tensors, holders: tuple[int, ...]) -> dict[str, LocalShard]:
    """All of them held by the same ranks."""
    return {name: whole_of(tensor, holders) for name, tensor in tensors.items()}


def shares(rank: int, tensors: Tensors, holders: tuple[int, ...] = (0, 1), **more: int) -> Shares:
    """What one rank of a node finds."""
    place = Place(rank=rank, nodes=(0,) * more.get("ranks", 2))
    return take_shares(place, tensors, holdings(tensors, holders))


def digests(rank: int, tensors: Tensors, holders: tuple[int, ...] = (0, 1)) -> list[str]:
    """What it says of what it shares."""
    found = shares(rank, tensors, holders).groups
    return [group.take(lambda canaries: canaries.take()).digest() for group in found]


def test_members_are_the_holders_on_the_same_node() -> None:
    """Another node's memory does not live and die with this one's."""
    place = Place(rank=2, nodes=(0, 0, 1, 1, 1))
    assert place.members((0, 2, 4)) == (2, 4)
    assert place.members((2, 3, 4, 9)) == (2, 3, 4)
    assert place.members((0, 1, 2)) == ()
    assert place.members((3, 4)) == ()
    assert place.members(()) == ()


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_all_ranks_together_store_everything_once(ranks: int) -> None:
    """Every element of every tensor; a tensor with gaps in its memory goes whole to one of them."""
    holders = tuple(range(ranks))
    found = [shares(rank, replicated(), holders, ranks=ranks) for rank in holders]
    for name, tensor in replicated().items():
        ranges = sorted(each.ranges[name] for each in found)
        ranges = [r for r in ranges if r[0] < r[1]]
        assert sum(stop - start for start, stop in ranges) == tensor.numel()
        assert all(a[1] <= b[0] for a, b in itertools.pairwise(ranges))
    assert sum(each.ranges["turned"] != (0, 0) for each in found) == 1


def test_a_second_name_goes_where_the_first_one_goes() -> None:
    """Tied weights are stored once, by one rank, under both names."""
    tensors = replicated()
    tensors["tied"] = tensors["wide"]
    for rank in range(2):
        found = shares(rank, tensors)
        assert found.ranges["tied"] == found.ranges["wide"]
    stored = [shares(rank, tensors).ranges["wide"] for rank in range(2)]
    assert sum(stop - start for start, stop in stored) == tensors["wide"].numel()


def test_what_nobody_else_holds_is_not_shared() -> None:
    """Plain tensors without a word, ranks of other nodes, nothing at all, no neighbours."""
    tensors = {"own": torch.ones(9), "empty": torch.ones(0), "far": torch.ones(9)}
    known = {"empty": whole_of(tensors["empty"], (0, 1)), "far": whole_of(tensors["far"], (0, 2))}
    found = take_shares(Place(rank=0, nodes=(0, 0, 1)), tensors, known)
    assert found.ranges == {}
    assert [(group.members, group.canaries) for group in found.groups] == [((0,), [])]
    assert take_shares(None, tensors, known).ranges == {}


def test_ranks_of_different_groups_share_within_each() -> None:
    """Tensor parallelism times data parallelism: what all hold, and what half of them hold."""
    tensors = {"norm": torch.ones(5000), "split": torch.ones(8000)}
    known = {"norm": whole_of(tensors["norm"], (0, 1, 2, 3)),
             "split": whole_of(tensors["split"], (1, 3))}  # fmt: skip
    found = take_shares(Place(rank=3, nodes=(0,) * 4), tensors, known)
    assert sorted(group.members for group in found.groups) == [(0, 1, 2, 3), (1, 3)]


def test_equal_replicas_say_the_same() -> None:
    """Form and digest; with every value in place."""
    assert digests(0, replicated()) == digests(1, replicated()) != []
    forms = [[g.form for g in shares(rank, replicated()).groups] for rank in range(2)]
    assert forms[0] == forms[1]


@pytest.mark.parametrize("change", ["value", "name", "shape", "dtype", "one more"])
def test_a_replica_that_differs_says_something_else(change: str) -> None:
    """In a value, or in what it is called, how it is formed, what there is: parts would not fit."""
    mine, other = replicated(), replicated()
    if change == "value":
        other["long"] += 1.0
    elif change == "name":
        other["longer"] = other.pop("long")
    elif change == "shape":
        other["wide"] = other["wide"].view(40, 300)
    elif change == "dtype":
        other["half"] = other["half"].bfloat16()
    else:
        other["more"] = torch.ones(3)
    assert digests(0, mine) != digests(1, other)
