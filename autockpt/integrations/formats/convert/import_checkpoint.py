"""Checkpoints of others into a generation of ours, from which `autockpt.attach` goes on.

Missing parts (random states, the place in the data, often the optimizer) are not made up.  The
image is marked as partial, and the missing parts stay as the script built them.
"""

import os
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch

from autockpt.executors.sharding.fqns import plain_fqn
from autockpt.executors.state.live_state import attached_name
from autockpt.integrations.formats.convert.committing import GenerationsOf
from autockpt.integrations.formats.convert.destination import new_export
from autockpt.integrations.formats.convert.export import Exported, with_names
from autockpt.integrations.formats.convert.image_writer import Ticket, spec_of, write_image
from autockpt.integrations.formats.tree.foreign_forms import common_form
from autockpt.integrations.formats.tree.lazy_tree import LazyTensor, Tree, tensors_of
from autockpt.integrations.formats.tree.optimizer_formats import (
    by_number,
    is_flat,
    is_optimizer,
    named,
)
from autockpt.run_directory import RunDirectory
from autockpt.values.errors import ConfigError

TARGET = "autockpt"
_MODEL = ("model", "model_state_dict", "state_dict")
_OPTIMIZER = ("optimizer", "optimizer_state_dict", "optim")
"""The names that scripts give them."""
_ON_HOST = "step"
"""torch keeps this one in host memory, unless the optimizer is fused or capturable."""


def import_tree(
    tree: Tree,
    destination: str,
    *,
    lossy: str = "",
    models: Collection[str] = (),
    known_nan: Collection[str] | None = None,
    left_out: Collection[str] = (),
    force: bool = False,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Exported:
    """Makes a new run directory whose only checkpoint is `tree`, as a whole or not at all.

    `lossy`: the tree's losses in words, which every restore reports.  `models`: first parts of
    names in its model that belong to a model of their own, as in `GenerationTree`.  `known_nan`:
    stored tensors that held NaN before the training; None: not known.  `left_out`: parts of the
    source that are not in the tree.  `progress` gets the bytes written and their total.  Raises
    ConfigError for a tree without a model, CorruptCheckpointError or StorageError.
    """
    state = _State(tree, models)
    names, aliases = state.untied()
    if known_nan is not None:
        known = sorted(name for name in names if state.tensors[name].name in known_nan)
        state.skeleton["progress"]["nan"] = known
    total, done = sum(tensor.nbytes for tensor in tensors_of(list(state.tensors.values()))), 0

    def read(name: str) -> Iterable[torch.Tensor]:
        nonlocal done
        yield state.tensors[name].read()
        done += state.tensors[name].nbytes
        progress(done, total)

    with new_export(destination, force=force) as path:
        run = RunDirectory.create(path)
        directory = GenerationsOf(os.fspath(run.path / "checkpoints"))
        generation = directory.begin(1)
        ticket = Ticket(
            directory=directory.path, run_id=directory.run_id, generation=generation,
            step=state.step, rank=0, world_size=1,
        )  # fmt: skip
        stored = ((name, state.tensors[name]) for name in names)
        specs = [spec_of(name, tensor.dtype, tensor.shape) for name, tensor in stored]
        marks = {"lossy": lossy} if lossy else {}
        record = write_image(ticket, specs, aliases, state.skeleton | marks, read)
        directory.commit(state.step, [record | marks])
        directory.close()
    return Exported(
        generation=generation.name, step=state.step, target=TARGET, path=destination,
        tensors=len(names), bytes=total, left_out=(*state.left_out, *left_out),
        lossy=lossy,
    )  # fmt: skip


@dataclass(slots=True)
class _State:
    """A tree under the names of our images."""

    tree: Tree
    models: Collection[str] = ()
    tensors: dict[str, LazyTensor] = field(default_factory=dict)
    left_out: list[str] = field(default_factory=list)
    skeleton: dict[str, Any] = field(init=False)
    step: int = field(init=False)

    def __post_init__(self) -> None:
        self.tree, left_out = common_form(self.tree)
        self.left_out += left_out
        step = self.tree.get("step")
        self.step = step if type(step) is int and step >= 0 else 0
        self.skeleton = {
            "partial": True, "progress": {"step": self.step, "data": None}, "rng": None,
            "modules": {}, "optimizers": {}, "others": {},
        }  # fmt: skip
        model = self._model_key()
        weights = {key: t for key, t in self.tree.items() if isinstance(t, LazyTensor)}
        self._take_model(self.tree[model] if model else weights)
        taken = {"step", model} if model else {"step", *weights}
        for key, value in self.tree.items():
            if is_optimizer(value) or is_flat(value):
                self._take_optimizer(str(key), value)
            elif key not in taken:
                self.skeleton["others"][key] = self._encoded(value, key)

    def _model_key(self) -> str | None:
        """Where the model stands; None: its tensors stand at the top, as TorchTitan saves them."""
        found = next((key for key in _MODEL if isinstance(self.tree.get(key), dict)), None)
        if found is None and not any(isinstance(t, LazyTensor) for t in self.tree.values()):
            raise ConfigError(
                f"holds no model: expected it under {', '.join(_MODEL)}, there are: "
                f"{', '.join(map(str, self.tree)) or 'no keys'}"
            )
        return found

    def untied(self) -> tuple[list[str], dict[str, str]]:
        """(names to store, other name -> stored name): a tensor of two names is stored once."""
        first: dict[int, str] = {}
        kept = {name: first.setdefault(id(t), name) for name, t in self.tensors.items()}
        return list(first.values()), {n: stored for n, stored in kept.items() if n != stored}

    def _note(self, name: str, tensor: LazyTensor) -> None:
        if name in self.tensors:
            raise ConfigError(f"two tensors would be called {name!r}; rename one of them")
        self.tensors[name] = tensor

    def _full(self, name: str) -> str:
        """Of a parameter in the model of the tree."""
        return name if name.split(".")[0] in self.models else f"model.{name}"

    def _take_model(self, model: Tree) -> None:
        for name, leaf in model.items():
            full = self._full(plain_fqn(str(name)))
            if isinstance(leaf, LazyTensor) and not full.endswith("._extra_state"):
                self._note(full, leaf)
            else:
                self.skeleton["modules"][full] = self._encoded(leaf, full)

    def _take_optimizer(self, key: str, value: Tree) -> None:
        saved = named(value, {name.removeprefix("model.") for name in self.tensors})
        numbered = by_number(value) if saved is None else None
        saved = saved or numbered
        if saved is None:
            self.left_out.append(f"{key} (its parameters are not named as those of the model)")
            return
        prefix = "optimizer" if key in _OPTIMIZER else attached_name(key, "optimizer")
        groups: list[Any] = []
        state: dict[str, Any] = {}
        for number, group in enumerate(saved["param_groups"]):
            settings = {k: v for k, v in group.items() if k != "params"}
            names = [name if numbered else self._full(name) for name in group["params"]]
            values = self._encoded(settings, f"{prefix}.group{number}")
            groups.append({"params": names, "values": values})
            for name, bare in zip(names, group["params"], strict=True):
                if bare in saved["state"]:
                    own = saved["state"][bare]
                    state[name] = self._moments(own, f"{prefix}.{name}", group)
        self.skeleton["optimizers"][prefix] = {
            "groups": groups, "regular": {}, "irregular": state, "loose": {},
        }  # fmt: skip

    def _moments(self, values: Tree, path: str, group: Tree) -> Any:
        """State of one parameter; its tensors go where the parameter is, as torch would do it."""
        skeleton = self._encoded(dict(values), path)
        everywhere = group.get("fused") or group.get("capturable")
        for key, value in values.items():
            if isinstance(value, LazyTensor) and (key != _ON_HOST or everywhere):
                skeleton[key] = {"$device_tensor": f"{path}.{key}"}
        return skeleton

    def _encoded(self, value: Any, name: str) -> Any:
        """The skeleton of a value; its tensors are noted under dotted names."""
        skeleton, tensors = with_names({name: value})
        for path, tensor in tensors.items():
            self._note(path, tensor)
        return skeleton[name]
