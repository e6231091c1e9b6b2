"""Chunk codecs: each chunk is a frame that decodes alone; the raw length is authoritative."""

from autockpt.executors.image.codecs.interface import Codec
from autockpt.values.errors import ConfigError


def codec(name: str) -> Codec:
    """The codec of a name.  Raises ConfigError listing the known ones."""
    from autockpt.executors.image.codecs.none import NoneCodec
    from autockpt.executors.image.codecs.planes import PlanesCodec
    from autockpt.executors.image.codecs.zstd import ZstdCodec

    known: dict[str, type[Codec]] = {"none": NoneCodec, "planes": PlanesCodec, "zstd": ZstdCodec}
    if name not in known:
        raise ConfigError(f"unknown codec {name!r}; known: {', '.join(known)}")
    return known[name]()
