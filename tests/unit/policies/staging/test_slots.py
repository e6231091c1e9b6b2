"""Slots: one per checkpoint in flight, one being filled, and the sealed one of the memory tier."""

import pytest

from autockpt.policies.default_plan import plan_without_profile
from autockpt.policies.staging.slots import choose_slots, slot_bytes, slots_for
from autockpt.values.errors import ConfigError
from autockpt.values.goal import Goal, Limits, Pins
from tests.support.profiles import example_profile

EACH = slot_bytes(example_profile())


@pytest.mark.parametrize(
    ("in_flight", "memory", "slots"),
    [
        (None, None, 3), (1, None, 3), (2, True, 4), (14, None, 16),
        (None, False, 1), (1, False, 2), (3, False, 4),
    ],
)  # fmt: skip
def test_each_checkpoint_in_flight_takes_a_slot(
    in_flight: int | None, memory: bool | None, slots: int
) -> None:
    """The default of three is one in flight; without the memory tier one image may have to do."""
    pins = Pins(in_flight=in_flight, memory_enabled=memory)
    assert slots_for(pins) == slots
    assert choose_slots(example_profile(), Goal(pins=pins)).slots == slots
    assert plan_without_profile(Goal(pins=pins)).slots == max(3, slots)


def test_the_reason_counts_the_uses() -> None:
    """What each slot is for, and what made them so many."""
    choice = choose_slots(example_profile(), Goal(pins=Pins(in_flight=4))).choice
    assert "one sealed, 4 being persisted, one being filled" in choice.reason
    assert choice.binding == "staging.in_flight"


def test_memory_for_fewer_slots_than_in_flight_is_refused() -> None:
    """A checkpoint keeps its slot until it is durable; one slot less than wanted is only slower."""
    pins = Pins(in_flight=3, memory_enabled=False)
    three = Goal(pins=pins, limits=Limits(host_memory_bytes=3 * EACH))
    assert choose_slots(example_profile(), three).slots == 3
    two = Goal(pins=pins, limits=Limits(host_memory_bytes=2 * EACH))
    with pytest.raises(ConfigError, match=r"staging\.in_flight 3 needs 3 images .* 2 slot"):
        choose_slots(example_profile(), two)


def test_pinned_slots_and_checkpoints_in_flight_must_go_together() -> None:
    """Both names and the nearest values that work."""
    goal = Goal(pins=Pins(in_flight=4, slots=3))
    with pytest.raises(ConfigError, match=r"nearest: memory\.slots 4 or staging\.in_flight 3"):
        choose_slots(example_profile(), goal)
    assert choose_slots(example_profile(), Goal(pins=Pins(in_flight=4, slots=4))).slots == 4
