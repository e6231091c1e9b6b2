"""An image that is written from its first byte to its last, one chunk of it in memory."""

from autockpt.executors.image.container import HEAD_BYTES, chunk_digest
from autockpt.executors.image.layout.plan import Layout
from autockpt.executors.linux.memory import PAGE_BYTES, Arena
from autockpt.executors.storage.places.images import create_image


class ImageStream:
    """An image that is written from its first byte to its last, chunk by chunk."""

    def __init__(self, path: str, layout: Layout, chunk_bytes: int) -> None:
        self._file = create_image(
            path, image_bytes=layout.image_bytes, encoded=False, header_bytes=0, direct=True
        )
        self._image_bytes = layout.image_bytes
        self._buffer = Arena.anonymous(chunk_bytes)
        self._chunk = self._buffer.view[:chunk_bytes]
        self._at = 0
        self._digests: list[str] = []
        head = layout.boundary_end
        self.head_bytes = head if head <= min(HEAD_BYTES, chunk_bytes) else 0
        """0: too large for a digest of its own."""
        self._head_digest = ""

    def put(self, offset: int, data: memoryview) -> None:
        """Bytes at a place that is not behind what was written already."""
        self.skip_to(offset)
        self.append(data)

    def skip_to(self, offset: int) -> None:
        """Zeros up to a place."""
        while self._at < offset:
            self.append(memoryview(bytes(min(offset - self._at, PAGE_BYTES))))

    def append(self, data: memoryview) -> None:
        """The next bytes."""
        size = len(self._chunk)
        while data:
            place = self._at % size
            part = data[: size - place]
            self._chunk[place : place + len(part)] = part
            self._at += len(part)
            data = data[len(part) :]
            if self._at % size == 0:
                self._flush(size)

    def _flush(self, count: int) -> None:
        done = self._chunk[:count]
        if not self._digests and self.head_bytes:
            self._head_digest = chunk_digest(done[: self.head_bytes])
        self._file.write_at(len(self._digests) * len(self._chunk), done)
        self._digests.append(chunk_digest(done))

    def finish(self) -> tuple[tuple[str, ...], str]:
        """(digests of the chunks, of the head); the file is durable."""
        self.skip_to(self._image_bytes)
        if self._at % len(self._chunk):
            self._flush(self._at % len(self._chunk))
        self._file.finish(self._image_bytes)
        self._close()
        return tuple(self._digests), self._head_digest

    def discard(self) -> None:
        """Nothing of it is left."""
        self._file.discard()
        self._close()

    def _close(self) -> None:
        self._chunk.release()
        self._buffer.close()
