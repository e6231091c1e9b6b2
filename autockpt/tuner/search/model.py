"""Expected cost of a candidate: the waste rate of `policies.decide`, for any way to write.

Everything is relative to the default.  r is the time of a candidate's write over that of the
default's.  Before the first measurement it comes from the profile's storage grid and codecs,
afterwards from writes of the same bytes.  With P the time until durable that `decide` reckons with,

    P(candidate) = r P        sigma P(candidate) = (sigma r + max(0, e) / cores) P

e are the CPU seconds that the candidate takes beyond the default's, per second of the default's
write; `cores` are a rank's.  An encoder may halve the write by keeping a core busy; that does not
halve the training's loss meanwhile.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from autockpt.policies.codec import choose_codec
from autockpt.policies.cost_model.costs import (
    ASSUMED_WRITE_BYTES_PER_S,
    Costs,
    Encoding,
    profile_costs,
    ranks_per_node,
    write_time_s,
)
from autockpt.policies.cost_model.expectation import rates_of
from autockpt.policies.interval.choose import Rates, choose_intervals
from autockpt.policies.redundancy.peer_costs import peer_costs
from autockpt.tuner.search.space import Candidate, Space
from autockpt.values.errors import ConfigError
from autockpt.values.plan import Staging
from autockpt.values.profile import Distribution, Profile, StorageMeasure
from autockpt.values.redundancy import NO_REDUNDANCY, Redundancy

OTHER_PATH = 4.0
"""Distance between O_DIRECT and the page cache, in doublings of chunk or writers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rating:
    """The expected loss of a plan that writes like this."""

    waste: float
    """Fraction of time lost to checkpoints and failures; inf where limits cannot be kept."""
    slots: int
    """Images in host memory with which that is so."""
    durable_s: float
    """From the boundary until durable, beside the training."""
    obstacle: str = ""
    """The limit that cannot be kept."""


@dataclass(slots=True)
class Model:
    """Rates candidates of one space; holds what does not depend on the candidate."""

    space: Space
    staging: Staging
    """Of the default plan."""
    shared: Redundancy = NO_REDUNDANCY
    """The default plan's redundancy: the same for every candidate."""
    slower: float = 1.0
    """Times as long as by the profile that the default's write takes in truth."""
    _rates: Rates = field(init=False)
    _write: StorageMeasure = field(init=False)
    _factor: float = field(init=False)
    """Time of the default's encoded write over that of its raw one."""
    _ratios: dict[Candidate, float] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        profile, default = self.space.profile, self.space.default
        self._rates = rates_of(profile, self.space.goal)
        self._write = predicted_write(profile, default)
        self._factor = self._encoding(default, self._write).write_factor * self.slower

    def corrected(self, slower: float) -> "Model":
        """The same for a storage on which the default's write takes `slower` times as long."""
        return self if slower == self.slower else replace(self, slower=slower)

    def predicted_ratio(self, candidate: Candidate) -> float:
        """r by the storage grid and the codecs of the profile."""
        if candidate not in self._ratios:
            whole = self.space.profile.state.total_bytes
            own_s = self.predicted_s(candidate, whole)
            self._ratios[candidate] = own_s / self.predicted_s(self.space.default, whole)
        return self._ratios[candidate]

    def predicted_s(self, candidate: Candidate, rank_bytes: int) -> float:
        """Seconds until a node's ranks have written `rank_bytes` each, by the grid."""
        profile = self.space.profile
        write = predicted_write(profile, candidate)
        count = rank_bytes * ranks_per_node(profile)
        return self._encoding(candidate, write).write_factor * write_time_s(write, count)

    def rate(self, candidate: Candidate, ratio: float, *, extra_cpu: float = 0.0) -> Rating:
        """Return the best plan that writes like this, with its loss; r and e as above."""
        costs = self._costs(candidate, ratio, extra_cpu)
        rated = [self._with_slots(costs, slots) for slots in self.space.slots(candidate)]
        home = self.space.default_slots
        return min(rated, key=lambda r: (round(r.waste, 12), abs(r.slots - home)))

    def _costs(self, candidate: Candidate, ratio: float, extra_cpu: float) -> Costs:
        """What `decide` reckons with, for a write that takes `ratio` times the default's time."""
        profile = self.space.profile
        own = self._encoding(candidate, predicted_write(profile, candidate))
        encoding = replace(own, write_factor=self._factor * ratio)
        costs = profile_costs(profile, self.staging, write=self._write, encoding=encoding)
        cores = max(1.0, profile.fingerprint.cores / ranks_per_node(profile))
        busy_s = max(0.0, extra_cpu) / cores * costs.persist_s / max(ratio, 1e-9)
        if self.staging.persist == "sync":
            busy_s = 0.0  # training is blocked meanwhile
        return replace(
            costs,
            persist_s=max(costs.copy_s, costs.persist_s),
            persist_high_s=max(costs.copy_high_s, costs.persist_high_s),
            persist_slowdown_s=min(costs.persist_slowdown_s + busy_s, costs.persist_s),
            peers=peer_costs(profile, self.shared),
        )

    def _with_slots(self, costs: Costs, slots: int) -> Rating:
        goal = self.space.goal
        memory_on = slots >= 2 and goal.pins.memory_enabled is not False
        sync = self.staging.persist == "sync"
        try:
            intervals = choose_intervals(
                costs, self._rates, goal, memory_on=memory_on, slots=slots, sync=sync
            )
        except ConfigError as error:
            return Rating(
                waste=math.inf, slots=slots, durable_s=costs.persist_s, obstacle=str(error)
            )
        return Rating(waste=intervals.waste.total, slots=slots, durable_s=costs.persist_s)

    def _encoding(self, candidate: Candidate, write: StorageMeasure) -> Encoding:
        """Effect of the codec on a write; the default's may leave classes out."""
        goal = self.space.goal
        if candidate != self.space.default:
            goal = replace(goal, pins=replace(goal.pins, codec=candidate.codec))  # type: ignore[arg-type]
        choice = choose_codec(self.space.profile, goal, write=write, writers=candidate.writers)
        return choice.encoding


def predicted_write(profile: Profile, candidate: Candidate) -> StorageMeasure:
    """The storage grid at a candidate: its own cell, or a mean of all, the nearest the weightiest.

    Weights fall with the square of the distance in doublings, rates are averaged as logarithms.
    Source: Shepard 1968, inverse distance weighting.
    """
    grid = [m for m in profile.storage if m.operation == "write" and m.bytes_per_s.mean > 0]
    own = [m for m in grid if _distance(m, candidate) == 0.0]
    if own:
        return own[0]
    weighed = [(_distance(m, candidate) ** -2, m) for m in grid]
    rate = math.exp(_mean((w, math.log(m.bytes_per_s.mean)) for w, m in weighed))
    return StorageMeasure(
        operation="write",
        direct=candidate.direct_io,
        writers=candidate.writers,
        chunk_bytes=candidate.chunk_bytes,
        alpha_s=_mean((w, m.alpha_s) for w, m in weighed) if weighed else 0.0,
        bytes_per_s=_exactly(rate if weighed else ASSUMED_WRITE_BYTES_PER_S),
    )


def _distance(measure: StorageMeasure, candidate: Candidate) -> float:
    return (
        abs(math.log2(measure.writers / candidate.writers))
        + abs(math.log2(measure.chunk_bytes / candidate.chunk_bytes))
        + (OTHER_PATH if measure.direct != candidate.direct_io else 0.0)
    )


def _mean(weighed: Iterable[tuple[float, float]]) -> float:
    pairs = list(weighed)
    return sum(w * x for w, x in pairs) / max(sum(w for w, _ in pairs), 1e-300)


def _exactly(value: float) -> Distribution:
    return Distribution(n=0, mean=value, p10=value, p50=value, p90=value, p95=value)
