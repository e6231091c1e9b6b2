"""Copies of a real run leave while the network of its training idles: two nodes, shaped lines."""

from pathlib import Path

import pytest

from autockpt.reports.analysis.replication import facts, protection
from autockpt.values.redundancy import Redundancy
from autockpt.values.telemetry import GenerationReplicated, ReplicaFetched, ReplicaSent
from tests.jobs.nodes.conftest import launched

BITS_PER_S = 400_000_000
SETTINGS = ("redundancy.scheme=replicas", "redundancy.copies=2", "redundancy.schedule=windows",
            "memory.interval=20 steps", "disk.interval=2000 steps", "retune=false")  # fmt: skip
SCRIPT = ("tests/jobs/nodes/paced.py", "--steps", "100000",
          "--layers", "6", "--wait-ms", "20", "--kib", "512")  # fmt: skip
ROUNDS = 4


@pytest.mark.root
@pytest.mark.slow
@pytest.mark.timeout(170)
def test_copies_leave_in_the_windows_between_collectives(tmp_path: Path) -> None:
    """Once windows and the line's rate are known, nearly all bytes; the report says how many."""
    with launched(2, BITS_PER_S, tmp_path, settings=SETTINGS, script=SCRIPT) as job:
        job.wait_for(
            "copies in windows",
            lambda: True if len(job.events(ReplicaSent)) >= 2 * ROUNDS else None, 140.0,
        )  # fmt: skip
        events = job.files.events()
    sent = [e for e in events if isinstance(e, ReplicaSent)]
    for node in range(2):
        own = [e for e in sent if e.from_node == node]
        assert all(e.bytes > 12e6 for e in own)
        # The first one is sent to find the rate of the line.
        later = own[1:]
        assert [e.reason for e in later] == [""] * len(later)
        share = sum(e.window_bytes for e in later) / sum(e.bytes for e in later)
        print(f"node {node}: {share:.3f} of the bytes of {len(later)} copies left in windows")
        assert share > 0.7
    assert any(isinstance(e, GenerationReplicated) for e in events)
    assert any(isinstance(e, ReplicaFetched) for e in events)
    found = protection(events, Redundancy(scheme="replicas", copies=2, schedule="windows"))
    assert found is not None
    assert "left in windows" in dict(facts(found))
