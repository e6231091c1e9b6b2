"""Restores, step by step: admission, claim, inventory, decision, strike-out, rejoin."""

from dataclasses import replace
from typing import Any

import pytest

from autockpt.executors.protocol import messages as m
from autockpt.executors.protocol.coordinator.machine import CoordinatorProtocol
from autockpt.executors.protocol.deadlines import Deadlines
from autockpt.executors.protocol.node.machine import NodeProtocol
from autockpt.values.generation import Generation
from tests.simulation.cluster import LAUNCH, Cluster, gen

ROOT = (m.TermParent(term=1, parent=None),)
"""Term 1 began from scratch."""

NEXT = m.Incarnation(launch_id="launch", restart_round=1)
OTHER = m.Incarnation(launch_id="other", restart_round=0)
SCRATCH = (m.TermParent(term=1, parent=None),)


def saved(*, disk: bool = False) -> Cluster:
    """Two ranks that saved (1, 3) and then died."""
    cluster = Cluster()
    cluster.start()
    cluster.save(gen(1, 3), disk=disk)
    die(cluster)
    return cluster


def die(cluster: Cluster, incarnation: m.Incarnation = LAUNCH) -> None:
    """All trainers are lost."""
    for rank, node in enumerate(cluster.nodes_of):
        cluster.tell_node(node, m.TrainerLost(rank=rank, incarnation=incarnation))
    cluster.done = []


def entry(step: int, **more: Any) -> m.CatalogueEntry:
    """A commit of term 1 on disk."""
    generation = gen(1, step)
    records = tuple({"file": f"{generation}-{r}", "root": f"{generation}:{r}"} for r in (0, 1))
    return m.CatalogueEntry(generation=generation, step=step, world_size=2, records=records, **more)


def verdict(generation: Generation) -> m.GenerationVerified:
    """It was read back: whole, and NaN in it."""
    return m.GenerationVerified(generation=generation, ok=True, health="suspect", detail="NaN")


def test_the_first_start_of_a_run_is_from_scratch() -> None:
    """Nothing was ever committed: all ranks start, after the decision stands."""
    cluster = Cluster()
    cluster.attach_all()
    assert len(cluster.take(m.ClaimTerm)) == 1
    cluster.claim(1)
    (decision,) = cluster.take(m.WriteDecision)
    assert decision.generation is None
    cluster.tell(m.DecisionWritten(term=1, attempt=1))
    assert sorted(d.rank for d in cluster.take(m.StartFresh)) == [0, 1]


def test_nobody_claims_before_all_ranks_have_attached() -> None:
    """And after the deadline those who did are told who is missing."""
    cluster = Cluster()
    cluster.attach(0)
    assert cluster.take(m.ClaimTerm) == []
    cluster.tick(600)
    (refused,) = cluster.take(m.RestoreRefused)
    assert "ranks [1] did not attach" in refused.reason
    assert refused.retryable


def test_a_restart_resumes_from_memory_when_all_have_verified() -> None:
    """The next round takes over at once; the first rank waits for the second."""
    cluster = saved()
    cluster.start(2, NEXT, parents=SCRATCH, ever_committed=True)
    orders = cluster.take(m.RestoreShard)
    assert [(o.rank, o.source.kind, str(o.generation)) for o in orders] == [
        (0, "memory", "step 3 (term 1)"),
        (1, "memory", "step 3 (term 1)"),
    ]
    cluster.tell_node(0, m.ShardVerified(rank=0, term=2, attempt=1))
    assert cluster.take(m.Resume) == []
    cluster.tell_node(1, m.ShardVerified(rank=1, term=2, attempt=1))
    assert [(r.rank, r.term, r.step) for r in cluster.take(m.Resume)] == [(0, 2, 3), (1, 2, 3)]


def test_ranks_of_a_node_are_told_who_reads_with_them() -> None:
    """From storage only: a slot is nobody else's."""
    cluster = Cluster(nodes_of=(0, 0, 1))
    cluster.start()
    cluster.save(gen(1, 3))
    die(cluster)
    records = tuple({"file": f"{r}", "root": f"root {r}"} for r in range(3))
    on_disk = m.CatalogueEntry(generation=gen(1, 2), step=2, world_size=3, records=records)
    cluster.start(2, NEXT, committed=(on_disk,), parents=SCRATCH)
    orders = cluster.take(m.RestoreShard)
    assert {(o.source.kind, o.readers) for o in orders} == {("memory", ())}
    cluster.tell_node(0, m.ShardBad(rank=0, term=2, attempt=1, detail="a chunk"))
    cluster.tell(m.DecisionWritten(term=2, attempt=2))
    readers = {order.rank: order.readers for order in cluster.take(m.RestoreShard)}
    assert readers == {0: (0, 1), 1: (0, 1), 2: (2,)}


def test_a_bad_source_makes_all_ranks_restore_something_else() -> None:
    """Rank 1's slot is rotten, (1, 3) is nowhere else: both ranks go back to (1, 2) on disk."""
    cluster = saved()
    cluster.start(2, NEXT, parents=SCRATCH, committed=(entry(2),))
    cluster.done = []
    cluster.tell_node(1, m.ShardBad(rank=1, term=2, attempt=1, detail="chunk 7"))
    (decision,) = cluster.take(m.WriteDecision)
    assert decision.generation == gen(1, 2)
    cluster.tell(m.DecisionWritten(term=2, attempt=2))
    assert [(o.rank, o.source.kind) for o in cluster.take(m.RestoreShard)] == [
        (0, "disk"),
        (1, "disk"),
    ]
    cluster.tell_node(0, m.ShardVerified(rank=0, term=2, attempt=1))
    cluster.verify_all(2, attempt=2)
    assert len(cluster.take(m.Resume)) == 2


def test_a_store_that_cannot_be_read_now_costs_no_checkpoint() -> None:
    """An older one is not taken: every rank hears that the next start may succeed."""
    cluster = saved()
    cluster.start(2, NEXT, parents=SCRATCH, committed=(entry(2), entry(4)))
    cluster.done = []
    cluster.tell_node(1, m.ShardBad(rank=1, term=2, attempt=1, detail="503", unread=True))
    assert not any(isinstance(done, m.WriteDecision) for done in cluster.done)
    refused = cluster.take(m.RestoreRefused)
    assert sorted(r.rank for r in refused) == [0, 1]
    assert all(r.retryable and "503" in r.reason for r in refused)


@pytest.mark.parametrize("source", ["disk", "memory"])
def test_a_store_that_is_slow_costs_no_checkpoint(source: str) -> None:
    """Of a rank that still reads when the time is over nothing is known; a slot is given up."""
    cluster = saved()
    newest = (entry(4),) if source == "disk" else ()
    cluster.start(2, NEXT, parents=SCRATCH, committed=(entry(2), *newest))
    assert {order.source.kind for order in cluster.take(m.RestoreShard)} == {source}
    cluster.tell_node(0, m.ShardVerified(rank=0, term=2, attempt=1))
    cluster.done = []
    cluster.tick(Deadlines().restore_s + 1)
    decided = [done.generation for done in cluster.done if isinstance(done, m.WriteDecision)]
    refused = cluster.take(m.RestoreRefused)
    if source == "memory":
        assert (refused, decided) == ([], [gen(1, 2)])
        return
    assert decided == []
    assert sorted(r.rank for r in refused) == [0, 1]
    assert all(r.retryable and "ranks [1] still read" in r.reason for r in refused)


def test_a_slot_that_is_verified_after_all_stays_like_any_other_that_was_restored() -> None:
    """Both ranks' slots are bad at once: the later word is lost, its slot is chosen again."""
    cluster = saved()
    cluster.start(2, NEXT, parents=SCRATCH, committed=(entry(3),))
    for rank in (0, 1):
        cluster.tell_node(rank, m.ShardBad(rank=rank, term=2, attempt=1, detail="chunk 7"))
    cluster.done = []
    cluster.tell(m.DecisionWritten(term=2, attempt=2))
    assert [(o.rank, o.source.kind) for o in cluster.take(m.RestoreShard)] == [
        (0, "disk"),
        (1, "memory"),
    ]
    cluster.verify_all(2, attempt=2)
    cluster.request(1, gen(2, 1))
    cluster.request(1, gen(2, 2))
    assert cluster.held(1) == ["step 3 (term 1)"]
    assert [skip.generation for skip in cluster.take(m.SkipSave)] == [gen(2, 2)]


def test_a_verdict_outlives_the_incarnation_and_a_mark_that_was_not_written() -> None:
    """The directory calls (1, 3) good, its coordinator has heard that it is not."""
    cluster = saved(disk=True)
    cluster.tell(verdict(gen(1, 3)))
    again = m.Incarnation(launch_id="launch", restart_round=1)
    cluster.attach_all(again)
    cluster.claim(2, again, committed=(entry(2), entry(3)), parents=ROOT)
    (decision,) = cluster.take(m.WriteDecision)
    assert decision.generation == gen(1, 2)


def test_what_turns_out_to_be_suspect_while_it_is_restored_is_left_by_all() -> None:
    """Before the decision stands, and while ranks read."""
    for deciding in (True, False):
        cluster = saved(disk=True)
        again = m.Incarnation(launch_id="launch", restart_round=1)
        cluster.attach_all(again)
        cluster.claim(2, again, committed=(entry(2), entry(3)), parents=ROOT)
        if deciding:
            cluster.tell(verdict(gen(1, 3)))
        cluster.tell(m.DecisionWritten(term=2, attempt=1))
        if not deciding:
            cluster.tell(verdict(gen(1, 3)))
        decision = cluster.take(m.WriteDecision)[-1]
        assert (decision.attempt, decision.generation) == (2, gen(1, 2))
        cluster.tell(m.DecisionWritten(term=2, attempt=2))
        assert {order.generation for order in cluster.take(m.RestoreShard)} == {gen(1, 2)}


def test_a_mark_that_came_after_the_claim_is_seen_with_the_decision() -> None:
    """A coordinator on another node read it back; a person who names it gets it all the same."""
    for asked in (None, gen(1, 3)):
        cluster = saved(disk=True)
        cluster.coordinator = CoordinatorProtocol()
        cluster.attach_all(NEXT, resume_from=asked)
        cluster.claim(2, NEXT, committed=(entry(2), entry(3)), parents=ROOT)
        cluster.tell(m.DecisionWritten(term=2, attempt=1, suspect=True))
        decisions = [(d.attempt, d.generation) for d in cluster.done if type(d) is m.WriteDecision]
        assert decisions == [(1, gen(1, 3))] + [(2, gen(1, 2))] * (asked is None)
        cluster.tell(m.DecisionWritten(term=2, attempt=2))
        orders = {order.generation for order in cluster.take(m.RestoreShard)}
        assert orders == {asked or gen(1, 2)}


def test_something_was_committed_but_nothing_can_be_restored() -> None:
    """The ranks are told why, and do not start from scratch."""
    cluster = Cluster()
    cluster.attach_all()
    cluster.claim(2, ever_committed=True, parents=SCRATCH)
    refused = cluster.take(m.RestoreRefused)
    assert len(refused) == 2
    assert not refused[0].retryable
    assert "fresh start" in refused[0].reason


def test_a_refusal_says_that_only_weights_are_left() -> None:
    """They are not named among what a start could resume from."""
    cluster = Cluster()
    cluster.attach_all()
    weights = tuple({**record, "weights_only": True} for record in entry(2).records)
    left = replace(entry(2), records=weights)
    cluster.claim(2, ever_committed=True, parents=SCRATCH, committed=(left,))
    refused = cluster.take(m.RestoreRefused)[0]
    assert "on disk []" in refused.reason
    assert f"{[str(gen(1, 2))]} hold weights only: begin another run with attach" in refused.reason


def test_answers_to_orders_of_an_earlier_term_say_nothing() -> None:
    """The order of this term is still at work, and no second one is given."""
    cluster = Cluster()
    cluster.start(2, parents=SCRATCH, committed=(entry(2),))
    state = cluster.coordinator.state
    state.dropping.add(gen(1, 2))
    answer = m.OptimizerStateDropped(term=1, generation=gen(1, 2), reason="fenced")
    cluster.tell(answer)
    assert state.dropping == {gen(1, 2)}
    assert [report.kind for report in cluster.take(m.Report)] == ["stale"]
    cluster.tell(replace(answer, term=2))  # it cannot be, and is not tried again and again
    assert state.dropping == {gen(1, 2)}
    cluster.tell(replace(answer, term=2, later=True))
    assert state.dropping == set()


def test_what_was_never_durable_is_no_reason_to_refuse() -> None:
    """Memory of an earlier start is gone, nothing is on disk: from scratch, and it is said why."""
    for parents, said in ((SCRATCH, "an earlier start left no durable checkpoint"), ((), "")):
        cluster = Cluster()
        cluster.attach_all()
        cluster.claim(2, parents=parents)
        cluster.tell(m.DecisionWritten(term=2, attempt=1))
        assert {start.reason for start in cluster.take(m.StartFresh)} == {said}


def test_a_memory_commit_leaves_no_mark_and_the_first_durable_one_does() -> None:
    """The mark keeps a later start from beginning anew: memory goes with its machine."""
    cluster = Cluster()
    cluster.start()
    cluster.save(gen(1, 1))
    assert cluster.take(m.MarkEverCommitted) == []
    cluster.save(gen(1, 2), disk=True)
    cluster.save(gen(1, 3), disk=True)
    assert len(cluster.take(m.MarkEverCommitted)) == 1


def test_bad_memory_alone_ends_two_starts_and_not_the_third() -> None:
    """Some rank may hold a part of it by then, so each of them is a start of its own."""
    cluster = saved()
    for start in (2, 3):
        again = m.Incarnation(launch_id="launch", restart_round=start)
        cluster.attach_all(again)
        cluster.claim(start, again, parents=SCRATCH)
        cluster.tell(m.DecisionWritten(term=start, attempt=1))
        cluster.take(m.RestoreShard)
        cluster.tell(
            m.MessageReceived(
                from_node=0, message=m.ShardBad(rank=0, term=start, attempt=1, detail="a chunk")
            )
        )
        assert [refused.retryable for refused in cluster.take(m.RestoreRefused)] == [True, True]
    last = m.Incarnation(launch_id="launch", restart_round=4)
    cluster.attach_all(last)
    cluster.claim(4, last, parents=SCRATCH)
    cluster.tell(m.DecisionWritten(term=4, attempt=1))
    assert {"step 3 (term 1)" in start.reason for start in cluster.take(m.StartFresh)} == {True}


def test_a_silent_node_is_asked_again_by_another_start() -> None:
    """It may hold the only copy in its memory: that is not passed over for ever."""
    cluster = Cluster()
    cluster.attach_all()
    cluster.cut.add(1)
    cluster.claim(2, parents=SCRATCH)
    cluster.tick(60)
    refused = cluster.take(m.RestoreRefused)
    assert [r.retryable for r in refused] == [True]
    assert "nodes [1] do not say" in refused[0].reason


def test_a_fresh_start_needs_a_word_and_gets_it() -> None:
    """With fresh=True old commits are passed over."""
    cluster = Cluster()
    cluster.attach_all(fresh=True)
    cluster.claim(2, committed=(entry(2),), parents=SCRATCH)
    cluster.tell(m.DecisionWritten(term=2, attempt=1))
    assert len(cluster.take(m.StartFresh)) == 2


def test_a_rollback_is_a_new_term_with_that_parent() -> None:
    """--resume-from (1, 2), although (1, 4) is there; afterwards (1, 4) is off the lineage."""
    cluster = Cluster()
    cluster.attach_all(resume_from=gen(1, 2))
    cluster.claim(2, committed=(entry(2), entry(4)), parents=SCRATCH)
    cluster.tell(m.DecisionWritten(term=2, attempt=1))
    cluster.verify_all(2)
    assert cluster.coordinator.state.chain[0] == m.TermParent(term=2, parent=gen(1, 2))
    assert not cluster.nodes[0].state.is_eligible(gen(1, 4))


def test_a_rank_lost_on_the_way_ends_the_incarnation() -> None:
    """The others are told to try again."""
    cluster = saved()
    cluster.start(2, NEXT, parents=SCRATCH)
    cluster.done = []
    cluster.tell_node(1, m.TrainerLost(rank=1, incarnation=NEXT))
    (refused,) = cluster.take(m.RestoreRefused)
    assert (refused.rank, refused.retryable) == (0, True)
    cluster.verify_all(2)
    assert cluster.take(m.Resume) == []


def test_another_launch_is_refused_while_the_holder_lives() -> None:
    """The refusal names the holder; when nobody of it is left, the other one is let in."""
    cluster = Cluster()
    cluster.start()
    cluster.attach(0, OTHER)
    (refused,) = cluster.take(m.AttachRefused)
    assert "launch#0 holds the run" in refused.reason
    for rank in (0, 1):
        cluster.tell_node(rank, m.TrainerLost(rank=rank, incarnation=LAUNCH))
    cluster.done = []
    cluster.attach_all(OTHER)
    (claim,) = cluster.take(m.ClaimTerm)
    assert claim.incarnation == OTHER


def test_a_lower_round_never_comes_back() -> None:
    """Torchelastic's killed workers may outlive their launcher."""
    cluster = Cluster()
    cluster.start(1, NEXT)
    cluster.attach(0, LAUNCH)
    (refused,) = cluster.take(m.AttachRefused)
    assert "replaced by round 1" in refused.reason


def test_among_trainers_that_come_back_the_newest_term_wins() -> None:
    """A zombie reaches the new keeper first; the rank that really runs replaces it."""
    node = NodeProtocol()
    base = {"world_size": 1, "nodes": (0,), "slots": 2, "rank": 0}
    node.handle(m.TrainerAttached(incarnation=LAUNCH, term=2, **base))  # type: ignore[arg-type]
    done = node.handle(m.TrainerAttached(incarnation=OTHER, term=3, **base))  # type: ignore[arg-type]
    assert [type(d).__name__ for d in done] == ["FenceTrainer", "Send"]
    done = node.handle(m.TrainerAttached(incarnation=LAUNCH, term=2, **base))  # type: ignore[arg-type]
    assert [type(d).__name__ for d in done] == ["AttachRefused"]


def test_a_new_keeper_learns_of_the_newest_term_as_it_opens() -> None:
    """It did not see the claim; a zombie comes back after the ranks that waited were started."""
    node = NodeProtocol()
    base = {"world_size": 1, "nodes": (0,), "slots": 2, "rank": 0}
    node.handle(m.TrainerAttached(incarnation=OTHER, **base))  # type: ignore[arg-type]
    opened = m.TermOpened(
        incarnation=OTHER, term=2, parent=gen(1, 3), step=3, parent_durable=True,
        lineage=(m.TermParent(term=2, parent=gen(1, 3)), *ROOT), memory_committed=None,
        durable=None,
    )  # fmt: skip
    done = node.handle(m.MessageReceived(from_node=0, message=opened))
    assert [type(d).__name__ for d in done] == ["Resume"]
    done = node.handle(m.TrainerAttached(incarnation=LAUNCH, term=1, **base))  # type: ignore[arg-type]
    assert [type(d).__name__ for d in done] == ["AttachRefused"]


def test_a_slot_an_old_trainer_writes_is_not_given_away() -> None:
    """It is free when that process has ended, not when another one has attached."""
    cluster = Cluster(slots=1)
    cluster.start()
    cluster.request(0, gen(1, 1))
    cluster.start(2, NEXT, parents=SCRATCH)
    cluster.done = []
    cluster.request(0, gen(2, 1))
    assert cluster.take(m.GrantSlot) == []
    cluster.tell_node(0, m.TrainerLost(rank=0, incarnation=LAUNCH))
    cluster.request(0, gen(2, 2))
    assert len(cluster.take(m.GrantSlot)) == 1


def test_a_fence_meant_for_the_old_incarnation_does_not_hit_the_new_one() -> None:
    """The old coordinator's last message arrives after the takeover."""
    cluster = Cluster()
    cluster.start()
    cluster.attach(1, NEXT)
    old = m.TermFenced(incarnation=LAUNCH, term=1, reason="newer term")
    cluster.tell_node(1, m.MessageReceived(from_node=0, message=old))
    assert cluster.nodes[1].state.phase == "waiting"


def test_a_new_keeper_of_the_coordinator_continues_the_term() -> None:
    """Memory commit and rule 1 survive; training never stopped."""
    cluster = Cluster()
    cluster.start()
    cluster.save(gen(1, 3))
    shard = cluster.nodes[0].state.ranks[0].slots.restorable_shards()[0]
    cluster.nodes[0], cluster.coordinator = NodeProtocol(), CoordinatorProtocol()
    cluster.tell_node(0, m.SlotsAdopted(rank=0, slots=2, held=(shard,)))
    cluster.done = []
    cluster.attach(0, term=1)
    (claim,) = cluster.take(m.ClaimTerm)
    assert claim.term == 1
    cluster.claim(1, parents=SCRATCH)
    assert cluster.coordinator.state.memory_committed == gen(1, 3)
    assert cluster.take(m.Resume) == []
    cluster.save(gen(1, 5))
    assert cluster.coordinator.state.memory_committed == gen(1, 5)


def test_a_rank_that_a_new_coordinator_starts_is_told_the_step_of_another_world() -> None:
    """Three ranks saved, two gathered it, and the coordinator is lost as it lets them train."""
    saved = gen(1, 3)
    cluster = Cluster((0, 0, 1))
    cluster.start()
    cluster.save(saved)
    for rank, node in enumerate((0, 0, 1)):
        cluster.tell_node(node, m.TrainerLost(rank=rank, incarnation=LAUNCH))
    cluster.nodes_of = (0, 1)
    cluster.start(2, NEXT, parents=SCRATCH)
    held = {rank: cluster.nodes[0].state.ranks[rank].slots.restorable_shards() for rank in (0, 1)}
    cluster.cut = {1}
    cluster.tell_node(0, m.ShardVerified(rank=0, term=2, attempt=1))
    told = m.ShardVerified(rank=1, term=2, attempt=1)
    cluster.tell(m.MessageReceived(from_node=1, message=told))
    assert [(resume.rank, resume.step) for resume in cluster.take(m.Resume)] == [(0, 3)]
    cluster.cut = set()
    cluster.nodes[0], cluster.coordinator = NodeProtocol(), CoordinatorProtocol()
    for rank, shards in held.items():
        cluster.tell_node(0, m.SlotsAdopted(rank=rank, slots=2, held=shards))
    cluster.attach(0, NEXT, term=2)
    cluster.claim(2, NEXT, parents=(*SCRATCH, m.TermParent(term=2, parent=saved)))
    assert [(resume.rank, resume.step) for resume in cluster.take(m.Resume)] == [(1, 3)]


def test_trainers_name_the_lineage_that_directory_and_keepers_have_lost() -> None:
    """The only complete checkpoint is the one that they resumed from; its slot is not given away.

    Not known are then: what the term began from, and where it began anew without a claim.
    """
    began = Generation(term=2, step=4, attempt=1)
    part = m.TermParent(term=2, parent=gen(2, 3), attempt=1)
    for lineage, parent in (
        ((m.TermParent(term=2, parent=gen(1, 3)), *ROOT), gen(1, 3)),
        ((part, m.TermParent(term=2, parent=gen(1, 3)), *ROOT), gen(2, 3)),
    ):
        cluster = Cluster()
        for rank in (0, 1):
            shard = held(rank, 0, parent)
            cluster.tell_node(rank, m.SlotsAdopted(rank=rank, slots=2, held=(shard,)))
        cluster.attach_all(term=2, attempt=lineage[0].attempt, lineage=lineage)
        cluster.claim(2, parents=())
        assert cluster.coordinator.state.memory_committed == parent
        assert {node.state.chain for node in cluster.nodes.values()} == {lineage}
        cluster.done = []
        cluster.request(0, began)
        assert [grant.slot for grant in cluster.take(m.GrantSlot)] == [1]


def test_a_trainer_without_a_newer_lineage_changes_none() -> None:
    """One that waits for a start names none; one of an older term is refused, or knows less."""
    cluster = Cluster((0, 0))
    older, newer = ROOT, (m.TermParent(term=2, parent=gen(1, 3)), *ROOT)
    cluster.attach(0, NEXT, term=2, lineage=newer)
    cluster.attach(1, LAUNCH, term=1, lineage=older)
    assert cluster.nodes[0].state.chain == newer
    cluster.attach(1, NEXT, lineage=(m.TermParent(term=3, parent=None),))
    assert cluster.nodes[0].state.chain == newer
    assert all(
        rank.attach and not rank.attach.lineage for rank in cluster.nodes[0].state.ranks.values()
    )


def test_running_trainers_are_told_their_lineage() -> None:
    """With the order to begin: from scratch, and from a checkpoint."""
    cluster = Cluster()
    cluster.start()
    assert {told.lineage for told in cluster.take(m.StartFresh)} == {ROOT}
    cluster.save(gen(1, 3))
    die(cluster)
    cluster.start(2, NEXT, parents=ROOT)
    cluster.verify_all(2)
    chain = (m.TermParent(term=2, parent=gen(1, 3)), *ROOT)
    assert {told.lineage for told in cluster.take(m.Resume)} == {chain}


def test_a_rejoining_coordinator_waits_for_every_node() -> None:
    """Node 1 is silent: nothing is concluded from half an inventory, however long it lasts."""
    cluster = Cluster()
    cluster.start()
    cluster.save(gen(1, 3))
    cluster.nodes[0], cluster.coordinator = NodeProtocol(), CoordinatorProtocol()
    cluster.tell_node(0, m.SlotsAdopted(rank=0, slots=2, held=()))
    cluster.cut = {1}
    cluster.attach(0, term=1)
    cluster.claim(1, parents=SCRATCH)
    cluster.tick(40)
    assert cluster.coordinator.state.phase == "inventory"
    cluster.cut = set()
    cluster.tick(6)
    assert cluster.coordinator.state.phase == "running"


def test_a_keeper_that_restarts_during_a_restore_gets_its_orders_again() -> None:
    """Its ranks attach anew; the decision stands."""
    cluster = saved(disk=True)
    cluster.start(2, NEXT, parents=SCRATCH, committed=(entry(3),))
    cluster.nodes[1] = NodeProtocol(node=1)
    cluster.done = []
    cluster.attach(1, NEXT)
    cluster.tick(6)
    assert [o.rank for o in cluster.take(m.RestoreShard)] == [1]
    cluster.verify_all(2)
    assert len(cluster.take(m.Resume)) == 2


def test_the_directory_is_held_by_somebody_else() -> None:
    """The refusal reaches every rank as not admitted, with the holder's name."""
    cluster = Cluster()
    cluster.attach_all()
    cluster.tell(m.TermRefused(incarnation=LAUNCH, reason="held by host b, pid 7"))
    refused = cluster.take(m.AttachRefused)
    assert [r.reason for r in refused] == ["held by host b, pid 7"] * 2


def test_a_mount_that_hangs_ends_the_start_at_the_deadline() -> None:
    """The next start may find it answering."""
    cluster = Cluster()
    cluster.start(2, committed=(entry(3),), parents=SCRATCH)
    cluster.tell_node(0, m.ShardVerified(rank=0, term=2, attempt=1))
    cluster.done = []
    cluster.tick(1800)
    refused = cluster.take(m.RestoreRefused)
    assert "ranks [1] still read step 3 (term 1) from storage" in refused[0].reason
    assert refused[0].retryable


def held(rank: int, slot: int, generation: Generation) -> m.HeldShard:
    """A shard that is sealed in a slot."""
    return m.HeldShard(
        rank=rank, slot=slot, generation=generation, step=generation.step, world_size=2,
        root=f"{generation}:{rank}",
    )  # fmt: skip


def test_an_emptied_directory_leaves_all_that_is_in_memory() -> None:
    """New keepers know no lineage, the newest term is in pieces: an older whole one does."""
    cluster = Cluster()
    for rank in (0, 1):
        shards = [held(rank, 0, gen(1, 3)), held(rank, 1, gen(2, 1))]
        adopted = m.SlotsAdopted(rank=rank, slots=2, held=tuple(shards[: 2 - rank]))
        cluster.tell_node(rank, adopted)
    cluster.attach_all(OTHER)
    cluster.claim(3, OTHER, parents=())
    assert [d.generation for d in cluster.take(m.WriteDecision)] == [gen(1, 3)]


def test_the_term_of_a_trainer_that_is_refused_is_not_claimed_again() -> None:
    """It comes back to a new keeper, its directory was emptied, and its launch went on."""
    cluster = Cluster()
    cluster.attach(0, NEXT)
    cluster.attach(0, LAUNCH, term=4)
    assert len(cluster.take(m.AttachRefused)) == 1
    last = m.Incarnation(launch_id="launch", restart_round=2)
    cluster.attach_all(last)
    assert [claim.after for claim in cluster.take(m.ClaimTerm)] == [4]
