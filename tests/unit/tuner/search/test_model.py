"""The cost model of the search is that of `decide`, for any way to write."""

import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autockpt.policies.decide import decide
from autockpt.tuner.search.model import predicted_write
from autockpt.tuner.search.space import MIB
from autockpt.values.goal import Goal, Limits
from tests.unit.tuner.search.machines import changed, job, model

FINDS = settings(max_examples=30, deadline=None)


@pytest.mark.parametrize(
    "pins",
    [{}, {"codec": "zstd"}, {"persist": "sync"}, {"streaming": False}, {"memory_enabled": False},
     {"writers": 4, "direct_io": False}, {"slots": 2}],
)  # fmt: skip
def test_the_default_loses_what_decide_promises(pins: dict[str, object]) -> None:
    """One formula: at ratio 1 the rating is the decision's own waste and slots."""
    found = model(None, **pins)
    decision = decide(found.space.profile, found.space.goal)
    rating = found.rate(found.space.default, 1.0)
    assert rating.waste == pytest.approx(decision.expected.waste, rel=1e-9)
    assert rating.slots == decision.plan.slots
    assert found.predicted_ratio(found.space.default) == pytest.approx(1.0)


@FINDS
@given(ratio=st.floats(0.2, 5.0), factor=st.floats(1.05, 3.0), extra=st.floats(0.0, 2.0))
def test_slower_writes_and_more_cpu_never_lose_less(
    ratio: float, factor: float, extra: float
) -> None:
    """Up to the tie in favour of longer intervals, a thousandth of what is tunable."""
    found = model()
    way = found.space.default
    base = found.rate(way, ratio)
    assert found.rate(way, ratio * factor).waste >= base.waste * (1 - 1e-3)
    assert found.rate(way, ratio * factor).durable_s >= base.durable_s
    assert found.rate(way, ratio, extra_cpu=extra).waste >= base.waste * (1 - 1e-3)


def test_less_cpu_than_the_default_is_no_credit() -> None:
    """What the training loses beside the default was measured, and holds its CPU time."""
    found = model()
    way = found.space.default
    assert found.rate(way, 0.9, extra_cpu=-1.0) == found.rate(way, 0.9)


def test_a_blocking_save_takes_no_cpu_from_anybody() -> None:
    """Training waits anyway, and only for as long as the write takes."""
    found = model(None, persist="sync")
    way = found.space.default
    assert found.rate(way, 0.9, extra_cpu=2.0) == found.rate(way, 0.9)


def test_a_write_is_never_durable_before_its_copy() -> None:
    """The snapshot has to be in host memory first."""
    found = model()
    assert found.rate(found.space.default, 1e-6).durable_s == found.space.profile.snapshot_s.mean  # type: ignore[union-attr]


def test_limits_that_a_slow_write_breaks_are_named() -> None:
    """It is rated as endless waste, with the limit's own sentence."""
    goal = Goal(limits=Limits(lost_time_s=60.0))
    found = model()
    tight = replace(found, space=replace(found.space, goal=goal))
    assert math.isfinite(tight.rate(found.space.default, 1.0).waste)
    slow = tight.rate(found.space.default, 200.0)
    assert math.isinf(slow.waste)
    assert "limits.lost_time" in slow.obstacle


@FINDS
@given(
    writers=st.sampled_from([1, 2, 4, 8, 16]),
    chunk=st.sampled_from([1, 2, 4, 8, 16, 32, 64]),
    direct=st.booleans(),
)
def test_predictions_lie_within_the_grid(writers: int, chunk: int, direct: bool) -> None:
    """A measured cell predicts itself, everything else a mean."""
    profile = job()
    way = changed(model().space.default, writers=writers, chunk_bytes=chunk * MIB, direct_io=direct)
    rates = [m.bytes_per_s.mean for m in profile.storage if m.operation == "write"]
    found = predicted_write(profile, way)
    assert min(rates) * 0.999 <= found.bytes_per_s.mean <= max(rates) * 1.001
    own = [
        m for m in profile.storage
        if (m.operation, m.writers, m.chunk_bytes, m.direct)
        == ("write", writers, chunk * MIB, direct)
    ]  # fmt: skip
    assert not own or found is own[0]


def test_without_a_grid_all_ways_are_as_fast() -> None:
    """Nothing is known, nothing is preferred."""
    found = model(job(storage=()), codec="none")
    assert {round(found.predicted_ratio(way), 9) for way in found.space.allowed()} == {1.0}


def test_fewer_images_are_enough_where_they_lose_nothing() -> None:
    """But the default's number stays where it makes no difference."""
    found = model()
    assert found.rate(found.space.default, 1.0).slots == 3
