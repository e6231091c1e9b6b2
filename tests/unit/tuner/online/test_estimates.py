"""Winsorised means and jump detection."""

import math
import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autockpt.policies.interval.choose import Rates, choose_intervals
from autockpt.profiles.failures import estimate_recovery
from autockpt.tuner.online.controller import begin
from autockpt.tuner.online.estimates import WINDOW, Contrast, Window, winsorised
from autockpt.tuner.online.observed import OUTDATED_SAVES, Observed
from autockpt.values.goal import Goal, Limits, Pins
from autockpt.values.plan import safe_default_plan
from autockpt.values.profile import Estimate
from autockpt.values.telemetry import (
    CheckpointDurable,
    IterationsTimed,
    SnapshotBegan,
    SnapshotSealed,
)
from tests.support.profiles import example_failures, example_recovery


def test_one_wild_sample_does_not_move_the_mean():
    """A cold first save of 100 times the usual."""
    mean, error = winsorised([1.0, 1.1, 0.9, 100.0, 1.0, 1.0, 1.05, 0.95])
    assert mean == pytest.approx(1.01, abs=0.03)
    assert error < 0.1


@given(st.lists(st.floats(min_value=0.0, max_value=1e6), min_size=1, max_size=20))
def test_the_mean_lies_among_the_samples(samples):
    """Whatever the count."""
    mean, error = winsorised(samples)
    assert min(samples) - 1e-6 <= mean <= max(samples) * (1 + 1e-9) + 1e-6
    assert error >= 0


def test_a_factor_of_four_is_found_at_once_and_drops_the_past():
    """Within three samples, and the mean is then of the new level only."""
    window = Window()
    for value in [1.0] * 10 + [4.0] * 3:
        window.observe(value)
    assert window.jumped
    assert window.mean == pytest.approx(4.0)
    assert window.n <= 3


def test_noise_of_forty_percent_rarely_looks_like_a_jump():
    """Fewer than one alarm in 200 samples on average."""
    alarms = 0
    for seed in range(20):
        chance, window = random.Random(seed), Window()
        for _ in range(500):
            window.observe(max(0.05, chance.gauss(1.0, 0.4)))
            alarms += window.jumped
            window.jumped = False
    assert alarms <= 50


def test_a_window_forgets_what_is_older_than_itself():
    """The newest eight."""
    window = Window()
    for value in range(1, 30):
        window.observe(1.0 + value * 1e-3)
    assert window.n == WINDOW
    assert window.mean == pytest.approx(1.0255, abs=1e-3)


def stretches(contrast: Contrast, *, iteration_s: float, slower: float, count: int) -> None:
    """Twenty quiet blocks and ten with work, so often."""
    for _ in range(count):
        for _ in range(20):
            contrast.observe(iteration_s, 0.0)
        for _ in range(10):
            contrast.observe(0.0, iteration_s * (1.0 + slower))


def test_a_slow_down_is_told_from_a_machine_that_becomes_slower():
    """Another job doubles every iteration and goes again: the work still costs its 10 %.

    The stretch of work that the change falls next to is one wild sample of eight.
    """
    contrast = Contrast()
    for iteration_s in (1.0, 2.0, 1.0):
        stretches(contrast, iteration_s=iteration_s, slower=0.1, count=5)
        assert contrast.mean == pytest.approx(0.1, abs=0.02)


def test_blocks_with_both_kinds_are_compared_with_the_quiet_ones_around_them():
    """Work shorter than a block: its block is quiet before it."""
    contrast = Contrast()
    for _ in range(6):
        contrast.observe(1.0, 1.2)
        contrast.observe(1.0, 0.0)
    assert contrast.mean == pytest.approx(0.2)
    assert contrast.n >= 4


@given(st.lists(st.tuples(st.floats(0.0, 10.0), st.floats(0.0, 10.0)), max_size=200))
def test_a_slow_down_is_never_negative(blocks):
    """Whatever the blocks; and what is kept of them is bounded."""
    contrast = Contrast()
    for quiet_s, busy_s in blocks:
        contrast.observe(quiet_s, busy_s)
        assert contrast.mean >= 0.0
        assert len(contrast.before) + len(contrast.during) + len(contrast.after) <= 80


def observed() -> Observed:
    """Nothing yet."""
    return Observed(failures=example_failures(), recovery=example_recovery())


def block(number: int, *, quiet_s: float = 0.0, busy_s: float = 0.0) -> IterationsTimed:
    """One long iteration, quiet or not."""
    return IterationsTimed(
        at_s=float(number), rank=0, step=number, count=1, total_s=quiet_s + busy_s,
        checkpoint_s=0.0, quiet_s=quiet_s, busy_s=busy_s,
    )  # fmt: skip


def durable(number: int) -> CheckpointDurable:
    """The end of a save."""
    return CheckpointDurable(
        at_s=float(number), rank=-1, generation=f"step {number} (term 1)", step=number, bytes=1,
        stored_bytes=1, latency_s=9.0, write_s=9.0,
    )  # fmt: skip


def began(number: int) -> SnapshotBegan:
    """The beginning of a save to both tiers."""
    return SnapshotBegan(
        at_s=float(number),
        rank=0,
        step=number,
        generation=f"step {number} (term 1)",
        tiers="memory+disk",
    )


def test_a_save_whose_keeper_died_holds_back_no_longer_than_until_the_next_is_durable() -> None:
    """Of it nobody tells the end; one that began later is still under way."""
    seen = observed()
    for event in (began(1), began(2), began(3), durable(2)):
        seen.observe(event)
    assert list(seen.saving) == ["step 3 (term 1)"]
    seen.observe(durable(3))
    assert not seen.busy_saving(4.0)


def test_the_time_at_every_boundary_is_told_from_the_stall_of_snapshots() -> None:
    """0.2 ms each, and 50 ms at one snapshot a block, which is reported a block later."""
    seen = observed()
    for number in range(33):
        late_s = 0.05 if number else 0.0
        seen.observe(
            SnapshotSealed(
                at_s=float(number), rank=0, generation="g", step=number, bytes=1,
                boundary_stall_s=late_s, fence_stall_s=0.0, copy_s=0.1,
            )
        )  # fmt: skip
        seen.observe(
            replace(block(number, quiet_s=0.01), count=100, checkpoint_s=0.05 + 100 * 2e-4)
        )
    assert seen.costs(sync=False).boundary_s == pytest.approx(2e-4, rel=0.05)
    assert seen.costs(sync=True).boundary_s == 0.0, "the wait for the disk is there too"


def test_what_every_boundary_costs_is_promised_and_moves_no_interval() -> None:
    """It is paid at any interval, and no limit can be kept by a longer one."""
    rates = Rates(memory_per_s=1e-4, disk_per_s=1e-4)
    goal = Goal(limits=Limits(overhead=0.03))
    seen = observed()
    seen.persist.samples = seen.copy.samples = seen.stall.samples = (0.5,) * 4
    seen.quiet.samples = (0.1,) * 4
    free = seen.costs(sync=False)
    paid = replace(free, boundary_s=0.005)
    one, other = (
        choose_intervals(costs, rates, goal, memory_on=True, slots=3, sync=False)
        for costs in (free, paid)
    )
    assert other.waste.checkpoint <= 0.03
    assert other.waste.boundary == pytest.approx(0.005 / 0.105, rel=0.05)
    assert other.waste.total > one.waste.total + 0.04
    assert other.memory_steps == pytest.approx(one.memory_steps, rel=0.1)


def test_a_restore_that_nobody_saw_takes_as_long_as_a_save() -> None:
    """15 s are assumed before anything was seen; a state of 12 MB is not read for so long."""
    seen = Observed(failures=example_failures(), recovery=estimate_recovery(()))
    assert seen.recovered.restore_disk.value_s == 15.0
    for _ in range(3):
        seen.copy.observe(0.005)
        seen.persist.observe(0.017)
    found = seen.recovered
    assert found.restore_disk.source == found.restore_memory.source == "derived"
    assert found.restore_disk.value_s == pytest.approx(0.022)
    measured = replace(seen.recovery, restore_disk=Estimate(value_s=4.0, source="measured", n=1))
    seen.recovery = measured
    assert seen.recovered.restore_disk.value_s == 4.0


@pytest.mark.parametrize(("persist_s", "met"), [(5.0, 1), (13.0, 2)])
def test_a_save_inside_long_iterations_costs_what_these_lost(persist_s: float, met: int):
    """2 s each time, in one iteration of 10 s or over two of them."""
    seen = observed()
    for number in range(40):
        busy = number % 4 < met
        seen.observe(
            block(number, busy_s=10.0 + 2.0 / met) if busy else block(number, quiet_s=10.0)
        )
        if number % 4 == met:
            seen.persist.observe(persist_s)
    costs = seen.costs(sync=False)
    assert costs.copy_slowdown_s + costs.persist_slowdown_s == pytest.approx(2.0)


def test_where_every_iteration_is_busy_they_tell_the_quiet_one():
    """The quiet ones of the beginning are outdated when iterations become longer."""
    seen = observed()
    for number in range(40):
        seen.observe(block(number, busy_s=11.0) if number % 4 == 0 else block(number, quiet_s=10.0))
    assert seen.iteration_s == pytest.approx(10.0)
    for number in range(40, 80):
        seen.observe(block(number, busy_s=22.0))
    assert seen.iteration_s == pytest.approx(10.0), "one long save says nothing"
    for number in range(80, 80 + OUTDATED_SAVES):
        seen.observe(durable(number))
        seen.observe(block(number, busy_s=22.0))
    assert seen.iteration_s == pytest.approx(20.0)


@pytest.mark.parametrize(("every", "noise"), [(1, 0.0), (1, 0.3), (3, 0.0)])
def test_slow_down_is_seen_where_every_block_holds_a_save(every: int, noise: float) -> None:
    """Busy iterations a fifth longer than the quiet ones of their block, whatever the machine's
    pace; also where a save is in every third block."""
    contrast = Contrast()
    for number in range(300):
        pace = 1.0 + noise * math.sin(number / 7.0)
        contrast.observe(0.30 * pace, 0.36 * pace if number % every == 0 else 0.0)
    assert contrast.n >= 4
    assert contrast.mean == pytest.approx(0.20, rel=0.05)


def test_checkfreq_holds_its_budget_against_the_whole_cost() -> None:
    """Saves in every block, stalls of a whole boundary: the interval keeps 3.5 % of that cost."""
    seen = begin(
        plan=safe_default_plan(), failures=example_failures(), recovery=example_recovery()
    ).seen
    for number in range(40):
        name, at_s = f"e1s{number}", float(number)
        for event in (
            SnapshotBegan(at_s=at_s, rank=0, generation=name, step=number, tiers="memory+disk"),
            SnapshotSealed(at_s=at_s, rank=0, generation=name, step=number, bytes=1,
                           boundary_stall_s=0.006, fence_stall_s=0.001, copy_s=0.02),
            CheckpointDurable(at_s=at_s + 0.5, rank=-1, generation=name, step=number, bytes=1,
                             stored_bytes=1, latency_s=0.1, write_s=0.1),
            IterationsTimed(at_s=at_s + 0.9, rank=0, step=number, count=20, total_s=1.0,
                     checkpoint_s=0.007, quiet_s=0.050, busy_s=0.060),
        ):  # fmt: skip
            seen.observe(event)
    costs = seen.costs(sync=False)
    assert costs.stall_s == pytest.approx(0.007)
    assert costs.copy_slowdown_s + costs.persist_slowdown_s == pytest.approx(0.020, rel=0.1)
    goal = Goal(limits=Limits(overhead=0.035), pins=Pins(interval_rule="checkfreq"))
    found = choose_intervals(
        costs, Rates(memory_per_s=1e-4, disk_per_s=1e-5), goal, memory_on=False, slots=3, sync=False
    )
    per_checkpoint_s = 0.007 + 2 * 0.010
    assert per_checkpoint_s / (found.disk_steps * 0.050) <= 0.035
