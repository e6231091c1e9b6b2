"""Quota and price of storage: what is encoded, how many are kept, and what is refused."""

from dataclasses import replace

import pytest

from autockpt.policies.cost_model.cost_curve import tiers_of_plan
from autockpt.policies.decide import decide
from autockpt.policies.policy_file import parse_policy
from autockpt.policies.staging.quota import MARGIN, MONTH_H
from autockpt.values.errors import ConfigError
from autockpt.values.goal import Goal, Limits, Pins, Prices, Retention
from autockpt.values.plan import Choice, Decision
from autockpt.values.policy_keys.kinds import Money
from tests.support.profiles import STATE_BYTES
from tests.unit.policies.test_codec import deltas, disk_only, job, measured

PLANES = {"parameters": "planes", "moments": "planes"}
FAST = job(2.0)
"""Storage that takes bytes as they are sooner than any encoder gives them."""


def quota(states: float, **more: object) -> Goal:
    """Room for so many states as they are."""
    return Goal(limits=Limits(disk_bytes=int(states * STATE_BYTES)), **more)  # type: ignore[arg-type]


def chosen(decision: Decision, name: str) -> Choice:
    """One choice."""
    found = decision.choice(name)
    assert found is not None
    return found


def test_a_quota_with_room_changes_nothing_but_the_reason() -> None:
    """Three kept, one being written and one to be read back are five states."""
    free, roomy = decide(FAST, Goal()), decide(FAST, quota(5))
    assert roomy.plan.tiers == free.plan.tiers
    assert roomy.plan.retention == free.plan.retention == Retention()
    assert chosen(roomy, "retention").numbers["states"] == 5
    assert "of the 3.6 GB of limits.disk" in chosen(roomy, "retention").reason


def test_what_does_not_fit_as_it_is_is_encoded() -> None:
    """A fast disk would take bytes as they are; the quota decides, and the reason says so."""
    assert not decide(FAST, Goal()).plan.tier("disk").codec
    decision = decide(FAST, quota(4.9))
    assert decision.plan.tier("disk").codec == PLANES
    assert decision.plan.retention.keep_last == 3
    codec = chosen(decision, "codec")
    assert codec.binding == "limits.disk"
    assert "limits.disk of 3.53 GB does not hold 5 states of 720 MB" in codec.reason


def test_what_does_not_fit_encoded_is_kept_less_often() -> None:
    """Two, and then one; each fits with the margin that ratios drift by."""
    for states, keep in ((3.9, 2), (2.9, 1)):
        decision = decide(FAST, quota(states))
        assert decision.plan.tier("disk").codec == PLANES
        assert decision.plan.retention.keep_last == keep
        retention = chosen(decision, "retention")
        assert (retention.binding, retention.runner_up) == ("limits.disk", "last 3")
        assert "3 do not fit" in retention.reason
        each = retention.numbers["bytes_each"]
        assert each == pytest.approx(STATE_BYTES / 1.213 * MARGIN, rel=1e-2)
        assert each * (keep + 2) <= states * STATE_BYTES < each * (keep + 3)


def test_encoding_for_room_says_when_it_takes_cores_from_the_training() -> None:
    """Iterations take twice as long while it encodes."""
    reason = chosen(decide(job(2.0, worth=0.5, slowdown=1.0), quota(4.9)), "codec").reason
    assert "encoding takes cores from the training" in reason


@pytest.mark.parametrize(
    ("goal", "nearest"),
    [
        (quota(1), "nearest: limits.disk 1870 MB"),
        (quota(3, pins=Pins(keep_last=3)), "nearest: limits.disk 3116 MB or keep.last 1"),
        (
            quota(4, pins=Pins(keep_last=3, codec="none")),
            "nearest: limits.disk 3600 MB or keep.last 2 or disk.codec auto",
        ),
    ],
)
def test_a_quota_that_holds_too_little_is_refused_with_the_way_out(
    goal: Goal, nearest: str
) -> None:
    """Every way that the message names works."""
    with pytest.raises(ConfigError, match=r"limits\.disk is .* take .*; nearest:") as refused:
        decide(FAST, goal)
    assert nearest in str(refused.value)
    megabytes = int(nearest.split("limits.disk ")[1].split(" MB")[0])
    wide = replace(goal, limits=Limits(disk_bytes=megabytes * 10**6))
    assert decide(FAST, wide).plan.retention.keep_last == (goal.pins.keep_last or 1)
    if "keep.last" in nearest:
        fewer = int(nearest.split("keep.last ")[1][0])
        less = replace(goal, retention=Retention(keep_last=fewer))
        assert decide(FAST, less).plan.retention.keep_last == fewer


def test_bases_of_deltas_are_counted() -> None:
    """A chain stays on storage: without room for it the codec is planes."""
    profile = job(0.05, codecs=deltas(gap_steps=100))
    decision = decide(profile, replace(disk_only(100), limits=Limits(disk_bytes=10**11)))
    chain = decision.plan.tier("disk").chain
    assert chain >= 1
    assert chosen(decision, "retention").numbers["states"] == 5 + chain
    tight = replace(disk_only(100), limits=Limits(disk_bytes=int(4.5 * STATE_BYTES)))
    assert decide(profile, tight).plan.tier("disk").codec == PLANES


def test_late_errors_and_checkpoints_in_flight_are_counted() -> None:
    """Six more behind what is noticed late, and one more for each in flight."""
    goal = quota(40, retention=Retention(reach_s=3600.0), pins=Pins(in_flight=2))
    assert chosen(decide(FAST, goal), "retention").numbers["states"] == 3 + 2 + 1 + 6
    goal = replace(goal, retention=Retention(reach_s=3600.0, keep_last=1))
    assert chosen(decide(FAST, goal), "retention").numbers["states"] == 2 + 2 + 1 + 6


def test_spaced_checkpoints_fill_a_quota_and_the_plan_says_when() -> None:
    """Room for five more, one every hour."""
    goal = quota(10, retention=Retention(keep_every_s=3600.0))
    reason = chosen(decide(FAST, goal), "retention").reason
    assert "those of keep.every fill the rest in 5 h" in reason


def prices(disk_per_gb_month: float, node_per_h: float | None, currency: str) -> Prices:
    """Prices in one currency."""
    return Prices(
        disk=Money(amount=disk_per_gb_month, currency=currency),
        node=None if node_per_h is None else Money(amount=node_per_h, currency=currency),
    )


def test_dear_storage_and_cheap_nodes_are_encoded_for() -> None:
    """Both sides of the comparison stand in the reason, and the lesser one is taken."""
    dear = prices(5.0, 0.001, "USD")
    decision = decide(FAST, Goal(prices=dear))
    assert decision.plan.tier("disk").codec == PLANES
    codec = chosen(decision, "codec")
    assert codec.binding == "prices.disk"
    assert "none keeps 3.6 GB for 18 USD a month and wastes" in codec.reason
    assert "planes keeps 3.1" in codec.reason
    assert codec.numbers["disk_per_month"] == pytest.approx(18 * MARGIN / 1.213, rel=1e-2)


def test_cheap_storage_and_dear_nodes_are_not() -> None:
    """Encoding makes a checkpoint durable later on a fast disk: that time costs more."""
    slow = job(2.0, codecs=(measured(encode=2e7), measured("moments", 1.21, 2e7)))
    cheap = prices(1e-4, 1000.0, "USD")
    decision = decide(slow, Goal(prices=cheap))
    assert not decision.plan.tier("disk").codec
    assert decision.expected == decide(slow, Goal()).expected


def test_the_cheaper_way_is_taken_at_every_price() -> None:
    """Money per month on both sides of the price at which both cost the same."""
    slow = job(2.0, codecs=(measured(encode=2e7), measured("moments", 1.21, 2e7)))
    codecs = []
    for price in (1e-4, 1e-2, 1.0, 100.0, 1e4):
        goal = Goal(prices=prices(price, 10.0, "EUR"))
        decision, money = decide(slow, goal), {}
        for pin in ("none", "planes"):
            one = decide(slow, replace(goal, pins=Pins(codec=pin)))
            each = chosen(one, "retention").numbers["bytes_each"]
            money[pin] = 5 * each / 1e9 * price + MONTH_H * 10.0 * one.expected.waste
        least = min(money, key=lambda name: money[name])
        codecs.append(least)
        assert bool(decision.plan.tier("disk").codec) == (least == "planes")
        tiers = tiers_of_plan(slow, goal, decision.plan)
        steps = [tier.interval_steps for tier in decision.plan.tiers]
        assert tiers.waste(*steps).total == pytest.approx(decision.expected.waste, rel=1e-12)
    assert {"none", "planes"} == set(codecs)


def test_a_price_alone_costs_no_time() -> None:
    """Without the price of a node only what wastes no more is encoded."""
    slow = job(2.0, codecs=(measured(encode=2e7), measured("moments", 1.21, 2e7)))
    goal = Goal(prices=prices(100.0, None, "USD"))
    assert not decide(slow, goal).plan.tier("disk").codec


@pytest.mark.parametrize(
    ("lines", "complaint"),
    [
        ("limits: {disk: 0 GB}", "must be more than 0"),
        ("limits: {disk: -5 GB}", "is not a size"),
        ("limits: {disk: 500}", "a bare number is ambiguous; write a unit"),
        ("limits: {disk: 500 Gb/s}", "unknown unit"),
        ("prices: {disk: 0.023}", "a bare number is ambiguous"),
        ("prices: {disk: 0 USD/GB-month}", "must be more than 0"),
        ("prices: {disk: -1 USD/GB-month}", "is not a price"),
        ("prices: {disk: 1e999 USD/GB-month}", "is more than any price"),
        ("prices: {disk: 1..2 USD/GB-month}", "is not a price"),
        ("prices: {disk: 0.023 USD/GB}", "is not a price; write e.g. 0.023 USD/GB-month"),
        ("prices: {disk: 0.023 dollars/GB-month}", "is not a price"),
        ("prices: {disk: .nan}", "a bare number is ambiguous"),
        ("prices: {disk: true}", "expected a quantity such as 0.023 USD/GB-month, got true"),
        ("prices: {disk: null}", "null is not a value"),
        ("prices: {disk: {gb: 1}}", "expected one value, got a mapping"),
        ("prices: {node: 32 USD/GB-month}", "is not a price; write e.g. 32 USD/h"),
        ("prices: {node: 32 USD/h, disk: 1 EUR/GB-month}", "in USD, and prices.disk is in EUR"),
        ("prices: {dsik: 1 USD/GB-month}", "did you mean 'disk'?"),
        ("prices: 3", "expected a mapping"),
    ],
)
def test_nonsense_is_refused_with_its_place(lines: str, complaint: str) -> None:
    """Before anything is planned with it."""
    with pytest.raises(ConfigError, match=r"policy.yaml:2") as refused:
        parse_policy(f"version: 1\n{lines}\n")
    assert complaint in str(refused.value)


def test_prices_and_quota_are_read_in_their_units() -> None:
    """Per TB, per GiB; `auto` is none."""
    text = "version: 1\nlimits: {disk: 2 TB}\nprices: {disk: %s, node: 32 EUR/h}\n"
    goal = parse_policy(text % "23 EUR/TB-month").goal
    assert goal.limits.disk_bytes == 2 * 10**12
    assert goal.prices == prices(0.023, 32.0, "EUR")
    binary = parse_policy(text % "1 EUR/GiB-month").goal.prices.disk_per_gb_month
    assert binary == pytest.approx(1e9 / 2**30)
    assert parse_policy("version: 1\nprices: {disk: auto}\n").goal.prices == Prices()
    assert parse_policy("version: 1\nkeep: {last: 2}\n").goal.pins.keep_last == 2
