"""Evidence about failures, counted and faded: our own log and the records of others alike.

Evidence is events and exposure.  Both fade with a half-life, because clusters change.  An event of
age t counts 2^(-t / H), and exposure is the integral of the same weight over its seconds.  Runs and
jobs that ended well are exposure without an event: censored, not ignored.
"""

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from autockpt.values.failure import FailureHistory, FailureRecord, Incident

DAY_S = 86400.0
TOGETHER = 4
"""Classes of node losses by size: 1, 2, 3 and at least 4 nodes lost together."""
TOGETHER_S = 600.0
"""Losses within this time are one to redundancy: copies need minutes to be made anew."""
OFFENDER_EVENTS = 3
OFFENDER_CHANCE = 0.01
"""Chance below which three events or more make a repeat offender.  It is the chance that any of
equally good nodes has so many."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """Faded events and exposure, and how many events there really were."""

    node_events: float = 0.0
    job_events: float = 0.0
    node_days: float = 0.0
    job_days: float = 0.0
    node_count: int = 0
    job_count: int = 0
    classes: dict[str, float] = field(default_factory=dict)
    """Faded events by kind."""
    together: tuple[float, ...] = (0.0,) * TOGETHER
    """Faded losses of 1, 2, 3 and at least 4 nodes."""

    def __add__(self, other: "Evidence") -> "Evidence":
        """Both of them."""
        kinds = self.classes.keys() | other.classes.keys()
        return Evidence(
            node_events=self.node_events + other.node_events,
            job_events=self.job_events + other.job_events,
            node_days=self.node_days + other.node_days,
            job_days=self.job_days + other.job_days,
            node_count=self.node_count + other.node_count,
            job_count=self.job_count + other.job_count,
            classes={
                k: self.classes.get(k, 0.0) + other.classes.get(k, 0.0) for k in sorted(kinds)
            },
            together=tuple(a + b for a, b in zip(self.together, other.together, strict=True)),
        )


def own_evidence(
    records: Sequence[FailureRecord],
    *,
    nodes: int,
    tail_exposure_s: float,
    half_life_s: float | None,
) -> Evidence:
    """Of our own log, oldest first; ages are training time.

    Node losses count for the node rate, everything else for the job's: a trainer that died says
    nothing about which node is to blame.  An exception of the script says nothing at all, but the
    training before it was exposure.
    """
    ages_s, age_s = [], tail_exposure_s
    for record in reversed(records):
        ages_s.append(age_s)
        age_s += record.exposure_s
    job_s, total = faded_s(0.0, tail_exposure_s, half_life_s), Evidence()
    for age_s, record in zip(reversed(ages_s), records, strict=True):
        job_s += faded_s(age_s, record.exposure_s, half_life_s)
        if record.kind == "script":
            continue
        incident = Incident(at_s=0.0, kind=record.kind, what=record.what)
        total += _one(incident, weight(age_s, half_life_s))
    return total + Evidence(job_days=job_s / DAY_S, node_days=job_s * nodes / DAY_S)


def imported_evidence(history: FailureHistory, *, half_life_s: float | None) -> Evidence:
    """Return the evidence of an imported record; ages are wall time before its newest moment.

    A record that knows of nodes only, as a kernel log, says nothing about the mix of classes: it
    lacks the failures of single processes.
    """
    total, end_s = Evidence(), history.end_s
    for incident in history.incidents:
        total += _one(incident, weight(max(0.0, end_s - incident.at_s), half_life_s))
    node_s = job_s = 0.0
    for one in history.exposures:
        length_s = one.end_s - one.begin_s
        share = faded_s(end_s - one.end_s, length_s, half_life_s) / length_s if length_s > 0 else 1
        node_s, job_s = node_s + one.node_s * share, job_s + one.job_s * share
    lost = [0.0] * TOGETHER
    for count, at_s in simultaneous(history.incidents):
        lost[min(count, TOGETHER) - 1] += weight(max(0.0, end_s - at_s), half_life_s)
    exposure = Evidence(node_days=node_s / DAY_S, job_days=job_s / DAY_S, together=tuple(lost))
    return (total if job_s else replace(total, classes={})) + exposure


def simultaneous(
    incidents: Iterable[Incident], *, window_s: float = TOGETHER_S
) -> list[tuple[int, float]]:
    """(nodes lost, when the first was) for each group of losses within `window_s` of its first.

    Only losses of memory count.  Nodes without a name count as one each.  The groups are of the
    whole record: of a small job in a large fleet fewer nodes are hit together.
    """
    groups: list[tuple[float, set[str], int]] = []
    for one in sorted(incidents, key=lambda one: one.at_s):
        if one.kind not in ("node", "nodes"):
            continue
        if not groups or one.at_s - groups[-1][0] > window_s:
            groups.append((one.at_s, set(), 0))
        at_s, names, nameless = groups[-1]
        groups[-1] = (at_s, names | set(one.nodes), nameless + (not one.nodes))
    return [(len(names) + nameless, at_s) for at_s, names, nameless in groups]


def repeat_offenders(history: FailureHistory, *, nodes: int) -> dict[str, int]:
    """Events of the nodes that fail more often than chance allows among `nodes` equal ones.

    Source: a binomial test of each node's events among all, with Bonferroni's correction for the
    number of nodes.  Equal nodes have the same share each.  Lemon nodes are few and cause a large
    part of all failures.
    """
    counts = Counter(name for one in history.incidents for name in one.nodes)
    total, fleet = sum(counts.values()), max(nodes, len(counts))
    found: dict[str, int] = {}
    if fleet < 2:
        return found
    for name, events in counts.most_common():
        chance = fleet * _at_least(events, total, 1.0 / fleet)
        if events < OFFENDER_EVENTS or chance >= OFFENDER_CHANCE:
            break
        found[name] = events
    return found


def weight(age_s: float, half_life_s: float | None) -> float:
    """Weight of an event of this age; 1 without a half-life."""
    return 1.0 if half_life_s is None else 2.0 ** (-age_s / half_life_s)


def faded_s(age_s: float, exposure_s: float, half_life_s: float | None) -> float:
    """Exposure that ended `age_s` ago, each second with the weight of its own age (an integral)."""
    if half_life_s is None:
        return exposure_s
    scale_s = half_life_s / math.log(2.0)
    return scale_s * (weight(age_s, half_life_s) - weight(age_s + exposure_s, half_life_s))


def _one(incident: Incident, counts: float) -> Evidence:
    return Evidence(
        node_events=counts if incident.of_nodes else 0.0,
        job_events=0.0 if incident.of_nodes else counts,
        node_count=int(incident.of_nodes),
        job_count=int(not incident.of_nodes),
        classes={incident.kind: counts},
    )


def _at_least(events: int, total: int, share: float) -> float:
    """P(X >= events) for X ~ Binomial(total, share), 0 < share < 1."""
    odds = math.log(share), math.log1p(-share)
    ways = (
        math.lgamma(total + 1) - math.lgamma(k + 1) - math.lgamma(total - k + 1)
        + k * odds[0] + (total - k) * odds[1]
        for k in range(events, total + 1)
    )  # fmt: skip
    return math.fsum(map(math.exp, ways))
