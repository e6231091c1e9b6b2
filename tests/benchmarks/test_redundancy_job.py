"""Gemini's wasted time from telemetry, and what is published of it."""

import pytest

from autockpt.values.telemetry import GenerationProtected
from benchmarks.cluster import ClusterError
from benchmarks.redundancy_job import STORAGE_SHARE, Wasted, rows, wasted


def protected(step: int, at_s: float, latency_s: float = 0.5) -> GenerationProtected:
    """One keeper's word."""
    return GenerationProtected(
        at_s=at_s, rank=-1, generation=f"e1s{step}", step=step, latency_s=latency_s
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
    late = GenerationProtected(at_s=5.0, rank=-1, generation="e1s9", step=-1, latency_s=0.0)
    said = [protected(0, 1.0), protected(5, 2.0), protected(10, 3.0)]
    assert wasted([*said, late]) == wasted(said)


def test_too_few_checkpoints_are_no_measurement() -> None:
    """A period needs two."""
    with pytest.raises(ClusterError, match="1 checkpoints after the first"):
        wasted([protected(0, 1.0), protected(5, 2.0)])


def test_the_ratio_leaves_retrieval_out_and_is_judged() -> None:
    """Storage at Gemini's share of the line, 1.25 of 400 Gbit/s."""
    assert STORAGE_SHARE == 1 / 320
    copies = Wasted(checkpoint_s=(0.5,), period_s=(1.0,))
    slow = Wasted(checkpoint_s=(8.0,), period_s=(12.0,))
    published = rows(copies, slow, [0.1], [1.02, 1.04], read_s=30.0)
    (ratio,) = [row for row in published if row.figure == "wasted time, storage over copies"]
    assert ratio.value == 14.0
    assert ratio.met
    (again,) = [
        row for row in rows(copies, copies, [0.1], [1.0], 1.0) if row.figure == ratio.figure
    ]
    assert again.met is False
