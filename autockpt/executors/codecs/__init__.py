"""Chunk codecs: each chunk is a frame that decodes alone; the raw length is authoritative."""

from typing import Protocol

from autockpt.values.errors import ConfigError


class Codec(Protocol):
    """Encodes and decodes one chunk; called from several threads at once, without the GIL held.

    `decode(encode(x), len(x))` is x for every x.  `decode` never produces more than `raw_bytes`
    bytes, whatever the frame claims, and raises CorruptCheckpointError when it cannot produce
    exactly that many.
    """

    name: str

    def encode(self, raw: memoryview) -> bytes:
        """The frame of a chunk."""

    def decode(self, frame: memoryview | bytes, raw_bytes: int) -> bytes:
        """The chunk of a frame."""


def codec(name: str) -> Codec:
    """The codec of a name.  Raises ConfigError listing the known ones."""
    from autockpt.executors.codecs.none import NoneCodec
    from autockpt.executors.codecs.zstd import ZstdCodec

    known: dict[str, type[Codec]] = {"none": NoneCodec, "zstd": ZstdCodec}
    if name not in known:
        raise ConfigError(f"unknown codec {name!r}; known: {', '.join(known)}")
    return known[name]()
