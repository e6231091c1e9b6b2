"""Whole decisions on made-up profiles: every choice explained, limits kept, inputs replayable."""

from dataclasses import replace

import pytest

from autockpt.executors.image.layout.room import smallest_window
from autockpt.policies.cost_model.cost_curve import costs_of_plan, tiers_of_plan
from autockpt.policies.decide import decide
from autockpt.policies.staging.slots import LEAST_BYTES
from autockpt.policies.staging.write_path import choose_write
from autockpt.values.errors import ConfigError
from autockpt.values.goal import FailureDeclaration, Goal, Limits, Pins, Retention
from autockpt.values.plan import Schedule
from autockpt.values.profile import LinkMeasure, MemoryHeadroom, Profile
from autockpt.values.record import to_json
from tests.support.profiles import (
    beside_training,
    distribution,
    example_codecs,
    example_failures,
    example_interference,
    example_profile,
    example_state,
    example_storage,
    storage_measure,
)

NAMES = {"memory.interval", "disk.interval", "staging", "path", "codec", "retention", "slots"}


def test_every_choice_has_a_reason_and_numbers_where_it_reckons():
    """The contract of a Decision."""
    decision = decide(example_profile(), Goal())
    assert {choice.name for choice in decision.choices} == NAMES
    disk = decision.choice("disk.interval")
    assert disk is not None
    assert disk.chosen_waste == pytest.approx(decision.expected.waste)
    assert {"cost_s", "failures_per_s", "optimum_s", "waste"} <= set(disk.numbers)
    assert disk.runner_up


def test_same_inputs_give_the_same_bytes():
    """Replay: nothing but profile and goal enters."""
    assert to_json(decide(example_profile(), Goal())) == to_json(decide(example_profile(), Goal()))


def test_plan_id_names_the_inputs():
    """Another profile or goal is another plan."""
    first = decide(example_profile(), Goal()).plan
    other = decide(example_profile(iteration_s=0.5), Goal()).plan
    assert first.plan_id != other.plan_id
    assert first.fingerprint == example_profile().fingerprint.digest


def test_expected_waste_is_the_waste_function_at_the_plan():
    """One function for decision, report and what-if."""
    profile = example_profile(failures=example_failures(mtbf_s=3600.0), persist_s=5.0)
    decision = decide(profile, Goal())
    tiers = tiers_of_plan(profile, Goal(), decision.plan)
    steps = [tier.interval_steps for tier in decision.plan.tiers]
    assert tiers.waste(*steps).total == pytest.approx(decision.expected.waste, rel=1e-12)


def test_plan_beats_the_habit_of_today():
    """A blocking save every 30 minutes is the baseline."""
    for mtbf_s in (1800.0, 86400.0, 1e7):
        decision = decide(example_profile(failures=example_failures(mtbf_s=mtbf_s)), Goal())
        assert decision.current is not None
        assert decision.expected.waste < decision.current.waste


def test_band_surrounds_the_mean_and_narrows_with_evidence():
    """Ninety percent over the posterior; twenty failures know more than none."""
    wide = decide(example_profile(failures=example_failures(mtbf_s=3600.0)), Goal()).expected
    known = example_failures(mtbf_s=3600.0, shape=20.0)
    narrow = decide(example_profile(failures=known), Goal()).expected
    assert wide.waste_low < wide.waste < wide.waste_high
    assert narrow.waste_high - narrow.waste_low < wide.waste_high - wide.waste_low


def test_declared_failures_replace_the_posterior():
    """The user's MTBF decides the interval, whatever the prior says."""
    goal = Goal(failures=FailureDeclaration(mtbf_s=600.0, process_share=0.4))
    declared = decide(example_profile(), goal)
    posterior = decide(example_profile(failures=example_failures(mtbf_s=600.0)), Goal())
    assert [t.interval_steps for t in declared.plan.tiers] == [
        t.interval_steps for t in posterior.plan.tiers
    ]


def test_missing_measurements_are_predicted_and_said():
    """Stall and persist from links and storage, each with a warning."""
    bare = example_profile(stall_s=None, snapshot_s=None, persist_s=None, interference=())
    decision = decide(bare, Goal())
    said = " ".join(decision.warnings)
    for words in ("stall predicted", "snapshot time predicted", "time until durable predicted"):
        assert words in said
    assert "interference was not measured" in said
    assert decision.expected.persist_s == pytest.approx(0.376, abs=0.01)
    nothing = replace(bare, links=(), storage=(), codecs=())
    said = " ".join(decide(nothing, Goal()).warnings)
    assert "is assumed" in said
    assert "assumed 200 MB/s" in said


def test_fully_measured_profile_warns_only_about_what_is_assumed():
    """No warning without a cause."""
    decision = decide(example_profile(), Goal())
    assert len(decision.warnings) == 2
    assert "assumed, not measured: detection 1 s, restart 20 s" in decision.warnings


# --- staging


def test_fewest_writers_within_five_percent_of_the_best_are_taken():
    """Two writers and 8 MiB are 3 % behind four and 32 MiB."""
    staging = decide(example_profile(), Goal()).plan.staging
    assert (staging.writers, staging.chunk_bytes, staging.direct_io) == (2, 8 * 2**20, True)


def test_buffered_wins_where_it_was_measured_faster():
    """O_DIRECT is a preference among equals, not a dogma."""
    grid = (
        storage_measure(gb_per_s=1.0, writers=2, direct=True),
        storage_measure(gb_per_s=2.0, writers=2, direct=False),
    )
    assert decide(example_profile(storage=grid), Goal()).plan.staging.direct_io is False


def test_pinned_writers_keep_the_rest_free():
    """disk.writers 4 leaves chunk and direct to the measurements."""
    decision = decide(example_profile(), Goal(pins=Pins(writers=4)))
    assert decision.plan.staging.writers == 4
    staging = decision.choice("staging")
    assert staging is not None
    assert staging.binding == "disk.writers"


def test_blocking_is_taken_where_lazy_interference_costs_more():
    """Copying under compute that slows it more than the whole copy takes."""
    noisy = example_interference(copy=0.9, persist=0.9)
    assert decide(example_profile(interference=noisy), Goal()).plan.staging.schedule == "blocking"
    kept = decide(example_profile(interference=noisy), Goal(objective="stall"))
    assert kept.plan.staging.schedule == "lazy"


def test_nothing_lazy_means_blocking():
    """Without a proven split there is nothing to copy lazily."""
    state = replace(example_state(), lazy_bytes=0, boundary_bytes=example_state().total_bytes)
    assert decide(example_profile(state=state), Goal()).plan.staging.schedule == "blocking"


def test_direct_path_needs_a_measurement():
    """Never assumed; pinned without one is refused."""
    fast = LinkMeasure(
        link="device_to_storage", alpha_s=0.001, bytes_per_s=6e9, relative_spread=0.02, n=10
    )
    profile = example_profile()
    assert decide(profile, Goal()).plan.tier("disk").path == "host"
    measured = replace(profile, links=(*profile.links, fast))
    assert decide(measured, Goal()).plan.tier("disk").path == "direct"
    with pytest.raises(ConfigError, match="was not measured"):
        decide(profile, Goal(pins=Pins(path="direct")))


def test_sync_persist_stalls_until_durable():
    """The stall of a disk checkpoint is then the time until durable."""
    goal = Goal(pins=Pins(schedule="blocking", persist="sync", memory_enabled=False))
    decision = decide(example_profile(failures=example_failures(mtbf_s=3600.0)), goal)
    period_s = decision.choice("disk.interval").numbers["period_s"]  # type: ignore[union-attr]
    assert decision.expected.checkpoint_waste * period_s == pytest.approx(
        decision.expected.persist_s
    )


@pytest.mark.parametrize("schedule", ["lazy", "blocking"])
def test_the_promised_stall_of_sync_has_the_wait_for_the_disk_in_it(schedule: Schedule):
    """Until durable, however it is copied; beside the training only the snapshot stalls."""
    profile = example_profile()
    waits = decide(profile, Goal(pins=Pins(schedule=schedule, persist="sync")))
    costs = costs_of_plan(profile, Goal(), waits.plan)
    assert waits.expected.stall_s >= costs.blocked_s > 0.2
    assert waits.expected.stall_s == pytest.approx(waits.expected.persist_s)
    beside = decide(profile, Goal(pins=Pins(schedule=schedule)))
    assert beside.expected.stall_s < beside.expected.persist_s / 2


# --- slots and codec


@pytest.mark.parametrize(
    ("images", "slots", "memory_on"), [(3.5, 3, True), (2.5, 2, True), (1.5, 1, False)]
)
def test_slots_fall_back_with_the_memory_there_is(images, slots, memory_on):
    """3 for memory and disk, 2 with waiting, 1 for disk alone."""
    goal = Goal(limits=Limits(host_memory_bytes=int(images * 722_297_856)))
    decision = decide(example_profile(), goal)
    assert decision.plan.slots == slots
    assert (decision.plan.tier("memory").interval_steps > 0) is memory_on
    choice = decision.choice("slots")
    assert choice is not None
    assert choice.binding == ("limits.host_memory" if slots < 3 else "")


def test_too_little_memory_names_the_bytes():
    """What was asked for does not fit, or not even what an image streams through."""
    little = Limits(host_memory_bytes=100_000_000)
    with pytest.raises(ConfigError, match=r"722297856 bytes on a node, and limits.host_memory"):
        decide(example_profile(), Goal(limits=little, pins=Pins(slots=1)))
    least = Limits(host_memory_bytes=LEAST_BYTES - 1)
    with pytest.raises(ConfigError, match=r"leaves 524287; give it 1 more"):
        decide(example_profile(), Goal(limits=least))
    small = MemoryHeadroom(
        host_total_bytes=10**10, host_available_bytes=10**10, cgroup_available_bytes=10**9
    )
    with pytest.raises(ConfigError, match="the cgroup's limit leaves 800000000 bytes"):
        decide(example_profile(memory=small), Goal(pins=Pins(memory_enabled=True)))


def test_where_no_image_fits_checkpoints_go_through_less_memory():
    """On disk alone, one at a time; the least is what executors stream through."""
    goal = Goal(limits=Limits(host_memory_bytes=100_000_000))
    decision = decide(example_profile(), goal)
    assert decision.plan.slots == 1
    assert decision.plan.tier("memory").interval_steps == 0
    assert decision.plan.tier("disk").interval_steps > 0
    choice = decision.choice("slots")
    assert choice is not None
    assert "it streams to storage through less memory" in choice.reason
    assert choice.binding == "limits.host_memory"
    assert smallest_window(decision.plan.staging.chunk_bytes)[0] <= LEAST_BYTES


def test_ranks_of_a_node_share_its_memory():
    """Eight ranks need eight images per slot."""
    profile = example_profile()
    shared = replace(profile, fingerprint=replace(profile.fingerprint, world_size=8))
    goal = Goal(limits=Limits(host_memory_bytes=3 * 722_297_856))
    assert decide(profile, goal).plan.slots == 3
    assert decide(shared, goal).plan.slots == 1
    with pytest.raises(ConfigError, match="slot"):
        decide(shared, replace(goal, pins=Pins(slots=1)))


def test_codec_pays_only_where_storage_is_slow_and_the_training_leaves_cores():
    """zstd at 0.5 GB/s a core: off at 2 GB/s, on at 0.2 GB/s, off where the training has them."""
    assert decide(beside_training(example_profile()), Goal()).plan.tier("disk").codec == {}
    slow = example_profile(storage=example_storage(peak_gb_per_s=0.2), codecs=example_codecs())
    idle, busy = beside_training(slow), beside_training(slow, worth=1.0, slowdown=0.5)
    assert decide(idle, Goal()).plan.tier("disk").codec["moments"] == "zstd"
    assert decide(busy, Goal()).plan.tier("disk").codec == {}
    assert decide(slow, Goal()).plan.tier("disk").codec == {}


def test_pinned_codec_is_obeyed():
    """Both ways."""
    slow = example_profile(storage=example_storage(peak_gb_per_s=0.2))
    assert decide(slow, Goal(pins=Pins(codec="none"))).plan.tier("disk").codec == {}
    fast = decide(example_profile(), Goal(pins=Pins(codec="zstd"))).plan.tier("disk").codec
    assert set(fast) == {"parameters", "moments", "other"}


# --- limits


def test_stall_limit_names_the_stall_and_the_pin():
    """A limit no schedule can keep is refused with the nearest value."""
    with pytest.raises(ConfigError, match=r"nearest: limits\.stall 6\.06 ms"):
        decide(example_profile(), Goal(limits=Limits(stall_s=0.001)))
    goal = Goal(limits=Limits(stall_s=0.1), pins=Pins(persist="sync"))
    with pytest.raises(ConfigError, match=r"or without staging.persist: sync"):
        decide(example_profile(), goal)


def test_a_cheaper_schedule_that_stalls_too_long_gives_way_to_one_that_does_not():
    """Blocking for 90 ms costs 3 % less than lazy copies; 50 ms are allowed.  And the other way
    round: lazy copies that are cheap in the mean, with a long 95th percentile."""
    noisy = example_profile(interference=example_interference(copy=0.5))
    assert decide(noisy, Goal()).plan.staging.schedule == "blocking"
    tight = decide(noisy, Goal(limits=Limits(stall_s=0.05)))
    assert tight.plan.staging.schedule == "lazy"
    staging = tight.choice("staging")
    assert staging is not None
    assert "limits.stall rules blocking out" in staging.reason
    assert staging.binding == "limits.stall"
    spread = example_profile(stall_s=distribution(0.02, spread=9.0))
    assert decide(spread, Goal()).plan.staging.schedule == "lazy"
    tight = decide(spread, Goal(limits=Limits(stall_s=0.15)))
    assert tight.plan.staging.schedule == "blocking"
    staging = tight.choice("staging")
    assert staging is not None
    assert "limits.stall rules lazy out" in staging.reason


def test_the_refused_stall_is_the_shortest_there_is():
    """Blocking would be cheaper than lazy copies, and further from the limit."""
    noisy = example_profile(interference=example_interference(copy=0.5))
    with pytest.raises(ConfigError, match=r"nearest: limits\.stall 6\.06 ms"):
        decide(noisy, Goal(limits=Limits(stall_s=0.001)))
    assert decide(noisy, Goal(limits=Limits(stall_s=6.06e-3))).expected.stall_s < 6.06e-3


def test_retention_and_budget_reach_the_plan():
    """What executors need to know stands in the plan."""
    goal = Goal(
        limits=Limits(overhead=0.02), retention=Retention(keep_last=5), pins=Pins(retune=False)
    )
    plan = decide(example_profile(), goal).plan
    assert plan.retention.keep_last == 5
    assert plan.overhead_budget == 0.02
    assert plan.retune is False


def test_pinned_interval_shorter_than_the_persist_is_kept_with_a_warning():
    """The pin is obeyed, and the skipped saves are announced."""
    decision = decide(example_profile(persist_s=5.0), Goal(pins=Pins(disk_interval_steps=2)))
    assert decision.plan.tier("disk").interval_steps == 2
    assert any("saves will be skipped" in warning for warning in decision.warnings)


def of_bucket(bucket: str, *, gb_per_s: float) -> Profile:
    """A profile that measured a store."""
    profile = example_profile(
        storage=(storage_measure(gb_per_s=gb_per_s, writers=2, direct=False),), persist_s=5.0
    )
    return replace(profile, fingerprint=replace(profile.fingerprint, storage=bucket))


def test_a_plan_for_a_store_says_what_was_measured_of_it() -> None:
    """And follows from that: a slower store is written to less often."""
    goal = Goal(storage_path="s3://bucket/jobs/run", pins=Pins(schedule="blocking"))
    slow, fast = (decide(of_bucket("s3://bucket", gb_per_s=rate), goal) for rate in (0.05, 5.0))
    for decision, rate in ((slow, "50 MB/s"), (fast, "5 GB/s")):
        staging = decision.choice("staging")
        assert staging is not None
        assert "store s3://bucket was measured: it takes a page in" in staging.reason
        assert rate in staging.reason
        assert not any("left out" in warning for warning in decision.warnings)
    assert slow.expected.persist_s > 20 * fast.expected.persist_s
    steps = [decision.plan.tier("disk").interval_steps for decision in (slow, fast)]
    assert steps[0] > steps[1]


@pytest.mark.parametrize("measured", ["/", "s3://other", "gs://bucket"])
def test_figures_of_another_storage_are_not_those_of_the_store(measured: str) -> None:
    """A disk's rate would promise a checkpoint that no store can keep."""
    goal = Goal(storage_path="s3://bucket/jobs/run")
    decision = decide(of_bucket(measured, gb_per_s=5.0), goal)
    (said,) = [w for w in decision.warnings if "left out" in w]
    assert f"measured the storage {measured}, and disk.path is in s3://bucket" in said
    staging = decision.choice("staging")
    assert staging is not None
    assert "storage was not measured" in staging.reason
    assert decision.expected.persist_s > 1.0


def test_pinned_writers_keep_what_was_measured_of_a_store() -> None:
    """It is asked in one way, whatever is pinned; O_DIRECT is of file systems."""
    profile = example_profile(storage=(storage_measure(gb_per_s=0.5, writers=2, direct=False),))
    for pins in (Pins(writers=7), Pins(chunk_bytes=2**21)):
        goal = Goal(storage_path="s3://bucket/run", pins=pins)
        choice = choose_write(profile, goal)
        assert choice.measure is profile.storage[0]
        assert (pins.writers or 2, False) == (choice.writers, choice.direct_io)
        assert pins.chunk_bytes in (None, choice.chunk_bytes)
    assert not choose_write(example_profile(storage=()), goal).direct_io
