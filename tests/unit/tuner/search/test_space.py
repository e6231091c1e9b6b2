"""What may be chosen: every candidate is allowed, or there is a reason."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autockpt.policies.staging.slots import slot_bytes
from autockpt.tuner.search.outcome import model_of
from autockpt.tuner.search.space import CHUNKS_BYTES, MIB, WRITERS, Space
from autockpt.values.errors import ConfigError
from autockpt.values.goal import Goal, Limits, Pins
from autockpt.values.plan import MOST_IN_FLIGHT
from tests.support.profiles import example_state
from tests.unit.tuner.search.machines import SAMPLE_BYTES, changed, job, model


def space(goal: Goal, *, sample_bytes: int = SAMPLE_BYTES, **fields: object) -> Space:
    return model_of(job(**fields), goal, sample_bytes=sample_bytes).space


PINS = st.builds(
    Pins,
    writers=st.none() | st.sampled_from([1, 2, 3, 8]),
    chunk_bytes=st.none() | st.sampled_from([MIB, 8 * MIB]),
    direct_io=st.none() | st.booleans(),
    codec=st.none() | st.sampled_from(["none", "zstd"]),
    slots=st.none() | st.sampled_from([2, 3, 5]),
    in_flight=st.none() | st.sampled_from([1, 2]),
)


@settings(max_examples=40, deadline=None)
@given(pins=PINS)
def test_what_is_allowed_keeps_every_pin(pins: Pins) -> None:
    """And the default is among it, with at least one number of slots for each."""
    found = space(Goal(pins=pins))
    allowed = [way for way in found.candidates() if not found.refusal(way)]
    assert found.default in allowed
    for way in allowed:
        for pin, value in (
            (pins.writers, way.writers),
            (pins.chunk_bytes, way.chunk_bytes),
            (pins.direct_io, way.direct_io),
            (pins.codec, way.codec),
        ):
            assert pin is None or pin == value
        assert found.slots(way)
        assert all(pins.slots in (None, n) for n in found.slots(way))


def test_refusals_and_allowed_ways_add_up() -> None:
    """Nothing is left out without a reason."""
    found = space(Goal(pins=Pins(codec="none")))
    everything = len(CHUNKS_BYTES) * len(WRITERS) * 2 * 2
    assert len(found.candidates()) == everything
    assert len(found.allowed()) + sum(found.refusals().values()) == everything
    assert found.refusals()["pinned by disk.codec"] == everything // 2


def test_a_sample_of_few_chunks_is_not_measured() -> None:
    """64 MiB by eight writers would need a gigabyte to mean anything."""
    found = space(Goal())
    big = changed(found.default, chunk_bytes=64 * MIB, writers=8)
    assert "not two chunks a writer in a measured sample of 134 MB" in found.refusal(big)
    assert "the whole state" in space(Goal(), state=example_state(SAMPLE_BYTES)).refusal(big)
    assert not found.refusal(changed(found.default, chunk_bytes=16 * MIB, writers=4))


def test_buffers_of_a_codec_count_against_the_host_memory() -> None:
    """Eight writers with two frames of 8 MiB each do not fit where three images just do."""
    room = 3 * slot_bytes(job())
    goal = Goal(limits=Limits(host_memory_bytes=room), pins=Pins(slots=3))
    found = space(goal)
    heavy = changed(found.default, chunk_bytes=8 * MIB, writers=8, codec="zstd")
    assert "limits.host_memory" in found.refusal(heavy)
    assert not found.refusal(replace(heavy, codec="none"))
    roomy = space(replace(goal, pins=Pins()))
    assert 3 not in roomy.slots(heavy)
    assert not roomy.refusal(heavy)


def test_as_many_images_as_checkpoints_in_flight() -> None:
    """Fewer would hold fewer than the policy asks for."""
    found = space(Goal(pins=Pins(in_flight=3)))
    assert all(min(found.slots(way)) >= 3 for way in found.allowed())
    assert MOST_IN_FLIGHT >= 3


def test_everything_pinned_leaves_nothing_to_tune() -> None:
    """The error names what binds and what would help most."""
    pins = Pins(writers=2, chunk_bytes=8 * MIB, direct_io=True, codec="none")
    with pytest.raises(ConfigError, match=r"nothing to tune.*pinned by disk\.writers.*nearest: "):
        model(None, **{name: getattr(pins, name) for name in ("writers", "chunk_bytes")},
              direct_io=True, codec="none").space.allowed()  # fmt: skip
