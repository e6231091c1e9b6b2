"""How far the world must move before a decision changes: computed by the functions that decided.

Each input is scaled until another choice wins; the nearest factor on either side is reported.  A
decision that no factor up to `FURTHEST` turns is not sensitive to that input.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

from autockpt.policies.cost_model.cost_curve import tiers_of_plan
from autockpt.policies.cost_model.expectation import rates_of
from autockpt.policies.interval.nesting import Tiers
from autockpt.values.errors import ConfigError
from autockpt.values.goal import Goal
from autockpt.values.plan import CheckpointPlan, Choice, Decision
from autockpt.values.profile import Distribution, Profile

FURTHEST = 64.0
"""Factors beyond this describe another job."""
GRID = 2.0**0.5
"""Ratio of the factors tried before the bisection: two flips closer than this are seen as none."""
TOLERANCE = 1e-3
"""Relative precision of a factor."""

INTERVALS = ("memory.interval", "disk.interval")
BAND = 1.025
"""Intervals are flat: 1.25 times off the best cost 2.5 % of the tunable waste, which is
negligible."""
APART = 1.25

Decide = Callable[[Profile, Goal], Decision]


@dataclass(frozen=True, slots=True, kw_only=True)
class Flip:
    """One choice would be another if one input were `factor` times what it is."""

    choice: str
    input: str
    """A name of `INPUTS`."""
    factor: float
    becomes: str
    """The choice after the change."""


def even_failures(tiers: Tiers, chosen: tuple[int, int], other: tuple[int, int]) -> float | None:
    """Times as many failures at which both pairs of intervals waste the same; None: never.

    w = C + x F with C paid without failures and F at them, so x = (C1 - C2) / (F2 - F1), exactly.
    """
    mine, theirs = tiers.waste(*chosen), tiers.waste(*other)
    paid, lost = mine.checkpoint - theirs.checkpoint, theirs.failure - mine.failure
    if lost == 0.0 or paid / lost <= 0.0:
        return None
    return paid / lost


def flips(profile: Profile, goal: Goal, decision: Decision, decide: Decide) -> tuple[Flip, ...]:
    """The nearest flips of every choice, by input.  `decide` is what made the decision.

    Intervals follow every input by a step or two.  They count as another choice when keeping the
    old ones would cost `BAND` of the tunable waste more, or a limit moves them by `APART`.
    """
    found: list[Flip] = []
    for name, scale in INPUTS.items():
        if scale(profile, goal, 2.0) == (profile, goal):
            continue  # this job has no such input
        worlds = _Worlds(partial(scale, profile, goal), decide)
        for choice in decision.choices:
            for upward in (True, False):
                found += _nearest(choice, decision.plan, name, worlds, upward=upward)
    return tuple(found)


@dataclass(frozen=True, slots=True, kw_only=True)
class _World:
    """The decision when one input is scaled."""

    decision: Decision
    tiers: Tiers

    def instead(self, choice: Choice, plan: CheckpointPlan) -> str:
        """Return the choice that now replaces `choice`; "" if it stands."""
        now = self.decision.choice(choice.name)
        if now is None or now.chosen == choice.chosen:
            return ""
        if choice.name in INTERVALS and not self._moved(plan):
            return ""
        return now.chosen

    def _moved(self, plan: CheckpointPlan) -> bool:
        old, new = _pair(plan), _pair(self.decision.plan)
        if (old[0] > 0) != (new[0] > 0) or not old[1]:
            return True
        if self.tiers.tunable(*old) > BAND * self.tiers.tunable(*new):
            return True
        ratio = new[1] / old[1]
        bound = any(choice.binding for choice in self.decision.choices if choice.name in INTERVALS)
        return bound and max(ratio, 1.0 / ratio) > APART


class _Worlds:
    """Worlds by factor, each decided once."""

    def __init__(self, inputs: Callable[[float], tuple[Profile, Goal]], decide: Decide) -> None:
        self._inputs, self._decide = inputs, decide
        self._known: dict[float, _World | None] = {}

    def at(self, factor: float) -> _World | None:
        """None where the limits forbid every plan."""
        if factor not in self._known:
            self._known[factor] = self._made(*self._inputs(factor))
        return self._known[factor]

    def _made(self, profile: Profile, goal: Goal) -> _World | None:
        try:
            decision = self._decide(profile, goal)
        except ConfigError:
            return None
        return _World(decision=decision, tiers=tiers_of_plan(profile, goal, decision.plan))


def _nearest(
    choice: Choice, plan: CheckpointPlan, name: str, worlds: _Worlds, *, upward: bool
) -> list[Flip]:
    """The flip nearest to 1 on one side, if there is one."""

    def instead(factor: float) -> str:
        world = worlds.at(factor)
        return "" if world is None else world.instead(choice, plan)

    step = GRID if upward else 1.0 / GRID
    tried = [step**k for k in range(round(math.log(FURTHEST, GRID)) + 1)]
    turned = next((k for k, factor in enumerate(tried) if instead(factor)), 0)
    if not turned:
        return []
    before, after = tried[turned - 1], tried[turned]
    while abs(math.log(after / before)) > TOLERANCE:
        middle = math.sqrt(before * after)
        before, after = (before, middle) if instead(middle) else (middle, after)
    return [Flip(choice=choice.name, input=name, factor=after, becomes=instead(after))]


def _pair(plan: CheckpointPlan) -> tuple[int, int]:
    return plan.tier("memory").interval_steps, plan.tier("disk").interval_steps


# --- the inputs


def _failures(profile: Profile, goal: Goal, factor: float) -> tuple[Profile, Goal]:
    rates, declared = rates_of(profile, goal), goal.failures
    total = (rates.total_per_s - rates.preempted_per_s) * factor
    mtbf_s = 1.0 / total if total > 0 else math.inf
    every_s = declared.preemption_s / factor if declared.preemption_s else None
    declared = replace(declared, mtbf_s=mtbf_s, preemption_s=every_s)
    return profile, replace(goal, failures=declared)


def _stall(profile: Profile, goal: Goal, factor: float) -> tuple[Profile, Goal]:
    return replace(profile, stall_s=_times(profile.stall_s, factor)), goal


def _storage(profile: Profile, goal: Goal, factor: float) -> tuple[Profile, Goal]:
    cells = tuple(
        replace(
            cell,
            alpha_s=cell.alpha_s * factor,
            bytes_per_s=_multiplied(cell.bytes_per_s, 1.0 / factor),
        )
        for cell in profile.storage
    )
    return replace(profile, storage=cells, persist_s=_times(profile.persist_s, factor)), goal


def _interference(profile: Profile, goal: Goal, factor: float) -> tuple[Profile, Goal]:
    scaled = tuple(
        replace(measure, slowdown=_multiplied(measure.slowdown, factor))
        for measure in profile.interference
    )
    return replace(profile, interference=scaled), goal


def _memory(profile: Profile, goal: Goal, factor: float) -> tuple[Profile, Goal]:
    free = {
        name: int(value * factor)
        for name in ("host_available_bytes", "cgroup_available_bytes", "shm_available_bytes")
        if (value := getattr(profile.memory, name)) is not None
    }
    return replace(profile, memory=replace(profile.memory, **free)), goal


def _network(profile: Profile, goal: Goal, factor: float) -> tuple[Profile, Goal]:
    links = tuple(
        replace(link, alpha_s=link.alpha_s * factor, bytes_per_s=link.bytes_per_s / factor)
        if link.between_nodes
        else link
        for link in profile.links
    )
    return replace(profile, links=links), goal


INPUTS: dict[str, Callable[[Profile, Goal, float], tuple[Profile, Goal]]] = {
    "failures": _failures,
    "stall": _stall,
    "storage time": _storage,
    "interference": _interference,
    "host memory": _memory,
    "time to peers": _network,
}
"""Scaled inputs: the name, and the profile and goal with that input `factor` times as large."""


def _times(measured: Distribution | None, factor: float) -> Distribution | None:
    return None if measured is None else _multiplied(measured, factor)


def _multiplied(measured: Distribution, factor: float) -> Distribution:
    return replace(
        measured,
        **{name: getattr(measured, name) * factor for name in ("mean", "p10", "p50", "p90", "p95")},
    )
