"""How often the job is interrupted, what survives, and how long recovery takes: priors and history.

Two Poisson processes add up: one per node (hardware; grows with the job), one per job (software,
storage, control plane; does not).  Each rate is Gamma-distributed: n events in E days of exposure
turn Gamma(a, b) into Gamma(a + n, b + E).  Its mean is the Bayes action for the first-order waste.
Exposure is training time: failures while idle do not count, and runs that ended well count as
exposure.  `evidence` counts and fades.  The shares of the classes, and the number of nodes lost
together, are Dirichlet-distributed.  Events are added to their weights.

Source: docs/concepts/policy.md, "Unknown failure rates".
"""

import math
from collections.abc import Sequence
from statistics import fmean

from autockpt.profiles.evidence import DAY_S, Evidence, imported_evidence, own_evidence
from autockpt.values.errors import ConfigError
from autockpt.values.failure import FailureHistory, FailureRecord, Kind
from autockpt.values.profile import Estimate, FailureRates, RatePosterior, RecoveryTimes

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
ALTERNATIVES = ((10.0, 0.03), (100.0, 1e-3), (1e3, 3e-5), (1e4, 3e-6), (1e5, 3e-6))
"""The prior may be wrong by these factors k, with odds of about k^(-3/2), or 3e-6 if that is more.
A job that fails every 20 minutes, or every 20 seconds, is then believed after a few failures
instead of after ten days.  Without any event they do not count.  It is a compromise.  Odds of 1 / k
take one failure after 20 minutes for 10 a day (these for 2).  Odds of 1 / k^2 believe a bad cluster
later.  `make bench-tuner` has the regret.

Odds that fall on beyond k = 10^4 take three failures in 75 s for a rate of half of that.  A job
that dies every ten seconds is no rarer than one that dies every minute.
"""
CLASS_PRIOR: dict[Kind, float] = {
    "process": 3.5,
    "node": 5.5,
    "nodes": 0.7,
    "storage": 0.2,
    "silent": 0.1,
}
"""Dirichlet prior with the weight of 10 failures: 35 % leave the node's memory alive, 7 % take more
nodes than one at once.  A judgement from published cause mixes (20 to 50 %, 7 to 14 %)."""
TOGETHER_PRIOR = (5.5, 0.45, 0.12, 0.13)
"""The same of 1, 2, 3 and at least 4 nodes lost together. 11 % take at least 2 and 4 % at least 3,
within 10 to 30 minutes on 400 GPU servers over 348 days.  Independent failures would give 1 %."""
HALF_LIFE_S = 21 * DAY_S
"""Half-life of evidence: within the 14 to 30 days that follow a drifting fleet.  In training time
for our own log, in wall time for the records of others."""
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
    histories: Sequence[FailureHistory] = (),
) -> FailureRates:
    """Posteriors of both rates, of the mix of classes and of simultaneous losses.

    `records` oldest first; `tail_exposure_s` is training time since the last of them (runs without
    failure included); `half_life_s` None never forgets; `histories` are records of others.
    Raises ConfigError for impossible counts or times.
    """
    if nodes < 1 or tail_exposure_s < 0 or any(r.exposure_s < 0 for r in records):
        raise ConfigError(f"{nodes} nodes, exposure {tail_exposure_s} s: must be >= 1 and >= 0")
    known = own_evidence(
        records, nodes=nodes, tail_exposure_s=tail_exposure_s, half_life_s=half_life_s
    )
    for history in histories:
        known += imported_evidence(history, half_life_s=half_life_s)
    share = CLASS_PRIOR["process"] / sum(CLASS_PRIOR.values())
    prior = FailureRates(per_node=node_prior, per_job=job_prior, process_share=share, nodes=nodes)
    return _updated(prior, known)


def with_history(
    rates: FailureRates, history: FailureHistory, *, half_life_s: float | None = HALF_LIFE_S
) -> FailureRates:
    """Return the rates updated by an imported record: `rates` are the prior."""
    return _updated(rates, imported_evidence(history, half_life_s=half_life_s))


def estimate_recovery(
    records: Sequence[FailureRecord],
    *,
    restore_memory_s: float | None = None,
    restore_disk_s: float | None = None,
) -> RecoveryTimes:
    """Detection, restart and restore: means of the history, else derived, else assumed.

    `restore_memory_s` and `restore_disk_s` are predicted by a trial load or the links of the
    profile.  They count only where no restore from that source is on record.
    """
    return RecoveryTimes(
        detect=_estimate([r.detect_s for r in records], ASSUMED_DETECT_S),
        restart=_estimate([r.restart_s for r in records], ASSUMED_RESTART_S),
        restore_memory=_restore(records, "memory", restore_memory_s),
        restore_disk=_restore(records, "disk", restore_disk_s),
    )


def _updated(prior: FailureRates, known: Evidence) -> FailureRates:
    """The posterior of rates, classes and simultaneous losses."""
    classes = _weights(prior)
    classes = {kind: w + known.classes.get(kind, 0.0) for kind, w in classes.items()}
    together = prior.together or TOGETHER_PRIOR
    return FailureRates(
        per_node=_posterior(
            prior.per_node, known.node_events, known.node_count, known.node_days, "node-days"
        ),
        per_job=_posterior(
            prior.per_job, known.job_events, known.job_count, known.job_days, "days"
        ),
        process_share=classes["process"] / sum(classes.values()),
        nodes=prior.nodes,
        classes=classes,
        together=tuple(a + b for a, b in zip(together, known.together, strict=True)),
    )


def _weights(prior: FailureRates) -> dict[str, float]:
    """Dirichlet weights of the classes; of the prior's share where it has no others."""
    if prior.classes:
        return dict(prior.classes)
    total = sum(CLASS_PRIOR.values())
    rest = (1.0 - prior.process_share) * total / (total - CLASS_PRIOR["process"])
    others = {str(kind): w * rest for kind, w in CLASS_PRIOR.items() if kind != "process"}
    return {"process": prior.process_share * total, **others}


def _posterior(prior: RatePosterior, n: float, count: int, days: float, unit: str) -> RatePosterior:
    """Gamma with the mean of the mixture posterior, and a shape of one and each (faded) event.

    With events, the prior stands beside `ALTERNATIVES`, each weighed by how well it foresaw them.
    Gamma(a, b / k) foresees n events in E days with b_k^a / (b_k + E)^(a + n).
    """
    shape = prior.shape + n
    mean = shape / (prior.exposure_days + days)
    if count:
        candidates = [(1.0, prior.exposure_days)]
        candidates += [(w, prior.exposure_days / k) for k, w in ALTERNATIVES]
        logs = [
            math.log(w) + prior.shape * math.log(b) - shape * math.log(b + days)
            for w, b in candidates
        ]
        odds = [math.exp(log - max(logs)) for log in logs]
        means = [shape / (b + days) for _, b in candidates]
        mean = sum(o * m for o, m in zip(odds, means, strict=True)) / sum(odds)
    said = f"; {count} on record in {_shown_days(days)} {unit}" if days > 0 else ""
    return RatePosterior(
        shape=shape,
        exposure_days=shape / mean,
        events=prior.events + count,
        source=prior.source + said,
    )


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


def _shown_days(days: float) -> str:
    """A number of days without an exponent."""
    if days >= 0.01:
        return f"{days:.3g}" if days < 1000 else f"{days:.0f}"
    return "less than 0.01"
