"""Errors that nobody notices at once: verify before a checkpoint counts, and keep enough of them.

A pattern is W seconds of work, a verification of V seconds and a checkpoint of C seconds.  A silent
error (rate Lambda_s, during work) is found by the verification and costs the whole pattern; a
failure (rate Lambda_f) is noticed at once and costs half of it on average:

    h(W) = (V + C) / W + (Lambda_s + Lambda_f / 2) W.

Nothing here verifies; `persist`'s digests prove that bytes are what was copied, not that they were
right.  The forms say what a verification is worth, and how far back checkpoints have to reach.
"""

import math

from autockpt.values.errors import ConfigError


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


def verified_waste(
    work_s: float,
    checkpoint_s: float,
    verification_s: float,
    *,
    silent_per_s: float,
    failures_per_s: float,
    recover_s: float = 0.0,
) -> float:
    """First-order waste rate of the pattern: h(W) + (Lambda_s + Lambda_f) R.

    Source: as `verified_work_s`; R = recover_s.  Within 1 % of time of a simulation while the waste
    is at most 10 % (a test).
    """
    _check(checkpoint_s, verification_s, silent_per_s, failures_per_s)
    tuned = (verification_s + checkpoint_s) / work_s
    tuned += (silent_per_s + failures_per_s / 2.0) * work_s
    return tuned + (silent_per_s + failures_per_s) * recover_s


def checkpoints_to_keep(detection_latency_s: float, period_s: float) -> int:
    """Checkpoints to keep so that one from before an error is left when it is noticed.

    In L seconds at most floor(L / T) + 1 checkpoints are taken, all of them spoiled, and one more
    has to be left; L = detection_latency_s, T = period_s.
    Raises ConfigError unless L >= 0 and T > 0.
    """
    if detection_latency_s < 0 or not period_s > 0:
        raise ConfigError(f"latency {detection_latency_s} s and period {period_s} s: >= 0 and > 0")
    return math.floor(detection_latency_s / period_s) + 2


def _check(*inputs: float) -> None:
    if min(inputs) < 0:
        raise ConfigError(f"costs and rates {inputs} must not be negative")
