"""Costs of one checkpoint: from a profile's measurements, or predicted where one is missing.

The online controller builds the same `Costs` from its observations, so that both decide alike.
`notes` lists all predictions and assumptions that replace a measurement.
"""

from dataclasses import dataclass, field

from autockpt.policies.staging.idle_windows import fit_windows
from autockpt.values.decision_inputs import TierCost
from autockpt.values.plan import Schedule, Staging
from autockpt.values.profile import (
    Distribution,
    InterferenceMeasure,
    LinkMeasure,
    Profile,
    StorageMeasure,
)
from autockpt.values.units import format_duration, format_rate

ASSUMED_SLOWDOWN = 0.10
"""Fraction of training time lost while unmeasured background work runs: a cautious guess."""
SCHEDULE_WORKS: dict[Schedule, str] = {
    "windows": "snapshot_windows", "blocking": "snapshot_blocking"
}  # fmt: skip
"""Names of the interference measures of schedules; that of lazy copying is snapshot_copy."""
ASSUMED_COPY_BYTES_PER_S = 2e9
"""Copy into host memory when no link was measured: slower than any machine tried so far."""
ASSUMED_WRITE_BYTES_PER_S = 0.2e9
"""Write to storage when nothing was measured: a slow network volume."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerCosts:
    """Cost that redundancy adds to each checkpoint in memory, and the failures that it serves."""

    send_s: float
    """From the complete snapshot until peers hold it, mean."""
    send_high_s: float
    slowdown_s: float
    """Training time lost to interference by one exchange, sent and received."""
    restore_s: float
    """Reading the state back from peers."""
    served: float
    """Fraction of the failures which this node's memory does not survive that peers serve."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """Seconds of one checkpoint and of one recovery; `high` marks 95th percentiles."""

    iteration_s: float
    """Quiet iteration, without any checkpoint work."""
    stall_s: float
    """Training blocked by one snapshot, mean."""
    stall_high_s: float
    copy_s: float
    """Boundary until the snapshot is complete in host memory, mean."""
    copy_high_s: float
    persist_s: float
    """Boundary until durable, mean."""
    persist_high_s: float
    copy_slowdown_s: float
    """Training time lost to interference by one snapshot."""
    persist_slowdown_s: float
    """The same by one persist, beyond its snapshot's."""
    blocked_s: float = 0.0
    """Training blocked by one persist beyond the snapshot's stall; not 0 for sync only."""
    boundary_s: float = 0.0
    """Training blocked at each iteration boundary, also without a checkpoint."""
    restart_s: float
    """Failure to running again: detection and process start."""
    restore_memory_s: float
    restore_disk_s: float
    peers: PeerCosts | None = None
    """None: snapshots stay in this node's memory."""
    notes: tuple[str, ...] = ()
    """Predictions and assumptions, in sentences."""
    samples: dict[str, int] = field(default_factory=dict)
    """By field, how often it was measured; one that is missing was predicted or assumed."""

    def memory_tier(self, failures_per_s: float, *, from_peers_per_s: float = 0.0) -> TierCost:
        """A snapshot, serving the failures that leave this node's memory alive.

        With peers it serves some of the others as well: then latency and restore are means over
        all failures that memory serves.
        """
        total = failures_per_s + from_peers_per_s
        share = from_peers_per_s / total if total > 0 else 0.0
        peers = self.peers or NO_PEERS
        return TierCost(
            stall_s=self.stall_s,
            slowdown_s=self.copy_slowdown_s + peers.slowdown_s,
            latency_s=self.copy_s + share * peers.send_s,
            restart_s=self.restart_s,
            restore_s=(1.0 - share) * self.restore_memory_s + share * peers.restore_s,
            failures_per_s=total,
        )

    def disk_tier(self, failures_per_s: float, *, alone: bool) -> TierCost:
        """A persist; `alone`: it pays for its snapshot too, because the memory tier is off."""
        return TierCost(
            stall_s=self.blocked_s + (self.stall_s if alone else 0.0),
            slowdown_s=self.persist_slowdown_s + (self.copy_slowdown_s if alone else 0.0),
            latency_s=self.persist_s,
            restart_s=self.restart_s,
            restore_s=self.restore_disk_s,
            failures_per_s=failures_per_s,
        )


NO_PEERS = PeerCosts(send_s=0.0, send_high_s=0.0, slowdown_s=0.0, restore_s=0.0, served=0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Encoding:
    """Effect of the chosen codecs on a write and a restore; the default is none."""

    write_factor: float = 1.0
    """Time of the encoded write over that of the raw one."""
    decode_s: float = 0.0
    slows: float = 0.0
    """Fraction of the training time lost to it during a write, as far as that was measured."""


def ranks_per_node(profile: Profile) -> int:
    """Ranks that share one node's storage and memory."""
    return profile.fingerprint.ranks_per_node


def write_time_s(measure: StorageMeasure, count_bytes: float) -> float:
    """Seconds to make `count_bytes` durable in the configuration of `measure`."""
    return measure.alpha_s + count_bytes / measure.bytes_per_s.mean


def link_time_s(link: LinkMeasure, count_bytes: float) -> float:
    """Seconds for `count_bytes` over a link: alpha + S / B."""
    return link.alpha_s + count_bytes / link.bytes_per_s


def profile_costs(
    profile: Profile,
    staging: Staging,
    *,
    write: StorageMeasure | None,
    encoding: Encoding | None = None,
) -> Costs:
    """Costs of one checkpoint under `staging`, written as in `write`.

    The profile measured `stall_s`, `snapshot_s` and `persist_s` with lazy, streaming, asynchronous
    copies.  Any other staging is predicted from the links and the storage grid, unless the profile
    measured its schedule (`SCHEDULE_WORKS`).
    """
    notes: list[str] = []
    encoding = encoding or Encoding()
    copy = _copy_s(profile, staging, notes)
    measured = schedule_measure(profile, staging.schedule)
    if measured is not None and measured.stall_s is not None:
        stall = measured.stall_s
    else:
        stall = copy if staging.schedule == "blocking" else _lazy_stall_s(profile, copy, notes)
    persist = _persist_s(profile, staging, copy, write, encoding, notes)
    sync = staging.persist == "sync"
    copying = _copy_lost_s(profile, staging, measured, copy)
    writing = 0.0
    if not sync:
        lost = _persist_lost_s(profile, staging, persist, copy) - copying
        writing = max(0.0, lost) + encoding.slows * persist.mean
    if not profile.interference:
        notes.append(
            f"interference was not measured; background work is assumed to cost "
            f"{ASSUMED_SLOWDOWN:.0%} of training time while it runs"
        )
    recovery = profile.recovery
    return Costs(
        iteration_s=profile.iteration_s.p50,
        stall_s=stall.mean,
        stall_high_s=max(stall.mean, stall.p95),
        copy_s=copy.mean,
        copy_high_s=max(copy.mean, copy.p95),
        persist_s=persist.mean,
        persist_high_s=max(persist.mean, persist.p95),
        copy_slowdown_s=copying,
        persist_slowdown_s=writing,
        blocked_s=max(0.0, persist.mean - stall.mean) if sync else 0.0,
        restart_s=recovery.detect.value_s + recovery.restart.value_s,
        restore_memory_s=recovery.restore_memory.value_s,
        restore_disk_s=recovery.restore_disk.value_s + encoding.decode_s,
        notes=tuple(notes),
        samples={
            "iteration_s": profile.iteration_s.n,
            "stall_s": stall.n,
            "copy_s": copy.n,
            "persist_s": persist.n,
        },
    )


def schedule_measure(profile: Profile, schedule: Schedule) -> InterferenceMeasure | None:
    """Measured cost of a snapshot in each iteration under windows or at the boundary, if any."""
    return profile.under(SCHEDULE_WORKS[schedule]) if schedule in SCHEDULE_WORKS else None


def copy_link(profile: Profile, *, pinned: bool = True) -> LinkMeasure | None:
    """The link a snapshot takes: device to host where there is a GPU, else a host copy."""
    if not profile.fingerprint.gpus:
        return profile.link("host_copy")
    return profile.link("device_to_host_pinned" if pinned else "device_to_host_pageable")


def _copy_s(profile: Profile, staging: Staging, notes: list[str]) -> Distribution:
    if profile.snapshot_s is not None and staging.schedule != "blocking" and staging.preallocate:
        return profile.snapshot_s
    link = copy_link(profile, pinned=staging.preallocate)
    if link is not None:
        seconds = link_time_s(link, profile.state.total_bytes)
        notes.append(
            f"snapshot time predicted from {link.link}: {format_duration(seconds)} at "
            f"{format_rate(link.bytes_per_s)}"
        )
        return _predicted(seconds)
    if profile.snapshot_s is not None:
        return profile.snapshot_s
    seconds = profile.state.total_bytes / ASSUMED_COPY_BYTES_PER_S
    notes.append(f"no copy was measured; {format_rate(ASSUMED_COPY_BYTES_PER_S)} is assumed")
    return _predicted(seconds)


def _lazy_stall_s(profile: Profile, copy: Distribution, notes: list[str]) -> Distribution:
    """Boundary copy plus what forward and backward do not hide: max(0, T_c - T_w) of CheckFreq."""
    if profile.stall_s is not None:
        return profile.stall_s
    hidden = sum(
        profile.phases_s[name].mean for name in ("forward", "backward") if name in profile.phases_s
    )
    inside = copy.mean * profile.state.boundary_bytes / max(1, profile.state.total_bytes)
    seconds = inside + max(0.0, copy.mean - inside - hidden)
    notes.append(
        f"stall predicted: {format_duration(copy.mean)} of copying behind "
        f"{format_duration(hidden)} of forward and backward leaves {format_duration(seconds)}"
    )
    return _predicted(seconds)


def _persist_s(
    profile: Profile,
    staging: Staging,
    copy: Distribution,
    write: StorageMeasure | None,
    encoding: Encoding,
    notes: list[str],
) -> Distribution:
    lazily = staging.schedule != "blocking"
    as_measured = lazily and staging.persist == "async" and staging.streaming
    if profile.persist_s is not None and as_measured:
        return _scaled(profile.persist_s, encoding.write_factor)
    count_bytes = profile.state.total_bytes * ranks_per_node(profile)
    if write is not None:
        seconds, source = write_time_s(write, count_bytes), "the storage grid"
    elif profile.persist_s is not None:
        seconds, source = profile.persist_s.mean, "the streaming save"
    else:
        seconds = count_bytes / ASSUMED_WRITE_BYTES_PER_S
        source = f"an assumed {format_rate(ASSUMED_WRITE_BYTES_PER_S)}"
    seconds *= encoding.write_factor
    total = max(copy.mean, seconds) if staging.streaming else copy.mean + seconds
    notes.append(f"time until durable predicted from {source}: {format_duration(total)}")
    return _predicted(total)


def _persist_lost_s(
    profile: Profile, staging: Staging, persist: Distribution, copy: Distribution
) -> float:
    """Training time one persist costs, its copy included where both run in the background."""
    both = any(measure.work == "persist" for measure in profile.interference)
    if both and staging.schedule != "blocking":
        return _lost_s(profile, "persist", persist)
    writing_s = persist.mean if staging.streaming else max(0.0, persist.mean - copy.mean)
    lost = _lost_s(profile, "storage_write", _predicted(writing_s))
    return (
        lost if staging.schedule == "blocking" else lost + _lost_s(profile, "snapshot_copy", copy)
    )


def _copy_lost_s(
    profile: Profile,
    staging: Staging,
    measured: InterferenceMeasure | None,
    copy: Distribution,
) -> float:
    """Training time lost beside the stall by one snapshot."""
    if measured is not None:
        return max(0.0, measured.slowdown.mean) * profile.iteration_s.mean
    if staging.schedule == "blocking":
        return 0.0
    lost = _lost_s(profile, "snapshot_copy", copy)
    fit = fit_windows(profile, copy_link(profile)) if staging.schedule == "windows" else None
    return lost if fit is None else lost * (1.0 - fit.share)


def _lost_s(profile: Profile, work: str, duration: Distribution) -> float:
    """Seconds of training lost while `work` runs for `duration`.

    sigma = slowdown * iteration / busy is the loss per second of background work.  `slowdown` is
    that of a whole iteration, in which the work ran for `busy_s` only.
    """
    measure = profile.under(work)
    if measure is None:
        return ASSUMED_SLOWDOWN * duration.mean
    busy_s = measure.busy_s or profile.iteration_s.mean
    sigma = max(0.0, measure.slowdown.mean) * profile.iteration_s.mean / busy_s
    return min(1.0, sigma) * duration.mean


def _predicted(seconds: float) -> Distribution:
    return Distribution(n=0, mean=seconds, p10=seconds, p50=seconds, p90=seconds, p95=seconds)


def _scaled(measured: Distribution, factor: float) -> Distribution:
    return Distribution(
        n=measured.n,
        mean=measured.mean * factor,
        p10=measured.p10 * factor,
        p50=measured.p50 * factor,
        p90=measured.p90 * factor,
        p95=measured.p95 * factor,
    )
