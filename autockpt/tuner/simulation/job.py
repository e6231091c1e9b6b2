"""A job in ten numbers as a Profile, so that a cluster can be planned without measurements.

Everything here is assumed and says so; a profile of the real job replaces it.
"""

import math
from dataclasses import dataclass, replace

from autockpt.values.errors import ConfigError
from autockpt.values.profile import (
    Distribution,
    Estimate,
    FailureRates,
    Fingerprint,
    InterferenceMeasure,
    LinkMeasure,
    MemoryHeadroom,
    Profile,
    RatePosterior,
    RecoveryTimes,
    StateInventory,
    StorageMeasure,
)

PAGEABLE = 0.25
"""Speed of a copy into memory that was not pinned, over one that was: the usual figure."""
SURE = 1e2
"""Shape of a declared rate; only its mean is read here."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """The load and hardware of one node; all nodes are alike."""

    iteration_s: float
    state_bytes: float
    """Bytes that one node saves."""
    copy_bytes_per_s: float
    """Devices to pinned host memory, the whole node."""
    disk_bytes_per_s: float
    """The node's share of the storage, written and read."""
    slowdown: float
    """Of training while a copy or a write runs in the background, fraction."""
    detect_s: float
    restart_s: float

    def __post_init__(self) -> None:
        for name in ("iteration_s", "state_bytes", "copy_bytes_per_s", "disk_bytes_per_s"):
            value = getattr(self, name)
            if not (value > 0 and math.isfinite(value)):
                raise ConfigError(f"{name} of {value:g}: must be more than 0 and finite")
        for name in ("slowdown", "detect_s", "restart_s"):
            value = getattr(self, name)
            if not (value >= 0 and math.isfinite(value)):
                raise ConfigError(f"{name} of {value:g}: must be at least 0 and finite")


def known_failures(
    *, mtbf_s: float, process_share: float, nodes: int, together: tuple[float, ...] = ()
) -> FailureRates:
    """Rates that are declared and not estimated; `together`: of 1, 2, ... nodes lost at once."""
    return FailureRates(
        per_node=RatePosterior(
            shape=SURE, exposure_days=SURE * nodes * mtbf_s / 86400.0, events=0, source="declared"
        ),
        # A rate of the job itself that is nothing beside that of its nodes.
        per_job=RatePosterior(
            shape=SURE, exposure_days=SURE * 1e12 * mtbf_s / 86400.0, events=0, source="declared"
        ),
        process_share=process_share,
        nodes=nodes,
        together=together,
    )


def profile_of(job: Job, *, failures: FailureRates) -> Profile:
    """The profile that would have been measured if the ten numbers were all there is to know."""
    nodes, size = failures.nodes, round(job.state_bytes)
    return Profile(
        fingerprint=Fingerprint(
            host="",
            cpu="assumed",
            cores=64,
            gpus=("assumed",),
            world_size=nodes,
            nodes=nodes,
            torch_version="",
            layout_digest="",
            storage="assumed",
            autockpt_version="",
        ),
        created="",
        command="",
        iteration_s=_exactly(job.iteration_s),
        phases_s={
            "forward": _exactly(0.3 * job.iteration_s),
            "backward": _exactly(0.6 * job.iteration_s),
            "optimizer": _exactly(0.1 * job.iteration_s),
        },
        state=StateInventory(
            total_bytes=size, layout_digest="", lazy_bytes=size, boundary_bytes=0, classes=()
        ),
        memory=MemoryHeadroom(host_total_bytes=100 * size, host_available_bytes=100 * size),
        failures=failures,
        recovery=RecoveryTimes(
            detect=_assumed(job.detect_s),
            restart=_assumed(job.restart_s),
            restore_memory=_assumed(size / job.copy_bytes_per_s),
            restore_disk=_assumed(size / job.disk_bytes_per_s + size / job.copy_bytes_per_s),
        ),
        links=(
            _link("device_to_host_pinned", job.copy_bytes_per_s),
            _link("device_to_host_pageable", job.copy_bytes_per_s * PAGEABLE),
        ),
        storage=tuple(
            StorageMeasure(
                operation="write",
                direct=direct,
                writers=writers,
                chunk_bytes=chunk,
                alpha_s=0.0,
                bytes_per_s=_exactly(job.disk_bytes_per_s),
            )
            for writers in (1, 2, 4)
            for chunk in (8 * 2**20, 32 * 2**20)
            for direct in (False, True)
        ),
        interference=tuple(
            InterferenceMeasure(work=work, slowdown=_exactly(job.slowdown), busy_s=job.iteration_s)
            for work in ("snapshot_copy", "storage_write", "persist")
        ),
    )


def with_failures(profile: Profile, failures: FailureRates) -> Profile:
    """The same job under other failures."""
    return replace(profile, failures=failures)


def with_recovery(profile: Profile, *, detect_s: float | None, restart_s: float | None) -> Profile:
    """The same job with other times to notice a failure and to start again."""
    recovery = profile.recovery
    if detect_s is not None:
        recovery = replace(recovery, detect=_assumed(detect_s))
    if restart_s is not None:
        recovery = replace(recovery, restart=_assumed(restart_s))
    return replace(profile, recovery=recovery)


def with_network(profile: Profile, *, bytes_per_s: float, idle: float, known: bool) -> Profile:
    """The same job with a link between nodes that idles for a fraction of each iteration.

    Traffic outside the idle part delays the training.  `known`: the speed counts as measured, so
    that policies may choose to use it.  Otherwise only policies with explicit redundancy use it.
    """
    link = replace(_link("host_to_peer", bytes_per_s), between_nodes=known)
    busy = InterferenceMeasure(
        work="peer_host", slowdown=_exactly(1.0 - idle), busy_s=profile.iteration_s.mean
    )
    return replace(
        profile, links=(*profile.links, link), interference=(*profile.interference, busy)
    )


def _exactly(value: float) -> Distribution:
    return Distribution(n=0, mean=value, p10=value, p50=value, p90=value, p95=value)


def _assumed(seconds: float) -> Estimate:
    return Estimate(value_s=seconds, source="assumed")


def _link(name: str, bytes_per_s: float) -> LinkMeasure:
    return LinkMeasure(
        link=name, alpha_s=0.0, bytes_per_s=bytes_per_s, relative_spread=0.0, n=0, note="assumed"
    )
