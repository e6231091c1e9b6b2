"""What a rank marks of its traffic: collectives from Python, DDP's from forward to step."""

from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from autockpt.executors.keeper.client.traffic_marks import Kind, MarkReader
from autockpt.executors.keeper.slots import BOARD_BYTES
from autockpt.executors.linux.memory import Arena
from autockpt.session.traffic import TrafficMarks
from autockpt.values.plan import CheckpointPlan, TierPlan, safe_default_plan
from autockpt.values.redundancy import Redundancy

WINDOWS = Redundancy(scheme="replicas", copies=2, schedule="windows")


@pytest.fixture(autouse=True)
def alone() -> Iterator[None]:
    """A gloo group of one rank."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def plan(redundancy: Redundancy, *, memory: int = 10) -> CheckpointPlan:
    """A plan with this redundancy."""
    tiers = (
        TierPlan(tier="memory", interval_steps=memory),
        TierPlan(tier="disk", interval_steps=100),
    )
    return replace(safe_default_plan(), tiers=tiers, redundancy=redundancy)


class Rank:
    """A model, its marks, and the keeper's end."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.board = Arena.anonymous(BOARD_BYTES)
        self.model, self.batch = torch.nn.Linear(8, 8), torch.randn(4, 8)
        self.traffic = TrafficMarks(self.board.view, [self.model])
        self.reader = MarkReader(self.board.view)

    def iterate(self, forward: Callable[[torch.Tensor], torch.Tensor]) -> list[Kind]:
        """One iteration; what was marked."""
        self.model.zero_grad()
        forward(self.batch).square().mean().backward()
        self.traffic.step_began()
        self.traffic.boundary()
        return [mark.kind for mark in self.reader.read()]


@pytest.fixture
def rank() -> Iterator[Rank]:
    """Off again at the end, and nothing of torch is changed."""
    before, made = dist.all_reduce, Rank()
    yield made
    made.traffic.close()
    assert dist.all_reduce is before
    assert not made.model._forward_hooks


def test_ddp_s_traffic_lasts_from_forward_to_step_and_changes_no_gradient(rank: Rank) -> None:
    """Not where gradients are only gathered, and the gradients are the same bits."""
    ddp = DistributedDataParallel(rank.model)
    assert rank.iterate(ddp) == []
    expected = rank.model.weight.grad
    assert expected is not None
    expected = expected.clone()
    assert rank.traffic.follow(plan(WINDOWS)) == ""
    assert rank.reader.spread == 5
    assert rank.iterate(ddp) == [Kind.BEGAN, Kind.STEP_BEGAN, Kind.BOUNDARY]
    assert rank.model.weight.grad is not None
    assert torch.equal(rank.model.weight.grad, expected)
    with ddp.no_sync():
        assert rank.iterate(ddp) == [Kind.STEP_BEGAN, Kind.BOUNDARY]
    with torch.no_grad():
        ddp(rank.batch)
    assert rank.reader.read() == []


def test_collectives_of_the_script_are_marked_from_call_to_end(rank: Rank) -> None:
    """Those that are waited for and those that are not; each by its name."""
    rank.traffic.follow(plan(WINDOWS))
    dist.all_reduce(torch.ones(4))
    dist.broadcast(torch.ones(4), 0, async_op=True).wait()
    marks = rank.reader.read()
    assert [m.kind for m in marks] == [Kind.BEGAN, Kind.ENDED] * 2
    assert marks[0].what == marks[1].what != marks[2].what
    assert rank.iterate(rank.model) == [Kind.STEP_BEGAN, Kind.BOUNDARY]  # no DDP, no traffic


@pytest.mark.parametrize(
    "unwanted",
    [
        plan(replace(WINDOWS, schedule="paced")),
        plan(Redundancy(schedule="windows")),
        plan(WINDOWS, memory=0),
    ],
    ids=["paced", "no copies", "no memory tier"],
)
def test_nothing_is_marked_where_the_plan_does_not_want_it(
    rank: Rank, unwanted: CheckpointPlan
) -> None:
    """Nor from when a plan changes: the keeper is told that marks have ended."""
    rank.traffic.follow(unwanted)
    assert (rank.iterate(rank.model), rank.reader.spread) == ([], 0)
    rank.traffic.follow(plan(WINDOWS))
    rank.traffic.follow(unwanted)
    assert (rank.iterate(rank.model), rank.reader.spread) == ([], 0)


def test_of_a_device_nothing_is_marked_and_that_is_said(rank: Rank) -> None:
    """When its collectives end is not known to the host."""
    rank.traffic = TrafficMarks(rank.board.view, [torch.nn.Linear(2, 2, device="meta")])
    assert "leave at the rate" in rank.traffic.follow(plan(WINDOWS))
    assert rank.reader.spread == 0


def test_a_collective_that_fails_fails_as_it_would_without_us(rank: Rank) -> None:
    """The error of the script is the script's."""
    rank.traffic.follow(plan(WINDOWS))
    with pytest.raises(RuntimeError, match="root rank"):
        dist.broadcast(torch.ones(4), group_src=7)
