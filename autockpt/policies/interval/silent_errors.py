"""Silent errors of the state: their cost, and the cost at which a check would pay.

An error that is noticed after L seconds costs the work since, and half an interval before it.  The
checkpoints in between contain it too: Lambda_s (T / 2 + L + P + D + R).  L moves no interval.  It
says how far back a checkpoint has to be kept (`Retention.reach_s`).

Suppose a check of V seconds precedes each checkpoint of C seconds, W seconds of work apart.  A
silent error (rate Lambda_s, during work) is found at the check and costs the whole pattern.  A
failure (rate Lambda_f) costs half of it:

    h(W) = (V + C) / W + (Lambda_s + Lambda_f / 2) W.

autockpt checks that bytes were copied correctly, not that they were right.  `affordable_check_s`
returns the longest check that would pay.
"""

import math

from autockpt.values.decision_inputs import TierCost
from autockpt.values.errors import ConfigError
from autockpt.values.plan import Choice
from autockpt.values.profile import FailureRates
from autockpt.values.units import format_duration


def silent_share(failures: FailureRates) -> float:
    """Fraction of the interruptions that are silent errors, 0..1; 0 where it was not estimated."""
    total = sum(failures.classes.values())
    return failures.classes.get("silent", 0.0) / total if total else 0.0


def verified_work_s(
    checkpoint_s: float, verification_s: float, *, silent_per_s: float, failures_per_s: float
) -> float:
    """Work (s) between verified checkpoints; infinite without errors of either kind.

    Source: W* = sqrt((V + C) / (Lambda_s + Lambda_f / 2)), Benoit, Cavelan, Robert, Sun 2016;
    C = checkpoint_s, V = verification_s, Lambda_s = silent_per_s, Lambda_f = failures_per_s.
    Raises ConfigError for negative inputs.
    """
    _check(checkpoint_s, verification_s, silent_per_s, failures_per_s)
    rate = silent_per_s + failures_per_s / 2.0
    return math.sqrt((verification_s + checkpoint_s) / rate) if rate > 0 else math.inf


def affordable_check_s(
    checkpoint_s: float,
    period_s: float,
    latency_s: float,
    *,
    silent_per_s: float,
    failures_per_s: float,
) -> float:
    """Longest check V (s) with which verified checkpoints waste no more; 0 where none pays.

    Without a check the waste is C / T + (Lambda_s + Lambda_f) T / 2 + Lambda_s L.  With one it is 2
    sqrt((V + C) (Lambda_s + Lambda_f / 2)) at the best W.  Solved for V; symbols of
    `verified_work_s`, T = period_s, L = latency_s.  Without silent errors there is nothing to find:
    0.  Raises ConfigError for negative inputs and a period of 0.
    """
    _check(checkpoint_s, latency_s, silent_per_s, failures_per_s)
    if not period_s > 0:
        raise ConfigError(f"a period of {period_s} s: must be more than 0")
    if not silent_per_s:
        return 0.0
    rate = silent_per_s + failures_per_s / 2.0
    without = checkpoint_s / period_s + (silent_per_s + failures_per_s) * period_s / 2.0
    without += silent_per_s * latency_s
    return max(0.0, without**2 / (4.0 * rate) - checkpoint_s)


def verification_choice(
    disk: TierCost, period_s: float, latency_s: float, silent_per_s: float
) -> Choice:
    """Report that the state is not checked before a save, and how long a check could take."""
    others = max(0.0, disk.failures_per_s - silent_per_s)
    rates = {"silent_per_s": silent_per_s, "failures_per_s": others}
    check_s = affordable_check_s(disk.exposed_s, period_s, latency_s, **rates)
    every_s = verified_work_s(disk.exposed_s, check_s, **rates)
    known = f"come every {format_duration(1 / silent_per_s)}" if silent_per_s else "have no rate"
    worth = "no check would pay"
    if check_s > 0:
        worth = (
            f"a check of the state before each checkpoint would pay if it took less than "
            f"{format_duration(check_s)} (then every {format_duration(every_s)})"
        )
    return Choice(
        name="verification",
        chosen="none",
        reason=(
            f"errors of the state {known} and are noticed within {format_duration(latency_s)}: "
            f"{worth}; autockpt proves bytes, not numbers"
        ),
        numbers={**rates, "silent_latency_s": latency_s, "affordable_check_s": check_s},
    )


def _check(*inputs: float) -> None:
    if min(inputs) < 0:
        raise ConfigError(f"costs and rates {inputs} must not be negative")
