"""Copies to other nodes over a link that is slower or faster than it was when it was profiled.

A run observes how fast its copies move, but it has no profile.  So the rate of the plan's scheme at
each speed is computed in advance: a run may change it while it trains.  The next start may change
the scheme itself.
"""

from dataclasses import dataclass, replace

from autockpt.policies.cost_model.costs import PeerCosts
from autockpt.policies.decide import decide
from autockpt.policies.redundancy.peer_costs import LINKS, limited, peer_costs, way_of
from autockpt.values.errors import ConfigError
from autockpt.values.goal import Goal
from autockpt.values.profile import LinkMeasure, Profile
from autockpt.values.redundancy import Redundancy

SPEEDS = tuple(2.0**n for n in range(-2, 8))
"""Times as slow as profiled."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExchangeAtSpeed:
    """The exchange of the plan's scheme over a link of one speed."""

    slower: float
    """Times as slow as profiled."""
    rate_bytes_per_s: float
    """Most that a node sends; 0: no limit."""
    peers: PeerCosts
    """Costs at that rate."""


def exchanges_by_speed(
    profile: Profile, goal: Goal, redundancy: Redundancy
) -> tuple[ExchangeAtSpeed, ...]:
    """The exchange at each of `SPEEDS`, from fast to slow.

    Empty where nothing is sent, or the speed of the link is not known.
    """
    if not profiled_s_per_gb(profile, redundancy):
        return ()
    found = []
    for slower in SPEEDS:
        at = _slowed(profile, slower)
        way = way_of(at, redundancy.path)
        paced = limited(redundancy, way, goal.redundancy.rate_bytes_per_s)
        peers = peer_costs(at, paced)
        assert peers is not None, "the scheme is not none"
        rate = paced.rate_bytes_per_s
        found.append(ExchangeAtSpeed(slower=slower, rate_bytes_per_s=rate, peers=peers))
    return tuple(found)


def profiled_s_per_gb(profile: Profile, redundancy: Redundancy) -> float:
    """Seconds of a gigabyte over the link of the plan's path, unlimited; 0: not measured.

    Copies that leave in idle windows tell nothing of the link: they pause within a chunk.
    """
    link = profile.link(LINKS[redundancy.path])
    if redundancy.scheme == "none" or redundancy.schedule == "windows" or link is None:
        return 0.0
    return 1e9 / link.bytes_per_s


def scheme_at(profile: Profile, goal: Goal, slower: float) -> Redundancy | None:
    """The redundancy of a plan for a link of this speed; None: the limits leave none.

    It has one copy or parity at least: without any, no run would see that the link is fast again.
    """
    wish = replace(goal.redundancy, floor=max(1, goal.redundancy.floor))
    try:
        plan = decide(_slowed(profile, slower), replace(goal, redundancy=wish)).plan
    except ConfigError:
        return None
    return replace(plan.redundancy, floor=goal.redundancy.floor)


def _slowed(profile: Profile, times: float) -> Profile:
    return replace(profile, links=tuple(_slower(link, times) for link in profile.links))


def _slower(link: LinkMeasure, times: float) -> LinkMeasure:
    if link.link not in LINKS.values():
        return link
    return replace(link, alpha_s=link.alpha_s * times, bytes_per_s=link.bytes_per_s / times)
