"""Every codec of `codecs/` keeps the codec contract."""

import pkgutil

import pytest

import autockpt.executors.image.codecs as room
from autockpt.executors.image.codecs import codec
from autockpt.executors.image.codecs.none import NoneCodec
from autockpt.executors.image.codecs.planes import PlanesCodec
from autockpt.executors.image.codecs.zstd import ZstdCodec
from autockpt.values.errors import ConfigError
from tests.contracts.codec_contract import CodecContract, structured


class TestNone(CodecContract):
    """Bytes as they are."""

    make = NoneCodec


class TestPlanes(CodecContract):
    """Planes of bytes; without runs one plane."""

    make = PlanesCodec


class TestZstd(CodecContract):
    """One zstd frame per chunk."""

    make = ZstdCodec


def test_every_codec_in_the_folder_is_known_by_its_file_name() -> None:
    """A new file must be registered and get its own subclass above; lossy ones are archives'."""
    names = {module.name for module in pkgutil.iter_modules(room.__path__)} - {"interface", "lossy"}
    assert {codec(name).name for name in names} == names == {"none", "planes", "zstd"}


def test_an_unknown_codec_lists_the_known_ones() -> None:
    """A checkpoint of a newer version says what is missing."""
    with pytest.raises(ConfigError, match="unknown codec 'lzma'; known: none, planes, zstd"):
        codec("lzma")


def test_moments_shrink() -> None:
    """It would be for nothing otherwise."""
    raw = memoryview(structured("moments", 2**20))
    assert len(ZstdCodec().encode(raw)) < 0.97 * len(raw)
