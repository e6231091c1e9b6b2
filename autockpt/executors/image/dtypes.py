"""torch dtypes <-> the names of safetensors; others are stored under another name.

One unknown dtype name makes a whole safetensors file unreadable, so autockpt invents none.
complex128 is stored as F64 with a last dimension of 2, complex32 as F16 likewise.  The header's
metadata has the true name.
"""

import math

import torch

from autockpt.executors.image.container import ImageHeader
from autockpt.executors.image.layout.plan import NATURAL_DTYPE
from autockpt.values.errors import ConfigError, CorruptCheckpointError

_STORED: dict[str, str] = {
    "float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16", "int64": "I64",
    "int32": "I32", "int16": "I16", "int8": "I8", "uint8": "U8", "uint16": "U16",
    "uint32": "U32", "uint64": "U64", "bool": "BOOL", "complex64": "C64",
    "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2",
}  # fmt: skip
_PAIRS = {"complex128": "F64", "complex32": "F16"}
_BYTES = {"float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu", "float4_e2m1fn_x2"}


def dtype_name(dtype: torch.dtype) -> str:
    """torch's own name, e.g. "float32"."""
    return str(dtype).removeprefix("torch.")


def stored_form(dtype: torch.dtype, shape: tuple[int, ...]) -> tuple[str, tuple[int, ...]]:
    """(safetensors dtype, stored shape) of a tensor; the bytes are the same.

    Raises ConfigError for packed and quantized types.
    """
    name = dtype_name(dtype)
    if name in _STORED:
        return _STORED[name], shape
    if name in _PAIRS:
        return _PAIRS[name], (*shape, 2)
    if name in _BYTES:
        return "U8", shape
    raise ConfigError(f"dtype {name} cannot be saved; convert the tensor in state_dict()")


def true_shape(name: str, stored: tuple[int, ...]) -> tuple[int, ...]:
    """Shape under torch's own name of the dtype (complex numbers are stored as pairs)."""
    return stored[:-1] if name in _PAIRS else stored


def true_form(header: ImageHeader, name: str) -> tuple[torch.dtype, tuple[int, ...]]:
    """Return the true dtype and shape of a tensor of an image.

    Raises CorruptCheckpointError when its bytes cannot be that: a header may lie, and bytes are
    copied by the image's lengths into memory of this size.
    """
    place = header.tensors[name]
    true_name = header.true_dtypes.get(name, NATURAL_DTYPE[place.dtype])
    dtype, shape = true_dtype(true_name), true_shape(true_name, place.shape)
    if dtype.itemsize * math.prod(shape) != place.stop - place.start:
        raise CorruptCheckpointError(
            f"{name}: {place.stop - place.start} bytes cannot be {tuple(shape)} {dtype}"
        )
    return dtype, tuple(shape)


def true_dtype(name: str) -> torch.dtype:
    """The dtype of torch's own name.  Raises ConfigError when this torch lacks it."""
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ConfigError(f"this torch has no dtype {name!r}; use the version that wrote it")
    return dtype
