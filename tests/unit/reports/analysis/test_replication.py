"""Copies on other nodes as a report shows them: how new, how many, and why not."""

from dataclasses import replace

from autockpt.reports import model
from autockpt.reports.analysis.replication import Protection, facts, protection
from autockpt.reports.analysis.restarts import restarts
from autockpt.reports.data import RunData
from autockpt.reports.formats import prometheus, text
from autockpt.reports.html import html
from autockpt.values.redundancy import NO_REDUNDANCY, Redundancy
from autockpt.values.telemetry import (
    Event,
    FailureObserved,
    FirstIterationEnded,
    GenerationReplicated,
    IterationsTimed,
    MemoryCommitted,
    ReplicaFetched,
    ReplicaSent,
    ReplicationLost,
    Restored,
    RunStarted,
)

TWO = Redundancy(scheme="replicas", copies=2)
MEGABYTE = 10**6


def started(rank: int, at_s: float, **parts: float) -> RunStarted:
    """A rank of two attaches."""
    return RunStarted(
        at_s=at_s, rank=rank, wall="", run_id="r", term=1, world_size=2, pid=1, plan_id="p",
        plan_version=1, state_bytes=1, restart_count=0, **parts,
    )  # fmt: skip


def saved(step: int, at_s: float, *, protected: bool = True) -> list[Event]:
    """A generation in memory, and its copies half a second later."""
    name = f"step {step} (term 1)"
    events: list[Event] = [
        MemoryCommitted(at_s=at_s, rank=-1, generation=name, step=step, latency_s=0.1)
    ]
    events += [copied(name, step, rank, at_s + 0.4) for rank in range(2 if protected else 1)]
    if protected:
        for _ in range(2):  # both keepers say so
            events.append(
                GenerationReplicated(
                    at_s=at_s + 0.4, rank=-1, generation=name, step=step, latency_s=0.5
                )
            )
    return events


def copied(
    name: str, step: int, rank: int, at_s: float, purpose: str = "protect"
) -> ReplicaFetched:
    """A megabyte goes to the other node."""
    return ReplicaFetched(
        at_s=at_s, rank=-1, generation=name, step=step, shard_rank=rank, from_node=rank,
        to_node=1 - rank, bytes=MEGABYTE, copy_s=0.2, purpose=purpose,
    )  # fmt: skip


def block(step: int, at_s: float) -> IterationsTimed:
    """Ten iterations."""
    return IterationsTimed(at_s=at_s, rank=0, step=step, count=10, total_s=1.0, checkpoint_s=0.0,
                    quiet_s=0.1, busy_s=0.0)  # fmt: skip


def of(events: list[Event]) -> Protection:
    """The protection of a run with two copies."""
    found = protection(events, TWO)
    assert found is not None
    return found


RUN = [started(0, 0.0), started(1, 0.0), *saved(10, 1.0), *saved(20, 2.0), block(30, 3.0)]


def test_without_copies_there_is_nothing_to_say() -> None:
    """A run on one node, or a plan that wants none."""
    assert protection([started(0, 0.0), block(10, 1.0)], NO_REDUNDANCY) is None


def test_the_newest_protected_generation_has_an_age_and_its_copies() -> None:
    """Two ranks, a copy each; the state is of 1.9 s, the run ended at 3.0 s."""
    found = of(RUN)
    assert (found.newest_step, found.newest_generation, found.behind) == (20, "step 20 (term 1)", 0)
    assert (found.copies_held, found.copies_wanted) == (2, 2)
    assert found.age_s is not None
    assert abs(found.age_s - 1.1) < 1e-9
    assert found.protected == 2
    assert found.degraded == ""
    assert found.copied_bytes == 4 * MEGABYTE


def sent(window_bytes: int, reason: str = "") -> ReplicaSent:
    """A megabyte left node 0."""
    return ReplicaSent(
        at_s=2.0, rank=-1, from_node=0, bytes=MEGABYTE, window_bytes=window_bytes,
        chunk_bytes=2**18, held_s=0.1, send_s=0.2, reason=reason,
    )  # fmt: skip


def test_the_share_that_left_in_windows_is_shown() -> None:
    """Of all bytes, with the newest reason; nothing where no windows were waited for."""
    assert of(RUN).windowed is None
    whole = of([*RUN, sent(0, "no windows known yet"), sent(MEGABYTE), sent(MEGABYTE)])
    assert dict(facts(whole))["left in windows"] == "66.7 % of 3 MB"
    given_up = of([*RUN, sent(MEGABYTE), sent(0, "the training stands still")])
    assert dict(facts(given_up))["left in windows"] == "50 % of 2 MB; the training stands still"


def test_a_parity_is_one_a_rank_and_comes_from_several_nodes() -> None:
    """However many losses the set survives; the text does not name a node -1."""
    coded = Redundancy(scheme="rs", set_size=4, parity=2)
    found = protection(RUN, coded)
    assert found is not None
    assert found.copies_wanted == 2
    rebuilt = replace(copied("step 20 (term 1)", 20, 1, 2.6, purpose="restore"), from_node=-1)
    built = model.build(RunData(title="t", events=(*RUN, rebuilt), redundancy=coded))
    assert built.timeline is not None
    (mark,) = [mark for mark in built.timeline.marks if mark.kind == "fetched"]
    assert "came from several nodes to node 0" in mark.text


def test_lost_copies_are_degraded_until_the_next_round() -> None:
    """The keepers' reason stands while nothing newer is protected."""
    lost = ReplicationLost(at_s=2.6, rank=-1, reason="node 1 cannot be reached")
    events = [*RUN[:-1], lost, *saved(30, 2.7, protected=False), block(30, 3.0)]
    found = of(events)
    assert found.degraded == "node 1 cannot be reached"
    assert (found.newest_step, found.behind) == (20, 1)
    assert of([*events, *saved(40, 3.5)]).degraded == ""


def test_a_round_that_was_never_complete_counts_what_it_has() -> None:
    """One copy of two, and nothing that survives a node."""
    found = of([started(0, 0.0), *saved(10, 1.0, protected=False), block(10, 2.0)])
    assert (found.newest_step, found.copies_held, found.copies_wanted) == (None, 1, 2)


def test_a_keeper_that_came_later_knows_neither_step_nor_age() -> None:
    """What was restored is protected again by a new keeper: the copies tell the step."""
    again = GenerationReplicated(
        at_s=2.5, rank=-1, generation="step 20 (term 1)", step=-1, latency_s=0.0
    )  # fmt: skip
    found = of([started(0, 0.0), copied("step 20 (term 1)", 20, 1, 2.4), again, block(21, 3.0)])
    assert (found.newest_step, found.age_s, found.latency) == (20, None, None)


def lost_node() -> list[Event]:
    """Node 1 is lost and rank 1 comes back from node 0."""
    back = {
        rank: Restored(
            at_s=9.0, rank=rank, generation="step 20 (term 1)", step=20, source=source,
            bytes=MEGABYTE,
            restore_s=0.3, lost_steps=10, lost_s=1.0, down_s=6.0,
        )
        for rank, source in ((0, "memory"), (1, "peer"))
    }  # fmt: skip
    parts = {"interpreter_s": 0.5, "torch_import_s": 2.0, "process_group_s": 0.1,
             "script_s": 0.4, "wait_s": 1.0, "read_s": 0.1, "apply_s": 0.1}  # fmt: skip
    return [
        *RUN,
        FailureObserved(at_s=3.0, rank=-1, what="trainer", failed_rank=0, pid=1, step=30,
                        detail=""),
        copied("step 20 (term 1)", 20, 1, 8.8, purpose="restore"),
        *(started(rank, 9.0, **parts) for rank in range(2)), *back.values(),
        *(FirstIterationEnded(at_s=9.2, rank=rank, step=21) for rank in range(2)), block(30, 10.0),
    ]  # fmt: skip


def test_the_fetch_is_a_part_of_the_restart_of_the_rank_that_needed_it() -> None:
    """It is taken out of the wait; another rank waited for it, and fetched nothing."""
    (one,) = restarts(lost_node(), 1, 0.0)
    assert one.parts["fetch"] == 0.2
    assert one.parts["wait"] == 0.8
    (other,) = restarts(lost_node(), 0, 0.0)
    assert "fetch" not in other.parts
    assert other.parts["wait"] == 1.0
    for restart in (one, other):
        assert abs(sum(s or 0.0 for s in restart.parts.values()) - restart.total_s) < 1e-9


def test_page_text_and_metrics_show_it() -> None:
    """The job came back from a peer; the same figures everywhere."""
    data = RunData(title="t", events=tuple(lost_node()), redundancy=TWO)
    built = model.build(data)
    assert [restore.source for restore in built.restores] == ["peer"]
    said = text.render(built)
    for words in ("back from peer", "2 copies, mixed", "2 held of 2 wanted", "1 MB between nodes"):
        assert words in said, said
    metrics = prometheus.render(built)
    for line in ('copies_held{run="t"} 2.0', 'copies_wanted{run="t"} 2.0',
                 'peer_bytes_total{run="t",purpose="restore"} 1000000.0',
                 'restores_total{run="t",source="peer"} 1.0',
                 'protected_step{run="t"} 20.0'):  # fmt: skip
        assert line in metrics, metrics
    page = html.render(built)
    assert "Copies on other nodes" in page
    assert "shard of step 20 (term 1) came from node 1 to node 0" in page


def test_missing_copies_are_the_first_finding() -> None:
    """With the keepers' reason; where all is well it is a check that passed."""
    lost = ReplicationLost(at_s=2.6, rank=-1, reason="node 1 cannot be reached")
    good = RunData(title="t", events=tuple(RUN), redundancy=TWO)
    bad = replace(good, events=(*RUN[:-1], lost, block(30, 3.0)))
    passed = {f.id: f.passed for f in model.build(good).findings}
    assert passed["copies"]
    first = model.build(bad).findings[0]
    assert (first.id, first.passed) == ("copies", False)
    assert "node 1 cannot be reached" in first.evidence
