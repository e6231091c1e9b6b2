"""Connections to the keepers of the other nodes: one per pair, the higher node calls the lower.

All sockets live on one thread, which only calls back; files (secret, addresses) are read on another
one, because a shared file system may hang.  What is sent to a node that is not there waits in a
queue, the oldest first to be given up: the protocol repeats everything.  A node that was there and
cannot be reached for the grace time is reported lost, once; when it is back, messages flow again.
"""

import contextlib
import errno
import ipaddress
import queue
import secrets
import selectors
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from autockpt.executors.network.discovery import (
    KeeperAddress,
    open_secret,
    read_address,
    write_address,
)
from autockpt.executors.network.handshake import (
    Channel,
    Framer,
    Identity,
    Standing,
    StandingChanged,
    frame,
)
from autockpt.executors.protocol import messages as p
from autockpt.values.errors import AutockptError, ProtocolError

GRACE_S = 5.0
"""A node that cannot be reached for longer is lost."""
HANDSHAKE_S = 5.0
SILENCE_S = 3
"""A connection whose other end does not acknowledge anything for this long is broken."""
MAX_STRANGERS = 32
"""Connections that have not proven themselves; more are closed at once."""
QUEUE_BYTES = 64 * 2**20
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.05, 2.0
TICK_S = 0.1
FAREWELL_S = 1.0
REFUSALS_PER_S = 1.0
"""Log lines about refused connections."""


@dataclass(eq=False, slots=True)
class _Line:
    """A connection, from the first packet to the last."""

    sock: socket.socket
    channel: Channel
    where: str
    began_s: float
    calling: int | None
    """The node that we call; None: we were called."""
    connected: bool
    peer: "_Peer | None" = None
    """Set when the handshake is done."""
    flying: bytes = b""
    """The frame being sent, whole."""
    sent: int = 0
    from_queue: bool = False


@dataclass(eq=False, slots=True)
class _Peer:
    """The keeper of another node."""

    node: int
    line: _Line | None = None
    queue: deque[bytes] = field(default_factory=deque)
    queued: int = 0
    """Bytes in the queue."""
    standing: Standing = "busy"
    gone_s: float | None = None
    """Since when it, once connected, is not; None: it is, or never was."""
    told: bool = False
    looking: bool = False
    moved: bool = False
    """It may be another keeper by now: its address is to be read again."""
    pause_s: float = FIRST_PAUSE_S
    retry_s: float = 0.0
    complaint: str = ""
    """The last thing that was logged about it."""

    @property
    def here(self) -> bool:
        """It is connected and has proven itself."""
        return self.line is not None and self.line.peer is not None

    @property
    def needs_us(self) -> bool:
        """It may still want something from this keeper."""
        if self.here:
            return self.standing == "busy"
        return self.gone_s is not None and not self.told


class Peers:
    """The other keepers of the run.  Public methods may be called from one other thread.

    `opened(secret, me, host)` opens the transfers for an incarnation and returns their port, on the
    thread of files.  `received(node, message)`, `lost(node)`, `trouble(what)` and `log(text)` are
    called on the thread of the connections and must not block.
    """

    def __init__(
        self,
        checkpoints: str,
        run_id: str,
        node: int,
        *,
        received: Callable[[int, p.WireMessage], None],
        lost: Callable[[int], None],
        trouble: Callable[[str], None],
        log: Callable[[str], None],
        opened: Callable[[bytes, Identity, str], int] = lambda secret, me, host: 0,
        grace_s: float = GRACE_S,
    ) -> None:
        self._checkpoints = checkpoints
        self._run_id = run_id
        self._node = node
        self._received = received
        self._lost = lost
        self._trouble = trouble
        self._log = log
        self._opened = opened
        self._transfers: tuple[str, p.Incarnation | None, int] = ("", None, 0)
        """Host, incarnation and port of the transfers as last opened."""
        self._grace_s = grace_s
        self._nonce = secrets.token_hex(8)
        self._framer = Framer()
        """Of `send`, on the thread that calls it."""
        self._secret = b""
        self._incarnation: p.Incarnation | None = None
        self._nodes: frozenset[int] = frozenset()
        self._host = ""
        self._listener: socket.socket | None = None
        self._peers: dict[int, _Peer] = {}
        self._lines: set[_Line] = set()
        self._standing: Standing = "busy"
        self._refused_s = 0.0
        self._closing_s: float | None = None
        self._needed = False
        self._connected: tuple[int, ...] = ()
        self._posted: deque[Callable[[], None]] = deque()
        self._files: queue.Queue[Callable[[], None] | None] = queue.Queue()
        self._wake_read, self._wake_write = socket.socketpair()
        for sock in (self._wake_read, self._wake_write):
            sock.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._thread: threading.Thread | None = None

    # ------------------------------------------------------------------ for the keeper

    def expect(self, incarnation: p.Incarnation, nodes: tuple[int, ...], host: str) -> None:
        """These nodes are the job now; listen on `host` and tell the others."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._serve, name="autockpt-peers", daemon=True)
            self._thread.start()
            threading.Thread(target=self._read, name="autockpt-control", daemon=True).start()
        self._post(lambda: self._expect(incarnation, frozenset(nodes), host))

    def send(self, node: int, message: p.WireMessage) -> None:
        """Brings `message` to the keeper of `node`, now or when it is there."""
        try:
            data = self._framer.frame(message)
        except ProtocolError as error:
            self._log(f"not sent to node {node}: {error}")
            return
        self._post(lambda: self._enqueue(node, data))

    def stand(self, standing: Standing) -> None:
        """Tells the others whether somebody here may still need them."""
        self._post(lambda: self._stand(standing))

    @property
    def needed(self) -> bool:
        """A keeper elsewhere may still need this one."""
        return self._needed

    @property
    def connected(self) -> tuple[int, ...]:
        """Nodes whose keepers are connected."""
        return self._connected

    def transfer_address(self, node: int) -> tuple[str, int] | None:
        """Where the keeper of a node of this incarnation lends; reads a file, on any thread."""
        address = read_address(self._checkpoints, node)
        if address is None or address.incarnation != self._incarnation or not address.transfer_port:
            return None
        return address.host, address.transfer_port

    @property
    def port(self) -> int:
        """Where this keeper listens; 0 before it does."""
        listener = self._listener
        return 0 if listener is None else int(listener.getsockname()[1])

    def close(self) -> None:
        """Sends what is queued for those who are there, says farewell, ends."""
        if self._thread is None:
            return
        self.stand("leaving")
        self._post(self._close)
        self._thread.join(timeout=2 * FAREWELL_S)
        self._thread = None

    # ------------------------------------------------------------------ threads

    def _post(self, work: Callable[[], None]) -> None:
        self._posted.append(work)
        with contextlib.suppress(OSError):
            self._wake_write.send(b"x")

    def _serve(self) -> None:
        self._selector.register(self._wake_read, selectors.EVENT_READ, self._woken)
        while not self._ended():
            for key, events in self._selector.select(timeout=TICK_S):
                key.data(events)
            while self._posted:
                self._posted.popleft()()
            self._tick(time.monotonic())
        for line in list(self._lines):
            self._drop(line)
        if self._listener is not None:
            self._listener.close()
        self._selector.close()
        self._files.put(None)
        self._wake_read.close()
        self._wake_write.close()

    def _read(self) -> None:
        said = ""
        while (job := self._files.get()) is not None:
            try:
                job()
            except (AutockptError, OSError) as error:
                if str(error) != said:
                    said = str(error)
                    self._trouble(said)
                time.sleep(LONGEST_PAUSE_S)
                self._files.put(job)

    def _woken(self, _: int) -> None:
        with contextlib.suppress(BlockingIOError):
            self._wake_read.recv(4096)

    def _ended(self) -> bool:
        """Everybody has read our farewell and closed, or the time for it is over."""
        if self._closing_s is None:
            return False
        return not self._lines or time.monotonic() > self._closing_s + FAREWELL_S

    def _tick(self, now: float) -> None:
        for line in [line for line in self._lines if line.peer is None]:
            if now > line.began_s + HANDSHAKE_S:
                self._end(line, f"no handshake within {HANDSHAKE_S:.0f} s")
        for peer in self._peers.values():
            if peer.gone_s is not None and not peer.told and now >= peer.gone_s + self._grace_s:
                peer.told = True
                self._log(f"node {peer.node} cannot be reached for {self._grace_s:.0f} s")
                self._lost(peer.node)
            if self._should_call(peer, now):
                self._look_up(peer)
        self._needed = any(peer.needs_us for peer in self._peers.values())
        self._connected = tuple(sorted(n for n, x in self._peers.items() if x.here))

    # ------------------------------------------------------------------ who takes part

    def _expect(self, incarnation: p.Incarnation, nodes: frozenset[int], host: str) -> None:
        if (incarnation, nodes, host) == (self._incarnation, self._nodes, self._host):
            return
        self._incarnation, self._nodes = incarnation, nodes
        for node in [node for node in self._peers if node not in nodes]:
            self._forget(self._peers.pop(node))
        for node in nodes - {self._node}:
            self._start_over(self._peers.setdefault(node, _Peer(node=node)))
        if self._listener is None or host != self._host:
            self._listen(host)
        self._host = host
        self._files.put(self._prepare)

    def _start_over(self, peer: _Peer) -> None:
        """Whom we call may have moved: its address must be of this incarnation."""
        peer.moved = peer.node < self._node
        peer.standing, peer.told, peer.gone_s = "busy", False, None
        peer.pause_s, peer.retry_s = FIRST_PAUSE_S, 0.0

    def _forget(self, peer: _Peer) -> None:
        if peer.line is not None:
            self._drop(peer.line)

    def _listen(self, host: str) -> None:
        if self._listener is not None:
            self._selector.unregister(self._listener)
            self._listener.close()
            self._listener = None
        try:
            address = ipaddress.ip_address(host)
            if address.is_unspecified:
                raise OSError(errno.EADDRNOTAVAIL, "would listen on all interfaces")
            family = socket.AF_INET6 if address.version == 6 else socket.AF_INET
            listener = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
            listener.setblocking(False)
            listener.bind((host, 0))
            listener.listen(MAX_STRANGERS)
        except (OSError, ValueError) as error:
            self._trouble(f"cannot listen on {host}: {error}")
            return
        self._listener = listener
        self._selector.register(listener, selectors.EVENT_READ, self._accept)
        self._log(f"listening for other keepers on {host} port {self.port}")

    def _prepare(self) -> None:
        """On the thread of the files: the secret first, then our address."""
        secret = self._secret or open_secret(self._checkpoints)
        self._post(lambda: self._trust(secret))

    def _trust(self, secret: bytes) -> None:
        self._secret = secret
        self._files.put(self._write_address)

    def _write_address(self) -> None:
        """On the thread of the files: as things are now, however late this comes."""
        if not self.port or self._incarnation is None:
            return
        host, incarnation = self._host, self._incarnation
        if self._transfers[:2] != (host, incarnation):
            me = Identity(run_id=self._run_id, node=self._node, incarnation=incarnation)
            self._transfers = (host, incarnation, self._opened(self._secret, me, host))
        address = KeeperAddress(
            run_id=self._run_id, node=self._node, host=host, port=self.port,
            transfer_port=self._transfers[2], nonce=self._nonce, incarnation=incarnation,
        )  # fmt: skip
        write_address(self._checkpoints, address)

    # ------------------------------------------------------------------ calling

    def _should_call(self, peer: _Peer, now: float) -> bool:
        if peer.line is not None and not peer.moved:
            return False
        if peer.looking or now < peer.retry_s or not self._secret:
            return False
        wanted = peer.node == min(self._nodes) or bool(peer.queue)
        return wanted and peer.node < self._node and self._closing_s is None

    def _look_up(self, peer: _Peer) -> None:
        peer.looking = True
        node = peer.node

        def read() -> None:
            address = None
            try:
                address = read_address(self._checkpoints, node)
            finally:
                self._post(lambda: self._found(node, address))

        self._files.put(read)

    def _found(self, node: int, address: KeeperAddress | None) -> None:
        peer = self._peers.get(node)
        if peer is None:
            return
        peer.looking = False
        if peer.line is not None and not peer.moved:
            return
        if address is None or address.incarnation != self._incarnation:
            self._pause(peer, "it has not said where it listens")
        elif (address.run_id, address.node) != (self._run_id, node):
            self._pause(peer, f"its address is of run {address.run_id}, node {address.node}")
        else:
            self._call(peer, address)

    def _call(self, peer: _Peer, address: KeeperAddress) -> None:
        try:
            version = ipaddress.ip_address(address.host).version
            family = socket.AF_INET6 if version == 6 else socket.AF_INET
            sock = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        except (OSError, ValueError) as error:
            self._pause(peer, str(error))
            return
        sock.setblocking(False)
        if peer.line is not None:
            self._drop(peer.line)
        peer.moved = False
        code = sock.connect_ex((address.host, address.port))
        if code not in (0, errno.EINPROGRESS):
            sock.close()
            self._pause(peer, f"{address.host} port {address.port}: error {code}")
            return
        where = f"{address.host} port {address.port}"
        peer.line = self._add(sock, where, calling=peer.node)

    def _pause(self, peer: _Peer, reason: str) -> None:
        peer.retry_s = time.monotonic() + peer.pause_s
        peer.pause_s = min(LONGEST_PAUSE_S, 2 * peer.pause_s)
        if reason != peer.complaint:
            peer.complaint = reason
            self._log(f"no connection to node {peer.node}: {reason}")

    # ------------------------------------------------------------------ being called

    def _accept(self, _: int) -> None:
        assert self._listener is not None
        with contextlib.suppress(OSError):  # gone before we looked, or no descriptor left
            sock, where = self._listener.accept()
            sock.setblocking(False)
            strangers = sum(line.peer is None and line.calling is None for line in self._lines)
            if strangers >= MAX_STRANGERS or not self._secret or self._closing_s is not None:
                sock.close()
                return
            self._add(sock, f"{where[0]} port {where[1]}", calling=None)

    def _add(self, sock: socket.socket, where: str, *, calling: int | None) -> _Line:
        assert self._incarnation is not None
        _keep_alive(sock)
        me = Identity(run_id=self._run_id, node=self._node, incarnation=self._incarnation)
        line = _Line(
            sock=sock, channel=Channel(self._secret, me, to_node=calling), where=where,
            began_s=time.monotonic(), calling=calling, connected=calling is None,
        )  # fmt: skip
        self._lines.add(line)
        both = selectors.EVENT_READ | selectors.EVENT_WRITE
        self._selector.register(sock, both, lambda events: self._ready(line, events))
        return line

    # ------------------------------------------------------------------ traffic

    def _ready(self, line: _Line, events: int) -> None:
        if line not in self._lines:
            return  # ended by an earlier event of this round
        try:
            if not line.connected:
                code = line.sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
                if code:
                    raise OSError(code, errno.errorcode.get(code, str(code)))
                line.connected = True
            if events & selectors.EVENT_READ:
                self._receive(line)
            if line in self._lines:
                self._flush(line)
        except (OSError, EOFError, ProtocolError) as error:
            self._end(line, str(error) or type(error).__name__)

    def _receive(self, line: _Line) -> None:
        try:
            data = line.sock.recv(2**18)
        except BlockingIOError:
            return
        if not data:
            raise EOFError("closed by the other end")
        messages = line.channel.feed(data)
        if line.peer is None and line.channel.peer is not None:
            self._proven(line, line.channel.peer)
        peer = line.peer
        for message in messages:
            assert peer is not None
            if isinstance(message, StandingChanged):
                peer.standing = message.standing
            else:
                self._received(peer.node, message)

    def _proven(self, line: _Line, who: Identity) -> None:
        """The other end knows the secret; is it who we are waiting for?"""
        peer = self._peers.get(who.node)
        if peer is None or (line.calling is None and who.node < self._node):
            raise ProtocolError(f"node {who.node} is not to call here; nodes {sorted(self._nodes)}")
        former = peer.line
        if former is not None and former is not line:
            known = former.channel.peer
            ours = known is not None and known.incarnation == self._incarnation
            if ours and who.incarnation != self._incarnation:
                raise ProtocolError(f"node {who.node} of {who.incarnation} was replaced")
            self._drop(former)
        line.peer, peer.line = peer, line
        peer.standing, peer.told, peer.gone_s = "busy", False, None
        peer.pause_s, peer.complaint = FIRST_PAUSE_S, ""
        self._tell_standing(peer)
        self._log(f"connected to node {who.node} ({line.where})")

    def _flush(self, line: _Line) -> None:
        while line.connected and (line.flying or self._next_frame(line)):
            try:
                line.sent += line.sock.send(memoryview(line.flying)[line.sent :])
            except BlockingIOError:
                break
            if line.sent == len(line.flying):
                line.flying, line.sent = b"", 0
        events = selectors.EVENT_READ
        if line.flying or not line.connected:
            events |= selectors.EVENT_WRITE
        elif self._closing_s is not None and line.peer is not None:
            with contextlib.suppress(OSError):
                line.sock.shutdown(socket.SHUT_WR)
        self._selector.modify(line.sock, events, self._selector.get_key(line.sock).data)

    def _next_frame(self, line: _Line) -> bool:
        if line.channel.outbox:
            line.flying, line.from_queue = line.channel.outbox.pop(0), False
        elif line.peer is not None and line.peer.queue:
            line.flying, line.from_queue = line.peer.queue.popleft(), True
            line.peer.queued -= len(line.flying)
        return bool(line.flying)

    def _enqueue(self, node: int, data: bytes) -> None:
        peer = self._peers.setdefault(node, _Peer(node=node))
        peer.queue.append(data)
        peer.queued += len(data)
        while peer.queued > QUEUE_BYTES and len(peer.queue) > 1:
            peer.queued -= len(peer.queue.popleft())
        self._push(peer)

    def _push(self, peer: _Peer) -> None:
        if peer.line is not None and peer.here:
            self._ready(peer.line, 0)

    def _stand(self, standing: Standing) -> None:
        if standing == self._standing:
            return
        self._standing = standing
        for peer in [peer for peer in self._peers.values() if peer.here]:
            self._tell_standing(peer)
            self._push(peer)

    def _tell_standing(self, peer: _Peer) -> None:
        """Behind what is queued: whoever reads "leaving" has read all that came before."""
        data = frame(StandingChanged(standing=self._standing))
        peer.queue.append(data)
        peer.queued += len(data)

    # ------------------------------------------------------------------ endings

    def _end(self, line: _Line, reason: str) -> None:
        """A connection broke, or never was one."""
        peer = line.peer
        self._drop(line)
        if peer is not None:
            peer.retry_s = 0.0
            if peer.standing == "leaving":
                peer.retry_s = time.monotonic() + LONGEST_PAUSE_S
            elif self._closing_s is None:
                peer.gone_s = time.monotonic()
                self._log(f"connection to node {peer.node} ended: {reason}")
        elif line.calling is not None:
            called = self._peers.get(line.calling)
            if called is not None:
                self._pause(called, f"{line.where}: {reason}")
        elif time.monotonic() > self._refused_s + 1 / REFUSALS_PER_S:
            self._refused_s = time.monotonic()
            self._log(f"refused a connection from {line.where}: {reason}")

    def _drop(self, line: _Line) -> None:
        """Closes; what was not sent whole is sent again on the next connection."""
        self._lines.discard(line)
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(line.sock)
        line.sock.close()
        for peer in self._peers.values():
            if peer.line is line:
                peer.line = None
        if line.peer is not None and line.flying and line.from_queue:
            line.peer.queue.appendleft(line.flying)
            line.peer.queued += len(line.flying)

    def _close(self) -> None:
        self._closing_s = time.monotonic()
        if self._listener is not None:
            self._selector.unregister(self._listener)
        for line in list(self._lines):
            if line.peer is None:
                self._drop(line)
            else:
                self._ready(line, 0)


def _keep_alive(sock: socket.socket) -> None:
    """A machine that vanished is noticed although nothing is sent."""
    options: list[tuple[int, str, int]] = [
        (socket.SOL_SOCKET, "SO_KEEPALIVE", 1),
        (socket.IPPROTO_TCP, "TCP_NODELAY", 1),
        (socket.IPPROTO_TCP, "TCP_KEEPIDLE", 1),
        (socket.IPPROTO_TCP, "TCP_KEEPINTVL", 1),
        (socket.IPPROTO_TCP, "TCP_KEEPCNT", SILENCE_S),
        (socket.IPPROTO_TCP, "TCP_USER_TIMEOUT", 1000 * SILENCE_S),
    ]
    for level, name, value in options:
        option: Any = getattr(socket, name, None)
        if option is not None:
            with contextlib.suppress(OSError):
                sock.setsockopt(level, option, value)
