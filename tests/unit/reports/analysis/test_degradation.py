"""Which tier is degraded: what failed since it was whole last, and nothing that is over."""

from autockpt.reports import model
from autockpt.reports.analysis.degradation import SKIPPED, degraded_tiers, failing_disk
from autockpt.reports.data import RunData
from autockpt.reports.formats import prometheus
from autockpt.values.status import DegradedTier
from autockpt.values.telemetry import (
    CheckpointDurable,
    Degraded,
    Event,
    GenerationReplicated,
    MemoryCommitted,
    PersistFailed,
    RemoteCopied,
    ReplicationLost,
    RunStarted,
    SaveSkipped,
    SnapshotBegan,
    SnapshotDiscarded,
)

STARTED = RunStarted(
    at_s=100.0, rank=0, wall="2026-01-02T03:04:05Z", run_id="r", term=1, world_size=1, pid=1,
    plan_id="p", plan_version=1, state_bytes=1, restart_count=0,
)  # fmt: skip


def began(step: int, at_s: float, tiers: str = "memory+disk") -> SnapshotBegan:
    return SnapshotBegan(
        at_s=at_s, rank=0, generation=f"step {step} (term 1)", step=step, tiers=tiers
    )


def sealed(step: int, at_s: float) -> MemoryCommitted:
    return MemoryCommitted(
        at_s=at_s, rank=-1, generation=f"step {step} (term 1)", step=step, latency_s=0.1
    )


def durable(step: int, at_s: float) -> CheckpointDurable:
    return CheckpointDurable(
        at_s=at_s, rank=-1, generation=f"step {step} (term 1)", step=step, bytes=1, stored_bytes=1,
        latency_s=0.5, write_s=0.1,
    )  # fmt: skip


def failed(step: int, at_s: float, reason: str = "disk full") -> PersistFailed:
    return PersistFailed(
        at_s=at_s, rank=-1, generation=f"step {step} (term 1)", step=step, reason=reason
    )


def discarded(step: int, at_s: float) -> SnapshotDiscarded:
    return SnapshotDiscarded(
        at_s=at_s, rank=0, generation=f"step {step} (term 1)", step=step, reason="torn"
    )


def skipped(step: int, at_s: float, rank: int = 0) -> SaveSkipped:
    return SaveSkipped(at_s=at_s, rank=rank, step=step, reason="slots busy")


def fell_back(what: str, at_s: float, reason: str = "why") -> Degraded:
    return Degraded(at_s=at_s, rank=-1, what=what, reason=reason)


def found(*events: Event) -> dict[str, DegradedTier]:
    return {tier.tier: tier for tier in degraded_tiers([STARTED, *events])}


WHOLE = (began(1, 101.0), sealed(1, 101.1), durable(1, 101.5))


def test_a_run_whose_saves_end_well_is_whole() -> None:
    """What failed is over with the next that did not."""
    assert found(*WHOLE) == {}
    trouble = (discarded(2, 102.0), failed(2, 102.0), fell_back("persist", 102.0))
    assert found(*WHOLE, began(2, 101.9), *trouble, began(3, 103.0), sealed(3, 103.1),
                 durable(3, 103.5)) == {}  # fmt: skip


def test_the_disk_is_degraded_since_its_first_failure_because_of_the_last() -> None:
    """With a wall clock for people, and what is done meanwhile."""
    tiers = found(
        *WHOLE, began(2, 102.0), sealed(2, 102.1), failed(2, 103.0, "Input/output error"),
        began(3, 104.0), sealed(3, 104.1), fell_back("persist", 105.0, "No space left on device"),
    )  # fmt: skip
    assert set(tiers) == {"disk"}
    disk = tiers["disk"]
    assert disk.since == "2026-01-02T03:04:08Z"
    assert disk.because == "No space left on device"
    assert "tried again, into new files" in disk.doing
    assert str(disk).startswith("disk degraded since 2026-01-02T03:04:08Z: No space left")


def test_what_a_newer_checkpoint_overtook_or_was_for_memory_alone_is_no_failure_of_the_disk() -> (
    None
):
    """Its end is said when the newer one is durable already."""
    overtaken = (began(2, 102.0), began(3, 103.0), durable(3, 103.5), failed(2, 103.6))
    assert found(*WHOLE, *overtaken) == {}
    assert found(*WHOLE, began(4, 104.0, "memory"), failed(4, 104.5)) == {}


def test_the_memory_is_degraded_by_what_was_torn_or_refused() -> None:
    """A keeper that was lost, slots that were not given, a snapshot that was discarded."""
    for event in (discarded(2, 102.0), fell_back("memory tier", 102.0), fell_back("keeper", 102.0)):
        assert set(found(*WHOLE, event)) == {"memory"}
        assert found(*WHOLE, event, sealed(3, 103.0)) == {}


def test_saves_in_a_row_that_did_not_begin_degrade_the_memory() -> None:
    """One is no trouble, however many ranks skip it."""
    few = [skipped(step, 102.0 + step) for step in range(SKIPPED - 1)]
    assert found(*WHOLE, *few, *(skipped(0, 102.0, rank) for rank in range(8))) == {}
    tiers = found(*WHOLE, *few, skipped(SKIPPED, 110.0))
    assert tiers["memory"].because == "slots busy"
    assert found(*WHOLE, *few, sealed(9, 109.0), skipped(SKIPPED, 110.0)) == {}


def test_other_nodes_are_degraded_until_copies_are_there_again() -> None:
    """The keepers' last word."""
    lost = ReplicationLost(at_s=102.0, rank=-1, reason="node 1 cannot be reached")
    again = GenerationReplicated(
        at_s=103.0, rank=-1, generation="step 2 (term 1)", step=2, latency_s=0.1
    )
    assert found(*WHOLE, lost)["other nodes"].because == "node 1 cannot be reached"
    assert found(*WHOLE, lost, again) == {}


def test_the_page_cache_is_said_as_long_as_the_run_lasts() -> None:
    """Checkpoints are durable; they are slower than planned."""
    disk = found(fell_back("direct I/O", 100.5, "an alignment of 65536 B"), *WHOLE)["disk"]
    assert "65536" in disk.because
    assert "durable all the same" in disk.doing


def test_what_concerns_no_tier_degrades_none() -> None:
    """A failure log that cannot be written, and a run without a clock."""
    assert found(*WHOLE, fell_back("failure log", 102.0)) == {}
    (tier,) = degraded_tiers([fell_back("persist", 1.0)])
    assert tier.since == ""
    assert str(tier) == f"disk degraded: why; {tier.doing}"


def test_the_report_names_the_tier_the_time_and_the_reason() -> None:
    """In its findings; what is over is told as it was."""
    events: tuple[Event, ...] = (STARTED, *WHOLE, fell_back("persist", 102.0, "disk full"))
    told = {f.id: f for f in model.build(RunData(title="t", events=events)).findings}
    assert told["degraded"].title == "In the end this was degraded: disk"
    assert "since 2026-01-02T03:04:07Z: disk full" in told["degraded"].evidence
    events = (*events, began(3, 103.0), durable(3, 103.5))
    told = {f.id: f for f in model.build(RunData(title="t", events=events)).findings}
    assert told["degraded"].title == "Degraded during the run: persist"


def test_a_failing_disk_is_in_the_head_and_a_gauge() -> None:
    """A report read by somebody who reads no further."""
    for tail, failing in (((), True), ((durable(9, 130.0),), False)):
        events = (STARTED, fell_back("checkpoint", 120.0, "disk full"), *tail)
        built = model.build(RunData(title="run", events=events))
        assert built.disk_failing is failing
        assert ("reached the disk" in built.verdict.headline) is failing
        assert ("disk full" in built.verdict.detail) is failing
        assert f'autockpt_storage_failing{{run="run"}} {float(failing)}' in prometheus.render(built)


def test_a_checkpoint_that_a_lost_rank_ended_is_no_failing_disk() -> None:
    """It says nothing of the disk."""
    assert failing_disk([STARTED, began(5, 110.0), failed(5, 120.0, "rank 0 was lost")]) is None


def test_a_finding_ranks_what_was_degraded() -> None:
    """A resume that may differ comes first; a keeper that was replaced is no next step."""

    def finding(*whats: str) -> tuple[str, str, str]:
        events = (STARTED, *(fell_back(what, 90.0) for what in whats), *WHOLE)
        found = model.build(RunData(title="t", events=events)).findings
        one = next(f for f in found if f.id == "degraded")
        return one.severity, one.title, one.fix

    assert finding("keeper")[:2] == ("low", "Degraded during the run: keeper")
    assert finding("keeper", "planning")[:2] == (
        "medium", "Degraded during the run: keeper, planning",
    )  # fmt: skip
    severity, title, fix = finding("keeper", "replay")
    assert (severity, title) == ("high", "A resume may train otherwise: replay")
    assert fix == "look up replay under Degraded in docs/troubleshooting.md"


def test_copies_that_nobody_makes_any_more_are_not_promised() -> None:
    """The process was given up; a copy that another one finds in the store ends the trouble."""
    killed = fell_back("object store", 101.0, "the copier was killed")
    assert found(killed)["object store"].doing.startswith("the newest checkpoint is tried again")
    given_up = fell_back("copier", 102.0, "the copier died 11 times")
    tier = found(killed, given_up)["object store"]
    assert tier.because == "the copier died 11 times"
    assert tier.doing.startswith("no more copies are made")
    there = RemoteCopied(
        at_s=103.0, rank=-1, generation="step 4 (term 1)", step=4, bytes=0, latency_s=2.0,
        copy_s=0.1,
    )  # fmt: skip
    assert not found(killed, given_up, there)
