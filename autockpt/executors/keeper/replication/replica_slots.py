"""Replica slots: memory that holds copies and parities of other nodes' shards.

Belongs to the keeper's loop, as `Shards` does.  Public methods run in its thread unless they say
otherwise, and threads of transfers report through `post`.  A fetch makes its memory on its own
thread, because faulting gigabytes takes seconds, and gets the addresses of the other keepers.  All
sealed images here, own shards and replicas, are lent to any keeper that asks for their root.
"""

import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, replace

from autockpt.executors.image.container import ImageIndex, chunk_digest, clear_trailer, read_trailer
from autockpt.executors.keeper.replication.device_transfers import KeeperExchanges
from autockpt.executors.keeper.replication.link_meter import LinkMeter
from autockpt.executors.keeper.replication.parity_slots import filling_of
from autockpt.executors.keeper.replication.shard_fetch import ShardFetch, Twin, time_for
from autockpt.executors.keeper.slots import MemoryTable
from autockpt.executors.linux.memory import Arena, gather_pages, require_headroom
from autockpt.executors.network.handshake import Identity
from autockpt.executors.network.transfer.destination import Destination
from autockpt.executors.network.transfer.events import ConnectionRefused, FetchEnd, ServeEnd
from autockpt.executors.network.transfer.frames import Span, Subject, Want, What
from autockpt.executors.network.transfer.pool import SILENCE_S, TransferPool
from autockpt.executors.network.transfer.session import Loan
from autockpt.executors.network.transfer.source import ImageSource
from autockpt.executors.network.transfer.transfer import Transfer
from autockpt.executors.protocol import messages as p
from autockpt.executors.throttle.rate_limit import RateLimiter, Throttle, Unlimited, Windows
from autockpt.values.errors import AutockptError
from autockpt.values.generation import Generation
from autockpt.values.units import format_bytes

ADDRESS_S = 10.0
"""The other keeper has said by then where it listens."""
COMING_S = 3.0
"""Between two words on a fetch that is under way."""
ANSWER_S = 5.0
"""The keeper's loop answers a request within this time, or it is refused."""
HELD_S = SILENCE_S / 3
"""Longest that the rate holds a chunk back; twice that is left for its way."""

Key = tuple[int, int, bool]
"""(rank, number, whether of its parity): a replica slot."""
Home = tuple[What, bool, int, int]
"""(what, whether it is a replica, rank, number): any slot that is lent."""


@dataclass(slots=True)
class ReplicaSlot:
    """One replica slot."""

    arena: Arena
    image_bytes: int
    """Capacity for the image; the trailer follows."""

    def index(self) -> ImageIndex | None:
        """Of the sealed image in it."""
        return read_trailer(self.arena.view[self.image_bytes :])

    def clear(self) -> None:
        """Makes it garbage."""
        clear_trailer(self.arena.view[self.image_bytes :])


SEVERAL = -1
"""Nodes that something came from."""


class ReplicaSlots:
    """Replica slots by rank and number, and the transfers in both directions."""

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
        copied: Callable[[p.HeldShard, int, int, float, bool, bool], None],
        receiver: Callable[[int], int | None],
        exchanges: KeeperExchanges,
        log: Callable[[str], None],
        windows: Callable[[], Windows | None] = lambda: None,
        stored: Callable[[Want], Loan | str] = lambda want: "nothing is read from a store here",
    ) -> None:
        """`address(node)`: where that keeper serves transfers, None while it has not said; called
        on other threads, as `restoring()` is.

        `rate()`: bytes per second that others may take now, 0: no limit.  `copied(shard, from_node,
        bytes, seconds, restoring, by_device)` receives every completed copy.  `receiver(rank)`:
        whose trainer takes a copy of `rank` through the devices, None where that is not asked for.
        `windows()`: the windows in which shards leave, None when no rank waits for them.
        `stored(want)`: lends a shard that is read from a store meanwhile; on threads of transfers.
        """
        self._run_id, self._memory = run_id, memory
        self._post, self._tell, self._log = post, tell, log
        self._tell_copied, self._receiver = copied, receiver
        self._exchanges = exchanges
        self._address, self._rate, self._restoring = address, rate, restoring
        self._windows, self._stored = windows, stored
        self.link = LinkMeter()
        """Of all copies that come here."""
        self._copied = 0
        self._pool: TransferPool | None = None
        self._replicas: dict[Key, ReplicaSlot] = {}
        self._fetches: dict[Key, ShardFetch] = {}
        self._sources: dict[Home, ImageSource] = {}
        """The lent image."""
        self._paced: tuple[float, Throttle] = (0.0, Unlimited())
        """(rate, gate): one for all who fetch from here at a time."""
        self._lock = threading.RLock()
        """Guards the replica slots between threads of fetches and the keeper's."""

    # ------------------------------------------------------------------ life

    def open(self, secret: bytes, me: Identity, host: str) -> int:
        """Takes transfers on `host` from now on; the port.  On a thread of files."""
        if self._pool is not None:
            self._pool.close("another address")
        self._pool = TransferPool(secret, me, self._lend, self._served)
        return self._pool.listen(host)

    def close(self) -> None:
        """Ends every transfer."""
        if self._pool is not None:
            self._pool.close()

    @property
    def total_bytes(self) -> int:
        """Memory of all replica slots."""
        return sum(replica.arena.nbytes for replica in list(self._replicas.values()))

    # ------------------------------------------------------------------ fetching

    def fetch(self, order: p.FetchShard) -> None:
        """Begins to bring a shard or parity here; ShardFetched or FetchFailed follows."""
        key = _key(order)
        self._revoke(_home(key))
        try:
            filling = filling_of(order, self._run_id, self._twin(order))
        except AutockptError as error:
            reason = str(error)
            self._post(lambda: self._tell_failed(order, reason, final=True))
            return
        bringing = ShardFetch(
            order, filling, complete=self._complete, failed=self._failed, coming=self._coming,
            link=self.link,
        )  # fmt: skip
        self._fetches[key] = bringing
        threading.Thread(
            target=self._bring, args=(bringing,), name="autockpt-fetch", daemon=True
        ).start()

    def _twin(self, order: p.FetchShard) -> Twin | None:
        """An own sealed shard that holds the same parts as the one to be copied here."""
        shard = order.shard
        wanted = (shard.generation, shard.layout_digest, shard.bytes, shard.chunk_bytes)
        if shard.parity is not None or not shard.layout_digest or shard.bytes <= shard.chunk_bytes:
            return None
        for rank in list(self._memory.ranks):
            for _, arena, index in self._own(rank):
                found = (index.generation, index.layout_digest, index.image_bytes)
                if rank != shard.rank and (*found, index.chunk_bytes) == wanted:
                    return Twin(arena=arena, index=index)
        return None

    def bring_elsewhere(self, bringing: ShardFetch, memory: memoryview) -> None:
        """Carries out a fetch into memory that is no replica slot; on any thread.

        Raises AutockptError.
        """
        if self._pool is None:
            raise AutockptError("this keeper has no way to other nodes")
        bringing.start(self._pool, memory, self._find)

    def fetch_stored(
        self,
        node: int,
        index: ImageIndex,
        destination: Destination,
        chunks: tuple[Span, ...],
        ended: Callable[[FetchEnd], None],
        *,
        silence_s: float,
    ) -> Transfer:
        """Begins to bring chunks that another node reads from the store; on any thread.

        Raises AutockptError.
        """
        if self._pool is None:
            raise AutockptError("this keeper has no way to other nodes")
        return self._pool.fetch(
            node, self._find(node), Subject.of(index, "stored"), index.root, destination,
            ended=ended, deadline_s=time_for(index.image_bytes), chunks=chunks,
            silence_s=silence_s,
        )  # fmt: skip

    def abort(self, order: p.AbortFetch) -> None:
        """Nothing writes into this replica slot when it returns."""
        bringing = self._fetches.pop((order.rank, order.slot, order.parity), None)
        if bringing is not None:
            bringing.abort(order.reason)
            self._abandon(bringing, order.reason)

    def free(self, order: p.FreeReplicas) -> None:
        """Gives the memory of a rank's replica slots back."""
        for key in [k for k in list(self._replicas) if (k[0], k[2]) == (order.rank, order.parity)]:
            self._revoke(_home(key))
            with self._lock:
                self._replicas.pop(key).arena.close()

    def _bring(self, bringing: ShardFetch) -> None:
        """On a thread of its own: memory, addresses, transfers."""
        try:
            replica, pool = self._make(bringing), self._pool
            if replica is None or pool is None:
                return
            rank = None if bringing.has_twin else self._by_device(bringing.order)
            if rank is None:
                self._start(bringing, replica, pool)
            else:
                self._begin_exchange(bringing, replica, pool, rank)
        except Exception as error:  # an end of the fetch is waited for, whatever went wrong
            bringing.fail(str(error) or type(error).__name__, final=True)

    def _start(
        self,
        bringing: ShardFetch,
        replica: ReplicaSlot,
        pool: TransferPool,
        otherwise: Callable[[str], None] | None = None,
    ) -> bool:
        """Begins the transfers of a fetch; False: it is over."""
        with self._lock:  # the memory is discarded under it, and its view is of no use then
            if bringing.is_over() or replica.arena.fd is None:
                return False
            view = replica.arena.view[:]
        return bringing.start(pool, view, self._find, otherwise)

    # ------------------------------------------------------------------ through the devices

    def _by_device(self, order: p.FetchShard) -> int | None:
        """Whose trainer is to receive it; None: it comes from host memory."""
        owned = len(order.sources) == 1 and not order.sources[0].shard.copied
        if order.shard.parity is not None or not owned or self._restoring():
            return None
        return self._receiver(order.shard.rank)

    def _begin_exchange(
        self, bringing: ShardFetch, replica: ReplicaSlot, pool: TransferPool, rank: int
    ) -> None:
        """Has a trainer receive into the replica slot; if it can not, host memory is asked."""
        shard = bringing.order.shard
        with self._lock:  # the memory is discarded under it
            if bringing.is_over() or replica.arena.fd is None:
                return
            fd = os.dup(replica.arena.fd)
        try:
            exchange = self._exchanges.receive(rank, shard.rank, fd, shard.bytes, shard.chunk_bytes)
        except AutockptError as error:
            self._from_host(bringing, replica, str(error))
            return
        bringing.exchange = exchange
        begun = self._start(
            bringing, replica, pool, lambda reason: self._from_host(bringing, replica, reason)
        )
        if not begun:  # nobody was asked to send, so nothing will be written
            self._exchanges.abandon(exchange, "it is not needed any more")

    def _from_host(self, bringing: ShardFetch, replica: ReplicaSlot, reason: str) -> None:
        """The exchange has failed; its trainer may still write, so the slot gets other memory."""
        # That a path is given up says the trainer whose it is; here it may be the end of the job.
        self._log(f"{_what(bringing.order)} not through the devices, from host memory: {reason}")
        exchange, bringing.exchange = bringing.exchange, None
        if exchange is not None:
            self._exchanges.abandon(exchange, reason)
        with self._lock:
            if bringing.is_over():
                return
            self._discard(bringing.order, replica)
        try:
            made, pool = self._make(bringing), self._pool
            if made is not None and pool is not None:
                self._start(bringing, made, pool)
        except Exception as error:  # an end of the fetch is waited for, whatever went wrong
            bringing.fail(str(error) or type(error).__name__, final=True)

    def _abandon(self, bringing: ShardFetch, reason: str) -> None:
        """It was aborted; memory that a trainer may still write is not used again."""
        exchange, bringing.exchange = bringing.exchange, None
        if exchange is not None:
            self._exchanges.abandon(exchange, reason)
            with self._lock:
                self._discard(bringing.order, self._replicas.get(_key(bringing.order)))

    def _discard(self, order: p.FetchShard, replica: ReplicaSlot | None) -> None:
        if replica is not None and self._replicas.get(_key(order)) is replica:
            self._replicas.pop(_key(order)).arena.close()

    # ------------------------------------------------------------------ ends of fetches

    def _make(self, bringing: ShardFetch) -> ReplicaSlot | None:
        """The replica slot of a fetch; memory of the right size is used again.

        None when the fetch is over meanwhile.  Raises GuardError without headroom.
        """
        key, size = _key(bringing.order), bringing.slot_bytes
        spare = bringing.filling.spare_bytes
        with self._lock:
            if bringing.is_over():
                return None
            replica = self._replicas.get(key)
            capacity = bringing.filling.image_bytes
            if replica is not None and (replica.arena.nbytes, replica.image_bytes) == (
                size,
                capacity,
            ):
                replica.clear()
                if spare:
                    require_headroom(spare, what=f"room for {_what(bringing.order)}")
                return replica
        what = f"{_what(bringing.order)} ({format_bytes(size)})"
        require_headroom(size + spare, what=what)
        name = f"autockpt-{'parity' if key[2] else 'replica'}-r{key[0]}-s{key[1]}"
        arena = Arena.create_shared(size, name=name)
        gather_pages([arena])
        made = ReplicaSlot(arena=arena, image_bytes=capacity)
        with self._lock:
            if bringing.is_over():
                arena.close()
                return None
            if replica is not None:
                replica.arena.close()
            self._replicas[key] = made
        return made

    def _find(self, node: int) -> tuple[str, int]:
        until_s = time.monotonic() + ADDRESS_S
        while (address := self._address(node)) is None:
            if time.monotonic() > until_s:
                raise AutockptError(f"node {node} has not said where it serves transfers")
            time.sleep(0.05)
        return address

    def _coming(self, bringing: ShardFetch) -> None:
        """On any thread, for every chunk."""
        now_s = time.monotonic()
        if now_s >= bringing.told_s + COMING_S:
            bringing.told_s = now_s
            self._post(lambda: self._tell_coming(bringing))

    def _tell_coming(self, bringing: ShardFetch) -> None:
        rank, slot, parity = key = _key(bringing.order)
        if self._fetches.get(key) is bringing:
            generation = bringing.order.shard.generation
            self._tell(
                p.ShardComing(
                    rank=rank, generation=generation, slot=slot, mark=bringing.mark, parity=parity
                )
            )

    def _complete(self, bringing: ShardFetch, index: ImageIndex) -> None:
        """On any thread."""
        self._post(lambda: self._fetched(bringing, index))

    def _fetched(self, bringing: ShardFetch, index: ImageIndex) -> None:
        if not self._ends(bringing):
            return
        order = bringing.order
        nodes, restoring = sorted({source.node for source in order.sources}), self._restoring()
        seconds = time.monotonic() - bringing.began_s
        from_node = nodes[0] if len(nodes) == 1 else SEVERAL
        by_device = bringing.exchange is not None
        self._tell_copied(order.shard, from_node, bringing.nbytes, seconds, restoring, by_device)
        if not self._copied or restoring:
            self._log(
                f"{_what(order)} of {index.generation} from nodes {nodes}: "
                f"{format_bytes(bringing.nbytes)} in {seconds:.2f} s"
                + (" through emulated devices" if by_device else "")
            )
        self._copied += 1
        self._tell(
            p.ShardFetched(
                shard=replace(
                    order.shard, slot=order.slot, root=index.root, bytes=index.image_bytes,
                    layout_digest=index.layout_digest, copied=order.shard.parity is None,
                )
            )
        )  # fmt: skip

    def _failed(self, bringing: ShardFetch, reason: str, final: bool) -> None:
        """On any thread."""

        def tell() -> None:
            if self._ends(bringing):
                self._tell_failed(bringing.order, reason, final=final)

        self._post(tell)

    def _tell_failed(self, order: p.FetchShard, reason: str, *, final: bool) -> None:
        self._log(f"no {_what(order)} of {order.shard.generation}: {reason}")
        rank, slot, parity = _key(order)
        self._tell(
            p.FetchFailed(
                rank=rank, generation=order.shard.generation, slot=slot, reason=reason,
                final=final, parity=parity,
            )
        )  # fmt: skip

    def _ends(self, bringing: ShardFetch) -> bool:
        """It ends now; False when it was aborted before."""
        key = _key(bringing.order)
        if self._fetches.get(key) is not bringing:
            return False
        del self._fetches[key]
        return True

    def keep_outgrown(self, order: p.KeepOutgrown) -> None:
        """A slot that is about to be given back becomes a replica slot."""
        memory = self._memory.of(order.rank)
        key = (order.rank, order.replica_slot, False)
        self._revoke(_home(key))
        self.overwritten(order.rank, order.slot)
        with self._lock:
            former = self._replicas.pop(key, None)
            if former is not None:
                former.arena.close()
            image_bytes = memory.image_capacity
            self._replicas[key] = ReplicaSlot(
                arena=memory.give_up(order.slot), image_bytes=image_bytes
            )

    # ------------------------------------------------------------------ lending

    def holding(self, rank: int, generation: Generation) -> ReplicaSlot | None:
        """A replica slot that holds this shard, sealed."""
        for home, _, index in self._replicas_of(rank, "image"):
            if index.generation == generation and index.rank == rank:
                return self._replicas[rank, home[3], False]
        return None

    def overwritten(self, rank: int, slot: int | None = None) -> None:
        """Revoke loans of an own slot (None: all of a rank) that is about to change."""
        for what, replica, owner, number in list(self._sources):
            if not replica and owner == rank and slot in (None, number):
                self._revoke((what, replica, owner, number))

    def _revoke(self, home: Home) -> None:
        source = self._sources.pop(home, None)
        if source is not None:
            source.revoke("the slot is used again")

    def _served(self, event: ServeEnd | ConnectionRefused) -> None:
        """On a thread of transfers.  How a fetch from here ended says the node that fetched."""
        if isinstance(event, ConnectionRefused):
            self._log(f"sent away {event.where}: {event.reason}")

    def _lend(self, peer: Identity, want: Want) -> Loan | str:
        """On a thread of transfers: the image that another keeper wants, if it is here."""
        if want.what == "stored":
            return self._stored(want)
        answer: Future[Loan | str] = Future()
        self._post(lambda: answer.set_result(self._loan(want)))
        try:
            return answer.result(timeout=ANSWER_S)
        except TimeoutError:
            return "the keeper is busy"

    def _loan(self, want: Want) -> Loan | str:
        found = self._sealed_as(want)
        if len(found) > 1:  # one has the trailer of another: the bytes decide
            found = [slot for slot in found if _is_whole(*slot[1:])] or found
        for home, arena, index in found:
            source = self._sources.get(home)
            if source is None or source.index.root != want.root:
                assert arena.fd is not None
                image = arena.view[: index.image_bytes]
                source = ImageSource(arena.fd, image, index, want.what)
                self._sources[home] = source
            return Loan(
                source=source, deadline_s=time_for(index.image_bytes),
                gate=self._gate(), windows=self._windows(),
                carry=None if home[1] else self._carry(home[3], index),
            )  # fmt: skip
        kind = "parity" if want.what == "parity" else "shard"
        return f"no {kind} of rank {want.rank} of {want.generation} with that root is sealed here"

    def _sealed_as(self, want: Want) -> list[tuple[Home, Arena, ImageIndex]]:
        own = self._own(want.rank) if want.what == "image" else []
        named = (self._run_id, want.generation, want.root)
        return [
            slot
            for slot in (*own, *self._replicas_of(want.rank, want.what))
            if (slot[2].run_id, slot[2].generation, slot[2].root) == named
        ]

    def _carry(self, slot: int, index: ImageIndex) -> Callable[[Want, Transfer], None]:
        """Sends an own slot through the devices."""

        def carry(want: Want, transfer: Transfer) -> None:
            self._exchanges.send(want, transfer, slot=slot, index=index, rate=self._rate())

        return carry

    def _own(self, rank: int) -> list[tuple[Home, Arena, ImageIndex]]:
        memory = self._memory.ranks.get(rank)
        if memory is None:
            return []
        sealed = memory.sealed().items()
        return [(("image", False, rank, s), memory.slots[s], index) for s, index in sealed]

    def _replicas_of(self, rank: int, what: What) -> list[tuple[Home, Arena, ImageIndex]]:
        found = []
        for key, replica in list(self._replicas.items()):
            if (key[0], key[2]) == (rank, what == "parity") and key not in self._fetches:
                index = replica.index()
                if index is not None:
                    found.append((_home(key), replica.arena, index))
        return found

    def _gate(self) -> Throttle:
        rate = self._rate()
        if rate != self._paced[0]:
            gate: Throttle = RateLimiter(rate, longest_wait_s=HELD_S) if rate > 0 else Unlimited()
            self._paced = (rate, gate)
        return self._paced[1]


def _key(order: p.FetchShard) -> Key:
    return order.shard.rank, order.slot, order.shard.parity is not None


def _home(key: Key) -> Home:
    return "parity" if key[2] else "image", True, key[0], key[1]


def _is_whole(arena: Arena, index: ImageIndex) -> bool:
    ranges = (index.chunk_range(number) for number in range(len(index.digests)))
    found = (chunk_digest(arena.view[start:stop]) for start, stop in ranges)
    return all(got == digest for got, digest in zip(found, index.digests, strict=True))


def _what(order: p.FetchShard) -> str:
    rank = order.shard.rank
    if order.shard.parity is not None:
        return f"parity held by rank {rank}"
    return f"copy of rank {rank}" if len(order.sources) == 1 else f"rebuilt shard of rank {rank}"
