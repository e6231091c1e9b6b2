"""The sending half of a transfer: chunks as they become available, from the slot's own pages."""

import threading
import time
from collections.abc import Iterator, Sequence

from autockpt.executors.gate import Gate
from autockpt.executors.transfer.frames import Span
from autockpt.executors.transfer.lease import Lease
from autockpt.executors.transfer.source import ImageSource
from autockpt.executors.transfer.stream import Silent, Stream


class Cursor:
    """Hands out chunk numbers, each once, to several streams."""

    def __init__(self, spans: Sequence[Span]) -> None:
        self._numbers = (number for span in spans for number in range(span.start, span.stop))
        self._lock = threading.Lock()

    def __iter__(self) -> Iterator[int]:
        """The numbers that no other stream took."""
        while True:
            with self._lock:
                number = next(self._numbers, None)
            if number is None:
                return
            yield number


def send_chunks(
    stream: Stream, source: ImageSource, cursor: Cursor, lease: Lease, gate: Gate
) -> tuple[int, float]:
    """(bytes sent, seconds waited for the snapshot and the gate) of one stream.

    Raises Revoked when the slot is needed, Silent and OSError of the connection.
    """
    sent, held_s = 0, 0.0
    for number in cursor:
        began_s = time.monotonic()
        digest = bytes.fromhex(_await_chunk(stream, source, number, lease))
        start, stop = source.subject.chunk_range(number)
        gate.wait(stop - start)
        held_s += time.monotonic() - began_s
        with lease.use():
            stream.send_chunk(number, digest, source.fd, source.image, start, stop)
        sent += stop - start
    return sent, held_s


def _await_chunk(stream: Stream, source: ImageSource, number: int, lease: Lease) -> str:
    """Digest of the chunk once it is there; the other end is told that we live."""
    while not (digest := source.wait_chunk(number, stream.silence_s / 3, lease)):
        _hold(stream)
    return digest


def send_index(stream: Stream, source: ImageSource, lease: Lease) -> str:
    """Sends the index once the image is sealed; its root.  Raises as `send_chunks`."""
    while (index := source.wait_index(stream.silence_s / 3, lease)) is None:
        _hold(stream)
    stream.tell(index)
    return index.root


def _hold(stream: Stream) -> None:
    if time.monotonic() > stream.until_s:
        raise Silent("the time for the transfer is over, and the snapshot is not")
    stream.hold()
