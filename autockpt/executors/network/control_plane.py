"""Connections to the keepers of the other nodes: one per pair, the higher node calls the lower.

All sockets live on one thread, which only calls back; files (secret, addresses) are read on another
one, because a shared file system may hang.  Only node 0 of a job is called by all.
So a keeper's work in each turn grows with its peers, not with the nodes of the job.

Messages to an absent node wait in a queue.  The oldest is dropped first, because the protocol
repeats everything.  A node that was there and cannot be reached for the grace time is reported
lost, once; when it is back, messages flow again.
"""

import contextlib
import errno
import ipaddress
import queue
import random
import resource
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
LOST_S = 0.5
"""A node whose connection has ended so long ago counts as lost where its launcher is silent too."""
HANDSHAKE_S = 5.0
SILENCE_S = 3
"""A connection whose other end does not acknowledge anything for this long is broken."""
MAX_STRANGERS = 512
"""Connections that have not proven themselves; more wait in the backlog."""
BACKLOG = 4096
"""Callers that the kernel keeps for us: a restart brings all nodes at once."""
OWN_DESCRIPTORS = 128
"""Descriptors that a keeper needs beside its connections, with room."""
DEAF_S = 1.0
"""Pause before the next accept when no descriptor is left."""
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
        """The framer of `send`, on the thread that calls it."""
        self._secret = b""
        self._incarnation: p.Incarnation | None = None
        self._nodes: frozenset[int] = frozenset()
        self._lowest = 0
        """The node whose keeper coordinates."""
        self._host = ""
        self._listener: socket.socket | None = None
        self._peers: dict[int, _Peer] = {}
        """Nodes with a connection, a queue, or a call to come; other nodes of the job have no
        entry."""
        self._callees: set[int] = set()
        """Nodes that may have to be called."""
        self._gone: set[int] = set()
        """Nodes that were there, and are not."""
        self._lines: set[_Line] = set()
        self._strangers: set[_Line] = set()
        """Lines whose other end has not proven itself."""
        self._listening = False
        self._deaf_until_s = 0.0
        self._said_full = False
        """Whether the log has reported that no descriptor is left."""
        self._standing: Standing = "busy"
        self._refused_s = 0.0
        self._closing_s: float | None = None
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
        """Tell the other nodes whether this node may still need them."""
        self._post(lambda: self._stand(standing))

    @property
    def needed(self) -> bool:
        """A keeper elsewhere may still need this one."""
        return any(peer.needs_us for peer in list(self._peers.values()))

    @property
    def connected(self) -> tuple[int, ...]:
        """Nodes whose keepers are connected."""
        return tuple(sorted(node for node, peer in list(self._peers.items()) if peer.here))

    @property
    def lost(self) -> tuple[int, ...]:
        """Nodes that were connected, and have not come again for `LOST_S`."""
        by_s = time.monotonic() - LOST_S
        every = list(self._peers.items())
        return tuple(
            sorted(n for n, peer in every if peer.gone_s is not None and peer.gone_s <= by_s)
        )

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
        """Send the queues of connected nodes, send farewell, end."""
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
        self._selector.register(self._wake_read, selectors.EVENT_READ, self._drain_wakeups)
        while not self._has_ended():
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

    def _drain_wakeups(self, _: int) -> None:
        with contextlib.suppress(BlockingIOError):
            self._wake_read.recv(4096)

    def _has_ended(self) -> bool:
        """All nodes have read our farewell and closed, or the time for it is over."""
        if self._closing_s is None:
            return False
        return not self._lines or time.monotonic() > self._closing_s + FAREWELL_S

    def _tick(self, now: float) -> None:
        for line in [one for one in self._strangers if now > one.began_s + HANDSHAKE_S]:
            self._end(line, f"no handshake within {HANDSHAKE_S:.0f} s")
        for node in sorted(self._gone):
            peer = self._peers[node]
            if peer.gone_s is not None and now >= peer.gone_s + self._grace_s:
                self._gone.discard(node)
                peer.told = True
                self._log(f"node {node} cannot be reached for {self._grace_s:.0f} s")
                self._lost(node)
        for node in sorted(self._callees):
            peer = self._peers[node]
            if self._should_call(peer, now):
                self._look_up(peer)
            elif node != self._lowest and not peer.queue:
                self._callees.discard(node)
        self._heed(now)

    # ------------------------------------------------------------------ who takes part

    def _expect(self, incarnation: p.Incarnation, nodes: frozenset[int], host: str) -> None:
        if (incarnation, nodes, host) == (self._incarnation, self._nodes, self._host):
            return
        self._incarnation, self._nodes, self._lowest = incarnation, nodes, min(nodes)
        for node in [node for node in self._peers if node not in nodes]:
            self._forget(self._peers.pop(node))
        if self._lowest != self._node:
            self._peers.setdefault(self._lowest, _Peer(node=self._lowest))
        self._callees.clear()
        for peer in self._peers.values():
            self._start_over(peer)
        if self._listener is None or host != self._host:
            self._listen(host)
        self._host = host
        self._files.put(self._prepare)

    def _start_over(self, peer: _Peer) -> None:
        """Whom we call may have moved: its address must be of this incarnation."""
        peer.moved = peer.node < self._node
        peer.standing, peer.told, peer.gone_s = "busy", False, None
        peer.pause_s, peer.retry_s = FIRST_PAUSE_S, 0.0
        self._gone.discard(peer.node)
        self._may_call(peer)

    def _may_call(self, peer: _Peer) -> None:
        """It is looked at in each turn, until there is nothing to call it for."""
        if peer.node < self._node:
            self._callees.add(peer.node)

    def _forget(self, peer: _Peer) -> None:
        self._gone.discard(peer.node)
        self._callees.discard(peer.node)
        if peer.line is not None:
            self._drop(peer.line)

    def _listen(self, host: str) -> None:
        if self._listener is not None:
            self._listen_no_more()
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
            listener.listen(BACKLOG)
        except (OSError, ValueError) as error:
            self._trouble(f"cannot listen on {host}: {error}")
            return
        self._listener = listener
        self._heed(time.monotonic())
        self._log(f"listening for other keepers on {host} port {self.port}")

    def _prepare(self) -> None:
        """On the thread of the files: the secret first, then our address."""
        secret = self._secret or open_secret(self._checkpoints)
        self._post(lambda: self._trust(secret))

    def _trust(self, secret: bytes) -> None:
        self._secret = secret
        self._heed(time.monotonic())
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
        wanted = peer.node == self._lowest or bool(peer.queue)
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
        # All nodes of a job lose one connection at one moment: they do not call again at one.
        peer.retry_s = time.monotonic() + peer.pause_s * random.uniform(0.5, 1.5)
        peer.pause_s = min(LONGEST_PAUSE_S, 2 * peer.pause_s)
        if reason != peer.complaint:
            peer.complaint = reason
            self._log(f"no connection to node {peer.node}: {reason}")

    # ------------------------------------------------------------------ being called

    def _heed(self, now: float) -> None:
        """Listen while a caller can be accepted; until then callers wait in the backlog."""
        room = len(self._strangers) < MAX_STRANGERS and now >= self._deaf_until_s
        wanted = self._listener is not None and bool(self._secret) and room
        if wanted and not self._listening and self._closing_s is None:
            assert self._listener is not None
            self._selector.register(self._listener, selectors.EVENT_READ, self._accept)
            self._listening = True
        elif not wanted:
            self._listen_no_more()

    def _listen_no_more(self) -> None:
        if self._listening and self._listener is not None:
            self._selector.unregister(self._listener)
        self._listening = False

    def _accept(self, _: int) -> None:
        """Everybody who waits: one in each turn would keep a large job waiting for minutes."""
        assert self._listener is not None
        while self._listening and len(self._strangers) < MAX_STRANGERS:
            try:
                sock, where = self._listener.accept()
            except ConnectionAbortedError:
                continue  # gone before we looked
            except OSError as error:
                if error.errno in (errno.EMFILE, errno.ENFILE):
                    self._have_no_descriptor(error)
                return
            sock.setblocking(False)
            self._add(sock, f"{where[0]} port {where[1]}", calling=None)
        self._heed(time.monotonic())

    def _have_no_descriptor(self, error: OSError) -> None:
        """Said once; a listener that stays readable would keep this thread spinning."""
        self._deaf_until_s = time.monotonic() + DEAF_S
        self._listen_no_more()
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        needed = len(self._nodes) + OWN_DESCRIPTORS
        text = (
            f"node {self._node} cannot take connections of more keepers: {error.strerror}; "
            f"{len(self._lines)} of {len(self._nodes) - 1} are connected, {soft} open files are "
            f"allowed (hard limit {hard}); raise the hard limit to at least {needed} "
            "(ulimit -Hn, LimitNOFILE=) where the job starts"
        )
        if not self._said_full:
            self._said_full = True
            self._trouble(text)

    def _add(self, sock: socket.socket, where: str, *, calling: int | None) -> _Line:
        assert self._incarnation is not None
        _keep_alive(sock)
        me = Identity(run_id=self._run_id, node=self._node, incarnation=self._incarnation)
        line = _Line(
            sock=sock, channel=Channel(self._secret, me, to_node=calling), where=where,
            began_s=time.monotonic(), calling=calling, connected=calling is None,
        )  # fmt: skip
        self._lines.add(line)
        self._strangers.add(line)
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
        known = who.node in self._nodes and who.node != self._node
        if not known or (line.calling is None and who.node < self._node):
            raise ProtocolError(f"node {who.node} is not to call here; nodes {sorted(self._nodes)}")
        peer = self._peers.setdefault(who.node, _Peer(node=who.node))
        former = peer.line
        if former is not None and former is not line:
            said = former.channel.peer
            ours = said is not None and said.incarnation == self._incarnation
            if ours and who.incarnation != self._incarnation:
                raise ProtocolError(f"node {who.node} of {who.incarnation} was replaced")
            self._drop(former)
        line.peer, peer.line = peer, line
        self._strangers.discard(line)
        self._gone.discard(peer.node)
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
        self._may_call(peer)
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
        """Queue it last: a node that reads "leaving" has read all earlier messages."""
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
                self._gone.add(peer.node)
                self._log(f"connection to node {peer.node} ended: {reason}")
        elif line.calling is not None:
            called = self._peers.get(line.calling)
            if called is not None:
                self._pause(called, f"{line.where}: {reason}")
        elif time.monotonic() > self._refused_s + 1 / REFUSALS_PER_S:
            self._refused_s = time.monotonic()
            self._log(f"refused a connection from {line.where}: {reason}")

    def _drop(self, line: _Line) -> None:
        """Close; a frame that was not sent whole is sent again on the next connection."""
        self._lines.discard(line)
        self._strangers.discard(line)
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(line.sock)
        line.sock.close()
        called = None if line.calling is None else self._peers.get(line.calling)
        for peer in (line.peer, called):
            if peer is not None and peer.line is line:
                peer.line = None
                self._may_call(peer)
        if line.peer is not None and line.flying and line.from_queue:
            line.peer.queue.appendleft(line.flying)
            line.peer.queued += len(line.flying)

    def _close(self) -> None:
        self._closing_s = time.monotonic()
        self._listen_no_more()
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
