"""Copies, parity or the disk: what is chosen, why, and that nothing changes for one node."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autockpt.cli import app
from autockpt.executors.snapshot.replica_shares import Place
from autockpt.policies.cost_model import sensitivity
from autockpt.policies.cost_model.cost_curve import tiers_of_plan
from autockpt.policies.decide import decide
from autockpt.policies.policy_file import load_policy, plan_from_yaml, plan_to_yaml
from autockpt.policies.redundancy.peer_costs import (
    SLOWDOWN_LIMIT,
    crossing_bytes,
    peer_costs,
    served,
    way_of,
)
from autockpt.run_directory import RunDirectory
from autockpt.values.errors import ConfigError
from autockpt.values.goal import Goal, Limits, Pins, RedundancyWish
from autockpt.values.placement import FailureDomains
from autockpt.values.plan import Decision, Staging
from autockpt.values.profile import (
    Bubble,
    Estimate,
    HeldElsewhere,
    InterferenceMeasure,
    LinkMeasure,
    LinkTraffic,
    Profile,
)
from autockpt.values.redundancy import NO_REDUNDANCY, Redundancy, copy_iterations
from tests.support.profiles import distribution, example_failures, example_profile, example_recovery

GB = 10**9


def link(name: str, bytes_per_s: float, *, between_nodes: bool = True) -> LinkMeasure:
    return LinkMeasure(
        link=name, alpha_s=1e-4, bytes_per_s=bytes_per_s, relative_spread=0.05, n=20,
        between_nodes=between_nodes,
    )  # fmt: skip


def exchange(work: str, slowdown: float) -> InterferenceMeasure:
    return InterferenceMeasure(work=work, slowdown=distribution(slowdown), busy_s=0.4)


def cluster(
    nodes: int = 16,
    *,
    host: float | None = 2e9,
    device: float | None = None,
    slowdown: float = 0.02,
    mtbf_s: float = 3 * 3600.0,
    free_gb: float = 48.0,
    **overrides: Any,
) -> Profile:
    """The example on many nodes, with links between them; 0.72 GB a node."""
    rates = {"host_to_peer": host, "device_to_peer": device}
    links = [link(name, rate) for name, rate in rates.items() if rate is not None]
    profile = example_profile(failures=example_failures(mtbf_s=mtbf_s, nodes=nodes))
    failures = replace(profile.failures, together=(5.5, 0.45, 0.12, 0.13))
    works = (exchange("peer_host", slowdown), exchange("peer_device", slowdown / 2))
    return replace(
        profile,
        fingerprint=replace(profile.fingerprint, nodes=nodes, world_size=nodes),
        failures=failures,
        links=(*profile.links, *links),
        interference=(*profile.interference, *works),
        memory=replace(profile.memory, host_available_bytes=round(free_gb * GB)),
        **overrides,
    )


def wish(**fields: Any) -> Goal:
    return Goal(redundancy=RedundancyWish(**fields))


def chosen(profile: Profile, goal: Goal | None = None) -> tuple[Decision, Redundancy]:
    decision = decide(profile, goal or Goal())
    return decision, decision.plan.redundancy


def test_copies_on_replicas_cost_next_to_nothing():
    """A network too slow for copies carries those that are on their holders already."""
    slow = cluster(host=3e8, slowdown=0.05)
    assert decide(slow, Goal()).plan.redundancy == NO_REDUNDANCY
    state = slow.state
    held = HeldElsewhere(nodes=tuple(range(1, 16)), bytes=state.total_bytes)
    ddp = replace(slow, state=replace(state, elsewhere=(held,)))
    decision, redundancy = chosen(ddp)
    assert redundancy.scheme == "replicas"
    choice = decision.choice("redundancy")
    assert choice is not None
    assert choice.numbers["crossing_bytes"] == Staging().chunk_bytes
    assert "in replicas there" in choice.reason


@pytest.mark.parametrize(("nodes_on", "crossing"), [((8,), 0.5), ((4, 8, 12), 0.5), ((1, 15), 1.0)])
def test_replicas_count_only_where_copies_are_placed(nodes_on, crossing):
    """Groups of two are of nodes half of all apart; half of the state is there as well, or none."""
    profile = cluster()
    held = HeldElsewhere(nodes=nodes_on, bytes=profile.state.total_bytes // 2)
    profile = replace(profile, state=replace(profile.state, elsewhere=(held,)))
    pairs = Redundancy(scheme="replicas", copies=2, placement="group")
    whole = profile.state.total_bytes
    chunk = Staging().chunk_bytes if crossing < 1.0 else 0
    assert crossing_bytes(profile, pairs) == pytest.approx(crossing * whole + chunk)
    xor = Redundancy(scheme="xor", set_size=8, parity=1)
    assert crossing_bytes(profile, xor) == whole


def test_further_nodes_are_counted_around():
    """Rank 5 of node 2 of four, two ranks each; nodes 2, 3 and 0 hold the same."""
    place = Place(rank=5, nodes=(0, 0, 1, 1, 2, 2, 3, 3))
    assert place.further_nodes((1, 5, 7)) == (1, 2)


# --- nothing changes ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "profile",
    [
        cluster(1),
        cluster(16, host=None),
        cluster(16, host=None, device=9e9),
        replace(cluster(16, host=None), links=(link("host_to_peer", 9e9, between_nodes=False),)),
    ],
    ids=["one node", "no link", "device link alone", "link within a node"],
)
def test_without_another_node_s_link_the_plan_is_as_if_there_were_none(profile):
    """Same intervals, costs and promise as with redundancy forbidden."""
    free, forbidden = decide(profile, Goal()), decide(profile, wish(scheme="none"))
    assert free.plan.redundancy == NO_REDUNDANCY
    assert (free.plan.tiers, free.expected) == (forbidden.plan.tiers, forbidden.expected)
    assert free.plan.restore_order == ("memory", "disk")
    assert (free.choice("redundancy") is None) == (profile.failures.nodes == 1)


def test_old_profiles_and_plans_still_load():
    """Without the new fields: no domains, no link between nodes, no redundancy."""
    from autockpt.values.record import from_data, to_data

    data = to_data(cluster())
    del data["domains"], data["recovery"]["restore_peer"]
    for one in data["links"]:
        del one["between_nodes"]
    old = from_data(Profile, data)
    assert decide(old, Goal()).plan.redundancy == NO_REDUNDANCY
    plan = to_data(decide(old, Goal()))
    del plan["plan"]["redundancy"], plan["expected"]["recovery_peer_s"]
    assert from_data(Decision, plan).plan.redundancy == NO_REDUNDANCY


# --- what is chosen -------------------------------------------------------------------------------


def test_copies_win_where_memory_and_network_are_plenty():
    """And the promise: nearly every lost node is served from peers, much sooner than from disk."""
    decision, redundancy = chosen(cluster())
    without = decide(cluster(), wish(scheme="none"))
    assert (redundancy.scheme, redundancy.placement) == ("replicas", "group")
    assert decision.plan.restore_order == ("memory", "peer", "disk")
    assert decision.expected.waste < without.expected.waste
    assert decision.expected.survived > 0.95
    assert decision.expected.recovery_peer_s is not None
    assert decision.expected.recovery_peer_s < decision.expected.recovery_disk_s
    choice = decision.choice("redundancy")
    assert choice is not None
    assert choice.chosen_waste == pytest.approx(decision.expected.waste)
    assert choice.runner_up_waste is not None
    assert choice.runner_up_waste >= choice.chosen_waste
    assert "serves" in choice.reason


def test_a_third_copy_must_bring_one_percent_of_what_is_lost():
    """On a good network two copies are enough; with a failure every 20 minutes and a slow disk more
    of them are worth their memory."""
    assert chosen(cluster(device=5e9))[1].copies == 2
    often = cluster(device=5e9, mtbf_s=1200.0)
    slow = replace(
        often, persist_s=distribution(120.0), recovery=example_recovery(restore_disk_s=90)
    )
    assert chosen(slow)[1].copies > 2


def test_parity_wins_where_copies_do_not_fit():
    """Three own slots take 2.2 GB; of 4 GB a copy of 1.4 GB for both generations does not fit."""
    tight = cluster(free_gb=3.8)
    decision, redundancy = chosen(tight)
    assert redundancy.scheme == "xor"
    assert "memory" in decision.choice("redundancy").binding
    held = decision.choice("redundancy").numbers["held_bytes"]
    assert held <= decision.choice("redundancy").numbers["room_bytes"]


def test_nothing_wins_where_an_exchange_costs_more_than_it_brings():
    """A link that takes ten minutes and slows training by half, and a failure a month."""
    slow = cluster(host=1.2e6, slowdown=0.5, mtbf_s=30 * 86400.0)
    decision, redundancy = chosen(slow)
    assert redundancy == NO_REDUNDANCY
    assert "costs more than it brings" in decision.choice("redundancy").reason


@settings(max_examples=30, deadline=None)
@given(
    st.integers(2, 64),
    st.floats(1e6, 1e11),
    st.floats(0.0, 0.9),
    st.floats(900.0, 3e6),
    st.floats(3.0, 60.0),
)
def test_redundancy_never_promises_more_waste_than_none(nodes, rate, slowdown, mtbf_s, free_gb):
    """Whatever is chosen, it is no worse than doing without (but for the tie), and it fits."""
    profile = cluster(nodes, host=rate, slowdown=slowdown, mtbf_s=mtbf_s, free_gb=free_gb)
    decision, redundancy = chosen(profile)
    without = decide(profile, wish(scheme="none"))
    assert decision.expected.waste <= without.expected.waste * 1.01
    assert redundancy.tolerates < nodes
    tiers = tiers_of_plan(profile, Goal(), decision.plan)
    pair = (decision.plan.tier("memory").interval_steps, decision.plan.tier("disk").interval_steps)
    assert tiers.waste(*pair).total == pytest.approx(decision.expected.waste)


# --- paths ----------------------------------------------------------------------------------------


def test_the_path_follows_the_links():
    """Speeds swapped between two profiles swap the path; a tie stays with the host."""
    assert chosen(cluster(host=1e8, device=2e9))[1].path == "device"
    assert chosen(cluster(host=2e9, device=1e8))[1].path == "host"
    same = cluster(host=2e9, device=2e9)
    even = replace(same, interference=(exchange("peer_host", 0.02), exchange("peer_device", 0.02)))
    assert chosen(even)[1].path == "host"
    assert chosen(even, wish(path="device"))[1].path == "device"


def test_parity_goes_by_the_hosts():
    """It is added up in host memory, whatever the devices' links would be worth."""
    fast = cluster(host=1e8, device=2e9)
    for path in (None, "device"):
        assert chosen(fast, wish(scheme="xor", path=path))[1].path == "host"


def test_the_device_path_is_as_fast_as_its_slowest_hop():
    """Device to peer device at 20 GB/s ends in host memory at 3 GB/s."""
    profile = cluster(device=20e9)
    landing = replace(link("device_to_host_pinned", 3e9), between_nodes=False)
    way = way_of(replace(profile, links=(*profile.links, landing)), "device")
    assert way.bytes_per_s == 3e9


def test_the_rate_is_cut_until_no_iteration_is_five_percent_longer():
    """40 % at 2 GB/s: a quarter of a GB/s; the training time lost stays, the latency grows."""
    _, redundancy = chosen(cluster(slowdown=0.4), wish(scheme="replicas", copies=2))
    assert redundancy.rate_bytes_per_s == pytest.approx(2e9 * SLOWDOWN_LIMIT / 0.4)
    profile = cluster(slowdown=0.4)
    cut, free = (
        peer_costs(profile, replace(redundancy, rate_bytes_per_s=rate))
        for rate in (redundancy.rate_bytes_per_s, 0.0)
    )
    assert cut is not None
    assert free is not None
    assert cut.send_s == pytest.approx(8 * free.send_s, rel=0.01)
    assert cut.slowdown_s == free.slowdown_s
    assert chosen(cluster(slowdown=0.04))[1].rate_bytes_per_s == 0.0
    assert chosen(cluster(), wish(rate_bytes_per_s=5e8))[1].rate_bytes_per_s == 5e8


def test_a_rate_that_is_cut_leaves_the_training_what_it_uses_of_the_network():
    """Nine tenths of the network are in use: the rest, though 6 % slow-down alone allow more."""
    traffic = LinkTraffic(
        link="network", device="eth0", sent_bytes_per_s=0.9e9, received_bytes_per_s=0.0,
        capacity_bytes_per_s=1e9, seconds=5.0,
    )  # fmt: skip
    counted = replace(cluster(slowdown=0.06), traffic=(traffic,))
    wanted = wish(scheme="replicas", copies=2)
    assert chosen(cluster(slowdown=0.06), wanted)[1].rate_bytes_per_s == pytest.approx(
        2e9 * SLOWDOWN_LIMIT / 0.06
    )
    assert chosen(counted, wanted)[1].rate_bytes_per_s == pytest.approx(0.1 * 2e9)
    quiet = replace(cluster(slowdown=0.04), traffic=(traffic,))
    assert chosen(quiet, wanted)[1].rate_bytes_per_s == 0.0


def idle_between_collectives(profile: Profile, gap_s: float, count: int = 4) -> Profile:
    """Windows of the network on every rank, and no device."""
    gap = Bubble(rank=0, offset_s=distribution(0.0), length_s=distribution(gap_s), what="network")
    return replace(
        profile,
        fingerprint=replace(profile.fingerprint, gpus=()),
        bubbles=tuple(replace(gap, rank=n % 2) for n in range(2 * count)),
    )


def test_copies_wait_for_windows_where_the_rate_is_cut_and_windows_take_a_tenth():
    """Pinned, because snapshots do, or by need and room; never without copies."""
    slow = idle_between_collectives(cluster(slowdown=0.4), 0.02)
    two = {"scheme": "replicas", "copies": 2}
    decision, redundancy = chosen(slow, wish(**two))
    choice = decision.choice("redundancy")
    assert choice is not None
    assert redundancy.schedule == "windows", choice.reason
    assert "windows take" in choice.reason
    steps = copy_iterations(decision.plan.tier("memory").interval_steps)
    room = 2e9 / 1.1 * 4 * (0.02 - 1e-4) * steps
    assert choice.numbers["peer_window_share"] == pytest.approx(min(1.0, room / 0.72e9), rel=0.1)
    assert chosen(cluster(slowdown=0.4), wish(**two))[1].schedule == "paced"  # none were measured
    small = idle_between_collectives(cluster(slowdown=0.4), 2e-4, count=1)
    assert chosen(small, wish(**two))[1].schedule == "paced"
    harmless = idle_between_collectives(cluster(slowdown=0.02), 0.02)
    assert chosen(harmless, wish(**two))[1].schedule == "paced"
    for schedule in ("paced", "windows"):
        assert chosen(slow, wish(**two, schedule=schedule))[1].schedule == schedule
        assert chosen(harmless, wish(**two, schedule=schedule))[1].schedule == schedule
    snapshots = replace(wish(**two), pins=Pins(schedule="windows"))
    assert chosen(harmless, snapshots)[1].schedule == "windows"
    assert chosen(slow, wish(scheme="none", schedule="windows"))[1] == NO_REDUNDANCY


def test_copies_of_a_device_s_training_are_paced_unless_asked_otherwise():
    """When its collectives end is not known while it runs."""
    slow = idle_between_collectives(cluster(slowdown=0.4), 0.02)
    gpu = replace(slow, fingerprint=replace(slow.fingerprint, gpus=("H200",)))
    decision, redundancy = chosen(gpu, wish(scheme="replicas", copies=2))
    assert redundancy.schedule == "paced"
    choice = decision.choice("redundancy")
    assert choice is not None
    assert "collectives of a device" in choice.reason


def test_a_snapshot_is_not_taken_before_peers_hold_the_one_before():
    """The memory interval is at least the time to peers."""
    profile = cluster(host=5e7, mtbf_s=600.0)
    decision, redundancy = chosen(profile, wish(scheme="replicas", copies=2))
    costs = peer_costs(profile, redundancy)
    assert costs is not None
    period_s = decision.plan.tier("memory").interval_steps * profile.iteration_s.p50
    assert period_s >= costs.send_high_s * 0.95


# --- what is asked for ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"scheme": "replicas", "copies": 3}, ("replicas", 3, "mixed", 0, 0)),
        ({"scheme": "replicas", "copies": 2, "placement": "ring"}, ("replicas", 2, "ring", 0, 0)),
        ({"scheme": "xor", "set_size": 5}, ("xor", 1, "mixed", 5, 1)),
        ({"scheme": "rs", "set_size": 8, "parity": 3}, ("rs", 1, "mixed", 8, 3)),
    ],
)
def test_what_is_pinned_is_planned(fields, expected):
    """Also without a measured link, which is then assumed and said."""
    for profile in (cluster(), cluster(host=None)):
        decision, r = chosen(profile, wish(**fields))
        assert (r.scheme, r.copies, r.placement, r.set_size, r.parity) == expected
        assert decision.choice("redundancy").binding == "redundancy.scheme"
        assumed = any("no link to another node" in warning for warning in decision.warnings)
        assert assumed == (profile.link("host_to_peer") is None)


@pytest.mark.parametrize("floor", [1, 2, 3])
def test_a_floor_is_kept(floor):
    """That many losses are survived wherever they strike, and the plan tells the guard."""
    for profile in (cluster(), cluster(free_gb=5.0), cluster(host=1e6, slowdown=0.9)):
        _, redundancy = chosen(profile, wish(floor=floor))
        assert redundancy.tolerates >= floor
        assert redundancy.floor == floor


@pytest.mark.parametrize(
    ("profile", "goal", "message"),
    [
        (cluster(1), wish(floor=1), "redundancy.floor is 1, and the job has one node"),
        (cluster(), replace(wish(floor=1), pins=Pins(memory_enabled=False)), "memory tier is off"),
        (cluster(), wish(floor=1, scheme="none"), "redundancy.scheme is none"),
        (cluster(2), wish(floor=2), "not to be had on 2 nodes. Nearest: redundancy.floor 1"),
        (cluster(2), wish(scheme="replicas", copies=3), "not to be had on 2 nodes"),
        (cluster(free_gb=2.8), wish(scheme="replicas", copies=2), "own slots, and available host"),
        (
            cluster(host=1e8),
            Goal(limits=Limits(overhead=1e-9), redundancy=RedundancyWish(scheme="xor")),
            "no redundancy keeps the limits",
        ),
    ],
)
def test_what_cannot_be_had_is_refused_with_a_way_out(profile, goal, message):
    """Floors and pins are demands; what is only better is left out silently."""
    with pytest.raises(ConfigError, match=message):
        decide(profile, goal)


def test_a_pinned_scheme_on_one_node_is_said_and_left_out():
    """A policy file serves jobs of all sizes; one node is no mistake."""
    decision, redundancy = chosen(cluster(1), wish(scheme="replicas", copies=2))
    assert redundancy == NO_REDUNDANCY
    assert "one node" in decision.choice("redundancy").reason


def test_gemini_and_reft_are_planned_on_a_cluster():
    """The presets, with every choice explained, through their file and back."""
    for name, scheme in (("gemini", "replicas"), ("reft", "xor")):
        decision = decide(cluster(device=5e9), load_policy(f"builtin:{name}").goal)
        assert decision.plan.redundancy.scheme == scheme
        assert plan_from_yaml(plan_to_yaml(decision)) == decision
    gemini = decide(cluster(device=5e9), load_policy("builtin:gemini").goal).plan
    assert (gemini.tier("memory").interval_steps, gemini.redundancy.path) == (1, "device")
    disk_s = gemini.tier("disk").interval_steps * 0.4
    assert disk_s == pytest.approx(3 * 3600.0, rel=0.01)


# --- which failures are served --------------------------------------------------------------------


def test_failures_that_peers_cannot_serve_are_not_counted():
    """Storage and silent ones: 3 of 92 among those that take a node's memory."""
    failures = replace(
        cluster().failures,
        classes={"process": 35.0, "node": 80.0, "nodes": 9.0, "storage": 2.0, "silent": 1.0},
    )
    pairs = Redundancy(scheme="replicas", copies=2)
    share = served(failures, pairs, FailureDomains())
    assert share == pytest.approx(
        served(replace(failures, classes={}), pairs, FailureDomains()) * 89 / 92
    )


def test_a_measured_recovery_beats_the_derived_one():
    """What was seen in earlier runs is what is promised."""
    profile = cluster()
    seen = replace(profile.recovery, restore_peer=Estimate(value_s=7.5, source="measured"))
    pairs = Redundancy(scheme="replicas", copies=2)
    costs = peer_costs(replace(profile, recovery=seen), pairs)
    derived = peer_costs(profile, pairs)
    assert costs is not None
    assert derived is not None
    assert costs.restore_s == 7.5
    assert derived.restore_s == pytest.approx(0.72e9 / 2e9 + 1e-4 + 0.5)


def test_a_slower_network_turns_the_choice(monkeypatch):
    """Sensitivity knows the time to peers as an input, for jobs that have such a link."""
    name = "time to peers"
    monkeypatch.setattr(sensitivity, "INPUTS", {name: sensitivity.INPUTS[name]})
    profile = cluster(mtbf_s=86400.0)
    decision = decide(profile, Goal())
    turned = sensitivity.flips(profile, Goal(), decision, decide)
    assert any(flip.choice == "redundancy" and flip.factor > 1 for flip in turned)
    assert sensitivity.flips(example_profile(), Goal(), decision, decide) == ()


def test_known_domains_are_placed_around_and_said():
    """Four racks of four: any of them may go, and the reason has it."""
    domains = FailureDomains(levels=("rack",), labels=tuple((f"r{n // 4}",) for n in range(16)))
    choice = decide(cluster(domains=domains), Goal()).choice("redundancy")
    assert choice is not None
    assert choice.numbers["survived_rack"] == 1.0
    assert "of whole losses of a rack it survives 100 %" in choice.reason


def test_the_plan_command_shows_the_choice(tmp_path, capsys):
    """Scheme, reason, runner-up, and what a lost node costs; plan.yaml carries the reason."""
    run = RunDirectory.create(tmp_path / "run")
    run.write_profile(cluster())
    out = tmp_path / "plan.yaml"
    assert app.run(["plan", "--profile", str(tmp_path / "run"), "--out", str(out)]) == 0
    text = capsys.readouterr().out
    assert "redundancy       2 copies, group, host to host" in text
    assert "a lost node costs" in text
    assert "# redundancy = 2 copies, group, host to host: serves" in out.read_text()
