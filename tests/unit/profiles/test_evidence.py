"""Evidence of others: what fades, what is lost together, who fails again and again."""

import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autockpt.profiles.evidence import (
    DAY_S,
    Evidence,
    imported_evidence,
    repeat_offenders,
    simultaneous,
)
from autockpt.profiles.failures import (
    CLASS_PRIOR,
    JOB_PRIOR,
    NODE_PRIOR,
    TOGETHER_PRIOR,
    estimate_rates,
    with_history,
)
from autockpt.profiles.imports import own_log
from autockpt.values.failure import Exposure, FailureHistory, FailureRecord, Incident
from autockpt.values.record import from_json, to_json
from tests.support.profiles import example_failures


def history(*incidents: Incident, days: float = 100.0, nodes: int = 10, jobs: float = 1.0):
    """That many days of that many nodes, watched from 0 on."""
    length_s = days * DAY_S
    exposure = Exposure(begin_s=0.0, end_s=length_s, node_s=nodes * length_s, job_s=jobs * length_s)
    return FailureHistory(source="test", incidents=incidents, exposures=(exposure,))


def lost(at_days: float, *nodes: str) -> Incident:
    kind = "nodes" if len(nodes) > 1 else "node"
    return Incident(at_s=at_days * DAY_S, kind=kind, nodes=nodes)


def test_a_history_is_counted_in_node_days_and_job_days():
    """Two nodes and one process in 1000 node-days and 100 job-days, without forgetting."""
    process = Incident(at_s=50 * DAY_S, kind="process")
    found = estimate_rates(
        (),
        nodes=64,
        half_life_s=None,
        histories=(history(lost(10, "a"), process, lost(90, "b")),),
    )
    assert (found.per_node.events, found.per_job.events) == (2, 1)
    assert found.per_node.shape == NODE_PRIOR.shape + 2
    assert found.per_node.mean_per_day == pytest.approx(3 / 1250, rel=0.02)
    assert found.per_job.mean_per_day == pytest.approx(2 / 110, rel=0.02)
    assert found.classes["node"] == CLASS_PRIOR["node"] + 2
    assert found.process_share == pytest.approx(4.5 / 13)
    assert found.together[0] == TOGETHER_PRIOR[0] + 2


def test_a_quiet_record_lowers_both_rates_and_keeps_the_mix():
    """Exposure without events is censored, not ignored."""
    found = estimate_rates((), nodes=1, histories=(history(),))
    assert found.per_node.mean_per_day < NODE_PRIOR.mean_per_day
    assert found.per_job.mean_per_day < JOB_PRIOR.mean_per_day
    assert found.process_share == pytest.approx(0.35)


def test_a_record_of_nodes_only_leaves_the_jobs_rate_and_the_mix_alone():
    """A kernel log does not know what jobs died of."""
    found = estimate_rates((), nodes=1, histories=(history(lost(5, "a"), jobs=0.0),))
    assert found.per_job.mean_per_day == JOB_PRIOR.mean_per_day
    assert found.process_share == pytest.approx(0.35)
    assert found.together[0] > TOGETHER_PRIOR[0]


def test_a_process_that_died_with_a_named_node_counts_against_the_node():
    """A contained memory error of a GPU: hardware, but the node's memory lives."""
    one = Incident(at_s=DAY_S, kind="process", nodes=("a",))
    found = imported_evidence(history(one), half_life_s=None)
    assert (found.node_events, found.job_events) == (1.0, 0.0)
    assert found.classes == {"process": 1.0}
    assert found.together == (0.0, 0.0, 0.0, 0.0)


@settings(max_examples=50)
@given(st.floats(min_value=1.0, max_value=1000.0), st.floats(min_value=0.0, max_value=1.0))
def test_fading_never_invents_evidence(days, place):
    """Faded counts lie between nothing and the full count, exposure included."""
    record = history(lost(days * place, "a"), days=days)
    faded = imported_evidence(record, half_life_s=21 * DAY_S)
    full = imported_evidence(record, half_life_s=None)
    assert 0.0 <= faded.node_events <= full.node_events == 1.0
    assert 0.0 < faded.node_days <= full.node_days * (1 + 1e-9)
    assert faded.node_count == 1


def test_a_profile_takes_a_record_as_what_it_is_beside_what_it_knew():
    """The posterior of the profile is the prior of the record, old profiles without classes too."""
    before = example_failures(mtbf_s=10 * DAY_S, process_share=0.6, nodes=4, shape=5.0)
    after = with_history(before, history(), half_life_s=None)
    assert after.interruptions_per_s < before.interruptions_per_s
    assert after.process_share == pytest.approx(0.6)
    assert after.nodes == 4
    bad = history(*(lost(99 + i / 10, "a") for i in range(8)))
    assert with_history(before, bad).interruptions_per_s > before.interruptions_per_s


def test_losses_within_ten_minutes_are_one_group_by_names():
    """A node that is reported twice counts once, nameless ones one each."""
    minute = 60.0
    incidents = (
        Incident(at_s=0.0, kind="node", nodes=("a",)),
        Incident(at_s=2 * minute, kind="nodes", nodes=("a", "b")),
        Incident(at_s=9 * minute, kind="node"),
        Incident(at_s=9 * minute, kind="process"),
        Incident(at_s=30 * minute, kind="node", nodes=("c",)),
    )
    assert simultaneous(incidents) == [(3, 0.0), (1, 30 * minute)]


def test_independent_failures_are_rarely_taken_for_simultaneous_ones():
    """400 nodes at 4 per 1000 node-days: about 1 % within 10 min, as Poisson says."""
    chance, at_s, incidents = random.Random(0), 0.0, []
    for _ in range(5000):
        at_s += chance.expovariate(1.6 / DAY_S)
        node = f"n{chance.randrange(400)}"
        incidents.append(Incident(at_s=at_s, kind="node", nodes=(node,)))
    groups = simultaneous(incidents)
    several = sum(count > 1 for count, _ in groups) / len(groups)
    assert several == pytest.approx(1.6 / 144, rel=0.3)


def test_a_node_that_fails_far_more_often_than_the_others_is_an_offender():
    """Five of eleven failures on one of 64 nodes; three by chance in a large fleet are not."""
    few = [lost(day, f"n{day}") for day in range(6)]
    bad = [lost(10 + day, "bad") for day in range(5)]
    assert repeat_offenders(history(*few, *bad), nodes=64) == {"bad": 5}
    many = [lost(day / 10, f"n{day % 100}") for day in range(250)]
    assert repeat_offenders(history(*many), nodes=100) == {}


def test_a_small_fleet_needs_more_than_three_failures_of_one_node():
    """Three on one of two nodes are a coin that fell alike; ten are not.  One node has no equal."""
    thrice, often = ([lost(day, "a") for day in range(n)] for n in (3, 10))
    assert repeat_offenders(history(*thrice), nodes=2) == {}
    assert repeat_offenders(history(*thrice), nodes=64) == {"a": 3}
    assert repeat_offenders(history(*often), nodes=2) == {"a": 10}
    assert repeat_offenders(history(*often), nodes=1) == {}
    assert repeat_offenders(history(*often, lost(20, "b")), nodes=1) == {}
    assert repeat_offenders(history(*often, lost(20, "b")), nodes=2) == {}
    assert repeat_offenders(history(), nodes=2) == {}


@settings(max_examples=50)
@given(st.integers(1, 40), st.integers(2, 200))
def test_the_chance_of_an_offender_is_that_of_a_fleet_of_equal_nodes(events, nodes):
    """Exact, from whole numbers: all that failed elsewhere failed once on each node."""
    elsewhere = [lost(50 + n, f"n{n}") for n in range(min(nodes - 1, 20))]
    total = events + len(elsewhere)
    ways = sum(math.comb(total, k) * (nodes - 1) ** (total - k) for k in range(events, total + 1))
    found = repeat_offenders(history(*(lost(n, "a") for n in range(events)), *elsewhere),
                             nodes=nodes)  # fmt: skip
    chance = nodes * ways / nodes**total
    assert (found == {"a": events}) == (events >= 3 and chance < 0.01)


def test_a_history_and_rates_survive_their_files():
    """JSON there and back; a profile written before there were classes is read as well."""
    record = history(lost(1, "a", "b"), Incident(at_s=2.0, kind="silent"))
    assert from_json(FailureHistory, to_json(record)) == record
    rates = estimate_rates((), nodes=2, histories=(record,))
    assert from_json(type(rates), to_json(rates)) == rates
    old = to_json(rates).partition(',"classes"')[0] + "}"
    assert from_json(type(rates), old).classes == {}


def test_evidence_adds_up():
    """Two records together are the sum of both."""
    one = imported_evidence(history(lost(1, "a")), half_life_s=None)
    two = imported_evidence(history(lost(1, "b"), lost(2, "b", "c")), half_life_s=None)
    both = one + two
    assert both.node_events == 3.0
    assert both.together == (2.0, 1.0, 0.0, 0.0)
    assert both + Evidence() == both


def test_losses_of_one_node_are_not_nodes_lost_together() -> None:
    """Three of the only node within minutes; two nodes in one interruption are two."""

    def lost(node: int, term: int) -> str:
        record = FailureRecord(
            wall="", kind="node", what="keeper+trainer", node=node, step=9, exposure_s=60.0,
            term=term,
        )  # fmt: skip
        return to_json(record)

    alone = own_log.read("\n".join(lost(0, term) for term in (2, 3, 4)), where="x", nodes=1)
    assert [count for count, _ in simultaneous(alone.incidents)] == [1]
    both = own_log.read("\n".join([lost(0, 2), lost(3, 2)]), where="x", nodes=4)
    assert [count for count, _ in simultaneous(both.incidents)] == [2]
