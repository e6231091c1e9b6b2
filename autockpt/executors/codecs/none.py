"""The codec that stores bytes as they are."""

from autockpt.values.errors import CorruptCheckpointError


class NoneCodec:
    """Identity; what `none` means in a plan."""

    name = "none"

    def encode(self, raw: memoryview) -> bytes:
        """A copy of the chunk."""
        return bytes(raw)

    def decode(self, frame: memoryview | bytes, raw_bytes: int) -> bytes:
        """A copy of the frame.  Raises CorruptCheckpointError for a wrong length."""
        if len(frame) != raw_bytes:
            raise CorruptCheckpointError(f"frame of {len(frame)} bytes, expected {raw_bytes}")
        return bytes(frame)
