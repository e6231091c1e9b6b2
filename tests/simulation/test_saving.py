"""Saves, step by step: slots, seals, votes, commits, drops, breakpoints."""

from dataclasses import replace

import pytest

from autockpt.executors.protocol import messages as m
from autockpt.executors.protocol.coordinator.replicas import ReplicaComparison
from autockpt.executors.protocol.deadlines import Deadlines
from autockpt.executors.protocol.node.machine import NodeProtocol
from autockpt.values.generation import Generation
from autockpt.values.goal import Retention
from tests.simulation.cluster import LAUNCH, Cluster, gen


def running(**more: object) -> Cluster:
    """Two ranks on two nodes that train from scratch in term 1."""
    cluster = Cluster(**more)  # type: ignore[arg-type]
    cluster.start()
    cluster.done = []
    return cluster


def test_memory_is_committed_when_the_last_rank_has_sealed() -> None:
    """One seal is nothing; two are a promise."""
    cluster = running()
    for rank in (0, 1):
        cluster.request(rank, gen(1, 1))
    cluster.seal(0, gen(1, 1))
    assert cluster.take(m.AnnounceMemoryCommitted) == []
    cluster.seal(1, gen(1, 1))
    assert len(cluster.take(m.AnnounceMemoryCommitted)) == 2


def test_a_slot_is_kept_until_all_ranks_hold_something_newer() -> None:
    """Rank 0 holds (1, 1) and (1, 2); while rank 1 has not sealed (1, 2), rank 0 skips (1, 3)."""
    cluster = running()
    cluster.save(gen(1, 1))
    for rank in (0, 1):
        cluster.request(rank, gen(1, 2))
    cluster.seal(0, gen(1, 2))
    cluster.done = []
    cluster.request(0, gen(1, 3))
    (skip,) = cluster.take(m.SkipSave)
    assert skip.reason == "no slot may be overwritten"
    cluster.seal(1, gen(1, 2))
    cluster.request(0, gen(1, 4))
    assert [grant.slot for grant in cluster.take(m.GrantSlot)] == [0]


def test_a_slot_that_is_added_is_granted_and_the_others_keep_what_they_hold() -> None:
    """With one slot a shard that is kept has every save skipped."""
    cluster = running(slots=1)
    cluster.save(gen(1, 1))
    for rank in (0, 1):
        cluster.tell_node(rank, m.SlotsAdded(rank=rank, slots=2))
        cluster.tell_node(rank, m.SlotsAdded(rank=rank, slots=1))  # late: of before
    cluster.done = []
    for rank in (0, 1):
        cluster.request(rank, gen(1, 2))
    assert [grant.slot for grant in cluster.take(m.GrantSlot)] == [1, 1]
    assert cluster.held(0) == cluster.held(1) == ["step 1 (term 1)"]


def test_a_skip_drops_the_generation_everywhere() -> None:
    """Rank 1 skips (1, 2), so what rank 0 writes is pointless and its slot becomes free again."""
    cluster = running(slots=1)
    cluster.request(0, gen(1, 1))
    cluster.request(1, gen(1, 1))
    cluster.seal(1, gen(1, 1))
    cluster.done = []
    cluster.request(1, gen(1, 2))
    cluster.tell_node(0, m.ShardDiscarded(rank=0, generation=gen(1, 1), reason="torn"))
    assert cluster.held(1) == []
    cluster.save(gen(1, 3))
    assert cluster.held(0) == cluster.held(1) == ["step 3 (term 1)"]


def test_a_torn_snapshot_stops_the_writers_of_that_generation() -> None:
    """Rank 0 is torn: rank 1 is told to stop, and its file is given up."""
    cluster = running()
    for rank in (0, 1):
        cluster.request(rank, gen(1, 1), disk=True)
    cluster.done = []
    cluster.tell_node(0, m.ShardDiscarded(rank=0, generation=gen(1, 1), reason="canary"))
    done = cluster.done
    assert [d.rank for d in done if isinstance(d, m.DiscardSnapshot)] == [1]
    assert sorted(d.rank for d in done if isinstance(d, m.AbortPersist)) == [0, 1]
    assert [d.generation for d in done if isinstance(d, m.TrashGeneration)] == [gen(1, 1)]
    cluster.seal(1, gen(1, 1))
    assert cluster.held(1) == []


def test_commit_is_written_with_all_votes_in_rank_order() -> None:
    """Votes arrive in any order; the record lists ranks in theirs."""
    cluster = running()
    for rank in (0, 1):
        cluster.request(rank, gen(1, 1), disk=True)
        cluster.seal(rank, gen(1, 1))
    cluster.persisted(1, gen(1, 1))
    assert cluster.take(m.WriteCommit) == []
    cluster.persisted(0, gen(1, 1))
    (write,) = cluster.take(m.WriteCommit)
    assert [record["root"] for record in write.records] == [
        f"{gen(1, 1)}:0",
        f"{gen(1, 1)}:1",
    ]
    cluster.tell(m.CommitWritten(generation=gen(1, 1)))
    assert len(cluster.take(m.AnnounceDurable)) == 2


def test_a_file_before_the_seal_is_no_vote() -> None:
    """The vote says sealed and persisted."""
    cluster = running()
    for rank in (0, 1):
        cluster.request(rank, gen(1, 1), disk=True)
    cluster.seal(0, gen(1, 1))
    cluster.persisted(0, gen(1, 1))
    cluster.persisted(1, gen(1, 1))
    assert cluster.take(m.WriteCommit) == []
    cluster.seal(1, gen(1, 1))
    assert len(cluster.take(m.WriteCommit)) == 1


@pytest.mark.parametrize("writer", [0, 1])
def test_what_one_rank_writes_all_write(writer: int) -> None:
    """One had not heard that an older one is durable, and begins for memory alone; first or last.

    Without it each wrote a generation of its own, and none became durable until the deadline.
    """
    cluster = running()
    for rank in (0, 1):
        cluster.request(rank, gen(1, 1), disk=rank == writer)
    starts = cluster.take(m.StartPersist)
    assert sorted(start.rank for start in starts) == [0, 1]
    for rank in (0, 1):
        cluster.seal(rank, gen(1, 1))
        cluster.persisted(rank, gen(1, 1))
    assert len(cluster.take(m.WriteCommit)) == 1


def test_a_rank_that_is_asked_to_write_what_it_is_asked_for_begins_once() -> None:
    """Its trainer asks for the disk as well, a moment after the others' word has come."""
    cluster = running()
    for rank, disk in ((0, True), (1, False), (1, True)):
        cluster.request(rank, gen(1, 1), disk=disk)
    assert sorted(start.rank for start in cluster.take(m.StartPersist)) == [0, 1]
    assert cluster.take(m.SkipSave) == []


def test_a_lost_request_to_write_is_repeated() -> None:
    """The message to the other node is lost: it comes again once all ranks hold the generation."""
    cluster = running()
    cluster.request(1, gen(1, 1))
    cluster.cut = {1}
    cluster.request(0, gen(1, 1), disk=True)
    cluster.cut = set()
    for rank in (0, 1):
        cluster.seal(rank, gen(1, 1))
    assert [start.rank for start in cluster.take(m.StartPersist)] == [0]
    cluster.tick(Deadlines().resend_s)
    assert [start.rank for start in cluster.take(m.StartPersist)] == [1]


def unheard() -> Cluster:
    """All ranks hold (1, 1), and node 1 has not heard of it."""
    cluster = running()
    for rank in (0, 1):
        cluster.request(rank, gen(1, 1))
    cluster.seal(1, gen(1, 1))
    cluster.cut = {1}
    cluster.seal(0, gen(1, 1))
    cluster.cut = set()
    assert not cluster.nodes[1].state.settled
    return cluster


def test_a_lost_verdict_on_what_is_overwritten_is_not_waited_for() -> None:
    """Node 1 does not hear that (1, 1) is held by all, and saves over it before it asks again."""
    cluster = unheard()
    for step in (2, 3):
        cluster.save(gen(1, step))
    assert cluster.held(1) == ["step 2 (term 1)", "step 3 (term 1)"]
    assert cluster.nodes[1].state.settled


def test_a_lost_verdict_is_asked_for_again() -> None:
    """As long as the slot holds what it is about."""
    cluster = unheard()
    cluster.tick(Deadlines().resend_s)
    assert cluster.nodes[1].state.settled


def test_a_coordinator_of_ranks_that_another_one_has_admitted_waits_for_nobody() -> None:
    """Their keepers may leave, whatever it was about to decide."""
    cluster = running()
    cluster.request(0, gen(1, 1))
    assert not cluster.coordinator.settled_for(LAUNCH)
    assert cluster.coordinator.settled_for(m.Incarnation(launch_id="launch", restart_round=1))


def test_a_rank_that_holds_it_no_more_gives_it_up_for_all() -> None:
    """What is asked for too late is not waited for: nothing is on its way for nothing."""
    cluster = running()
    for rank in (0, 1):
        cluster.request(rank, gen(1, 1), disk=rank == 0)
        cluster.seal(rank, gen(1, 1))
    cluster.done = []
    cluster.nodes[1].state.ranks[1].slots.sealed(gen(1, 1)).clear()  # type: ignore[union-attr]
    cluster.nodes[1].state.persists.clear()
    cluster.tick(Deadlines().resend_s)
    assert [d.rank for d in cluster.done if isinstance(d, m.AbortPersist)] == [0]
    assert {d.generation for d in cluster.take(m.AnnounceDropped)} == {gen(1, 1)}


def test_a_failed_file_is_tried_again_under_a_new_name_and_then_given_up() -> None:
    """Three attempts, then the generation stays in memory only."""
    cluster = running()
    for rank in (0, 1):
        cluster.request(rank, gen(1, 1), disk=True)
        cluster.seal(rank, gen(1, 1))
    for attempt in (1, 2, 3):
        cluster.done = []
        failed = m.PersistFailed(rank=0, generation=gen(1, 1), attempt=attempt, reason="EIO")
        cluster.tell_node(0, failed)
        expected = [attempt + 1] if attempt < 3 else []
        assert [d.attempt for d in cluster.done if isinstance(d, m.StartPersist)] == expected
    assert cluster.take(m.AnnounceDropped) != []
    assert cluster.held(0) == ["step 1 (term 1)"]


def test_a_slot_under_way_to_storage_is_busy() -> None:
    """(1, 1) is superseded in memory, but its bytes are still being written."""
    cluster = running()
    for rank in (0, 1):
        cluster.request(rank, gen(1, 1), disk=True)
    for rank in (0, 1):
        cluster.seal(rank, gen(1, 1))
    cluster.save(gen(1, 2))
    cluster.done = []
    cluster.request(0, gen(1, 3))
    assert cluster.take(m.GrantSlot) == []


def test_a_late_vote_is_a_no() -> None:
    """At the deadline the durable save is dropped, the memory commit stays."""
    cluster = running()
    for rank in (0, 1):
        cluster.request(rank, gen(1, 1), disk=True)
        cluster.seal(rank, gen(1, 1))
    cluster.persisted(0, gen(1, 1))
    cluster.done = []
    cluster.tick(1800)
    assert [d.generation for d in cluster.take(m.TrashGeneration)] == [gen(1, 1)]
    assert cluster.held(1) == ["step 1 (term 1)"]
    cluster.persisted(1, gen(1, 1))
    assert cluster.take(m.WriteCommit) == []


def test_a_lost_message_is_repeated_until_there_is_a_verdict() -> None:
    """Node 1 cannot be heard for a while: its seal counts all the same, later."""
    cluster = running()
    for rank in (0, 1):
        cluster.request(rank, gen(1, 1))
    cluster.cut = {1}
    cluster.seal(0, gen(1, 1))
    cluster.seal(1, gen(1, 1))
    assert cluster.take(m.AnnounceMemoryCommitted) == []
    cluster.cut = set()
    cluster.tick(6)
    assert len(cluster.take(m.AnnounceMemoryCommitted)) == 2


def test_a_lost_rank_makes_the_newest_memory_commit_durable() -> None:
    """The breakpoint save needs keepers only."""
    cluster = running()
    cluster.save(gen(1, 1))
    cluster.done = []
    cluster.tell_node(1, m.TrainerLost(rank=1, incarnation=LAUNCH))
    assert sorted(d.rank for d in cluster.take(m.StartPersist)) == [0, 1]
    cluster.tell_node(0, m.TrainerLost(rank=0, incarnation=LAUNCH))
    for rank in (0, 1):
        cluster.persisted(rank, gen(1, 1))
    (write,) = cluster.take(m.WriteCommit)
    assert write.generation == gen(1, 1)


def test_a_notice_of_the_end_does_the_same() -> None:
    """SIGTERM: everybody is alive, the save goes to disk all the same."""
    cluster = running()
    cluster.save(gen(1, 1))
    cluster.done = []
    cluster.tell_node(1, m.BreakpointRequested(reason="SIGTERM"))
    assert sorted(d.rank for d in cluster.take(m.StartPersist)) == [0, 1]


def test_a_lost_node_has_commits_stored_until_it_is_back() -> None:
    """The newest at once, and what is completed meanwhile; then only what is due."""
    cluster = running(slots=3)
    cluster.save(gen(1, 1))
    for rank in (0, 1):
        cluster.request(rank, gen(1, 2))
    cluster.seal(1, gen(1, 2))
    cluster.done = []
    cluster.cut = {1}
    cluster.tell(m.NodeLost(node=1))
    assert {start.generation for start in cluster.take(m.StartPersist)} == {gen(1, 1)}
    cluster.seal(0, gen(1, 2))
    assert {start.generation for start in cluster.take(m.StartPersist)} == {gen(1, 2)}
    cluster.cut = set()
    cluster.tick(10.0)
    for generation in (gen(1, 1), gen(1, 2)):
        for rank in (0, 1):
            cluster.persisted(rank, generation)
    cluster.tell(m.CommitWritten(generation=gen(1, 2)))
    cluster.done = []
    cluster.save(gen(1, 3))
    assert cluster.held(0)[-1] == "step 3 (term 1)"
    assert cluster.take(m.StartPersist) == []


def test_a_suspect_state_protects_nothing_and_is_not_protected() -> None:
    """NaN everywhere is memory-committed, but the good one before it keeps its slot."""
    cluster = running()
    cluster.save(gen(1, 1))
    for rank in (0, 1):
        cluster.request(rank, gen(1, 2))
    for rank in (0, 1):
        cluster.seal(rank, gen(1, 2), health="suspect")
    cluster.save(gen(1, 3))
    assert cluster.held(0) == ["step 1 (term 1)", "step 3 (term 1)"]


def test_a_failed_commit_is_not_durable_and_a_fenced_one_ends_the_term() -> None:
    """The record may stand: it is trashed only if it does not; nobody is told it is durable."""
    cluster = running()
    for rank in (0, 1):
        cluster.request(rank, gen(1, 1), disk=True)
        cluster.seal(rank, gen(1, 1))
        cluster.persisted(rank, gen(1, 1))
    cluster.done = []
    cluster.tell(m.CommitFailed(generation=gen(1, 1), reason="term 2 exists", fenced=True))
    done = cluster.done
    assert [d for d in done if isinstance(d, m.AnnounceDurable)] == []
    assert sorted(d.rank for d in done if isinstance(d, m.FenceTrainer)) == [0, 1]
    cluster.request(0, gen(1, 2))
    assert len(cluster.take(m.SkipSave)) == 1


def test_retention_waits_for_the_commit_to_be_read_back() -> None:
    """keep_last 1: (1, 1) goes when (1, 2) is verified, not when it is written."""
    cluster = running()
    cluster.save(gen(1, 1), disk=True)
    cluster.tell(m.GenerationVerified(generation=gen(1, 1), ok=True))
    cluster.save(gen(1, 2), disk=True)
    assert cluster.take(m.DeleteGenerations) == []
    cluster.tell(m.GenerationVerified(generation=gen(1, 2), ok=True))
    (delete,) = cluster.take(m.DeleteGenerations)
    assert delete.generations == (gen(1, 1),)


def test_a_shard_written_twice_stops_when_it_is_durable() -> None:
    """A new keeper writes what the old one had voted for; the old vote completes the commit.

    Found by simulation seed 16413: without the abort the slot counted as free while it was read.
    """
    cluster = running()
    for rank in (0, 1):
        cluster.request(rank, gen(1, 1), disk=True)
        cluster.seal(rank, gen(1, 1))
    cluster.persisted(1, gen(1, 1))
    shard = cluster.nodes[1].state.ranks[1].slots.restorable_shards()[0]
    cluster.nodes[1] = NodeProtocol(node=1)
    cluster.tell_node(1, m.SlotsAdopted(rank=1, slots=2, held=(shard,)))
    cluster.attach(1, term=1)
    cluster.tell_node(
        1, m.MessageReceived(from_node=0, message=m.PersistWanted(generation=gen(1, 1), ranks=(1,)))
    )
    cluster.done = []
    cluster.persisted(0, gen(1, 1))
    cluster.tell(m.CommitWritten(generation=gen(1, 1)))
    assert [d.rank for d in cluster.take(m.AbortPersist)] == [1]


def test_a_single_slot_is_reused_when_what_it_holds_is_on_its_way_no_more() -> None:
    """Not before all have sealed it, nor while it is written or waits for its COMMIT."""
    cluster = running(slots=1)

    def granted(step: int) -> list[int]:
        cluster.done = []
        for rank in (0, 1):
            cluster.request(rank, gen(1, step), disk=True)
        return [grant.rank for grant in cluster.take(m.GrantSlot)]

    assert granted(1) == [0, 1]
    cluster.seal(0, gen(1, 1))
    cluster.tell_node(
        0, m.PersistFailed(rank=0, generation=gen(1, 1), attempt=1, reason="", retryable=False)
    )
    assert granted(2) == []
    cluster.seal(1, gen(1, 1))
    assert granted(3) == [0, 1]
    for rank in (0, 1):
        cluster.seal(rank, gen(1, 3))
    assert granted(4) == []
    for rank in (0, 1):
        cluster.persisted(rank, gen(1, 3))
    assert granted(5) == []
    cluster.tell(m.CommitWritten(generation=gen(1, 3)))
    assert granted(6) == [0, 1]


def test_a_storage_that_hangs_gives_its_slot_to_memory() -> None:
    """Only when a save finds no other one; the generation will not be durable then."""
    cluster = Cluster(nodes_of=(0, 1))
    cluster.start()
    for step in (1, 2):
        for rank in (0, 1):
            cluster.request(rank, gen(1, step), disk=step == 1)
        for rank in (0, 1):
            cluster.seal(rank, gen(1, step))
    cluster.take(m.GrantSlot)
    for rank in (0, 1):
        cluster.request(rank, gen(1, 3))
    assert cluster.take(m.GrantSlot) == []
    for rank in (0, 1):
        stalled = m.PersistStalled(rank=rank, generation=gen(1, 1), attempt=1)
        cluster.tell_node(rank, stalled)
        cluster.request(rank, gen(1, 4))
    done = cluster.done
    assert len([i for i in done if isinstance(i, m.GrantSlot)]) == 2
    assert {i.generation for i in done if isinstance(i, m.AbortPersist)} == {gen(1, 1)}
    assert {i.generation for i in done if isinstance(i, m.AnnounceDropped)} >= {gen(1, 1)}
    for rank in (0, 1):
        cluster.seal(rank, gen(1, 4))
    assert gen(1, 4) in {i.generation for i in cluster.take(m.AnnounceMemoryCommitted)}


def test_a_storage_that_hangs_keeps_its_slot_while_others_are_free() -> None:
    """It may answer yet, and then the generation is durable."""
    cluster = Cluster(nodes_of=(0,), slots=3)
    cluster.start()
    cluster.save(gen(1, 1))
    cluster.request(0, gen(1, 2), disk=True)
    cluster.seal(0, gen(1, 2))
    cluster.tell_node(0, m.PersistStalled(rank=0, generation=gen(1, 2), attempt=1))
    for step in (3, 4, 5):
        cluster.save(gen(1, step))
    assert cluster.take(m.AbortPersist) == []
    cluster.persisted(0, gen(1, 2))
    assert [commit.generation for commit in cluster.take(m.WriteCommit)] == [gen(1, 2)]


@pytest.mark.parametrize("full", [True, False])
def test_older_ones_give_way_on_a_full_disk(full: bool) -> None:
    """Down to the newest that was read back; another error of the disk deletes nothing."""
    cluster = Cluster(nodes_of=(0,))
    cluster.coordinator.state.retention = Retention(keep_last=5)
    cluster.start()
    for step in (1, 2, 3):
        cluster.save(gen(1, step), disk=True)
        cluster.tell(m.GenerationVerified(generation=gen(1, step), ok=True))
    cluster.save(gen(1, 4), disk=True)
    cluster.request(0, gen(1, 5), disk=True)
    cluster.seal(0, gen(1, 5))
    cluster.take(m.DeleteGenerations)
    for attempt in range(1, 4):
        failed = m.PersistFailed(
            rank=0, generation=gen(1, 5), attempt=attempt, reason="no space", full=full
        )
        cluster.tell_node(0, failed)
    doomed = [delete.generations for delete in cluster.take(m.DeleteGenerations)]
    assert doomed == ([(gen(1, 1), gen(1, 2))] if full else [])


@pytest.mark.parametrize("reason", ["disk", "commit", "deadline"])
def test_a_single_slot_is_reused_when_the_disk_refuses_what_it_holds(reason: str) -> None:
    """Else nothing would ever be saved again; where there are two, it stays."""
    for slots, free in ((1, True), (2, False)):
        cluster = running(slots=slots)
        for rank in (0, 1):
            cluster.request(rank, gen(1, 1), disk=True)
            cluster.seal(rank, gen(1, 1))
        if reason == "disk":
            failed = m.PersistFailed(
                rank=0, generation=gen(1, 1), attempt=1, reason="EIO", retryable=False
            )
            cluster.tell_node(0, failed)
        elif reason == "commit":
            for rank in (0, 1):
                cluster.persisted(rank, gen(1, 1))
            cluster.tell(m.CommitFailed(generation=gen(1, 1), reason="EIO"))
        else:
            cluster.tick(1.0)
            cluster.tick(Deadlines().commit_s + 1.0)
        assert cluster.held(0) == cluster.held(1) == ["step 1 (term 1)"]
        cluster.save(gen(1, 2), disk=True)
        kept = ["step 2 (term 1)"] if free else ["step 1 (term 1)", "step 2 (term 1)"]
        assert cluster.held(0) == cluster.held(1) == kept


def test_a_save_of_another_term_is_refused() -> None:
    """A zombie keeps asking; nobody grants."""
    cluster = running()
    cluster.request(0, gen(2, 1))
    (skip,) = cluster.take(m.SkipSave)
    assert skip.reason.startswith("fenced")


def test_a_forgotten_generation_is_answered_by_rule() -> None:
    """Long after its record is gone, a late report of (1, 1) gets a verdict."""
    cluster = running()
    for step in range(1, 60):
        cluster.save(gen(1, step))
    assert len(cluster.coordinator.state.saves) < 40
    late = m.RankDropped(rank=0, generation=gen(1, 1), reason="late", memory=True)
    answer = cluster.coordinator.handle(m.MessageReceived(from_node=0, message=late))
    assert [type(a.message).__name__ for a in answer if isinstance(a, m.Send)] == [
        "GenerationDropped"
    ]


def test_a_save_that_begins_when_a_rank_has_ended_is_dropped_at_once() -> None:
    """Nobody else would seal it, and its rank would wait for that to its limit of time."""
    cluster = Cluster()
    cluster.start()
    cluster.tell_node(0, m.TrainerLost(rank=0, incarnation=LAUNCH))
    cluster.take(m.DiscardSnapshot)
    cluster.request(1, gen(1, 4), disk=True)
    (discarded,) = cluster.take(m.DiscardSnapshot)
    assert (discarded.rank, discarded.reason) == (1, "rank 0 was lost")


def test_news_of_a_dropped_save_are_answered_with_the_reason() -> None:
    """A rank that hears of it later knows whether to ask again."""
    cluster = Cluster()
    cluster.start()
    dropped = m.RankDropped(
        rank=1, generation=gen(1, 4), reason="no slot may be overwritten", memory=True, full=False
    )
    cluster.tell(m.MessageReceived(from_node=1, message=dropped))
    cluster.request(0, gen(1, 4), disk=True)
    reasons = {one.reason for one in cluster.take(m.DiscardSnapshot)}
    assert reasons == {"rank 1: no slot may be overwritten"}


def test_a_save_that_another_rank_has_passed_is_dropped_in_either_order_of_the_news() -> None:
    """Rank 1 went on to step 5 without step 4; rank 0's, heard of later, must not hold a slot."""
    cluster = running()
    cluster.request(1, gen(1, 5))
    cluster.done = []
    cluster.request(0, gen(1, 4))
    dropped = [drop.generation for drop in cluster.take(m.DiscardSnapshot)]
    assert dropped == [gen(1, 4)]


def proofs(digest: str, members: tuple[int, ...] = (0, 1)) -> tuple[m.ReplicaProof, ...]:
    """What one rank says of what it shares."""
    return (m.ReplicaProof(members=len(members), among=str(members), digest=digest),)


def sealed_with(*said: tuple[m.ReplicaProof, ...], disk: bool = False) -> Cluster:
    """Ranks of one node that seal (1, 1) with these proofs."""
    cluster = running(nodes_of=(0,) * len(said))
    for rank in range(len(said)):
        cluster.request(rank, gen(1, 1), disk=disk)
    for rank, replicas in enumerate(said):
        cluster.seal(rank, gen(1, 1), replicas=replicas)
    return cluster


def test_a_save_whose_replicas_differ_is_dropped_and_every_rank_is_told_why() -> None:
    """Each stores a part of it: put together it would be nobody's state."""
    cluster = sealed_with(proofs("same"), proofs("other"))
    assert cluster.take(m.AnnounceMemoryCommitted) == []
    cluster = sealed_with(proofs("same"), proofs("other"))
    dropped = cluster.take(m.AnnounceDropped)
    reason = "replicas differ: rank 1 holds other values than ranks [0]"
    assert [one.reason for one in dropped] == [reason]
    assert reason.startswith(m.REPLICAS_DIFFER)
    assert cluster.held(0) == cluster.held(1) == []


def test_of_many_replicas_that_differ_a_few_are_named() -> None:
    """Every node hears of it."""
    ranks = tuple(range(20))
    cluster = sealed_with(*(proofs("other" if rank == 3 else "same", ranks) for rank in ranks))
    reasons = {one.reason for one in cluster.take(m.AnnounceDropped)}
    named = "replicas differ: rank 3 holds other values than ranks [0, 1, 2, 4, 5, 6, 7, 8]"
    assert reasons == {f"{named} and 11 more"}


def test_replicas_that_differ_are_not_committed_to_disk_either() -> None:
    """Their files are given up, whatever was written by then."""
    cluster = sealed_with(proofs("same"), proofs("other"), disk=True)
    for rank in (0, 1):
        cluster.persisted(rank, gen(1, 1))
    assert cluster.take(m.WriteCommit) == []


def test_replicas_that_agree_within_each_group_are_committed() -> None:
    """Two pairs of four ranks hold different things, and each pair the same."""
    pairs = ((0, 2), (1, 3))
    said = [proofs(f"pair {rank % 2}", pairs[rank % 2]) for rank in range(4)]
    assert len(sealed_with(*said).take(m.AnnounceMemoryCommitted)) == 1
    said[3] = proofs("astray", pairs[1])
    cluster = sealed_with(*said)
    assert cluster.take(m.AnnounceMemoryCommitted) == []


@pytest.mark.parametrize("other", [proofs("other"), ()], ids=["differs", "missing"])
def test_each_of_two_groups_of_the_same_ranks_must_agree(
    other: tuple[m.ReplicaProof, ...],
) -> None:
    """Ranks of a node share what all nodes hold, and what only they hold."""
    both = (*proofs("all nodes"), *proofs("this node"))
    assert len(sealed_with(both, both).take(m.AnnounceMemoryCommitted)) == 1
    astray = sealed_with(both, (*other, *proofs("this node")))
    assert astray.take(m.AnnounceMemoryCommitted) == []


def test_after_a_difference_saves_without_proofs_are_committed() -> None:
    """Every rank stores all of its own from then on."""
    cluster = sealed_with(proofs("same"), proofs("other"))
    cluster.done = []
    cluster.save(gen(1, 2), disk=True)
    assert [one.generation for one in cluster.take(m.AnnounceDurable)] == [gen(1, 2)]


def test_a_save_that_only_some_of_a_group_share_is_dropped() -> None:
    """One rank has stopped sharing, and the other stores a half: the rest would be another's."""
    for stopped in (0, 1):
        said = [proofs("same"), proofs("same")]
        said[stopped] = ()
        cluster = sealed_with(*said, disk=True)
        for rank in (0, 1):
            cluster.persisted(rank, gen(1, 1))
        reasons = [one.reason for one in cluster.take(m.AnnounceDropped)]
        told = f"of 2 ranks that shared state only ranks [{1 - stopped}] still do"
        assert reasons == [f"{m.REPLICAS_DIFFER}: {told}"]
        assert cluster.take(m.AnnounceMemoryCommitted) == cluster.take(m.WriteCommit) == []


def test_memory_that_a_new_keeper_adopted_proves_nothing_and_is_kept() -> None:
    """Its shards were sealed by ranks that shared; a keeper before this one knew it."""
    known = m.HeldShard(
        rank=0, slot=0, generation=gen(1, 1), step=1, world_size=3, root="r",
        replicas=proofs("same"),
    )  # fmt: skip
    adopted = replace(known, rank=1, replicas=(), proofs_known=False)
    ranks = [known, adopted, replace(known, rank=2, replicas=())]
    assert ReplicaComparison().compare(1, (0, 1, 1), ranks) is None
    ranks[1] = replace(adopted, proofs_known=True)
    assert isinstance(ReplicaComparison().compare(1, (0, 1, 1), ranks), str)


def suspect(generation: Generation) -> m.GenerationVerified:
    """Read back whole, with NaN that no seal has seen."""
    return m.GenerationVerified(generation=generation, ok=True, health="suspect", detail="NaN")


def test_what_turns_out_to_be_suspect_supersedes_nothing_in_memory() -> None:
    """Its own slot is the next to be overwritten, not that of the older sound one."""
    cluster = running()
    cluster.save(gen(1, 1))
    cluster.save(gen(1, 2), disk=True)
    cluster.tell(suspect(gen(1, 2)))
    cluster.save(gen(1, 3))
    assert cluster.held(0) == cluster.held(1) == ["step 1 (term 1)", "step 3 (term 1)"]


def test_a_verdict_that_was_lost_on_the_way_is_said_again() -> None:
    """Until something newer is memory-committed."""
    cluster = running()
    cluster.save(gen(1, 1))
    cluster.save(gen(1, 2), disk=True)
    cluster.cut = {1}
    cluster.tell(suspect(gen(1, 2)))
    cluster.cut = set()
    cluster.tick(10.0)
    cluster.save(gen(1, 3))
    assert cluster.held(1) == ["step 1 (term 1)", "step 3 (term 1)"]


def test_suspect_commits_push_no_older_one_out() -> None:
    """keep_last 1: (1, 1) goes when (1, 3) is verified, not when (1, 2) is."""
    cluster = running()
    for step in (1, 2, 3):
        cluster.save(gen(1, step), disk=True)
    cluster.tell(m.GenerationVerified(generation=gen(1, 1), ok=True))
    cluster.tell(suspect(gen(1, 2)))
    assert cluster.take(m.DeleteGenerations) == []
    cluster.tell(m.GenerationVerified(generation=gen(1, 3), ok=True))
    (delete,) = cluster.take(m.DeleteGenerations)
    assert delete.generations == (gen(1, 1), gen(1, 2))


def test_a_breakpoint_stores_the_newest_that_is_sound() -> None:
    """(1, 1) was in memory only, and (1, 2) on disk is worth nothing."""
    cluster = running(slots=3)
    cluster.save(gen(1, 1))
    cluster.save(gen(1, 2), disk=True)
    cluster.tell(suspect(gen(1, 2)))
    cluster.done = []
    cluster.tell_node(0, m.BreakpointRequested(reason="SIGTERM"))
    assert {start.generation for start in cluster.take(m.StartPersist)} == {gen(1, 1)}


def test_a_file_name_is_not_used_again_when_a_newer_commit_turns_out_to_be_suspect() -> None:
    """The disk refused step 1 and has step 2, which is suspect: a new coordinator asks again."""
    cluster = running(slots=3)
    for rank in (0, 1):
        cluster.request(rank, gen(1, 1), disk=True)
        cluster.seal(rank, gen(1, 1))
    failed = m.PersistFailed(
        rank=0, generation=gen(1, 1), attempt=1, reason="EROFS", retryable=False
    )
    cluster.tell_node(0, failed)
    cluster.save(gen(1, 2), disk=True)
    cluster.tell(suspect(gen(1, 2)))
    cluster.done = []
    for node in (0, 1):
        again = m.PersistWanted(generation=gen(1, 1), ranks=(0, 1))
        cluster.tell_node(node, m.MessageReceived(from_node=0, message=again))
    starts = cluster.take(m.StartPersist)
    assert [(start.rank, start.attempt) for start in starts] == [(0, 2), (1, 2)]
