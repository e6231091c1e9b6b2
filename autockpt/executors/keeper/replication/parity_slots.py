"""Parities in replica slots: made of the shards of other nodes, to rebuild a lost one.

The image of a parity is its chunks and, from the next whole chunk on, the indexes of its members,
as JSON.  A node that rebuilds a lost shard fetches its digests like any other chunk.  A node that
holds the parity needs no other node for them.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from autockpt.executors.image.container import ImageIndex, chunk_digest, trailer_capacity
from autockpt.executors.keeper.replication.parity.geometry import ParitySet
from autockpt.executors.keeper.replication.parity.sums import ParityMemory, Rebuild
from autockpt.executors.keeper.replication.shard_fetch import (
    Copying,
    FetchTarget,
    Part,
    Twin,
    subject_of,
)
from autockpt.executors.linux.memory import page_align
from autockpt.executors.network.transfer.destination import PassingDestination, Staging
from autockpt.executors.network.transfer.frames import Span, spans_of
from autockpt.executors.protocol import messages as p
from autockpt.values.errors import CorruptCheckpointError, ProtocolError
from autockpt.values.record import from_json, to_json


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberIndexes:
    """The images behind the chunks of a parity."""

    schema_version: int = 1
    members: tuple[ImageIndex, ...]
    """Indexes of the members whose chunks are in this parity."""


def filling_of(order: p.FetchShard, run_id: str, twin: Twin | None = None) -> FetchTarget:
    """How an order fills its slot; `twin`: of the shard, on this node.

    Raises ConfigError for a set that cannot be.
    """
    if order.shard.parity is not None:
        return Encoding(order, run_id)
    if len(order.sources) > 1:
        return Rebuilding(order, run_id)
    return Copying(order, run_id, twin=twin)


class Encoding:
    """A parity, added up from chunks of the other members' shards."""

    def __init__(self, order: p.FetchShard, run_id: str) -> None:
        assert order.shard.parity is not None
        self._shard, self._sources, self._run_id = order.shard, order.sources, run_id
        self._set = _parity_set(order.shard, order.shard.parity)
        self._at = {member.rank: at for at, member in enumerate(order.shard.parity.members)}
        texts = sum(trailer_capacity(source.shard.bytes, self._chunk) for source in order.sources)
        self.image_bytes = page_align(self._set.parity_bytes + texts)
        self.spare_bytes = len(order.sources) * self._chunk
        self._sums: ParityMemory | None = None
        self._view = memoryview(b"")

    @property
    def _chunk(self) -> int:
        return self._set.chunk_bytes

    def parts(self, view: memoryview) -> list[Part]:
        """The chunks of every other member that count in this parity."""
        holder = self._at[self._shard.rank]
        self._view = view
        self._sums = ParityMemory(self._set, holder, view[: self._set.parity_bytes])
        staging = Staging(memoryview(bytearray(self.spare_bytes)), self._chunk)
        parts = []
        for source in self._sources:
            ranges = self._set.for_holder(self._at[source.shard.rank], holder)
            if ranges:
                spans = tuple(Span(start=start, stop=stop) for start, stop in ranges)
                parts.append(self._part(source, spans, self._sums, staging))
        return parts

    def _part(
        self, source: p.ShardCopy, spans: tuple[Span, ...], sums: ParityMemory, staging: Staging
    ) -> Part:
        rank = source.shard.rank
        member = self._at[rank]

        return Part(
            node=source.node, subject=subject_of(source.shard, self._run_id),
            root=source.shard.root, spans=spans,
            destination=PassingDestination(
                staging, kept=lambda number, chunk: sums.add(member, number, chunk)
            ),
        )  # fmt: skip

    def later_parts(self, index: ImageIndex, came: Callable[[int], bool]) -> list[Part]:
        """Nothing."""
        return []

    def finish(self, indexes: Sequence[ImageIndex]) -> ImageIndex:
        """Digests of the parity, and of what stands behind it."""
        if self._sums is None:
            raise ProtocolError("a parity ended before it began")
        shard, start = self._shard, self._set.parity_bytes
        subject = self._sums.subject(
            run_id=self._run_id, generation=shard.generation, step=shard.step, rank=shard.rank,
            world_size=shard.world_size,
        )  # fmt: skip
        sealed = self._sums.seal(subject)
        members = tuple(sorted(indexes, key=lambda index: index.rank))
        text = to_json(MemberIndexes(members=members)).encode()
        self._view[start : start + len(text)] = text
        tail = [text[at : at + self._chunk] for at in range(0, len(text), self._chunk)]
        return replace(
            sealed, image_bytes=start + len(text),
            digests=(*sealed.digests, *(chunk_digest(memoryview(piece)) for piece in tail)),
        )  # fmt: skip


class Rebuilding:
    """A lost shard, added up from shards and parities of the members that are left."""

    def __init__(self, order: p.FetchShard, run_id: str) -> None:
        self._shard, self._sources, self._run_id = order.shard, order.sources, run_id
        made_of = {source.shard.parity for source in order.sources} - {None}
        if len(made_of) != 1:
            raise ProtocolError(f"parities of {len(made_of)} sets; expected one set")
        parity = made_of.pop()
        assert parity is not None
        self._set = _parity_set(order.shard, parity)
        self._at = {member.rank: at for at, member in enumerate(parity.members)}
        self._text: dict[int, bytes] = {}
        """Chunks behind the chunks of a parity."""
        self.image_bytes = page_align(order.shard.bytes)
        self.spare_bytes = len(order.sources) * order.shard.chunk_bytes
        self._rebuild: Rebuild | None = None

    def parts(self, view: memoryview) -> list[Part]:
        """The chunks needed of every piece; of one parity also the digests behind it."""
        left = {self._at[s.shard.rank] for s in self._sources if s.shard.parity is None}
        lost, member = frozenset(range(self._set.members)) - left, self._at[self._shard.rank]
        rebuild = Rebuild(self._set, member, lost, view[: self._shard.bytes])
        self._rebuild = rebuild
        staging = Staging(memoryview(bytearray(self.spare_bytes)), self._set.chunk_bytes)
        described = next((at for at in sorted(left) if self._set.for_holder(member, at)), None)
        parts = []
        for source in self._sources:
            at, of_parity = self._at[source.shard.rank], source.shard.parity is not None
            numbers = [*rebuild.needs(at, of_parity=of_parity)]
            if of_parity and at == described:
                chunks = subject_of(source.shard, self._run_id).chunks
                numbers += range(self._set.parity_chunks, chunks)
            if numbers:
                parts.append(self._part(source, numbers, rebuild, staging))
        return parts

    def _part(
        self, source: p.ShardCopy, numbers: list[int], rebuild: Rebuild, staging: Staging
    ) -> Part:
        at, of_parity = self._at[source.shard.rank], source.shard.parity is not None

        def kept(number: int, chunk: memoryview) -> None:
            if of_parity and number >= self._set.parity_chunks:
                self._text[number] = bytes(chunk)
            else:
                rebuild.add(at, number, chunk, of_parity=of_parity)

        return Part(
            node=source.node, subject=subject_of(source.shard, self._run_id),
            root=source.shard.root, spans=spans_of(numbers),
            destination=PassingDestination(staging, kept=kept),
        )  # fmt: skip

    def later_parts(self, index: ImageIndex, came: Callable[[int], bool]) -> list[Part]:
        """Nothing."""
        return []

    def finish(self, indexes: Sequence[ImageIndex]) -> ImageIndex:
        """The index that the lost member's owner sealed it with; the bytes are compared with it."""
        text = b"".join(self._text[number] for number in sorted(self._text))
        members = from_json(MemberIndexes, text, where="what stands behind a parity").members
        index = next((i for i in members if i.rank == self._shard.rank), None)
        if index is None or index.root != self._shard.root or self._rebuild is None:
            raise CorruptCheckpointError(
                f"parity: the digests of rank {self._shard.rank} of {self._shard.generation} are "
                "not behind it"
            )
        self._rebuild.finish(index)
        return index


def _parity_set(shard: p.HeldShard, parity: p.ParityOf) -> ParitySet:
    return ParitySet(
        image_bytes=tuple(member.bytes for member in parity.members),
        chunk_bytes=shard.chunk_bytes, losses=parity.losses,
    )  # fmt: skip
