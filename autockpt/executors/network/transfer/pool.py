"""The threads and sockets of all transfers of a keeper.

Each stream has its own thread, so a hanging transfer delays no other one and needs only its own
stack.  The pool bounds unproven connections, all connections, and events about strangers.
"""

import contextlib
import errno
import ipaddress
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

from autockpt.executors.network.handshake import Channel, Identity
from autockpt.executors.network.transfer.destination import Destination
from autockpt.executors.network.transfer.events import (
    ConnectionRefused,
    Direction,
    FetchEnd,
    ServeEnd,
)
from autockpt.executors.network.transfer.frames import MAX_STREAMS, Span, Subject, Want
from autockpt.executors.network.transfer.greeting import HANDSHAKE_S, greet
from autockpt.executors.network.transfer.session import Carrier, Fetch, Loan, expect, serve
from autockpt.executors.network.transfer.stream import (
    RefusedByPeer,
    Stream,
    Tls,
    TlsStream,
    connect,
)
from autockpt.executors.network.transfer.transfer import Transfer
from autockpt.values.errors import ConfigError, StorageError

SILENCE_S = 15.0
MAX_STRANGERS = 32
"""Connections that have not proven themselves; more are closed at once."""
MAX_CONNECTIONS = 256
"""Connections that others made."""
REFUSALS_PER_S = 1.0


class TransferPool:
    """All transfers of one keeper; public methods may be called from any thread."""

    def __init__(
        self,
        secret: bytes,
        me: Identity,
        lend: Callable[[Identity, Want], Loan | str],
        told: Callable[[ServeEnd | ConnectionRefused], None] = lambda event: None,
        *,
        silence_s: float = SILENCE_S,
        tls: Tls | None = None,
    ) -> None:
        """`lend(peer, want)` answers, soon, with a loan or the reason of a refusal.  `told`
        receives the result.  Both run on the pool's threads.  `silence_s`: a peer that takes longer
        for a header or a chunk is dropped."""
        self.me = me
        """Our identity for the other ends; replaced for a new incarnation."""
        self._secret, self._lend, self._told = secret, lend, told
        self._silence_s, self._tls = silence_s, tls
        self._host = ""
        self._listener: socket.socket | None = None
        self._lock = threading.Lock()
        self._transfers: set[Transfer] = set()
        self._strangers = self._connections = 0
        self._refused_s = 0.0
        self._closing = False

    # ------------------------------------------------------------------ for the owner

    def listen(self, host: str) -> int:
        """Takes connections on a numeric address of this node; the port.

        Calls go out from the same address; a former one is given up.  Raises ConfigError for all
        interfaces or none of ours.
        """
        try:
            address = ipaddress.ip_address(host)
            if address.is_unspecified:
                raise OSError(errno.EADDRNOTAVAIL, "would listen on all interfaces")
            family = socket.AF_INET6 if address.version == 6 else socket.AF_INET
            listener = socket.create_server((host, 0), family=family, backlog=MAX_STRANGERS)
        except (OSError, ValueError) as error:
            raise ConfigError(f"transfers cannot listen on {host!r}: {error}") from None
        self._stop_listening()
        self._host, self._listener = host, listener
        threading.Thread(
            target=self._accept, args=(listener,), name="autockpt-transfers", daemon=True
        ).start()
        return int(listener.getsockname()[1])

    def fetch(
        self,
        node: int,
        address: tuple[str, int],
        subject: Subject,
        root: str,
        destination: Destination,
        *,
        ended: Callable[[FetchEnd], None],
        deadline_s: float,
        chunks: tuple[Span, ...] | None = None,
        streams: int = 1,
        carrier: Carrier | None = None,
        silence_s: float | None = None,
    ) -> Transfer:
        """Brings `chunks` (None: all) of the image with this root here; a carrier, all of it.

        `silence_s`: in place of the pool's, where the other end has to read the chunks first.
        `ended` is called once, on one of the pool's threads.  Raises ConfigError, StorageError.
        """
        if not 1 <= streams <= MAX_STREAMS:
            raise ConfigError(f"{streams} streams: between 1 and {MAX_STREAMS}")
        spans = chunks or (Span(start=0, stop=subject.chunks),)
        subject.require_spans(spans)
        transfer = self._transfer(node, "fetch", deadline_s, ended)
        fetch = Fetch(
            transfer, subject, root, spans, destination, streams=streams, carrier=carrier,
            dial=lambda transfer: self._dial(transfer, address, silence_s), spawn=self._spawn,
        )  # fmt: skip
        self._spawn(transfer, fetch.run)
        return transfer

    def close(self, reason: str = "the keeper ends") -> None:
        """Abort every transfer; return after their last events."""
        with self._lock:
            self._closing = True
            transfers = list(self._transfers)
        self._stop_listening()
        for transfer in transfers:
            transfer.abort(reason)
        for transfer in transfers:
            transfer.done.wait(2 * HANDSHAKE_S)

    def _stop_listening(self) -> None:
        listener, self._listener = self._listener, None
        if listener is not None:
            with contextlib.suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)
            listener.close()

    # ------------------------------------------------------------------ threads

    def _transfer(
        self, node: int, direction: Direction, deadline_s: float, ended: Callable[[Any], None]
    ) -> Transfer:
        def leave(transfer: Transfer, event: Any) -> None:
            with self._lock:
                self._transfers.discard(transfer)
            ended(event)

        transfer = Transfer(node, direction, deadline_s=deadline_s, ended=leave)
        with self._lock:
            if self._closing:
                raise StorageError("the pool of transfers is closed")
            self._transfers.add(transfer)
        return transfer

    def _spawn(self, transfer: Transfer, work: Callable[[], object]) -> None:
        """Runs `work` for a transfer on a thread of its own."""
        transfer.enter()
        try:
            threading.Thread(
                target=_work, args=(transfer, work), name="autockpt-transfer", daemon=True
            ).start()
        except RuntimeError as error:  # no thread to be had
            transfer.fail(error)
            transfer.leave()

    def _dial(
        self, transfer: Transfer, address: tuple[str, int], silence_s: float | None
    ) -> Stream:
        sock = connect(address, host=self._host, within_s=HANDSHAKE_S)
        stream = self._stream(sock, called=False)
        try:
            transfer.adopt(stream)
        except BaseException:
            stream.close(reset=True)
            raise
        greet(stream, Channel(self._secret, self.me, to_node=transfer.node, purpose="transfer"))
        stream.silence_s = silence_s or stream.silence_s
        return stream

    def _stream(self, sock: socket.socket, *, called: bool) -> Stream:
        if self._tls is None:
            return Stream(sock, silence_s=self._silence_s)
        return TlsStream(sock, self._tls, called=called, silence_s=self._silence_s)

    # ------------------------------------------------------------------ being called

    def _accept(self, listener: socket.socket) -> None:
        while self._listener is listener:
            try:
                sock, where = listener.accept()
            except OSError:
                time.sleep(0.01)  # gone before we looked, or no descriptor left
                continue
            with self._lock:
                full = self._strangers >= MAX_STRANGERS or self._connections >= MAX_CONNECTIONS
                if not full:
                    self._strangers += 1
                    self._connections += 1
            if full:
                sock.close()
                continue
            threading.Thread(
                target=self._called, args=(sock, f"{where[0]} port {where[1]}"),
                name="autockpt-transfer", daemon=True,
            ).start()  # fmt: skip

    def _called(self, sock: socket.socket, where: str) -> None:
        """Serve an incoming connection on this thread."""
        stream = None
        stranger = True
        try:
            stream = self._stream(sock, called=True)
            channel = Channel(self._secret, self.me, to_node=None, purpose="transfer")
            peer = greet(stream, channel)
            stranger = False
            self._known()
            self._serve(peer, stream, expect(Want, stream.hear()))
        except Exception as error:
            if stream is not None and not stranger:
                stream.refuse(str(error))
            self._refuse(where, str(error) or type(error).__name__)
        finally:
            if stranger:
                self._known()
            with self._lock:
                self._connections -= 1
            if stream is None:
                sock.close()
            else:
                stream.close(reset=False)

    def _known(self) -> None:
        with self._lock:
            self._strangers -= 1

    def _refuse(self, where: str, reason: str) -> None:
        with self._lock:
            quiet = time.monotonic() < self._refused_s + 1 / REFUSALS_PER_S or self._closing
            if not quiet:
                self._refused_s = time.monotonic()
        if not quiet:
            self._told(ConnectionRefused(where=where, reason=reason[:500]))

    def _serve(self, peer: Identity, stream: Stream, want: Want) -> None:
        loan = self._lend(peer, want)
        if isinstance(loan, str):
            raise RefusedByPeer(loan)
        transfer = self._transfer(peer.node, "serve", loan.deadline_s, self._told)

        def lend() -> None:
            transfer.adopt(stream)
            serve(transfer, stream, want, loan)

        transfer.enter()
        _work(transfer, lend, stream)


def _work(transfer: Transfer, work: Callable[[], object], stream: Stream | None = None) -> None:
    """Run one thread of a transfer; `stream` receives the reason of a failure."""
    try:
        work()
    except BaseException as error:
        if stream is not None:
            stream.refuse(str(error))
        transfer.fail(error)
    finally:
        transfer.leave()
