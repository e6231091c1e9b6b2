"""One transfer: its streams, its threads, its one ending."""

import threading
import time
from collections.abc import Callable

from autockpt.executors.network.transfer.events import (
    Direction,
    Fault,
    Fetched,
    Served,
    TransferFailed,
)
from autockpt.executors.network.transfer.lease import Lease, Revoked
from autockpt.executors.network.transfer.source import ImageSource
from autockpt.executors.network.transfer.stream import NotCarried, RefusedByPeer, Silent, Stream
from autockpt.values.errors import CorruptCheckpointError, ProtocolError

End = Fetched | Served | TransferFailed

_FAULTS: tuple[tuple[type[BaseException] | tuple[type[BaseException], ...], Fault], ...] = (
    (Revoked, "aborted"),
    (RefusedByPeer, "refused"),
    (Silent, "silent"),
    (CorruptCheckpointError, "corrupt"),
    (ProtocolError, "protocol"),
    ((OSError, EOFError, NotCarried), "broken"),
)


class Transfer:
    """The owner's handle of a transfer; `abort` may be called from any thread but its own."""

    def __init__(
        self,
        node: int,
        direction: Direction,
        *,
        deadline_s: float,
        ended: Callable[["Transfer", End], None],
    ) -> None:
        self.node = node
        """At the other end."""
        self.direction: Direction = direction
        self.lease = Lease(self._shut)
        """The lease of the memory at this end."""
        self.began_s = time.monotonic()
        self.until_s = self.began_s + deadline_s
        self.done = threading.Event()
        """Its last event was handed to the owner."""
        self.outcome: End | None = None
        """Set by the thread with which all went well."""
        self._ended = ended
        self._lock = threading.Lock()
        self._streams: list[Stream] = []
        self._threads = 0
        self._over = False
        self._fault: tuple[Fault, str] | None = None
        self._source: ImageSource | None = None

    # ------------------------------------------------------------------ for the owner

    def abort(self, reason: str) -> None:
        """Ends it.  When this returns, its memory at this end is neither read nor written.

        Bytes in the kernel's queues are thrown away with the connection.  Should a page still be on
        its way to a wire, the other end has lost the connection or finds a wrong digest.
        """
        self._note("aborted", reason)
        self.lease.revoke(reason)

    @property
    def seconds(self) -> float:
        """Since it began."""
        return time.monotonic() - self.began_s

    # ------------------------------------------------------------------ for its threads

    def enter(self) -> None:
        """A thread begins to work for it.  Raises Revoked when the last one has ended."""
        with self._lock:
            if self._over:
                raise Revoked("the transfer is over")
            self._threads += 1

    def hold(self, source: ImageSource) -> None:
        """It sends from `source` until it ends.  Raises Revoked."""
        source.attach(self.lease)
        self._source = source

    def adopt(self, stream: Stream) -> None:
        """A stream belongs to it from now on.  Raises Revoked."""
        stream.until_s = self.until_s
        with self._lock:
            if self._fault is None:
                self._streams.append(stream)
                return
        raise Revoked(self._fault[1])

    def fail(self, error: BaseException) -> None:
        """A thread of it cannot go on, so no other one shall; the first reason stays."""
        if self.lease.reason is not None:  # broken because its owner wanted it
            self._note("aborted", self.lease.reason)
        reason = str(error) or type(error).__name__
        fault: Fault = next((name for kind, name in _FAULTS if isinstance(error, kind)), "internal")
        if fault == "internal":
            reason = f"{type(error).__name__}: {reason}"
        self._note(fault, reason)
        self.lease.end(reason)

    def leave(self) -> None:
        """A thread has ended; the last one ends the transfer."""
        with self._lock:
            self._threads -= 1
            if self._threads:
                return
            self._over = True
            streams, self._streams = self._streams, []
            event = self._last_event()
        for stream in streams:
            stream.close(reset=isinstance(event, TransferFailed))
        if self._source is not None:
            self._source.detach(self.lease)
        try:
            self._ended(self, event)
        finally:
            self.done.set()

    def _last_event(self) -> End:
        fault, reason = self._fault or ("internal", "ended without an outcome")
        if self._fault is None and self.outcome is not None:
            return self.outcome
        return TransferFailed(node=self.node, direction=self.direction, fault=fault, reason=reason)

    def _note(self, fault: Fault, reason: str) -> None:
        with self._lock:
            if self._fault is None and self.outcome is None:
                self._fault = (fault, reason)

    def _shut(self) -> None:
        with self._lock:
            streams = list(self._streams)
        for stream in streams:
            stream.shut()
