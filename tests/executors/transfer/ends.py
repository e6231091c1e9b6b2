"""Two ends of transfers in one process, over real sockets: pools, images, and what was told."""

import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

from autockpt.executors.image import ImageIndex, chunk_digest
from autockpt.executors.keeper.handshake import Identity
from autockpt.executors.memory import Arena
from autockpt.executors.protocol.messages import Incarnation
from autockpt.executors.transfer.destination import SlotDestination
from autockpt.executors.transfer.events import ChunkReceived, Event
from autockpt.executors.transfer.frames import Offer, Subject, Want
from autockpt.executors.transfer.pool import Owner, TransferPool
from autockpt.executors.transfer.session import Acceptance, Loan
from autockpt.executors.transfer.source import ImageSource
from autockpt.executors.transfer.transfer import Transfer
from autockpt.values.generation import Generation

E = TypeVar("E")

RUN = "0123456789abcdef"
SECRET = bytes(range(32))
HOST = "127.0.0.1"
PATIENCE_S = 20.0
CHUNK = 64 * 2**10
CAPACITY = 2**27
GENERATION = Generation(epoch=1, seq=7)


def identity(node: int, *, run_id: str = RUN) -> Identity:
    """Who a node says it is."""
    return Identity(
        run_id=run_id, node=node, incarnation=Incarnation(launch_id="launch", restart_round=0)
    )


def subject(nbytes: int, *, rank: int = 0, generation: Generation = GENERATION) -> Subject:
    """An image of a rank."""
    return Subject(
        run_id=RUN, generation=generation, step=70, rank=rank, world_size=4,
        layout_digest="layout", image_bytes=nbytes, chunk_bytes=CHUNK,
    )  # fmt: skip


def pattern(nbytes: int, seed: int = 0) -> bytes:
    """Bytes that repeat nowhere."""
    import random

    return random.Random(seed).randbytes(nbytes)


class Image:
    """An image in a memfd."""

    def __init__(self, nbytes: int, *, seed: int = 0, rank: int = 0) -> None:
        self.arena = Arena.create_shared(nbytes, name="autockpt-test")
        self.subject = subject(nbytes, rank=rank)
        self.view = self.arena.view[:nbytes]
        self.view[:] = pattern(nbytes, seed)
        assert self.arena.fd is not None
        self.source = ImageSource(self.arena.fd, self.view, self.subject)

    def digest(self, number: int) -> str:
        """As the keeper takes it."""
        start, stop = self.subject.chunk_range(number)
        return chunk_digest(self.view[start:stop])

    @property
    def index(self) -> ImageIndex:
        """What the image is."""
        s = self.subject
        return ImageIndex(
            run_id=s.run_id, generation=s.generation, step=s.step, rank=s.rank,
            world_size=s.world_size, layout_digest=s.layout_digest, image_bytes=s.image_bytes,
            chunk_bytes=s.chunk_bytes, digests=tuple(self.digest(n) for n in range(s.chunks)),
        )  # fmt: skip

    def seal(self) -> "Image":
        """All of it is there."""
        self.source.seal(self.index)
        return self


class End:
    """A node: a pool, memory for what comes, and a record of what it was told."""

    def __init__(
        self, node: int, *, secret: bytes = SECRET, run_id: str = RUN, host: str = HOST, **pool: Any
    ) -> None:
        self.node = node
        self.events: list[Event] = []
        self.received = bytearray()
        self.sealed: list[ImageIndex] = []
        self.refusal = ""
        self.lent: dict[str, Image] = {}
        self.deadline_s = PATIENCE_S
        self.accepting: Callable[[Offer, Transfer], Acceptance | str] = self._take
        self._news = threading.Condition()
        owner = Owner(
            accept=lambda peer, transfer, offer: self.accepting(offer, transfer),
            lend=lambda peer, transfer, want: self._lend(want),
            event=self._note,
        )
        self.pool = TransferPool(secret, identity(node, run_id=run_id), owner, **pool)
        self.port = self.pool.listen(host)

    @property
    def address(self) -> tuple[str, int]:
        """Where it listens."""
        return HOST, self.port

    def destination(self, subject: Subject) -> SlotDestination:
        """Memory for an image."""
        self.received = bytearray(subject.image_bytes)
        return SlotDestination(memoryview(self.received), subject, sealed=self.sealed.append)

    def _take(self, offer: Offer, transfer: Transfer) -> Acceptance | str:
        if offer.subject.image_bytes > CAPACITY:
            return f"{offer.subject.image_bytes} bytes do not fit a slot of {CAPACITY}"
        return self.refusal or Acceptance(
            destination=self.destination(offer.subject), deadline_s=self.deadline_s
        )

    def _lend(self, want: Want) -> Loan | str:
        image = self.lent.get(want.root)
        if image is None:
            return "no such image"
        return Loan(source=image.source, deadline_s=self.deadline_s)

    def _note(self, event: Event) -> None:
        with self._news:
            self.events.append(event)
            self._news.notify_all()

    def told(self, kind: type[E], *, within_s: float = PATIENCE_S) -> E:
        """The first event of a kind; waits for it."""
        deadline = time.monotonic() + within_s
        with self._news:
            while not (found := [event for event in self.events if isinstance(event, kind)]):
                left_s = deadline - time.monotonic()
                assert left_s > 0, f"no {kind.__name__} among {self.facts()}"
                self._news.wait(left_s)
        return found[0]

    def wait(self, done: Callable[[list[Event]], bool]) -> list[Event]:
        """All events but single chunks, as soon as they are `done`."""
        with self._news:
            assert self._news.wait_for(lambda: done(self.facts()), PATIENCE_S), self.facts()
        return self.facts()

    def facts(self) -> list[Event]:
        """All but single chunks."""
        return [event for event in self.events if not isinstance(event, ChunkReceived)]

    def close(self) -> None:
        """Ends all."""
        self.pool.close()
