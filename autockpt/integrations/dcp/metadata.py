"""The `.metadata` of a torch.distributed.checkpoint directory, read without trusting it.

It is a pickle, and unpickling runs what the file says.  Here a name in the file stands for one of a
few classes of our own that only keep their arguments.  Every other name is an error.  The classes
are made anew for each file, because a pickle may set attributes on any class that it names.  The
only module that imports pickle: the test of the walls makes an exception for it.
"""

import io
import pickle
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

import torch

from autockpt.executors.image.container import MAX_DIMENSIONS
from autockpt.values.errors import AutockptError, CorruptCheckpointError

MAX_METADATA_BYTES = 2**28
"""Larger ones exist on thousands of ranks, which this tool does not support."""

_DCP = "torch.distributed.checkpoint"
_RECORDS = {
    f"{_DCP}.metadata": (
        "Metadata", "TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata",
        "TensorProperties", "MetadataIndex", "StorageMeta", "_MEM_FORMAT_ENCODING",
    ),
    f"{_DCP}.filesystem": ("_StorageInfo",),
}  # fmt: skip
"""The classes that torch's writer pickles, by module."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """A part of a tensor in a file."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    start: int
    nbytes: int
    """Bytes of the stored form, a small file of torch.save."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One key: a tensor in chunks, or (dtype None) a value in one."""

    dtype: torch.dtype | None
    shape: tuple[int, ...]
    chunks: tuple[Chunk, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class DcpMetadata:
    """The contents of a directory."""

    entries: dict[str, Entry]
    paths: dict[str, tuple[str | int, ...]]
    """Place of each key in the nested state."""


def read_metadata(path: str) -> DcpMetadata:
    """The metadata in a file.  Raises CorruptCheckpointError for everything torch did not write."""
    try:
        with open(path, "rb") as file:
            data = file.read(MAX_METADATA_BYTES + 1)
        if len(data) > MAX_METADATA_BYTES:
            raise CorruptCheckpointError(f"has more than {MAX_METADATA_BYTES} bytes")
        return _checked(_Unpickler(data).load())
    except AutockptError as error:
        raise CorruptCheckpointError(f"{path}: {error}") from None
    except OSError as error:
        raise CorruptCheckpointError(f"{path}: cannot be read: {error.strerror}") from error
    except (Exception, RecursionError) as error:  # a hostile pickle can raise anything
        raise CorruptCheckpointError(f"{path}: is malformed: {error!r:.200}") from None


class _Unpickler(pickle._Unpickler):
    """Knows the names of torch's writer and no other.

    The one in Python: the one in C allocates by numbers in the file (memo, lengths) unasked.
    """

    def __init__(self, data: bytes) -> None:
        super().__init__(io.BytesIO(data))
        self._known = _stand_ins()

    def find_class(self, module: str, name: str) -> Any:
        """A stand-in, a dtype, or an error."""
        if (module, name) in self._known:
            return self._known[module, name]
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        raise CorruptCheckpointError(
            f"names {module[:80]}.{name[:80]}, which no checkpoint of torch needs; not loaded"
        )

    def persistent_load(self, pid: Any) -> Any:
        """Never used by torch here."""
        raise CorruptCheckpointError("holds a persistent id")


def _stand_ins() -> dict[tuple[str, str], Any]:
    """By module and name: classes and functions that only keep what they are given."""

    class Record:
        kind = ""

        def __init__(self, *args: Any) -> None:
            """A path or a member of an enum, neither of which is looked at."""

        def __setstate__(self, state: Any) -> None:
            self.__dict__.update(state if isinstance(state, dict) else {"state": state})

        def __hash__(self) -> int:
            return hash((self.__dict__.get("fqn"), self.__dict__.get("offset")))

        def __eq__(self, other: object) -> bool:
            return isinstance(other, Record) and self.__dict__ == other.__dict__

    def keep(*args: Any) -> Any:
        return args

    known: dict[tuple[str, str], Any] = {
        (module, name): type(name, (Record,), {"kind": name})
        for module, names in _RECORDS.items()
        for name in names
    }
    for module in ("pathlib", "pathlib._local"):
        known |= {(module, name): type(name, (Record,), {}) for name in _PATHS}
    return known | {
        ("torch", "Size"): tuple,
        ("collections", "OrderedDict"): OrderedDict,
        ("torch.serialization", "_get_layout"): keep,
        ("builtins", "getattr"): keep,  # how some Pythons pickle a member of an enum
    }


_PATHS = ("PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath", "Path")


def _checked(metadata: Any) -> DcpMetadata:
    """Every field that is used later, of the type and range it must have."""
    _require(_kind(metadata) == "Metadata", "is no Metadata")
    described, stored = metadata.state_dict_metadata, metadata.storage_data
    _require(isinstance(described, dict) and isinstance(stored, dict), "lacks its tables")
    places: dict[tuple[str, tuple[int, ...] | None], Any] = {}
    for index, info in stored.items():
        _require(_kind(index) == "MetadataIndex" and _kind(info) == "_StorageInfo", "bad storage")
        offset = index.__dict__.get("offset")
        places[_text(index.fqn), None if offset is None else _sizes(offset)] = info
    entries = {_text(key): _entry(key, value, places) for key, value in described.items()}
    paths = metadata.__dict__.get("planner_data") or {}
    _require(isinstance(paths, dict), "bad planner data")
    return DcpMetadata(
        entries=entries,
        paths={key: _path(paths.get(key, (key,))) for key in entries},
    )


def _entry(key: str, value: Any, places: dict[Any, Any]) -> Entry:
    if _kind(value) == "BytesStorageMetadata":
        return Entry(dtype=None, shape=(), chunks=(_chunk((), (), places[key, None]),))
    _require(_kind(value) == "TensorStorageMetadata", f"{key}: is of no known kind")
    dtype, shape = value.properties.state[0], _sizes(value.size)
    _require(isinstance(dtype, torch.dtype) and bool(value.chunks), f"{key}: has no dtype or bytes")
    chunks = tuple(
        _chunk(_sizes(c.offsets), _sizes(c.sizes), places[key, _sizes(c.offsets)])
        for c in value.chunks
    )
    _require_cover(key, dtype, shape, chunks)
    return Entry(dtype=dtype, shape=shape, chunks=chunks)


def _require_cover(
    key: str, dtype: torch.dtype, shape: tuple[int, ...], chunks: tuple[Chunk, ...]
) -> None:
    """The chunks fill the tensor, and none claims more elements than its stored bytes hold."""
    total = 0
    for chunk in chunks:
        fits = len(chunk.sizes) == len(chunk.offsets) == len(shape) and all(
            offset + size <= whole
            for offset, size, whole in zip(chunk.offsets, chunk.sizes, shape, strict=True)
        )
        count = _product(chunk.sizes)
        _require(fits and count * dtype.itemsize <= chunk.nbytes, f"{key}: a chunk does not fit")
        total += count
    _require(total == _product(shape), f"{key}: its chunks do not fill it")


def _chunk(offsets: tuple[int, ...], sizes: tuple[int, ...], info: Any) -> Chunk:
    fields = info.__dict__
    file = _text(fields["relative_path"])
    plain = file and "/" not in file and not file.startswith(".") and "\0" not in file
    _require(bool(plain), f"{file!r:.80} is no plain file name")
    _require(not fields.get("transform_descriptors"), "its chunks are compressed; load it by torch")
    start, nbytes = _sizes((fields["offset"], fields["length"]))
    return Chunk(offsets=offsets, sizes=sizes, file=file, start=start, nbytes=nbytes)


def _sizes(value: Any) -> tuple[int, ...]:
    sound = isinstance(value, tuple) and len(value) <= MAX_DIMENSIONS
    _require(sound and all(type(n) is int and 0 <= n < 2**62 for n in value), "bad sizes")
    return tuple(value)


def _path(value: Any) -> tuple[str | int, ...]:
    _require(isinstance(value, tuple) and all(type(p) in (str, int) for p in value), "bad path")
    return tuple(value)


def _text(value: Any) -> str:
    _require(type(value) is str, "a name is no text")
    return str(value)


def _kind(value: Any) -> str:
    return str(getattr(type(value), "kind", ""))


def _product(sizes: tuple[int, ...]) -> int:
    count = 1
    for size in sizes:
        count *= size
    return count


def _require(sound: bool, why: str) -> None:
    if not sound:
        raise CorruptCheckpointError(why)
