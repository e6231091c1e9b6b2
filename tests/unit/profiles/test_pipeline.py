"""The list scheduler: closed forms, torch's own schedule tables, and what any layout must keep."""

import itertools
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autockpt.profiles.pipeline import (
    ChunkTimes,
    RankWork,
    constant_work,
    replayed,
    steady_iteration,
)
from autockpt.profiles.probes.windows.pipeline_orders import planned_orders
from autockpt.values.errors import ConfigError
from autockpt.values.pipeline import (
    Action,
    Order,
    gpipe_orders,
    one_f_one_b_orders,
    order_digest,
    parse_order,
)

SIZES = [(p, m) for p in (1, 2, 3, 4, 8, 16) for m in (1, 2, 4, 8, 16, 32, 64) if m >= p]
LOOPED = [(p, m) for p in (2, 4, 8, 16) for m in (4, 8, 16, 32, 64) if m >= p and m % p == 0]
V_SHAPED = [(p, m) for p, m in LOOPED if m >= 2 * p]
ORDERS = st.tuples(st.integers(1, 6), st.integers(1, 12)).flatmap(
    lambda pm: st.sampled_from([gpipe_orders(*pm), one_f_one_b_orders(*pm)])
)
SECONDS = st.floats(0.01, 10.0)


def halves(forward_s: float, backward_s: float) -> ChunkTimes:
    """A stage whose backward splits in equal parts."""
    half_s = backward_s / 2
    return ChunkTimes(forward_s=forward_s, backward_s=backward_s, inputs_s=half_s, weights_s=half_s)


class Alone:
    """One iteration by itself, in which chunks of a stage and kind take the same."""

    def __init__(
        self, orders: Sequence[Order], times: Sequence[ChunkTimes], transfer_s: float = 0.0
    ) -> None:
        traces = replayed(orders, [constant_work(orders, times)], transfer_s=transfer_s)
        self.spans = [trace.spans for (trace,) in traces]
        self.makespan_s = max(spans[-1][1] for spans in self.spans)

    def gaps(self, rank: int) -> tuple[tuple[float, float], ...]:
        """Stretches of the makespan in which a rank idles, its ends included."""
        edges = [(0.0, 0.0), *self.spans[rank], (self.makespan_s, self.makespan_s)]
        found = [(a[1], b[0]) for a, b in itertools.pairwise(edges)]
        return tuple((a, b) for a, b in found if b - a > 1e-9 * self.makespan_s)

    @property
    def idle_share(self) -> float:
        """Mean fraction of the makespan in which a rank computes nothing."""
        idle = sum(b - a for rank in range(len(self.spans)) for a, b in self.gaps(rank))
        return idle / (len(self.spans) * self.makespan_s)


def idle_s(orders: tuple[Order, ...], times: list[ChunkTimes]) -> list[float]:
    """Idle time of each rank in one iteration alone."""
    table = Alone(orders, times)
    return [sum(end - begin for begin, end in table.gaps(r)) for r in range(len(orders))]


@pytest.mark.parametrize(("p", "m"), SIZES)
def test_gpipe_and_1f1b_idle_for_p_minus_1_chunks(p: int, m: int) -> None:
    """(p - 1)(F + B) on every rank, a share of (p - 1) / (m + p - 1)."""
    for orders in (gpipe_orders(p, m), one_f_one_b_orders(p, m)):
        times = [halves(1.0, 2.0)] * p
        assert idle_s(orders, times) == pytest.approx([(p - 1) * 3.0] * p)
        assert Alone(orders, times).idle_share == pytest.approx((p - 1) / (m + p - 1))


@pytest.mark.parametrize(("p", "m"), LOOPED)
@pytest.mark.parametrize("name", ["Interleaved1F1B", "LoopedBFS"])
@pytest.mark.parametrize("v", [2, 4])
def test_stages_in_loops_divide_the_idle_time(name: str, v: int, p: int, m: int) -> None:
    """v stages a rank: (p - 1)(F + B) / v, a share of (p - 1) / (v m + p - 1)."""
    orders = planned_orders(name, p, m, stages_per_rank=v)
    times = [halves(1.0 / v, 2.0 / v)] * (p * v)
    assert idle_s(orders, times) == pytest.approx([(p - 1) * 3.0 / v] * p)
    assert Alone(orders, times).idle_share == pytest.approx((p - 1) / (v * m + p - 1))


@pytest.mark.parametrize(("p", "m"), V_SHAPED)
@pytest.mark.parametrize("name", ["InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"])
def test_split_backwards_leave_a_third(name: str, p: int, m: int) -> None:
    """F = I = W: (p - 1)(F + I - W) is left of (p - 1)(F + B), with two stages a rank."""
    orders = planned_orders(name, p, m)
    times = [halves(0.5, 1.0)] * (2 * p)
    assert idle_s(orders, times) == pytest.approx([(p - 1) * 0.5] * p)


@pytest.mark.parametrize("p", [2, 4, 8])
def test_zbv_has_no_gap_when_it_repeats(p: int) -> None:
    """Its gaps are at the ends of an iteration, where the neighbours' chunks fit in."""
    orders = planned_orders("ZBVZeroBubble", p, 4 * p)
    assert steady_iteration(orders, [halves(0.5, 1.0)] * (2 * p)).gaps == ((),) * p


def test_the_gaps_of_one_pipeline_are_those_on_paper() -> None:
    """p = 4, m = 8, F = 1, B = 2: the figure of every paper on 1F1B."""
    table = Alone(one_f_one_b_orders(4, 8), [halves(1.0, 2.0)] * 4)
    assert table.makespan_s == 33.0
    assert table.gaps(0) == ((4, 10), (24, 25), (27, 28), (30, 31))
    assert table.gaps(3) == ((0, 3), (27, 33))
    lengths = [[end - begin for begin, end in table.gaps(r)] for r in range(4)]
    assert [max(each) for each in lengths] == [6, 4, 4, 6]
    gpipe = Alone(gpipe_orders(4, 8), [halves(1.0, 2.0)] * 4)
    assert [len(gpipe.gaps(r)) for r in range(4)] == [1, 3, 3, 2]


def test_the_last_rank_of_a_repeating_1f1b_idles_before_its_first_forward() -> None:
    """The end of one iteration and the beginning of the next are one gap, not two."""
    gaps = steady_iteration(one_f_one_b_orders(4, 8), [halves(1.0, 2.0)] * 4, step_s=0.5).gaps
    assert [(g.after, g.length_s) for g in gaps[3]] == [(0, pytest.approx(9.0))]
    assert sum(g.length_s for g in gaps[0]) == pytest.approx(9.0)
    assert gaps[0][0].after == 4


def work(chunks_s: tuple[float, ...], *, between_s: float = 0.0, step_s: float = 0.0) -> RankWork:
    """An iteration of a rank; its host needs the same between any two chunks."""
    pauses = (between_s,) * (len(chunks_s) + 1)
    return RankWork(chunks_s=chunks_s, between_s=pauses, step_s=step_s)


def test_what_a_host_needs_between_chunks_is_hidden_by_longer_waits() -> None:
    """A rank that waits is ready when its input is; one that does not goes on that much later."""
    times = (1.0, 1.0, 2.0, 2.0)
    ranks = [work(times, between_s=0.25), work(times, between_s=0.5)]
    laid = replayed(gpipe_orders(2, 2), [ranks])
    assert [b for b, _ in laid[0][0].spans] == [0.25, 1.5, 6.25, 8.75]
    assert [b for b, _ in laid[1][0].spans] == [1.25, 2.75, 4.25, 6.75]
    assert [trace[0].step_s for trace in laid] == [11.0, 9.25]


def test_each_iteration_has_its_own_times() -> None:
    """A slow forward delays the other rank in its iteration only; steps differ by rank."""
    usual, slow = (1.0, 2.0), (4.0, 2.0)
    iterations = [
        [work(first, step_s=0.5), work(usual, step_s=1.5)] for first in (usual, slow, usual)
    ]
    ahead, behind = replayed(one_f_one_b_orders(2, 1), iterations, transfer_s=0.25)
    assert [trace.iteration_s for trace in ahead] == [7.0, 10.0, 7.0]
    assert [trace.marks for trace in behind] == [("1F0", "1B0")] * 3
    assert [trace.spans[0][0] for trace in behind] == [1.25, 5.5, 2.5]
    assert behind[2].iteration_s == 7.0


@pytest.mark.parametrize("name", ["GPipe", "Interleaved1F1B", "LoopedBFS", "DualPipeV"])
def test_torch_runs_every_chunk_once(name: str) -> None:
    """What was read from torch's table is a whole iteration of every stage."""
    orders = planned_orders(name, 4, 8)
    stages = 4 if name == "GPipe" else 8
    actions = [a for order in orders for a in order]
    assert len(set(actions)) == len(actions)
    for kinds in ("F", "BI"):
        ran = {(a.stage, a.microbatch) for a in actions if a.kind in kinds}
        assert ran == {(s, i) for s in range(stages) for i in range(8)}


@settings(max_examples=60, deadline=None)
@given(orders=ORDERS, data=st.data(), transfer_s=st.floats(0.0, 3.0))
def test_a_layout_keeps_every_dependency(
    orders: tuple[Order, ...], data: st.DataObject, transfer_s: float
) -> None:
    """Nobody computes two chunks at once, or a chunk before its input is there."""
    times = [halves(data.draw(SECONDS), data.draw(SECONDS)) for _ in orders]
    table = Alone(orders, times, transfer_s=transfer_s)
    began, ended = {}, {}
    for order, spans in zip(orders, table.spans, strict=True):
        assert all(a[1] <= b[0] + 1e-9 for a, b in itertools.pairwise(spans))
        for action, (begin, end) in zip(order, spans, strict=True):
            began[action], ended[action] = begin, end
            assert end - begin == pytest.approx(times[action.stage].of(action))
    for action, begin in began.items():
        ahead = Action(
            action.stage + (-1 if action.kind == "F" else 1), action.kind, action.microbatch
        )
        if ahead in ended:
            assert begin >= ended[ahead] + transfer_s - 1e-9
        elif action.kind == "B":
            assert begin >= ended[Action(action.stage, "F", action.microbatch)] - 1e-9


@settings(max_examples=40, deadline=None)
@given(orders=ORDERS, slow=st.integers(0, 5), factor=st.floats(1.0, 4.0))
def test_a_slow_stage_never_shortens_an_iteration(
    orders: tuple[Order, ...], slow: int, factor: float
) -> None:
    """A straggler makes the others idle."""
    times = [halves(1.0, 2.0)] * len(orders)
    slower = list(times)
    slower[slow % len(orders)] = halves(factor, 2.0 * factor)
    assert Alone(orders, slower).makespan_s >= Alone(orders, times).makespan_s - 1e-9


def test_orders_that_wait_for_each_other_are_named() -> None:
    """torch's own table of 1F1B gives the last rank no micro-batch 0."""
    orders = one_f_one_b_orders(2, 2)
    shifted = tuple(Action(a.stage, a.kind, a.microbatch + 1) for a in orders[1])
    with pytest.raises(ConfigError, match="rank 0 at 0B0"):
        Alone((orders[0], shifted), [halves(1.0, 2.0)] * 2)


def test_stages_without_times_are_refused() -> None:
    """Every stage in an order needs its chunk times."""
    with pytest.raises(ConfigError, match="2 stages with times"):
        Alone(gpipe_orders(3, 4), [halves(1.0, 2.0)] * 2)


def test_unknown_schedules_and_actions_say_so() -> None:
    """A torch that names things otherwise is not guessed at."""
    with pytest.raises(ConfigError, match="'Nonsense': unknown; torch knows 1F1B"):
        planned_orders("Nonsense", 2, 4)
    with pytest.raises(ConfigError, match="unknown action '0Q1'"):
        parse_order(["0F1", "0Q1"])
    assert parse_order(["0F1", "0SEND_F1", "(1F0;2B3)OVERLAP_F_B", "0REDUCE_GRAD"]) == (
        Action(0, "F", 1), Action(1, "F", 0), Action(2, "B", 3),
    )  # fmt: skip


def test_another_order_has_another_fingerprint() -> None:
    """A profile of windows belongs to one order."""
    digests = {order_digest(o) for o in (*gpipe_orders(2, 4), *one_f_one_b_orders(2, 4))}
    assert len(digests) == 4
