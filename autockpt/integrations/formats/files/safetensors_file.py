"""safetensors files, written and read tensor by tensor; the format is small, no library is needed.

Tied tensors are stored once: `__metadata__` maps each other name to the stored one, as
`safetensors.torch.save_model` does, and `load_model` understands it.  Dtypes that not every reader
knows are stored as in our images: `view:<name>` in the metadata gives the true one.
"""

import json
import math
import os
from collections.abc import Callable, Mapping
from typing import Any, BinaryIO

import torch

from autockpt import new_files
from autockpt.executors.image.container import MAX_DIMENSIONS
from autockpt.executors.image.dtypes import dtype_name, stored_form, true_dtype
from autockpt.executors.image.layout.boxes import Box
from autockpt.executors.image.layout.plan import ELEMENT_BYTES, NATURAL_DTYPE
from autockpt.integrations.formats.tree.lazy_tree import LazyTensor, bytes_of
from autockpt.values.errors import ConfigError, CorruptCheckpointError
from autockpt.values.record import parse_json

MAX_HEADER_BYTES = 100 * 2**20
"""The library's own limit."""
FOREIGN_DTYPES = {
    "F8_E4M3FNUZ": "float8_e4m3fnuz", "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "F8_E8M0": "float8_e8m0fnu",
}  # fmt: skip
"""Names of newer writers; we read them and do not write them."""
_ALIGNMENT = 8


def write_file(
    path: str,
    tensors: Mapping[str, LazyTensor],
    metadata: Mapping[str, str],
    tell: Callable[[int], None],
) -> None:
    """One durable file; `tell` gets the bytes of each tensor that was written."""
    stored, ties = untied(tensors)
    order = sorted(stored, key=lambda name: -_element_bytes(stored[name]))
    with open(path, "xb", opener=new_files.readable) as file:
        file.write(_header(stored, order, {"format": "pt", **metadata, **ties}))
        for name in order:
            _write(file, stored[name].read())
            tell(stored[name].nbytes)
        file.flush()
        os.fsync(file.fileno())


def untied(
    tensors: Mapping[str, LazyTensor],
) -> tuple[dict[str, LazyTensor], dict[str, str]]:
    """(tensors to store, other name -> stored name)."""
    first: dict[int, str] = {}
    ties = {}
    for name, tensor in tensors.items():
        if id(tensor) in first:
            ties[name] = first[id(tensor)]
        else:
            first[id(tensor)] = name
    return {name: tensors[name] for name in tensors if name not in ties}, ties


def _element_bytes(tensor: LazyTensor) -> int:
    return ELEMENT_BYTES[stored_form(tensor.dtype, tensor.shape)[0]]


def _header(stored: Mapping[str, LazyTensor], order: list[str], metadata: dict[str, str]) -> bytes:
    """Length and JSON; the data begins where a tensor of any dtype may stand."""
    rows: dict[str, Any] = {}
    offset = 0
    for name in order:
        tensor = stored[name]
        kind, shape = stored_form(tensor.dtype, tensor.shape)
        if NATURAL_DTYPE[kind] != dtype_name(tensor.dtype):
            metadata[f"view:{name}"] = dtype_name(tensor.dtype)
        stop = offset + tensor.nbytes
        rows[name] = {"dtype": kind, "shape": list(shape), "data_offsets": [offset, stop]}
        offset = stop
    if "__metadata__" in rows:
        raise ConfigError("a tensor is called '__metadata__', which safetensors reserves")
    text = json.dumps({"__metadata__": metadata, **rows}, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    if len(text) > MAX_HEADER_BYTES:
        raise ConfigError(f"a header of {len(text)} bytes is more than safetensors readers take")
    return len(text).to_bytes(8, "little") + text


def _write(file: BinaryIO, tensor: torch.Tensor) -> None:
    if tensor.numel():
        file.write(bytes_of(tensor.contiguous().view(-1).view(torch.uint8)))


def read_file(path: str) -> tuple[dict[str, LazyTensor], dict[str, str]]:
    """(tensors by name, ties among them; metadata).  Raises CorruptCheckpointError, ConfigError."""
    try:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            length = int.from_bytes(file.read(8), "little")
            if not 2 <= length <= min(size - 8, MAX_HEADER_BYTES):
                raise ValueError(f"a header of {length} bytes in a file of {size}")
            rows = parse_json(file.read(length))
        metadata = rows.pop("__metadata__", {})
        if not all(isinstance(value, str) for value in metadata.values()):
            raise ValueError("metadata must be strings")
        found = {
            name: _lazy(path, name, row, metadata, 8 + length, size) for name, row in rows.items()
        }
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CorruptCheckpointError(f"{path}: no sound safetensors file: {error!r:.200}") from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
    return found, metadata


def _lazy(
    path: str, name: str, row: dict[str, Any], metadata: dict[str, str], base: int, size: int
) -> LazyTensor:
    start, stop = row["data_offsets"]
    shape = row["shape"]
    kind = FOREIGN_DTYPES.get(row["dtype"]) or NATURAL_DTYPE[row["dtype"]]
    true_name = metadata.get(f"view:{name}", kind)
    for number in (start, stop, *shape):
        if type(number) is not int or not 0 <= number <= 2**62:
            raise ValueError(f"{name}: offsets and sizes must be integers of at least 0")
    if not start <= stop <= size - base or len(shape) > MAX_DIMENSIONS:
        raise ValueError(f"{name}: does not fit the file")
    if true_name in ("complex128", "complex32") and kind != true_name:
        shape = shape[:-1]
    dtype = true_dtype(true_name)
    if dtype.itemsize * math.prod(shape) != stop - start:
        raise ValueError(f"{name}: {stop - start} bytes cannot be {shape} {true_name}")
    return LazyTensor(
        name=name,
        dtype=dtype,
        shape=tuple(shape),
        part=lambda box: _part(path, base + start, dtype, tuple(shape), box),
    )


def _part(
    path: str, offset: int, dtype: torch.dtype, shape: tuple[int, ...], box: Box
) -> torch.Tensor:
    """A box of a tensor at `offset`; whole rows are read, because they stand together."""
    if not shape or not box.count:
        return _read(path, offset, dtype, box.shape)
    row = dtype.itemsize * math.prod(shape[1:])
    rows = Box(offset=(box.offset[0], *[0] * (len(shape) - 1)), shape=(box.shape[0], *shape[1:]))
    found = _read(path, offset + row * box.offset[0], dtype, rows.shape)
    return found if box == rows else found[box.slices_in(rows)]


def _read(path: str, offset: int, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    nbytes = dtype.itemsize * math.prod(shape)
    raw = torch.empty(nbytes, dtype=torch.uint8, device="cpu")
    try:
        with open(path, "rb") as file:
            file.seek(offset)
            got = file.readinto(bytes_of(raw))
    except OSError as error:
        raise CorruptCheckpointError(f"{path}: cannot be read: {error.strerror}") from error
    if got != nbytes:
        raise CorruptCheckpointError(f"{path}: ends {nbytes - (got or 0)} bytes too early")
    return raw.view(dtype).view(shape)


def tied_names(tensors: Mapping[str, Any], metadata: Mapping[str, str]) -> dict[str, str]:
    """Other name -> stored name, as the metadata of a file gives them."""
    return {
        name: kept for name, kept in metadata.items() if kept in tensors and name not in tensors
    }
