"""Shares of nodes or of the job: what is written and kept, and what a restart costs."""

from collections.abc import Callable
from dataclasses import replace
from typing import Literal

import pytest

from autockpt.policies.cost_model.cost_curve import costs_of_plan
from autockpt.policies.decide import decide
from autockpt.policies.staging.shares import as_stored, choose_shares, once_bytes
from autockpt.values.goal import Goal, Pins
from autockpt.values.plan import Choice, Decision
from autockpt.values.profile import Distribution, HeldElsewhere, LinkMeasure, Profile
from tests.support.profiles import example_profile

JOB = Goal(pins=Pins(shares="job"))


def on_nodes(nodes: int = 4, *, held: float = 1.0, **more: object) -> Profile:
    """The example on nodes that all hold the part `held` of the state."""
    link = LinkMeasure(
        link="host_to_peer", alpha_s=1e-3, bytes_per_s=1e9, relative_spread=0.02, n=9,
        between_nodes=True,
    )  # fmt: skip
    profile = example_profile(links=(link,))
    alike = HeldElsewhere(nodes=tuple(range(1, nodes)), bytes=int(held * profile.state.total_bytes))
    profile = replace(
        profile,
        failures=replace(profile.failures, nodes=nodes),
        state=replace(profile.state, elsewhere=(alike,) if nodes > 1 and held else ()),
    )
    return replace(profile, **more)  # type: ignore[arg-type]


def shares(decision: Decision) -> Choice:
    """The choice that `explain` shows."""
    choice = decision.choice("shares")
    assert choice is not None
    return choice


def test_auto_is_node_and_shows_what_the_job_would_store() -> None:
    """A quarter on each of four nodes, and the other three quarters fetched at a restart."""
    profile = on_nodes()
    decision = decide(profile, Goal())
    assert decision.plan.staging.shares == "node"
    choice = shares(decision)
    assert (choice.chosen, choice.runner_up, choice.binding) == ("node", "job", "")
    assert choice.numbers["job_bytes"] == pytest.approx(choice.numbers["node_bytes"] / 4, rel=0.01)
    lost = choice.numbers["node_bytes"] - choice.numbers["job_bytes"]
    assert choice.numbers["fetch_s"] == pytest.approx(1e-3 + lost / 1e9)


@pytest.mark.parametrize("held", [0.0, 0.5, 1.0])
def test_only_what_nodes_hold_alike_shrinks(held: float) -> None:
    """FSDP holds nothing twice, HSDP all of it, tensor parallelism within a node a part."""
    state = on_nodes(held=held).state
    expected = state.total_bytes * (1 - 0.75 * held)
    assert once_bytes(state) == pytest.approx(expected, abs=2)


def test_a_job_that_shares_keeps_and_writes_less_and_restarts_slower() -> None:
    """Of the same profile: the plan's promise follows from the bytes that a node still has."""
    profile = on_nodes()
    alone, once = decide(profile, Goal()), decide(profile, JOB)
    assert once.plan.staging.shares == "job"
    assert shares(once).binding == "staging.shares"
    assert once.expected.persist_s < 0.5 * alone.expected.persist_s
    assert once.expected.checkpoint_waste < alone.expected.checkpoint_waste
    taken = choose_shares(profile, JOB).profile
    assert taken.state.total_bytes == once_bytes(profile.state)
    before, after = (p.recovery.restore_memory.value_s for p in (profile, taken))
    assert after == pytest.approx(before + shares(once).numbers["fetch_s"])


def test_curves_and_the_start_of_a_run_reckon_with_the_same_bytes() -> None:
    """What `decide` promises is what the cost of its plan is."""
    profile = on_nodes()
    once = decide(profile, JOB)
    assert costs_of_plan(profile, JOB, once.plan).persist_s == once.expected.persist_s
    assert as_stored(as_stored(profile, JOB), JOB).state == as_stored(profile, JOB).state


def test_copies_of_shares_cross_the_network_whole() -> None:
    """No replica on another node saves the way, but there is less to copy."""
    taken = choose_shares(on_nodes(), JOB).profile
    assert taken.state.elsewhere == ()


def of_a_job(source: Literal["derived", "measured"] = "derived") -> Profile:
    """The same state as `on_nodes`, as measured where four nodes store it once."""
    profile = on_nodes()
    memory = replace(profile.recovery.restore_memory, source=source)
    assert profile.persist_s is not None
    state, whole = profile.state, profile.state.total_bytes
    return replace(
        profile,
        state=replace(
            state, total_bytes=whole // 4, lazy_bytes=whole // 4 - state.boundary_bytes,
            elsewhere=(), restored_bytes=whole,
        ),
        persist_s=_quarter(profile.persist_s),
        snapshot_s=None if profile.snapshot_s is None else _quarter(profile.snapshot_s),
        recovery=replace(profile.recovery, restore_memory=memory),
    )  # fmt: skip


def _quarter(measured: Distribution) -> Distribution:
    return Distribution(
        n=measured.n, mean=measured.mean / 4, p10=measured.p10 / 4, p50=measured.p50 / 4,
        p90=measured.p90 / 4, p95=measured.p95 / 4,
    )  # fmt: skip


def test_a_profile_of_a_job_that_shares_is_not_divided_again() -> None:
    """Its ranks store their shares already; the network is missing in what a restart takes."""
    profile = of_a_job()
    taken = as_stored(profile, JOB)
    assert taken.state.total_bytes == profile.state.total_bytes
    before, after = (p.recovery.restore_memory.value_s for p in (profile, taken))
    assert after > before
    seen = of_a_job("measured")
    assert as_stored(seen, JOB).recovery == seen.recovery


@pytest.mark.parametrize("goal", [JOB, Goal()], ids=["job", "node"])
@pytest.mark.parametrize("made", [on_nodes, of_a_job])
def test_what_is_reckoned_as_stored_stays_so(made: Callable[[], Profile], goal: Goal) -> None:
    """A start reckons several times, and a fetch is waited for once."""
    once = as_stored(made(), goal)
    assert as_stored(once, goal) == once


def test_a_plan_by_node_from_a_profile_of_the_job_counts_all_bytes() -> None:
    """It promises what a profile of the same job by node does, not a quarter."""
    alone, once = decide(on_nodes(), Goal()), decide(of_a_job(), Goal())
    assert once.expected.persist_s == pytest.approx(alone.expected.persist_s, rel=0.01)
    assert as_stored(of_a_job(), Goal()).state.total_bytes == on_nodes().state.total_bytes
    assert shares(once).chosen == "node"
    assert "measured with staging.shares: job" in shares(once).reason
    one = of_a_job()
    one = replace(one, failures=replace(one.failures, nodes=1))
    assert as_stored(one, JOB).state.total_bytes == one.state.restored_bytes


def test_as_measured_is_said_only_of_what_was_measured() -> None:
    """FSDP over all nodes has no replicas, and a profile of one may know of none."""
    assert "as measured" in shares(decide(of_a_job(), JOB)).reason
    assert shares(decide(on_nodes(held=0.0), JOB)).reason.startswith("nothing is known to be held")


def test_one_node_has_nothing_to_choose() -> None:
    """Its ranks share in any case."""
    assert decide(on_nodes(nodes=1), Goal()).choice("shares") is None
