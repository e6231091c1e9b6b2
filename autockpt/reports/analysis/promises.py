"""Promised against observed: every figure of `Expected`, and whether the run kept it.

Only what happened under the plan that promised counts: from the last change of it on.

A run says little about rare things.  The waste from failures is judged only when a failure was to
be expected, or when chance does not explain their number.  A recovery is judged only when there was
one, and the cost of checkpoints from the third on.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from autockpt.reports.analysis.accounting import Accounting, Restore
from autockpt.reports.analysis.saves import Saves
from autockpt.values.plan import Expected
from autockpt.values.telemetry import Event, PlanChanged
from autockpt.values.units import format_duration, format_fraction

FACTOR = 1.5
"""A promise is broken when the observation is this many times larger or smaller."""
CHANCE = 0.05
"""More failures than expected are put down to chance while this or more probable."""
FEW = 3
"""Fewer checkpoints than this tell nothing of a promise."""
QUANTILE = 1.645
"""Standard deviations on each side of a 90 % band."""
NEGLIGIBLE_S = 1e-3
"""Durations this small count as equal, at any ratio."""
NEGLIGIBLE = 1e-3
"""Fractions of time this small agree, too: 0.1 % of the run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Promise:
    """One figure, as predicted and as seen."""

    name: str
    """Field of `Expected`."""
    label: str
    unit: Literal["s", "fraction"]
    promised: float
    observed: float | None
    """None: nothing to compare with yet."""
    n: int
    """Observations behind it."""
    verdict: Literal["kept", "better", "broken", "not yet"]
    note: str = ""

    @property
    def ratio(self) -> float | None:
        """Observed over promised."""
        if self.observed is None or self.promised <= 0:
            return None
        return self.observed / self.promised

    def shown(self, value: float | None) -> str:
        """A figure of this promise for people."""
        if value is None:
            return "-"
        return format_duration(value) if self.unit == "s" else format_fraction(value)


def in_force(events: Sequence[Event], plan_version: int) -> Sequence[Event]:
    """The aligned events since the plan of this version applies; all where none began it."""
    for index, event in enumerate(events):
        if isinstance(event, PlanChanged) and event.plan_version == plan_version:
            return events[index:]
    return events


def parted(promises: Sequence[Promise]) -> tuple[str, ...]:
    """A warning for each promise that was not kept."""
    return tuple(
        f"{promise.label.lower()}: {promise.shown(promise.observed)} observed where "
        f"{promise.shown(promise.promised)} was promised ({promise.note}, n = {promise.n})"
        for promise in promises
        if promise.verdict == "broken"
    )


def promises(
    expected: Expected,
    accounting: Accounting,
    saves: Saves,
    restores: Sequence[Restore],
    *,
    interruptions_per_s: float,
    rate_shape: float | None = None,
) -> tuple[Promise, ...]:
    """Each figure of `expected` beside what the run showed.

    `rate_shape`: of the Gamma that the failure rate is taken to have; None: not known.
    """
    due = interruptions_per_s * accounting.wall_s
    failures = sum(1 for restore in restores if restore.failed_at_s is not None)
    trained = accounting.accounted_s > 0
    judged = due >= 1.0 or _at_least(failures, due) < CHANCE
    rare = f"since the plan applies, {_shown_count(due)} failures were due and {failures} happened"
    stall, durable = saves.stall, saves.durable
    memory = [r for r in restores if r.source == "memory"]
    disk = [r for r in restores if r.source == "disk"]
    low, high = expected.waste_low, expected.waste_high
    if rate_shape is not None:
        low, high = waste_band(expected, due, rate_shape)
    in_band = low <= accounting.waste <= high
    band = f"90 % band {format_fraction(low)} to {format_fraction(high)}"
    return (
        _promise("stall_s", "Stall per checkpoint", "s", expected.stall_s,
                 stall.p50_s if stall else None,
                 n=stall.n if stall else 0, note="median of the slowest rank",
                 judged=stall is not None and stall.n >= FEW),
        _promise("persist_s", "Time to durable", "s", expected.persist_s,
                 durable.p50_s if durable else None,
                 n=durable.n if durable else 0, note="median",
                 judged=durable is not None and durable.n >= FEW),
        _promise("checkpoint_waste", "Lost to checkpoints", "fraction", expected.checkpoint_waste,
                 accounting.checkpoint_waste if trained and saves.sealed else None, n=saves.sealed,
                 note="stall and slow-down, without failures", judged=saves.sealed >= FEW),
        _promise("waste", "Lost in all", "fraction", expected.waste,
                 accounting.waste if trained else None, n=failures, judged=judged,
                 in_band=in_band,
                 note=f"{rare}; {band} {'holds' if in_band else 'is missed'}" if judged else rare),
        _promise("recovery_memory_s", "Recovery from memory", "s", expected.recovery_memory_s,
                 _mean([r.lost_s + r.down_s for r in memory]), n=len(memory),
                 note="mean of lost work and down time"),
        *_of_peers(expected, restores),
        _promise("recovery_disk_s", "Recovery from disk", "s", expected.recovery_disk_s,
                 _mean([r.lost_s + r.down_s for r in disk]), n=len(disk),
                 note="mean of lost work and down time"),
    )  # fmt: skip


def waste_band(expected: Expected, failures: float, rate_shape: float) -> tuple[float, float]:
    """90 % band of the loss that is observed where so many failures are due.

    The rate is not known better than its Gamma says.  The number of failures is Poisson, and
    outages scatter about as much as an exponential.  Their mean comes from about as many failures
    as the rate does.  So the loss at failures has the relative variance
    v = 2 / shape + 2 / failures; it is taken as a Gamma.

    Source: Wilson and Hilferty 1931, a Gamma's quantile: (1 - v / 9 + z sqrt(v) / 3)^3 of its mean.
    """
    kept = (1.0 - expected.checkpoint_waste, 1.0 - expected.waste)
    if min(kept) <= 0.0 or kept[0] < kept[1]:
        return expected.waste_low, expected.waste_high
    lost = math.log(kept[0] / kept[1])
    spread = 2.0 / rate_shape + 2.0 / max(1.0, failures)
    low, high = (
        1.0 - kept[0] * math.exp(-lost * max(0.0, 1.0 - spread / 9.0 + z * spread**0.5 / 3.0) ** 3)
        for z in (-QUANTILE, QUANTILE)
    )
    return low, high


def _of_peers(expected: Expected, restores: Sequence[Restore]) -> tuple[Promise, ...]:
    """From the memory of other nodes, where the plan has redundancy."""
    if expected.recovery_peer_s is None:
        return ()
    seen = [r for r in restores if r.source in ("peer", "parity")]
    return (
        _promise("recovery_peer_s", "Recovery from other nodes", "s", expected.recovery_peer_s,
                 _mean([r.lost_s + r.down_s for r in seen]), n=len(seen),
                 note="mean of lost work and down time"),
    )  # fmt: skip


def _promise(
    name: str,
    label: str,
    unit: Literal["s", "fraction"],
    promised: float,
    observed: float | None,
    *,
    n: int,
    note: str,
    judged: bool = True,
    in_band: bool = False,
) -> Promise:
    verdict: Literal["kept", "better", "broken", "not yet"] = "kept"
    negligible = NEGLIGIBLE_S if unit == "s" else NEGLIGIBLE
    if observed is None or not judged:
        verdict = "not yet"
    elif in_band or abs(observed - promised) <= negligible:
        verdict = "kept"
    elif observed > promised * FACTOR:
        verdict = "broken"
    elif observed * FACTOR < promised:
        verdict = "better"
    return Promise(name=name, label=label, unit=unit, promised=promised, observed=observed, n=n,
                   verdict=verdict, note=note)  # fmt: skip


def _at_least(count: int, mean: float) -> float:
    """Poisson probability of `count` events or more."""
    below = sum(math.exp(-mean) * mean**i / math.factorial(i) for i in range(min(count, 100)))
    return max(0.0, 1.0 - below)


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _shown_count(due: float) -> str:
    """An expected number of failures without an exponent."""
    return f"{due:.2g}" if due >= 0.01 else "less than 0.01"
