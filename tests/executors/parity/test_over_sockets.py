"""Parity between nodes: chunks travel as transfers, and a lost image comes back from many."""

from collections.abc import Iterator

import pytest

from autockpt.executors.image import ImageIndex
from autockpt.executors.memory import Arena
from autockpt.executors.parity.geometry import ParitySet
from autockpt.executors.parity.sums import ParityMemory, Rebuild
from autockpt.executors.transfer.destination import PassingDestination, Staging
from autockpt.executors.transfer.events import Event, Fetched, ReplicaSealed, TransferFailed
from autockpt.executors.transfer.frames import Offer, Span
from autockpt.executors.transfer.session import Acceptance, spans_of
from autockpt.executors.transfer.source import ImageSource
from autockpt.executors.transfer.transfer import Transfer
from autockpt.values.errors import GuardError
from tests.executors.transfer.ends import CHUNK, GENERATION, PATIENCE_S, RUN, End, Image

SIZES = (7 * CHUNK, 9 * CHUNK + 77, 3 * CHUNK + 1, 8 * CHUNK)
STREAMS = 2


class Member:
    """A node with an image, a parity of the others, and both to lend."""

    def __init__(self, parity: ParitySet, number: int) -> None:
        self.number = number
        self.image = Image(SIZES[number], seed=number, rank=number)
        self.end = End(number)
        self.index = self.image.index
        self.arena = Arena.create_shared(parity.parity_bytes, name="autockpt-parity")
        self.view = self.arena.view[: parity.parity_bytes]
        self.memory = ParityMemory(parity, number, self.view)
        self.indexes: dict[int, ImageIndex] = {}
        staging = memoryview(bytearray(STREAMS * (parity.members - 1) * CHUNK))
        self.staging = Staging(staging, CHUNK)
        self.end.accepting = self._take

    def _take(self, offer: Offer, transfer: Transfer) -> Acceptance | str:
        member = offer.subject.rank

        def sealed(index: ImageIndex) -> None:
            self.indexes[member] = index

        destination = PassingDestination(
            self.staging,
            kept=lambda number, chunk: self.memory.add(member, number, chunk),
            sealed=sealed,
        )
        return Acceptance(destination=destination, deadline_s=PATIENCE_S)

    def lend(self) -> None:
        """Image and parity may be fetched."""
        self.end.lent[self.index.root] = self.image.seal()
        subject = self.memory.subject(
            run_id=RUN, generation=GENERATION, step=70, rank=self.number, world_size=4
        )
        self.parity_index = self.memory.seal(subject)
        assert self.arena.fd is not None
        parity = object.__new__(Image)
        parity.subject = subject
        parity.source = ImageSource.sealed(self.arena.fd, self.view, subject, self.parity_index)
        self.parity_image = parity
        self.end.lent[self.parity_index.root] = parity

    def close(self) -> None:
        """Ends all."""
        self.end.close()
        for arena, view in ((self.image.arena, self.image.view), (self.arena, self.view)):
            view.release()
            arena.close()


@pytest.fixture(params=[1, 2], ids=["xor", "two losses"])
def members(request: pytest.FixtureRequest) -> Iterator[tuple[ParitySet, list[Member]]]:
    """Four nodes with images of different lengths, not yet protected."""
    parity = ParitySet(image_bytes=SIZES, chunk_bytes=CHUNK, losses=request.param)
    made = [Member(parity, number) for number in range(4)]
    yield parity, made
    for member in made:
        member.close()


def protect(parity: ParitySet, members: list[Member]) -> None:
    """Every member sends every holder its share, while its snapshot arrives."""
    for member in members:
        for holder in members:
            ranges = parity.for_holder(member.number, holder.number)
            if ranges:
                member.end.pool.push(
                    holder.number, holder.end.address, member.image.source,
                    chunks=tuple(Span(start=a, stop=b) for a, b in ranges),
                    deadline_s=PATIENCE_S, streams=STREAMS,
                )  # fmt: skip
    for number in range(max(parity.chunks(m) for m in range(4))):
        for member in members:
            if number < member.image.subject.chunks:
                member.image.source.digested(number, member.image.digest(number))
    for member in members:
        member.image.seal()
    for member in members:
        pushes = sum(bool(parity.for_holder(member.number, h)) for h in range(4))
        sealed = member.end.wait(
            lambda events, pushes=pushes: (
                pushes == sum(isinstance(e, ReplicaSealed) for e in events)
            )
        )
        assert not [event for event in sealed if isinstance(event, TransferFailed)]
    for member in members:
        assert not member.memory.missing
        member.lend()


def bring(home: Member, node: Member, rebuild: Rebuild, *, of_parity: bool) -> int:
    """Fetches what a rebuild needs of a survivor's image or parity; how many fetches."""
    needed = rebuild.needs(node.number, of_parity=of_parity)
    if not needed:
        return 0
    destination = PassingDestination(
        home.staging,
        kept=lambda number, chunk: rebuild.add(node.number, number, chunk, of_parity=of_parity),
    )
    home.end.pool.fetch(
        node.number, node.end.address,
        node.parity_image.subject if of_parity else node.image.subject,
        node.parity_index.root if of_parity else node.index.root,
        destination, chunks=spans_of(needed),
        deadline_s=PATIENCE_S,
    )  # fmt: skip
    return 1


def brought(end: End, fetches: int) -> list[Event]:
    """The last events of so many fetches."""

    def of_fetches(events: list[Event]) -> list[Event]:
        return [event for event in events if isinstance(event, Fetched | TransferFailed)]

    return of_fetches(end.wait(lambda events: len(of_fetches(events)) == fetches))


def test_lost_members_come_back_from_the_others(
    members: tuple[ParitySet, list[Member]],
) -> None:
    """Encoded and rebuilt through sockets; a survivor knows the digests of the lost."""
    parity, nodes = members
    protect(parity, nodes)
    lost = frozenset(range(parity.losses))
    survivors = [node for node in nodes if node.number not in lost]
    for gone in lost:
        image = bytearray(SIZES[gone])
        rebuild = Rebuild(parity, gone, lost, memoryview(image))
        home = nodes[gone]  # its replacement
        home.end.events.clear()
        fetches = sum(
            bring(home, node, rebuild, of_parity=which)
            for node in survivors
            for which in (False, True)
        )
        ended = brought(home.end, fetches)
        assert all(isinstance(event, Fetched) for event in ended), ended
        rebuild.finish(next(n.indexes[gone] for n in survivors if gone in n.indexes))
        assert image == nodes[gone].image.view


def test_staging_is_bounded() -> None:
    """More chunks at a time than there is memory for are refused; what is given back is used."""
    staging = Staging(memoryview(bytearray(2 * CHUNK + 5)), CHUNK)
    one, _ = staging.take(CHUNK), staging.take(7)
    with pytest.raises(GuardError, match="2 are under way"):
        staging.take(1)
    staging.give_back(one)
    assert len(staging.take(CHUNK)) == CHUNK
