"""Exact goodput of one level of checkpoints under Poisson failures: it checks the closed forms.

From one failure to the next is a renewal.  It is an exponential time of mean M, then a recovery of
rho seconds that a further failure starts anew.  A checkpoint begins every T seconds, costs c of
them, and is recoverable P seconds after it began.  The n-th one counts if the failure comes later
than n T - c + P, so that

    E[checkpoints] = e^(-(P - c) / M) / (e^(T / M) - 1)        E[time] = M e^(rho / M)

    goodput(T) = (T - c) / (M (e^(T / M) - 1)) * e^(-(P - c + rho) / M).

Latency and recovery are a factor in front: they move no interval, however long they are.  Blocking
checkpoints have P = c, which is Daly's complete wall time.
"""

import math

from autockpt.values.errors import ConfigError


def exact_goodput(
    period_s: float, *, cost_s: float, latency_s: float, recover_s: float, mtbf_s: float
) -> float:
    """Fraction of wall time that is work which counts, 0..1.

    T = period_s from one checkpoint to the next, c = cost_s (stall and slow-down), P = latency_s,
    rho = recover_s (detection, restart, restore), M = mtbf_s.  Needs c <= P, as a stall is part of
    the latency.  Source: renewal argument above; for P = c Daly's complete model, 2006.
    Raises ConfigError unless 0 <= c <= P, c < T, rho >= 0 and M > 0.
    """
    if not (0 <= cost_s <= latency_s and cost_s < period_s and recover_s >= 0 and mtbf_s > 0):
        raise ConfigError(
            f"cost {cost_s} s, latency {latency_s} s, period {period_s} s, recovery {recover_s} s, "
            f"MTBF {mtbf_s} s: expected 0 <= cost <= latency, cost < period, MTBF > 0"
        )
    if period_s / mtbf_s > 700.0:  # e^x is beyond a float, and nothing is ever finished
        return 0.0
    factor = math.exp(-(latency_s - cost_s + recover_s) / mtbf_s)
    return factor * (period_s - cost_s) / (mtbf_s * math.expm1(period_s / mtbf_s))


def overlap_period_s(
    checkpoint_s: float, *, work_rate: float, recover_s: float, mtbf_s: float
) -> float:
    """Period (s) of checkpoints that take C seconds in which work goes on at a part of its speed.

    Source: T* = sqrt(2 (1 - w) C (M - (D + R + w C))), the exact minimiser of `overlap_time`;
    Aupy, Benoit, Herault, Robert, Dongarra 2013.  C = checkpoint_s, w = work_rate (0: blocking,
    1: free), D + R = recover_s, M = mtbf_s.  Not below C: one checkpoint at a time.
    Raises ConfigError where recovery and overlap leave nothing of the MTBF.
    """
    _check_overlap(checkpoint_s, work_rate, recover_s, mtbf_s)
    left_s = mtbf_s - recover_s - work_rate * checkpoint_s
    return max(checkpoint_s, math.sqrt(2.0 * (1.0 - work_rate) * checkpoint_s * left_s))


def overlap_time(
    period_s: float, checkpoint_s: float, *, work_rate: float, recover_s: float, mtbf_s: float
) -> float:
    """Wall time per unit of work in the overlap model; infinite where no work is left.

    Source: T / ((T - (1 - w) C) (1 - (D + R + w C + T / 2) / M)), symbols of `overlap_period_s`.  A
    failure loses half a period and the work done during the copy that it spoiled.
    """
    _check_overlap(checkpoint_s, work_rate, recover_s, mtbf_s)
    working_s = period_s - (1.0 - work_rate) * checkpoint_s
    alive = 1.0 - (recover_s + work_rate * checkpoint_s + period_s / 2.0) / mtbf_s
    return period_s / (working_s * alive) if working_s > 0 and alive > 0 else math.inf


def _check_overlap(checkpoint_s: float, work_rate: float, recover_s: float, mtbf_s: float) -> None:
    if checkpoint_s < 0 or recover_s < 0 or not 0 <= work_rate <= 1:
        raise ConfigError(
            f"checkpoint {checkpoint_s} s, recovery {recover_s} s, work rate {work_rate}: times "
            "must not be negative and the rate must be between 0 and 1"
        )
    if recover_s + work_rate * checkpoint_s >= mtbf_s:
        raise ConfigError(
            f"recovery of {recover_s} s and {work_rate} of a checkpoint of {checkpoint_s} s take "
            f"the whole MTBF of {mtbf_s} s: no interval gets the job on"
        )
