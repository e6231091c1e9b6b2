"""Every strategy by name: presets by the policies themselves, the others by their rule.

A rule turns a profile into levels and a calendar and knows nothing of the future.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from autockpt.policies.cost_model.cost_curve import costs_of_plan, tiers_of_plan
from autockpt.policies.cost_model.costs import Costs
from autockpt.policies.cost_model.renewal import overlap_period_s
from autockpt.policies.decide import decide
from autockpt.policies.interval.closed_forms import daly_interval_s, young_interval_s
from autockpt.policies.interval.nesting import Tiers
from autockpt.tuner.simulation.strategy import (
    Climbing,
    Level,
    Periodic,
    Place,
    Strategy,
)
from autockpt.values.decision_inputs import TierCost
from autockpt.values.errors import ConfigError
from autockpt.values.goal import Goal
from autockpt.values.placement import Cell, FailureDomains, Placement, place
from autockpt.values.plan import CheckpointPlan
from autockpt.values.profile import Profile
from autockpt.values.redundancy import Redundancy
from autockpt.values.units import format_duration, format_fraction

RULES = {
    "every-30min": "a blocking save to disk every 30 minutes",
    "every-3h": "a blocking save to disk every 3 hours",
    "young": "a blocking save to disk every sqrt(2 C M)",
    "daly": "a blocking save to disk at Daly's higher-order interval",
    "overlap": "a save behind the training every sqrt(2 (1 - w) C (M - (D + R + w C)))",
    "checkfreq-released": "CheckFreq's code: k = max(ceil((T_f - O) / T_i), 1), then only longer",
    "gemini": "every iteration to a peer's memory, pairs of neighbours; to disk every 3 hours",
    "gemini-spread": "the same, with the two nodes of a pair in different failure domains",
}
"""Strategies that are no policy file, and what each does."""
RELEASED_BUDGET = 0.05
"""`max_overhead` of CheckFreq's code, by default 5."""
DISK_OF_GEMINI_S = 3 * 3600.0
"""How often Gemini's users write to remote storage: its paper's baseline."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Network:
    """Traffic that a node can send to a peer beside the training's own."""

    bytes_per_s: float
    idle: float
    """Fraction of an iteration in which the network has nothing to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """The inputs of the rules."""

    profile: Profile
    goals: Mapping[str, Goal]
    """Goals of the policies by name; `sync` and `async` have to be among them."""
    network: Network | None
    domain_nodes: int = 1


def build(name: str, bench: Bench) -> Strategy:
    """The strategy of that name.  Raises ConfigError if it cannot be applied to this job.

    A rule goes before a policy of its name: Gemini's knows how much of the network is idle.
    """
    if name in bench.goals and name not in RULES:
        return of_goal(name, bench.profile, bench.goals[name])
    if name == "every-30min":
        return fixed(name, bench, 1800.0)
    if name == "every-3h":
        return fixed(name, bench, 3 * 3600.0)
    if name in ("young", "daly"):
        return blocking(name, bench, {"young": young_interval_s, "daly": daly_interval_s}[name])
    if name == "overlap":
        return overlap(bench)
    if name == "checkfreq-released":
        return checkfreq_released(bench)
    if name in ("gemini", "gemini-spread"):
        return gemini(name, bench, spread=name == "gemini-spread")
    raise ConfigError(f"no strategy is called {name!r}")


def of_goal(name: str, profile: Profile, goal: Goal) -> Strategy:
    """Return the strategy of `autockpt plan` under this goal."""
    return of_plan(name, profile, goal, decide(profile, goal).plan)


def of_plan(name: str, profile: Profile, goal: Goal, plan: CheckpointPlan) -> Strategy:
    """A plan that was decided for this profile under this goal."""
    strategy = as_reckoned(name, profile, goal, plan)
    if plan.redundancy.scheme == "none":
        return strategy
    placement = place(plan.redundancy, profile.failures.nodes, profile.domains)
    return with_peers(strategy, costs_of_plan(profile, goal, plan), placement)


def as_reckoned(name: str, profile: Profile, goal: Goal, plan: CheckpointPlan) -> Strategy:
    """The same with the two tiers of the formula: what peers serve counts as served by memory.

    For worlds that are drawn from the rates of these tiers (`tuner.simulation.risk`).
    """
    return reckoned(name, tiers_of_plan(profile, goal, plan), plan, says=goal.policy)


def reckoned(name: str, tiers: Tiers, plan: CheckpointPlan, *, says: str = "") -> Strategy:
    """A plan by the waste function that it was decided with."""
    memory, disk = plan.tier("memory").interval_steps, plan.tier("disk").interval_steps
    sync = plan.staging.persist == "sync"
    flying = 0 if sync else max(1, plan.staging.in_flight)
    return two_tiers(name, tiers, memory, disk, in_flight=flying, says=says)


def with_peers(strategy: Strategy, costs: Costs, placement: Placement) -> Strategy:
    """The strategy with its checkpoints in memory kept by other nodes as well.

    One that comes due while the one before is still on its way to peers stays in this node.
    Raises ConfigError for a strategy without the memory level, or costs without peers.
    """
    local, peers = strategy.level("memory"), costs.peers
    if local is None or peers is None:
        raise ConfigError(f"{strategy.name}: nothing to send to peers")
    local = replace(
        local,
        slowdown_s=costs.copy_slowdown_s,
        latency_s=costs.copy_s,
        restore_s=costs.restore_memory_s,
    )
    period_s = strategy.interval_steps("memory") * strategy.iteration_s
    shared = replace(
        local,
        place="peer",
        every=max(1, math.ceil(peers.send_s / period_s - 1e-9)),
        stall_s=0.0,
        slowdown_s=peers.slowdown_s,
        latency_s=costs.copy_s + peers.send_s,
        restore_s=peers.restore_s,
    )
    rest = tuple(level for level in strategy.levels if level.place == "disk")
    return replace(strategy, levels=(local, shared, *rest), placement=placement)


def two_tiers(
    name: str,
    tiers: Tiers,
    memory_steps: int,
    disk_steps: int,
    *,
    in_flight: int = 0,
    says: str = "",
) -> Strategy:
    """Memory every `memory_steps` iterations (0: off), disk every `disk_steps`, a multiple.

    With `in_flight` saves under way at most, saves that come due beyond that are skipped. 0: they
    cannot pile up.  Raises ConfigError if the intervals are not nested.
    """
    base = memory_steps or disk_steps
    if base < 1 or disk_steps % base:
        raise ConfigError(f"{disk_steps} is no multiple of {base}")
    every, skipped = disk_steps // base, ""
    least_s = tiers.disk.latency_s / in_flight if in_flight else 0.0
    period_s = tiers.periods_s(base if memory_steps else 0, disk_steps)[1]
    if least_s > period_s * (1 + 1e-9):
        times = math.ceil(least_s / period_s - 1e-9)
        every *= times
        skipped = (
            f"{name}: a disk checkpoint takes {format_duration(least_s)} and comes due every "
            f"{format_duration(period_s)}; one in {times} is written"
        )
    levels = [_level("disk", every, tiers.disk)]
    if memory_steps and tiers.memory is not None:
        levels.insert(0, _level("memory", 1, tiers.memory))
    return Strategy(
        name=name,
        iteration_s=tiers.iteration_s,
        calendar=Periodic(steps=base),
        levels=tuple(levels),
        says=says,
        warnings=(skipped,) if skipped else (),
    )


def fixed(name: str, bench: Bench, interval_s: float) -> Strategy:
    """Blocking saves at a fixed interval, as most scripts have them."""
    tiers = _alone(bench, "sync")
    steps = max(1, round(interval_s / tiers.iteration_s))
    return two_tiers(name, tiers, 0, steps, says=RULES[name])


def blocking(name: str, bench: Bench, form: Callable[[float, float], float]) -> Strategy:
    """A blocking save, `form` giving the work between two from C, its cost, and M, the MTBF.

    Source: Young 1974, Daly 2006; M is the assumed MTBF.
    """
    tiers = _alone(bench, "sync")
    interval_s = form(tiers.disk.exposed_s, 1.0 / bench.profile.failures.interruptions_per_s)
    says = f"{RULES[name]} = {format_duration(interval_s)}"
    steps = max(1, round(interval_s / tiers.iteration_s))
    return two_tiers(name, tiers, 0, steps, says=says)


def overlap(bench: Bench) -> Strategy:
    """A save of C seconds during which training goes on at rate w, measured as `async` writes it.

    Source: `overlap_period_s`; D + R and M as the profile has them.
    """
    tiers = _alone(bench, "async")
    disk, rate = tiers.disk, bench.profile.failures.interruptions_per_s
    work_rate = max(0.0, 1.0 - disk.exposed_s / disk.latency_s)
    period_s = overlap_period_s(
        disk.latency_s, work_rate=work_rate, recover_s=disk.recover_s, mtbf_s=1.0 / rate
    )
    says = f"{RULES['overlap']} = {format_duration(period_s)}, w = {format_fraction(work_rate)}"
    steps = max(1, math.ceil((period_s - disk.exposed_s) / tiers.iteration_s - 1e-9))
    return two_tiers("overlap", tiers, 0, steps, in_flight=1, says=says)


def checkfreq_released(bench: Bench) -> Strategy:
    """CheckFreq as its code of January 2021 does it, with the mechanism of the preset.

    The first k knows no budget; after each interval that cost more than 5 % it grows by 2, and it
    never shrinks.  It is kept in a file, so that a restart goes on with it.  Measurements without
    noise are assumed; with noise it would only become longer.
    Source: msr-fiddle/CheckFreq, src/cf_iterator.py, `_complete_profile` and `__next__`.
    """
    profile, goal = bench.profile, bench.goals["checkfreq"]
    plan = decide(profile, goal).plan
    tiers, costs = tiers_of_plan(profile, goal, plan), costs_of_plan(profile, goal, plan)
    cost_s, iteration_s = tiers.disk.exposed_s, tiers.iteration_s
    start = max(1, math.ceil((costs.persist_s - costs.copy_s) / iteration_s - 1e-9))
    needed = cost_s / (RELEASED_BUDGET * iteration_s)
    end = start + 2 * max(0, math.ceil((needed - start) / 2.0 - 1e-9))
    return Strategy(
        name="checkfreq-released",
        iteration_s=iteration_s,
        calendar=Climbing(start=start, end=end),
        levels=(_level("disk", 1, tiers.disk),),
        says=f"{RULES['checkfreq-released']}: from {start} to {end} iterations",
    )


def neighbours(nodes: int) -> Placement:
    """Nodes 0 and 1, 2 and 3, ...: pairs chosen without knowledge of racks.

    An odd number ends with a ring of three, as in Gemini's mixed placement.
    """
    pairs = nodes // 2 - nodes % 2
    cells = [Cell(kind="group", members=(2 * i, 2 * i + 1), tolerates=1) for i in range(pairs)]
    rest = tuple(range(2 * pairs, nodes))
    return Placement(
        cells=(*cells, *([Cell(kind="ring", members=rest, tolerates=1)] if rest else []))
    )


def spread_pairs(nodes: int, domain_nodes: int) -> Placement:
    """Pairs in different domains of `domain_nodes` neighbours each."""
    labels = tuple((str(node // domain_nodes),) for node in range(nodes))
    domains = FailureDomains(levels=("domain",), labels=labels)
    return place(Redundancy(scheme="replicas", copies=2), nodes, domains)


def gemini(name: str, bench: Bench, *, spread: bool) -> Strategy:
    """Gemini: two copies in host memory, as often as the network allows, at best every iteration.

    1 / f >= max(t_ckpt, T_iter); traffic that does not fit into the idle spans slows training.
    Source: Wang et al., SOSP 2023; t_ckpt = state / bandwidth for one remote copy.
    """
    network, profile = bench.network, bench.profile
    if network is None:
        raise ConfigError(f"{name}: needs the speed of the network between nodes (--network)")
    nodes, least = profile.failures.nodes, 2 * (bench.domain_nodes if spread else 1)
    if nodes < least:
        raise ConfigError(f"{name}: {nodes} nodes: its pairs need at least {least}")
    tiers = _alone(bench, "async")
    restart_s, memory_s = tiers.disk.restart_s, profile.recovery.restore_memory.value_s
    iteration_s, send_s = tiers.iteration_s, profile.state.total_bytes / network.bytes_per_s
    steps = max(1, math.ceil(send_s / iteration_s - 1e-9))
    exposed_s = max(0.0, send_s - network.idle * steps * iteration_s)
    latency_s = steps * iteration_s + exposed_s
    local = TierCost(
        stall_s=0.0,
        slowdown_s=0.0,
        latency_s=latency_s,
        restart_s=restart_s,
        restore_s=memory_s,
        failures_per_s=0.0,
    )
    remote = replace(local, slowdown_s=exposed_s, restore_s=memory_s + send_s)
    # The disk is written from host memory: it costs no snapshot of its own.
    disk = replace(tiers.disk, stall_s=0.0)
    every = max(1, round(DISK_OF_GEMINI_S / (steps * iteration_s)))
    pairs = "pairs across domains" if spread else "neighbours"
    says = (
        f"every {steps} iterations to a peer, {pairs}: "
        f"{format_duration(send_s)} to send, {format_fraction(network.idle)} of "
        f"{format_duration(iteration_s)} idle"
    )
    return Strategy(
        name=name,
        iteration_s=iteration_s,
        calendar=Periodic(steps=steps),
        levels=(_level("memory", 1, local), _level("peer", 1, remote), _level("disk", every, disk)),
        placement=spread_pairs(nodes, bench.domain_nodes) if spread else neighbours(nodes),
        says=says,
    )


def _alone(bench: Bench, policy: str) -> Tiers:
    """Costs under a policy without the memory tier."""
    goal = bench.goals[policy]
    goal = replace(goal, pins=replace(goal.pins, memory_enabled=False))
    return tiers_of_plan(bench.profile, goal, decide(bench.profile, goal).plan)


def _level(place: Place, every: int, tier: TierCost) -> Level:
    return Level(
        place=place,
        every=every,
        stall_s=tier.stall_s,
        slowdown_s=tier.slowdown_s,
        latency_s=tier.latency_s,
        restart_s=tier.restart_s,
        restore_s=tier.restore_s,
    )
