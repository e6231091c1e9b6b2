"""The judgement of bench-bubbles: gaps against the scheduler's, blocks against those without."""

from typing import Any

import pytest

from autockpt.executors.window_gate import Move, WindowUse
from autockpt.profiles.samples import LapSample
from benchmarks.bubbles import shape_rows
from benchmarks.bubbles_network import rows_of
from benchmarks.bubbles_rank import outside_compute


def saw(**changed: Any) -> dict[str, Any]:
    """What a rank of two reports."""
    blocks = [[way, 1.1 if way == "blocking" else 1.0, 1.0]
              for way in ("blocking", "async", "lazy", "windows")]  # fmt: skip
    return {
        "gaps": {"0": [0.11, 0.1], "3": [0.3, 0.3]}, "lap_s": 1.0, "blocks": blocks,
        "shares": [0.95], "reason": "", "proven": True, "probe_overhead": 0.001, "mark_us_p50": 3.0,
        **changed,
    }  # fmt: skip


def test_gaps_costs_and_shares_are_judged() -> None:
    """2.5 % off in all, 10 % for a long one; blocking costs 10 %."""
    rows = {one.figure: one for one in shape_rows("job", [saw(), saw()])}
    assert rows["gaps of a rank off by"].value == pytest.approx(0.025)
    assert rows["cost, blocking"].value == pytest.approx(0.1)
    assert rows["cost, windows"].met
    assert rows["inside windows"].met


def test_a_fall_back_is_said_and_a_torn_checkpoint_ends_the_benchmark() -> None:
    """Ranks that copied beside the compute do not count as windows."""
    rows = {one.figure: one for one in shape_rows("job", [saw(reason="too small"), saw()])}
    assert "1 of 2 ranks copied beside the compute; too small" in rows["inside windows"].note
    with pytest.raises(SystemExit, match="not equal to the state"):
        shape_rows("job", [saw(proven=False)])


def test_bytes_beside_compute_are_found_by_the_clock() -> None:
    """Half of the second chunk overlaps a chunk of compute, whatever the gate said of it."""
    use = WindowUse(nbytes=20)
    use.moves.append(Move(10.0, 11.0, 10, "window"))
    use.moves.append(Move(11.0, 13.0, 10, "window"))
    lap = LapSample(marks=("0F0",), spans=((2.0, 5.0),), step_s=6.0, lap_s=6.0)
    assert outside_compute(use, [lap], [10.0]) == pytest.approx(0.75)


def test_ungated_is_held_against_gated() -> None:
    """10 % against half a percent is 20 times."""
    blocks = [["ungated", 1.1, 1.0], ["gated", 1.005, 1.0]]
    uses = [{"share": 1.0, "reason": ""}, {"share": 0.9, "reason": "the training stands still"}]
    rows = {one.figure: one for one in rows_of({"blocks": blocks, "busy": 0.3}, uses)}
    assert rows["ungated over gated"].value == pytest.approx(20.0)
    assert rows["cost, gated"].met
    assert rows["bytes in windows"].value == pytest.approx(0.95)
    assert rows["bytes in windows"].note == "the training stands still"
