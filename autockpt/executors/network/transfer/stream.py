"""One connection of a transfer: whole pieces within deadlines, in place, and ended from outside.

Every wait has a deadline, so a peer that hangs or trickles is dropped after `silence_s` for a
header and as long for a chunk.  Slower than chunk / silence_s counts as hanging.  Plain connections
send with `os.sendfile`: the kernel sends the slot's own pages, and no byte passes through Python.
MSG_ZEROCOPY would do the same, with completions to wait for.  They receive with one system call a
chunk (MSG_WAITALL), because polling for some bytes took a tenth more CPU time.  TLS has to encrypt,
so it costs a copy and polls.
"""

import array
import contextlib
import errno
import fcntl
import math
import os
import select
import socket
import ssl
import struct
import termios
import time
from dataclasses import dataclass
from typing import Any

from autockpt.executors.network.transfer.frames import (
    CHUNK,
    HEADER_BYTES,
    MAX_TEXT_BYTES,
    TEXT,
    Header,
    Refused,
    Text,
    pack_text,
    read_header,
    read_text,
)
from autockpt.values.errors import AutockptError, ProtocolError

TLS_PIECE_BYTES = 256 * 2**10
LAST_WORDS_S = 1.0
DRAIN_S = 100e-6
"""Between two looks at what is not acknowledged: the time of some KB on a fast link."""
LONGEST_WAIT_S = 3600.0
_TIMEVAL = struct.Struct("@ll")


class Silent(AutockptError):
    """The other end missed a deadline."""


class RefusedByPeer(AutockptError):
    """The other end said no; the message is its reason."""


class NotCarried(AutockptError):
    """The image neither came nor left the other way that was asked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tls:
    """Contexts for both roles; the owner chooses certificates and their meaning."""

    called: ssl.SSLContext
    caller: ssl.SSLContext


class Stream:
    """A connected socket; used by one thread, except `shut`."""

    def __init__(self, sock: socket.socket, *, silence_s: float) -> None:
        with contextlib.suppress(OSError):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._sock = sock
        self._prepare()
        self._header = bytearray(HEADER_BYTES)
        self.silence_s = silence_s
        self.until_s = math.inf
        """When the whole transfer has to be over, CLOCK_MONOTONIC."""

    # ------------------------------------------------------------------ frames

    def read_header(self) -> Header:
        """The next header.  Raises Silent, EOFError, OSError, ProtocolError."""
        self.read(memoryview(self._header))
        return read_header(self._header)

    def hear(self, *, limit: int = MAX_TEXT_BYTES) -> Any:
        """The next text.  Raises RefusedByPeer, and all that `read_header` raises."""
        return self.read_text(self.read_header(), limit=limit)

    def read_text(self, header: Header, *, limit: int = MAX_TEXT_BYTES) -> Any:
        """The text of a header.  Raises as `hear`."""
        if header.kind != TEXT:
            raise ProtocolError(f"a frame of kind {header.kind} where a text was to come")
        if header.length > limit:
            raise ProtocolError(f"a text of {header.length} bytes; at most {limit} are allowed")
        body = bytearray(header.length)
        self.read(memoryview(body))
        text = read_text(bytes(body))
        if isinstance(text, Refused):
            raise RefusedByPeer(_printable(text.reason))
        return text

    def tell(self, text: Text) -> None:
        """Sends a text."""
        self.write(pack_text(text))

    def send_chunk(self, number: int, fd: int, image: memoryview, start: int, stop: int) -> None:
        """Sends image[start:stop], which stands at `start` in `fd`, as chunk `number`."""
        self.begin_chunk(number, stop - start)
        self.send_piece(fd, image, start, stop)

    def begin_chunk(self, number: int, nbytes: int) -> None:
        """Announces chunk `number`, whose bytes follow in pieces."""
        self.write(Header(kind=CHUNK, number=number, length=nbytes).pack(), more=True)

    def send_piece(self, fd: int, image: memoryview, start: int, stop: int) -> None:
        """Sends image[start:stop], which stands at `start` in `fd`."""
        self._send_file(fd, image, start, stop)

    def drain(self) -> None:
        """Waits until the other end has every byte that was sent.  Raises Silent, OSError.

        Queued bytes still use the link.
        """
        deadline, left = self._deadline(), array.array("i", [1])
        ended = select.poll()
        ended.register(self._sock.fileno(), 0)
        while True:
            fcntl.ioctl(self._sock, termios.TIOCOUTQ, left)
            if not left[0]:
                return
            if ended.poll(0):
                raise OSError(errno.ECONNRESET, f"closed with {left[0]} bytes on their way")
            if time.monotonic() > deadline:
                raise Silent(f"{left[0]} bytes were not acknowledged for {self.silence_s:g} s")
            time.sleep(DRAIN_S)

    def refuse(self, reason: str) -> None:
        """Send the reason, if it can be sent at once; never raises."""
        with contextlib.suppress(OSError, ValueError):
            self._send(memoryview(pack_text(Refused(reason=reason[:500]))))

    def heard_refusal(self) -> str:
        """Why the other end ended the connection, "" when it did not say."""
        self.until_s = min(self.until_s, time.monotonic() + LAST_WORDS_S)
        try:
            self.hear()
        except RefusedByPeer as refused:
            return str(refused)
        except (AutockptError, OSError, EOFError):
            pass
        return ""

    def has_news(self) -> bool:
        """The other end has said something, or is gone."""
        poll = select.poll()
        poll.register(self._sock.fileno(), select.POLLIN)
        return bool(poll.poll(0))

    # ------------------------------------------------------------------ bytes

    def read(self, into: memoryview) -> None:
        """Fills `into`.  Raises Silent, EOFError, OSError."""
        deadline = self._deadline()
        done = 0
        while done < len(into):
            count = self._receive(into[done:], deadline)
            if count == 0:
                raise EOFError(f"closed by the other end after {done} of {len(into)} bytes")
            if count is None:
                self._wait(select.POLLIN, deadline, f"{done} of {len(into)} bytes came")
            else:
                done += count

    def write(self, data: bytes | memoryview, *, more: bool = False) -> None:
        """Sends all of `data`; `more`: to be sent with what follows.  Raises Silent, OSError."""
        deadline = self._deadline()
        rest = memoryview(data)
        while rest:
            sent = self._send(rest, socket.MSG_MORE if more else 0)
            if sent is None:
                self._wait(select.POLLOUT, deadline, f"{len(rest)} bytes are not taken")
            else:
                rest = rest[sent:]

    def _prepare(self) -> None:
        """Receiving blocks, with a timeout of the kernel's; sending never does."""
        self._sock.setblocking(True)

    def _send_file(self, fd: int, image: memoryview, start: int, stop: int) -> None:
        deadline = self._deadline()
        self._sock.setblocking(False)  # `sendfile` has no flag for it
        while start < stop:
            try:
                start += os.sendfile(self._sock.fileno(), fd, start, stop - start)
            except BlockingIOError:
                self._wait(select.POLLOUT, deadline, f"{stop - start} bytes are not taken")

    def _receive(self, into: memoryview, deadline: float) -> int | None:
        """Bytes received, 0 at the end, None when there are none now."""
        left_s = min(max(0.001, deadline - time.monotonic()), LONGEST_WAIT_S)
        self._sock.setsockopt(
            socket.SOL_SOCKET, socket.SO_RCVTIMEO, _TIMEVAL.pack(int(left_s), int(left_s % 1 * 1e6))
        )
        try:
            return self._sock.recv_into(into, len(into), socket.MSG_WAITALL)
        except BlockingIOError:
            return None

    def _send(self, data: memoryview, flags: int = 0) -> int | None:
        """Bytes sent, None when none are taken now."""
        try:
            return self._sock.send(data, flags | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return None

    def _deadline(self) -> float:
        return min(time.monotonic() + self.silence_s, self.until_s)

    def _wait(self, event: int, deadline: float, state: str) -> None:
        left_s = deadline - time.monotonic()
        poll = select.poll()
        poll.register(self._sock.fileno(), event)
        if left_s <= 0 or not poll.poll(math.ceil(1000 * left_s)):
            if deadline >= self.until_s:
                raise Silent(f"the time for the transfer is over ({state})")
            raise Silent(f"nothing for {self.silence_s:g} s ({state})")

    # ------------------------------------------------------------------ ends

    def shut(self) -> None:
        """Wake a thread that waits on it, from any thread."""
        with contextlib.suppress(OSError):
            # Not the method of an SSL socket, which would forget that it encrypts.
            socket.socket.shutdown(self._sock, socket.SHUT_RDWR)

    def close(self, *, reset: bool) -> None:
        """`reset`: drop queued bytes, and with them the kernel's hold on the slot."""
        with contextlib.suppress(OSError):
            if reset:
                linger = struct.pack("ii", 1, 0)
                self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        self._sock.close()


class TlsStream(Stream):
    """The same through TLS."""

    def __init__(self, sock: socket.socket, tls: Tls, *, called: bool, silence_s: float) -> None:
        context = tls.called if called else tls.caller
        wrapped = context.wrap_socket(sock, server_side=called, do_handshake_on_connect=False)
        self._tls = wrapped
        super().__init__(wrapped, silence_s=silence_s)

    def _prepare(self) -> None:
        self._tls.setblocking(False)

    def shake_hands(self) -> None:
        """The handshake of TLS.  Raises Silent, OSError."""
        deadline = self._deadline()
        while True:
            try:
                self._tls.do_handshake()
                return
            except ssl.SSLWantReadError:
                self._wait(select.POLLIN, deadline, "TLS handshake")
            except ssl.SSLWantWriteError:
                self._wait(select.POLLOUT, deadline, "TLS handshake")

    def _send_file(self, fd: int, image: memoryview, start: int, stop: int) -> None:
        self.write(image[start:stop])

    def _receive(self, into: memoryview, deadline: float) -> int | None:
        try:
            return self._tls.recv_into(into)
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
            return None
        except ssl.SSLEOFError:
            return 0

    def _send(self, data: memoryview, flags: int = 0) -> int | None:
        try:
            return self._tls.send(data[:TLS_PIECE_BYTES])
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
            return None


def connect(address: tuple[str, int], *, host: str, within_s: float) -> socket.socket:
    """A socket connected to a numeric address, from `host` ("": any).  Raises Silent, OSError."""
    family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    try:
        sock.setblocking(False)
        if host:
            sock.bind((host, 0))
        code = sock.connect_ex(address)
        if code == errno.EINPROGRESS:
            poll = select.poll()
            poll.register(sock.fileno(), select.POLLOUT)
            if not poll.poll(math.ceil(1000 * within_s)):
                raise Silent(f"{address[0]} port {address[1]}: no answer for {within_s:g} s")
            code = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if code:
            raise OSError(code, f"{address[0]} port {address[1]}: {os.strerror(code)}")
        return sock
    except BaseException:
        sock.close()
        raise


def _printable(text: str) -> str:
    return "".join(c if c.isprintable() else "?" for c in text[:500])
