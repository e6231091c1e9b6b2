"""The promise against jobs that are killed again and again: its model, and its band."""

import math
import random
from dataclasses import dataclass
from statistics import fmean

import pytest

from autockpt.policies.cost_model.costs import Costs
from autockpt.policies.cost_model.expectation import (
    per_wall_s,
    promise,
    rate_shape,
    split_rates,
)
from autockpt.policies.interval.choose import choose_intervals
from autockpt.profiles.failures import estimate_rates, estimate_recovery
from autockpt.reports.analysis.promises import waste_band
from autockpt.values.failure import FailureRecord
from autockpt.values.goal import Goal
from autockpt.values.plan import Expected

ITERATION_S, BOUNDARY_S = 0.01, 0.0003
STALL_S, SLOWDOWN_S = 0.006, 0.007


def test_what_was_recorded_is_promised_again() -> None:
    """n failures in E seconds of training, d seconds down at each: the job trains E / (E + n d)."""
    for failures, trained_s, outage_s in ((10, 300.0, 12.0), (10, 300.0, 0.2), (2, 9e5, 600.0)):
        rate = per_wall_s(failures / trained_s, outage_s)
        up = trained_s / (trained_s + failures * outage_s)
        assert math.exp(-rate * outage_s) == pytest.approx(up, rel=1e-12)
    assert per_wall_s(0.0, 30.0) == 0.0


def test_failures_that_strike_in_a_restart_are_counted_once() -> None:
    """A record merges them into one long outage, and the rate per second of all time comes back."""
    chance, rate, restart_s = random.Random(3), 1.0 / 60.0, 20.0
    trained_s = down_s = 0.0
    failures = 20_000
    for _ in range(failures):
        trained_s += chance.expovariate(rate)
        while (left_s := chance.expovariate(rate)) < restart_s:
            down_s += left_s
        down_s += restart_s
    found = per_wall_s(failures / trained_s, down_s / failures)
    assert math.exp(-found * down_s / failures) == pytest.approx(
        trained_s / (trained_s + down_s), rel=1e-9
    )


@dataclass(frozen=True, kw_only=True)
class Killed:
    """A job that was killed, from its third failure on."""

    promised: float
    observed: float
    band: tuple[float, float]


def killed(seed: int, *, kills: int, slow_restarts: float) -> Killed:
    """Lives of 10 to 60 s, each under the plan of all records before it."""
    chance, records = random.Random(seed), list[FailureRecord]()
    promises, lives_s = list[Expected](), list[float]()
    shape, wall_s, kept_s, down_s = 1.0, 0.0, 0.0, 0.0
    for number in range(kills + 1):
        life_s = chance.uniform(10.0, 60.0)
        if number >= 3:
            made, shape, steps = decided(records)
            period_s = steps * (ITERATION_S + BOUNDARY_S) + STALL_S + SLOWDOWN_S
            lost_s = chance.uniform(0.0, steps * ITERATION_S) if number < kills else 0.0
            wall_s += down_s + life_s
            kept_s += life_s / period_s * steps * ITERATION_S - lost_s
            promises.append(made)
            lives_s.append(life_s)
        slow = chance.random() < slow_restarts
        down_s = chance.uniform(4.0, 6.0) if slow else chance.uniform(0.15, 0.3)
        records.append(
            FailureRecord(
                wall="", kind="process", what="trainer", node=0, step=0, exposure_s=life_s,
                detect_s=0.02, restart_s=down_s - 0.05, restore_s=0.03, source="memory",
            )
        )  # fmt: skip
    return Killed(
        promised=sum(t * made.waste for t, made in zip(lives_s, promises, strict=True))
        / sum(lives_s),
        observed=1.0 - kept_s / wall_s,
        band=waste_band(promises[-1], float(len(promises)), shape),
    )


def decided(records: list[FailureRecord]) -> tuple[Expected, float, int]:
    """(promise, shape of the rate, interval in steps) of a job without any node that was lost."""
    rates, goal = estimate_rates(records, nodes=1), Goal()
    recovery = estimate_recovery(records).like_saves(copy_s=0.01, persist_s=0.02, n=8)
    costs = Costs(
        iteration_s=ITERATION_S, boundary_s=BOUNDARY_S, stall_s=STALL_S, stall_high_s=STALL_S,
        copy_s=0.01, copy_high_s=0.01, persist_s=0.02, persist_high_s=0.02,
        copy_slowdown_s=0.002, persist_slowdown_s=0.005,
        restart_s=recovery.detect.value_s + recovery.restart.value_s,
        restore_memory_s=recovery.restore_memory.value_s,
        restore_disk_s=recovery.restore_disk.value_s,
    )  # fmt: skip
    split = split_rates(rates, goal, recovery)
    best = choose_intervals(costs, split, goal, memory_on=True, slots=3, sync=False)
    made = promise(costs, rates, recovery, goal, best, memory_on=True)
    return made, rate_shape(rates, goal), best.memory_steps


@pytest.mark.parametrize("slow_restarts", [0.0, 0.3, 1.0])
def test_a_promise_is_within_three_points_from_the_third_failure_on(slow_restarts: float) -> None:
    """And the loss over the next failures is in its band, however the restarts go."""
    found = [killed(seed, kills=10, slow_restarts=slow_restarts) for seed in range(40)]
    off = fmean(abs(one.promised - one.observed) for one in found)
    assert off <= 0.03
    within = fmean(one.band[0] <= one.observed <= one.band[1] for one in found)
    assert within >= 0.9


def test_the_band_holds_where_failures_are_poisson() -> None:
    """Rate and mean outage are as well known as their Gammas say: nine in ten losses are in it."""
    chance = random.Random(1)
    shape, mean_rate, outage_s, wall_s, paid = 6.0, 1.0 / 100.0, 20.0, 1000.0, 0.02
    lost = mean_rate * outage_s
    expected = Expected(
        stall_s=0.0, waste=1.0 - (1.0 - paid) * math.exp(-lost), waste_low=0.0, waste_high=1.0,
        checkpoint_waste=paid, persist_s=0.0, recovery_memory_s=0.0, recovery_disk_s=0.0,
    )  # fmt: skip
    within = 0
    for _ in range(2000):
        rate = chance.gammavariate(shape, mean_rate / shape)
        true_s = chance.gammavariate(shape, outage_s / shape)
        count, at_s = 0, chance.expovariate(rate)
        while at_s < wall_s:
            count, at_s = count + 1, at_s + chance.expovariate(rate)
        down_s = sum(chance.expovariate(1.0 / true_s) for _ in range(count))
        observed = 1.0 - (1.0 - paid) * math.exp(-down_s / wall_s)
        low, high = waste_band(expected, mean_rate * wall_s, shape)
        within += low <= observed <= high
    assert 0.84 <= within / 2000 <= 0.96
