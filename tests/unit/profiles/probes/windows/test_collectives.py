"""Collectives from call to end: of Python's functions, of asynchronous work, of DDP's buckets."""

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from autockpt.profiles.probes.windows.collectives import CollectiveHooks, CollectiveRecorder
from autockpt.profiles.windows import network_bubbles, trace


@pytest.fixture(autouse=True)
def alone() -> Iterator[None]:
    """A gloo group of one rank."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def recorder() -> CollectiveRecorder:
    """What the hooks tell."""
    return CollectiveRecorder()


@pytest.fixture
def hooks(recorder: CollectiveRecorder) -> Iterator[CollectiveHooks]:
    """Hooks on torch.distributed; off again at the end."""
    before = dist.all_reduce
    made = CollectiveHooks(recorder)
    made.attach()
    yield made
    made.detach()
    assert dist.all_reduce is before


@pytest.mark.usefixtures("hooks")
def test_waited_and_asynchronous_collectives_are_seen(recorder: CollectiveRecorder) -> None:
    """In the order of their calls, each inside its iteration."""
    recorder.boundary()
    dist.all_reduce(torch.ones(4))
    dist.broadcast(torch.ones(4), 0, async_op=True).wait()
    recorder.step_began()
    recorder.boundary()
    (sample,) = recorder.samples
    assert sample.marks == ("all_reduce", "broadcast")
    assert all(0 <= begin <= end <= sample.iteration_s for begin, end in sample.spans)
    assert 0 < sample.probe_s < sample.iteration_s
    assert trace(recorder.samples, rank=0).chunk_s.keys() == {"all_reduce", "broadcast"}


def test_buckets_of_ddp_are_seen_and_their_mean_is_ddps(
    recorder: CollectiveRecorder, hooks: CollectiveHooks
) -> None:
    """The hook changes no gradient."""
    torch.manual_seed(0)
    model, batch = torch.nn.Linear(8, 8), torch.randn(4, 8)
    model(batch).square().mean().backward()
    assert model.weight.grad is not None
    expected = model.weight.grad.clone()
    model.zero_grad()
    wrapped = DistributedDataParallel(model)
    assert hooks.watch_ddp(wrapped)
    assert not hooks.watch_ddp(wrapped)
    recorder.boundary()
    wrapped(batch).square().mean().backward()
    recorder.boundary()
    assert recorder.samples[-1].marks == ("all_reduce",)
    assert torch.equal(model.weight.grad, expected)
    hooks.detach()
    wrapped(batch).square().mean().backward()
    recorder.boundary()
    assert recorder.samples[-1].marks == ()


class Listener:
    """Counts what runs."""

    def __init__(self) -> None:
        self.heard: list[str] = []

    def began(self, what: str) -> None:
        """A collective was called."""
        self.heard.append(f"+{what}")

    def ended(self, what: str) -> None:
        """It ended."""
        self.heard.append(f"-{what}")


def test_a_gate_can_listen(recorder: CollectiveRecorder) -> None:
    """Windows of the network in a run: open between the end of one and the begin of the next."""
    listener = Listener()
    hooks = CollectiveHooks(recorder, listener)
    hooks.attach()
    try:
        dist.all_reduce(torch.ones(4))
    finally:
        hooks.detach()
    assert listener.heard == ["+all_reduce", "-all_reduce"]


def test_iterations_without_collectives_have_no_windows(recorder: CollectiveRecorder) -> None:
    """A job of one rank."""
    for _ in range(3):
        recorder.boundary()
    assert network_bubbles(recorder.samples, rank=0) == ()
