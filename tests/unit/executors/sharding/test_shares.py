"""Who stores what of replicated tensors: all of it, once, in equal parts, without asking."""

import random

from hypothesis import given
from hypothesis import strategies as st

from autockpt.executors.image.layout.dedup import CUT_BYTES, IMBALANCE, Item, Range, divide

items_of = st.lists(
    st.tuples(st.integers(1, 10**7), st.sampled_from((1, 2, 4, 8)), st.booleans()), max_size=12
).map(
    lambda rows: [
        Item(name=f"t{i}", elements=elements, element_bytes=size, divisible=divisible)
        for i, (elements, size, divisible) in enumerate(rows)
    ]
)


def nbytes(items: list[Item], share: dict[str, Range]) -> int:
    """Bytes of one member's share."""
    sizes = {item.name: item.element_bytes for item in items}
    return sum(sizes[name] * (stop - start) for name, (start, stop) in share.items())


@given(items_of, st.integers(1, 9))
def test_every_element_is_in_exactly_one_share(items: list[Item], members: int) -> None:
    """Cut or not."""
    shares = divide(items, members)
    assert len(shares) == members
    for item in items:
        ranges = sorted(share[item.name] for share in shares if item.name in share)
        ranges = [r for r in ranges if r[0] < r[1]]
        assert [start for start, _ in ranges] == [0, *(stop for _, stop in ranges[:-1])]
        assert ranges[-1][1] == item.elements
        assert item.divisible or len(ranges) == 1


@given(items_of, st.integers(1, 9), st.randoms())
def test_all_members_find_the_same_shares(
    items: list[Item], members: int, rng: random.Random
) -> None:
    """In whatever order they list their tensors: nobody asks anybody."""
    shuffled = list(items)
    rng.shuffle(shuffled)
    assert divide(shuffled, members) == divide(items, members)


@given(items_of, st.integers(1, 9))
def test_no_share_is_far_above_the_mean(items: list[Item], members: int) -> None:
    """Where everything may be cut: a twentieth, or a page a cut where the tensors are small."""
    items = [
        Item(name=i.name, elements=i.elements, element_bytes=i.element_bytes, divisible=True)
        for i in items
    ]
    loads = [nbytes(items, share) for share in divide(items, members)]
    mean = sum(loads) / members
    assert max(loads) <= max((1 + IMBALANCE) * mean, mean + 2 * CUT_BYTES)


def test_an_embedding_among_small_layers_is_cut_and_equal_layers_are_not() -> None:
    """Whole tensors as long as they balance: a cut one is read in two parts."""
    layers = [
        Item(name=f"layer{i}", elements=2**20, element_bytes=4, divisible=True) for i in range(8)
    ]
    embedding = Item(name="embedding", elements=2**25, element_bytes=4, divisible=True)
    assert all(r == (0, 2**20) for share in divide(layers, 4) for r in share.values()), (
        "eight equal layers on four ranks need no cut"
    )
    shares = divide([*layers, embedding], 4)
    loads = [nbytes([*layers, embedding], share) for share in shares]
    assert max(loads) <= (1 + IMBALANCE) * sum(loads) / 4
    assert sum("embedding" in share for share in shares) == 4
    starts = [share["embedding"][0] * 4 for share in shares if "embedding" in share]
    assert all(start % CUT_BYTES == 0 for start in starts)


def test_what_may_not_be_cut_goes_whole_to_whoever_has_least() -> None:
    """A tensor with gaps in its memory is no range of bytes."""
    rows = {"a": (100, False), "b": (60, False), "c": (50, False), "d": (4, True)}
    items = [
        Item(name=name, elements=n, element_bytes=1, divisible=d) for name, (n, d) in rows.items()
    ]
    shares = divide(items, 2)
    assert [sorted(n for n, r in share.items() if r[1] > r[0]) for share in shares] in (
        [["a"], ["b", "c", "d"]],
        [["a", "d"], ["b", "c"]],
    )
