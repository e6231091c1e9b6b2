"""Check that loop and data are put where the checkpoint is, or refuse the resume.

A resume sets the state.  The script's loop and its data continue from there only when the script
asks for it.  It may use a loop of ours, read `ckpt.step_count`, or have data that keeps its own
place.  A loop that begins at 0 would train the state of step 135 with the data of step 0.  So the
script ends with exit code 91.  Loops of frameworks begin at 0 even if a callback reads the step.
"""

import gc
import types
from collections.abc import Iterable
from typing import Any

import torch
from torch.utils.data import dataloader

from autockpt.integrations.adapters import ADAPTERS, is_there
from autockpt.session.place.train_state import AttributeState, TrainState

SCRIPT = "script"
"""The value of `attach(data=...)` or AUTOCKPT_DATA for a script that places its loop and data
itself."""

FRAMEWORKS: dict[str, str] = {
    "transformers.trainer": "Hugging Face Trainer",
    "lightning.pytorch": "Lightning Trainer",
    "pytorch_lightning": "Lightning Trainer",
    "ignite.engine": "Ignite Engine",
    "composer.trainer": "Composer Trainer",
    "fastai.learner": "fastai Learner",
    "stable_baselines3": "Stable-Baselines3",
    "keras.src.trainers": "Keras fit",
    "keras.src.backend.torch.trainer": "Keras fit",
    "mmengine.runner": "MMEngine Runner",
    "detectron2.engine.train_loop": "Detectron2 trainer",
    "skorch.net": "skorch",
    "catalyst.runners": "Catalyst Runner",
    "torchtnt.framework": "TorchTNT",
}
"""By the beginning of a module's name: whose loop runs when that module is on the stack."""

_WITHOUT_PLACE = (
    "scheduler",
    "lr_scheduler",
    "scaler",
    "ema",
    "swa",
    "metric",
    "criterion",
    "loss",
)


def is_script(data: object) -> bool:
    """The attached data means that the script places its own data."""
    return isinstance(data, str) and data == SCRIPT


def framework_of(frame: types.FrameType | None) -> str | None:
    """The framework whose loop calls from `frame` outwards; None: the loop is the script's."""
    while frame is not None:
        module = str(frame.f_globals.get("__name__", ""))
        for beginning, name in FRAMEWORKS.items():
            if module == beginning or module.startswith((f"{beginning}.", f"{beginning}_")):
                return name
        frame = frame.f_back
    return None


def may_keep_values(others: Iterable[tuple[str, object]]) -> bool:
    """One of the attached objects is of the script's own class, by its own name: it may keep
    values that the loops carry on."""
    return any(
        not type(value).__module__.startswith("torch.")
        and not isinstance(value, _NO_KEEPERS)
        and not name.startswith(_WITHOUT_PLACE)
        for name, value in others
    )


_NO_KEEPERS = (TrainState, AttributeState, torch.nn.Module, torch.optim.Optimizer)


def may_hold_place(others: Iterable[tuple[str, object]]) -> bool:
    """One of them may count batches as well: a whole number is in its state."""
    return any(may_keep_values([(name, one)]) and _has_count(one) for name, one in others)


def _has_count(one: Any, depth: int = 3) -> bool:
    state = one.state_dict() if hasattr(one, "state_dict") else one
    if isinstance(state, dict) and depth:
        return any(_has_count(value, depth - 1) for value in state.values())
    if isinstance(state, list | tuple) and depth:
        return any(_has_count(value, depth - 1) for value in state[:100])
    return type(state) is int or (isinstance(state, torch.Tensor) and _is_count(state))


def _is_count(value: torch.Tensor) -> bool:
    return value.dim() == 0 and value.dtype in (torch.int32, torch.int64)


def feeds_from_loader() -> bool:
    """An epoch of a DataLoader of torch is under way in this process; looks at all objects."""
    iterators = getattr(dataloader, "_BaseDataLoaderIter", ())  # a private name of torch
    return any(issubclass(type(one), iterators) for one in gc.get_objects())


def refusal(step: int, framework: str | None, *, unused_loader: bool, trained: int = 0) -> str:
    """Why a resume at `step` would train wrongly, and what to do.

    `trained`: iterations that it has trained, because a loop of ours seemed to follow.
    """
    done = f"the {trained} iterations since are not kept" if trained else "nothing was trained"
    return (
        f"refused: the state was resumed at step {step}, but {_why(framework, unused_loader)}; "
        f"{done}. {_WHAT_TO_DO}, or begin anew with --fresh or attach(fresh=True) "
        "(exit code 91, docs/reference/exit_codes.md)"
    )


def warning(framework: str | None, *, unused_loader: bool) -> str:
    """The same of a first start, whose restart would be refused."""
    why = _why(framework, unused_loader)
    return f"a restart will be refused (exit code 91): {why}. {_WHAT_TO_DO}"


def _why(framework: str | None, unused_loader: bool) -> str:
    if framework is not None:
        adapter = next((a for a in ADAPTERS if a.framework == framework and is_there(a)), None)
        protect = f"; its adapter does: {adapter.line.format(name='trainer')}" if adapter else ""
        return (
            f"the loop is that of {framework}, which begins at its first epoch and batch, and "
            f"`attach` alone cannot set its counters{protect}"
        )
    if unused_loader:
        return (
            "no batch came from ckpt.batches(), so the attached loader begins its epoch anew, in "
            "another order"
        )
    return (
        "nothing puts the loop and its data there: the script uses neither ckpt.batches() nor "
        "ckpt.steps(), and did not read ckpt.step_count to begin there"
    )


_WHAT_TO_DO = (
    "Train in `for step, batch in ckpt.batches(total)`. Or keep a loop over epochs: leave `data` "
    "out of attach, then `loader = ckpt.loader(loader)` and `for epoch in range(loader.epoch, "
    "epochs)`. If the script puts its loop and its data at ckpt.step_count by itself, say so by "
    'attach(data="script") or AUTOCKPT_DATA=script'
)
