"""Plan changes, step by step, and the wire format of every message."""

import dataclasses
import json
import typing

import pytest

from autockpt.executors.protocol import messages as m
from autockpt.executors.protocol.deadlines import Deadlines
from autockpt.values.errors import ConfigError, ProtocolError
from autockpt.values.goal import Retention
from autockpt.values.record import to_data
from tests.simulation.cluster import LAUNCH, Cluster
from tests.simulation.test_simulation import recorded


def proposed() -> Cluster:
    """Two running ranks that were handed plan 1."""
    cluster = Cluster()
    cluster.start()
    cluster.done = []
    cluster.tell_node(1, m.PlanProposed(version=1, payload={"interval": 7}))
    return cluster


def test_a_plan_applies_beyond_the_furthest_rank() -> None:
    """Steps 10 and 12, margin 3: both switch at 15."""
    cluster = proposed()
    assert [(p.rank, p.payload["interval"]) for p in cluster.take(m.PreparePlan)] == [
        (0, 7),
        (1, 7),
    ]
    cluster.tell_node(0, m.PlanPrepared(rank=0, version=1, step=10))
    assert cluster.take(m.ApplyPlan) == []
    cluster.tell_node(1, m.PlanPrepared(rank=1, version=1, step=12))
    assert [(a.rank, a.apply_step) for a in cluster.take(m.ApplyPlan)] == [(0, 15), (1, 15)]


def test_what_a_plan_keeps_is_kept_from_its_switch_on() -> None:
    """Not before all ranks took it; and what cannot be read changes nothing."""
    for wanted, kept in ((to_data(Retention(keep_last=2)), 2), ("nonsense", 1)):
        cluster = Cluster()
        cluster.start()
        cluster.tell_node(1, m.PlanProposed(version=1, payload={"retention": wanted}))
        cluster.tell_node(0, m.PlanPrepared(rank=0, version=1, step=10))
        assert cluster.coordinator.state.retention.keep_last == 1
        cluster.tell_node(1, m.PlanPrepared(rank=1, version=1, step=12))
        assert cluster.coordinator.state.retention.keep_last == kept
        assert cluster.take(m.ApplyPlan)


def test_a_lost_rank_or_a_deadline_withdraws_the_plan() -> None:
    """Nobody is held for ever."""
    for end in ("lost", "late"):
        cluster = proposed()
        cluster.tell_node(0, m.PlanPrepared(rank=0, version=1, step=10))
        cluster.done = []
        if end == "lost":
            cluster.tell_node(1, m.TrainerLost(rank=1, incarnation=LAUNCH))
        else:
            cluster.tick(11)
        assert 0 in [a.rank for a in cluster.take(m.AbortPlan)]
        cluster.tell_node(1, m.PlanPrepared(rank=1, version=1, step=12))
        assert cluster.take(m.ApplyPlan) == []


def test_a_stop_is_the_first_boundary_that_all_ranks_can_meet() -> None:
    """Steps 10 and 12: both stop at 13, and no plan comes behind that."""
    cluster = Cluster()
    cluster.start()
    cluster.tell_node(1, m.PlanProposed(version=m.STOP_VERSION, payload={"stop": 15}))
    cluster.tell_node(0, m.PlanProposed(version=m.STOP_VERSION, payload={"stop": 15}))
    assert {a.margin_steps for a in cluster.take(m.PreparePlan)} == {1}
    for rank, step in ((0, 10), (1, 12)):
        cluster.tell_node(rank, m.PlanPrepared(rank=rank, version=m.STOP_VERSION, step=step))
    assert [(a.rank, a.apply_step) for a in cluster.take(m.ApplyPlan)] == [(0, 13), (1, 13)]
    cluster.done = []
    cluster.tell_node(0, m.PlanProposed(version=7, payload={}))
    assert cluster.take(m.PreparePlan) == []


@pytest.mark.parametrize("plans", [0, 1])
def test_a_stop_that_not_all_ranks_can_meet_is_refused_at_once(plans: int) -> None:
    """A rank is lost: those that wait for an answer save what is in memory, and leave."""
    cluster = proposed() if plans else Cluster()
    if not plans:
        cluster.start()
    cluster.tell_node(1, m.TrainerLost(rank=1, incarnation=LAUNCH))
    cluster.done = []
    cluster.tell_node(0, m.PlanProposed(version=m.STOP_VERSION, payload={"stop": 15}))
    assert [(a.rank, a.reason) for a in cluster.take(m.AbortPlan)] == [(0, "a rank is lost")]


def test_a_verdict_that_was_lost_is_asked_for_again() -> None:
    """Rank 1 holds; its question reaches the coordinator when the network is back."""
    cluster = proposed()
    cluster.tell_node(1, m.PlanPrepared(rank=1, version=1, step=12))
    cluster.cut = {1}
    cluster.tell_node(0, m.PlanPrepared(rank=0, version=1, step=10))
    cluster.cut = set()
    cluster.done = []
    cluster.tick(6)
    assert [(a.rank, a.apply_step) for a in cluster.take(m.ApplyPlan)] == [(1, 15)]


def test_a_rank_that_did_not_wait_moves_the_switch() -> None:
    """It broke its promise; those that have not switched yet move on with it."""
    cluster = proposed()
    for rank in (0, 1):
        cluster.tell_node(rank, m.PlanPrepared(rank=rank, version=1, step=10))
    cluster.done = []
    cluster.tell_node(1, m.PlanLate(rank=1, version=1, step=14))
    done = cluster.done
    assert [d.kind for d in done if isinstance(d, m.Report)] == ["violation"]
    assert {d.apply_step for d in done if isinstance(d, m.ApplyPlan)} == {17}


def test_an_older_or_repeated_proposal_is_ignored() -> None:
    """Versions only grow."""
    cluster = proposed()
    cluster.done = []
    cluster.tell(m.PlanProposed(version=1, payload={}))
    assert cluster.take(m.PreparePlan) == []


RARE = (
    m.TermFenced(incarnation=LAUNCH, term=3, reason="term 4 exists"),
    m.Relayed(incarnation=LAUNCH, term=3, event=m.PlanLate(rank=1, version=2, step=40)),
)


def test_wire_messages_survive_json() -> None:
    """Every message of whole runs is the same after a trip through JSON; every type occurs."""
    examples: dict[type, m.WireMessage] = {type(message): message for message in RARE}
    for seed in range(60):
        for _, event in recorded(seed):
            if isinstance(event, m.MessageReceived):
                examples.setdefault(type(event.message), event.message)
    assert set(examples) == {*m.TO_COORDINATOR, *m.TO_NODE}
    for message in examples.values():
        text = json.dumps(m.message_to_data(message))
        assert m.message_from_data(json.loads(text)) == message


@pytest.mark.parametrize(
    "event",
    [
        m.BreakpointRequested(reason="SIGTERM"),
        m.PlanProposed(version=2, payload={"interval": 7}),
        m.PlanPrepared(rank=1, version=2, step=40),
        m.PlanLate(rank=1, version=2, step=40),
    ],
)
def test_a_relayed_event_arrives_as_it_was(event: m.Relayable) -> None:
    """Two kinds have the same fields: the frame names the kind."""
    relayed = m.Relayed(incarnation=LAUNCH, term=3, event=event)
    data = json.loads(json.dumps(m.message_to_data(relayed)))
    assert m.message_from_data(data) == relayed
    for wrong in ({"type": "TrainerLost", "body": {}}, {"type": "PlanLate"}, {}):
        with pytest.raises(ProtocolError, match="no event that a node relays"):
            m.message_from_data({**data, "body": {**data["body"], "event": wrong}})


def test_a_foreign_message_is_refused() -> None:
    """Unknown types and fields are errors for the connection, not for the machines."""
    with pytest.raises(ProtocolError, match="no wire message"):
        m.message_from_data({"type": "Exec", "body": {}})
    with pytest.raises(ConfigError, match="unknown field"):
        m.message_from_data({"type": "PersistWanted", "body": {"generation": None, "x": 1}})


def test_every_field_of_an_event_is_a_value() -> None:
    """Frozen, keyword-only, slotted: nothing in the vocabulary can be changed after the fact."""
    kinds = typing.get_args(m.NodeEvent) + typing.get_args(m.CoordinatorEvent)
    kinds += typing.get_args(m.NodeInstruction) + typing.get_args(m.CoordinatorInstruction)
    for kind in (*kinds, *m.TO_COORDINATOR, *m.TO_NODE):
        assert dataclasses.is_dataclass(kind), kind
        assert kind.__dataclass_params__.frozen, kind  # type: ignore[attr-defined]
        assert kind.__doc__, kind


def test_a_deadline_must_be_positive() -> None:
    """A wait of zero is a mistake in the configuration."""
    with pytest.raises(ConfigError, match="deadline plan_s = 0"):
        Deadlines(plan_s=0)
