"""The threads and sockets of all transfers of a keeper.

A thread a stream: a transfer that hangs holds nobody else, and needs no more than its own stack.
Connections that have not proven themselves, connections at all, and events about strangers are
bounded.
"""

import contextlib
import errno
import ipaddress
import secrets
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from autockpt.executors.gate import Gate, OpenGate
from autockpt.executors.keeper.handshake import Channel, Identity
from autockpt.executors.transfer.destination import Destination
from autockpt.executors.transfer.events import ConnectionRefused, Direction, Event
from autockpt.executors.transfer.frames import MAX_STREAMS, Join, Offer, Span, Subject, Want
from autockpt.executors.transfer.greeting import HANDSHAKE_S, greet
from autockpt.executors.transfer.session import (
    Acceptance,
    Fetch,
    Loan,
    Push,
    Receive,
    require_offer,
    serve,
)
from autockpt.executors.transfer.source import ImageSource
from autockpt.executors.transfer.stream import RefusedByPeer, Stream, Tls, TlsStream, connect
from autockpt.executors.transfer.transfer import Transfer
from autockpt.values.errors import AutockptError, ConfigError, ProtocolError, StorageError

SILENCE_S = 15.0
MAX_STRANGERS = 32
"""Connections that have not proven themselves; more are closed at once."""
MAX_CONNECTIONS = 256
"""Connections that others made."""
REFUSALS_PER_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Owner:
    """What a pool asks and tells its owner, on its own threads.

    `accept(peer, transfer, offer)` and `lend(peer, transfer, want)` answer with what the transfer
    needs or with the reason why not; `event(event)` takes a fact.  None of them may block for long
    or abort the transfer that it is called for by waiting.
    """

    accept: Callable[[Identity, Transfer, Offer], Acceptance | str]
    lend: Callable[[Identity, Transfer, Want], Loan | str]
    event: Callable[[Event], None]


class TransferPool:
    """All transfers of one keeper; public methods may be called from any thread."""

    def __init__(
        self,
        secret: bytes,
        me: Identity,
        owner: Owner,
        *,
        silence_s: float = SILENCE_S,
        tls: Tls | None = None,
    ) -> None:
        """`silence_s`: a peer that takes longer for a header or a chunk is dropped."""
        self.me = me
        """Whom the other ends are told they talk to; replaced for a new incarnation."""
        self._secret, self._owner = secret, owner
        self._silence_s, self._tls = silence_s, tls
        self._host = ""
        self._listener: socket.socket | None = None
        self._lock = threading.Lock()
        self._transfers: set[Transfer] = set()
        self._receiving: dict[tuple[int, str], Receive] = {}
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

    def push(
        self,
        node: int,
        address: tuple[str, int],
        source: ImageSource,
        *,
        deadline_s: float,
        chunks: tuple[Span, ...] | None = None,
        streams: int = 1,
        gate: Gate | None = None,
    ) -> Transfer:
        """Sends `chunks` of an image (None: all); ReplicaSealed or TransferFailed follows.

        `deadline_s` covers the time until the snapshot is sealed, too.  Raises ConfigError.
        """
        gate = gate or OpenGate()
        self._require(streams, gate)
        spans = chunks or (Span(start=0, stop=source.subject.chunks),)
        source.subject.require_spans(spans)
        transfer = self._transfer(secrets.token_hex(8), node, "push", deadline_s)
        push = Push(
            transfer, source, spans, streams=streams, gate=gate,
            dial=lambda transfer: self._dial(transfer, address), spawn=self._spawn,
        )  # fmt: skip
        self._spawn(transfer, push.run)
        return transfer

    def fetch(
        self,
        node: int,
        address: tuple[str, int],
        subject: Subject,
        root: str,
        destination: Destination,
        *,
        deadline_s: float,
        chunks: tuple[Span, ...] | None = None,
        streams: int = 1,
    ) -> Transfer:
        """Brings `chunks` of the image with this root here; Fetched or TransferFailed follows."""
        self._require(streams, OpenGate())
        spans = chunks or (Span(start=0, stop=subject.chunks),)
        subject.require_spans(spans)
        transfer = self._transfer(secrets.token_hex(8), node, "fetch", deadline_s)
        fetch = Fetch(
            transfer, subject, root, spans, destination, streams=streams,
            dial=lambda transfer: self._dial(transfer, address), spawn=self._spawn,
            emit=self._owner.event,
        )  # fmt: skip
        self._spawn(transfer, fetch.run)
        return transfer

    def close(self, reason: str = "the keeper ends") -> None:
        """Aborts every transfer; returns when their last events were told."""
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

    def _require(self, streams: int, gate: Gate) -> None:
        if not 1 <= streams <= MAX_STREAMS:
            raise ConfigError(f"{streams} streams: between 1 and {MAX_STREAMS}")
        if gate.longest_wait_s > self._silence_s / 2:
            raise ConfigError(
                f"a gate that holds a chunk for up to {gate.longest_wait_s:g} s: the other end "
                f"takes {self._silence_s:g} s for a loss; at most half of that"
            )

    # ------------------------------------------------------------------ threads

    def _transfer(self, name: str, node: int, direction: Direction, deadline_s: float) -> Transfer:
        transfer = Transfer(name, node, direction, deadline_s=deadline_s, ended=self._ended)
        with self._lock:
            if self._closing:
                raise StorageError("the pool of transfers is closed")
            self._transfers.add(transfer)
        return transfer

    def _ended(self, transfer: Transfer, event: Event) -> None:
        with self._lock:
            self._transfers.discard(transfer)
            key = (transfer.node, transfer.name)
            if key in self._receiving and self._receiving[key].transfer is transfer:
                del self._receiving[key]
        self._owner.event(event)

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

    def _dial(self, transfer: Transfer, address: tuple[str, int]) -> Stream:
        sock = connect(address, host=self._host, within_s=HANDSHAKE_S)
        stream = self._stream(sock, called=False)
        try:
            transfer.adopt(stream)
        except BaseException:
            stream.close(reset=True)
            raise
        greet(stream, Channel(self._secret, self.me, to_node=transfer.node, purpose="transfer"))
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
        """A connection that somebody made, until its transfer has its own thread: this one."""
        stream = None
        stranger = True
        try:
            stream = self._stream(sock, called=True)
            channel = Channel(self._secret, self.me, to_node=None, purpose="transfer")
            peer = greet(stream, channel)
            stranger = False
            self._known()
            self._converse(peer, stream, stream.hear(within_s=self._silence_s))
        except (AutockptError, OSError, EOFError) as error:
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
            self._owner.event(ConnectionRefused(where=where, reason=reason[:500]))

    def _converse(self, peer: Identity, stream: Stream, text: object) -> None:
        match text:
            case Offer():
                self._offered(peer, stream, text)
            case Join():
                self._joined(peer, stream, text)
            case Want():
                self._wanted(peer, stream, text)
            case _:
                raise ProtocolError(f"{type(text).__name__} as the first word")

    def _offered(self, peer: Identity, stream: Stream, offer: Offer) -> None:
        require_offer(offer, self.me.run_id)
        transfer = self._transfer(offer.transfer, peer.node, "receive", HANDSHAKE_S)

        def receive() -> None:
            transfer.adopt(stream)
            answer = self._owner.accept(peer, transfer, offer)
            if isinstance(answer, str):
                raise RefusedByPeer(answer)
            transfer.extend(answer.deadline_s)
            reception = Receive(transfer, offer, answer.destination, self._owner.event)
            with self._lock:
                known = self._receiving.setdefault((peer.node, offer.transfer), reception)
            if known is not reception:
                raise ProtocolError(f"transfer {offer.transfer} was offered twice")
            reception.run(stream)

        transfer.enter()
        _work(transfer, receive, stream)

    def _joined(self, peer: Identity, stream: Stream, join: Join) -> None:
        with self._lock:
            reception = self._receiving.get((peer.node, join.transfer))
            if reception is not None:
                reception.transfer.enter()
        if reception is None:
            raise ProtocolError(f"nobody awaits a further stream of transfer {join.transfer}")
        transfer = reception.transfer

        def receive() -> None:
            transfer.adopt(stream)
            reception.join(stream, join.stream)

        _work(transfer, receive, stream)

    def _wanted(self, peer: Identity, stream: Stream, want: Want) -> None:
        transfer = self._transfer(want.transfer, peer.node, "serve", HANDSHAKE_S)

        def lend() -> None:
            transfer.adopt(stream)
            answer = self._owner.lend(peer, transfer, want)
            if isinstance(answer, str):
                raise RefusedByPeer(answer)
            transfer.extend(answer.deadline_s)
            serve(transfer, stream, want, answer)

        transfer.enter()
        _work(transfer, lend, stream)


def _work(transfer: Transfer, work: Callable[[], object], stream: Stream | None = None) -> None:
    """One thread of a transfer; `stream` is told why when it fails."""
    try:
        work()
    except BaseException as error:
        if stream is not None:
            stream.refuse(str(error))
        transfer.fail(error)
    finally:
        transfer.leave()
