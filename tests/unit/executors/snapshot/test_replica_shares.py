"""Which ranks share, what each takes, and how they find out that they hold different things."""

import itertools
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from autockpt.executors.image.layout.dedup import CUT_BYTES, IMBALANCE
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


def test_members_are_all_holders_where_the_job_shares() -> None:
    """Wherever they are; nothing that this rank stores is stored on another node then."""
    place = Place(rank=2, nodes=(0, 0, 1, 1, 1), among="job")
    assert place.members((0, 2, 4)) == (0, 2, 4)
    assert place.members((2,)) == place.members((0, 1)) == ()
    assert place.further_nodes((0, 2, 4)) == ()
    assert replace(place, among="node").further_nodes((0, 2, 4)) == (1,)
    assert place.spans_nodes((0, 2))
    assert not place.spans_nodes((2, 3))


@given(
    nodes=st.lists(st.integers(0, 3), min_size=1, max_size=7).map(sorted),
    sizes=st.lists(st.tuples(st.integers(1, 200_000), st.booleans()), min_size=1, max_size=6),
)
def test_a_job_stores_every_element_once_in_equal_parts(
    nodes: list[int], sizes: list[tuple[int, bool]]
) -> None:
    """On any nodes: all ranks hold some tensors, every second rank holds the others (HSDP)."""
    ranks = tuple(range(len(nodes)))
    tensors = {f"t{i}": torch.zeros(n) for i, (n, _) in enumerate(sizes)}
    halves = {f"t{i}" for i, (_, is_half) in enumerate(sizes) if is_half}
    found, loads = [], {False: dict.fromkeys(ranks, 0), True: dict.fromkeys(ranks, 0)}
    for rank in ranks:
        alike = tuple(range(rank % 2, len(ranks), 2))
        held = {n: whole_of(t, alike if n in halves else ranks) for n, t in tensors.items()}
        place = Place(rank=rank, nodes=tuple(nodes), among="job")
        found.append(take_shares(place, tensors, held))
        for name, tensor in tensors.items():
            start, stop = found[rank].ranges.get(name, (0, tensor.numel()))
            loads[name in halves][rank] += tensor[start:stop].nbytes
    for name, tensor in tensors.items():
        groups = [ranks[0::2], ranks[1::2]] if name in halves else [ranks]
        for group in filter(None, groups):
            ranges = [found[r].ranges.get(name, (0, tensor.numel())) for r in group]
            ranges = sorted(r for r in ranges if r[0] < r[1])
            assert [start for start, _ in ranges] == [0, *(stop for _, stop in ranges[:-1])]
            assert ranges[-1][1] == tensor.numel()
    for is_half, group in ((False, ranks), (True, ranks[0::2]), (True, ranks[1::2])):
        if group:
            mean = sum(loads[is_half][r] for r in group) / len(group)
            most = max(loads[is_half][r] for r in group)
            assert most <= max((1 + IMBALANCE) * mean, mean + 2 * CUT_BYTES)
    several = [r for r in ranks if len({nodes[m] for m in ranks[r % 2 :: 2]}) > 1]
    for rank in ranks:
        apart = len(set(nodes)) > 1 and len(halves) < len(tensors)
        assert found[rank].across_nodes is (apart or (bool(halves) and rank in several))


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
