"""Replicas are compared byte by byte: what is found, when, and who is named.

Ranks are threads of nothing: each is a live state of its own with its own snapshotter, and the
coordinator's comparison gets what their seals would say.
"""

import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager

import pytest
import torch

from autockpt.executors.linux.memory import Arena
from autockpt.executors.protocol import messages as m
from autockpt.executors.protocol.coordinator.replicas import ReplicaComparison
from autockpt.executors.sharding.local_shard import whole_of
from autockpt.executors.snapshot import replica_check
from autockpt.executors.snapshot.replica_check import shares_to_read
from autockpt.executors.snapshot.replica_shares import Place
from autockpt.executors.snapshot.snapshotter import Snapshot, Snapshotter
from autockpt.executors.state.live_state import LiveState
from autockpt.values.generation import Generation
from tests.unit.executors.shots import counters, slot_for
from tests.unit.executors.states import step

G = Generation(term=1, step=1)
MOMENTS = ("exp_avg", "exp_avg_sq")
FLIPS = [pytest.param(10, id="10"), pytest.param(200, id="200", marks=pytest.mark.slow)]


class Replica:
    """One rank of data parallelism, and what it would seal."""

    def __init__(self, rank: int, nodes: Sequence[int]) -> None:
        torch.manual_seed(7)
        self.rank = rank
        self.model = torch.nn.Sequential(
            torch.nn.Linear(40, 30), torch.nn.BatchNorm1d(30), torch.nn.Linear(30, 3)
        )
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        step(self.model, self.optimizer)
        held = {id(p): whole_of(p, tuple(range(len(nodes)))) for p in self.model.parameters()}
        self.state = LiveState({"model": self.model}, {"optimizer": self.optimizer}, {}, held)
        place = Place(rank=rank, nodes=tuple(nodes))
        self.shooter = Snapshotter(self.state, counters(), place=place)
        self.arena: Arena = slot_for(self.shooter)
        self.own_values(0)

    def own_values(self, number: int) -> None:
        """What legitimately differs between ranks: statistics of batches, random numbers."""
        torch.manual_seed(1000 * number + self.rank)
        with torch.no_grad():
            self.model[1].running_mean.normal_()  # type: ignore[operator,union-attr]

    def shared(self) -> list[torch.Tensor]:
        """Everything that all ranks hold alike: parameters, and what has their shape."""
        moments = (self.optimizer.state[p][k] for p in self.model.parameters() for k in MOMENTS)
        return [*self.model.parameters(), *moments]

    def seal(self, *, lazy: bool = True) -> m.HeldShard:
        """A snapshot of now, as the coordinator hears of it."""
        done: list[Snapshot] = []
        self.shooter.begin(self.arena, {"step": 1}, lazy=lazy, completed=done.append)
        self.shooter.engine.wait()  # as long as a forward and a backward
        assert self.shooter.fence() == []
        self.shooter.engine.wait()
        (snapshot,) = done
        assert snapshot.error is None
        proofs = tuple(
            m.ReplicaProof(
                members=len(one.members), among=one.among, digest=one.digest(), group=one.group,
                readings=tuple(
                    m.ShareReading(share=share, digests=tuple(found))
                    for share, found in one.readings.items()
                ),
            )
            for one in snapshot.replicas
        )  # fmt: skip
        return m.HeldShard(
            rank=self.rank, slot=0, generation=G, step=1, world_size=1, root="", replicas=proofs
        )


@contextmanager
def job(nodes: Sequence[int]) -> Iterator[list[Replica]]:
    """Ranks whose copy threads end with the block."""
    with ExitStack() as stack:
        ranks = [Replica(rank, nodes) for rank in range(len(nodes))]
        for rank in ranks:
            stack.callback(rank.shooter.close)
        yield ranks


@pytest.fixture(autouse=True)
def _unpaced(monkeypatch: pytest.MonkeyPatch) -> None:
    """These checkpoints follow one another without any training."""
    monkeypatch.setattr(replica_check, "BUSY_SHARE", 1e9)


def flip(tensor: torch.Tensor, draw: random.Random) -> None:
    """One bit of one element becomes another."""
    data = tensor.detach().view(-1)
    place, bit = draw.randrange(data.numel()), draw.randrange(32)
    data.view(torch.int32)[place] ^= 1 << bit if bit < 31 else -(2**31)


@pytest.mark.parametrize("flips", FLIPS)
@pytest.mark.parametrize("count", [2, 4])
def test_each_flipped_element_is_found_and_with_four_ranks_the_rank_is_named(
    count: int, flips: int
) -> None:
    """Within one checkpoint less than there are ranks, wherever the element is."""
    nodes, draw = (0,) * count, random.Random(count)
    with job(nodes) as ranks:
        comparison = ReplicaComparison()
        for turn in range(count):
            assert comparison.compare(1, nodes, [rank.seal() for rank in ranks]) is None, turn
        for number in range(flips):
            guilty = draw.choice(ranks)
            flipped = draw.choice(guilty.shared())
            before = flipped.detach().clone()
            flip(flipped, draw)
            verdict = None
            for checkpoint in range(1, count):
                for rank in ranks:
                    rank.own_values(number * count + checkpoint)
                verdict = comparison.compare(1, nodes, [rank.seal() for rank in ranks])
                if verdict is not None:
                    break
            assert isinstance(verdict, m.Dispute), (number, verdict)
            assert verdict.named == (count > 2)
            assert verdict.ranks == ((guilty.rank,) if count > 2 else (0, 1))
            flipped.detach().copy_(before)
            for _ in range(1, count):  # it is read again, and agrees
                verdict = comparison.compare(1, nodes, [rank.seal() for rank in ranks])
            assert verdict is None
            assert comparison.compare(1, nodes, [rank.seal() for rank in ranks]) is None


def test_what_differs_between_ranks_by_right_is_no_dispute() -> None:
    """Statistics of batch norm and random numbers, over many checkpoints, copied either way."""
    with job((0, 0, 0)) as ranks:
        comparison = ReplicaComparison()
        for number in range(12):
            for rank in ranks:
                rank.own_values(number)
                torch.manual_seed(number)
                step(rank.model, rank.optimizer)
            seals = [rank.seal(lazy=number % 2 == 0) for rank in ranks]
            assert comparison.compare(1, (0, 0, 0), seals) is None


def test_ranks_of_different_nodes_are_compared_without_reading_anything_more() -> None:
    """Each stores all of it; three of them name the odd one at once."""
    nodes, draw = (0, 1, 2), random.Random(1)
    with job(nodes) as ranks:
        comparison = ReplicaComparison()
        seals = [rank.seal() for rank in ranks]
        assert [len(proof.readings) for seal in seals for proof in seal.replicas] == [1, 1, 1]
        assert comparison.compare(1, nodes, seals) is None
        flip(ranks[2].shared()[0], draw)
        verdict = comparison.compare(1, nodes, [rank.seal() for rank in ranks])
        assert isinstance(verdict, m.Dispute)
        assert (verdict.ranks, verdict.nodes, verdict.named) == ((2,), (2,), True)


def test_ranks_that_were_never_equal_are_no_replicas() -> None:
    """They share nothing from then on: it says who, and is no dispute."""
    with job((0, 0)) as ranks:
        flip(ranks[1].shared()[0], random.Random(3))
        verdict = ReplicaComparison().compare(1, (0, 0), [rank.seal() for rank in ranks])
        assert verdict == "rank 0 holds other values than ranks [1]"


def test_ranks_that_drift_apart_as_a_whole_are_no_replicas() -> None:
    """Local SGD behind a warm-up with data parallelism."""
    with job((0, 0)) as ranks:
        comparison = ReplicaComparison()
        assert comparison.compare(1, (0, 0), [rank.seal() for rank in ranks]) is None
        step(ranks[1].model, ranks[1].optimizer)
        assert isinstance(comparison.compare(1, (0, 0), [rank.seal() for rank in ranks]), str)


def test_what_is_disputed_stays_so_until_it_is_compared_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A checkpoint at which nothing of others is read in between is suspect like the first."""
    with job((0, 0)) as ranks:
        comparison = ReplicaComparison()
        assert comparison.compare(1, (0, 0), [rank.seal() for rank in ranks]) is None
        flip(ranks[1].shared()[0], random.Random(3))
        first = comparison.compare(1, (0, 0), [rank.seal() for rank in ranks])
        assert isinstance(first, m.Dispute)
        with monkeypatch.context() as patched:
            patched.setattr(replica_check, "digest_of_live", lambda *_: "")
            assert comparison.compare(1, (0, 0), [rank.seal() for rank in ranks]) == first
        ranks[1].shared()[0].detach().copy_(ranks[0].shared()[0].detach())
        assert comparison.compare(1, (0, 0), [rank.seal() for rank in ranks]) is None


def test_a_new_term_begins_without_what_was_equal_before() -> None:
    """Its ranks may have been put together otherwise."""
    with job((0, 0)) as ranks:
        comparison = ReplicaComparison()
        assert comparison.compare(1, (0, 0), [rank.seal() for rank in ranks]) is None
        flip(ranks[1].shared()[0], random.Random(3))
        assert isinstance(comparison.compare(2, (0, 0), [rank.seal() for rank in ranks]), str)


@pytest.mark.parametrize("count", range(2, 9))
def test_every_share_of_others_is_read_within_one_checkpoint_less_than_ranks(count: int) -> None:
    """By two others at each where there are so many, so that three say what it is."""
    seen: dict[int, set[int]] = {rank: set() for rank in range(count)}
    for turn in range(count - 1):
        read = {rank: shares_to_read(rank, count, turn) for rank in range(count)}
        for rank, shares in read.items():
            seen[rank] |= set(shares)
            assert rank not in shares
        times = [share for shares in read.values() for share in shares]
        assert all(times.count(share) == min(2, count - 1) for share in range(count))
    assert all(seen[rank] == set(range(count)) - {rank} for rank in seen)


def test_the_training_does_not_wait_for_a_comparison_that_takes_long(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What is not read by then is not told, and the next checkpoint goes on behind it."""

    def endless(section: object, tensors: object, go_on: Callable[[], bool]) -> str:
        while go_on():
            time.sleep(0.001)
        return ""

    monkeypatch.setattr(replica_check, "digest_of_live", endless)
    with job((0, 0)) as ranks:
        rank = ranks[0]
        done: list[Snapshot] = []
        rank.shooter.begin(rank.arena, {"step": 1}, lazy=True, completed=done.append)
        assert rank.shooter.fence() == []
        rank.shooter.engine.wait()
        (snapshot,) = done
        (agreement,) = snapshot.replicas
        assert all(agreement.readings[0]), "the own share is read from the slot"
        assert not any(agreement.readings[1]), "and nothing is told of the other"
