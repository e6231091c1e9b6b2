"""The other end of a transfer by hand: says what it likes over a real socket."""

import socket
import struct
import time
from dataclasses import replace
from typing import Any

from autockpt.executors.network.handshake import Channel, Identity
from autockpt.executors.network.transfer.frames import (
    CHUNK,
    HEADER_BYTES,
    Header,
    Span,
    Text,
    Want,
    pack_text,
    read_header,
    read_text,
)
from tests.unit.executors.network.transfer.ends import (
    HOST,
    PATIENCE_S,
    SECRET,
    End,
    Image,
    identity,
)


class Stranger:
    """A connection to or from a pool."""

    def __init__(self, sock: socket.socket) -> None:
        sock.settimeout(PATIENCE_S)
        self.sock = sock

    @classmethod
    def calls(
        cls, end: End, *, secret: bytes = SECRET, me: Identity | None = None, **channel: Any
    ) -> "Stranger":
        """Connects and shakes hands, as far as the other end lets it."""
        one = cls(socket.create_connection(end.address, timeout=PATIENCE_S))
        purpose = {"purpose": "transfer", **channel}
        one.greet(Channel(secret, me or identity(0), to_node=end.node, **purpose))
        return one

    def greet(self, channel: Channel) -> None:
        """The handshake."""
        while True:
            while channel.outbox:
                self.say(channel.outbox.pop(0))
            if channel.peer is not None:
                return
            head = self.read(4)
            if len(head) < 4:
                return
            channel.feed(head + self.read(*struct.unpack("!I", head)))

    def say(self, data: bytes) -> bool:
        """As much as the other end takes; whether that was all."""
        try:
            self.sock.sendall(data)
        except OSError:
            return False
        return True

    def tell(self, text: Text) -> None:
        """A text."""
        self.say(pack_text(text))

    def chunk(self, image: Image, number: int, **other: Any) -> bytes:
        """A chunk of an image, or nearly."""
        start, stop = image.subject.chunk_range(number)
        header = Header(kind=CHUNK, number=number, length=stop - start)
        return replace(header, **other).pack() + bytes(image.view[start:stop])

    def want(self, image: Image, **other: Any) -> None:
        """Wants an image, or nearly."""
        want = Want(
            generation=image.subject.generation, rank=image.subject.rank, root=image.root,
            chunks=(Span(start=0, stop=image.subject.chunks),),
        )  # fmt: skip
        self.tell(replace(want, **other))

    def read(self, count: int) -> bytes:
        """So many bytes, fewer at the end."""
        data = b""
        while len(data) < count:
            try:
                more = self.sock.recv(count - len(data))
            except OSError:
                break
            if not more:
                break
            data += more
        return data

    def hear(self) -> Any:
        """The next text."""
        header = read_header(self.read(HEADER_BYTES))
        return read_text(self.read(header.length))

    def is_closed(self) -> bool:
        """Reads until the other end closes, whatever it still says."""
        self.sock.settimeout(PATIENCE_S)
        try:
            while self.sock.recv(2**16):
                pass
        except TimeoutError:
            return False
        except OSError:
            return True
        return True

    def trickle(self, data: bytes, pause_s: float) -> float:
        """One byte after the other until nobody takes them; seconds until then."""
        began = time.monotonic()
        for byte in data:
            if not self.say(bytes([byte])):
                break
            time.sleep(pause_s)
        return time.monotonic() - began

    def close(self) -> None:
        """Goes."""
        self.sock.close()


class Trap:
    """A listener that answers one connection of a pool by hand."""

    def __init__(self, node: int = 1) -> None:
        self._server = socket.create_server((HOST, 0))
        self._server.settimeout(PATIENCE_S)
        self.node = node

    @property
    def address(self) -> tuple[str, int]:
        """Where it listens."""
        return HOST, int(self._server.getsockname()[1])

    def taken(self) -> Stranger:
        """The next connection, before a word is said."""
        sock, _ = self._server.accept()
        return Stranger(sock)

    def answer(self) -> Stranger:
        """The next connection, greeted."""
        one = self.taken()
        one.greet(Channel(SECRET, identity(self.node), to_node=None, purpose="transfer"))
        return one

    def close(self) -> None:
        """Goes."""
        self._server.close()
