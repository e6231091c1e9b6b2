"""A keeper's part in exchanges through the devices: its requests to trainers, and their answers.

Methods that wait are called on threads of transfers; `heard` and `trainer_gone` in the keeper's.
"""

import secrets
import threading
import time
from collections.abc import Callable
from typing import Any

from autockpt.executors.image.container import ImageIndex
from autockpt.executors.keeper import wire
from autockpt.executors.network.transfer.frames import Listener, Want
from autockpt.executors.network.transfer.stream import NotCarried
from autockpt.executors.network.transfer.transfer import Transfer

LISTENS_S = 5.0
"""A trainer that is to receive listens within this time."""
LOOK_S = 0.1
"""How often who waits for a trainer looks whether its transfer is over."""


class Exchange:
    """One exchange that a trainer of this node takes part in; at the receiver, a `Carrier`."""

    def __init__(self, name: str, rank: int) -> None:
        self.name = name
        self.listener = Listener(rank=rank, address="")
        """The trainer, and at the receiver where it listens."""
        self._end: wire.ExchangeEnded | None = None
        self._news = threading.Condition()

    def heard(self, message: wire.ReceiverListens | wire.ExchangeEnded) -> None:
        """An answer of the trainer."""
        with self._news:
            if isinstance(message, wire.ReceiverListens):
                self.listener = Listener(rank=message.rank, address=message.address)
            else:
                self._end = message
            self._news.notify_all()

    def wait_listening(self) -> None:
        """Returns when the trainer listens.  Raises NotCarried."""
        with self._news:
            self._news.wait_for(lambda: self.listener.address or self._end, LISTENS_S)
            if self._end is not None:
                raise NotCarried(self._end.reason or "ended before it began")
            if not self.listener.address:
                raise NotCarried(f"the trainer of rank {self.listener.rank} does not answer")

    def bring(self, transfer: Transfer, look: Callable[[], None]) -> tuple[str, ...]:
        """Digests of what came, none at the sender; waits for the trainer.

        Raises NotCarried when it fails or its time is over, Revoked when the transfer is.
        """
        while True:
            with self._news:
                self._news.wait_for(lambda: self._end is not None, LOOK_S)
                if self._end is not None and self._end.reason:
                    raise NotCarried(self._end.reason)
                if self._end is not None:
                    return self._end.digests
            look()
            with transfer.lease.use():  # revoked: raises
                pass
            if time.monotonic() > transfer.until_s:
                raise NotCarried("the time for the exchange is over")


class KeeperExchanges:
    """All exchanges of a keeper."""

    def __init__(self, tell: Callable[[int, Any, tuple[int, ...]], None]) -> None:
        """`tell(rank, message, descriptors)` sends to a trainer, from any thread; descriptors are
        the callee's."""
        self._tell = tell
        self._lock = threading.Lock()
        self._under_way: dict[str, Exchange] = {}

    def receive(self, rank: int, sender: int, fd: int, nbytes: int, chunk: int) -> Exchange:
        """Has the trainer of `rank` receive from that of `sender` into a memfd, and takes it over.

        Returns when it listens.  Raises NotCarried.
        """
        exchange = self._begin(rank)
        order = wire.ReceiveShard(
            rank=rank, exchange=exchange.name, sender=sender, image_bytes=nbytes,
            chunk_bytes=chunk,
        )  # fmt: skip
        self._tell(rank, order, (fd,))
        try:
            exchange.wait_listening()
        except NotCarried as error:
            self.abandon(exchange, str(error))
            raise
        return exchange

    def send(
        self, want: Want, transfer: Transfer, *, slot: int, index: ImageIndex, rate: float
    ) -> None:
        """Has the trainer of the wanted rank send one of its slots; returns when it has left.

        `rate`: most bytes per second, 0: no limit.  Raises NotCarried; revoking the transfer's
        lease ends it.
        """
        assert want.listener is not None
        exchange = self._begin(want.rank)
        order = wire.SendShard(
            rank=want.rank, exchange=exchange.name, receiver=want.listener.rank,
            address=want.listener.address, slot=slot, image_bytes=index.image_bytes,
            chunk_bytes=index.chunk_bytes, bytes_per_s=rate,
        )  # fmt: skip
        self._tell(want.rank, order, ())
        try:
            exchange.bring(transfer, lambda: None)
        except BaseException as error:
            self.abandon(exchange, str(error))
            raise

    def abandon(self, exchange: Exchange, reason: str) -> None:
        """It is not needed any more; its trainer may still write for a moment."""
        with self._lock:
            self._under_way.pop(exchange.name, None)
        rank = exchange.listener.rank
        order = wire.AbandonExchange(rank=rank, exchange=exchange.name, reason=reason[:500])
        self._tell(rank, order, ())

    def heard(self, message: wire.ReceiverListens | wire.ExchangeEnded) -> None:
        """An answer of a trainer."""
        with self._lock:
            exchange = self._under_way.get(message.exchange)
            if exchange is None or exchange.listener.rank != message.rank:
                return
            if isinstance(message, wire.ExchangeEnded):
                del self._under_way[message.exchange]
        exchange.heard(message)

    def trainer_gone(self, rank: int) -> None:
        """Its exchanges have failed."""
        with self._lock:
            under_way = [e for e in self._under_way.values() if e.listener.rank == rank]
        for exchange in under_way:
            self.heard(
                wire.ExchangeEnded(
                    rank=rank, exchange=exchange.name, reason=f"the trainer of rank {rank} is gone"
                )
            )

    def _begin(self, rank: int) -> Exchange:
        exchange = Exchange(secrets.token_hex(8), rank)
        with self._lock:
            self._under_way[exchange.name] = exchange
        return exchange
