"""The keepers' handshake on a transfer connection, within one deadline for all of it."""

import struct
import time

from autockpt.executors.network.handshake import MAX_GREETING_BYTES, Channel, Identity
from autockpt.executors.network.transfer.stream import Silent, Stream, TlsStream
from autockpt.values.errors import ProtocolError

HANDSHAKE_S = 5.0
_LENGTH = struct.Struct("!I")


def greet(stream: Stream, channel: Channel) -> Identity:
    """Return the proven identity of the other end.

    Raises ProtocolError, Silent, EOFError, OSError.  Reads frame by frame, so that what follows the
    handshake stays in the socket.
    """
    before_s = stream.until_s
    stream.until_s = min(before_s, time.monotonic() + HANDSHAKE_S)
    try:
        return _greet(stream, channel)
    except Silent:
        raise Silent(f"no handshake within {HANDSHAKE_S:g} s") from None
    finally:
        stream.until_s = before_s


def _greet(stream: Stream, channel: Channel) -> Identity:
    if isinstance(stream, TlsStream):
        stream.shake_hands()
    _flush(stream, channel)
    while channel.peer is None:
        head = bytearray(_LENGTH.size)
        stream.read(memoryview(head))
        (length,) = _LENGTH.unpack(head)
        if length > MAX_GREETING_BYTES:
            raise ProtocolError(f"a greeting of {length} bytes; at most {MAX_GREETING_BYTES}")
        body = bytearray(length)
        stream.read(memoryview(body))
        channel.feed(bytes(head + body))
        _flush(stream, channel)
    return channel.peer


def _flush(stream: Stream, channel: Channel) -> None:
    while channel.outbox:
        stream.write(channel.outbox.pop(0))
