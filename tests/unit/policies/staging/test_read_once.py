"""Whether one node reads for all, from rates of the link and the store."""

from dataclasses import replace

import pytest

from autockpt.policies.decide import decide
from autockpt.policies.default_plan import plan_without_profile
from autockpt.policies.staging.read_once import choose_read_once
from autockpt.values.goal import Goal, Pins
from autockpt.values.profile import LinkMeasure, Profile
from tests.support.profiles import example_profile

STORE = Goal(storage_path="s3://bucket/run")


def on_nodes(link_bytes_per_s: float | None, *, nodes: int = 4, between: bool = True) -> Profile:
    """The example on nodes whose link was measured, or not; its store is read at 1 to 3 GB/s."""
    links = ()
    if link_bytes_per_s is not None:
        links = (
            LinkMeasure(
                link="host_to_peer", alpha_s=1e-3, bytes_per_s=link_bytes_per_s,
                relative_spread=0.02, n=9, between_nodes=between,
            ),
        )  # fmt: skip
    profile = example_profile(links=links)
    reads = tuple(replace(one, operation="read") for one in profile.storage)
    return replace(
        profile,
        fingerprint=replace(profile.fingerprint, storage="s3://bucket"),
        failures=replace(profile.failures, nodes=nodes),
        storage=(*profile.storage, *reads),
    )


def fastest(profile: Profile) -> float:
    """What a node reads from the store at best."""
    return max(one.bytes_per_s.p50 for one in profile.storage if one.operation == "read")


@pytest.mark.parametrize(
    ("factor", "between", "chosen"),
    [(None, True, "once"), (1.1, True, "once"), (0.9, True, "each"), (0.9, False, "once")],
)
def test_a_link_that_is_known_to_be_slower_is_not_used(
    factor: float | None, between: bool, chosen: str
) -> None:
    """A link within one node says nothing."""
    rate = None if factor is None else factor * fastest(on_nodes(None))
    choice = choose_read_once(on_nodes(rate, between=between), STORE)
    assert choice is not None
    assert (choice.chosen, choice.binding) == (chosen, "")


@pytest.mark.parametrize("pin", [True, False])
def test_a_pin_holds_with_and_without_a_profile(pin: bool) -> None:
    """Whatever the link is."""
    goal = replace(STORE, pins=Pins(read_once=pin))
    choice = choose_read_once(on_nodes(1.0), goal)
    assert choice is not None
    assert (choice.chosen, choice.binding) == ("once" if pin else "each", "disk.read_once")
    assert plan_without_profile(goal).read_once is pin
    assert plan_without_profile(STORE).read_once


def test_a_plan_has_the_choice_where_nodes_share_a_store() -> None:
    """And no line about it elsewhere."""
    decided = decide(example_profile(), Goal())
    assert decided.choice("read_once") is None
    assert decided.plan.read_once
    assert choose_read_once(on_nodes(1.0), Goal()) is None
    assert choose_read_once(on_nodes(1.0, nodes=1), STORE) is None
    slow = decide(on_nodes(1.0), STORE)
    assert slow.choice("read_once") is not None
    assert not slow.plan.read_once
