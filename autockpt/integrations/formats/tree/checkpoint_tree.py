"""A generation of ours as a tree, in the shape of everybody's state dicts.

    {"model": {name: tensor},                      as model.state_dict() names them
     "optimizer": {"state": {name: {...}}, "param_groups": [...]},   as get_optimizer_state_dict
     "scheduler": ..., other attached objects by their names, "step": 400}

It is put together from the images of all ranks: tensors from their parts, optimizers from what each
rank says of its own parameters.  Per-rank state (random states, the place in the data) is left out.
Of buffers and attached objects that several ranks have, the first rank's are taken.  A generation
that `torch.distributed.checkpoint` saved has its original keys.
"""

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from autockpt.executors.image.layout.boxes import whole
from autockpt.executors.restore.plan.saved_optimizer import SavedGroup, SavedOptimizer, add_skeleton
from autockpt.executors.restore.plan.stored import Piece
from autockpt.executors.state import state_tree
from autockpt.executors.storage.directory.records import lossy_mark
from autockpt.integrations.formats.convert.image_reader import Images, commit_of
from autockpt.integrations.formats.tree.lazy_tree import LazyTensor, Tree, nested
from autockpt.integrations.formats.tree.replicas import require_same
from autockpt.values.errors import ConfigError, CorruptCheckpointError

LEFT_OUT = ("random states of each rank", "position of each rank in the data")
_MODEL = "model."


class GenerationTree:
    """One generation, open: `tree` reads from it until `close`."""

    def __init__(self, folder: str, *, rank: int | None = None) -> None:
        """`rank`: only what this rank's image holds, parts in the form in which it holds them.

        Raises ConfigError for a folder without a COMMIT, an unknown rank or ranks that differ.
        """
        commit = commit_of(folder)
        ranks = range(len(commit.records)) if rank is None else (rank,)
        if not 0 <= (rank or 0) < len(commit.records):
            raise ConfigError(f"{folder}: has ranks 0 to {len(commit.records) - 1}, not {rank}")
        self.name = os.path.basename(os.path.abspath(folder))
        self.step = commit.step
        self.lossy = lossy_mark(commit.records)
        """The loss before it was written, in words; "": none."""
        self._images = Images(folder, commit, ranks)
        try:
            if rank is None:
                require_same(self._images, replicated(self._images), folder)
            state = _StateTree(self._images, apart=rank is not None)
            self.tree = state.tree(self.step)
            self.extra = _extra_of(self._images)
            """Counters that an adapter gave with the checkpoint."""
            self.models = state.models
            headers = self._images.headers.values()
            self.known_nan = frozenset(name for header in headers for name in header.known_nan)
            """Stored tensors that held NaN before the training."""
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Lets the files go."""
        self._images.close()


def _extra_of(images: Images) -> dict[str, Any]:
    """Of the first rank that was read."""
    progress = images.skeletons[images.ranks[0]].get("progress") or {}
    try:
        extra = json.loads(progress.get("extra") or "{}")
    except (ValueError, TypeError, RecursionError) as error:
        raise CorruptCheckpointError(f"image: its counters are malformed: {error!r:.200}") from None
    return extra if isinstance(extra, dict) else {}


class _StateTree:
    """The state in the images of one rank or of all."""

    def __init__(self, images: Images, *, apart: bool) -> None:
        """`apart`: of one rank, whose parts of tensors stand for themselves."""
        self._skeletons = [images.skeletons[rank] for rank in images.ranks]
        self._apart = apart
        self._lazies = _lazy_tensors(images, apart=apart)
        self._tensors: dict[str, Any] = dict(self._lazies)
        self.models: frozenset[str] = frozenset()
        """First parts of the names of models that were attached as `modelX`, not below `model.`."""
        for skeleton in self._skeletons:
            self._tensors |= arrays_of(skeleton, self._lazies)

    def tree(self, step: int) -> Tree:
        """All of it.  Raises CorruptCheckpointError for skeletons that do not fit."""
        if any("tree" in skeleton for skeleton in self._skeletons):
            return {"step": step, **self._as_written()}
        tree: Tree = {"step": step, "model": self._parameters_and_buffers()}
        try:
            for path, value in self._first("modules"):
                tree["model"][model_name(path)] = state_tree.decode(value, self._tensors)
            for prefix in self._prefixes():
                tree[prefix] = self._optimizer(prefix)
            for name, value in self._first("others"):
                tree[name] = state_tree.decode(value, self._tensors)
        except (KeyError, ValueError, TypeError, IndexError, AttributeError) as error:
            raise CorruptCheckpointError(f"saved state is malformed: {error!r:.200}") from None
        return tree

    def _as_written(self) -> Tree:
        """Of images that `torch.distributed.checkpoint.save` wrote: by the keys of that state."""
        try:
            leaves = {
                tuple(path): state_tree.decode(value, self._tensors)
                for skeleton in reversed(self._skeletons)
                for path, value in skeleton["tree"]
            }
            return nested(leaves, "saved state")
        except (LookupError, ValueError, TypeError, RecursionError) as error:
            raise CorruptCheckpointError(f"saved state is malformed: {error!r:.200}") from None

    def _first(self, part: str) -> Iterator[tuple[str, Any]]:
        """(name, skeleton) of a part of the state, as the first rank that has it says."""
        seen: set[str] = set()
        for skeleton in self._skeletons:
            for name, value in skeleton[part].items():
                if name not in seen:
                    seen.add(name)
                    yield name, value

    def _prefixes(self) -> list[str]:
        """Names of the optimizers."""
        return list(dict.fromkeys(p for one in self._skeletons for p in one["optimizers"]))

    def _parameters_and_buffers(self) -> Tree:
        """Return tensors that no optimizer, attached object or extra state refers to."""
        parts = [value for part in ("others", "modules") for _, value in self._first(part)]
        owned = {name for part in parts for name in state_tree.tensor_names(part)}
        prefixes = tuple(
            f"{prefix}." for prefix in (*self._prefixes(), "rng", "progress", "state_dict")
        )
        found = {
            name: tensor
            for name, tensor in self._lazies.items()
            if name not in owned and not name.startswith(prefixes)
        }
        self.models = frozenset(name.split(".")[0] for name in found) - {"model"}
        return {model_name(name): tensor for name, tensor in found.items()}

    def _optimizer(self, prefix: str) -> Tree:
        """One optimizer by parameter names."""
        parts = optimizers_of(self._skeletons, prefix)
        groups = _merged(parts)
        state: Tree = {}
        for name in (name for group in groups for name in group.names):
            found = next((p for p in parts if name in p.keys or name in p.irregular), None)
            if found is not None:
                state[model_name(name)] = self._state_of(prefix, name, found)
        return {
            "state": {name: values for name, values in state.items() if values or not self._apart},
            "param_groups": [
                {
                    "params": [model_name(name) for name in group.names],
                    **state_tree.decode(group.values, self._tensors),
                }
                for group in groups
            ],
        }

    def _state_of(self, prefix: str, name: str, part: SavedOptimizer) -> Any:
        """The state of a parameter; one rank apart may have left it to another."""
        needed = list(part.tensors_of(prefix, name))
        if self._apart and not all(tensor in self._tensors for tensor in needed):
            return {}
        if name in part.irregular:
            return state_tree.decode(part.irregular[name], self._tensors)
        keys = [key for key, _ in part.keys[name]]
        return {key: self._tensors[tensor] for key, tensor in zip(keys, needed, strict=True)}


def model_name(name: str) -> str:
    """As the module itself names it; of several modules each keeps the name it was attached by."""
    return name.removeprefix(_MODEL).lstrip(".") if name.startswith(_MODEL) else name


def _lazy_tensors(images: Images, *, apart: bool) -> dict[str, LazyTensor]:
    """All tensors by name, in the order of the images; a second name has the same object."""
    stored, aliases = images.stored, dict[str, str]()
    own: set[str] = set()
    for rank in images.ranks:
        header = images.headers[rank]
        own.update(header.tensors)
        aliases = {**header.aliases, **aliases}
    found = {
        name: images.lazy(name, read_from(stored.pieces(name), apart=apart))
        for name in stored.names()
        if name in own
    }
    return found | {alias: found[name] for alias, name in aliases.items() if alias not in own}


def read_from(pieces: list[Piece], *, apart: bool) -> list[Piece]:
    """The pieces that are one tensor."""
    first = pieces[0]
    if apart:
        return [replace(first, global_shape=first.shape, boxes=(whole(first.shape),))]
    return [first] if first.boxes == (whole(first.global_shape),) else pieces


def arrays_of(skeleton: Any, lazies: Mapping[str, LazyTensor]) -> dict[str, Any]:
    """The tensors that stand for numpy arrays, read: `decode` must look at them."""
    if isinstance(skeleton, list):
        items = skeleton
    elif isinstance(skeleton, dict):
        if set(skeleton) == {"$array"}:
            names = state_tree.tensor_names(skeleton["$array"])
            return {name: lazies[name].read() for name in names if name in lazies}
        items = list(skeleton.values())
    else:
        return {}
    return {name: tensor for item in items for name, tensor in arrays_of(item, lazies).items()}


def optimizers_of(skeletons: Iterable[dict[str, Any]], prefix: str) -> list[SavedOptimizer]:
    """Return each rank's record of an optimizer; ranks that repeat the first one are left out."""
    found: list[SavedOptimizer] = []
    first: Any = None
    for skeleton in skeletons:
        data = skeleton["optimizers"].get(prefix)
        if data is None or data == first:
            continue
        first = data if first is None else first
        found.append(SavedOptimizer())
        add_skeleton(found[-1], data)
    return found


def _merged(parts: list[SavedOptimizer]) -> list[SavedGroup]:
    """The first rank's groups; parameters that only others have join the group set as theirs is."""
    merged: list[SavedGroup] = []
    known: set[str] = set()
    for number, part in enumerate(parts):
        for group in part.groups:
            new = tuple(name for name in group.names if name not in known)
            known.update(new)
            same = next((m for m in merged if m.values == group.values), None) if number else None
            if same is not None:
                same.names += new
            elif new or not number:
                merged.append(SavedGroup(new, group.values))
    return merged


def replicated(images: Images) -> Iterator[str]:
    """Yield names that parallelism keeps equal: trained parameters and their optimizer state."""
    skeletons = [images.skeletons[rank] for rank in images.ranks]
    prefixes = list(dict.fromkeys(prefix for one in skeletons for prefix in one["optimizers"]))
    parts = [part for prefix in prefixes for part in optimizers_of(skeletons, prefix)]
    trained = {name for part in parts for group in part.groups for name in group.names}
    trained.update(name for one in skeletons for name in one.get("trained", ()))
    starts = tuple(f"{prefix}." for prefix in prefixes)

    def is_equal(name: str) -> bool:
        of_a_compound = name.rpartition(".")[0]  # the parameter whose part it would be
        return name in trained or of_a_compound in trained or name.startswith(starts)

    return filter(is_equal, images.stored.names())
