"""The receiving half of a transfer: chunks of several streams into place, each verified and once.

What is kept about an image that is coming in is a table of one digest a chunk; the bytes go from
the socket into the owner's memory.  The digest is taken by the stream's own thread, without the
interpreter's lock, while the chunk is still in cache; meanwhile the kernel and the other streams
receive on.
"""

import threading
import time
from collections.abc import Callable, Sequence

from autockpt.executors.image import ImageIndex, chunk_digest
from autockpt.executors.transfer.destination import Destination
from autockpt.executors.transfer.frames import CHUNK, HOLD, Header, Span, Subject
from autockpt.executors.transfer.lease import Lease
from autockpt.executors.transfer.stream import Silent, Stream
from autockpt.values.errors import CorruptCheckpointError, GuardError, ProtocolError

_EXPECTED, _COMING = "", "-"
"""States of a chunk before its digest stands in the table; absent: it is not to come."""


class Reception:
    """Chunks `spans` of `subject` on their way into `destination`."""

    def __init__(
        self,
        subject: Subject,
        spans: Sequence[Span],
        destination: Destination,
        *,
        lease: Lease,
        index: ImageIndex | None = None,
        received: Callable[[int, int], None],
    ) -> None:
        """`index`: known beforehand when fetching; `received(number, nbytes)` after each chunk."""
        self.subject, self.index = subject, index
        self._destination, self._lease, self._received = destination, lease, received
        self._table = {n: _EXPECTED for span in spans for n in range(span.start, span.stop)}
        self._missing = len(self._table)
        self._news = threading.Condition()
        self.nbytes = 0

    def take(self, stream: Stream, header: Header) -> None:
        """Receives the chunk of a header.

        Raises ProtocolError for one that is not expected, CorruptCheckpointError for wrong bytes,
        and what the connection raises.
        """
        number, nbytes = header.number, header.length
        self._claim(number, nbytes)
        with self._lease.use():
            chunk = self._destination.place(number, nbytes)
            try:
                if len(chunk) != nbytes:
                    raise GuardError(f"{len(chunk)} bytes of memory for chunk {number} of {nbytes}")
                stream.read(chunk)
                digest = chunk_digest(chunk)
                self._check(number, digest, header.digest.hex())
            except BaseException:
                self._destination.drop(number, chunk)
                raise
            self._destination.keep(number, chunk)
        with self._news:
            self._table[number] = digest
            self._missing -= 1
            self.nbytes += nbytes
            self._news.notify_all()
        self._received(number, nbytes)

    def _claim(self, number: int, nbytes: int) -> None:
        with self._news:
            state = self._table.get(number)
            if state is None:
                raise ProtocolError(f"chunk {number} was not announced")
            if state != _EXPECTED:
                raise ProtocolError(f"chunk {number} came twice")
            start, stop = self.subject.chunk_range(number)
            if nbytes != stop - start:
                raise ProtocolError(f"chunk {number} of {nbytes} bytes, expected {stop - start}")
            self._table[number] = _COMING

    def _check(self, number: int, got: str, said: str) -> None:
        expected = said if self.index is None else self.index.digests[number]
        if not got == said == expected:
            raise CorruptCheckpointError(
                f"chunk {number} of generation {self.subject.generation}: expected digest "
                f"{expected}, got {got} from a sender who says {said}"
            )

    def require(self, spans: Sequence[Span]) -> None:
        """Raises ProtocolError unless all of these chunks have come."""
        missing = sum(
            len(self._table[number]) <= 1
            for span in spans
            for number in range(span.start, span.stop)
        )
        if missing:
            raise ProtocolError(f"{missing} of the chunks that were asked for did not come")

    def finish(self, index: ImageIndex, *, within_s: float) -> None:
        """Everything that was sent is `index`'s: waits for what other streams still bring, seals.

        Raises ProtocolError for the index of another image, CorruptCheckpointError for other
        chunks, Silent when some do not come.
        """
        if Subject.of(index, self.subject.what) != self.subject:
            raise ProtocolError(
                f"announced generation {self.subject.generation} of rank {self.subject.rank}, "
                f"sealed as generation {index.generation} of rank {index.rank}"
            )
        with self._news:
            there = self._news.wait_for(
                lambda: not self._missing or self._lease.reason is not None, within_s
            )
            if not there:
                raise Silent(f"{self._missing} of {len(self._table)} chunks did not come")
        for number, digest in self._table.items():
            if digest != index.digests[number]:
                raise CorruptCheckpointError(
                    f"chunk {number} of generation {index.generation}: its index says "
                    f"{index.digests[number]}, what came has {digest or 'not come'}"
                )
        with self._lease.use():
            self._destination.seal(index)


def take_chunks(stream: Stream, reception: Reception, *, until_s: float) -> Header:
    """Receives chunks until something else comes: its header."""
    while True:
        header = stream.read_header()
        if header.kind == CHUNK:
            reception.take(stream, header)
        elif header.kind != HOLD:
            return header
        elif time.monotonic() > until_s:
            raise Silent("the time for the transfer is over, and the other end only says it lives")
