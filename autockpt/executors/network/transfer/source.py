"""The lending end of an image: a sealed slot that transfers read until its owner needs it."""

import threading

from autockpt.executors.image.container import ImageIndex
from autockpt.executors.network.transfer.frames import Subject, What
from autockpt.executors.network.transfer.lease import Lease, Revoked
from autockpt.values.errors import ProtocolError


class ImageSource:
    """One sealed image in the memory behind `fd`, for any number of transfers at once.

    `fd` belongs to the owner of the slot and must stay open until `revoke` returned.
    """

    def __init__(self, fd: int, image: memoryview, index: ImageIndex, what: What = "image") -> None:
        """`image`: the bytes of the image; they begin at offset 0 of `fd`."""
        if len(image) != index.image_bytes:
            raise ProtocolError(f"{len(image)} bytes for an image of {index.image_bytes}")
        self.fd, self.image, self.index = fd, image, index
        self.subject = Subject.of(index, what)
        self._revoked: str | None = None
        self._leases: set[Lease] = set()
        self._lock = threading.Lock()

    def revoke(self, reason: str) -> None:
        """The slot will be overwritten: returns when no transfer reads it, and none will."""
        with self._lock:
            self._revoked = self._revoked or reason
            leases = list(self._leases)
        for lease in leases:
            lease.revoke(reason)

    def await_chunk(self, number: int) -> None:
        """Returns when a chunk is in the memory: of a sealed image each is."""

    def attach(self, lease: Lease) -> None:
        """`revoke` is to revoke this lease, too.  Raises Revoked."""
        with self._lock:
            if self._revoked is not None:
                raise Revoked(self._revoked)
            self._leases.add(lease)

    def detach(self, lease: Lease) -> None:
        """The transfer is over."""
        with self._lock:
            self._leases.discard(lease)
