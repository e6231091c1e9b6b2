"""Iterations of a compiled model: counted with attach alone, and never the end of the training."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from autockpt.session.traffic import TrafficMarks
from tests.jobs.session.test_traffic import WINDOWS, Rank, plan
from tests.support import trainings

STEPS = 4


class Compiled(torch.nn.Sequential):
    """torch 2.11 makes no graph of a module whose forward is torch's own."""

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        """One after the other."""
        for module in self:
            given = module(given)
        return given


def train(
    attach: Callable[..., Any], run_dir: str, order: str, *, fullgraph: bool, owned: bool = False,
    left: int | None = None,
) -> tuple[Any, int]:  # fmt: skip
    """The session behind some iterations, and how many graphs there were of a call; `left`: in
    which step the loop is left behind the forward."""
    torch._dynamo.reset()
    graphs = 0

    def backend(graph: Any, _: Any) -> Any:
        nonlocal graphs
        graphs += 1
        return graph.forward

    model: Any = Compiled(torch.nn.Linear(2, 2), torch.nn.ReLU())
    called = model
    if order == "compile, attach":
        model.compile(backend=backend, fullgraph=fullgraph)
    if order == "torch.compile, attach":
        called = model = torch.compile(model, backend=backend, fullgraph=fullgraph)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    trainings.prepare(run_dir, trainings.plan(memory=2, disk=2))
    ckpt = attach(model=model, optimizer=optimizer, run_dir=run_dir)
    if order == "attach, compile":
        model.compile(backend=backend, fullgraph=fullgraph)
    if order == "attach, torch.compile":
        called = torch.compile(model, backend=backend, fullgraph=fullgraph)
    for step in ckpt.steps(STEPS) if owned else range(STEPS):
        loss = called(torch.ones(2, 2)).sum()
        if step == left:
            break
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return ckpt, graphs


ORDERS = ["compile, attach", "attach, compile", "torch.compile, attach"]


@pytest.mark.parametrize("fullgraph", [False, True], ids=["broken", "whole"])
@pytest.mark.parametrize("order", ORDERS)
def test_iterations_of_a_compiled_model_are_counted(
    attach: Callable[..., Any], new_run: Callable[..., str], order: str, fullgraph: bool
) -> None:
    """From outside its graph, which stays one."""
    ckpt, graphs = train(attach, new_run(), order, fullgraph=fullgraph)
    assert ckpt.step_count == STEPS - 1  # the last one ends with the next forward
    assert graphs == 1
    ckpt.close()
    assert ckpt.step_count == STEPS


def test_a_graph_that_others_call_is_broken_where_it_may_be(
    attach: Callable[..., Any], new_run: Callable[..., str]
) -> None:
    """There is no other place to see the forward from."""
    ckpt, _ = train(attach, new_run(), "attach, torch.compile", fullgraph=False)
    assert ckpt.step_count == STEPS - 1


@pytest.mark.parametrize("owned", [False, True], ids=["attach alone", "steps"])
def test_where_calls_cannot_be_seen_that_is_said_if_it_matters(
    attach: Callable[..., Any], new_run: Callable[..., str], capfd: pytest.CaptureFixture[str],
    owned: bool,
) -> None:  # fmt: skip
    """One graph that others call; the training goes on."""
    ckpt, graphs = train(
        attach, new_run(), "attach, torch.compile", fullgraph=True, owned=owned
    )  # fmt: skip
    assert (ckpt.step_count, graphs) == (STEPS if owned else 0, 1)
    assert capfd.readouterr().err.count("iterations, are not seen") == (not owned)


def test_no_graph_is_broken_for_the_end_of_a_loop_of_ours(
    attach: Callable[..., Any], new_run: Callable[..., str], capfd: pytest.CaptureFixture[str]
) -> None:
    """A step that the loop handed out counts as begun, for a forward is not seen."""
    ckpt, graphs = train(
        attach, new_run(), "attach, torch.compile", fullgraph=False, owned=True, left=2
    )
    assert graphs == 1
    ckpt.close()
    assert (
        "left within the iteration after step 2, so no checkpoint has it" in capfd.readouterr().err
    )


def test_traffic_is_marked_around_one_graph() -> None:
    """The hook behind a forward compiles to nothing."""
    torch._dynamo.reset()
    rank = Rank()
    rank.traffic = TrafficMarks(rank.board.view, [rank.model])
    rank.traffic.follow(plan(WINDOWS))
    rank.model.compile(backend="eager", fullgraph=True)
    try:
        assert rank.iterate(rank.model)
    finally:
        rank.traffic.close()
