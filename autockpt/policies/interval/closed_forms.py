"""How often: the closed forms for the interval of one tier, and of several.

All follow from one first-order model.  A checkpoint costs c seconds of training, and a failure
(rate Lambda per second) loses half an interval on average.  A period of T seconds therefore wastes

    w(T) = c / T + Lambda T / 2        with its minimum at T* = sqrt(2 c / Lambda).

Latency until recoverable, detection, restart and restore add a constant and do not move T*.
The minimum is flat: an interval x times off costs (x + 1/x) / 2 of the minimum (x = 1.25: 2.5 %).

Here stand formulas only; `frequency` clamps, nests and rounds them to iterations.
"""

import math
from collections.abc import Callable, Sequence

from autockpt.values.errors import ConfigError


def young_interval_s(checkpoint_cost_s: float, mtbf_s: float) -> float:
    """Interval (s) minimising the expected lost time; assumes cost << MTBF.

    Source: Young 1974, sqrt(2 C M); C = checkpoint_cost_s, M = mtbf_s.
    Raises ConfigError if the cost is negative or the MTBF not positive.
    """
    _check(checkpoint_cost_s, mtbf_s)
    return math.sqrt(2.0 * checkpoint_cost_s * mtbf_s)


def daly_interval_s(checkpoint_cost_s: float, mtbf_s: float) -> float:
    """Work (s) between blocking checkpoints, good to 0.3 % up to C / M = 0.3.

    Source: Daly 2006, eq. 37: sqrt(2 C M) [1 + 1/3 sqrt(C / 2M) + 1/9 (C / 2M)] - C for C < 2M,
    else M; C = checkpoint_cost_s, M = mtbf_s.  Raises ConfigError as `young_interval_s`.
    """
    _check(checkpoint_cost_s, mtbf_s)
    if checkpoint_cost_s >= 2.0 * mtbf_s:
        return mtbf_s
    ratio = checkpoint_cost_s / (2.0 * mtbf_s)
    series = 1.0 + math.sqrt(ratio) / 3.0 + ratio / 9.0
    return math.sqrt(2.0 * checkpoint_cost_s * mtbf_s) * series - checkpoint_cost_s


def exact_interval_s(checkpoint_cost_s: float, mtbf_s: float) -> float:
    """Work (s) between blocking checkpoints that minimises the wall time exactly.

    Source: M (1 + W0(-e^(-C / M - 1))), the minimiser of Daly's complete wall time F(tau) =
    (e^((tau + C) / M) - 1) / tau.  C = checkpoint_cost_s, M = mtbf_s, W0 = Lambert's function.
    Restart and restore drop out.  Raises ConfigError as `young_interval_s`.
    """
    _check(checkpoint_cost_s, mtbf_s)
    return mtbf_s * _one_plus_lambert_w0(checkpoint_cost_s / mtbf_s)


def first_order_period_s(cost_s: float, failures_per_s: float) -> float:
    """T* = sqrt(2 c / Lambda) seconds from one checkpoint to the next; infinite for Lambda = 0.

    Source: sqrt(2 (s + sigma P) / Lambda), the minimiser of w(T) above. c = cost_s is the stall s
    plus the loss of training while the background work runs, sigma P.  Raises ConfigError for
    negative inputs.
    """
    if cost_s < 0 or failures_per_s < 0:
        raise ConfigError(f"cost {cost_s} s and rate {failures_per_s} /s must not be negative")
    if failures_per_s == 0:
        return math.inf
    return math.sqrt(2.0 * cost_s / failures_per_s)


def best_period_s(cost_s: float, failures_per_s: float) -> float:
    """Period (s) from one checkpoint to the next that minimises the wall time exactly.

    The exact form gives the work between two checkpoints; the cost is added to make it a period.
    One form for all inputs: two forms with a switch between them lengthened the period where the
    failure rate rose past the switch.  Infinite without failures.
    """
    if cost_s < 0 or failures_per_s < 0:
        raise ConfigError(f"cost {cost_s} s and rate {failures_per_s} /s must not be negative")
    if failures_per_s == 0:
        return math.inf
    return exact_interval_s(cost_s, 1.0 / failures_per_s) + cost_s


def ordered_periods_s(
    costs_s: Sequence[float],
    rates_per_s: Sequence[float],
    *,
    form: Callable[[float, float], float] = best_period_s,
) -> list[float]:
    """Best period of each level, cheapest level first, never shorter than that of the level below.

    If the unconstrained optimum of a level is longer than that of the next, the two share one
    period with their costs and rates added.  This is pool adjacent violators, exact for the
    first-order sum.

    Source: multi-level w = sum C_i / T_i + sum Lambda_i T_i / 2.  C_i = costs_s (beyond the level
    below), Lambda_i = rates_per_s of the failures whose cheapest surviving level is i.  `form`
    gives the period of one level: the exact one, or `first_order_period_s`.
    """
    pools: list[tuple[float, float, int]] = []
    for cost_s, rate_per_s in zip(costs_s, rates_per_s, strict=True):
        pool = (cost_s, rate_per_s, 1)
        while pools and form(*pools[-1][:2]) > form(*pool[:2]):
            below = pools.pop()
            pool = (below[0] + pool[0], below[1] + pool[1], below[2] + pool[2])
        pools.append(pool)
    return [form(cost, rate) for cost, rate, levels in pools for _ in range(levels)]


def checkfreq_steps(
    *,
    iteration_s: float,
    snapshot_s: float,
    persist_s: float,
    overhead_s: float,
    budget: float,
) -> int:
    """Shortest interval (iterations) at which saves do not overlap and cost at most `budget`.

    Source: CheckFreq (FAST'21): k = max(ceil((T_c + T_s - O) / T_i), ceil(O / (p T_i))).  T_i =
    iteration_s, T_c = snapshot_s, T_s = persist_s (storage only).  O = overhead_s (training time
    one checkpoint costs), p = budget (fraction).  It contains no failure rate.  Raises ConfigError
    if the iteration time or the budget is not positive.
    """
    if iteration_s <= 0 or budget <= 0:
        raise ConfigError(f"iteration {iteration_s} s and budget {budget} must be positive")
    # 1e-9: a quotient that is whole but for the last bit of a float is whole.
    pipeline = math.ceil((snapshot_s + persist_s - overhead_s) / iteration_s - 1e-9)
    amortised = math.ceil(overhead_s / (budget * iteration_s) - 1e-9)
    return max(1, pipeline, amortised)


def _check(cost_s: float, mtbf_s: float) -> None:
    if cost_s < 0 or not mtbf_s > 0:
        raise ConfigError(f"cost {cost_s} s must be >= 0 and MTBF {mtbf_s} s > 0")


def _one_plus_lambert_w0(x: float) -> float:
    """y = 1 + W0(-e^(-1-x)) in [0, 1) for x >= 0: the root of y + log(1 - y) + x = 0.

    Newton from the branch-point series y = q - q^2/3 + q^3/36 with q = sqrt(2x).  Solving for y
    instead of W0 keeps all digits for small x, where W0 is close to -1.
    """
    if x == 0:
        return 0.0
    if x > 30.0:
        return 1.0 - math.exp(-1.0 - x)
    q = math.sqrt(2.0 * x)
    y = min(max(q - q * q / 3.0 + q**3 / 36.0, q / 4.0), 1.0 - math.exp(-1.0 - x) / 2.0)
    for _ in range(50):
        residual = y + math.log1p(-y) + x
        step = residual * (1.0 - y) / y
        y = min(max(y + step, y / 2.0), 1.0 - (1.0 - y) / 2.0)
        if abs(step) <= 1e-15:  # rounding of the residual moves y by that much
            break
    return y
