"""A generation of ours as a tree, in the shape of everybody's state dicts.

    {"model": {name: tensor},                      as model.state_dict() names them
     "optimizer": {"state": {name: {...}}, "param_groups": [...]},   as get_optimizer_state_dict
     "scheduler": ..., other attached objects by their names, "step": 400}

The ranks of a data-parallel job hold the same tensors, so one image is the state; that they do is
checked by digests, and where those differ by bytes.  What belongs to one rank (random states, the
place in the data) is left out.
"""

import os
from collections.abc import Mapping
from typing import Any

import torch

from autockpt.executors import statetree
from autockpt.executors.directory import CommitFile
from autockpt.integrations.image_reader import ImageTensors, commit_of
from autockpt.integrations.lazy import LazyTensor, Tree, materialised
from autockpt.values.errors import ConfigError, CorruptCheckpointError

LEFT_OUT = ("random states of each rank", "position of each rank in the data")
_MODEL = "model."


class GenerationTree:
    """One generation, open: `tree` reads from it until `close`."""

    def __init__(self, folder: str, *, rank: int | None = None) -> None:
        """`rank`: whose image; None: rank 0's, once all ranks were seen to hold the same.

        Raises ConfigError for a folder without a COMMIT, an unknown rank or ranks that differ.
        """
        commit = commit_of(folder)
        if not 0 <= (rank or 0) < len(commit.records):
            raise ConfigError(f"{folder}: has ranks 0 to {len(commit.records) - 1}, not {rank}")
        self.name = os.path.basename(os.path.abspath(folder))
        self.step = commit.step
        self._image = ImageTensors(folder, commit, rank or 0)
        try:
            if rank is None:
                require_replicas(folder, commit, self._image)
            self.tree = state_tree(self._image, step=commit.step)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Lets the file go."""
        self._image.close()


def state_tree(image: ImageTensors, *, step: int) -> Tree:
    """The state of one rank.  Raises CorruptCheckpointError for a skeleton that does not fit."""
    skeleton, lazies = image.skeleton, image.lazy_tensors()
    tensors: dict[str, Any] = {**lazies, **arrays_of(skeleton, lazies)}
    try:
        owned = _owned_by_others(skeleton)
        tree: Tree = {"step": step, "model": {}}
        for name, tensor in lazies.items():
            if name not in owned and not name.startswith(tuple(_prefixes(skeleton))):
                tree["model"][model_name(name)] = tensor
        for path, value in skeleton["modules"].items():
            tree["model"][model_name(path)] = statetree.decode(value, tensors)
        for prefix, saved in skeleton["optimizers"].items():
            tree[prefix] = _optimizer(prefix, saved, tensors)
        for name, value in skeleton["others"].items():
            tree[name] = statetree.decode(value, tensors)
    except (KeyError, ValueError, TypeError, IndexError, AttributeError) as error:
        raise CorruptCheckpointError(f"saved state is malformed: {error!r:.200}") from None
    return tree


def model_name(name: str) -> str:
    """As the module itself names it; of several modules each keeps the name it was attached by."""
    return name.removeprefix(_MODEL).lstrip(".") if name.startswith(_MODEL) else name


def _prefixes(skeleton: dict[str, Any]) -> list[str]:
    """Beginnings of names that no module has."""
    return [f"{prefix}." for prefix in (*skeleton["optimizers"], "rng", "progress")]


def _owned_by_others(skeleton: dict[str, Any]) -> set[str]:
    """Tensors that an attached object or a module's extra state refers to."""
    parts = [*skeleton["others"].values(), *skeleton["modules"].values()]
    return {name for part in parts for name in statetree.tensor_names(part)}


def arrays_of(skeleton: Any, lazies: Mapping[str, LazyTensor]) -> dict[str, Any]:
    """The tensors that stand for numpy arrays, read: `decode` must look at them."""
    if isinstance(skeleton, list):
        items = skeleton
    elif isinstance(skeleton, dict):
        if set(skeleton) == {"$array"}:
            names = statetree.tensor_names(skeleton["$array"])
            return {name: lazies[name].read() for name in names if name in lazies}
        items = list(skeleton.values())
    else:
        return {}
    return {name: tensor for item in items for name, tensor in arrays_of(item, lazies).items()}


def _optimizer(prefix: str, saved: dict[str, Any], tensors: dict[str, Any]) -> Tree:
    """One optimizer by parameter names."""
    groups, names = [], []
    for values in saved["groups"]:
        names.append(split_names(values["params"], set(tensors)))
        settings = statetree.decode(values["values"], tensors)
        groups.append({"params": [model_name(name) for name in names[-1]], **settings})
    state: Tree = {}
    for keys, places in saved["regular"].items():
        marks = [mark.rsplit(":", 1)[0] for mark in keys.split(" ")]
        for g, i in places:
            name = names[g][i]
            state[model_name(name)] = {key: tensors[f"{prefix}.{name}.{key}"] for key in marks}
    for name, values in saved["irregular"].items():
        state[model_name(name)] = statetree.decode(values, tensors)
    ordered = [model_name(name) for group in names for name in group]
    return {"state": {n: state[n] for n in ordered if n in state}, "param_groups": groups}


def split_names(text: str, known: set[str]) -> list[str]:
    """The parameters of a group, one per line; a name may hold line breaks itself."""
    names, part = [], ""
    for line in text.split("\n") if text else []:
        part = f"{part}\n{line}" if part else line
        if part in known:
            names.append(part)
            part = ""
    if part:
        raise CorruptCheckpointError(f"parameter {part!r:.100} is in a group and not in the image")
    return names


def require_replicas(folder: str, commit: CommitFile, first: ImageTensors) -> None:
    """Raises ConfigError unless all ranks hold the parameters and optimizer state of rank 0."""
    for rank in range(1, len(commit.records)):
        other = ImageTensors(folder, commit, rank)
        try:
            differs = _first_difference(first, other)
        finally:
            other.close()
        if differs:
            raise ConfigError(
                f"{folder}: rank {rank} does not hold the same {differs} as rank 0; sharded or "
                "independent state cannot be put together yet; --rank N takes that of one rank"
            )


def _first_difference(first: ImageTensors, other: ImageTensors) -> str:
    """A tensor that is not the same on both, "" when there is none.

    Chunks with equal digests are equal; of the others only the bytes of tensors count, because
    random states, gaps and running statistics of a rank's own batches stand among them.
    """
    if first.layout_digest != other.layout_digest:
        return "tensors"
    mine, theirs = first.index, other.index
    if mine.chunk_bytes == theirs.chunk_bytes and mine.digests == theirs.digests:
        return ""
    theirs_by_name = other.lazy_tensors()
    for name, tensor in _replicated(first).items():
        place = first.header.tensors[name]
        chunks = range(place.start // mine.chunk_bytes, -(-place.stop // mine.chunk_bytes))
        same = other.header.tensors.get(name) == place and mine.chunk_bytes == theirs.chunk_bytes
        if same and all(mine.digests[chunk] == theirs.digests[chunk] for chunk in chunks):
            continue
        if not _same_bytes(tensor, theirs_by_name[name]):
            return name
    return ""


def _replicated(image: ImageTensors) -> dict[str, LazyTensor]:
    """What data parallelism keeps equal: trained parameters and their optimizer's state."""
    skeleton, lazies = image.skeleton, image.lazy_tensors()
    prefixes = tuple(f"{prefix}." for prefix in skeleton["optimizers"])
    trained = {
        name
        for saved in skeleton["optimizers"].values()
        for values in saved["groups"]
        for name in split_names(values["params"], set(lazies))
    }
    return {
        name: tensor
        for name, tensor in lazies.items()
        if name in image.header.tensors and (name in trained or name.startswith(prefixes))
    }


def _same_bytes(a: LazyTensor, b: LazyTensor) -> bool:
    if (a.dtype, a.shape) != (b.dtype, b.shape):
        return False
    x, y = materialised([a, b])
    return not a.nbytes or torch.equal(
        x.reshape(-1).view(torch.uint8), y.reshape(-1).view(torch.uint8)
    )
