"""Codec by class: what pays on which storage, in a pipeline and in series, beside a training."""

from dataclasses import replace

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from autockpt.policies.codec import ADVANTAGE, FELT, Pipe
from autockpt.policies.cost_model.cost_curve import costs_of_plan
from autockpt.policies.decide import decide
from autockpt.values.goal import Goal, Limits, Pins
from autockpt.values.plan import Choice, Decision
from autockpt.values.profile import CodecMeasure, Profile
from tests.support.profiles import (
    MIB,
    beside_training,
    example_profile,
    example_storage,
    storage_measure,
)

RATES = st.floats(1e6, 1e11)
RATIOS = st.floats(0.5, 50.0)


def measured(
    name: str = "parameters", ratio: float = 1.22, encode: float = 1.5e9, codec: str = "planes"
) -> CodecMeasure:
    """Planes on fp32 tensors, as docs/concepts/compression.md has them."""
    return CodecMeasure(
        codec=codec, tensor_class=name, ratio=ratio, encode_bytes_per_s=encode,  # type: ignore[arg-type]
        decode_bytes_per_s=1.6e9, sample_bytes=16 * MIB,
    )  # fmt: skip


def deltas(gap_steps: int) -> tuple[CodecMeasure, ...]:
    """Planes, and differences to a base this many iterations away."""
    near = [replace(measured(name, ratio, 1.0e9, "delta"), gap_steps=gap_steps)
            for name, ratio in (("parameters", 1.6), ("moments", 1.15))]  # fmt: skip
    return (measured(), measured("moments", 1.21), *near)


def job(
    gb_per_s: float,
    *,
    worth: float | None = 2.0,
    slowdown: float = 0.0,
    codecs: tuple[CodecMeasure, ...] = (),
) -> Profile:
    """A job on storage of this speed, which leaves two encoders what they are worth."""
    codecs = codecs or (measured(), measured("moments", 1.21))
    made = example_profile(storage=example_storage(peak_gb_per_s=gb_per_s), codecs=codecs)
    return beside_training(made, worth=worth, slowdown=slowdown)


def codec_of(decision: Decision) -> tuple[dict[str, str], Choice]:
    """What was chosen, and why."""
    choice = next(one for one in decision.choices if one.name == "codec")
    return decision.plan.tier("disk").codec, choice


@pytest.mark.parametrize(("worth", "slowdown"), [(2.0, 0.0), (0.5, 0.3), (None, 0.0)])
def test_storage_of_50_mb_a_second_is_compressed_for(worth: float | None, slowdown: float) -> None:
    """Encoding takes 4 % of a core there: no core need be idle, nor known to be, for that."""
    codec, choice = codec_of(decide(job(0.05, worth=worth, slowdown=slowdown), Goal()))
    assert codec == {"parameters": "planes", "moments": "planes"}
    assert "a ratio of 1.21" in choice.reason
    assert choice.numbers["moments_busy_cores"] < 0.1


def test_a_fast_disk_gets_bytes_as_they_are_and_the_numbers_say_why() -> None:
    """A plain write at 2 GB/s is faster than any encoder here."""
    codec, choice = codec_of(decide(job(2.0), Goal()))
    assert codec == {}
    assert choice.runner_up == "planes"
    assert "it must beat that by 5 %" in choice.reason
    assert choice.numbers["moments_bytes_per_s"] < ADVANTAGE * choice.numbers["link_bytes_per_s"]


def test_the_shortest_possible_interval_shrinks_by_the_ratio() -> None:
    """A checkpoint cannot come before the one before is durable: that time falls by the ratio."""
    slow, goal = job(0.05), Goal()
    unpressed = Goal(pins=Pins(codec="none"))
    planes = costs_of_plan(slow, goal, decide(slow, goal).plan)
    none = costs_of_plan(slow, unpressed, decide(slow, unpressed).plan)
    assert none.persist_s / planes.persist_s == pytest.approx(1.21, rel=0.02)
    assert planes.stall_s == none.stall_s


@pytest.mark.parametrize(("gb_per_s", "writers"), [(0.05, 2), (2.0, 1)])
def test_one_writer_encodes_while_another_writes(gb_per_s: float, writers: int) -> None:
    """Storage that one writer fills gets two where they encode, and one where they do not."""
    grid = tuple(storage_measure(gb_per_s=gb_per_s, writers=n) for n in (1, 2, 4))
    plan = decide(replace(job(gb_per_s), storage=grid), Goal()).plan
    assert bool(plan.tier("disk").codec) == (writers == 2)
    assert plan.staging.writers == writers


def test_classes_are_chosen_one_by_one() -> None:
    """Half-precision weights shrink by a third, noise does not shrink."""
    codecs = (measured(ratio=1.55, encode=1.0e9), measured("moments", 1.01))
    assert codec_of(decide(job(0.5, codecs=codecs), Goal()))[0] == {"parameters": "planes"}


@pytest.mark.parametrize(
    ("worth", "slowdown", "encoded"),
    [
        (2.0, 0.0, True),
        (2.0, 0.05, True),
        (2.0, 0.5, False),
        (0.6, 0.0, False),
        (None, 0.0, False),
    ],
    ids=["idle cores", "hardly felt", "felt", "too slow beside the training", "not measured"],
)
def test_at_500_mb_a_second_it_depends_on_what_the_training_leaves(
    worth: float | None, slowdown: float, encoded: bool
) -> None:
    """A core encodes at 1.5 GB/s when nobody else wants it; that is not what decides."""
    codec, choice = codec_of(decide(job(0.5, worth=worth, slowdown=slowdown), Goal()))
    assert bool(codec) == encoded
    assert "beside the training" in choice.reason


@pytest.mark.parametrize(
    "goal",
    [Goal(pins=Pins(codec="planes")), Goal(limits=Limits(disk_bytes=3_400_000_000))],
    ids=["pinned", "for room"],
)
def test_encoders_that_got_nothing_done_are_reckoned_as_unmeasured_ones(goal: Goal) -> None:
    """They pay nowhere; who asks for them all the same gets a plan, with half an encoder."""
    idle = job(0.05, worth=0.0)
    assert codec_of(decide(idle, Goal()))[0] == {}
    codec, _ = codec_of(decide(idle, goal))
    assert codec == {"parameters": "planes", "moments": "planes"}
    half = job(0.05, worth=0.5)
    assert decide(idle, goal).expected.persist_s == decide(half, goal).expected.persist_s


def test_encoders_that_vary_count_by_their_slow_rounds() -> None:
    """A mean that would pay does not, where one round in ten would not."""
    steady = job(0.5, worth=1.2)
    assert steady.encoders is not None
    wild = replace(steady.encoders, worth=replace(steady.encoders.worth, p10=0.6))
    assert codec_of(decide(steady, Goal()))[0]
    assert not codec_of(decide(replace(steady, encoders=wild), Goal()))[0]


def test_the_faster_of_two_codecs_is_offered_alone() -> None:
    """A shard has one codec; zstd is what older profiles know."""
    codecs = (measured(codec="zstd", ratio=1.1, encode=0.5e9), measured())
    codec, choice = codec_of(decide(job(0.05, codecs=codecs), Goal()))
    assert codec == {"parameters": "planes"}
    assert "planes" in choice.reason


@pytest.mark.parametrize(("ratio", "chosen"), [(3.0, "zstd"), (1.1, "planes")])
def test_zstd_is_chosen_where_it_saves_more_than_planes(ratio: float, chosen: str) -> None:
    """A shard has one codec, for all of its classes."""
    names = ("parameters", "moments")
    zstd = tuple(measured(name, ratio, codec="zstd") for name in names)
    profile = job(0.05, codecs=(*(measured(name) for name in names), *zstd))
    codec, choice = codec_of(decide(profile, Goal()))
    assert codec == dict.fromkeys(names, chosen)
    assert chosen in choice.reason


def test_room_on_storage_is_made_by_the_codec_that_leaves_less() -> None:
    """Also where bytes as they are would be written sooner."""
    names = ("parameters", "moments")
    zstd = tuple(measured(name, 2.0, codec="zstd") for name in names)
    profile = job(2.0, codecs=(*(measured(name) for name in names), *zstd))
    tight = Goal(limits=Limits(disk_bytes=3_400_000_000))
    assert codec_of(decide(profile, Goal()))[0] == {}
    assert set(codec_of(decide(profile, tight))[0].values()) == {"zstd"}


def test_what_encoding_slows_the_training_by_is_a_cost_of_the_checkpoint() -> None:
    """It was measured, so it counts: above 3 % against the codec, below that in the plan."""
    plans = {slowdown: decide(job(0.05, slowdown=slowdown), Goal()) for slowdown in (0.0, 0.5, 2.0)}
    assert [bool(plan.plan.tier("disk").codec) for plan in plans.values()] == [True, True, False]
    free, felt = (
        costs_of_plan(job(0.05, slowdown=slowdown), Goal(), plans[slowdown].plan)
        for slowdown in (0.0, 0.5)
    )
    assert free.persist_s == felt.persist_s
    lost_s = felt.persist_slowdown_s - free.persist_slowdown_s
    assert 0.005 < lost_s / felt.persist_s < FELT
    assert "a cost of each checkpoint" in codec_of(plans[0.5])[1].reason


def test_a_codec_that_was_not_measured_is_written_when_it_is_pinned() -> None:
    """On the classes that every state has."""
    pinned = decide(job(0.05), Goal(pins=Pins(codec="delta"))).plan.tier("disk").codec
    assert pinned == {"parameters": "delta", "moments": "delta"}


def disk_only(steps: int) -> Goal:
    """Every save goes to disk, this often."""
    return Goal(pins=Pins(memory_interval_steps=steps, disk_interval_steps=steps))


def test_deltas_are_written_where_the_save_before_is_still_in_its_slot() -> None:
    """By class: the moments here move too much between two saves."""
    profile = job(0.05, codecs=deltas(gap_steps=100))
    decision = decide(profile, disk_only(100))
    assert codec_of(decision)[0] == {"parameters": "delta", "moments": "planes"}
    assert decision.plan.tier("disk").chain >= 1


@pytest.mark.parametrize(
    ("gap_steps", "goal"),
    [
        (99, disk_only(100)),
        (10**6, Goal(pins=Pins(memory_interval_steps=10, disk_interval_steps=100))),
        (10**6, Goal(pins=Pins(memory_interval_steps=100, disk_interval_steps=100, slots=2))),
    ],
    ids=["measured at a shorter distance", "other saves come between", "no slot for a base"],
)
def test_no_delta_on_figures_or_bases_that_are_not_there(gap_steps: int, goal: Goal) -> None:
    """Then planes, and no chain."""
    decision = decide(job(0.05, codecs=deltas(gap_steps)), goal)
    assert codec_of(decision)[0] == {"parameters": "planes", "moments": "planes"}
    assert decision.plan.tier("disk").chain == 0


def test_a_chain_is_no_longer_than_a_recovery_can_bear() -> None:
    """Reading bases at 5 MB/s takes longer than a tenth of the restart: one, and not eight."""
    slow, fast = (
        decide(job(rate, codecs=deltas(10**6)), disk_only(1000)).plan.tier("disk").chain
        for rate in (0.005, 0.4)
    )
    assert slow == 1
    assert 1 < fast <= 8


@given(RATES, RATES, RATIOS, st.integers(1, 8), st.floats(0.0, 8.0), st.floats(0.0, 2.0))
@example(link=1e6, encode=1e6, ratio=1.0, writers=2, worth=2.225e-311, slowdown=0.0)
def test_what_is_chosen_never_makes_the_write_or_the_training_slower(
    link: float, encode: float, ratio: float, writers: int, worth: float, slowdown: float
) -> None:
    """At least 5 % faster by the measures, and not felt; never more than encoders or storage do."""
    pipe = Pipe(link_bytes_per_s=link, writers=writers, worth=worth, slowdown=slowdown)
    measure = measured(ratio=ratio, encode=encode)
    assert pipe.bytes_per_s(measure) <= min(worth * encode, link * ratio) * (1 + 1e-9)
    if pipe.pays(measure):
        assert pipe.bytes_per_s(measure) > ADVANTAGE * link
        share = pipe.bytes_per_s(measure) / (worth * encode)
        assert slowdown * share <= FELT * (1 + 1e-9)


@given(RATES, RATES, RATIOS, st.integers(1, 8), st.floats(0.01, 4.0), st.floats(0.01, 4.0))
def test_more_left_by_the_training_is_never_slower(
    link: float, encode: float, ratio: float, writers: int, one: float, other: float
) -> None:
    """What decides grows with what encoders are worth."""
    measure = measured(ratio=ratio, encode=encode)
    less, more = (
        Pipe(link_bytes_per_s=link, writers=writers, worth=worth).bytes_per_s(measure)
        for worth in sorted((one, other))
    )
    assert less <= more * (1 + 1e-9)


@given(RATES, RATES, RATIOS)
def test_one_writer_follows_the_serial_rule(link: float, encode: float, ratio: float) -> None:
    """B > B_link if and only if B_codec > B_link / (1 - rho)."""
    pipe = Pipe(link_bytes_per_s=link, writers=1, worth=4)
    faster = pipe.bytes_per_s(measured(ratio=ratio, encode=encode)) > link
    margin = encode * (1 - 1 / ratio) / link
    if abs(margin - 1) > 1e-6:
        assert faster == (margin > 1)


@given(RATES, RATES, RATIOS)
def test_many_writers_follow_the_pipelined_rule(link: float, encode: float, ratio: float) -> None:
    """min(E B_codec, B_link / rho)."""
    pipe = Pipe(link_bytes_per_s=link, writers=1000, worth=4)
    got = pipe.bytes_per_s(measured(ratio=ratio, encode=encode))
    assert got == pytest.approx(min(4 * encode, link * ratio), rel=0.01)


def test_two_writers_of_equal_stages_pass_two_thirds() -> None:
    """They wait for one another: N / (N + 1) of either stage, the textbook's value."""
    pipe = Pipe(link_bytes_per_s=1e9, writers=2, worth=1.0)
    got = pipe.bytes_per_s(measured(ratio=1.0, encode=1e9))
    assert got == pytest.approx(2e9 / 3)
