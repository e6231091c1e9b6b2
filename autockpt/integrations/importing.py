"""Checkpoints of others into a generation of ours, from which `autockpt.attach` goes on.

What they do not say (random states, the place in the data, often the optimizer) is not made up: the
image is marked as partial, and whatever it leaves out stays as the script built it.
"""

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch

from autockpt.executors.sharding.names import plain_fqn
from autockpt.integrations.committing import GenerationsOf
from autockpt.integrations.destination import new_export
from autockpt.integrations.export import Exported, is_optimizer, with_names
from autockpt.integrations.image_writer import Ticket, spec_of, write_image
from autockpt.integrations.lazy import LazyTensor, Tree, tensors_of
from autockpt.run_directory import RunDirectory
from autockpt.values.errors import ConfigError

TARGET = "autockpt"
_MODEL = ("model", "model_state_dict", "state_dict")
_OPTIMIZER = ("optimizer", "optimizer_state_dict", "optim")
"""What scripts call them."""
_ON_HOST = "step"
"""torch keeps this one in host memory, unless the optimizer is fused or capturable."""


def import_tree(
    tree: Tree,
    destination: str,
    *,
    force: bool = False,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Exported:
    """Makes a new run directory whose only checkpoint is `tree`, as a whole or not at all.

    `progress` gets the bytes written and their total.  Raises ConfigError for a tree without a
    model, CorruptCheckpointError or StorageError.
    """
    state = _State(tree)
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
        specs = [spec_of(name, t.dtype, t.shape) for name, t in state.stored.items()]
        record = write_image(ticket, specs, state.aliases, state.skeleton, read)
        directory.commit(state.step, [record])
        directory.close()
    return Exported(
        generation=generation.name, step=state.step, target=TARGET, path=destination,
        tensors=len(state.stored), bytes=total, left_out=tuple(state.left_out),
    )  # fmt: skip


@dataclass(slots=True)
class _State:
    """A tree under the names of our images."""

    tree: Tree
    tensors: dict[str, LazyTensor] = field(default_factory=dict)
    left_out: list[str] = field(default_factory=list)
    skeleton: dict[str, Any] = field(init=False)
    step: int = field(init=False)

    def __post_init__(self) -> None:
        step = self.tree.get("step")
        self.step = step if type(step) is int and step >= 0 else 0
        self.skeleton = {
            "partial": True, "progress": {"step": self.step, "data": None}, "rng": None,
            "modules": {}, "optimizers": {}, "others": {},
        }  # fmt: skip
        model = next((key for key in _MODEL if isinstance(self.tree.get(key), dict)), None)
        if model is None:
            raise ConfigError(
                f"holds no model: expected it under {', '.join(_MODEL)}, there are: "
                f"{', '.join(map(str, self.tree)) or 'no keys'}"
            )
        taken = ("step", model)
        self._take_model(self.tree[model])
        for key, value in self.tree.items():
            if is_optimizer(value):
                self._take_optimizer(key, value)
            elif key not in taken:
                self.skeleton["others"][key] = self._encoded(value, key)

    @property
    def stored(self) -> dict[str, LazyTensor]:
        """Each tensor once, under its first name."""
        return {name: t for name, t in self.tensors.items() if name not in self.aliases}

    @property
    def aliases(self) -> dict[str, str]:
        """Other names of the same tensors."""
        first: dict[int, str] = {}
        kept = {name: first.setdefault(id(t), name) for name, t in self.tensors.items()}
        return {name: stored for name, stored in kept.items() if name != stored}

    def _take_model(self, model: Tree) -> None:
        for name, leaf in model.items():
            full = f"model.{plain_fqn(str(name))}"
            if isinstance(leaf, LazyTensor) and not full.endswith("._extra_state"):
                self.tensors[full] = leaf
            else:
                self.skeleton["modules"][full] = self._encoded(leaf, full)

    def _take_optimizer(self, key: str, saved: Tree) -> None:
        groups = [_names_in(group) for group in saved["param_groups"]]
        names = [name for group in groups for name in group]
        numbers = [number for group in saved["param_groups"] for number in group["params"]]
        if len(names) != len(numbers) or any(name not in self.tensors for name in names):
            self.left_out.append(f"{key} (its parameters are not named as those of the model)")
            return
        prefix = "optimizer" if key in _OPTIMIZER else f"optimizer.{key.removeprefix('optimizer.')}"
        rows: list[Any] = []
        state: dict[str, Any] = {}
        for number, (names, group) in enumerate(zip(groups, saved["param_groups"], strict=True)):
            settings = {k: v for k, v in group.items() if k not in ("params", "param_names")}
            values = self._encoded(settings, f"{prefix}.group{number}")
            rows.append({"params": names, "values": values})
            for name, place in zip(names, group["params"], strict=True):
                if place in saved["state"]:
                    own = saved["state"][place]
                    state[name] = self._moments(own, f"{prefix}.{name}", group)
        self.skeleton["optimizers"][prefix] = {
            "groups": rows, "regular": {}, "irregular": state, "loose": {},
        }  # fmt: skip

    def _moments(self, values: Tree, path: str, group: Tree) -> Any:
        """State of one parameter; its tensors go where the parameter is, as torch would do it."""
        skeleton = self._encoded(values, path)
        everywhere = group.get("fused") or group.get("capturable")
        for key, value in values.items():
            if isinstance(value, LazyTensor) and (key != _ON_HOST or everywhere):
                skeleton[key] = {"$device_tensor": f"{path}.{key}"}
        return skeleton

    def _encoded(self, value: Any, name: str) -> Any:
        """The skeleton of a value; its tensors are noted under dotted names."""
        skeleton, tensors = with_names({name: value})
        self.tensors |= tensors
        return skeleton[name]


def _names_in(group: Tree) -> list[str]:
    """Full names of a group's parameters; none when they are numbers only."""
    names = group.get("param_names") or group["params"]
    if not all(isinstance(name, str) for name in names):
        return []
    return [f"model.{plain_fqn(name)}" for name in names]
