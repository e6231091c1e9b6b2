"""The judgement of bench-bubbles: gaps against the scheduler's, blocks against those around."""

import time
from dataclasses import asdict
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed.pipelining import schedules

from autockpt.executors.throttle.idle_windows import Move, WindowUse
from autockpt.profiles.pipeline import RankWork, replayed
from autockpt.profiles.samples import TraceSample
from autockpt.values.pipeline import one_f_one_b_orders
from benchmarks.bubbles import arguments, shape_rows, variant
from benchmarks.bubbles_network import rows_of
from benchmarks.bubbles_rank import Bare, Pauses, outside_compute

MESSAGE_S = 0.3
"""Latency of a message in the pipeline that `saw` tells of."""


def saw(rank: int, **changed: Any) -> dict[str, Any]:
    """What a rank of two reports: 1F1B of two micro-batches, F = 1 s and B = 2 s."""
    blocks = [[way, [1.1 if way == "blocking" else 1.0, 0.2 + 0.03 * rank], [0.9, 0.2], [1.1, 0.2]]
              for way in ("blocking", "async", "lazy", "windows")]  # fmt: skip
    orders = one_f_one_b_orders(2, 2)
    took = {"F": 1.0, "B": 2.0}
    work = [
        RankWork(chunks_s=tuple(took[a.kind] for a in order), between_s=(0.0,) * 5, step_s=0.5)
        for order in orders
    ]
    traces = replayed(orders, [work] * 4, transfer_s=MESSAGE_S)[rank]
    return {
        "order": [str(action) for action in orders[rank]], "transfer_s": 0.1,
        "hand_overs_s": [0.1, 0.3], "pauses_s": [[[0.0] * 5] * 4] * 2,
        "quiet": [[asdict(trace) for trace in traces]] * 2,
        "iteration_s": traces[-1].iteration_s,
        "blocks": blocks, "shares": [0.95], "reason": "", "proven": True,
        "probe_overhead": 0.001, "mark_us_p50": 3.0, **changed,
    }  # fmt: skip


def test_gaps_costs_and_shares_are_judged() -> None:
    """What the scheduler lays out is what was seen; blocking costs 10 %."""
    rows = {one.figure: one for one in shape_rows("job", [saw(0), saw(1)])}
    assert rows["gaps of a rank off by"].value == pytest.approx(0.0)
    assert rows["waits of a rank off by"].value == pytest.approx(0.0)
    assert rows["long gaps off by"].n == 3
    assert rows["cost, blocking"].value == pytest.approx(0.1)
    assert rows["cost, windows"].met
    assert rows["inside windows"].met
    assert rows["optimizer longer"].value == pytest.approx(0.03)


def test_bare_copies_wait_for_their_gap() -> None:
    """Until the second chunk of this iteration ends, whatever ended before; or for the fence."""
    source, target = torch.arange(6.0), torch.zeros(6)
    pieces = [(target.data_ptr(), source.data_ptr(), source.nbytes)]
    bare = Bare()
    for after, ended in ((0, 0), (2, 2), (2, 1)):
        target.zero_()
        bare.begin(pieces, after)
        for _ in range(ended):
            time.sleep(0.01)
            assert not target.any()
            bare.ended()
        bare.fence()
        assert torch.equal(target, source)
        bare.ended()


def test_a_pace_that_drifts_costs_nothing() -> None:
    """All blocks take 2 % more than the one before, with a checkpoint or without."""
    paces = [(1.02 * pace, pace, 1.04 * pace) for pace in (1.0, 1.04, 1.08)]
    blocks = [["lazy", *[[pace, 0.1] for pace in around]] for around in paces]
    rows = shape_rows("job", [saw(rank, blocks=blocks, shares=[]) for rank in (0, 1)])
    assert next(one for one in rows if one.figure == "cost, lazy").value == pytest.approx(0.0)


def test_what_the_scheduler_does_not_know_shows() -> None:
    """Gaps are 3 s and two messages on either rank: a fifth longer than without messages."""
    ranks = [saw(rank, transfer_s=0.0, hand_overs_s=[0.0]) for rank in range(2)]
    off = {one.figure: one for one in shape_rows("job", ranks)}["gaps of a rank off by"]
    assert off.spread == pytest.approx((2 * MESSAGE_S / 3,) * 2)
    assert off.met is False


def test_waits_are_no_part_of_what_a_host_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """1 s, a send posted in 0.25 s, a wait of 4 s, a receive in 0.25 s, another wait, 0.5 s."""
    now_s = [10.0]

    def passes(seconds: float) -> list[Any]:
        now_s[0] += seconds
        return []

    monkeypatch.setattr(schedules, "_batch_p2p", lambda ops, desc: passes(0.25))
    monkeypatch.setattr(schedules, "_wait_batch_p2p", lambda work: passes(4.0))
    pauses = Pauses(lambda: now_s[0])
    pauses.hear_messages()
    passes(1.0)
    for op in (torch.distributed.isend, torch.distributed.irecv):
        schedules._wait_batch_p2p(schedules._batch_p2p([SimpleNamespace(op=op)]))
    passes(0.5)
    pauses.computes()
    pauses.boundary()
    assert pauses.traces == [(2.0,)]
    assert pauses.hand_overs_s == [1.25]


def test_a_fall_back_is_said_and_a_torn_checkpoint_ends_the_benchmark() -> None:
    """Ranks that copied beside the compute do not count as windows."""
    rows = {one.figure: one for one in shape_rows("job", [saw(0, reason="too small"), saw(1)])}
    assert "1 of 2 ranks copied beside the compute; too small" in rows["inside windows"].note
    fallen = [saw(rank, reason="too small", shares=[]) for rank in (0, 1)]
    rows = {one.figure: one for one in shape_rows("job", fallen)}
    assert "2 of 2 ranks copied beside the compute" in rows["inside windows"].note
    with pytest.raises(SystemExit, match="not equal to the state"):
        shape_rows("job", [saw(0, proven=False), saw(1)])


def test_a_way_that_was_not_asked_for_has_no_row() -> None:
    """Its figures would be of nothing."""
    ranks = [saw(rank, blocks=[["blocking", *[[1.0, 0.2]] * 3]], shares=[]) for rank in (0, 1)]
    figures = {one.figure for one in shape_rows("job", ranks)}
    assert "cost, blocking" in figures
    assert figures.isdisjoint({"cost, windows", "cost, lazy", "inside windows"})


def test_bytes_beside_compute_are_found_by_the_clock() -> None:
    """Half of the second chunk overlaps a chunk of compute, whatever the gate said of it."""
    use = WindowUse(nbytes=20)
    use.moves.append(Move(10.0, 11.0, 10, "window"))
    use.moves.append(Move(11.0, 13.0, 10, "window"))
    trace = TraceSample(marks=("0F0",), spans=((2.0, 5.0),), step_s=6.0, iteration_s=6.0)
    assert outside_compute(use, [trace], [10.0]) == pytest.approx(0.75)


def test_ungated_is_held_against_gated() -> None:
    """10 % against half a percent is 20 times."""
    blocks = [["ungated", 1.1, 1.0], ["gated", 1.005, 1.0]]
    uses = [{"share": 1.0, "reason": ""}, {"share": 0.9, "reason": "the training stands still"}]
    rows = {one.figure: one for one in rows_of({"blocks": blocks, "busy": 0.3}, uses)}
    assert rows["ungated over gated"].value == pytest.approx(20.0)
    assert rows["cost, gated"].met
    assert rows["bytes in windows"].value == pytest.approx(0.95)
    assert rows["bytes in windows"].note == "the training stands still"


def test_a_part_of_the_table_has_a_file_of_its_own() -> None:
    """Else the whole of it, which takes an hour, would be gone."""
    given = {
        "": [],
        "-8-x-2": ["--only", "8 x 2"],
        "-real-unbound": ["--only", ", real", "--unbound"],
        "-control-windows": ["--ways", "control", "windows"],
    }
    assert [variant(arguments(words)) for words in given.values()] == list(given)
