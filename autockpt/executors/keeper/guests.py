"""Shards of other nodes in this node's memory: fetched into guest slots, lent on request.

Belongs to the keeper's loop, as `Shards` does: public methods run in its thread unless they say
otherwise, and what threads of transfers see comes back through `post`.  A fetch makes its memory on
a thread of its own (faulting gigabytes takes seconds) and is told where the other keeper listens.
"""

import contextlib
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass

from autockpt.executors.gate import Gate, OpenGate, PacedGate
from autockpt.executors.image import ImageIndex, read_trailer, trailer_capacity, write_trailer
from autockpt.executors.keeper.handshake import Identity
from autockpt.executors.keeper.slots import MemoryTable
from autockpt.executors.memory import Arena, page_align, require_headroom
from autockpt.executors.protocol import messages as p
from autockpt.executors.transfer.destination import SlotDestination
from autockpt.executors.transfer.events import Event, Fetched, TransferFailed
from autockpt.executors.transfer.frames import Subject, Want
from autockpt.executors.transfer.pool import Owner, TransferPool
from autockpt.executors.transfer.session import Loan
from autockpt.executors.transfer.source import ImageSource
from autockpt.executors.transfer.transfer import Transfer
from autockpt.values.errors import AutockptError
from autockpt.values.generation import Generation
from autockpt.values.units import format_bytes

DEADLINE_S = 600.0
"""For one shard, however lively the other end is; a silent one is dropped far sooner."""
ADDRESS_S = 10.0
"""The other keeper has said by then where it listens."""
ANSWER_S = 5.0
"""The keeper's loop answers a request within this time, or it is refused."""
FINAL = ("refused", "corrupt")
"""Faults after which asking the same node again is in vain."""


@dataclass(slots=True)
class Guest:
    """One guest slot."""

    arena: Arena
    image_bytes: int
    """Capacity for the image; the trailer follows."""

    def index(self) -> ImageIndex | None:
        """Of what is sealed in it."""
        return read_trailer(self.arena.view[self.image_bytes :])


@dataclass(slots=True, eq=False)
class _Fetch:
    """A shard under way."""

    order: p.FetchShard
    transfer: Transfer | None = None
    cancelled: str = ""


class Guests:
    """Guest slots by rank and number, and the transfers in both directions."""

    def __init__(
        self,
        *,
        run_id: str,
        memory: MemoryTable,
        post: Callable[[Callable[[], None]], None],
        tell: Callable[[p.NodeEvent], None],
        address: Callable[[int], tuple[str, int] | None],
        rate: Callable[[], float],
        restoring: Callable[[], bool],
        log: Callable[[str], None],
    ) -> None:
        """`address(node)`: where that keeper serves transfers, None while it has not said; called
        on other threads, as `restoring()` is.  `rate()`: bytes per second that others may take
        now, 0: no limit."""
        self._run_id, self._memory = run_id, memory
        self._post, self._tell, self._log = post, tell, log
        self._address, self._rate, self._restoring = address, rate, restoring
        self._copied = 0
        self._pool: TransferPool | None = None
        self._guests: dict[tuple[int, int], Guest] = {}
        self._fetches: dict[tuple[int, int], _Fetch] = {}
        self._sources: dict[tuple[str, int, int], ImageSource] = {}
        """By kind of slot (own, guest), rank and number: what is lent."""
        self._lock = threading.RLock()
        """Of each fetch between its own thread, its transfer's and the keeper's."""

    # ------------------------------------------------------------------ life

    def open(self, secret: bytes, me: Identity, host: str) -> int:
        """Takes transfers on `host` from now on; the port.  On a thread of files."""
        if self._pool is not None:
            self._pool.close("another address")
        self._pool = TransferPool(
            secret, me, Owner(accept=lambda *_: "nobody pushes here", lend=self._lend,
                              event=self._event),
        )  # fmt: skip
        return self._pool.listen(host)

    def close(self) -> None:
        """Ends every transfer."""
        if self._pool is not None:
            self._pool.close()

    @property
    def total_bytes(self) -> int:
        """Memory of all guest slots."""
        return sum(guest.arena.nbytes for guest in self._guests.values())

    # ------------------------------------------------------------------ fetching

    def fetch(self, order: p.FetchShard) -> None:
        """Begins to copy a shard here; ShardFetched or FetchFailed follows."""
        key = (order.shard.rank, order.slot)
        self._revoke("guest", *key)
        fetch = self._fetches[key] = _Fetch(order)
        threading.Thread(
            target=self._bring, args=(fetch,), name="autockpt-fetch", daemon=True
        ).start()

    def abort(self, order: p.AbortFetch) -> None:
        """Nothing writes into this guest slot when it returns."""
        fetch = self._fetches.pop((order.rank, order.slot), None)
        if fetch is None:
            return
        with self._lock:
            fetch.cancelled = order.reason
            transfer = fetch.transfer
        if transfer is not None:
            transfer.abort(order.reason)

    def free(self, order: p.FreeGuests) -> None:
        """Gives the memory of a rank's guest slots back."""
        for key in [key for key in self._guests if key[0] == order.rank]:
            self._revoke("guest", *key)
            self._guests.pop(key).arena.close()

    def _bring(self, fetch: _Fetch) -> None:
        """On a thread of its own: memory, address, transfer."""
        order = fetch.order
        try:
            guest = self._make(fetch)
            address = self._find(order.sources[0].node)
            with self._lock:
                if fetch.cancelled or self._pool is None:
                    return
                shard = order.shard
                subject = Subject(
                    run_id=self._run_id, generation=shard.generation, step=shard.step,
                    rank=shard.rank, world_size=shard.world_size, image_bytes=shard.bytes,
                    layout_digest=shard.layout_digest, chunk_bytes=shard.chunk_bytes,
                )  # fmt: skip
                destination = SlotDestination(
                    guest.arena.view[: shard.bytes],
                    subject,
                    sealed=lambda index: write_trailer(
                        guest.arena.view[guest.image_bytes :], index
                    ),
                )
                fetch.transfer = self._pool.fetch(
                    order.sources[0].node, address, subject, shard.root, destination,
                    deadline_s=DEADLINE_S,
                )  # fmt: skip
        except (AutockptError, OSError) as error:
            self._failed(fetch, str(error), final=True)

    def _make(self, fetch: _Fetch) -> Guest:
        """The guest slot of a fetch; memory of the right size is used again.  Raises GuardError."""
        shard, key = fetch.order.shard, (fetch.order.shard.rank, fetch.order.slot)
        capacity = page_align(shard.bytes)
        size = capacity + trailer_capacity(shard.bytes, shard.chunk_bytes)
        with self._lock:
            guest = self._guests.get(key)
        if guest is not None and guest.arena.nbytes == size:
            guest.arena.view[capacity : capacity + 8] = bytes(8)
            return guest
        require_headroom(size, what=f"a copy of rank {shard.rank} ({format_bytes(size)})")
        arena = Arena.create_shared(size, name=f"autockpt-guest-r{shard.rank}-s{fetch.order.slot}")
        made = Guest(arena=arena, image_bytes=capacity)
        with self._lock:
            if fetch.cancelled:
                arena.close()
                return made
            if guest is not None:
                guest.arena.close()
            self._guests[key] = made
        return made

    def _find(self, node: int) -> tuple[str, int]:
        until_s = time.monotonic() + ADDRESS_S
        while (address := self._address(node)) is None:
            if time.monotonic() > until_s:
                raise AutockptError(f"node {node} has not said where it serves transfers")
            time.sleep(0.05)
        return address

    def _event(self, event: Event) -> None:
        """On a thread of transfers."""
        if not isinstance(event, Fetched | TransferFailed):
            return
        with self._lock:
            named = (f for f in self._fetches.values() if f.transfer is not None)
            fetch = next((f for f in named if f.transfer.name == event.transfer), None)  # type: ignore[union-attr]
        if fetch is None:
            return
        if isinstance(event, TransferFailed):
            self._failed(fetch, event.reason, final=event.fault in FINAL)
            return
        shard = fetch.order.shard
        if not self._copied or self._restoring():
            self._log(
                f"copied {shard.generation} of rank {shard.rank} from node {event.node}: "
                f"{format_bytes(event.nbytes)} in {event.seconds:.2f} s"
            )
        self._copied += 1
        self._post(lambda: self._fetched(fetch, event.index))

    def _fetched(self, fetch: _Fetch, index: ImageIndex) -> None:
        if not self._over(fetch):
            return
        order = fetch.order
        self._tell(
            p.ShardFetched(
                shard=p.HeldShard(
                    rank=order.shard.rank, slot=order.slot, generation=index.generation,
                    step=index.step, world_size=index.world_size, root=index.root,
                    layout_digest=index.layout_digest, bytes=index.image_bytes,
                    chunk_bytes=index.chunk_bytes, health=order.shard.health, copied=True,
                )
            )
        )  # fmt: skip

    def _failed(self, fetch: _Fetch, reason: str, *, final: bool) -> None:
        order = fetch.order
        failed = p.FetchFailed(
            rank=order.shard.rank, generation=order.shard.generation, slot=order.slot,
            reason=f"node {order.sources[0].node}: {reason}", final=final,
        )  # fmt: skip

        def tell() -> None:
            if self._over(fetch):
                self._log(f"no copy of rank {failed.rank}: {failed.reason}")
                self._tell(failed)

        self._post(tell)

    def _over(self, fetch: _Fetch) -> bool:
        """It ends now; False when it was aborted before."""
        key = (fetch.order.shard.rank, fetch.order.slot)
        if self._fetches.get(key) is not fetch:
            return False
        del self._fetches[key]
        return True

    # ------------------------------------------------------------------ lending

    def holding(self, rank: int, generation: Generation) -> Guest | None:
        """A guest slot that holds this shard, sealed."""
        for (owner, slot), guest in self._guests.items():
            if owner != rank or (owner, slot) in self._fetches:
                continue
            index = guest.index()
            if index is not None and index.generation == generation and index.rank == rank:
                return guest
        return None

    def overwritten(self, rank: int, slot: int | None = None) -> None:
        """An own slot (None: all of a rank) is about to change: nobody reads it any more."""
        for kind, owner, number in list(self._sources):
            if kind == "own" and owner == rank and slot in (None, number):
                self._revoke(kind, owner, number)

    def _revoke(self, kind: str, rank: int, slot: int) -> None:
        source = self._sources.pop((kind, rank, slot), None)
        if source is not None:
            source.revoke("the slot is used again")

    def _lend(self, peer: Identity, transfer: Transfer, want: Want) -> Loan | str:
        """On a thread of transfers: what somebody wants, if it is here."""
        answer: Future[Loan | str] = Future()
        self._post(lambda: answer.set_result(self._loan(want)))
        try:
            return answer.result(timeout=ANSWER_S)
        except TimeoutError:
            return "the keeper is busy"

    def _loan(self, want: Want) -> Loan | str:
        for kind, slot, arena, index in self._sealed(want.rank):
            if index.generation == want.generation and index.root == want.root:
                source = self._sources.get((kind, want.rank, slot))
                if source is None or source.index is None or source.index.root != want.root:
                    assert arena.fd is not None
                    image = arena.view[: index.image_bytes]
                    source = ImageSource.sealed(arena.fd, image, Subject.of(index), index)
                    self._sources[kind, want.rank, slot] = source
                return Loan(source=source, deadline_s=DEADLINE_S, gate=self._gate())
        return f"no shard of rank {want.rank} of {want.generation} with that root is sealed here"

    def _sealed(self, rank: int) -> list[tuple[str, int, Arena, ImageIndex]]:
        memory = self._memory.ranks.get(rank)
        found = []
        if memory is not None:
            found = [("own", s, memory.slots[s], index) for s, index in memory.sealed().items()]
        for (owner, slot), guest in self._guests.items():
            index = guest.index() if owner == rank and (rank, slot) not in self._fetches else None
            if index is not None:
                found.append(("guest", slot, guest.arena, index))
        return [row for row in found if row[3].run_id == self._run_id]

    def _gate(self) -> Gate:
        rate = 0.0
        with contextlib.suppress(AutockptError):
            rate = self._rate()
        return PacedGate(rate) if rate > 0 else OpenGate()
