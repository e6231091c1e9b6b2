"""Files of `torch.save`, read with `weights_only=True` and nothing else.

Our files hold only types that such a reader takes: tensors, numbers, texts, lists, dicts and the
like.  numpy's scalars and arrays become numbers and tensors.  The only module that calls torch.save
and torch.load: the test of the walls makes an exception for it.
"""

import io
import os
import re
from typing import Any

import numpy as np
import torch

from autockpt import new_files
from autockpt.integrations.formats.tree.lazy_tree import Tree, in_memory, transformed
from autockpt.values.errors import ConfigError, CorruptCheckpointError, StorageError

_PLAIN = (bool, int, float, str, bytes, complex, type(None), torch.Size, torch.dtype, torch.device)


def write_file(path: str, state: Any) -> None:
    """One durable file of a state of real tensors."""
    with open(path, "xb", opener=new_files.readable) as file:
        try:
            torch.save(transformed(state, plain), file)
        except RuntimeError as error:  # torch's zip writer hides the reason of a failed write
            raise StorageError(f"{path}: torch.save failed: {error!s:.200}") from error
        file.flush()
        os.fsync(file.fileno())


def plain(leaf: Any) -> Any:
    """A value that `weights_only=True` reads.  Raises ConfigError for one that has no such form."""
    if isinstance(leaf, torch.Tensor):
        return leaf
    if isinstance(leaf, np.generic):
        return leaf.item()
    if isinstance(leaf, np.ndarray):
        return torch.from_numpy(leaf.copy())
    if isinstance(leaf, set | frozenset):
        return set(leaf)
    if isinstance(leaf, dict | list | tuple) and not leaf:
        return leaf
    if type(leaf) in _PLAIN:
        return leaf
    raise ConfigError(f"a {type(leaf).__qualname__} cannot be written to a file of torch.save")


def packed(value: Any) -> io.BytesIO:
    """A value of ours as torch.save writes it."""
    buffer = io.BytesIO()
    torch.save(transformed(value, plain), buffer)
    buffer.seek(0)
    return buffer


def unpacked(data: bytes, where: str) -> Any:
    """Return the contents of a file of torch.save.

    Raises CorruptCheckpointError for damage and for foreign classes.
    """
    return _load(io.BytesIO(data), where)


def read_file(path: str) -> Tree:
    """A file of torch.save as a tree; nothing but named tensors is a model.

    Raises CorruptCheckpointError for damage and for classes that only an unsafe reader would load.
    """
    try:
        with _Bounded(io.FileIO(path)) as file:
            state = _load(file, path)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
    lazies: dict[Any, Any] = {}

    def lazy(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        if leaf.layout != torch.strided or leaf.is_quantized or leaf.is_meta:
            raise ConfigError(f"{path}: holds a {leaf.layout} {leaf.dtype} tensor; make it dense")
        key = (leaf.data_ptr(), leaf.shape, leaf.stride(), leaf.dtype) if leaf.numel() else id(leaf)
        return lazies.setdefault(key, in_memory(leaf))

    tree = transformed(state, lazy)
    if not isinstance(tree, dict):
        raise ConfigError(f"{path}: holds a {type(tree).__qualname__}, expected a dict of tensors")
    bare = tree and all(isinstance(value, torch.Tensor) for value in state.values())
    return {"model": tree} if bare else tree


class _Bounded(io.BufferedReader):
    """A file that makes no buffer for more bytes than it has, however many a pickle asks for."""

    def read(self, size: int | None = -1, /) -> bytes:
        """As of any file."""
        left = os.fstat(self.fileno()).st_size - self.tell()
        return super().read(size if size is not None and 0 <= size < left else max(left, 0))


def _load(file: Any, where: str) -> Any:
    try:
        return torch.load(file, map_location="cpu", weights_only=True)
    except (OSError, MemoryError, Warning):  # a Warning: under -W error
        raise
    except Exception as error:  # whatever a hostile file makes of torch's reader
        reason = str(error).strip()
        if classes := re.findall(r"GLOBAL ([\w.]+) was not an allowed global", reason):
            raise CorruptCheckpointError(
                f"{where}: holds an object of {classes[0]:.100}, and autockpt reads no class from "
                "a file, because that runs code"
            ) from None
        first = f"{type(error).__name__}: {reason}".partition("\n")[0]
        raise CorruptCheckpointError(
            f"{where}: torch.load(weights_only=True) refuses it: {first:.300}"
        ) from None
