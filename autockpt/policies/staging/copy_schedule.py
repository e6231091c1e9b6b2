"""When a snapshot is copied: under the compute, at the boundary, or in windows, by what each costs.

cost = stall + slow-down of one snapshot.  Where the profile took snapshots under a schedule its
measure stands for the prediction, because overlap can cost more than waiting.  A run may try again.
"""

from dataclasses import replace

from autockpt.policies.cost_model.costs import (
    SCHEDULE_WORKS,
    Costs,
    copy_link,
    profile_costs,
    schedule_measure,
)
from autockpt.policies.staging.idle_windows import WORTH, WindowFit, fit_windows
from autockpt.values.goal import Goal
from autockpt.values.plan import Choice, Schedule, Staging
from autockpt.values.profile import Profile, StorageMeasure
from autockpt.values.units import format_duration

ADVANTAGE = 0.97
"""A schedule must be 3 % cheaper than lazy copying, and windows than the best other one."""
HOPELESS = 2.0
"""Times the cost of the best: a schedule beyond it is not tried in a run."""


def choose_schedule(
    profile: Profile, goal: Goal, base: Staging, write: StorageMeasure | None
) -> tuple[Staging, Costs, Choice]:
    """Lazy copying, unless its interference costs more than blocking for the whole copy, or idle
    windows take enough of it out of the way."""
    fit = fit_windows(profile, copy_link(profile))
    found = {
        s.schedule: (s, profile_costs(profile, s, write=write)) for s in _ways(base, goal, fit)
    }
    cost = {name: _snapshot_cost_s(costs) for name, (_, costs) in found.items()}
    predicted = _predicted(profile, found, write)
    pinned, windows = goal.pins.schedule, _usable(profile, fit)
    ways = _copying_ways(profile, windows=windows)
    kept = _within_limit(goal, found, ways)
    chosen = pinned or _cheapest(goal, cost, kept)
    compare: tuple[Schedule, ...] = ()
    if not pinned:
        compare = _rivals(goal, cost, kept, chosen) if windows else ()
        compare = compare or _unproven(profile, goal, base, cost, kept, chosen)
    other = min((name for name in cost if name != chosen), key=lambda name: cost[name])
    staging, costs = found[chosen]
    if compare:
        margin = fit.margin if fit is not None else staging.window_margin
        staging = replace(staging, compare=compare, window_margin=margin)
    limited = not pinned and chosen != _cheapest(goal, cost, ways)
    reasons = (
        "measured in turn" if predicted else "",
        "pinned by staging.schedule" if pinned else _schedule_reason(profile, cost, chosen, kept),
        _window_words(profile, goal, fit),
        f"the run takes {', '.join(compare)} in turn and keeps the best" if compare else "",
    )
    return (
        staging,
        costs,
        Choice(
            name="staging",
            chosen=f"{chosen}, {_staging_words(staging)}",
            reason=f"{chosen} costs {format_duration(cost[chosen])} of training per snapshot, "
            f"{other} {format_duration(cost[other])}; " + "; ".join(filter(None, reasons)),
            numbers={
                **{f"{name}_cost_s": seconds for name, seconds in cost.items()},
                **predicted,
                **(fit.numbers if fit is not None else {}),
            },
            runner_up=other,
            binding="staging.schedule" if pinned else "limits.stall" if limited else "",
        ),
    )


def _ways(base: Staging, goal: Goal, fit: WindowFit | None) -> list[Staging]:
    """Every schedule that can be thought of here."""
    ways = [replace(base, schedule="lazy"), replace(base, schedule="blocking")]
    if fit is not None:
        ways.append(replace(base, schedule="windows", window_margin=fit.margin))
    elif goal.pins.schedule == "windows":
        ways.append(replace(base, schedule="windows"))
    return ways


def _snapshot_cost_s(costs: Costs) -> float:
    """Training time that a snapshot takes: the stall and the slow-down."""
    return costs.stall_s + costs.copy_slowdown_s


def _predicted(
    profile: Profile, found: dict[Schedule, tuple[Staging, Costs]], write: StorageMeasure | None
) -> dict[str, float]:
    """Return the predicted costs of the measured schedules, for comparison."""
    others = tuple(m for m in profile.interference if m.work not in SCHEDULE_WORKS.values())
    guessed = replace(profile, interference=others)
    return {
        f"{name}_predicted_s": _snapshot_cost_s(profile_costs(guessed, staging, write=write))
        for name, (staging, _) in found.items()
        if schedule_measure(profile, name) is not None
    }


def _usable(profile: Profile, fit: WindowFit | None) -> bool:
    """Windows take enough; of a GPU only where their cost was measured."""
    known = not profile.fingerprint.gpus or schedule_measure(profile, "windows") is not None
    return fit is not None and fit.share >= WORTH and profile.state.lazy_bytes > 0 and known


def longest_stall_s(costs: Costs) -> float:
    """Return the stall that `limits.stall` bounds: a checkpoint to disk, 95th percentile."""
    return costs.stall_high_s + costs.blocked_s


def _copying_ways(profile: Profile, *, windows: bool) -> tuple[Schedule, ...]:
    """Return the schedules that need no pin; the first is taken unless another is cheaper."""
    lazy: tuple[Schedule, ...] = ("lazy",) if profile.state.lazy_bytes > 0 else ()
    return (*lazy, "blocking", *(("windows",) if windows else ()))


def _within_limit(
    goal: Goal, found: dict[Schedule, tuple[Staging, Costs]], ways: tuple[Schedule, ...]
) -> tuple[Schedule, ...]:
    """The ways that keep `limits.stall`; where none does, the one that is nearest to it."""
    stall_s = {name: longest_stall_s(found[name][1]) for name in ways}
    limit_s = goal.limits.stall_s
    kept = tuple(name for name in ways if limit_s is None or stall_s[name] <= limit_s)
    return kept or (min(ways, key=lambda name: stall_s[name]),)


def _cheapest(goal: Goal, cost: dict[Schedule, float], ways: tuple[Schedule, ...]) -> Schedule:
    """The first, until another one is 3 % better."""
    chosen, *others = ways
    for name in others:
        avoided = name == "blocking" and goal.objective == "stall"
        if cost[name] < ADVANTAGE * cost[chosen] and not avoided:
            chosen = name
    return chosen


def _rivals(
    goal: Goal, cost: dict[Schedule, float], kept: tuple[Schedule, ...], chosen: Schedule
) -> tuple[Schedule, ...]:
    """Schedules that the run should try before it believes a prediction, the chosen first.

    These are windows, the best other one, and all that cost no more than `HOPELESS` times that.  ()
    where windows are hopeless or not allowed, or the plan is not to be changed.
    """
    if goal.pins.retune in (False, "observe") or "windows" not in kept:
        return ()
    others = [
        name
        for name in kept
        if name != "windows" and not (name == "blocking" and goal.objective == "stall")
    ]
    best_s = min((cost[name] for name in others), default=0.0)
    close = [n for n in others if cost[n] <= HOPELESS * best_s]
    if not close or cost["windows"] > HOPELESS * best_s:
        return ()
    return tuple(sorted((*close, "windows"), key=lambda name: (name != chosen, cost[name])))


def _unproven(
    profile: Profile,
    goal: Goal,
    base: Staging,
    cost: dict[Schedule, float],
    kept: tuple[Schedule, ...],
    chosen: Schedule,
) -> tuple[Schedule, ...]:
    """Lazy and blocking, where what one of them costs was never measured; the chosen first.

    A prediction is a best case: a schedule predicted at more than `HOPELESS` times the other is not
    tried.
    """
    if goal.pins.retune in (False, "observe") or goal.objective == "stall":
        return ()
    if base.persist == "sync" or not {"lazy", "blocking"} <= set(kept):
        return ()
    known = {"lazy": profile.stall_s, "blocking": schedule_measure(profile, "blocking")}
    other: Schedule = "lazy" if chosen == "blocking" else "blocking"
    if known[chosen] is not None and known[other] is not None:
        return ()
    if known[other] is None and cost[other] > HOPELESS * cost[chosen]:
        return ()
    return (chosen, other)


def _window_words(profile: Profile, goal: Goal, fit: WindowFit | None) -> str:
    """Describe the measured windows; "" if the goal does not ask for them."""
    if fit is None:
        learned = "no windows were measured: the run learns them in its first iterations"
        return learned if goal.pins.schedule == "windows" else ""
    if profile.fingerprint.gpus and schedule_measure(profile, "windows") is None:
        doubt = "on a GPU windows are chosen only where the profile measured what they cost"
        return f"{fit.sentence}; {doubt}"
    return fit.sentence


def _schedule_reason(
    profile: Profile, cost: dict[Schedule, float], chosen: Schedule, kept: tuple[Schedule, ...]
) -> str:
    if chosen == "windows":
        return "the copy moves while the training idles"
    if profile.state.lazy_bytes == 0:
        return "no tensor was proven unchanged until the optimizer step, so nothing can be lazy"
    if chosen == "blocking":
        if "lazy" not in kept:
            return "limits.stall rules lazy out"
        return "the interference of copying under compute costs more than waiting"
    if cost["blocking"] < cost["lazy"]:
        if "blocking" not in kept:
            return "limits.stall rules blocking out"
        return "blocking is not 3 % better, or stalls are what the objective avoids"
    return "the copy hides under forward and backward"


def _staging_words(staging: Staging) -> str:
    words = [
        staging.persist,
        "streaming" if staging.streaming else "write after seal",
        "preallocated" if staging.preallocate else "allocated at every save",
    ]
    if staging.in_flight:
        words.append(f"{staging.in_flight} in flight")
    if staging.device_clone == "on":
        words.append("cloned on the device")
    return ", ".join(words)
