"""A generation of ours to the formats of others: safetensors, torch's DCP, one file of torch.save.

Every byte comes out of a chunk that matched its digest.  safetensors and DCP take one tensor after
the other; torch.save wants the whole state in memory.
"""

import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from autockpt import new_files
from autockpt.executors.state import state_tree
from autockpt.integrations.formats.convert.destination import new_export, require_free
from autockpt.integrations.formats.convert.hugging_face import (
    FILES,
    TRAINER_STATE,
    hugging_face_part,
    trainer_state,
)
from autockpt.integrations.formats.files import safetensors_file, torch_file
from autockpt.integrations.formats.tree.checkpoint_tree import LEFT_OUT, GenerationTree
from autockpt.integrations.formats.tree.lazy_tree import (
    LazyTensor,
    Tree,
    in_memory,
    materialised,
    tensors_of,
    transformed,
)
from autockpt.integrations.formats.tree.optimizer_formats import is_optimizer, numbered
from autockpt.values.errors import ConfigError

TARGETS = ("safetensors", "hf", "dcp", "torch")
MAX_SHARD_BYTES = 5 * 10**9
"""Hugging Face's own limit."""

Tell = Callable[[int], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Exported:
    """The result of an export."""

    generation: str
    step: int
    target: str
    path: str
    tensors: int
    bytes: int
    """Bytes of the tensors."""
    left_out: tuple[str, ...]
    """Parts of the generation that are not in it."""
    lossy: str = ""
    """The loss before the generation was written, in words; "": none."""


def export(
    folder: str,
    destination: str,
    target: str,
    *,
    everything: bool = False,
    rank: int | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    force: bool = False,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Exported:
    """Writes the generation in `folder` to `destination`, as a whole or not at all.

    `everything`: with safetensors, more than the model.  `progress` gets the bytes written and
    their total.  Raises ConfigError, GuardError, CorruptCheckpointError or StorageError.
    """
    if target not in TARGETS:
        raise ConfigError(f"no target {target!r}; there are: {', '.join(TARGETS)}")
    require_free(os.path.abspath(destination), force=force)
    source = GenerationTree(folder, rank=rank)
    try:
        tree, left_out = _chosen(source.tree, target, everything=everything)
        if target == "hf":
            tree["trainer_state"] = trainer_state(source.step, source.extra)
        tensors = tensors_of(tree)
        total, done = sum(tensor.nbytes for tensor in tensors), 0

        def tell(nbytes: int) -> None:
            nonlocal done
            done += nbytes
            progress(done, total)

        with new_export(destination, force=force) as path:
            _WRITERS[target](path, tree, max_shard_bytes, tell)
    finally:
        source.close()
    return Exported(
        generation=source.name, step=source.step, target=target, path=destination,
        tensors=len(tensors), bytes=total, left_out=left_out, lossy=source.lossy,
    )  # fmt: skip


def _chosen(tree: Tree, target: str, *, everything: bool) -> tuple[Tree, tuple[str, ...]]:
    """Return the part of the state that the target takes, and the names of the others."""
    if target == "hf":
        return hugging_face_part(tree)
    if target != "safetensors":
        return tree, LEFT_OUT
    extras = [name for name, leaf in tree["model"].items() if not isinstance(leaf, LazyTensor)]
    weights = {name: leaf for name, leaf in tree["model"].items() if name not in extras}
    others = {name: value for name, value in tree.items() if name != "model"}
    left_out = tuple(f"model.{name} (no tensor)" for name in extras)
    if everything:
        return {**others, "model": weights}, (*left_out, *LEFT_OUT)
    left_out += tuple(name for name in others if name != "step")
    return {"model": weights}, (*left_out, *LEFT_OUT)


def _write_safetensors(path: str, tree: Tree, max_shard_bytes: int, tell: Tell) -> None:
    os.mkdir(path, new_files.READABLE_DIRECTORY)
    _write_weights(path, tree, max_shard_bytes, tell)
    rest = {name: value for name, value in tree.items() if name != "model"}
    if rest:
        skeleton, tensors = with_names(rest)
        metadata = {"autockpt.tree": json.dumps(skeleton, separators=(",", ":"))}
        safetensors_file.write_file(f"{path}/{STATE}", tensors, metadata, tell)


def _write_weights(path: str, tree: Tree, max_shard_bytes: int, tell: Tell) -> None:
    shards = _shards(tree["model"], max_shard_bytes)
    names = {}
    for number, shard in enumerate(shards, start=1):
        part = f"-{number:05d}-of-{len(shards):05d}" if len(shards) > 1 else ""
        file = f"model{part}.safetensors"
        safetensors_file.write_file(f"{path}/{file}", shard, {}, tell)
        names.update(dict.fromkeys(safetensors_file.untied(shard)[0], file))
    if len(shards) > 1:
        total = sum(tensor.nbytes for tensor in tensors_of(tree["model"]))
        _write_json(f"{path}/{INDEX}", {"metadata": {"total_size": total}, "weight_map": names})


def _write_hf(path: str, tree: Tree, max_shard_bytes: int, tell: Tell) -> None:
    os.mkdir(path, new_files.READABLE_DIRECTORY)
    _write_weights(path, tree, max_shard_bytes, tell)
    for name in (name for name in FILES if name in tree):
        value = numbered(tree[name]) if is_optimizer(tree[name]) else tree[name]
        torch_file.write_file(f"{path}/{name}.pt", materialised(value, tell=tell))
    _write_json(f"{path}/{TRAINER_STATE}", tree["trainer_state"])


INDEX = "model.safetensors.index.json"
STATE = "state.safetensors"
"""Beside the model: everything else, with the skeleton of its tree in the metadata."""


def _shards(model: dict[str, LazyTensor], limit: int) -> list[dict[str, LazyTensor]]:
    """In order, each at most `limit` bytes if its tensors allow; ties stand together."""
    shards: list[dict[str, LazyTensor]] = [{}]
    home: dict[int, dict[str, LazyTensor]] = {}
    filled = 0
    for name, tensor in model.items():
        if id(tensor) not in home:
            if filled and filled + tensor.nbytes > limit:
                shards.append({})
                filled = 0
            home[id(tensor)] = shards[-1]
            filled += tensor.nbytes
        home[id(tensor)][name] = tensor
    return shards


def with_names(tree: Tree) -> tuple[Any, dict[str, LazyTensor]]:
    """(skeleton as in our images, tensors by the dotted paths that it names)."""
    stands: dict[int, tuple[torch.Tensor, LazyTensor]] = {}

    def stand_in(leaf: Any) -> Any:
        """A tensor that `encode` takes, known by its address."""
        if not isinstance(leaf, LazyTensor):
            return leaf
        stand = torch.zeros(1, dtype=torch.float32, device="cpu")
        stands[stand.data_ptr()] = stand, leaf
        return stand

    found: dict[str, torch.Tensor] = {}
    skeleton = {
        name: state_tree.encode(transformed(value, stand_in), name, found)
        for name, value in tree.items()
    }
    tensors = {}
    for path, tensor in found.items():  # numpy's arrays have no stand-in: they are tensors only now
        known = stands.get(tensor.data_ptr())
        tensors[path] = known[1] if known else in_memory(tensor, path)
    return skeleton, tensors


def _write_json(path: str, body: Any) -> None:
    with open(path, "x", encoding="utf-8", opener=new_files.readable) as file:
        json.dump(body, file, indent=2)
        file.flush()
        os.fsync(file.fileno())


def _write_dcp(path: str, tree: Tree, max_shard_bytes: int, tell: Tell) -> None:
    from autockpt.integrations.dcp.export import write_directory  # seconds of imports

    write_directory(path, tree, max_shard_bytes, tell)


def _write_torch(path: str, tree: Tree, max_shard_bytes: int, tell: Tell) -> None:
    state = {
        name: numbered(value) if is_optimizer(value) else value for name, value in tree.items()
    }
    torch_file.write_file(path, materialised(state, tell=tell))


_WRITERS: dict[str, Callable[[str, Tree, int, Tell], None]] = {
    "safetensors": _write_safetensors,
    "hf": _write_hf,
    "dcp": _write_dcp,
    "torch": _write_torch,
}
