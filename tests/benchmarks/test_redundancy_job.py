"""Gemini's wasted time and the cost of a checkpoint from what a job says, and what is published."""

import pytest

from autockpt.reports.analysis.restarts import Restart
from autockpt.values.telemetry import GenerationReplicated
from benchmarks.cluster import ClusterError
from benchmarks.harness import Row
from benchmarks.redundancy_job import (
    CYCLE_STEPS,
    PROTECTIONS,
    STORAGE_SHARE,
    WARM_UP,
    Cost,
    Measured,
    Recovery,
    Wasted,
    cost,
    rows,
    wasted,
)


def protected(step: int, at_s: float, latency_s: float = 0.5) -> GenerationReplicated:
    """One keeper's word."""
    return GenerationReplicated(
        at_s=at_s, rank=-1, generation=f"step {step} (term 1)", step=step, latency_s=latency_s
    )


def test_the_slowest_node_and_the_middle_period_count() -> None:
    """Four checkpoints, two keepers; the first one pays for new memory and is left out."""
    said = [
        protected(0, 1.0, 9.0), protected(5, 2.0), protected(5, 2.25, 0.75),
        protected(10, 4.25), protected(15, 6.25),
    ]  # fmt: skip
    found = wasted(said)
    assert found.checkpoint_s == (0.75, 0.5, 0.5)
    assert found.period_s == (2.0, 2.0)
    assert found.without_retrieval_s == 0.5 + 1.0


def test_what_a_later_keeper_says_of_an_old_checkpoint_is_no_sample() -> None:
    """It was not there when the snapshot began."""
    late = GenerationReplicated(
        at_s=5.0, rank=-1, generation="step 9 (term 1)", step=-1, latency_s=0.0
    )
    said = [protected(0, 1.0), protected(5, 2.0), protected(10, 3.0)]
    assert wasted([*said, late]) == wasted(said)


def test_too_few_checkpoints_are_no_measurement() -> None:
    """A period needs two."""
    with pytest.raises(ClusterError, match="1 checkpoints after the first"):
        wasted([protected(0, 1.0), protected(5, 2.0)])


def printed(cycles: int, quiet_ms: float, extra_ms: dict[int, float]) -> list[str]:
    """What the example prints with `--log-every 1`, and other lines; extra time by place."""
    steps = range(WARM_UP + cycles * CYCLE_STEPS)
    said = [
        f"step {step}  loss 5.5432  {quiet_ms + extra_ms.get(step % CYCLE_STEPS, 0.0):.1f} ms"
        for step in steps
    ]
    return ["1m: 1,037,824 parameters, 4 x cpu", *said, "digest: 0123"]


def test_the_iterations_after_a_checkpoint_pay_for_it() -> None:
    """Ten milliseconds in the first iteration, five in the third."""
    found = cost(printed(4, 100.0, {0: 10.0, 2: 5.0}))
    assert found.iteration_s == pytest.approx((0.1,) * 4)
    assert found.checkpoint_s == pytest.approx((0.015,) * 4)


def test_too_few_cycles_are_no_measurement() -> None:
    """Warm-up alone says nothing, and nothing at all neither."""
    for lines in (printed(2, 100.0, {}), []):
        with pytest.raises(ClusterError, match="expected at least 3"):
            cost(lines)


def example(copies: Wasted, parity_s: float = 0.08, total_s: float = 9.0) -> dict[str, Row]:
    """Published rows of an invented measurement, by figure of the last contestant that has it."""
    way = Restart(failed_at_s=0.2, rank=0, total_s=total_s, parts={"launch": 4.0, "script": None})
    costs = {
        name: Cost(iteration_s=(0.1,), checkpoint_s=(parity_s if name == "parity" else 0.02,))
        for name in PROTECTIONS
    }
    storage = Wasted(checkpoint_s=(8.0,), period_s=(12.0,), retrieval_s=(10.0,))
    found = Measured(
        copies=copies, storage=storage, recoveries=[Recovery(noticed_s=0.2, way=way)],
        costs=costs, planned_steps=100,
    )  # fmt: skip
    return {row.figure: row for row in rows(found)}


COPIES = Wasted(checkpoint_s=(0.5,), period_s=(1.0,), retrieval_s=(0.5,))


def test_the_ratio_has_retrieval_and_is_judged() -> None:
    """Storage at Gemini's share of the line, 1.25 of 400 Gbit/s."""
    assert STORAGE_SHARE == 1 / 320
    found = example(COPIES)
    assert found["wasted time, storage over copies"].value == 16.0
    assert found["wasted time, storage over copies"].met
    assert found["the same without retrieval"].value == 14.0
    slow = Wasted(checkpoint_s=(4.0,), period_s=(6.0,), retrieval_s=(5.0,))
    assert example(slow)["wasted time, storage over copies"].met is False


def test_recoveries_are_told_part_by_part() -> None:
    """What nobody told apart has no row."""
    found = example(COPIES)
    assert found["from there to an iteration"].met
    assert found["launcher: rendezvous, new processes"].value == 4.0
    assert "script until attach: imports, model, data" not in found
    assert example(COPIES, total_s=15.1)["from there to an iteration"].met is False


def test_parity_is_judged_at_the_planned_interval() -> None:
    """What it costs more than memory alone: 60 ms of 100 iterations of 100 ms."""
    found = example(COPIES)
    assert found["cost at that interval"].value == pytest.approx(0.006)
    assert found["cost at that interval"].met
    assert example(COPIES, parity_s=0.33)["cost at that interval"].met is False
