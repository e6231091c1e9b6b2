"""What if the interval, the stall or the failure rate were another?

One text serves two languages.  Each formula below is written with + - * /, brackets, max, min, sqrt
and exp only.  Python evaluates it for the printed page and the browser for the sliders.  No second
copy of the formula exists.

The waste rate, the fraction of time lost, is made of one term per thing that is lost.  A tier i has
stall s_i, slow-down sigma_i while the checkpoint becomes recoverable after L_i (stall included),
period T_i and failure rate Lambda_i.  With restart D and restore R_i:

    w = 1 - (1 - c) e^(-f)
    c = sum_i (s_i + sigma_i L_i) / T_i        f = sum_i Lambda_i (T_i / 2 + L_i + D + R_i)

It is the waste function of the policies, written once more in a form that a page can carry.  A test
holds the two together, and a report says so when they disagree about a plan.
"""

import ast
import json
import math
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from autockpt.values.errors import ConfigError

PARAMETERS = {
    "memory_interval_s": "from one checkpoint to memory to the next",
    "memory_stall_s": "training blocked by a checkpoint to memory",
    "memory_latency_s": "from the boundary until recoverable from memory",
    "memory_slowdown": "fraction training is slower meanwhile",
    "memory_restore_s": "restore from memory",
    "disk_interval_s": "from one checkpoint to disk to the next",
    "disk_stall_s": "training blocked by a checkpoint to disk, beyond the one to memory",
    "disk_latency_s": "from the boundary until durable on disk",
    "disk_slowdown": "fraction training is slower meanwhile",
    "disk_restore_s": "restore from disk",
    "boundary": "fraction of time at iteration boundaries, the same for all intervals",
    "mtbf_s": "mean time between interruptions of the job",
    "process_share": "fraction of interruptions that leave the memory tier alive",
    "restart_s": "detect and restart, before the restore",
}
"""Every parameter of the formulas and its meaning; seconds, or fractions without a suffix."""

TERMS = {
    "stall": "memory_stall_s / memory_interval_s + disk_stall_s / disk_interval_s + boundary",
    "slowdown": (
        "memory_slowdown * memory_latency_s / memory_interval_s"
        " + disk_slowdown * disk_latency_s / disk_interval_s"
    ),
    "lost": (
        "process_share / mtbf_s * (memory_interval_s / 2 + memory_latency_s)"
        " + (1 - process_share) / mtbf_s * (disk_interval_s / 2 + disk_latency_s)"
    ),
    "down": (
        "process_share / mtbf_s * (restart_s + memory_restore_s)"
        " + (1 - process_share) / mtbf_s * (restart_s + disk_restore_s)"
    ),
}
"""The losses, each as if it were alone: blocked, slowed, trained twice, down."""

_CHECKPOINT = f"({TERMS['stall']} + {TERMS['slowdown']})"
_FAILURE = f"({TERMS['lost']} + {TERMS['down']})"
WASTE = f"1 - max(0, 1 - {_CHECKPOINT}) * exp(0 - {_FAILURE})"
"""The waste rate, fraction of time."""

SHARES = {
    name: (
        f"({term}) / max(1, {_CHECKPOINT}) * exp(0 - {_FAILURE})"
        if name in ("stall", "slowdown")
        else f"({term}) * (1 - exp(0 - {_FAILURE})) / max({_FAILURE}, 1e-300)"
    )
    for name, term in TERMS.items()
}
"""The waste rate by loss; adds up to `WASTE`.  Of all time, failures take 1 - e^(-f), and
checkpoints c of the rest."""

OPTIMUM = {
    tier: (
        f"sqrt(2 * ({tier}_stall_s + {tier}_slowdown * {tier}_latency_s) * mtbf_s"
        f" / max({share}, 1e-12))"
    )
    for tier, share in (("memory", "process_share"), ("disk", "1 - process_share"))
}
"""The interval of least waste per tier, before limits.  Source: dw/dT_i = 0."""

SCALES: dict[str, dict[str, int]] = {
    "nodes": {"mtbf_s": -1},
    "storage": {"disk_latency_s": -1, "disk_restore_s": -1},
    "state": {
        f"{tier}_{name}": 1
        for tier in ("memory", "disk")
        for name in ("stall_s", "latency_s", "restore_s")
    },
}
"""Other scales: times as many nodes, times as fast a storage, times as much state.  Each value is
the power with which a parameter follows."""

NEVER_S = 1e12
"""Mean time between interruptions that stands for "none at all": 30 thousand years."""

FORMULA_TEXT = "w = 1 - (1 - \u03a3 (s + \u03c3 L) / T) exp(-\u03a3 \u039b (T/2 + L + D + R))"
"""The formula for people; the sums run over the tiers memory and disk."""

_OPERATORS: dict[type[ast.operator], Callable[[float, float], float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}
_FUNCTIONS: dict[str, Callable[..., float]] = {
    "max": max,
    "min": min,
    "sqrt": math.sqrt,
    "exp": math.exp,
}


class Cost(Protocol):
    """Cost of one checkpoint of a tier and the failures it serves: policies' TierCost fits."""

    @property
    def stall_s(self) -> float: ...
    @property
    def slowdown_s(self) -> float: ...
    @property
    def latency_s(self) -> float: ...
    @property
    def restart_s(self) -> float: ...
    @property
    def restore_s(self) -> float: ...
    @property
    def unnoticed_s(self) -> float: ...
    @property
    def failures_per_s(self) -> float: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class WhatIfCurve:
    """The plan as a point of the waste function, and the policy's own result for it."""

    point: dict[str, float]
    """A value for each of `PARAMETERS`; a tier that is off has zero costs and share."""
    waste: float
    """The policy's own waste rate at this point; a report warns when the formula disagrees."""
    tiers: tuple[str, ...] = ("memory", "disk")
    """Tiers that are on; each is one curve."""
    mtbf_assumed: bool = True
    """No interruption has been observed yet."""

    def __post_init__(self) -> None:
        missing = sorted(set(PARAMETERS) - set(self.point))
        unknown = sorted(set(self.point) - set(PARAMETERS))
        if missing or unknown:
            raise ConfigError(f"what-if point: missing {missing}, unknown {unknown}")
        for name, value in self.point.items():
            if not math.isfinite(value) or value < 0:
                raise ConfigError(f"what-if point: {name} is {value}; expected finite and >= 0")
        for name in ("memory_interval_s", "disk_interval_s", "mtbf_s"):
            if self.point[name] <= 0:
                raise ConfigError(f"what-if point: {name} must be > 0 s")


def what_if(
    *,
    memory: Cost | None,
    disk: Cost,
    memory_period_s: float,
    disk_period_s: float,
    waste: float,
    mtbf_assumed: bool,
    boundary: float = 0.0,
) -> WhatIfCurve:
    """The what-if of a plan, from the arguments of the policies' waste function and its result.

    `memory` None: the tier is off and `disk` carries all failures.  `boundary`: fraction of time
    that all intervals take alike.
    """
    rate = disk.failures_per_s + (memory.failures_per_s if memory else 0.0)
    restart_s = min(disk.restart_s, memory.restart_s) if memory else disk.restart_s
    point = {
        "memory_interval_s": memory_period_s if memory else disk_period_s,
        "disk_interval_s": disk_period_s,
        "mtbf_s": min(NEVER_S, 1 / rate) if rate > 0 else NEVER_S,
        "process_share": memory.failures_per_s / rate if memory and rate > 0 else 0.0,
        "restart_s": restart_s,
        "boundary": boundary,
    }
    for tier, cost in (("memory", memory), ("disk", disk)):
        latency_s = cost.latency_s if cost else 0.0
        # Without latency there is no time to be slower in: the loss counts as a stall.
        slowed_s = cost.slowdown_s if cost else 0.0
        point[f"{tier}_latency_s"] = latency_s
        point[f"{tier}_slowdown"] = slowed_s / latency_s if latency_s > 0 else 0.0
        point[f"{tier}_stall_s"] = (cost.stall_s if cost else 0.0) + (
            0.0 if latency_s > 0 else slowed_s
        )
        # Work on a state that was wrong already is lost for good: time as a restore is.
        back_s = cost.restart_s + cost.restore_s + cost.unnoticed_s if cost else restart_s
        point[f"{tier}_restore_s"] = back_s - restart_s
    tiers = ("memory", "disk") if memory else ("disk",)
    return WhatIfCurve(point=point, waste=waste, tiers=tiers, mtbf_assumed=mtbf_assumed)


def evaluate(expression: str, values: Mapping[str, float]) -> float:
    """The value of an expression of this module at `values`.

    Raises ConfigError for anything but arithmetic, max, min, sqrt, exp and known names.
    """
    return _value(ast.parse(expression, mode="eval").body, values)


def waste(point: Mapping[str, float]) -> float:
    """Fraction of time lost at `point`."""
    return evaluate(WASTE, point)


def scaled(point: Mapping[str, float], times: Mapping[str, float]) -> dict[str, float]:
    """`point` with `times` as many nodes, as fast a storage, as much state; see `SCALES`."""
    moved = dict(point)
    for scale, factor in times.items():
        for name, power in SCALES[scale].items():
            moved[name] *= factor**power
    return moved


def terms(point: Mapping[str, float]) -> dict[str, float]:
    """Return the waste at `point` by loss; adds up to `waste`."""
    return {name: evaluate(expression, point) for name, expression in SHARES.items()}


def optimum_s(tier: str, point: Mapping[str, float]) -> float:
    """Interval of least waste for one tier; no limit is applied."""
    return evaluate(OPTIMUM[tier], point)


def javascript() -> str:
    """The same as JavaScript: `waste(v)`, `terms(v)`, `optimum.memory(v)` and `scales`."""
    names = ", ".join(PARAMETERS)
    parts = [f"{name}: {expression}" for name, expression in SHARES.items()]
    best = [f"{tier}: ({{{names}}}) => {expression}" for tier, expression in OPTIMUM.items()]
    return "\n".join(
        (
            "const {max, min, sqrt, exp} = Math;",
            f"const waste = ({{{names}}}) => {WASTE};",
            f"const terms = ({{{names}}}) => ({{{', '.join(parts)}}});",
            f"const optimum = {{{', '.join(best)}}};",
            f"const scales = {json.dumps(SCALES)};",
        )
    )


def _value(node: ast.expr, values: Mapping[str, float]) -> float:
    if isinstance(node, ast.Constant) and isinstance(node.value, int | float):
        return float(node.value)
    if isinstance(node, ast.Name) and node.id in values:
        return values[node.id]
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        left, right = _value(node.left, values), _value(node.right, values)
        return _OPERATORS[type(node.op)](left, right)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and not node.keywords:
        function = _FUNCTIONS.get(node.func.id)
        if function is not None:
            return function(*(_value(argument, values) for argument in node.args))
    raise ConfigError(f"what-if formula: {ast.unparse(node)!r} is not arithmetic on known names")
