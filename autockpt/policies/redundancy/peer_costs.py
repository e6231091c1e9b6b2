"""Costs of a scheme on one of its paths, and the failures it serves: from links to `PeerCosts`.

    send        alpha + S x crossing / B + S x kept / B_copy
    slow-down   sigma x (S x crossing / B_full + S x kept / B_copy)

B is the slowest hop, cut by a limit of the rate: a lower rate slows less, for longer.  Of the
bytes to send, `kept` are copied from a replica on the holder (DDP, HSDP), `crossing` are fetched.

    rebuild     alpha + S x rebuilt / B_full + copy into place

served = P(a failure that takes a node's memory is a loss of nodes) x P(memory survives it).
"""

from dataclasses import dataclass, replace
from functools import lru_cache

from autockpt.policies.cost_model.costs import (
    ASSUMED_COPY_BYTES_PER_S,
    ASSUMED_SLOWDOWN,
    PeerCosts,
    ranks_per_node,
)
from autockpt.policies.redundancy.schemes import ASSUMED_TOGETHER
from autockpt.policies.redundancy.survival import survived_mix
from autockpt.values.placement import FailureDomains, place
from autockpt.values.plan import Staging
from autockpt.values.profile import FailureRates, HeldElsewhere, LinkMeasure, Profile
from autockpt.values.redundancy import PeerPath, Redundancy

ASSUMED_BYTES_PER_S = 1.25e9
"""To another node where no link was measured: 10 Gbit/s, the slowest that is built today."""
SLOWDOWN_LIMIT = 0.05
"""Most that an iteration may become longer while an exchange runs; the rate is cut to that."""
LEAST_FREE = 0.05
"""Of a network that training fills: copies must come through all the same."""
LINKS: dict[PeerPath, str] = {"host": "host_to_peer", "device": "device_to_peer"}
WORKS: dict[PeerPath, str] = {"host": "peer_host", "device": "peer_device"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """One path to a peer as it was measured, or assumed."""

    path: PeerPath
    alpha_s: float
    bytes_per_s: float
    """Of its slowest hop, unlimited."""
    spread: float
    """Standard deviation of its time over the mean."""
    slowdown: float
    """Of training while it is used without a limit, fraction."""
    used: float | None = None
    """Fraction of the network that training itself sends over, 0..1; None: not counted."""
    notes: tuple[str, ...] = ()
    """Assumptions, in sentences."""


def way_of(profile: Profile, path: PeerPath) -> Way:
    """Return the measured path; missing figures are assumed and noted."""
    link = profile.link(LINKS[path])
    notes: list[str] = []
    if link is None:
        link = LinkMeasure(
            link=LINKS[path],
            alpha_s=0.0,
            bytes_per_s=ASSUMED_BYTES_PER_S,
            relative_spread=0.0,
            n=0,
        )
        notes.append("no link to another node was measured; 10 Gbit/s is assumed")
    elif not link.between_nodes:
        notes.append("the link to a peer was measured within one node: the network may be slower")
    rate, alpha_s = link.bytes_per_s, link.alpha_s
    if path == "device" and link.note:
        notes.append(f"the path through the devices: {link.note}")
    landing = profile.link("device_to_host_pinned") if path == "device" else None
    if landing is not None:
        rate, alpha_s = min(rate, landing.bytes_per_s), alpha_s + landing.alpha_s
    return Way(
        path=path,
        alpha_s=alpha_s,
        bytes_per_s=rate,
        spread=link.relative_spread,
        slowdown=_slowdown(profile, path, notes),
        used=profile.used("network"),
        notes=tuple(notes),
    )


def _slowdown(profile: Profile, path: PeerPath, notes: list[str]) -> float:
    """sigma: training lost per second of exchange."""
    measure = profile.under(WORKS[path])
    if measure is None:
        notes.append(f"the slow-down by an exchange is assumed: {ASSUMED_SLOWDOWN:.0%}")
        return ASSUMED_SLOWDOWN
    busy_s = measure.busy_s or profile.iteration_s.mean
    return min(1.0, max(0.0, measure.slowdown.mean) * profile.iteration_s.mean / busy_s)


def node_bytes(profile: Profile) -> int:
    """S: the bytes that one node saves."""
    return profile.state.total_bytes * ranks_per_node(profile)


def crossing_bytes(profile: Profile, redundancy: Redundancy) -> float:
    """Bytes that a node fetches from others for each checkpoint."""
    return node_bytes(profile) * redundancy.sent_share * _crossing(profile, redundancy)


def _crossing(profile: Profile, redundancy: Redundancy) -> float:
    """The part of the copies that no replica on their holders has; all of a parity."""
    state = profile.state
    if redundancy.scheme != "replicas" or not state.elsewhere:
        return 1.0
    scheme = replace(redundancy, path="host", rate_bytes_per_s=0.0, schedule="paced", floor=0)
    kept = _kept_bytes(scheme, profile.failures.nodes, profile.domains, state.elsewhere)
    # The chunk with the rank's own bytes is fetched whole.
    own = state.total_bytes - kept + Staging().chunk_bytes
    return min(1.0, own / state.total_bytes)


@lru_cache(maxsize=1024)
def _kept_bytes(
    scheme: Redundancy, nodes: int, domains: FailureDomains, elsewhere: tuple[HeldElsewhere, ...]
) -> float:
    """Mean over all copies of the bytes that a replica on their holder has."""
    by_distance: dict[int, int] = {}
    for held in elsewhere:
        for distance in held.nodes:
            by_distance[distance] = by_distance.get(distance, 0) + held.bytes
    copies = [
        by_distance.get((holder - node) % nodes, 0)
        for cell in place(scheme, nodes, domains).cells
        for node in cell.members
        for holder in cell.holders(node)[1:]
    ]
    return sum(copies) / len(copies)


def limited(redundancy: Redundancy, way: Way, rate_bytes_per_s: float | None) -> Redundancy:
    """The scheme on a path, its rate as asked for or such that no iteration is 5 % longer.

    Where it has to be cut, to no more than what training leaves of the network, if that is known.
    """
    rate = rate_bytes_per_s
    if rate is None:
        busy = way.slowdown > SLOWDOWN_LIMIT
        rate = way.bytes_per_s * SLOWDOWN_LIMIT / way.slowdown if busy else 0.0
        if busy and way.used is not None:
            rate = min(rate, way.bytes_per_s * max(LEAST_FREE, 1.0 - way.used))
    return replace(redundancy, path=way.path, rate_bytes_per_s=rate)


def peer_costs(profile: Profile, redundancy: Redundancy) -> PeerCosts | None:
    """Return the cost of a plan's redundancy for this job; None without any."""
    if redundancy.scheme == "none":
        return None
    way, size = way_of(profile, redundancy.path), node_bytes(profile)
    crossing = crossing_bytes(profile, redundancy)
    copy = profile.link("host_copy")
    copy_bytes_per_s = ASSUMED_COPY_BYTES_PER_S if copy is None else copy.bytes_per_s
    copied_s = (size * redundancy.sent_share - crossing) / copy_bytes_per_s
    rate = min(way.bytes_per_s, redundancy.rate_bytes_per_s or way.bytes_per_s)
    send_s = way.alpha_s + crossing / rate + copied_s
    restore = profile.recovery.restore_peer
    read_s = way.alpha_s + size * redundancy.rebuilt_share / way.bytes_per_s
    return PeerCosts(
        send_s=send_s,
        # Two standard deviations: the 95th percentile of a nearly normal distribution.
        send_high_s=send_s * (1.0 + 2.0 * way.spread),
        slowdown_s=way.slowdown * (crossing / way.bytes_per_s + copied_s),
        restore_s=restore.value_s
        if restore is not None
        else read_s + profile.recovery.restore_memory.value_s,
        served=served(profile.failures, redundancy, profile.domains),
    )


def served(failures: FailureRates, redundancy: Redundancy, domains: FailureDomains) -> float:
    """Of the failures that take a node's memory, the fraction that others' memory serves.

    Where classes were estimated, storage failures and silent errors are not served: the memory of
    peers holds the same wrong state.  A job step that ends with any of its nodes takes the memory
    of all.
    """
    if failures.memory_ends_with != "node":
        return 0.0
    kept = failures.classes.get("node", 0.0) + failures.classes.get("nodes", 0.0)
    unserved = failures.classes.get("storage", 0.0) + failures.classes.get("silent", 0.0)
    share = kept / (kept + unserved) if kept > 0 else 1.0
    scheme = replace(redundancy, path="host", rate_bytes_per_s=0.0, schedule="paced", floor=0)
    together = failures.together or ASSUMED_TOGETHER
    return share * _survived(scheme, failures.nodes, domains, tuple(together))


@lru_cache(maxsize=1024)
def _survived(
    scheme: Redundancy, nodes: int, domains: FailureDomains, together: tuple[float, ...]
) -> float:
    """Remembered: a decision asks for few schemes, and how far it holds asks a hundred times."""
    return survived_mix(place(scheme, nodes, domains), together)
