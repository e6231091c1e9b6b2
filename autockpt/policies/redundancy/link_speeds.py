"""Copies to other nodes over a link that is slower or faster than it was when it was profiled.

A run observes how fast its copies move, but it has no profile.  So the rate and the cost of each
scheme at each speed are computed in advance.  While it trains, a run compares them under its own
costs and failures.
"""

import contextlib
from dataclasses import dataclass, replace

from autockpt.policies.cost_model.costs import PeerCosts
from autockpt.policies.redundancy.choose import candidates, held_bytes, memory_room
from autockpt.policies.redundancy.peer_costs import LINKS, limited, peer_costs, way_of
from autockpt.policies.staging.slots import choose_slots
from autockpt.values.errors import ConfigError
from autockpt.values.goal import Goal
from autockpt.values.profile import LinkMeasure, Profile
from autockpt.values.redundancy import GENERATIONS, Redundancy, is_placed_alike

SPEEDS = tuple(2.0**n for n in range(-2, 8))
"""Times as slow as profiled."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExchangeAtSpeed:
    """The exchange of a scheme over a link of one speed."""

    slower: float
    """Times as slow as profiled."""
    rate_bytes_per_s: float
    """Most that a node sends; 0: no limit."""
    peers: PeerCosts
    """Costs at that rate."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SchemeBySpeed:
    """A scheme, and its exchange over links of each speed."""

    redundancy: Redundancy
    """Its rate is that of the table."""
    held_bytes: int
    """Host memory of a node for copies and parity of others, both generations."""
    table: tuple[ExchangeAtSpeed, ...]

    @property
    def arriving_bytes(self) -> int:
        """The same of the generation that is arriving."""
        return self.held_bytes // GENERATIONS


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


def schemes_by_speed(
    profile: Profile, goal: Goal, redundancy: Redundancy
) -> tuple[SchemeBySpeed, ...]:
    """The plan's scheme, and each other one that goal and memory allow, on the same path.

    A scheme without any copies is none of them: no run would see that the link is fast again.
    Empty as `exchanges_by_speed`.
    """
    if not profiled_s_per_gb(profile, redundancy):
        return ()
    found = [redundancy]
    with contextlib.suppress(ConfigError):  # these nodes cannot have what is asked for
        room = memory_room(profile, goal, choose_slots(profile, goal))[0]
        for one in candidates(goal.redundancy, profile.failures.nodes):
            same_path = redundancy.path == "host" or one.scheme == "replicas"
            fits = same_path and held_bytes(profile, one) <= room
            if fits and not is_placed_alike(one, redundancy):
                found.append(replace(one, path=redundancy.path, schedule=redundancy.schedule))
    return tuple(
        SchemeBySpeed(
            redundancy=one,
            held_bytes=held_bytes(profile, one),
            table=exchanges_by_speed(profile, goal, one),
        )
        for one in found
    )


def _slowed(profile: Profile, times: float) -> Profile:
    return replace(profile, links=tuple(_slower(link, times) for link in profile.links))


def _slower(link: LinkMeasure, times: float) -> LinkMeasure:
    if link.link not in LINKS.values():
        return link
    return replace(link, alpha_s=link.alpha_s * times, bytes_per_s=link.bytes_per_s / times)
