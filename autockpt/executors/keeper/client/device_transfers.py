"""A trainer's part in exchanges through the devices: its keeper says what, threads here do it.

An exchange is one image in one direction.  The receiver's trainer listens, the sender's calls, and
the path between them is kept for the next one.  The trainer reports a failed exchange to the
keeper, which fetches from host memory instead.  The pair is then given up for as long as this
process lives.  Nothing here waits for the training, and the training waits for nothing here.
"""

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from autockpt.executors.keeper import wire
from autockpt.executors.linux import late_threads
from autockpt.executors.linux.memory import Arena
from autockpt.executors.network.device_path import (
    RECEIVER,
    SENDER,
    SETTING,
    DeviceLinks,
    DevicePath,
    listening_store,
    store_at,
)
from autockpt.executors.network.transfer.lease import Lease, Revoked
from autockpt.values.errors import AutockptError

NO_DEVICE = f"no device path here: only emulated devices have one ({SETTING})"


@dataclass(slots=True)
class _Pair:
    """One other rank, in one direction."""

    path: DevicePath | None = None
    address: str = ""
    given_up: str = ""
    turn: threading.Lock = field(default_factory=threading.Lock)
    """Held by the exchange that is under way."""


class Exchanges:
    """The ends of all exchanges of one trainer."""

    def __init__(
        self,
        rank: int,
        *,
        host: str,
        links: DeviceLinks | None,
        slots: Callable[[], list[Arena]],
        send: Callable[[Any], object],
        degraded: Callable[[str], None],
    ) -> None:
        """`host`: the address of this rank; `slots()`: sources of a send; `send`: to the keeper;
        `degraded(reason)` receives each pair that is given up."""
        self._rank, self._host, self._links = rank, host, links
        self._slots, self._send, self._degraded = slots, send, degraded
        self._pairs: dict[tuple[str, int], _Pair] = {}
        self._leases: dict[str, Lease] = {}
        self._lock = threading.Lock()

    def receive(self, order: wire.ReceiveShard, memory: Arena) -> None:
        """Fills `memory` with what another rank sends, and lets it go."""

        def work(pair: _Pair, lease: Lease) -> tuple[str, ...]:
            store = None
            if pair.path is None:
                store, pair.address = listening_store(self._host)
            self._send(
                wire.ReceiverListens(rank=self._rank, exchange=order.exchange, address=pair.address)
            )
            if pair.path is None and store is not None:
                pair.path = DevicePath(store, RECEIVER, self._known())
            assert pair.path is not None
            return pair.path.receive(memory.view[: order.image_bytes], order.chunk_bytes, lease)

        def run() -> None:
            try:
                self._run("from", order.sender, order.exchange, work)
            finally:
                memory.close()

        self._start(order.exchange, run)

    def send(self, order: wire.SendShard) -> None:
        """Send the image in a slot to the listening receiver."""

        def work(pair: _Pair, lease: Lease) -> tuple[str, ...]:
            slot = dict(enumerate(self._slots())).get(order.slot)
            if slot is None or order.image_bytes > slot.nbytes:
                raise AutockptError(f"no image of {order.image_bytes} bytes in slot {order.slot}")
            if pair.path is None or pair.address != order.address:
                pair.path = DevicePath(store_at(order.address), SENDER, self._known())
                pair.address = order.address
            image = slot.view[: order.image_bytes]
            pair.path.send(image, order.chunk_bytes, lease, bytes_per_s=order.bytes_per_s)
            return ()

        self._start(order.exchange, lambda: self._run("to", order.receiver, order.exchange, work))

    def abandon(self, order: wire.AbandonExchange) -> None:
        """Its image is not read, its memory not written when this returns."""
        with self._lock:
            lease = self._leases.get(order.exchange)
        if lease is not None:
            lease.revoke(order.reason)

    def _known(self) -> DeviceLinks:
        if self._links is None:
            raise AutockptError(NO_DEVICE)
        return self._links

    def _start(self, exchange: str, run: Callable[[], None]) -> None:
        with self._lock:
            self._leases[exchange] = Lease()
        late_threads.start(run, "autockpt-device-path")

    def _run(
        self,
        way: str,
        other: int,
        exchange: str,
        work: Callable[[_Pair, Lease], tuple[str, ...]],
    ) -> None:
        with self._lock:
            lease, pair = self._leases[exchange], self._pairs.setdefault((way, other), _Pair())
        digests: tuple[str, ...] = ()
        if not pair.turn.acquire(blocking=False):
            reason = f"another exchange {way} rank {other} is under way"
        else:
            try:
                reason, digests = self._exchange(pair, lease, work, f"{way} rank {other}")
            finally:
                pair.turn.release()
        with self._lock:
            del self._leases[exchange]
        self._send(
            wire.ExchangeEnded(rank=self._rank, exchange=exchange, reason=reason, digests=digests)
        )

    def _exchange(
        self,
        pair: _Pair,
        lease: Lease,
        work: Callable[[_Pair, Lease], tuple[str, ...]],
        where: str,
    ) -> tuple[str, tuple[str, ...]]:
        """(why it failed, digests); a pair that failed is not used again."""
        if pair.given_up:
            return pair.given_up, ()
        try:
            self._known()
            return "", work(pair, lease)
        except Revoked as error:
            pair.path = None  # the next exchange makes a new one
            return str(error), ()
        except Exception as error:
            pair.path = None
            reason = f"{where}: {str(error)[:300] or type(error).__name__}"
            if lease.reason is not None:  # nobody came, as it was abandoned
                return lease.reason, ()
            pair.given_up = f"given up: {reason}"
            self._degraded(f"{reason}; copies go from host memory to host memory")
            return reason, ()
