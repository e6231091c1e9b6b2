"""The coordinator's work grows with the number of ranks, not with its square.

Counted in interpreter steps, which a busy machine does not change.
"""

import sys
from types import FrameType
from typing import Any

import pytest

from autockpt.executors.network.handshake import Framer
from autockpt.executors.protocol import messages as m
from autockpt.values.errors import ProtocolError
from autockpt.values.generation import Generation
from autockpt.values.redundancy import NO_REDUNDANCY, Redundancy
from benchmarks.coordinator import REMEMBERED, VirtualJob, exponent

COPIES = Redundancy(scheme="replicas", copies=2)
PARITY = Redundancy(scheme="xor", set_size=4, parity=1)


GENERATION = Generation(term=1, step=7)


class Steps:
    """Counts the bytecodes that a coordinator runs."""

    def __init__(self, job: VirtualJob) -> None:
        self.count = 0
        handle = job.coordinator.handle

        def counted(event: Any) -> Any:
            sys.settrace(self._trace)
            try:
                return handle(event)
            finally:
                sys.settrace(None)

        job.coordinator.handle = counted  # type: ignore[method-assign]

    def _trace(self, frame: FrameType, what: str, _: object) -> Any:
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        self.count += what == "opcode"
        return self._trace


def started(ranks: int, redundancy: Redundancy = NO_REDUNDANCY) -> VirtualJob:
    """A job that trains and remembers as many saves as one that lasts."""
    job = VirtualJob(ranks, 2, redundancy)
    job.attach()
    job.checkpoint()
    job.remember(REMEMBERED)
    return job


def checkpoint(job: VirtualJob) -> None:
    """To disk."""
    job.checkpoint()


def restart(job: VirtualJob) -> None:
    """From memory."""
    job.attach()


def restart_on_fewer(job: VirtualJob) -> None:
    """A node is lost with its memory, and its ranks are not replaced."""
    job.lose_last_node()
    job.attach()


def half_for_memory(job: VirtualJob) -> None:
    """Half of the ranks begin a checkpoint for memory alone, half for the disk."""
    job.checkpoint(disk=lambda rank: rank % 2 == 0)


@pytest.mark.parametrize("redundancy", [NO_REDUNDANCY, COPIES, PARITY], ids=lambda r: r.scheme)
def test_work_is_linear_in_the_ranks(redundancy: Redundancy) -> None:
    """Four times as many ranks are at most 4.6 times as much work."""
    points: dict[str, list[tuple[int, float]]] = {}
    for ranks in (24, 96):
        job = started(ranks, redundancy)
        steps = Steps(job)
        for act in (checkpoint, half_for_memory, restart, restart_on_fewer):
            steps.count = 0
            act(job)
            points.setdefault(act.__name__, []).append((ranks, float(steps.count)))
    assert {name: exponent(each) for name, each in points.items() if exponent(each) > 1.1} == {}


def test_an_attach_is_as_short_in_a_large_job() -> None:
    """Nodes are named as runs: 16,384 ranks take no more bytes than 16."""

    def framed(ranks: int) -> int:
        nodes = tuple(rank // 8 for rank in range(ranks))
        attach = m.TrainerAttached(
            rank=0, incarnation=m.Incarnation(launch_id="L", restart_round=0), slots=2,
            world_size=ranks, nodes=nodes,
        )  # fmt: skip
        message = m.RankAttached(attach=attach)
        assert m.message_from_data(m.message_to_data(message)) == message
        return len(Framer().frame(message))

    assert framed(16384) <= framed(16) + 16


@pytest.mark.parametrize("nodes", [(0,), (0, 0, 1), (3, 1, 1, 0), (0, 1, 0, 1), (2, 2, 4, 4, 5)])
def test_any_order_of_nodes_survives_the_wire(nodes: tuple[int, ...]) -> None:
    """Also nodes that are named in no order, or more than once."""
    attach = m.TrainerAttached(
        rank=0, incarnation=m.Incarnation(launch_id="L", restart_round=0), slots=2,
        world_size=len(nodes), nodes=nodes,
    )  # fmt: skip
    message = m.RankAttached(attach=attach)
    assert m.message_from_data(m.message_to_data(message)) == message


@pytest.mark.parametrize(
    "nodes", [None, [0, 0, 1], [[0, 1]], [[0, 1, 0]], [[-1, 1, 1]], [[0, 1, True]]]
)
def test_a_list_of_nodes_that_nobody_writes_is_refused(nodes: object) -> None:
    """It ends the connection."""
    with pytest.raises(ProtocolError, match="no run of nodes"):
        m.message_from_data({"type": "RankAttached", "body": {"attach": {"nodes": nodes}}})


def test_a_list_of_nodes_that_fills_the_memory_is_refused() -> None:
    """A few bytes on the wire may not become a list of any length."""
    with pytest.raises(ProtocolError, match="at most 1048576 are expected"):
        m.message_from_data(
            {"type": "RankAttached", "body": {"attach": {"nodes": [[0, 2**40, 1]]}}}
        )


def test_what_goes_to_many_nodes_is_encoded_once() -> None:
    """The same message is the same bytes, another one is not."""
    framer = Framer()
    one, other = (m.CopyFailed(owner=rank, generation=GENERATION, reason="") for rank in (1, 2))
    assert framer.frame(one) is framer.frame(one)
    assert framer.frame(other) != framer.frame(one)
