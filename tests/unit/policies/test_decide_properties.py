"""Any profile and any goal: a plan inside every limit, or a refusal that says the way out."""

import math

from hypothesis import given, settings
from hypothesis import strategies as st

from autockpt.policies.decide import decide
from autockpt.values.errors import ConfigError
from autockpt.values.goal import Goal, Limits, Pins
from tests.support.profiles import (
    example_failures,
    example_interference,
    example_profile,
    example_state,
    example_storage,
)

seconds = st.floats(min_value=1e-4, max_value=1e3)
profiles = st.builds(
    lambda mtbf_s, share, nodes, iteration_s, stall_s, persist_s, gigabytes, speed, measured: (
        example_profile(
            failures=example_failures(mtbf_s=mtbf_s, process_share=share, nodes=nodes),
            iteration_s=iteration_s,
            stall_s=stall_s if measured else None,
            snapshot_s=stall_s * 3 if measured else None,
            persist_s=persist_s if measured else None,
            state=example_state(int(gigabytes * 1e9)),
            storage=example_storage(peak_gb_per_s=speed),
            interference=example_interference() if measured else (),
        )
    ),
    st.floats(min_value=30.0, max_value=1e8),
    st.floats(min_value=0.0, max_value=1.0),
    st.integers(min_value=1, max_value=1000),
    st.floats(min_value=1e-3, max_value=100.0),
    seconds,
    seconds,
    st.floats(min_value=1e-6, max_value=20.0),
    st.floats(min_value=0.01, max_value=20.0),
    st.booleans(),
)


def maybe(values):
    return st.none() | values


goals = st.builds(
    lambda objective, stall, memory, overhead, lost, disk, snapshots, on, rule, persist, slots: (
        Goal(
            objective=objective,
            limits=Limits(
                stall_s=stall, host_memory_bytes=memory, overhead=overhead, lost_time_s=lost
            ),
            pins=Pins(
                disk_interval_steps=disk,
                memory_interval_s=snapshots,
                memory_enabled=on,
                interval_rule=rule,
                persist=persist,
                slots=slots,
            ),
        )
    ),
    st.sampled_from(["goodput", "stall", "durability"]),
    maybe(seconds),
    maybe(st.integers(min_value=10**6, max_value=10**11)),
    maybe(st.floats(min_value=1e-4, max_value=0.9)),
    maybe(st.floats(min_value=0.1, max_value=1e5)),
    maybe(st.integers(min_value=1, max_value=10**6)),
    maybe(seconds),
    maybe(st.booleans()),
    maybe(st.sampled_from(["waste", "checkfreq"])),
    maybe(st.sampled_from(["async", "sync"])),
    maybe(st.integers(min_value=1, max_value=5)),
)


def decided(profile, goal):
    """The decision, or None after checking that the refusal helps."""
    try:
        return decide(profile, goal)
    except ConfigError as error:
        refusal = str(error)
    assert "nearest" in refusal
    return None


@settings(max_examples=200, deadline=None)
@given(profiles, goals)
def test_every_decision_keeps_its_limits_or_names_the_way_out(profile, goal):
    """Nested intervals, finite promises, reasons everywhere; never another exception."""
    decision = decided(profile, goal)
    if decision is None:
        return
    memory, disk = (tier.interval_steps for tier in decision.plan.tiers)
    assert disk >= 1
    assert not memory or disk % memory == 0
    limits, expected = goal.limits, decision.expected
    assert limits.overhead is None or expected.checkpoint_waste <= limits.overhead * (1 + 1e-6)
    assert limits.stall_s is None or expected.stall_s <= limits.stall_s
    period_s = decision.choice("disk.interval").numbers["period_s"]
    if limits.lost_time_s is not None:
        assert period_s + expected.persist_s <= limits.lost_time_s * (1 + 1e-6) + 1e-6
    if goal.pins.disk_interval_steps is not None:
        assert disk == goal.pins.disk_interval_steps
    assert math.isfinite(expected.waste)
    assert expected.waste_low <= expected.waste * (1 + 1e-9)
    assert all(choice.reason and choice.chosen for choice in decision.choices)
