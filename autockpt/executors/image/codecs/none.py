"""The codec that stores bytes as they are."""

from collections.abc import Sequence

from autockpt.executors.image.codecs.interface import Frame
from autockpt.executors.image.layout.runs import Run
from autockpt.values.errors import CorruptCheckpointError


class NoneCodec:
    """Identity; what `none` means in a plan."""

    name = "none"

    def encode(
        self,
        raw: memoryview,
        *,
        runs: Sequence[Run] = (),
        base: memoryview | None = None,
        into: memoryview | None = None,
    ) -> bytes:
        """A copy of the chunk."""
        return bytes(raw)

    def decode(self, frame: Frame, raw_bytes: int, *, base: memoryview | None = None) -> bytes:
        """A copy of the frame.  Raises CorruptCheckpointError for a wrong length."""
        if len(frame) != raw_bytes:
            raise CorruptCheckpointError(f"frame of {len(frame)} bytes, expected {raw_bytes}")
        return bytes(frame)
