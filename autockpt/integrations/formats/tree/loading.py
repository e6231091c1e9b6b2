"""Any checkpoint that we can read, as a tree: ours, safetensors, torch.save, DCP."""

import contextlib
import json
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

from autockpt.executors.state import state_tree
from autockpt.integrations.dcp import directory
from autockpt.integrations.formats.convert.export import STATE
from autockpt.integrations.formats.files import safetensors_file, torch_file
from autockpt.integrations.formats.tree.checkpoint_tree import GenerationTree, arrays_of
from autockpt.integrations.formats.tree.foreign_forms import read_beside, read_deepspeed
from autockpt.integrations.formats.tree.lazy_tree import LazyTensor, Tree
from autockpt.integrations.places import (
    WEIGHTS,
    deepspeed_weights,
    find_place,
    foreign_kind,
    foreign_within,
    generation_folder,
    is_ours,
    names_one,
    read_beside_run,
)
from autockpt.values.errors import ConfigError, CorruptCheckpointError
from autockpt.values.record import parse_json

T = TypeVar("T")
_MAX_INDEX_BYTES = 2**28


@dataclass(frozen=True, slots=True)
class Source:
    """A checkpoint, open."""

    tree: Tree
    lossy: str = ""
    """The loss before it was written, in words; "": none that we know of."""
    models: frozenset[str] = frozenset()
    """The models as in `GenerationTree.models`, for a generation of ours."""
    known_nan: frozenset[str] | None = None
    """The names as in `GenerationTree.known_nan`; None: not known."""
    left_out: tuple[str, ...] = ()
    """Files beside it that were not read, with their contents in words."""


@contextlib.contextmanager
def opened(
    path: str, *, generation: str | None = None, rank: int | None = None, whole: bool = False
) -> Iterator[Source]:
    """A checkpoint; its tensors can be read until the block ends.

    `whole`: of a directory of weights also the files of optimizer, scheduler and step beside them,
    which are read into memory.  Raises ConfigError if it is no checkpoint, CorruptCheckpointError
    for damage.
    """
    if "://" not in path and not os.path.exists(path):
        raise ConfigError(f"{path}: no such file or directory")
    if _is_ours(path):
        with _opened_generation(generation_folder(path, generation), rank) as ours:
            yield ours
        return
    if generation is not None or rank is not None:
        raise ConfigError(f"{path}: is no run of autockpt, and only those have generations, ranks")
    yield _directory(path, whole=whole) if os.path.isdir(path) else Source(_file(path))


def _is_ours(path: str) -> bool:
    """A URL that names no store is ours, too: the refusal says so."""
    return "://" in path or (os.path.isdir(path) and is_ours(path))


@contextlib.contextmanager
def _opened_generation(folder: str, rank: int | None) -> Iterator[Source]:
    """A checkpoint of ours, in a directory or in an object store."""
    source = GenerationTree(folder, rank=rank)
    try:
        yield Source(source.tree, source.lossy, source.models, source.known_nan)
    finally:
        source.close()


def read_from(
    path: str,
    read: Callable[[Source], T],
    *,
    generation: str | None = None,
    rank: int | None = None,
    whole: bool = False,
) -> T:
    """Read a checkpoint to its end; see `opened`.

    Where the newest of a run is meant and the run deletes it meanwhile, `read` begins again with
    the next newest.  Raises NoCheckpointError for a named one that is deleted.
    """

    def read_folder(folder: str) -> T:
        with _opened_generation(folder, rank) as source:
            return read(source)

    if not _is_ours(path):
        with opened(path, generation=generation, rank=rank, whole=whole) as source:
            return read(source)
    named = names_one(path, generation)
    return read_beside_run(lambda: generation_folder(path, generation), read_folder, named=named)


def _directory(path: str, *, whole: bool) -> Source:
    if os.path.exists(os.path.join(path, directory.METADATA)):
        return Source(directory.read_directory(path))
    weights = _weights(path)
    if weights is not None:
        beside, left_out = read_beside(path, torch_file.read_file) if whole else ({}, [])
        return Source({"model": weights, **beside, **_state(path)}, left_out=tuple(left_out))
    kind = foreign_kind(path)
    if "DeepSpeed" in kind and (folder := deepspeed_weights(path)):
        tree, left_out = read_deepspeed(folder, torch_file.read_file)
        if not whole:
            return Source({"model": tree.get("module")})
        return Source(tree, left_out=tuple(left_out))
    if kind:
        find_place(path)  # says what it is, and that it is not read
    raise ConfigError(
        f"{path}: neither a run or checkpoint of autockpt, nor a directory of safetensors "
        "(model.safetensors, or its index) or of torch.distributed.checkpoint (.metadata)"
        f"{foreign_within(path)}"
    )


def _weights(folder: str) -> dict[str, LazyTensor] | None:
    """Of the first file in WEIGHTS that is there: an index goes before a single file."""
    for name in WEIGHTS:
        path = os.path.join(folder, name)
        if os.path.exists(path):
            return _indexed(path) if name.endswith(".json") else _named(path)
    return None


def _file(path: str) -> Tree:
    if path.endswith(".safetensors"):
        return {"model": _named(path)}
    if path.endswith(".safetensors.index.json"):
        return {"model": _indexed(path)}
    return torch_file.read_file(path)


def _named(path: str) -> dict[str, LazyTensor]:
    """The tensors of one file under all of their names."""
    if path.endswith(".bin"):
        tree = torch_file.read_file(path)
        return {n: t for n, t in tree.get("model", tree).items() if isinstance(t, LazyTensor)}
    tensors, metadata = safetensors_file.read_file(path)
    ties = safetensors_file.tied_names(tensors, metadata)
    return tensors | {name: tensors[kept] for name, kept in ties.items()}


def _indexed(path: str) -> dict[str, LazyTensor]:
    """The tensors of all files that an index names.  Raises CorruptCheckpointError."""
    folder = os.path.dirname(path)
    try:
        if os.path.getsize(path) > _MAX_INDEX_BYTES:
            raise ValueError(f"more than {_MAX_INDEX_BYTES} bytes")
        with open(path, "rb") as file:
            places = parse_json(file.read())["weight_map"]
        files = sorted(set(places.values()))
        strange = [name for name in files if "/" in name or name.startswith(".") or "\0" in name]
        if strange:
            raise ValueError(f"{strange[0]!r:.80} is no plain file name")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CorruptCheckpointError(f"{path}: no sound index: {error!r:.200}") from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
    shards = {name: _named(os.path.join(folder, name)) for name in files}
    missing = [name for name, file in places.items() if name not in shards[file]]
    if missing:
        raise CorruptCheckpointError(f"{path}: {missing[0]!r:.100} is not in {places[missing[0]]}")
    found = {name: shards[file][name] for name, file in places.items()}
    ties = {n: t for shard in shards.values() for n, t in shard.items() if n not in found}
    kept = {id(tensor) for tensor in found.values()}
    return found | {name: tensor for name, tensor in ties.items() if id(tensor) in kept}


def _state(folder: str) -> Tree:
    """Return the state that `autockpt convert --include-optimizer` put beside the model."""
    path = os.path.join(folder, STATE)
    if not os.path.exists(path):
        return {}
    tensors, metadata = safetensors_file.read_file(path)
    try:
        skeleton = json.loads(metadata.get("autockpt.tree", "null"))
    except (ValueError, RecursionError) as error:
        raise CorruptCheckpointError(f"{path}: its tree is malformed: {error!r:.200}") from None
    ties = safetensors_file.tied_names(tensors, metadata)
    lazies: dict[str, Any] = tensors | {name: tensors[kept] for name, kept in ties.items()}
    lazies |= arrays_of(skeleton, lazies)
    tree = state_tree.decode(skeleton, lazies)
    if not isinstance(tree, dict):
        raise CorruptCheckpointError(f"{path}: was not written by autockpt")
    return tree
