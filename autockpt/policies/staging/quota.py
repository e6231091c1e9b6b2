"""Room on storage: how many checkpoints a quota holds, and what keeping them costs a month.

        n     = keep.last + chain + one being written (as many as may be in flight)
                + one to be read back (+ 6 behind errors that are noticed late)
        bytes = n S rho                         S raw bytes of a state, rho = stored / raw
        money = bytes price_disk + w N price_node 730 h            w waste, N nodes; a month

A quota (`limits.disk`) holds n, or the checkpoints are encoded, or fewer are kept where `keep.last`
is not written, or the policy is refused.  Of what fits, the least money decides where both prices
are known, and else the least waste: price_disk alone decides between equals.  `keep.every` keeps
more with every month, which no quota holds for ever: the plan says how long this one does.

Source: docs/concepts/policy.md, "Room on storage".
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from autockpt.policies.codec import CodecChoice
from autockpt.policies.cost_model.costs import Costs
from autockpt.policies.interval.choose import TIE, Intervals
from autockpt.values.errors import ConfigError
from autockpt.values.goal import Goal, Retention
from autockpt.values.plan import Choice
from autockpt.values.profile import Profile
from autockpt.values.units import format_bytes, format_duration, format_fraction

MARGIN = 1.05
"""Encoded states are reckoned this much larger: ratios drift while a model is trained."""
BEHIND = 6
"""States kept where errors are noticed late: the old one and its successors."""
MONTH_H = 730.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """One way to write checkpoints, with what follows from it."""

    codec: CodecChoice
    costs: Costs
    intervals: Intervals


@dataclass(frozen=True, slots=True, kw_only=True)
class RoomChoice:
    """The encoding and intervals taken, the retention, and the reason."""

    way: Way
    retention: Retention
    choice: Choice


def choose_room(profile: Profile, goal: Goal, ways: Sequence[Way]) -> RoomChoice:
    """The first way, unless another fits the quota or costs less; its codec's reason says so.

    Raises ConfigError where nothing fits `limits.disk`, naming the nearest values that do.
    """
    keep = _kept(profile, goal, ways)
    taken = min(
        _fitting(profile, goal, ways, keep), key=lambda way: _rank(profile, goal, way, ways)
    )
    retention = replace(goal.retention, keep_last=keep)
    codec = taken.codec.choice
    reasons = [
        codec.reason,
        *_quota_reason(profile, goal, taken, ways),
        *_money(profile, goal, ways),
    ]
    numbers = dict(codec.numbers)
    if goal.prices.disk_per_gb_month is not None:
        numbers["disk_per_month"] = _disk_money(profile, goal, taken)
    if taken is not ways[0]:
        quota = not _fits(profile, goal, ways[0], keep)
        codec = replace(codec, binding="limits.disk" if quota else "prices.disk", runner_up="none")
    codec = replace(codec, reason="; ".join(reasons), numbers=numbers)
    return RoomChoice(
        way=replace(taken, codec=replace(taken.codec, choice=codec)),
        retention=retention,
        choice=_retention_choice(profile, goal, taken, retention),
    )


def storage_matters(goal: Goal) -> bool:
    """Whether the goal states a price or quota of storage, besides its speed."""
    return goal.limits.disk_bytes is not None or goal.prices.disk_per_gb_month is not None


def states(goal: Goal, way: Way, keep: int) -> int:
    """Most states on storage at once, besides the copies of `keep.every` and the spare files."""
    kept = keep + goal.retention.keep_best + _behind(goal, keep)
    return kept + way.codec.chain + (goal.pins.in_flight or 1) + 1


def _behind(goal: Goal, keep: int) -> int:
    """States kept beside the newest where errors are noticed late; of those two tell the time."""
    return 0 if goal.retention.reach_s is None else BEHIND + (keep < 2)


def bytes_each(profile: Profile, way: Way) -> float:
    """Of one state of the whole job, as it is stored."""
    raw, share = profile.state.total_bytes * profile.fingerprint.world_size, way.codec.stored_share
    return float(raw if share >= 1.0 else min(raw, raw * share * MARGIN))


# --- the quota ------------------------------------------------------------------------------------


def _needed(profile: Profile, goal: Goal, way: Way, keep: int) -> float:
    return states(goal, way, keep) * bytes_each(profile, way)


def _fits(profile: Profile, goal: Goal, way: Way, keep: int) -> bool:
    quota = goal.limits.disk_bytes
    return quota is None or _needed(profile, goal, way, keep) <= quota


def _fitting(profile: Profile, goal: Goal, ways: Sequence[Way], keep: int) -> list[Way]:
    return [way for way in ways if _fits(profile, goal, way, keep)]


def _kept(profile: Profile, goal: Goal, ways: Sequence[Way]) -> int:
    """`keep.last`; if it is not written, the largest number up to its default that fits."""
    wanted = goal.retention.keep_last
    least = wanted if goal.pins.keep_last is not None else 1
    for keep in range(wanted, least - 1, -1):
        if _fitting(profile, goal, ways, keep):
            return keep
    raise ConfigError(_too_small(profile, goal, ways, least))


def _too_small(profile: Profile, goal: Goal, ways: Sequence[Way], keep: int) -> str:
    quota = goal.limits.disk_bytes or 0
    way = min(ways, key=lambda one: _needed(profile, goal, one, keep))
    needed, each = _needed(profile, goal, way, keep), bytes_each(profile, way)
    nearest = [f"limits.disk {_up(needed)}"]
    fewer = next((n for n in range(keep - 1, 0, -1) if states(goal, way, n) <= quota // each), 0)
    if fewer:
        nearest.append(f"keep.last {fewer}")
    if goal.pins.codec == "none" and profile.codecs:
        nearest.append("disk.codec auto, which may encode them")
    return (
        f"limits.disk is {format_bytes(quota)}, and {states(goal, way, keep)} states of "
        f"{format_bytes(each)} ({_made_of(goal, way, keep)}) take {format_bytes(needed)}; "
        f"nearest: {' or '.join(nearest)}"
    )


def _made_of(goal: Goal, way: Way, keep: int) -> str:
    flying = goal.pins.in_flight or 1
    parts = [f"{keep} kept", f"{flying} being written", "1 to be read back"]
    if way.codec.chain:
        parts.append(f"{way.codec.chain} that others are differences to")
    if behind := _behind(goal, keep):
        parts.append(f"{behind} for errors that are noticed late")
    if goal.retention.keep_best:
        parts.append(f"{goal.retention.keep_best} best")
    return ", ".join(parts)


def _up(count: float) -> str:
    """A size that is enough and can be pasted into a policy file."""
    return f"{-(-int(count) // 10**6)} MB"


def _quota_reason(profile: Profile, goal: Goal, taken: Way, ways: Sequence[Way]) -> list[str]:
    first, keep = ways[0], goal.retention.keep_last
    if taken is first or _fits(profile, goal, first, keep):
        return []
    said = (
        f"limits.disk of {format_bytes(goal.limits.disk_bytes or 0)} does not hold "
        f"{states(goal, first, keep)} states of {format_bytes(bytes_each(profile, first))}"
    )
    return [said + (", and encoding takes cores from the training" if taken.codec.crowded else "")]


# --- money ----------------------------------------------------------------------------------------


def _rank(profile: Profile, goal: Goal, way: Way, ways: Sequence[Way]) -> float:
    """Return the sort key of a way that fits: money, bytes between equals, or the order."""
    place, prices = float(ways.index(way)), goal.prices
    if prices.disk_per_gb_month is None or (way is not ways[0] and way.codec.crowded):
        return place if prices.disk_per_gb_month is None else float("inf")
    if prices.node_per_h is not None:
        return _disk_money(profile, goal, way) + _time_money(profile, goal, way)
    least = min(one.intervals.waste.total for one in ways)
    if way.intervals.waste.total > least * (1.0 + TIE):
        return float("inf")
    return _disk_money(profile, goal, way)


def _stored(profile: Profile, goal: Goal, way: Way) -> float:
    """Bytes on storage, on average over the first month."""
    count = states(goal, way, goal.retention.keep_last) + _spaced(goal, way) / 2.0
    return count * bytes_each(profile, way)


def _spaced(goal: Goal, way: Way) -> float:
    """Return the number of checkpoints that `keep.every` adds in a month."""
    every_s = _every_s(goal, way)
    return MONTH_H * 3600.0 / every_s if every_s else 0.0


def _every_s(goal: Goal, way: Way) -> float:
    """Seconds between the checkpoints that `keep.every` keeps; 0 without it."""
    keep = goal.retention
    if keep.keep_every_s is not None:
        return max(keep.keep_every_s, way.intervals.disk_period_s)
    steps = keep.keep_every_steps or 0
    return steps and max(steps * way.costs.iteration_s, way.intervals.disk_period_s)


def _disk_money(profile: Profile, goal: Goal, way: Way) -> float:
    return _stored(profile, goal, way) / 1e9 * (goal.prices.disk_per_gb_month or 0.0)


def _time_money(profile: Profile, goal: Goal, way: Way) -> float:
    hours = MONTH_H * profile.fingerprint.nodes * way.intervals.waste.total
    return hours * (goal.prices.node_per_h or 0.0)


def _money(profile: Profile, goal: Goal, ways: Sequence[Way]) -> list[str]:
    """Return the cost of each way, in sentences; none without a price of storage."""
    prices = goal.prices
    if prices.disk_per_gb_month is None:
        return []
    said = []
    for way in ways:
        kept, waste = _stored(profile, goal, way), way.intervals.waste.total
        name = ", ".join(dict.fromkeys(way.codec.codec.values())) or "none"
        text = (
            f"{name} keeps {format_bytes(kept)} for "
            f"{_amount(_disk_money(profile, goal, way), prices.currency)} a month"
        )
        if prices.node_per_h is not None:
            text += (
                f" and wastes {format_fraction(waste)} of the time for "
                f"{_amount(_time_money(profile, goal, way), prices.currency)}"
            )
        said.append(text)
    return [", ".join(said)]


def _amount(money: float, currency: str) -> str:
    return f"{money:.4g} {currency}"


# --- what is kept ---------------------------------------------------------------------------------


def _retention_choice(profile: Profile, goal: Goal, way: Way, keep: Retention) -> Choice:
    each, quota = bytes_each(profile, way), goal.limits.disk_bytes
    count = states(goal, way, keep.keep_last)
    numbers = {"bytes_each": each, "keep_last": float(keep.keep_last), "states": float(count)}
    reason = (
        f"{keep.keep_last} verified checkpoints, and what is under way, take up to "
        f"{format_bytes(count * each)} and reach back "
        f"{format_duration(keep.keep_last * way.intervals.disk_period_s)}"
    )
    if quota is not None:
        numbers["limit_bytes"] = float(quota)
        reason += f", of the {format_bytes(quota)} of limits.disk"
        every_s = _every_s(goal, way)
        if every_s:
            left_s = (quota - count * each) / each * every_s
            reason += f"; those of keep.every fill the rest in {format_duration(left_s)}"
    fewer = keep.keep_last < goal.retention.keep_last
    if fewer:
        reason += f"; {goal.retention.keep_last} do not fit"
    return Choice(
        name="retention",
        chosen=f"last {keep.keep_last}{_spacing(keep)}",
        reason=reason + _reach(keep),
        numbers=numbers,
        runner_up=f"last {goal.retention.keep_last}" if fewer else "",
        binding="limits.disk" if fewer else "",
    )


def _spacing(keep: Retention) -> str:
    said = f", the {keep.keep_best} of {keep.metric}" if keep.keep_best else ""
    if keep.keep_every_s is not None:
        said += f" and one every {format_duration(keep.keep_every_s)}"
    elif keep.keep_every_steps is not None:
        said += f" and one every {keep.keep_every_steps} steps"
    return said + (f" for {format_duration(keep.ttl_s)}" if keep.ttl_s is not None else "")


def _reach(keep: Retention) -> str:
    """The clause on errors that are noticed late."""
    if keep.reach_s is None:
        return ""
    return (
        f"; errors of the state are noticed within {format_duration(keep.reach_s)}, and one from "
        "before them is kept beside"
    )
