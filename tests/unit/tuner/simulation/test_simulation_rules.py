"""Strategies: ours are what the policies decide, the peers' follow their papers or their code."""

import math
from dataclasses import replace

import pytest

from autockpt.policies.cost_model.waste import ENVELOPE
from autockpt.policies.decide import decide
from autockpt.policies.interval.closed_forms import daly_interval_s, young_interval_s
from autockpt.policies.policy_file import load_policy
from autockpt.policies.redundancy.survival import survived_mix
from autockpt.policies.registry import presets
from autockpt.tuner.simulation.compare import compare
from autockpt.tuner.simulation.engine import replay
from autockpt.tuner.simulation.history import World, draw
from autockpt.tuner.simulation.job import Job, known_failures, profile_of
from autockpt.tuner.simulation.rules import RULES, Bench, Network, build, of_goal
from autockpt.tuner.simulation.strategy import Climbing
from autockpt.values.errors import ConfigError
from autockpt.values.goal import Goal, RedundancyWish
from tests.support.profiles import example_profile
from tests.unit.policies.redundancy.test_choose import cluster

GOALS = {name: load_policy(f"builtin:{name}", environment={}).goal for name in presets()}
MTBF_S = 11100.0
NETWORK = Network(bytes_per_s=10e9, idle=0.5)


def job(**changes: float) -> Job:
    """2,048 nodes' worth of a large model."""
    values = {
        "iteration_s": 5.0,
        "state_bytes": 3e9,
        "copy_bytes_per_s": 20e9,
        "disk_bytes_per_s": 0.5e9,
        "slowdown": 0.05,
        "detect_s": 60.0,
        "restart_s": 120.0,
    }
    return Job(**{**values, **changes})


def bench(
    *,
    nodes: int = 2048,
    network: Network | None = NETWORK,
    mtbf_s: float = MTBF_S,
    **changes: float,
) -> Bench:
    failures = known_failures(mtbf_s=mtbf_s, process_share=0.35, nodes=nodes)
    profile = profile_of(job(**changes), failures=failures)
    return Bench(profile=profile, goals=GOALS, network=network, domain_nodes=16)


def test_every_preset_and_every_rule_can_be_simulated() -> None:
    """On one history; each formula is within 1 % of time of its replay inside the envelope."""
    strategies = [build(name, bench()) for name in (*GOALS, *RULES)]
    world = World(nodes=2048, mtbf_s=MTBF_S, process_share=0.35, domain_nodes=16, burst_share=0.1)
    histories = [draw(world, length_s=54 * 86400.0, seed=4, run=run) for run in range(4)]
    inside = [s for s in compare(strategies, histories) if 1.0 - s.predicted <= ENVELOPE]
    assert len(inside) >= 13
    for summary in inside:
        assert summary.goodput.mean == pytest.approx(summary.predicted, abs=0.01), summary.name
        assert sum(summary.parts.values()) == pytest.approx(1.0)


def test_auto_is_what_plan_decides() -> None:
    """On a measured profile: the same intervals, and the promised goodput within 1 % of time."""
    profile = example_profile()
    failures = known_failures(mtbf_s=20000.0, process_share=0.4, nodes=1)
    profile = replace(profile, failures=failures)
    decision = decide(profile, Goal())
    strategy = of_goal("auto", profile, Goal())
    assert strategy.interval_steps("memory") == decision.plan.tier("memory").interval_steps
    assert strategy.interval_steps("disk") == decision.plan.tier("disk").interval_steps
    world = World(nodes=1, mtbf_s=20000.0, process_share=0.4)
    found = compare([strategy], [draw(world, length_s=2e7, seed=run) for run in range(3)])[0]
    assert found.goodput.mean == pytest.approx(decision.expected.goodput, abs=0.01)
    assert found.predicted == pytest.approx(decision.expected.goodput, abs=2e-3)


def test_no_strategy_on_the_same_levels_beats_auto_by_more_than_noise() -> None:
    """Same histories, paired: whoever has memory and disk, or disk alone, is not better."""
    names = ["auto", *(n for n in (*GOALS, *RULES) if n != "auto" and not n.startswith("gemini"))]
    strategies = [build(name, bench()) for name in names]
    world = World(nodes=2048, mtbf_s=MTBF_S, process_share=0.35)
    histories = [draw(world, length_s=54 * 86400.0, seed=9, run=run) for run in range(6)]
    for summary in compare(strategies, histories)[1:]:
        assert summary.behind.mean > -5e-4, summary.name


def test_fixed_intervals_are_fixed() -> None:
    """30 minutes and 3 hours of iterations, whatever the failures."""
    assert build("every-30min", bench()).interval_steps("disk") == 360
    assert build("every-3h", bench()).interval_steps("disk") == 2160


def test_young_takes_the_cost_of_a_blocking_save() -> None:
    """sqrt(2 C M) of the sync preset's cost."""
    found = build("young", bench())
    cost_s = found.levels[0].exposed_s
    expected = young_interval_s(cost_s, MTBF_S) / 5.0
    assert found.interval_steps("disk") == round(expected)
    assert cost_s == pytest.approx(3e9 / 5e9 + 3e9 / 0.5e9, rel=0.01)


def test_daly_takes_a_little_less_than_young() -> None:
    """The same cost, the higher-order interval."""
    cost_s = build("young", bench()).levels[0].exposed_s
    expected = daly_interval_s(cost_s, MTBF_S) / 5.0
    assert build("daly", bench()).interval_steps("disk") == round(expected)


def test_overlap_takes_the_background_save_and_its_slow_down() -> None:
    """w = 1 - (s + sigma P) / P of the async preset; near the best interval of the same save."""
    found, preset = build("overlap", bench()), build("async", bench())
    assert found.levels[-1].exposed_s == pytest.approx(preset.level("disk").exposed_s)
    steps = found.interval_steps("disk"), preset.interval_steps("disk")
    assert steps[0] == pytest.approx(steps[1], rel=0.1)
    with pytest.raises(ConfigError, match="the whole MTBF"):
        build("overlap", bench(mtbf_s=100.0))


def test_the_released_checkfreq_begins_without_its_budget() -> None:
    """T_i = 0.1 s and a persist that slows it: from ceil((T_f - O) / T_i) up by 2 to 5 %."""
    found = build("checkfreq-released", bench(iteration_s=0.1, slowdown=0.5)).calendar
    assert isinstance(found, Climbing)
    published = build("checkfreq", bench(iteration_s=0.1, slowdown=0.5))
    assert found.start < published.interval_steps("disk")
    cost_s = build("checkfreq-released", bench(iteration_s=0.1, slowdown=0.5)).levels[0].exposed_s
    assert cost_s / (found.end * 0.1) <= 0.05 < cost_s / ((found.end - 2) * 0.1)
    assert (found.end - found.start) % 2 == 0


def test_gemini_saves_every_iteration_where_the_network_idles_enough() -> None:
    """0.3 s of 2.5 idle; at a thousandth of the bandwidth 60 iterations, and half is exposed."""
    found = build("gemini", bench())
    assert found.interval_steps("peer") == 1
    assert sum(level.exposed_s for level in found.levels[:2]) == 0.0
    slow = build("gemini", bench(network=Network(bytes_per_s=1e7, idle=0.5)))
    assert slow.interval_steps("peer") == 60
    assert slow.levels[1].exposed_s == pytest.approx(150.0)


def test_pairs_across_domains_survive_bursts_that_neighbours_do_not() -> None:
    """Bursts only: neighbours fall back to the disk now and then, spread pairs never."""
    world = World(nodes=2048, mtbf_s=MTBF_S, process_share=0.0, domain_nodes=16, burst_share=1.0)
    history = draw(world, length_s=54 * 86400.0, seed=1)
    near, far = compare([build(n, bench()) for n in ("gemini", "gemini-spread")], [history])
    assert near.recoveries["disk"] > 0
    assert far.recoveries["disk"] == 0
    assert far.goodput.mean > near.goodput.mean


SCHEMES = [
    {"scheme": "replicas", "copies": 2},
    {"scheme": "replicas", "copies": 2, "placement": "ring"},
    {"scheme": "replicas", "copies": 3},
    {"scheme": "xor", "set_size": 8},
    {"scheme": "rs", "set_size": 8, "parity": 2},
]


@pytest.mark.parametrize("fields", SCHEMES, ids=lambda fields: " ".join(map(str, fields.values())))
def test_recoveries_from_peers_are_as_many_as_the_closed_form_says(fields) -> None:
    """Bursts that strike anywhere among 32 nodes: 8,000 failures, within 3 standard errors.

    A burst takes 2 nodes in half of the cases, 3 in a quarter, ...
    """
    burst, nodes = 0.6, 32
    profile = profile_of(
        job(), failures=known_failures(mtbf_s=MTBF_S, process_share=0.0, nodes=nodes)
    )
    goal = Goal(redundancy=RedundancyWish(**fields))
    strategy = of_goal("it", profile, goal)
    world = World(
        nodes=nodes, mtbf_s=MTBF_S, process_share=0.0, domain_nodes=nodes, burst_share=burst
    )
    outcome = replay(strategy, draw(world, length_s=8000 * MTBF_S, seed=6))
    count = sum(outcome.recoveries.values())
    shares = (1 - burst, burst / 2, burst / 4, burst / 4)
    assert strategy.placement is not None
    expected = survived_mix(strategy.placement, shares)
    error = math.sqrt(expected * (1 - expected) / count)
    assert outcome.recoveries["peer"] / count == pytest.approx(expected, abs=3 * error)


def test_redundancy_brings_in_the_simulation_what_the_decision_promises() -> None:
    """A measured job with a link to other nodes: goodput within 1 % of time of the promise."""
    profile = cluster(16, mtbf_s=MTBF_S)
    strategy = of_goal("auto", profile, Goal())
    promised = decide(profile, Goal()).expected
    assert [level.place for level in strategy.levels] == ["memory", "peer", "disk"]
    share = profile.failures.process_share
    world = World(nodes=16, mtbf_s=MTBF_S, process_share=share, domain_nodes=16, burst_share=0.11)
    outcome = replay(strategy, draw(world, length_s=4000 * MTBF_S, seed=3))
    assert outcome.waste == pytest.approx(promised.waste, abs=0.01)
    nodes_lost = sum(outcome.recoveries[place] for place in ("peer", "disk"))
    assert outcome.recoveries["peer"] / nodes_lost == pytest.approx(promised.survived, abs=0.02)


def test_an_exchange_longer_than_the_interval_is_not_begun_every_time() -> None:
    """Gemini's preset on a slow link: every checkpoint in memory, one in many to a peer."""
    slow = of_goal("gemini", cluster(16, host=1e8, device=1e8), GOALS["gemini"])
    assert slow.interval_steps("memory") == 1
    assert slow.interval_steps("peer") == math.ceil((7.2 + 1e-4) / 0.4)


def test_saves_that_come_due_too_early_are_skipped_and_said() -> None:
    """A pinned minute, and a disk that takes ten."""
    goal = replace(GOALS["async"], pins=replace(GOALS["async"].pins, disk_interval_s=60.0))
    slow = profile_of(
        job(disk_bytes_per_s=5e6),
        failures=known_failures(mtbf_s=MTBF_S, process_share=0.35, nodes=4),
    )
    found = of_goal("mine", slow, goal)
    assert found.interval_steps("disk") > 12
    assert "one in" in found.warnings[0]


def test_what_cannot_be_applied_is_refused_with_the_reason() -> None:
    """No network, no partner, no such name."""
    with pytest.raises(ConfigError, match="--network"):
        build("gemini", bench(network=None))
    with pytest.raises(ConfigError, match="at least 32"):
        build("gemini-spread", bench(nodes=8))
    with pytest.raises(ConfigError, match="no strategy is called 'hope'"):
        build("hope", bench())


@pytest.mark.parametrize("name", ["iteration_s", "state_bytes", "copy_bytes_per_s"])
def test_impossible_jobs_are_refused(name: str) -> None:
    """Nothing, or infinitely much."""
    for value in (0.0, float("inf"), float("nan")):
        with pytest.raises(ConfigError, match=name):
            job(**{name: value})
