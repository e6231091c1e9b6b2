"""Shares of nodes or of the job: what is written and kept, and what a restart costs."""

from dataclasses import replace

import pytest

from autockpt.policies.cost_model.cost_curve import costs_of_plan
from autockpt.policies.decide import decide
from autockpt.policies.staging.shares import as_stored, choose_shares, once_bytes
from autockpt.values.goal import Goal, Pins
from autockpt.values.plan import Choice, Decision
from autockpt.values.profile import HeldElsewhere, LinkMeasure, Profile
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


def test_a_profile_of_a_job_that_shares_is_not_divided_again() -> None:
    """Its ranks store their shares already; the network is missing in what a restart takes."""
    profile = on_nodes(held=0.0)
    state = replace(profile.state, restored_bytes=4 * profile.state.total_bytes)
    assumed = replace(profile.recovery.restore_memory, source="derived")
    recovery = replace(profile.recovery, restore_memory=assumed)
    profile = replace(profile, state=state, recovery=recovery)
    taken = choose_shares(profile, JOB).profile
    assert taken.state == state
    assert taken.recovery.restore_memory.value_s > assumed.value_s
    seen = replace(recovery, restore_memory=replace(assumed, source="measured"))
    again = replace(profile, recovery=seen)
    assert choose_shares(again, JOB).profile.recovery == seen


def test_one_node_has_nothing_to_choose() -> None:
    """Its ranks share in any case."""
    assert decide(on_nodes(nodes=1), Goal()).choice("shares") is None
