"""HOW IS MEMORY PROTECTED AGAINST LOST NODES?  The scheme of a plan and its cost.

All costs are in units of S, the bytes that one node saves.  A scheme is none, whole copies, or
parity of sets.

| scheme | memory beside the own image | sent per checkpoint | read to rebuild a node |
|---|---|---|---|
| m copies | (m - 1) S | (m - 1) S | S |
| XOR over G nodes | S / (G - 1) | S (reduce-scatter around the set) | (G - 1) S |
| Reed-Solomon, t of G | t S / (G - t) | t S | (G - t) S |

Source: LLNL redset's layout.  No node holds the parity of its own data, so a set of G nodes keeps t
S / (G - t) on each.
"""

from dataclasses import dataclass, replace
from typing import Literal

from autockpt.values.errors import ConfigError

Scheme = Literal["none", "replicas", "xor", "rs"]
Arrangement = Literal["group", "mixed", "ring"]
PeerPath = Literal["host", "device"]
PeerSchedule = Literal["paced", "windows"]
"""When copies leave."""

GENERATIONS = 2
"""Generations kept for other nodes: the newest complete one, and the one that is arriving."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Redundancy:
    """Copies of a node's checkpoint in the memory of other nodes, and their path."""

    scheme: Scheme = "none"
    copies: int = 1
    """Of each shard, the own one included; 1 unless the scheme is replicas."""
    placement: Arrangement = "mixed"
    """group: disjoint groups of `copies` nodes; ring: each node and the next `copies` - 1. mixed:
    groups, and a ring of the remaining nodes where `copies` does not divide their number."""
    set_size: int = 0
    """Most nodes of a parity set, 0 unless the scheme is xor or rs."""
    parity: int = 0
    """Nodes that a set may lose."""
    path: PeerPath = "host"
    """host: host -> peer host; device: device -> peer device -> peer host."""
    rate_bytes_per_s: float = 0.0
    """Most that a node sends, so that training is not slowed too much; 0: no limit."""
    schedule: PeerSchedule = "paced"
    """paced: at that rate; windows: while the training's own traffic is silent, as far as that
    takes them.  Of copies from host memory."""
    floor: int = 0
    """Simultaneous node losses that the user always wants survived; a guard holds it."""

    def __post_init__(self) -> None:
        replicated, coded = self.scheme == "replicas", self.scheme in ("xor", "rs")
        if (self.copies >= 2) is not replicated or self.copies < 1:
            raise ConfigError(
                f"{self.copies} copies with scheme {self.scheme}: replicas have at least 2, every "
                "other scheme has 1"
            )
        if coded != (self.parity > 0) or coded != (self.set_size > self.parity):
            raise ConfigError(
                f"{self.parity} parity in sets of {self.set_size} with scheme {self.scheme}: xor "
                "and rs need 0 < parity < set size, the others have neither"
            )
        if self.scheme == "xor" and self.parity != 1:
            raise ConfigError(f"xor with parity {self.parity}: it survives 1 loss; rs takes more")
        if self.rate_bytes_per_s < 0 or self.floor < 0:
            raise ConfigError(
                f"rate {self.rate_bytes_per_s} B/s and floor {self.floor}: must not be negative"
            )

    @property
    def tolerates(self) -> int:
        """Simultaneous node losses that are survived wherever they strike."""
        return self.parity or self.copies - 1

    @property
    def memory_share(self) -> float:
        """Memory of one protected generation beside the own image, over S."""
        if self.parity:
            return self.parity / (self.set_size - self.parity)
        return float(self.copies - 1)

    @property
    def sent_share(self) -> float:
        """Sent by a node for one checkpoint, over S."""
        return float(self.tolerates)

    @property
    def rebuilt_share(self) -> float:
        """Read from others to rebuild one node, over S."""
        return float(self.set_size - self.parity if self.parity else 1)


NO_REDUNDANCY = Redundancy()


def is_placed_alike(one: Redundancy, other: Redundancy) -> bool:
    """Whether both put the same copies and parities on the same nodes."""
    return placing(one) == placing(other)


def placing(redundancy: Redundancy) -> Redundancy:
    """The scheme alone: without path, rate, schedule and floor, which move no copy."""
    return replace(redundancy, path="host", rate_bytes_per_s=0.0, schedule="paced", floor=0)


def copy_iterations(interval_steps: int) -> int:
    """Iterations over which copies may be spread: half of those between two checkpoints in memory.

    The other half is for what comes late, and the state that is not protected yet gets older.
    """
    return max(1, interval_steps // 2)


def arrangement(copies: int, nodes: int) -> Arrangement:
    """Groups, and a ring of the rest where `copies` does not divide the nodes."""
    return "mixed" if nodes % copies else "group"


def said(redundancy: Redundancy) -> str:
    """A scheme in a few words: "2 copies, group"."""
    match redundancy.scheme:
        case "none":
            return "none"
        case "replicas":
            return f"{redundancy.copies} copies, {redundancy.placement}"
        case "xor":
            return f"XOR over {redundancy.set_size} nodes"
        case "rs":
            return f"Reed-Solomon, {redundancy.parity} of {redundancy.set_size} nodes"
