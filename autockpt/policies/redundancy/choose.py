"""Whole copies, parity or the disk alone, and the path: by benefit against cost.

Every scheme that fits is given its own best intervals, and the waste rate decides.  A lost node
that memory serves costs half a memory interval instead of half a disk interval.  Every checkpoint
in memory costs an exchange.  For one more copy that is the rule

    Lambda_node dP [(T_d / 2 + P_d + R_d) - (T_m / 2 + P_m + R_m)] > d(s + sigma P) / T_m

and parity wins where its memory fits and that of copies does not.  The path is chosen before, by
sqrt(2 (s + sigma P) Lambda) + Lambda (P + R).

Source: docs/concepts/redundancy.md, "When it is worth it".
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from autockpt.policies.cost_model.costs import Costs, PeerCosts, ranks_per_node
from autockpt.policies.interval.choose import Rates
from autockpt.policies.redundancy.peer_costs import (
    LINKS,
    crossing_bytes,
    limited,
    node_bytes,
    peer_costs,
    way_of,
)
from autockpt.policies.redundancy.survival import survived_domains
from autockpt.policies.staging.slots import SlotChoice, host_room_bytes, slot_bytes
from autockpt.values.errors import ConfigError
from autockpt.values.goal import Goal, RedundancyWish
from autockpt.values.placement import place
from autockpt.values.plan import Choice
from autockpt.values.profile import Profile
from autockpt.values.redundancy import (
    GENERATIONS,
    NO_REDUNDANCY,
    PeerPath,
    Redundancy,
    arrangement,
    said,
)
from autockpt.values.units import format_bytes, format_duration, format_fraction, format_rate

ADVANTAGE = 0.97
"""The device path must be 3 % better than the host path, which needs no memory on the device."""
TIE = 0.01
"""Relative difference of waste below which the scheme with less memory wins.  Replica memory could
be page cache, and the figures behind the waste are not more exact than this."""
COPIES = (2, 3, 4)
SETS = (4, 8, 16)
PARITY = (2, 3, 4)
"""Of Reed-Solomon, which is only considered where it is asked for: its library is an extra."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RedundancyChoice:
    """The redundancy in other nodes' memory, and its cost."""

    redundancy: Redundancy
    peers: PeerCosts | None
    choice: Choice | None
    """None where there is nothing to choose: a job on one node, and nothing asked for."""
    notes: tuple[str, ...] = ()


Row = tuple[float, Redundancy, PeerCosts | None]
"""A candidate: its waste, the scheme on its path, its costs."""
WasteOf = Callable[[Costs], float]
"""Waste with the best intervals under these costs; infinite where the limits forbid all."""


def choose_redundancy(
    profile: Profile, goal: Goal, slots: SlotChoice, costs: Costs, rates: Rates, waste_of: WasteOf
) -> RedundancyChoice:
    """The scheme and path with the least waste that fit, or none.

    Raises ConfigError where the floor or pins ask for what this job cannot have.
    """
    wish = goal.redundancy
    obstacle = _obstacle(profile, wish, slots)
    if obstacle:
        return _without(profile, wish, obstacle)
    wanted = list(candidates(wish, profile.failures.nodes))
    room = memory_room(profile, goal, slots)
    fitting = [one for one in wanted if held_bytes(profile, one) <= room[0]]
    if not fitting and (wish.floor or wish.scheme):
        raise ConfigError(_too_little(profile, wish, wanted, room))
    options = [_on_best_path(profile, wish, one, costs, rates) for one in fitting]
    ranked: list[Row] = [
        (waste_of(replace(costs, peers=peers)), one, peers) for one, peers in options
    ]
    ranked = [row for row in ranked if row[0] < math.inf]
    if not (wish.scheme or wish.floor):
        ranked.append((waste_of(costs), NO_REDUNDANCY, None))
    if not ranked:
        raise ConfigError("no redundancy keeps the limits; loosen limits.overhead or lost_time")
    return _chosen(profile, wish, ranked, room, crowded=len(fitting) < len(wanted))


def candidates(wish: RedundancyWish, nodes: int) -> Iterator[Redundancy]:
    """Every scheme that the wish leaves open, on this many nodes.

    Raises ConfigError where the job has too few nodes for the request.
    """
    found = [one for one in _schemes(wish, nodes) if wish.floor <= one.tolerates < nodes]
    if not found and (wish.scheme or wish.floor):
        raise ConfigError(
            f"redundancy of scheme {wish.scheme or 'auto'} that survives {max(1, wish.floor)} lost "
            f"nodes: not to be had on {nodes} nodes. Nearest: redundancy.floor {nodes - 1}, more "
            "nodes, or fewer copies or parity"
        )
    yield from found


def held_bytes(profile: Profile, redundancy: Redundancy) -> int:
    """Host memory of a node for replicas or parity of other nodes, both generations."""
    size = slot_bytes(profile) * ranks_per_node(profile)
    return math.ceil(GENERATIONS * redundancy.memory_share * size)


def memory_room(profile: Profile, goal: Goal, slots: SlotChoice) -> tuple[int, str]:
    """Host memory of a node beside its own slots, and what limits it."""
    room, name = host_room_bytes(profile, goal)
    return room - slots.slots * slot_bytes(profile) * ranks_per_node(profile), name


# --- parts ----------------------------------------------------------------------------------------


def _obstacle(profile: Profile, wish: RedundancyWish, slots: SlotChoice) -> str:
    """Why there is no choice at all; "" if there is."""
    if wish.scheme == "none":
        return "redundancy.scheme is none"
    if profile.failures.nodes < 2:
        return "the job has one node, and nobody else's memory"
    if not slots.memory_on:
        return "the memory tier is off, so there is nothing to copy"
    link = profile.link(LINKS["host"])
    if not wish.scheme and not wish.floor and (link is None or not link.between_nodes):
        return "no link to another node was measured"
    return ""


def _without(profile: Profile, wish: RedundancyWish, why: str) -> RedundancyChoice:
    if wish.floor:
        raise ConfigError(
            f"redundancy.floor is {wish.floor}, and {why}; nearest: redundancy.floor 0"
        )
    choice = None
    if profile.failures.nodes > 1 or wish.scheme:
        reason = f"{why}; a lost node is served from disk"
        binding = "redundancy.scheme" if wish.scheme == "none" else ""
        choice = Choice(name="redundancy", chosen="none", reason=reason, binding=binding)
    return RedundancyChoice(redundancy=NO_REDUNDANCY, peers=None, choice=choice)


def _schemes(wish: RedundancyWish, nodes: int) -> Iterator[Redundancy]:
    if wish.scheme in (None, "replicas"):
        for copies in (wish.copies,) if wish.copies else COPIES:
            placed = wish.placement or arrangement(copies, nodes)
            yield Redundancy(scheme="replicas", copies=copies, placement=placed, floor=wish.floor)
    sizes = (wish.set_size,) if wish.set_size else tuple(s for s in SETS if s < nodes) or (nodes,)
    if wish.scheme in (None, "xor") and min(sizes) >= 2:
        for size in sizes:
            yield Redundancy(scheme="xor", set_size=size, parity=1, floor=wish.floor)
    if wish.scheme == "rs" or (wish.scheme is None and wish.floor > 1):
        for parity in (wish.parity,) if wish.parity else PARITY:
            for size in (s for s in sizes if s > parity):
                yield Redundancy(scheme="rs", set_size=size, parity=parity, floor=wish.floor)


def _on_best_path(
    profile: Profile, wish: RedundancyWish, one: Redundancy, costs: Costs, rates: Rates
) -> tuple[Redundancy, PeerCosts]:
    """The scheme with its path, rate and costs."""
    device = profile.link(LINKS["device"])
    # Only whole copies go through the devices; parity is added up in host memory.
    whole = one.scheme == "replicas"
    both: tuple[PeerPath, ...] = ("host", "device") if device is not None and whole else ("host",)
    options = []
    for path in (wish.path,) if wish.path and whole else both:
        ready = limited(one, way_of(profile, path), wish.rate_bytes_per_s)
        peers = peer_costs(profile, ready)
        assert peers is not None, "the scheme is not none"
        options.append((path_waste(peers, costs, rates), ready, peers))
    least = min(
        options, key=lambda option: option[0] * (1 if option[1].path == "host" else 1 / ADVANTAGE)
    )
    return least[1], least[2]


def path_waste(peers: PeerCosts, costs: Costs, rates: Rates) -> float:
    """Waste that a path adds: sqrt(2 (s + sigma P) Lambda) + Lambda_peer (P + R)."""
    from_peers = rates.disk_per_s * peers.served
    exposed_s = costs.stall_s + costs.copy_slowdown_s + peers.slowdown_s
    periodic = math.sqrt(2.0 * exposed_s * (rates.memory_per_s + from_peers))
    return periodic + from_peers * (peers.send_s + peers.restore_s)


def _chosen(
    profile: Profile,
    wish: RedundancyWish,
    ranked: list[Row],
    room: tuple[int, str],
    *,
    crowded: bool,
) -> RedundancyChoice:
    least = min(waste for waste, _, _ in ranked)
    equal = [row for row in ranked if row[0] <= least * (1.0 + TIE)]
    best = min(equal, key=lambda row: (row[1].memory_share, row[0]))
    rest = sorted((row for row in ranked if row is not best), key=lambda row: row[0])
    waste, redundancy, peers = best
    bindings = [
        name
        for name, pin in (("redundancy.scheme", wish.scheme), ("redundancy.floor", wish.floor))
        if pin
    ]
    return RedundancyChoice(
        redundancy=redundancy,
        peers=peers,
        notes=way_of(profile, redundancy.path).notes if peers is not None else (),
        choice=Choice(
            name="redundancy",
            chosen=_words(redundancy),
            reason=_reason(profile, redundancy, peers, rest),
            numbers=_numbers(profile, redundancy, peers, room),
            runner_up=_words(rest[0][1]) if rest else "",
            runner_up_waste=rest[0][0] if rest else None,
            chosen_waste=waste,
            binding=" and ".join([*bindings, *([room[1]] if crowded and not bindings else [])]),
        ),
    )


def _words(redundancy: Redundancy) -> str:
    if redundancy.scheme == "none":
        return "none"
    over = {"host": "host to host", "device": "device to device"}[redundancy.path]
    return f"{said(redundancy)}, {over}"


def _reason(
    profile: Profile, redundancy: Redundancy, peers: PeerCosts | None, rest: list[Row]
) -> str:
    if peers is None:
        best = rest[0] if rest else None
        if best is None or best[2] is None:
            return "nothing else fits into host memory; a lost node is served from disk"
        return (
            f"{said(best[1])} would serve {format_fraction(best[2].served)} of the failures that "
            f"take a node's memory, and costs more than it brings: "
            f"{format_duration(best[2].slowdown_s)} of training for each checkpoint"
        )
    sent = crossing_bytes(profile, redundancy)
    kept = node_bytes(profile) * redundancy.sent_share - sent
    anyway = f", and {format_bytes(kept)} more are in replicas there" if kept else ""
    limit = redundancy.rate_bytes_per_s
    slowly = f" at no more than {format_rate(limit)}" if limit else ""
    return (
        f"serves {format_fraction(peers.served)} of the failures that take a node's memory in "
        f"{format_duration(peers.restore_s)} from other nodes; each checkpoint sends "
        f"{format_bytes(sent)} in {format_duration(peers.send_s)}{slowly}{anyway}, costs "
        f"{format_duration(peers.slowdown_s)} of training, and what is held for others takes "
        f"{format_bytes(held_bytes(profile, redundancy))} on a node"
        + "".join(
            f"; of whole losses of a {level} it survives {format_fraction(share)}"
            for level, share in _whole_domains(profile, redundancy)
        )
    )


def _whole_domains(profile: Profile, redundancy: Redundancy) -> list[tuple[str, float]]:
    """By level the share of domains that may be lost as a whole; nothing where none is known."""
    placement = place(redundancy, profile.failures.nodes, profile.domains)
    levels = profile.domains.levels
    return [(level, survived_domains(placement, profile.domains, level)) for level in levels]


def _numbers(
    profile: Profile, redundancy: Redundancy, peers: PeerCosts | None, room: tuple[int, str]
) -> dict[str, float]:
    numbers = {"nodes": float(profile.failures.nodes), "room_bytes": float(room[0])}
    if peers is not None:
        numbers |= {
            "survived": peers.served,
            "send_s": peers.send_s,
            "crossing_bytes": crossing_bytes(profile, redundancy),
            "slowdown_s": peers.slowdown_s,
            "restore_peer_s": peers.restore_s,
            "held_bytes": float(held_bytes(profile, redundancy)),
            "rate_bytes_per_s": redundancy.rate_bytes_per_s,
            **{f"survived_{level}": share for level, share in _whole_domains(profile, redundancy)},
        }
    return numbers


def _too_little(
    profile: Profile, wish: RedundancyWish, wanted: list[Redundancy], room: tuple[int, str]
) -> str:
    least = min(wanted, key=lambda one: one.memory_share)
    asked = f"redundancy.floor {wish.floor}" if wish.floor else f"redundancy.scheme {wish.scheme}"
    return (
        f"{asked}: {said(least)} takes {held_bytes(profile, least)} bytes of host memory on a "
        f"node beside its own slots, and {room[1]} leaves {max(0, room[0])}; nearest: fewer "
        "memory.slots, a larger redundancy.set_size, or a larger limits.host_memory"
    )
