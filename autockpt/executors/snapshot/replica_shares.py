"""Replicated state is stored once per node, or per job: the part that this rank takes of it.

Ranks of one node share: each needs the slots of the others to go on from memory, and those live and
die with it.  Over the job they share where the plan says so (decision 31): then no node's memory
has all of its state.

Two proofs stand behind every snapshot.  Holders name the same tensors, else the parts would not
fit.  A few elements of each are equal, else these are no replicas (local SGD).
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

import torch
import xxhash

from autockpt.executors.image.layout.dedup import Item, Range, divide
from autockpt.executors.sharding.local_shard import LocalShard
from autockpt.executors.snapshot.device import DeviceRead
from autockpt.executors.snapshot.optimizer_hooks import CanaryGroup, canary_groups, host_bytes
from autockpt.values.goal import SharedAmong

Members = tuple[int, ...]

SECTIONS = 16
"""Sections of a share; a difference names one section."""
CUT_BYTES = 2**20
"""A tensor of more bytes may be cut between two sections."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Elements [start, stop) of a tensor."""

    name: str
    start: int
    stop: int


Section = list[Piece]


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where this rank stands."""

    rank: int
    nodes: tuple[int, ...]
    """Node of every rank, [world_size]."""
    among: SharedAmong = "node"
    """The ranks that divide what they hold alike."""

    def members(self, holders: Iterable[int]) -> Members:
        """Holders that share with this rank, ascending; () when it is the only one."""
        known = (rank for rank in holders if rank < len(self.nodes))
        alike = tuple(rank for rank in known if self._is_near(rank))
        return alike if len(alike) > 1 and self.rank in alike else ()

    def _is_near(self, rank: int) -> bool:
        return self.among == "job" or self.nodes[rank] == self.nodes[self.rank]

    def spans_nodes(self, members: Iterable[int]) -> bool:
        """Whether these ranks are on more than one node."""
        return len({self.nodes[rank] for rank in members}) > 1

    def further_nodes(self, holders: Iterable[int]) -> tuple[int, ...]:
        """Other nodes that store the same: so many further on than this one, counted around."""
        if self.among == "job":
            return ()
        count, own = max(self.nodes) + 1, self.nodes[self.rank]
        known = {self.nodes[rank] for rank in holders if rank < len(self.nodes)}
        return tuple(sorted((node - own) % count for node in known - {own}))


@dataclass(slots=True)
class ReplicaGroup:
    """Tensors that the same ranks hold, here and on other nodes."""

    members: Members
    """The holders that share, of this node or of the job."""
    form: bytes
    """Names, shapes and types, as text."""
    canaries: list[CanaryGroup]
    name: str
    """A name of all holders and the form."""
    own: int
    """The number of the share that this rank stores."""
    shares: list[list[Section]]
    """By member its share, in sections."""
    among: str = ""
    """A name of the members."""

    def take(self, noted: Callable[[CanaryGroup], bytes | DeviceRead]) -> "Agreement":
        """Return this rank's report of the group as of now; `noted` brings canaries to the host."""
        noted_now = [noted(group) for group in self.canaries]
        return Agreement(self.members, self.form, noted_now, self.name, self.among)


@dataclass(slots=True)
class Agreement:
    """One rank's report of the state that it shares, at one boundary."""

    members: Members
    form: bytes
    values: list[bytes | DeviceRead]
    group: str = ""
    among: str = ""
    readings: dict[int, list[str]] = field(default_factory=dict)
    """By share the digest of each section that was read."""

    def digest(self) -> str:
        """Of names, forms and canaries; waits for a device, so never on the training thread."""
        digest = xxhash.xxh3_128(self.form)
        for value in self.values:
            digest.update(host_bytes(value.wait()) if isinstance(value, DeviceRead) else value)
        return digest.hexdigest()


@dataclass(slots=True)
class Shares:
    """The parts of replicated tensors that this rank stores."""

    ranges: dict[str, Range]
    """By name of every tensor that is shared its range, in elements; (0, 0): others store it."""
    groups: list[ReplicaGroup]
    across_nodes: bool = False
    """Ranks of other nodes store some of it, so that this node's ranks alone have not all."""


NOTHING = Shares({}, [])


def take_shares(
    place: Place | None, tensors: Mapping[str, torch.Tensor], holdings: Mapping[str, LocalShard]
) -> Shares:
    """Divides what is held on several ranks; `tensors`: local parts by name.

    A second name of the same memory goes where the first one goes.
    """
    if place is None:
        return NOTHING
    grouped: dict[tuple[Members, Members], dict[str, torch.Tensor]] = {}
    members_of: dict[Members, Members] = {}
    """By holders: most tensors have the same, and they may be thousands."""
    first: dict[tuple[object, ...], str] = {}
    twins: dict[str, str] = {}
    for name, tensor in tensors.items():
        holders = holdings[name].holders if name in holdings else ()
        if len(holders) < 2 or place.rank not in holders or not tensor.numel():
            continue
        if holders not in members_of:
            members_of[holders] = place.members(holders) or (place.rank,)
        members = members_of[holders]
        key = (tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype)
        if first.setdefault(key, name) != name:
            twins[name] = first[key]
        else:
            grouped.setdefault((members, holders), {})[name] = tensor
    shares = Shares({}, [])
    for (members, holders), found in grouped.items():
        divided = divide([_item(n, t) for n, t in found.items()], len(members))
        own = members.index(place.rank)
        if len(members) > 1:
            shares.ranges |= {name: divided[own].get(name, (0, 0)) for name in found}
            shares.across_nodes |= place.spans_nodes(members)
        form = _form(found)
        name = xxhash.xxh3_64(repr(holders).encode() + form).hexdigest()
        canaries = canary_groups(found) if len(members) > 1 else []
        sections = [sections_of(share, found) for share in divided]
        among = xxhash.xxh3_64(repr(members).encode()).hexdigest()
        shares.groups.append(ReplicaGroup(members, form, canaries, name, own, sections, among))
    shares.ranges |= {twin: shares.ranges[n] for twin, n in twins.items() if n in shares.ranges}
    return shares


def sections_of(share: Mapping[str, Range], tensors: Mapping[str, torch.Tensor]) -> list[Section]:
    """Divides a share into at most SECTIONS sections of about equal bytes; equal on all ranks."""
    sizes = {n: (stop - start) * tensors[n].element_size() for n, (start, stop) in share.items()}
    target = max(1, -(-sum(sizes.values()) // SECTIONS))
    sections: list[Section] = []
    room = 0
    for name, (start, stop) in sorted(share.items()):
        tensor = tensors[name]
        divisible = tensor.is_contiguous() and sizes[name] > CUT_BYTES
        while start < stop:
            if room <= 0:
                sections.append([])
                room = target
            fit = max(1, room // tensor.element_size()) if divisible else stop - start
            end = min(stop, start + fit)
            sections[-1].append(Piece(name, start, end))
            room -= (end - start) * tensor.element_size()
            start = end
    return sections


def _item(name: str, tensor: torch.Tensor) -> Item:
    return Item(
        name=name, elements=tensor.numel(), element_bytes=tensor.element_size(),
        divisible=tensor.is_contiguous(),
    )  # fmt: skip


def _form(tensors: Mapping[str, torch.Tensor]) -> bytes:
    rows = [f"{name} {tuple(t.shape)} {t.dtype}" for name, t in sorted(tensors.items())]
    return "\n".join(rows).encode()
