"""The phase timer against modules that take a known time on a clock that only they move."""

import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from autockpt.profiles.probes.iteration import PhaseTimer, unwrap
from autockpt.profiles.samples import PHASES


class ManualTicker:
    """Time passes when the script says so."""

    late = False

    def __init__(self) -> None:
        self.now = 0.0

    def mark(self) -> float:
        return self.now

    def between(self, began: float, ended: float) -> float:
        return ended - began


class LateTicker(ManualTicker):
    """Marks that may not be read before the device has passed them, as CUDA events."""

    late = True

    def __init__(self) -> None:
        super().__init__()
        self.readable = -1.0

    def between(self, began: float, ended: float) -> float:
        assert ended <= self.readable, "read while the device had not passed it"
        return ended - began


class Step(torch.autograd.Function):
    """A forward of 2 and a backward of 3 time units."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, ticker: ManualTicker) -> torch.Tensor:
        ctx.ticker = ticker
        ticker.now += 2
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        ctx.ticker.now += 3
        return gradients[0], None


class Scripted(torch.nn.Module):
    """Calls a child, so that depth matters."""

    def __init__(self, ticker: ManualTicker) -> None:
        super().__init__()
        self.ticker = ticker
        self.child = torch.nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        done: torch.Tensor = Step.apply(self.child(x), self.ticker)  # type: ignore[no-untyped-call]
        return done


class TickingSGD(torch.optim.SGD):
    """A step of 5 time units."""

    ticker: ManualTicker

    def step(self, closure: Any = None) -> Any:
        self.ticker.now += 5
        return super().step(closure)


@pytest.fixture
def ticker() -> ManualTicker:
    return ManualTicker()


@pytest.fixture
def timer(ticker: ManualTicker) -> Iterator[PhaseTimer]:
    made = PhaseTimer(ticker=ticker)
    yield made
    made.close()


def job(ticker: ManualTicker) -> tuple[Scripted, TickingSGD]:
    """A scripted model and its optimizer."""
    model = Scripted(ticker)
    optimizer = TickingSGD(model.parameters(), lr=0.1)
    optimizer.ticker = ticker
    return model, optimizer


def train(model: Scripted, optimizer: TickingSGD, *, micro: int = 1, wait: float = 1.0) -> None:
    """One iteration: `wait`, then forwards and backwards, 4 units of clipping, a step."""
    model.ticker.now += wait
    for _ in range(micro):
        model(torch.ones(2)).sum().backward()
    model.ticker.now += 4
    optimizer.step()
    optimizer.zero_grad()


def phases(timer: PhaseTimer) -> dict[str, float]:
    """Of the newest iteration."""
    return timer.samples[-1][1].phases_s


@pytest.mark.parametrize("settled", [False, True])
def test_each_phase_gets_its_time(timer: PhaseTimer, ticker: ManualTicker, settled: bool) -> None:
    """wait 1, forward 2, backward 3, other 4, optimizer 5: with hooks on the root as without."""
    model, optimizer = job(ticker)
    train(model, optimizer)
    roots = timer.settle_roots() if settled else [model]
    train(model, optimizer)

    assert roots == [model]
    if settled:
        assert phases(timer) == {
            "forward": 2,
            "backward": 3,
            "optimizer": 5,
            "data_wait": 1,
            "other": 4,
        }
        assert timer.samples[-1][1].iteration_s == 15


def test_gradient_accumulation_is_one_iteration(timer: PhaseTimer, ticker: ManualTicker) -> None:
    """Three micro-batches: their forwards and backwards add up, the step counts once."""
    model, optimizer = job(ticker)
    train(model, optimizer)
    timer.settle_roots()
    train(model, optimizer, micro=3)

    assert timer.steps == 2
    assert phases(timer)["forward"] == 6
    assert phases(timer)["backward"] == 9
    assert sum(phases(timer).values()) == timer.samples[-1][1].iteration_s


def test_a_closure_is_not_counted_as_optimizer(timer: PhaseTimer, ticker: ManualTicker) -> None:
    """Forward and backward inside step(closure) keep their names; phases stay exclusive."""
    model, optimizer = job(ticker)

    def closure() -> torch.Tensor:
        loss = model(torch.ones(2)).sum()
        loss.backward()
        return loss

    optimizer.step(closure)
    timer.settle_roots()
    optimizer.step(closure)

    found = phases(timer)
    assert (found["forward"], found["backward"], found["optimizer"]) == (2, 3, 5)


def test_a_step_that_calls_its_base_class_counts_once(
    timer: PhaseTimer, ticker: ManualTicker
) -> None:
    """torch hooks both steps of a subclass; one that raised before does not confuse the count."""

    class Failing(TickingSGD):
        fails = True

        def step(self, closure: Any = None) -> Any:
            if self.fails:
                raise RuntimeError("inf in the gradients")
            return super().step(closure)

    model, _ = job(ticker)
    optimizer = Failing(model.parameters(), lr=0.1)
    optimizer.ticker = ticker
    with pytest.raises(RuntimeError, match="inf"):
        optimizer.step()
    optimizer.fails = False
    for _ in range(3):
        optimizer.step()

    assert timer.steps == 3
    assert phases(timer)["optimizer"] == 5


def test_the_last_optimizer_ends_an_iteration(timer: PhaseTimer, ticker: ManualTicker) -> None:
    """A pair of optimizers that take turns makes one iteration, not two."""
    model, first = job(ticker)
    second = TickingSGD(model.parameters(), lr=0.1)
    second.ticker = ticker
    for _ in range(4):
        first.step()
        second.step()

    assert timer.optimizers == [first, second]
    # The very first step could not know of the second optimizer.
    assert timer.steps == 1 + 4
    assert phases(timer)["optimizer"] == 10


def test_loader_time_is_data_wait(timer: PhaseTimer, ticker: ManualTicker) -> None:
    """With a DataLoader in sight only its time is wait; the rest before the forward is other."""

    class Slow(torch.utils.data.Dataset[torch.Tensor]):
        def __len__(self) -> int:
            return 2

        def __getitem__(self, index: int) -> torch.Tensor:
            ticker.now += 7
            return torch.ones(2)

    model, optimizer = job(ticker)
    train(model, optimizer)
    timer.settle_roots()
    for _ in DataLoader(Slow()):
        train(model, optimizer, wait=1)

    assert phases(timer)["data_wait"] == 7
    assert phases(timer)["other"] == 1 + 4


def test_fence_and_boundary_work_is_in_no_iteration(ticker: ManualTicker) -> None:
    """What autockpt does itself is not the script's time."""
    model, optimizer = job(ticker)

    def work(*_: object) -> None:
        ticker.now += 1000

    timer = PhaseTimer(ticker=ticker, on_fence=work, on_boundary=work)
    try:
        train(model, optimizer)
        timer.settle_roots()
        train(model, optimizer)
    finally:
        timer.close()

    assert timer.samples[-1][1].iteration_s == 15


def test_late_marks_are_read_one_iteration_late() -> None:
    """A GPU's events are read when the device has passed them, and the last ones by flush."""
    ticker = LateTicker()
    model, optimizer = job(ticker)
    timer = PhaseTimer(ticker=ticker)
    try:
        train(model, optimizer)
        timer.settle_roots()
        for _ in range(3):
            ticker.readable = ticker.now
            train(model, optimizer)
        assert len(timer.samples) == 2
        ticker.readable = ticker.now
        timer.flush()
    finally:
        timer.close()

    assert [sample.iteration_s for _, sample in timer.samples] == [15, 15, 15]


def test_only_called_roots_are_found(timer: PhaseTimer, ticker: ManualTicker) -> None:
    """Sub-modules, and calls without gradients, are no roots."""
    model, optimizer = job(ticker)
    teacher = torch.nn.Linear(2, 2)
    with torch.no_grad():
        teacher(torch.ones(2))
    train(model, optimizer)

    assert timer.settle_roots() == [model]


def test_recomputed_blocks_are_no_roots(timer: PhaseTimer, ticker: ManualTicker) -> None:
    """Activation checkpointing calls sub-modules inside backward."""
    from torch.utils.checkpoint import checkpoint

    class Recomputing(Scripted):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(checkpoint(self.child, x, use_reentrant=False))

    model = Recomputing(ticker)
    model(torch.ones(2, requires_grad=True)).sum().backward()

    assert timer.settle_roots() == [model]


def test_a_forward_that_raises_leaves_the_timer_in_order(
    timer: PhaseTimer, ticker: ManualTicker
) -> None:
    """The next iteration is timed as if nothing had happened."""
    model, optimizer = job(ticker)
    train(model, optimizer)
    timer.settle_roots()
    with pytest.raises(RuntimeError, match="shape"):
        model(torch.ones(3))
    optimizer.step()
    train(model, optimizer)

    assert phases(timer)["forward"] == 2
    assert sum(phases(timer).values()) == timer.samples[-1][1].iteration_s


def test_close_puts_everything_back(ticker: ManualTicker) -> None:
    """No hook and no wrapper stays behind."""
    before = torch.autograd.backward
    timer = PhaseTimer(ticker=ticker)
    assert torch.autograd.backward is not before
    model, optimizer = job(ticker)
    train(model, optimizer)
    timer.settle_roots()
    timer.close()
    train(model, optimizer)

    assert torch.autograd.backward is before
    assert timer.steps == 1
    assert not model._forward_hooks
    assert not model._forward_pre_hooks


def test_wrappers_are_stripped() -> None:
    """torch.compile's module gives the user's."""
    model = torch.nn.Linear(2, 2)

    assert unwrap(torch.compile(model, backend="eager")) is model
    assert unwrap(model) is model


def test_own_overhead_is_below_800_reads_of_the_clock_per_iteration() -> None:
    """All hooks of an iteration with four micro-batches, without any training.

    Some 50 us on a quiet machine; a machine that other work slows down slows both.
    """
    timer = PhaseTimer()
    try:
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
        timer.finder and timer.finder.close()

        def iteration() -> None:
            for phase in ("data_wait", *("forward", "backward") * 4):
                timer._enter(phase)
                timer._leave(phase)
            timer._step_began(optimizer, (), {})
            timer._step_ended(optimizer, (), {})

        def clock_reads() -> None:
            for _ in range(800):
                time.perf_counter()

        assert min(_best_s(iteration) / _best_s(clock_reads) for _ in range(3)) < 1.0
    finally:
        timer.close()


def _best_s(call: Callable[[], None]) -> float:
    """Seconds of one call, the best of ten blocks: other load only adds."""
    blocks = []
    for _ in range(10):
        began = time.perf_counter()
        for _ in range(200):
            call()
        blocks.append((time.perf_counter() - began) / 200)
    return min(blocks)


def test_samples_know_all_phases(timer: PhaseTimer, ticker: ManualTicker) -> None:
    """A script without any module call still has iterations."""
    _, optimizer = job(ticker)
    for _ in range(2):
        optimizer.step()

    assert set(phases(timer)) == set(PHASES)
    assert phases(timer)["optimizer"] == 5
