"""Which chunk of which member counts in which chunk of whose parity, and the chunks to rebuild it.

Pure.  Members are numbered 0 ... N-1 by their place in the set.  Images may differ in length.
Missing bytes of a shorter one count as zeros, and are neither stored nor sent.
"""

from collections.abc import Collection
from dataclasses import dataclass
from functools import cached_property, reduce
from operator import xor

from autockpt.executors.keeper.replication.parity.field import (
    BITS,
    SIZE,
    inverse_matrix,
    multiply,
    parity_matrix,
)
from autockpt.values.errors import ConfigError

PACKET_BYTES = 64 * 2**10
"""Largest packet: the eight packets of a multiplication fit the second-level cache."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """A chunk in a stripe."""

    stripe: int
    position: int
    """Position of the chunk in its segment."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Term:
    """A survivor's share in a lost chunk: one of its chunks, of image or parity, times `factor`."""

    member: int
    of_parity: bool
    number: int
    """Number of the chunk in that image or parity."""
    factor: int


@dataclass(frozen=True, kw_only=True)
class ParitySet:
    """N members that protect one another against `losses` of them."""

    image_bytes: tuple[int, ...]
    """By member."""
    chunk_bytes: int
    losses: int = 1

    def __post_init__(self) -> None:
        if not 1 <= self.losses < self.members or min(self.image_bytes) <= 0:
            raise ConfigError(
                f"a parity set of {self.members} members against {self.losses} losses: expected "
                "at least one loss, more members than losses, and no empty image"
            )
        if self.losses > 1 and self.members > SIZE:
            raise ConfigError(
                f"{self.members} members against {self.losses} losses: at most {SIZE} members; "
                "make smaller sets, which are safer"
            )
        if self.chunk_bytes % (8 * BITS) or self.chunk_bytes % (BITS * self.packet_bytes):
            raise ConfigError(
                f"chunks of {self.chunk_bytes} bytes do not divide into {BITS} packets of up to "
                f"{PACKET_BYTES}; use a power of two"
            )

    @property
    def members(self) -> int:
        """N."""
        return len(self.image_bytes)

    @cached_property
    def segment_chunks(self) -> int:
        """Chunks of one member in one stripe, and of one row of parity."""
        longest = -(-max(self.image_bytes) // self.chunk_bytes)
        return -(-longest // (self.members - self.losses))

    @property
    def parity_chunks(self) -> int:
        """Chunks of parity that every member holds: row j of stripe (member - j) stands j-th."""
        return self.losses * self.segment_chunks

    @property
    def parity_bytes(self) -> int:
        """Extra memory of every member."""
        return self.parity_chunks * self.chunk_bytes

    @property
    def packet_bytes(self) -> int:
        """Bytes of a packet; a multiplication works on a block of BITS packets."""
        return max(8, min(PACKET_BYTES, self.chunk_bytes // BITS))

    def chunks(self, member: int) -> int:
        """Chunks of a member's image."""
        return -(-self.image_bytes[member] // self.chunk_bytes)

    def holders(self, stripe: int) -> tuple[int, ...]:
        """Return the holders of the rows of a stripe's parity, by row."""
        return tuple((stripe + row) % self.members for row in range(self.losses))

    def data_members(self, stripe: int) -> tuple[int, ...]:
        """Members with a segment in a stripe, by column of the parity matrix."""
        holders = self.holders(stripe)
        return tuple(member for member in range(self.members) if member not in holders)

    def stripes_of(self, member: int) -> tuple[int, ...]:
        """Stripes that a member has data in, by segment of its image."""
        return tuple(s for s in range(self.members) if member not in self.holders(s))

    def place(self, member: int, number: int) -> Place:
        """Where chunk `number` of a member's image counts."""
        segment, position = divmod(number, self.segment_chunks)
        return Place(stripe=self.stripes_of(member)[segment], position=position)

    def number_at(self, member: int, place: Place) -> int | None:
        """The chunk of a member's image at a place; None when its image ends before."""
        number = self.stripes_of(member).index(place.stripe) * self.segment_chunks + place.position
        return number if number < self.chunks(member) else None

    def parity_number(self, holder: int, place: Place) -> int:
        """The chunk of a holder's parity that a place counts in."""
        row = self.holders(place.stripe).index(holder)
        return row * self.segment_chunks + place.position

    def factor(self, member: int, holder: int, stripe: int) -> int:
        """The factor of a member's segment in a holder's row."""
        column = self.data_members(stripe).index(member)
        row = self.holders(stripe).index(holder)
        return parity_matrix(self.losses, self.members - self.losses)[row][column]

    def for_holder(self, member: int, holder: int) -> tuple[tuple[int, int], ...]:
        """Ranges [start, stop) of chunks that a member sends to a holder, in order."""
        ranges: list[tuple[int, int]] = []
        for segment, stripe in enumerate(self.stripes_of(member)):
            start = segment * self.segment_chunks
            stop = min(start + self.segment_chunks, self.chunks(member))
            if holder in self.holders(stripe) and start < stop:
                ranges.append((start, stop))
        return tuple(ranges)

    # ------------------------------------------------------------------ rebuilding

    def rebuild(self, member: int, number: int, lost: Collection[int]) -> tuple[Term, ...]:
        """Return the terms whose sum is chunk `number` of a lost member.

        `lost`: all lost members, `member` among them.  Raises ConfigError when they are too many.
        """
        place = self.place(member, number)
        terms = [self._term(*share, place) for share in self._shares(place.stripe, member, lost)]
        return tuple(term for term in terms if term is not None)

    def _shares(
        self, stripe: int, member: int, lost: Collection[int]
    ) -> list[tuple[int, bool, int]]:
        """(survivor, whether its parity, factor) of a lost segment."""
        holders, data = self.holders(stripe), self.data_members(stripe)
        gone = [m for m in data if m in lost]
        rows = [row for row, holder in enumerate(holders) if holder not in lost][: len(gone)]
        if len(rows) < len(gone):
            raise ConfigError(
                f"members {sorted(lost)} of a set of {self.members} are lost, it stands "
                f"{self.losses}; restore from a durable generation"
            )
        matrix = parity_matrix(self.losses, len(data))
        solved = inverse_matrix([[matrix[row][data.index(m)] for m in gone] for row in rows])
        weights = solved[gone.index(member)]
        shares = [(holders[row], True, w) for row, w in zip(rows, weights, strict=True)]
        for column, survivor in enumerate(data):
            if survivor not in lost:
                products = (
                    multiply(w, matrix[row][column]) for row, w in zip(rows, weights, strict=True)
                )
                shares.append((survivor, False, reduce(xor, products, 0)))
        return [share for share in shares if share[2]]

    def _term(self, member: int, of_parity: bool, factor: int, place: Place) -> Term | None:
        number = self.parity_number(member, place) if of_parity else self.number_at(member, place)
        if number is None:
            return None  # zeros
        return Term(member=member, of_parity=of_parity, number=number, factor=factor)
