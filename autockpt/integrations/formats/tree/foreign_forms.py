"""The names of other trainers for the parts of a checkpoint, under our names.

    Lightning     state_dict, optimizer_states, lr_schedulers, global_step
    TorchTitan    lr_scheduler, train_state with the step
    DeepSpeed     module, global_steps, optimizer where ZeRO is off, lr_scheduler
    Trainer of Hugging Face, Accelerate    files of a directory

Parts that have no place here are left out, and named.
"""

import json
import math
import os
from collections.abc import Callable
from typing import Any

from autockpt.integrations.formats.tree.lazy_tree import LazyTensor, Tree
from autockpt.integrations.places import DEEPSPEED_WEIGHTS
from autockpt.values.errors import CorruptCheckpointError

Read = Callable[[str], Tree]

_FILES = {
    "optimizer.pt": "optimizer", "scheduler.pt": "scheduler", "scaler.pt": "scaler",
    "optimizer.bin": "optimizer", "scheduler.bin": "scheduler",
}  # fmt: skip
"""By name of a file beside the weights the part of the state that it is."""
_ASIDE = {
    "rng_state": "random states", "random_states_": "random states",
    "sampler": "state of the sampler", "dl_state_dict": "state of the loader",
    "custom_checkpoint_": "objects registered for checkpointing",
    "training_args.bin": "training arguments", "optimizer_": "further optimizers",
    "scheduler_": "further schedulers", "model_": "further models",
}  # fmt: skip
"""By the beginning of a file's name what it holds; these are not read."""


def common_form(tree: Tree) -> tuple[Tree, list[str]]:
    """(the tree under our names, what of it is left out)."""
    if "pytorch-lightning_version" in tree and isinstance(tree.get("state_dict"), dict):
        return _of_lightning(tree)
    if "ds_version" in tree and isinstance(tree.get("module"), dict):
        return _of_deepspeed(tree)
    train_state = tree.get("train_state")
    if isinstance(train_state, dict) and (step := _count(train_state.get("step"))) is not None:
        named = {("scheduler" if k == "lr_scheduler" else k): v for k, v in tree.items()}
        return {**named, "step": step}, []
    if "step" not in tree:
        return tree, []
    rest = {key: value for key, value in tree.items() if key != "step"}
    step = _count(tree["step"])
    if step is None:
        return rest, ["step (no number of at least 0: the run begins at step 0)"]
    return {**rest, "step": step}, []


def _of_deepspeed(tree: Tree) -> tuple[Tree, list[str]]:
    """Of `mp_rank_00_model_states.pt`."""
    read = {"module": "model", "optimizer": "optimizer", "lr_scheduler": "scheduler"}
    taken = {name: tree[key] for key, name in read.items() if isinstance(tree.get(key), dict)}
    rest = [
        key
        for key, value in tree.items()
        if key not in (*read, "global_steps", "ds_version") and value not in (None, [], {}, set())
    ]
    left_out = [f"{', '.join(rest)} (of DeepSpeed's engine)"] if rest else []
    return {**taken, "step": _count(tree.get("global_steps")) or 0}, left_out


def _of_lightning(tree: Tree) -> tuple[Tree, list[str]]:
    taken = {
        "model": tree["state_dict"],
        **_several("optimizer", tree.get("optimizer_states") or []),
        **_several("scheduler", tree.get("lr_schedulers") or []),
        "step": _count(tree.get("global_step")) or 0,
    }
    read = ("state_dict", "optimizer_states", "lr_schedulers", "global_step")
    rest = [name for name in tree if name not in (*read, "pytorch-lightning_version")]
    return taken, [f"{name} (of Lightning's own loops)" for name in rest]


def _several(name: str, values: list[Any]) -> Tree:
    """As the adapter for Lightning attaches them."""
    return {f"{name}{number or ''}": value for number, value in enumerate(values)}


def read_deepspeed(folder: str, read: Read) -> tuple[Tree, list[str]]:
    """(the file with all weights, the parts beside it in words).  Raises CorruptCheckpointError."""
    parts = sorted(name for name in os.listdir(folder) if name.endswith("_optim_states.pt"))
    said = [f"{name} (a part of ZeRO's optimizer, with its fp32 weights)" for name in parts[:1]]
    said += [f"{len(parts) - 1} more of these"] if parts[1:] else []
    return read(os.path.join(folder, DEEPSPEED_WEIGHTS)), said


def read_beside(folder: str, read: Read) -> tuple[Tree, list[str]]:
    """(optimizer, scheduler, scaler and step beside the weights in a directory, the rest by name).

    `read`: of a file of torch.save.  The step is that of `trainer_state.json`, else the
    optimizer's own count.  Raises CorruptCheckpointError.
    """
    names = sorted(os.listdir(folder))
    found: Tree = {}
    unread: list[str] = []
    for name in (name for name in _FILES if name in names):
        try:
            found[_FILES[name]] = read(os.path.join(folder, name))
        except CorruptCheckpointError as error:
            unread.append(f"{name} ({error})")
    step = _trainer_step(folder)
    if step is None and "optimizer" in found:
        step = _optimizer_step(found["optimizer"])
    if step is not None:
        found["step"] = step
    aside = {
        said: name
        for name in reversed(names)
        for beginning, said in _ASIDE.items()
        if name.startswith(beginning) and name not in _FILES and name != "model.safetensors"
    }
    return found, [*unread, *(f"{name} ({said})" for said, name in aside.items())]


def _trainer_step(folder: str) -> int | None:
    path = os.path.join(folder, "trainer_state.json")
    if not os.path.exists(path):
        return None
    try:
        with open(path, encoding="utf-8") as file:
            step = _count(json.load(file).get("global_step"))
        if step is None:
            raise ValueError("global_step is no number of at least 0")
    except (OSError, ValueError, AttributeError, RecursionError) as error:
        raise CorruptCheckpointError(f"{path}: cannot be used: {error!r:.200}") from None
    return step


def _optimizer_step(optimizer: Any) -> int | None:
    """The most steps that any parameter has had."""
    states = optimizer.get("state", {}) if isinstance(optimizer, dict) else {}
    counts = [s["step"] for s in states.values() if isinstance(s, dict) and "step" in s]
    plain = [float(c.read()) if isinstance(c, LazyTensor) else c for c in counts]
    return max((int(c) for c in plain if isinstance(c, int | float)), default=None)


def _count(value: Any) -> int | None:
    """A number of at least 0, which may be a tensor of one integer."""
    if (
        isinstance(value, LazyTensor)
        and math.prod(value.shape) == 1
        and not (value.dtype.is_floating_point or value.dtype.is_complex)
    ):
        value = int(value.read().item())
    return value if type(value) is int and value >= 0 else None
