"""Several strategies over the same histories: common random numbers, paired differences."""

import math
from collections.abc import Callable, Sequence

from autockpt.policies.cost_model.renewal import exact_goodput
from autockpt.policies.cost_model.waste import fraction_lost, waste
from autockpt.tuner.simulation.engine import replay
from autockpt.tuner.simulation.history import History
from autockpt.tuner.simulation.outcome import (
    Outcome,
    Summary,
    meta_ettr,
    moevement_ettr,
    spread,
)
from autockpt.tuner.simulation.strategy import Level, Strategy
from autockpt.values.decision_inputs import TierCost
from autockpt.values.errors import ConfigError

PARTS = ("productive", "stall", "slowdown", "lost", "restart", "restore", "waiting")


def compare(
    strategies: Sequence[Strategy],
    histories: Sequence[History],
    report: Callable[[int, int], None] = lambda done, total: None,
) -> list[Summary]:
    """Every strategy over every history, in the order given; differences are to the first.

    `report` hears how many histories are replayed, and how many there are in all.
    """
    if not strategies or not histories:
        raise ConfigError("there is no strategy or no history to simulate")
    baseline: list[Outcome] = []
    found = []
    total = len(strategies) * len(histories)
    for number, strategy in enumerate(strategies):
        outcomes = []
        for history in histories:
            outcomes.append(replay(strategy, history))
            report(number * len(histories) + len(outcomes), total)
        baseline = baseline or outcomes
        found.append(_summary(strategy, outcomes, baseline, histories))
    return found


def _summary(
    strategy: Strategy,
    outcomes: Sequence[Outcome],
    baseline: Sequence[Outcome],
    histories: Sequence[History],
) -> Summary:
    n, wall_s = len(outcomes), sum(o.wall_s for o in outcomes)
    pairs = zip(baseline, outcomes, strict=True)
    rate = sum(len(h.failures) for h in histories) / wall_s
    first = strategy.levels[0]
    period_s = period_of(strategy, first)
    parts = {name: math.fsum(getattr(o, f"{name}_s") for o in outcomes) / wall_s for name in PARTS}
    cost_s = period_s - strategy.interval_steps(first.place) * strategy.iteration_s
    sources = outcomes[0].recoveries
    return Summary(
        name=strategy.name,
        says=strategy.says,
        memory_steps=strategy.interval_steps("memory"),
        peer_steps=strategy.interval_steps("peer"),
        disk_steps=strategy.interval_steps("disk"),
        period_s=period_s,
        goodput=spread([o.goodput for o in outcomes]),
        behind=spread([a.goodput - b.goodput for a, b in pairs]),
        google=math.fsum(o.google for o in outcomes) / n,
        available=math.fsum(o.available for o in outcomes) / n,
        meta=meta_ettr(
            cost_s=cost_s, period_s=period_s, failures_per_s=rate, restart_s=first.restart_s
        ),
        moevement=moevement_ettr(cost_s=cost_s, period_s=period_s, failures_per_s=rate),
        predicted=1.0 - predicted_waste(strategy, histories) - parts["waiting"],
        lost_h_per_day=parts["lost"] * 24.0,
        parts=parts,
        recoveries={s: sum(o.recoveries[s] for o in outcomes) / n for s in sources},
        failures=rate * wall_s / n,
        warnings=strategy.warnings,
    )


def period_of(strategy: Strategy, level: Level) -> float:
    """Seconds from one checkpoint of a level to the next, the time of all checkpoints included."""
    steps = strategy.interval_steps(level.place)
    shared = sum(level.every / other.every * other.exposed_s for other in strategy.levels)
    return steps * strategy.iteration_s + shared


def predicted_waste(strategy: Strategy, histories: Sequence[History]) -> float:
    """The closed form: exact for one level, else a term for each with the failures it serves."""
    wall_s = sum(history.length_s for history in histories)
    if len(strategy.levels) == 1:
        return _exact_waste(strategy, sum(len(h.failures) for h in histories) / wall_s)
    served = dict.fromkeys((level.place for level in strategy.levels), 0)
    for history in histories:
        for failure in history.failures:
            alive = strategy.serves(failure.nodes)
            # The newest checkpoint is at the level that saves most often.
            served[min(alive, key=lambda level: level.every).place] += 1
    parts = [
        waste(
            memory=None,
            disk=_tier(level, served[level.place] / wall_s),
            memory_period_s=math.nan,
            disk_period_s=period_of(strategy, level),
        )
        for level in strategy.levels
    ]
    return fraction_lost(sum(p.checkpoint for p in parts), sum(p.failure for p in parts))


def _exact_waste(strategy: Strategy, failures_per_s: float) -> float:
    """Of one level; a checkpoint that came due before the last was durable was left out already."""
    (level,) = strategy.levels
    period_s = period_of(strategy, level)
    if not failures_per_s:
        return level.exposed_s / period_s
    return 1.0 - exact_goodput(
        period_s,
        cost_s=level.exposed_s,
        latency_s=max(level.latency_s, level.exposed_s),
        recover_s=level.restart_s + level.restore_s,
        mtbf_s=1.0 / failures_per_s,
    )


def _tier(level: Level, failures_per_s: float) -> TierCost:
    return TierCost(
        stall_s=level.stall_s,
        slowdown_s=level.slowdown_s,
        latency_s=level.latency_s,
        restart_s=level.restart_s,
        restore_s=level.restore_s,
        failures_per_s=failures_per_s,
    )
