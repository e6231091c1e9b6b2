"""How often the job is interrupted, what survives, and how long recovery takes: priors and history.

Two Poisson processes add up: one per node (hardware; grows with the job), one per job (software,
storage, control plane; does not).  Each rate is Gamma-distributed: n events in E days of exposure
turn Gamma(a, b) into Gamma(a + n, b + E); its mean is the Bayes action for the first-order waste.
Exposure is training time: failures while idle do not count, and runs that ended well count as
exposure.  Old evidence fades with a half-life, because clusters change.

Source: docs/policy.md, "Unknown failure rates".
"""

import math
from collections.abc import Sequence
from statistics import fmean

from autockpt.values.errors import ConfigError
from autockpt.values.failure import FailureRecord
from autockpt.values.profile import Estimate, FailureRates, RatePosterior, RecoveryTimes

DAY_S = 86400.0
NODE_PRIOR = RatePosterior(
    shape=1.0,
    exposure_days=250.0,
    events=0,
    source="prior: 4 failures per 1000 node-days (published fleets: 2.1 to 6.5)",
)
"""Gamma(1, 250 node-days); 90 % interval 0.2 to 12 per 1000 node-days."""
JOB_PRIOR = RatePosterior(
    shape=1.0,
    exposure_days=10.0,
    events=0,
    source="prior: one interruption of the job itself in 10 days (a judgement)",
)
"""Gamma(1, 10 days)."""
ALTERNATIVES = ((10.0, 1e-3), (100.0, 1e-4), (1000.0, 1e-5))
"""The prior may be wrong by these factors, with these odds: a job that fails every 20 minutes is
believed after a few failures instead of after ten days.  Without any event they do not count."""
PROCESS_SHARE_PRIOR = (3.5, 6.5)
"""Beta prior that an interruption leaves the node's memory alive: 35 % with the weight of 10."""
HALF_LIFE_S = 21 * DAY_S
"""Half-life of evidence in training time: within the 14 to 30 days that follow a drifting fleet."""
ASSUMED_DETECT_S = 5.0
"""Failure until noticed: the poll of an elastic launcher."""
ASSUMED_RESTART_S = 30.0
"""Process start, imports and rendezvous of a PyTorch job."""
ASSUMED_RESTORE_S = {"memory": 2.0, "disk": 15.0}
"""Restore when nothing is known: a few gigabytes at memory and at disk speed."""


def estimate_rates(
    records: Sequence[FailureRecord],
    *,
    nodes: int,
    tail_exposure_s: float = 0.0,
    half_life_s: float | None = HALF_LIFE_S,
    node_prior: RatePosterior = NODE_PRIOR,
    job_prior: RatePosterior = JOB_PRIOR,
) -> FailureRates:
    """Posteriors of both rates and the share of failures that memory survives.

    `records` oldest first; `tail_exposure_s` is training time since the last of them (runs without
    failure included); `half_life_s` None never forgets.  Node losses count for the node rate,
    everything else for the job's.  Raises ConfigError for impossible counts or times.
    """
    if nodes < 1 or tail_exposure_s < 0 or any(r.exposure_s < 0 for r in records):
        raise ConfigError(f"{nodes} nodes, exposure {tail_exposure_s} s: must be >= 1 and >= 0")
    ages_s = _ages_s(records, tail_exposure_s)
    weights = [_weight(age, half_life_s) for age in ages_s]
    exposure_s = _faded(0.0, tail_exposure_s, half_life_s) + sum(
        _faded(age, record.exposure_s, half_life_s)
        for age, record in zip(ages_s, records, strict=True)
    )
    on_node = [record.kind == "node" for record in records]
    survived = [record.kind == "process" for record in records]
    per_node = _posterior(node_prior, on_node, weights, exposure_s * nodes)
    per_job = _posterior(job_prior, [not node for node in on_node], weights, exposure_s)
    return FailureRates(
        per_node=per_node,
        per_job=per_job,
        process_share=_share(survived, weights),
        nodes=nodes,
    )


def estimate_recovery(
    records: Sequence[FailureRecord],
    *,
    restore_memory_s: float | None = None,
    restore_disk_s: float | None = None,
) -> RecoveryTimes:
    """Detection, restart and restore: means of the history, else derived, else assumed.

    `restore_memory_s` and `restore_disk_s` are what a trial load or the links of the profile
    predict; they count only where no restore from that source is on record.
    """
    return RecoveryTimes(
        detect=_estimate([r.detect_s for r in records], ASSUMED_DETECT_S),
        restart=_estimate([r.restart_s for r in records], ASSUMED_RESTART_S),
        restore_memory=_restore(records, "memory", restore_memory_s),
        restore_disk=_restore(records, "disk", restore_disk_s),
    )


def _ages_s(records: Sequence[FailureRecord], tail_exposure_s: float) -> list[float]:
    """Training time since each failure."""
    ages, age_s = [], tail_exposure_s
    for record in reversed(records):
        ages.append(age_s)
        age_s += record.exposure_s
    return ages[::-1]


def _weight(age_s: float, half_life_s: float | None) -> float:
    return 1.0 if half_life_s is None else 2.0 ** (-age_s / half_life_s)


def _faded(age_s: float, exposure_s: float, half_life_s: float | None) -> float:
    """Exposure that ended `age_s` ago, each second with the weight of its own age (an integral)."""
    if half_life_s is None:
        return exposure_s
    scale_s = half_life_s / math.log(2.0)
    return scale_s * (_weight(age_s, half_life_s) - _weight(age_s + exposure_s, half_life_s))


def _posterior(
    prior: RatePosterior, counted: Sequence[bool], weights: Sequence[float], exposure_s: float
) -> RatePosterior:
    """Gamma with the mean of the mixture posterior, and a shape of one and each (faded) event.

    With events the prior stands beside `ALTERNATIVES`, each weighed by how well it foresaw them:
    Gamma(a, b / k) foresees n events in E days with b_k^a / (b_k + E)^(a + n).
    """
    events = sum(counted)
    n = sum(w for w, counts in zip(weights, counted, strict=True) if counts)
    days, shape = exposure_s / DAY_S, prior.shape + n
    mean = shape / (prior.exposure_days + days)
    if events:
        candidates = [(1.0, prior.exposure_days)]
        candidates += [(w, prior.exposure_days / k) for k, w in ALTERNATIVES]
        logs = [
            math.log(w) + prior.shape * math.log(b) - shape * math.log(b + days)
            for w, b in candidates
        ]
        odds = [math.exp(log - max(logs)) for log in logs]
        means = [shape / (b + days) for _, b in candidates]
        mean = sum(o * m for o, m in zip(odds, means, strict=True)) / sum(odds)
    said = f"; {events} event(s) in {days:.3g} days on record" if days > 0 else ""
    return RatePosterior(
        shape=shape,
        exposure_days=shape / mean,
        events=prior.events + events,
        source=prior.source + said,
    )


def _share(survived: Sequence[bool], weights: Sequence[float]) -> float:
    alive, dead = PROCESS_SHARE_PRIOR
    alive += sum(w for w, s in zip(weights, survived, strict=True) if s)
    dead += sum(w for w, s in zip(weights, survived, strict=True) if not s)
    return alive / (alive + dead)


def _estimate(samples: Sequence[float | None], assumed_s: float) -> Estimate:
    known = [sample for sample in samples if sample is not None]
    if known:
        return Estimate(value_s=fmean(known), source="measured", n=len(known))
    return Estimate(value_s=assumed_s, source="assumed", note="no failure on record has it")


def _restore(records: Sequence[FailureRecord], source: str, derived_s: float | None) -> Estimate:
    known = [r.restore_s for r in records if r.source == source and r.restore_s is not None]
    if known:
        return Estimate(value_s=fmean(known), source="measured", n=len(known))
    if derived_s is not None:
        return Estimate(value_s=derived_s, source="derived", note="from bytes and link speed")
    assumed_s = ASSUMED_RESTORE_S[source]
    return Estimate(value_s=assumed_s, source="assumed", note=f"no restore from {source} on record")
