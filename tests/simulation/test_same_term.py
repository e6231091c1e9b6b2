"""Rule 21, worked examples: a restart whose memory is all there, while the storage hangs."""

import pytest

from autockpt.executors.protocol import messages as m
from autockpt.executors.protocol.selection import on_lineage
from autockpt.values.generation import Generation
from tests.simulation.cluster import LAUNCH, Cluster, gen

AGAIN = m.Incarnation(launch_id="launch", restart_round=1)
WAIT_S = 6.0
"""Longer than a claim is waited for."""


def again(step: int, attempt: int = 1) -> Generation:
    """What trainers save that began anew within term 1."""
    return Generation(term=1, attempt=attempt, step=step)


def saved(*, slots: int = 2) -> Cluster:
    """Two saves in term 1, the first of them durable."""
    cluster = Cluster(slots=slots)
    cluster.start()
    cluster.save(gen(1, 1), disk=True)
    cluster.save(gen(1, 2))
    cluster.done.clear()
    return cluster


def end_all(cluster: Cluster, who: m.Incarnation = LAUNCH) -> None:
    """Every trainer dies, and its keeper sees it."""
    for rank, node in enumerate(cluster.nodes_of):
        cluster.tell_node(node, m.TrainerLost(rank=rank, incarnation=who))
    cluster.done.clear()


def restarted(cluster: Cluster, who: m.Incarnation = AGAIN) -> list[m.WithdrawClaim]:
    """All trainers attach anew, and the storage takes no claim; what is asked back."""
    cluster.attach_all(who)
    assert len(cluster.take(m.ClaimTerm)) == 1
    cluster.tick(WAIT_S)
    return cluster.take(m.WithdrawClaim)


def gone_on(cluster: Cluster, who: m.Incarnation = AGAIN, attempt: int = 2) -> list[m.Resume]:
    """A restart without the storage, up to the moment when training begins."""
    (asked,) = restarted(cluster, who)
    cluster.tell(m.ClaimWithdrawn(incarnation=asked.incarnation))
    assert not [d for d in cluster.done if isinstance(d, m.WriteDecision | m.ClaimTerm)]
    assert [o.source.kind for o in cluster.take(m.RestoreShard)] == ["memory"] * 2
    cluster.verify_all(1, attempt)
    return cluster.take(m.Resume)


def test_a_restart_goes_on_in_its_term_from_memory() -> None:
    """Nothing is written for it, and what it saves has a new attempt."""
    cluster = saved()
    end_all(cluster)
    resumed = gone_on(cluster)
    assert [(r.term, r.generation, r.attempt) for r in resumed] == [(1, gen(1, 2), 1)] * 2
    for rank in range(2):
        cluster.request(rank, again(3), disk=True)
        cluster.seal(rank, again(3))
    for rank in range(2):
        cluster.persisted(rank, again(3))
    (commit,) = cluster.take(m.WriteCommit)
    assert (commit.generation, commit.parent) == (again(3), None)
    cluster.tell(m.CommitWritten(generation=again(3)))
    assert again(3) in cluster.coordinator.state.catalogue


def test_nodes_that_hold_shares_for_one_another_go_on_without_the_storage() -> None:
    """All of it is in memory, if not in the memory of one node; its slots are kept."""
    cluster = Cluster()
    cluster.start()
    cluster.save(gen(1, 1), disk=True, across_nodes=True)
    cluster.save(gen(1, 2), across_nodes=True)
    cluster.done.clear()
    end_all(cluster)
    (asked,) = restarted(cluster)
    cluster.tell(m.ClaimWithdrawn(incarnation=asked.incarnation))
    assert not [d for d in cluster.done if isinstance(d, m.WriteDecision | m.ClaimTerm)]
    assert [o.source.kind for o in cluster.take(m.RestoreShard)] == ["gather"] * 2
    cluster.verify_all(1, 2)
    assert [r.generation for r in cluster.take(m.Resume)] == [gen(1, 2)] * 2
    for rank in range(2):
        cluster.request(rank, again(3))
        cluster.request(rank, again(4))
        assert str(gen(1, 2)) in cluster.held(rank)


def test_it_does_so_again_with_an_attempt_of_its_own() -> None:
    """The storage hangs on, and the trainers die once more before they have saved anything."""
    cluster = saved()
    end_all(cluster)
    gone_on(cluster)
    end_all(cluster, AGAIN)
    third = m.Incarnation(launch_id="launch", restart_round=2)
    resumed = gone_on(cluster, third, attempt=3)
    assert [(r.generation, r.attempt) for r in resumed] == [(gen(1, 2), 2)] * 2


def test_the_claim_is_waited_for_first() -> None:
    """Storage that answers gets its term, as ever."""
    cluster = saved()
    end_all(cluster)
    cluster.attach_all(AGAIN)
    cluster.tick(1.0)
    assert not cluster.take(m.WithdrawClaim)
    cluster.claim(2, AGAIN, parents=(m.TermParent(term=1, parent=None),), ever_committed=True)
    (decision,) = cluster.take(m.WriteDecision)
    assert (decision.term, decision.generation) == (2, gen(1, 2))
    assert cluster.coordinator.state.held is None


def test_storage_that_refuses_is_as_storage_that_hangs() -> None:
    """It takes no claim, and nobody else holds it."""
    cluster = saved()
    end_all(cluster)
    cluster.attach_all(AGAIN)
    cluster.tell(m.TermRefused(incarnation=AGAIN, reason="read-only", failed=True))
    assert len(cluster.take(m.WithdrawClaim)) == 1


@pytest.mark.parametrize(
    ("who", "more"),
    [
        (m.Incarnation(launch_id="another", restart_round=0), {}),
        (AGAIN, {"fresh": True}),
        (AGAIN, {"resume_from": gen(1, 1)}),
    ],
)
def test_what_is_no_plain_restart_waits(who: m.Incarnation, more: dict[str, object]) -> None:
    """Another launch may find a living holder; a person's wish is about what is on disk."""
    cluster = saved()
    end_all(cluster)
    cluster.attach_all(who, **more)
    cluster.tick(WAIT_S)
    assert not cluster.take(m.WithdrawClaim)


def test_a_term_that_was_fenced_is_over() -> None:
    """Somebody has claimed since: the next start has to ask the directory."""
    cluster = saved()
    for rank in range(2):
        cluster.request(rank, gen(1, 3), disk=True)
        cluster.seal(rank, gen(1, 3))
        cluster.persisted(rank, gen(1, 3))
    cluster.tell(m.CommitFailed(generation=gen(1, 3), reason="a newer term", fenced=True))
    end_all(cluster)
    assert not restarted(cluster)


def test_a_trainer_that_lives_may_still_name_what_the_term_saves() -> None:
    """Its keeper has fenced it, and has not seen its end."""
    cluster = saved()
    (asked,) = restarted(cluster)
    cluster.tell(m.ClaimWithdrawn(incarnation=asked.incarnation))
    assert len(cluster.take(m.ClaimTerm)) == 1
    assert cluster.coordinator.state.phase == "claiming"


def test_a_new_keeper_has_not_seen_the_term() -> None:
    """Memory that it took over may lack what the one before had granted."""
    cluster = saved()
    end_all(cluster)
    held = cluster.nodes[1].state.ranks[1].slots.restorable_shards()
    cluster.replace(1)
    cluster.tell_node(1, m.SlotsAdopted(rank=1, slots=2, held=held))
    (asked,) = restarted(cluster)
    cluster.tell(m.ClaimWithdrawn(incarnation=asked.incarnation))
    assert len(cluster.take(m.ClaimTerm)) == 1


def test_a_commit_that_may_stand_is_not_left_behind() -> None:
    """It was ordered, nobody answered, and one shard of it in memory is bad."""
    cluster = saved(slots=3)
    for rank in range(2):
        cluster.request(rank, gen(1, 3), disk=True)
        cluster.seal(rank, gen(1, 3))
        cluster.persisted(rank, gen(1, 3))
    assert len(cluster.take(m.WriteCommit)) == 1
    end_all(cluster)
    slot = cluster.nodes[1].state.ranks[1].slots.sealed(gen(1, 3))
    assert slot is not None
    slot.worthless = True
    (asked,) = restarted(cluster)
    cluster.tell(m.ClaimWithdrawn(incarnation=asked.incarnation))
    assert len(cluster.take(m.ClaimTerm)) == 1


def test_a_commit_of_the_past_part_counts_when_it_stands() -> None:
    """The storage answers while the new trainers run."""
    cluster = saved()
    for rank in range(2):
        cluster.request(rank, gen(1, 3), disk=True)
        cluster.seal(rank, gen(1, 3))
        cluster.persisted(rank, gen(1, 3))
    end_all(cluster)
    assert [r.generation for r in gone_on(cluster)] == [gen(1, 3)] * 2
    cluster.tell(m.CommitWritten(generation=gen(1, 3)))
    assert gen(1, 3) in cluster.coordinator.state.catalogue
    assert [v.generation for v in cluster.take(m.VerifyGeneration)] == [gen(1, 3)]


def test_bad_memory_needs_the_storage_after_all() -> None:
    """What is left behind by a choice of an older one is written down first."""
    cluster = saved()
    end_all(cluster)
    (asked,) = restarted(cluster)
    cluster.tell(m.ClaimWithdrawn(incarnation=asked.incarnation))
    cluster.tell_node(1, m.ShardBad(rank=1, term=1, attempt=2, detail="differs"))
    assert len(cluster.take(m.ClaimTerm)) == 1
    cluster.claim(2, AGAIN, parents=(m.TermParent(term=1, parent=None),), ever_committed=True)
    (decision,) = cluster.take(m.WriteDecision)
    assert (decision.term, decision.generation) == (2, gen(1, 1))


def test_late_news_of_the_past_part_changes_nothing() -> None:
    """A drop that was under way when the trainers died is of what they have begun from."""
    cluster = saved()
    end_all(cluster)
    gone_on(cluster)
    dropped = m.GenerationDropped(generation=gen(1, 2), reason="a rank is lost", memory=True)
    cluster.tell_node(0, m.MessageReceived(from_node=0, message=dropped))
    assert str(gen(1, 2)) in cluster.held(0)


def test_what_was_in_pieces_is_free_for_the_next_save() -> None:
    """One rank had sealed a newer one when all died: it never becomes whole."""
    cluster = saved()
    cluster.request(0, gen(1, 3))
    cluster.seal(0, gen(1, 3))
    end_all(cluster)
    assert [r.generation for r in gone_on(cluster)] == [gen(1, 2)] * 2
    cluster.save(again(3))
    assert cluster.coordinator.state.memory_committed == again(3)


def test_a_new_coordinator_knows_where_the_trainers_began() -> None:
    """The keepers of the other nodes have been told."""
    chain = (
        m.TermParent(term=1, parent=gen(1, 2), attempt=1),
        m.TermParent(term=1, parent=None),
    )
    assert on_lineage(again(7), chain)
    assert on_lineage(gen(1, 2), chain)
    assert not on_lineage(gen(1, 3), chain)
    later = (m.TermParent(term=2, parent=again(7)), *chain)
    assert not on_lineage(gen(1, 3), later)
    assert not on_lineage(again(8), later)
    assert on_lineage(again(6), later)
