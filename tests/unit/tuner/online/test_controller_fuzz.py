"""Whatever a run reports, the controller answers with a legal plan or with nothing."""

from hypothesis import given, settings
from hypothesis import strategies as st

from autockpt.tuner.online.proposals import intervals_of
from autockpt.values.goal import Goal, Limits
from autockpt.values.plan import safe_default_plan
from autockpt.values.telemetry import (
    CheckpointDurable,
    FailureObserved,
    IterationsTimed,
    MemoryCommitted,
    PersistFailed,
    PlanChanged,
    Restored,
    SaveSkipped,
    SnapshotBegan,
    SnapshotDiscarded,
    SnapshotSealed,
)
from tests.unit.tuner.online.test_controller import controller

some_s = st.floats(min_value=0.0, max_value=1e4)
kinds = st.integers(min_value=0, max_value=10)


def event(kind: int, at_s: float, a: float, b: float, step: int):
    """One of all the kinds a rank or its keeper sends."""
    base = {"at_s": at_s, "rank": 0, "step": step}
    name = {"generation": f"gen-{step % 5}"}
    return [
        lambda: IterationsTimed(**base, count=1, total_s=a, checkpoint_s=0.0, quiet_s=a, busy_s=b),
        lambda: SnapshotBegan(**base, **name, tiers="memory+disk" if step % 2 else "memory"),
        lambda: SnapshotSealed(
            **base, **name, bytes=1, boundary_stall_s=a, fence_stall_s=0.0, copy_s=b
        ),
        lambda: CheckpointDurable(**base, **name, bytes=1, stored_bytes=1, latency_s=a, write_s=b),
        lambda: PersistFailed(**base, **name, reason="full"),
        lambda: SnapshotDiscarded(**base, **name, reason="changed"),
        lambda: MemoryCommitted(**base, **name, latency_s=a),
        lambda: FailureObserved(
            **base, what=("trainer", "keeper", "node")[step % 3], failed_rank=0, pid=1, detail=""
        ),
        lambda: Restored(
            **base, **name, source="memory", bytes=1, restore_s=a, lost_steps=0, lost_s=0.0,
            down_s=b,
        ),
        lambda: SaveSkipped(**base, reason="busy"),
        lambda: PlanChanged(
            **base, plan_version=step, memory_interval_steps=5, disk_interval_steps=10, reason="x"
        ),
    ][kind]()  # fmt: skip


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(kinds, some_s, some_s, some_s, st.integers(0, 20)), max_size=80),
    st.sampled_from([None, 0.02]),
    st.sampled_from([None, 100.0]),
)
def test_no_stream_of_events_breaks_it(stream, overhead, lost_time_s):
    """Zeros, repeats, missing ends, time standing still."""
    goal = Goal(limits=Limits(overhead=overhead, lost_time_s=lost_time_s))
    tuned, now_s = controller(safe_default_plan(), goal=goal), 0.0
    for kind, later_s, a, b, step in stream:
        now_s += later_s
        tuned.observe(event(kind, now_s, a, b, step))
        found = tuned.propose(now_s, step)
        if found is not None:
            memory, disk = intervals_of(found.plan)
            assert memory >= 1
            assert disk % memory == 0
            assert found.plan.version == tuned.plan.version + 1
            assert found.reason
