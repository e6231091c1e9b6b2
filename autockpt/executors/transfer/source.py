"""The sending end of an image: a slot, and which of its chunks are there already.

Whoever digests the chunks of a slot tells an `ImageSource` one by one; transfers wait for the
chunk they need, so an image travels while its snapshot still fills the slot.
"""

import threading
from collections.abc import Callable
from typing import TypeVar

from autockpt.executors.image import ImageIndex
from autockpt.executors.transfer.frames import Subject
from autockpt.executors.transfer.lease import Lease, Revoked
from autockpt.values.errors import ProtocolError

T = TypeVar("T")


class ImageSource:
    """One image in the memory behind `fd`, for any number of transfers at once.

    `fd` belongs to the owner of the slot and must stay open until `revoke` returned.
    """

    def __init__(self, fd: int, image: memoryview, subject: Subject) -> None:
        """`image`: the bytes of the image; they begin at offset 0 of `fd`."""
        if len(image) != subject.image_bytes:
            raise ProtocolError(f"{len(image)} bytes for an image of {subject.image_bytes}")
        self.fd, self.image, self.subject = fd, image, subject
        self._digests = [""] * subject.chunks
        self._index: ImageIndex | None = None
        self._revoked: str | None = None
        self._leases: set[Lease] = set()
        self._news = threading.Condition()

    @classmethod
    def sealed(
        cls, fd: int, image: memoryview, subject: Subject, index: ImageIndex
    ) -> "ImageSource":
        """An image that is whole."""
        source = cls(fd, image, subject)
        source.seal(index)
        return source

    # ------------------------------------------------------------------ for the owner

    def digested(self, number: int, digest: str) -> None:
        """Chunk `number` is in the slot and will not change any more."""
        with self._news:
            self._digests[number] = digest
            self._news.notify_all()

    def seal(self, index: ImageIndex) -> None:
        """Every chunk is there and proven.  Raises ProtocolError for the index of another image."""
        with self._news:
            said = [old in ("", new) for old, new in zip(self._digests, index.digests, strict=True)]
            if Subject.of(index, self.subject.what) != self.subject or not all(said):
                raise ProtocolError(f"generation {index.generation}: sealed as another image")
            self._digests = list(index.digests)
            self._index = index
            self._news.notify_all()

    def revoke(self, reason: str) -> None:
        """The slot will be overwritten: returns when no transfer reads it, and none will."""
        with self._news:
            self._revoked = self._revoked or reason
            self._news.notify_all()
            leases = list(self._leases)
        for lease in leases:
            lease.revoke(reason)

    # ------------------------------------------------------------------ for transfers

    @property
    def index(self) -> ImageIndex | None:
        """Of a sealed image."""
        return self._index

    def attach(self, lease: Lease) -> None:
        """`revoke` is to revoke this lease, too.  Raises Revoked."""
        with self._news:
            self._require_here()
            self._leases.add(lease)

    def detach(self, lease: Lease) -> None:
        """The transfer is over."""
        with self._news:
            self._leases.discard(lease)

    def wait_chunk(self, number: int, timeout_s: float, lease: Lease) -> str:
        """Digest of a chunk once it is there, "" when it is not by then.

        Raises Revoked when the source or the lease of the transfer that waits is revoked.
        """
        return self._wait(lambda: self._digests[number], timeout_s, lease)

    def wait_index(self, timeout_s: float, lease: Lease) -> ImageIndex | None:
        """The index once the image is sealed, None when it is not by then.  Raises as above."""
        return self._wait(lambda: self._index, timeout_s, lease)

    def wake(self) -> None:
        """A lease was revoked: whoever waits looks again."""
        with self._news:
            self._news.notify_all()

    def _wait(self, there: Callable[[], T], timeout_s: float, lease: Lease) -> T:
        with self._news:
            self._news.wait_for(lambda: self._revoked or lease.reason or there(), timeout_s)
            self._require_here()
            if lease.reason is not None:
                raise Revoked(lease.reason)
            return there()

    def _require_here(self) -> None:
        if self._revoked is not None:
            raise Revoked(self._revoked)
