"""Lose what a set tolerates, in every way: the images come back to the bit; not one loss more."""

import threading
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autockpt.executors.keeper.replication.parity.geometry import ParitySet
from autockpt.executors.keeper.replication.parity.sums import ParityMemory, Rebuild, add_scaled
from autockpt.values.errors import ConfigError, CorruptCheckpointError, GuardError, ProtocolError
from tests.unit.executors.keeper.replication.parity.sets import GENERATION as GENERATION_OF_SETS
from tests.unit.executors.keeper.replication.parity.sets import Protected

SETS = [(n, k) for n in range(2, 9) for k in (1, 2, 3) if k < n]


@pytest.mark.parametrize(("members", "losses"), SETS)
def test_every_pattern_of_losses_is_recovered(members: int, losses: int) -> None:
    """All sets of up to 8 members, all ways to lose up to 3, images of different lengths."""
    protected = Protected([700 + 131 * m for m in range(members)], losses=losses, seed=members)
    for count in range(1, losses + 1):
        for pattern in combinations(range(members), count):
            for member in pattern:
                rebuilt = protected.rebuild(member, frozenset(pattern))
                assert rebuilt == protected.images[member], (pattern, member)


@pytest.mark.parametrize(("members", "losses"), SETS)
def test_one_loss_more_is_refused(members: int, losses: int) -> None:
    """With what to do instead, and before a byte moves."""
    parity = ParitySet(image_bytes=(1000,) * members, chunk_bytes=128, losses=losses)
    lost = frozenset(range(losses + 1))
    if len(lost) < members:
        with pytest.raises(ConfigError, match="restore from a durable generation"):
            Rebuild(parity, 0, lost, memoryview(bytearray(1000)))


@settings(max_examples=60, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 3000), min_size=2, max_size=7),
    losses=st.integers(1, 3),
    chunk_bytes=st.sampled_from([32, 64, 256, 1024]),
    data=st.data(),
)
def test_images_of_any_lengths_come_back(
    sizes: list[int], losses: int, chunk_bytes: int, data: st.DataObject
) -> None:
    """A byte beside thousands, whole chunks or not."""
    losses = min(losses, len(sizes) - 1)
    protected = Protected(sizes, chunk_bytes=chunk_bytes, losses=losses)
    lost = frozenset(
        data.draw(st.sets(st.integers(0, len(sizes) - 1), min_size=1, max_size=losses))
    )
    for member in lost:
        assert protected.rebuild(member, lost) == protected.images[member]


@given(
    members=st.integers(2, 12), losses=st.integers(1, 4), chunks=st.integers(1, 40),
    chunk_bytes=st.sampled_from([32, 4096]),
)  # fmt: skip
def test_everybody_stores_little_more_than_the_share(
    members: int, losses: int, chunks: int, chunk_bytes: int
) -> None:
    """k / (N - k) of the largest image, rounded up to chunks; nobody holds its own parity."""
    losses = min(losses, members - 1)
    parity = ParitySet(
        image_bytes=(chunks * chunk_bytes,) * members, chunk_bytes=chunk_bytes, losses=losses
    )
    share = losses * chunks * chunk_bytes / (members - losses)
    assert share <= parity.parity_bytes < share + losses * chunk_bytes
    for member in range(members):
        assert not parity.for_holder(member, member)
        sent = [
            number
            for holder in range(members)
            for start, stop in parity.for_holder(member, holder)
            for number in range(start, stop)
        ]
        assert sorted(sent) == sorted(losses * list(range(chunks)))


@pytest.mark.parametrize("losses", [1, 2])
def test_survivors_may_rebuild_a_part_each(losses: int) -> None:
    """Each the stripe it holds parity of; what others have in the image stays as it was."""
    protected = Protected([5000, 4700, 4800, 4900, 3000], losses=losses)
    parity, image, used = protected.parity, bytearray(5000), 0
    for stripe in parity.stripes_of(0):
        part = [n for n in range(parity.chunks(0)) if parity.place(0, n).stripe == stripe]
        before = bytes(image)
        used += protected.rebuild_chunks(0, frozenset({0}), image, part)
        changed = {at // 128 for at in range(5000) if image[at] != before[at]}
        assert changed <= set(part)
    assert image == protected.images[0]
    assert used == protected.rebuild_chunks(0, frozenset({0}), bytearray(5000), None)


def test_one_loss_is_plain_xor() -> None:
    """Any number of members, and no multiplication."""
    parity = ParitySet(image_bytes=(4096,) * 40, chunk_bytes=128)
    factors = {parity.factor(m, s, s) for s in range(40) for m in range(40) if m != s}
    assert factors == {1}
    with pytest.raises(ConfigError, match="at most 16 members"):
        ParitySet(image_bytes=(4096,) * 40, chunk_bytes=128, losses=2)


@pytest.mark.parametrize(
    ("sizes", "losses", "chunk_bytes"),
    [((5,), 1, 128), ((5, 5), 2, 128), ((5, 0), 1, 128), ((5, 5), 1, 100)],
)
def test_a_set_that_cannot_be_is_refused(
    sizes: tuple[int, ...], losses: int, chunk_bytes: int
) -> None:
    """One member, as many losses as members, an empty image, odd chunks."""
    with pytest.raises(ConfigError, match=r"expected|power of two"):
        ParitySet(image_bytes=sizes, chunk_bytes=chunk_bytes, losses=losses)


def test_a_chunk_counts_once() -> None:
    """Twice would be not at all: it cancels itself."""
    parity = ParitySet(image_bytes=(1000,) * 3, chunk_bytes=128)
    memory = ParityMemory(parity, 0, memoryview(bytearray(parity.parity_bytes)))
    ((start, _),) = parity.for_holder(1, 0)
    memory.add(1, start, memoryview(bytes(128)))
    with pytest.raises(ProtocolError, match="not awaited"):
        memory.add(1, start, memoryview(bytes(128)))
    with pytest.raises(ProtocolError, match="image of member 0: not awaited"):
        memory.add(0, 0, memoryview(bytes(128)))
    subject = memory.subject(
        run_id="run", generation=GENERATION_OF_SETS, step=7, rank=0, world_size=3
    )
    with pytest.raises(ProtocolError, match="have not come"):
        memory.seal(subject)


def test_a_damaged_survivor_is_found_by_the_digests_of_the_lost() -> None:
    """One flipped bit in a parity, and nothing is restored from it."""
    protected = Protected([1000, 900, 800])
    protected.parities[1] = memoryview(bytearray(protected.parities[1]))
    protected.parities[1][17] ^= 1
    with pytest.raises(CorruptCheckpointError, match="rebuilt from parity"):
        protected.rebuild(0, frozenset({0}))


def test_streams_may_add_at_the_same_time() -> None:
    """Four threads, one for each member, into the same chunks."""
    protected = Protected([2**16] * 5, chunk_bytes=4096, losses=2)
    parity = protected.parity
    view = memoryview(bytearray(parity.parity_bytes))
    memory = ParityMemory(parity, 0, view)

    def send(member: int) -> None:
        for start, stop in parity.for_holder(member, 0):
            for number in range(start, stop):
                memory.add(member, number, protected.chunk(member, number))

    threads = [threading.Thread(target=send, args=(member,)) for member in range(1, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not memory.missing
    assert view == protected.parities[0]


def test_memory_of_another_size_is_refused() -> None:
    """Before anything is written to it."""
    parity = ParitySet(image_bytes=(1000,) * 3, chunk_bytes=128)
    with pytest.raises(GuardError, match="for a parity of"):
        ParityMemory(parity, 0, memoryview(bytearray(7)))
    with pytest.raises(GuardError, match="for an image of"):
        Rebuild(parity, 0, frozenset({0}), memoryview(bytearray(7)))


def test_scaling_is_linear_and_undone_by_the_inverse() -> None:
    """On packets as on elements."""
    draw = np.random.default_rng(3)
    source = draw.integers(0, 2**63, 4 * 16, dtype=np.uint64)
    for factor, back in ((1, 1), (2, 9), (15, 8)):
        scaled, again = np.zeros_like(source), np.zeros_like(source)
        add_scaled(scaled, source, factor, 16)
        add_scaled(again, scaled, back, 16)
        assert np.array_equal(again, source), factor
