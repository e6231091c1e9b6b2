"""Two ends of transfers in one process, over real sockets: pools, images, and what was told."""

import random
import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

from autockpt.executors.image.container import ImageIndex, chunk_digest
from autockpt.executors.linux.memory import Arena
from autockpt.executors.network.handshake import Identity
from autockpt.executors.network.transfer.destination import SlotDestination
from autockpt.executors.network.transfer.events import (
    ConnectionRefused,
    Fetched,
    Served,
    TransferFailed,
)
from autockpt.executors.network.transfer.frames import Subject, Want
from autockpt.executors.network.transfer.pool import TransferPool
from autockpt.executors.network.transfer.session import Loan
from autockpt.executors.network.transfer.source import ImageSource
from autockpt.executors.network.transfer.transfer import Transfer
from autockpt.executors.protocol.messages import Incarnation
from autockpt.executors.throttle.rate_limit import Throttle, Unlimited, Windows
from autockpt.values.generation import Generation

E = TypeVar("E")
Event = Fetched | Served | TransferFailed | ConnectionRefused

RUN = "0123456789abcdef"
SECRET = bytes(range(32))
HOST = "127.0.0.1"
PATIENCE_S = 20.0
CHUNK = 64 * 2**10
GENERATION = Generation(term=1, step=7)


def identity(node: int, *, run_id: str = RUN) -> Identity:
    """Who a node says it is."""
    return Identity(
        run_id=run_id, node=node, incarnation=Incarnation(launch_id="launch", restart_round=0)
    )


def subject(nbytes: int, *, rank: int = 0, generation: Generation = GENERATION) -> Subject:
    """An image of a rank."""
    return Subject(
        run_id=RUN, generation=generation, step=70, rank=rank, world_size=4,
        layout_digest=f"parts of rank {rank}", image_bytes=nbytes, chunk_bytes=CHUNK,
    )  # fmt: skip


def pattern(nbytes: int, seed: int = 0) -> bytes:
    """Bytes that repeat nowhere."""
    return random.Random(seed).randbytes(nbytes)


class Image:
    """A sealed image in a memfd."""

    def __init__(self, nbytes: int, *, seed: int = 0, rank: int = 0) -> None:
        self.arena = Arena.create_shared(nbytes, name="autockpt-test")
        self.subject = subject(nbytes, rank=rank)
        self.view = self.arena.view[:nbytes]
        self.view[:] = pattern(nbytes, seed)
        s = self.subject
        ranges = [s.chunk_range(number) for number in range(s.chunks)]
        self.index = ImageIndex(
            run_id=s.run_id, generation=s.generation, step=s.step, rank=s.rank,
            world_size=s.world_size, layout_digest=s.layout_digest, image_bytes=s.image_bytes,
            chunk_bytes=s.chunk_bytes,
            digests=tuple(chunk_digest(self.view[start:stop]) for start, stop in ranges),
        )  # fmt: skip
        assert self.arena.fd is not None
        self.source = ImageSource(self.arena.fd, self.view, self.index)

    @property
    def root(self) -> str:
        """What it is asked for by."""
        return self.index.root


class Watched(SlotDestination):
    """Memory for an image; `placing(number)` is called before every chunk."""

    def __init__(
        self, image: memoryview, subject: Subject, placing: Callable[[int], object]
    ) -> None:
        super().__init__(image, subject)
        self._placing = placing

    def place(self, number: int, nbytes: int) -> memoryview:
        """The place in the slot, after `placing`."""
        self._placing(number)
        return super().place(number, nbytes)


class End:
    """A node: a pool, what it lends, memory for what it fetches, and a record of what it was
    told."""

    def __init__(
        self, node: int, *, secret: bytes = SECRET, run_id: str = RUN, host: str = HOST, **pool: Any
    ) -> None:
        self.node = node
        self.events: list[Event] = []
        self.received = bytearray()
        self.refusal = ""
        self.lent: dict[str, Image] = {}
        self.gate: Throttle = Unlimited()
        self.windows: Windows | None = None
        self.deadline_s = PATIENCE_S
        """For everybody who fetches from here."""
        self.placing: Callable[[int], object] = lambda number: None
        self._news = threading.Condition()
        self.pool = TransferPool(
            secret, identity(node, run_id=run_id), lambda peer, want: self._lend(want), self._note,
            **pool,
        )  # fmt: skip
        self.port = self.pool.listen(host)

    @property
    def address(self) -> tuple[str, int]:
        """Where it listens."""
        return HOST, self.port

    def lend(self, image: Image) -> None:
        """Whoever knows its root may fetch it."""
        self.lent[image.root] = image

    def fetch(
        self, lender: Any, image: Image, *, deadline_s: float = PATIENCE_S, **settings: Any
    ) -> Transfer:
        """Begins to fetch an image into new memory; `lender`: whatever has `node`, `address`."""
        self.received = bytearray(image.subject.image_bytes)
        destination = Watched(memoryview(self.received), image.subject, self.placing)
        return self.pool.fetch(
            lender.node, lender.address, image.subject, image.root, destination, ended=self._note,
            deadline_s=deadline_s, **settings,
        )  # fmt: skip

    def _lend(self, want: Want) -> Loan | str:
        image = self.lent.get(want.root)
        if self.refusal or image is None:
            return self.refusal or "no such image"
        return Loan(
            source=image.source, deadline_s=self.deadline_s, gate=self.gate, windows=self.windows
        )

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
                assert left_s > 0, f"no {kind.__name__} among {self.events}"
                self._news.wait(left_s)
        return found[0]

    def close(self) -> None:
        """Ends all."""
        self.pool.close()
