"""Hugging Face Trainer (transformers 5) under autockpt.

    trainer = autockpt.integrations.huggingface.protect(Trainer(...))
    trainer.train()

A callback alone cannot do it.  Trainer decides where its loop begins before any callback runs, and
a step's evaluation, log and own save go on behind the last one.  `protect` therefore wraps bound
methods of the one trainer that it is given:

* `train` goes on where a checkpoint of Trainer's own cannot be read and there is one of ours.
* `get_train_dataloader` remembers the loader.
* `_init_training_state` prepares early, attaches (which restores), and returns the first step.
* `_prepare_for_training` returns the prepared objects.
* `_run_epoch` lets the loader go on instead of skipping batches.
* `_load_rng_state` puts the random state back.
* `_maybe_log_save_evaluate` is the boundary, behind all work that belongs to the step.
* `_finalize_training` is the end, before the best model is loaded.

`AutockptCallback` is the other, smaller thing: it only chooses when Trainer saves its own files.
"""

import copy
import dataclasses
import inspect
import json
import os
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
import transformers
import transformers.trainer as trainer_module
from transformers import TrainerCallback
from transformers.trainer_callback import ExportableState, TrainerState

import autockpt
from autockpt.executors.state.live_state import Dispensable
from autockpt.integrations.adapters import reading_of, require_counters
from autockpt.policies.interval.closed_forms import young_interval_s
from autockpt.session.attaches import of_this_process
from autockpt.session.job import may_have_checkpoint
from autockpt.session.place.script.changed_attributes import ChangedAttributes
from autockpt.values.errors import ConfigError

WRAPPED = (
    "get_train_dataloader", "_init_training_state", "_prepare_for_training", "_run_epoch",
    "_load_rng_state", "_maybe_log_save_evaluate", "_finalize_training", "train",
)  # fmt: skip
"""Methods of Trainer that are wrapped."""
SUMS = ("_total_loss_scalar", "_globalstep_last_logged", "_initial_global_step", "current_flos")
"""Numbers of Trainer beside its state; `_tr_loss` is a tensor."""
TOKENS = "_total_train_tokens"
"""A number of TRL's trainers; their `_metrics` are lists of numbers until the next log."""

OF_THIS_START = frozenset({
    "max_steps", "num_train_epochs", "logging_steps", "eval_steps", "save_steps",
    "train_batch_size", "is_local_process_zero", "is_world_process_zero", "is_hyper_param_search",
    "trial_name", "trial_params",
})  # fmt: skip
"""Fields of TrainerState that this start's arguments and rank set, even if others were saved."""


def protect(trainer: Any, *, run_dir: str | None = None, **attached: Any) -> Any:
    """The trainer, whose `train()` is checkpointed, and resumed where it was.

    `run_dir`, `goal`, `fresh` and further objects as of `autockpt.attach`.  The session is
    `trainer.autockpt` from the beginning of `train()` on.  Raises ConfigError for a transformers
    whose Trainer has other methods.
    """
    missing = [name for name in WRAPPED if not hasattr(trainer, name)]
    if missing:
        raise ConfigError(
            f"protect(trainer): the {type(trainer).__qualname__} of transformers "
            f"{transformers.__version__} has no {missing[0]}; transformers 5 is needed (tried with "
            "5.24). AutockptCallback works with older ones: it chooses when Trainer saves"
        )
    if getattr(trainer, "autockpt_protection", None) is not None:
        raise ConfigError("protect(trainer): this trainer is protected already")
    trainer.autockpt_protection = _Protection(trainer, run_dir, attached)
    return trainer


class _Protection:
    """One trainer, its session, and how far the loop is in its epoch."""

    def __init__(self, trainer: Any, run_dir: str | None, attached: dict[str, Any]) -> None:
        self._trainer, self._run_dir, self._attached = trainer, run_dir, attached
        self._old = {name: getattr(trainer, name) for name in WRAPPED}
        self._loader: Any = None
        self._place: Any = None
        """The loader of ours in or around that."""
        self._prepared: tuple[Any, Any] | None = None
        self._ckpt: Any = None
        self._trainings = 0
        self._asks_ours = False
        """This `train()` has come as far as `attach`."""
        self._unreadable: Exception | None = None
        """The error with which Trainer refused its own checkpoint."""
        self._epoch, self._updates, self._per_epoch, self._steps_each = 0, 0, 1, 1
        self._rest: Mapping[str, int] = {}
        """Arguments of `_run_epoch` for the epoch that a checkpoint was made in."""
        self._each = 1
        """Batches that are read for a micro-batch."""
        self._resumed = (0, 0)
        """Where the epoch of a checkpoint goes on: micro-batches, and batches read for them."""
        self._stepped_at = 0
        """`global_step` at the newest boundary."""
        self._owed = False
        """A boundary stands behind the end of the epoch, or of Trainer's work in its middle."""
        self._is_over = False
        """The newest step was the last one of its epoch."""
        self._saved: Mapping[str, Any] = {}
        self._beside: dict[str, Dispensable] = {}
        """By name what was found beside the model."""
        self._plain: ChangedAttributes | None = None
        """Of callbacks, and of a Trainer that the script derives; None before the training."""
        self._looked = False
        """Callbacks were looked at for tensors that are not saved."""
        trainer.autockpt = None
        for name in WRAPPED:
            setattr(trainer, name, getattr(self, name.lstrip("_")))
        # First: what other callbacks see of a resumed training is as it was.
        trainer.callback_handler.callbacks.insert(0, _Sums(self))

    # ------------------------------------------------------------------ wrapped methods

    def train(
        self, resume_from_checkpoint: str | bool | None = None, *rest: Any, **named: Any
    ) -> Any:
        """A kill may have damaged the checkpoint that the script names; ours goes first."""
        self._asks_ours, self._unreadable = False, None
        try:
            return self._old["train"](resume_from_checkpoint, *rest, **named)
        except Exception as error:
            if not resume_from_checkpoint or self._asks_ours:
                raise
            if not may_have_checkpoint(
                self._own_directory(self._trainings + 1), self._attached.get("goal")
            ):
                raise  # the script may train without it, and that is the first training then
            self._unreadable = error
        try:
            return self._old["train"](None, *rest, **named)
        finally:
            self._unreadable = None

    def get_train_dataloader(self) -> Any:
        """Remembers it: a session does not exist yet."""
        self._loader = self._old["get_train_dataloader"]()
        return self._loader

    def init_training_state(
        self, max_steps: int, per_epoch: int, epochs: int, resume: str | None, trial: Any
    ) -> tuple[int, int]:
        """(epoch, batches trained in it), of a checkpoint of ours or as Trainer says."""
        self._end_former()
        self._prepared, self._per_epoch, self._steps_each = None, per_epoch, per_epoch
        if trial is not None:
            unreadable, self._asks_ours, self._unreadable = self._unreadable, True, None
            if unreadable is not None:
                raise unreadable
            print("autockpt: trials of a hyperparameter search are not protected", flush=True)
            return self._begun(self._old["_init_training_state"](
                max_steps, per_epoch, epochs, resume, trial
            ))  # fmt: skip
        trainer = self._trainer
        theirs = self._old["_init_training_state"](max_steps, per_epoch, epochs, resume, trial)
        self._prepared = self._old["_prepare_for_training"](max_steps, self._loader, resume)
        self._asks_ours = True
        self._ckpt = trainer.autockpt = self._attach()
        restored = self._ckpt.restored
        begins = theirs
        unreadable, self._unreadable = self._unreadable, None  # with its frames
        if restored is None and unreadable is not None:
            self._withdraw()
            raise unreadable
        if restored is not None:
            if unreadable is not None:
                print(
                    f"autockpt: goes on from its own checkpoint of step {restored.step}; "
                    f"resume_from_checkpoint cannot be read: {unreadable!r:.200}",
                    flush=True,
                )
            if resume is not None:
                print(
                    f"autockpt: goes on from its own checkpoint of step {restored.step}, not from "
                    f"resume_from_checkpoint={resume!r}; protect(trainer, fresh=True) begins with "
                    "that one",
                    flush=True,
                )
            require_counters("protect(trainer)", restored.extra, "updates")
            self._load(restored.extra)
        self._protect_loader()
        if restored is not None:
            begins = self._fit_rest(restored.extra)
            self._say_where_it_ends(begins, max_steps, epochs)
        elif any(begins):
            self._place.load({"epoch": begins[0], "index": begins[1] * self._each})
        self._resumed = begins[1], self._place.place.index
        self._tell_trained(begins[1])
        left = max_steps - trainer.state.global_step
        self._ckpt.own_boundary(self._ckpt.step_count + max(0, left), ends_at_once=True)
        self._stepped_at = trainer.state.global_step
        return self._begun(begins)

    def prepare_for_training(self, max_steps: int, loader: Any, resume: str | None) -> Any:
        """Return the objects prepared ahead of attach."""
        if self._prepared is None:
            return self._old["_prepare_for_training"](max_steps, loader, resume)
        model, _ = self._prepared
        self._trainer.callback_handler.train_dataloader = self._loader
        return model, self._loader

    def run_epoch(self, **arguments: Any) -> None:
        """An epoch, or the rest of one."""
        restored = self._ckpt is not None and self._ckpt.restored is not None
        theirs = self._ckpt is not None and arguments["resume_from_checkpoint"] is not None
        first = arguments["epoch"] == arguments["epochs_trained"]
        self._epoch = arguments["epoch"]
        if not first:
            self._updates = 0
        elif restored:
            arguments.update(self._rest)
        self._per_epoch = arguments["num_update_steps_per_epoch"]
        if not (first and (restored or theirs)):
            self._old["_run_epoch"](**arguments)
            return
        state = self._trainer.state
        if self._saved.get("ended"):
            _say(
                f"the training had ended early at step {state.global_step}: nothing is trained. "
                "With another patience it goes on; protect(trainer, fresh=True) begins anew"
            )
        if self._saved.get("ended") or (restored and state.global_step >= state.max_steps):
            self._trainer.control.should_training_stop = True
            return
        args = self._trainer.args
        skips, ignores = trainer_module.skip_first_batches, args.ignore_data_skip
        # The loader goes on by itself; all that is left of skipping is where the counters begin.
        trainer_module.skip_first_batches = lambda loader, _: loader
        if restored:
            args.ignore_data_skip = False
            arguments["resume_from_checkpoint"] = "autockpt"
        try:
            self._old["_run_epoch"](**arguments)
        finally:
            trainer_module.skip_first_batches, args.ignore_data_skip = skips, ignores

    def load_rng_state(self, checkpoint: str | None) -> None:
        """Ours at the beginning of an epoch; within one the loader has done it."""
        if self._ckpt is not None and self._ckpt.restored is not None:
            self._ckpt.finish_restore()
        else:
            self._old["_load_rng_state"](checkpoint)

    def maybe_log_save_evaluate(self, *arguments: Any, **named: Any) -> None:
        """The boundary of the step, or of the epoch's last one behind the epoch's own end."""
        self._old["_maybe_log_save_evaluate"](*arguments, **named)
        trainer, ckpt = self._trainer, self._ckpt
        if ckpt is None:
            return
        control = trainer.control
        if trainer.state.global_step == self._stepped_at:
            if self._owed:  # at the epoch's end
                self._owed = False
                if self._is_over:
                    self._place.end_epoch()
                    self._epoch, self._updates, self._resumed = self._epoch + 1, 0, (0, 0)
                self._boundary()
            return
        self._stepped_at = trainer.state.global_step
        self._updates += 1
        ended = getattr(self._loader, "end_of_dataloader", False)  # of a stream without a length
        self._is_over = bool(
            ended or control.should_epoch_stop or self._updates >= self._per_epoch
        )  # fmt: skip
        self._owed = self._is_over or bool(control.should_training_stop)
        if not self._owed:
            self._boundary()

    def finalize_training(self, *arguments: Any, **named: Any) -> Any:
        """End the session while the model still has the weights of the last step."""
        self.begin_beside(behind_epoch=True)
        if self._ckpt is not None:
            self._ckpt.finish_restore()  # nothing was left to train
            self._ckpt.close()
            self._trainer.args.eval_on_start |= bool(self._saved.get("eval_on_start"))
        return self._old["_finalize_training"](*arguments, **named)

    # ------------------------------------------------------------------ parts

    def _boundary(self) -> None:
        if not self._looked:
            self._looked = True
            for callback, name in _unsaved(self._trainer):
                print(
                    f"autockpt: the callback {callback} keeps tensors in `{name}`, which no "
                    "checkpoint has. Give it state_dict and load_state_dict",
                    flush=True,
                )
        self._tell_trained(self._updates * self._trainer.args.gradient_accumulation_steps)
        self._ckpt.step()
        if self._ckpt.stopped:
            self._trainer.control.should_training_stop = True

    def _tell_trained(self, micro_batches: int) -> None:
        """Where several batches are read for one: how many are left is not known else."""
        if self._place.ahead > 1:
            first, read = self._resumed
            self._place.trained(read + (micro_batches - first) * self._each)

    def _begun(self, begins: tuple[int, int]) -> tuple[int, int]:
        accumulation = self._trainer.args.gradient_accumulation_steps
        self._epoch, self._updates, self._owed = begins[0], begins[1] // accumulation, False
        return begins

    def _end_former(self) -> None:
        """Trainer begins anew in the same process: `auto_find_batch_size`, or a second train()."""
        self._trainings += 1
        self._saved, self._beside, self._plain, self._rest = {}, {}, None, {}
        if self._ckpt is not None:
            self._ckpt.close(final_checkpoint=False)
        self._ckpt = self._trainer.autockpt = None

    def _withdraw(self) -> None:
        """Nothing was restored: a training that the script begins instead is of the same run."""
        launch_id = self._ckpt._job.incarnation.launch_id
        self._ckpt.close(final_checkpoint=False)
        of_this_process.withdraw(launch_id)
        self._ckpt = self._trainer.autockpt = None
        self._trainings -= 1

    def _attach(self) -> Any:
        trainer = self._trainer
        self._beside = {
            name: Dispensable(name, one, _say)
            for name, one in _kept_beside(trainer, self._attached).items()
        }
        return autockpt.attach(
            model=trainer.model_wrapped,
            optimizer=trainer.optimizer,
            scheduler=trainer.lr_scheduler,
            scaler=getattr(trainer.accelerator, "scaler", None),
            run_dir=self._own_directory(self._trainings),
            extra=self._extra,
            restore="tensors",
            **(self._beside | self._attached),
        )

    def _own_directory(self, number: int) -> str | None:
        """The run directory of a `train()`, by its number, where the script named one."""
        if self._run_dir is None or number == 1:
            return self._run_dir
        return os.path.join(self._run_dir, f"train-{number}")

    def begin_beside(self, *, behind_epoch: bool = False) -> None:
        """Callbacks have built their objects: the state of the checkpoint goes in.

        `behind_epoch`: they know of an epoch that has begun; before, only a whole one begins.
        """
        if not behind_epoch and self._ckpt is not None and self._saved.get("updates"):
            return
        for one in self._beside.values():
            one.begin()
        if self._plain is None:
            self._plain = ChangedAttributes(self._without_state())
            self._plain.load(self._saved.get("attributes", {}))

    def _without_state(self) -> dict[str, Any]:
        """By name the script's own objects that nothing asks for a state."""
        found = {type(self._trainer).__qualname__: self._trainer}
        for one in self._trainer.callback_handler.callbacks:
            if not isinstance(one, ExportableState) and not hasattr(one, "state_dict"):
                name = f"callback_{type(one).__qualname__}"
                found[f"{name}{sum(key.startswith(name) for key in found) or ''}"] = one
        return found

    def _protect_loader(self) -> None:
        """The loader inside accelerate's is ours; accelerate fetches one batch ahead of it."""
        self._each = 1
        inner = getattr(self._loader, "base_dataloader", None)
        if inner is None:
            self._place = self._loader = self._ckpt.loader(self._loader)
            return
        self._each, ahead = reading_of(self._loader, self._trainer.accelerator)
        self._place = self._loader.base_dataloader = self._ckpt.loader(inner, ahead=ahead)

    def _fit_rest(self, saved: Mapping[str, Any]) -> tuple[int, int]:
        """(epoch, micro-batch) that the training goes on with, and what `_run_epoch` is to count.

        Batch size, accumulation or ranks may have changed.  Trainer steps at whole windows of its
        count, and at the last batch.  So the rest begins at a window, and the count ends with it.
        """
        window = self._trainer.args.gradient_accumulation_steps
        trained, left = self._place.place.number, self._place.place.left
        if type(self._loader).__name__ == "DataLoaderDispatcher":  # the first rank alone has it
            trained, left = saved["updates"] * saved.get("accumulation", window), None
        if trained and left == 0:
            self._place.end_epoch()
            return saved["epoch"] + 1, 0
        begin = -(-trained // window) * window
        if trained and left is not None:
            self._rest = {
                "steps_trained_in_current_epoch": begin,
                "steps_in_epoch": begin + left,
                "num_update_steps_per_epoch": -(-(begin + left) // window),
            }
        return saved["epoch"], begin

    def _say_where_it_ends(self, begins: tuple[int, int], max_steps: int, epochs: int) -> None:
        """Where an epoch has another number of steps than before, epochs end at another one."""
        trainer, each, window = (
            self._trainer, self._steps_each, self._trainer.args.gradient_accumulation_steps
        )  # fmt: skip
        was = self._saved.get("steps_each", each)
        if each == was or trainer.args.max_steps > 0 or epochs != trainer.args.num_train_epochs:
            return
        first = self._rest.get("num_update_steps_per_epoch", each) - begins[1] // window
        end = trainer.state.global_step + first + max(0, epochs - begins[0] - 1) * each
        if end != max_steps:
            _say(
                f"an epoch has {each} steps now and had {was}: {epochs} epochs would end at step "
                f"{end}. Trainer plans for {max_steps}, and its learning rate too; max_steps={end} "
                "in its arguments changes both"
            )

    # ------------------------------------------------------------------ counters

    def _extra(self) -> dict[str, Any]:
        trainer = self._trainer
        state = dataclasses.asdict(copy.copy(trainer.state))
        state.pop("stateful_callbacks", None)
        extra = {name: getattr(trainer, name, 0) for name in SUMS}
        if hasattr(trainer, TOKENS):
            extra[TOKENS] = getattr(trainer, TOKENS)
        loss = getattr(trainer, "_tr_loss", None)
        return {
            "epoch": self._epoch,
            "updates": self._updates,
            "accumulation": trainer.args.gradient_accumulation_steps,
            "steps_each": self._steps_each,
            "ended": trainer.control.should_training_stop
            and state["global_step"] < state["max_steps"],
            "state": state,
            "callbacks": [callback.state() for callback in self._exportable()],
            "attributes": {} if self._plain is None else self._plain.state(),
            "sums": extra,
            "metrics": _metrics(trainer),
            "loss": 0.0 if loss is None else float(loss),
        }

    def _exportable(self) -> list[Any]:
        every = self._trainer.callback_handler.callbacks
        return [callback for callback in every if isinstance(callback, ExportableState)]

    def _load(self, extra: Mapping[str, Any]) -> None:
        """Puts counters and callbacks back."""
        trainer = self._trainer
        self._saved = {**extra, "eval_on_start": trainer.args.eval_on_start}
        trainer.args.eval_on_start = False
        known = {field.name for field in dataclasses.fields(TrainerState)} - OF_THIS_START
        for name, value in extra["state"].items():
            if name in known:
                setattr(trainer.state, name, value)
        best = trainer.state.best_model_checkpoint
        if best is not None and not os.path.isdir(best):  # as Trainer's own resume
            _say(f"the best model is gone from {best}: it is not loaded, nor kept, at the end")
            trainer.state.best_model_checkpoint = None
        live = self._exportable()
        if len(live) != len(extra["callbacks"]):
            print(
                f"autockpt: the checkpoint has {len(extra['callbacks'])} callbacks with a state, "
                f"this trainer {len(live)}; they begin anew",
                flush=True,
            )
            return
        pairs = list(zip(live, extra["callbacks"], strict=True))
        if any(_as_stored(one.state()["args"]) != saved["args"] for one, saved in pairs):
            self._saved = {**self._saved, "ended": False}  # that may be another patience
        for callback, saved in pairs:
            for name, value in saved["attributes"].items():  # arguments are those of this start
                setattr(callback, name, value)

    def put_back_sums(self) -> None:
        """Trainer sets them to zero behind `_init_training_state`."""
        if not self._saved:
            return
        trainer = self._trainer
        for name, value in self._saved["sums"].items():
            setattr(trainer, name, value)
        for mode, values in self._saved.get("metrics", {}).items():
            if mode in _metrics(trainer):
                trainer._metrics[mode].update(values)
        trainer._tr_loss = torch.tensor(
            self._saved["loss"], dtype=torch.float32, device=trainer.args.device
        )


def _kept_beside(trainer: Any, attached: Mapping[str, Any]) -> dict[str, Any]:
    """By name what the script trains beside the model, and callbacks with a state of tensors.

    Optimizers among the attributes of the trainer are found, and modules whose parameters they
    step.
    """
    given = {id(value) for value in attached.values()}
    parameters = inspect.signature(autockpt.attach).parameters
    found: dict[str, Any] = {}
    for callback in trainer.callback_handler.callbacks:
        both = (getattr(callback, name, None) for name in ("state_dict", "load_state_dict"))
        if id(callback) not in given and all(map(callable, both)):
            name = f"callback_{type(callback).__name__}"
            found[f"{name}{sum(key.startswith(name) for key in found) or ''}"] = callback
    main = getattr(trainer.optimizer, "optimizer", trainer.optimizer)
    optimizers = {
        name: value for name, value in vars(trainer).items()
        if isinstance(value, torch.optim.Optimizer) and value not in (trainer.optimizer, main)
    }  # fmt: skip
    stepped = {
        id(parameter) for one in optimizers.values()
        for group in one.param_groups for parameter in group["params"]
    } - {id(parameter) for parameter in trainer.model_wrapped.parameters()}  # fmt: skip
    modules = {
        name: value for name, value in vars(trainer).items()
        if isinstance(value, torch.nn.Module) and stepped & set(map(id, value.parameters()))
    }  # fmt: skip
    for name, one in (modules | optimizers).items():
        if id(one) not in given:
            found[f"own_{name}" if name in parameters else name] = one
    return found


def _as_stored(arguments: Mapping[str, Any]) -> Any:
    return json.loads(json.dumps(arguments, default=repr))


def _say(sentence: str) -> None:
    print(f"autockpt: {sentence}", flush=True)


def _unsaved(trainer: Any) -> list[tuple[str, str]]:
    """(callback, attribute) of tensors in callbacks of the script that say no state.

    Tensors of the model do not count.
    """
    own = _tensors_in([trainer.model, trainer.model_wrapped])
    return [
        (type(callback).__name__, name)
        for callback in trainer.callback_handler.callbacks
        if type(callback).__module__.partition(".")[0] not in ("transformers", "trl", "autockpt")
        and not hasattr(callback, "state_dict") and not isinstance(callback, ExportableState)
        for name, value in vars(callback).items() if _tensors_in(value) - own
    ]  # fmt: skip


def _tensors_in(value: Any) -> set[int]:
    """Ids of the tensors of an attribute: in a module, in a dict or a list of both, or itself."""
    parts = value.values() if isinstance(value, dict) else value
    parts = parts if isinstance(value, dict | list | tuple) else [value]
    found: set[int] = set()
    for part in parts:
        if isinstance(part, torch.nn.Module):
            found |= {id(one) for one in (*part.parameters(), *part.buffers())}
        elif isinstance(part, torch.Tensor):
            found.add(id(part))
    return found


def _metrics(trainer: Any) -> dict[str, dict[str, list[float]]]:
    """What TRL will log, by "train" and "eval"; {} for other trainers."""
    return {
        mode: {name: list(found) for name, found in values.items() if _are_numbers(found)}
        for mode, values in (getattr(trainer, "_metrics", None) or {}).items()
        if isinstance(values, dict)
    }


def _are_numbers(values: Any) -> bool:
    return isinstance(values, list) and all(isinstance(one, int | float) for one in values)


class _Sums(TrainerCallback):  # type: ignore[misc]
    """Told when Trainer has set its sums to zero."""

    def __init__(self, protection: _Protection) -> None:
        self._protection = protection

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        """Before the first epoch."""
        self._protection.put_back_sums()

    def on_epoch_begin(self, *_: Any, **__: Any) -> None:
        """Behind every callback's `on_train_begin`."""
        self._protection.begin_beside()

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        """Behind every callback's `on_epoch_begin`."""
        self._protection.begin_beside(behind_epoch=True)


class AutockptCallback(TrainerCallback):  # type: ignore[misc]
    """Chooses when Trainer saves its own files: `Trainer(callbacks=[AutockptCallback()])`.

    The interval is Young's: sqrt(2 C M).  C is the measured cost of a save, M a mean time between
    failures.  Set `save_strategy="no"`.  Nothing else is protected: Trainer resumes by
    `resume_from_checkpoint`, as exactly as it does.
    """

    def __init__(
        self, *, mtbf_s: float = 6 * 3600.0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`mtbf_s`: seconds.  Raises ConfigError if it is not positive."""
        young_interval_s(1.0, mtbf_s)
        self._mtbf_s, self._clock = mtbf_s, clock
        self._asked_s: float | None = None
        self._began: tuple[int, float] | None = None
        self._last_step = 0
        self.interval_steps = 20
        """Steps between two saves; the first is one to measure by."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Counts from here."""
        self._last_step, self._began = state.global_step, (state.global_step, self._clock())

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> Any:
        """Asks for a save when the interval has passed: by steps, alike on all ranks."""
        if state.global_step - self._last_step >= self.interval_steps:
            control.should_save, self._asked_s = True, self._clock()
        return control

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Measures it, and sets the next interval."""
        if self._asked_s is None or self._began is None:
            return
        now, (step, began_s) = self._clock(), self._began
        cost_s = max(1e-3, now - self._asked_s)
        iteration_s = max(1e-6, (self._asked_s - began_s) / max(1, state.global_step - step))
        steps = round(young_interval_s(cost_s, self._mtbf_s) / iteration_s)
        self.interval_steps = max(1, _of_first_rank(steps))
        self._asked_s, self._last_step, self._began = None, state.global_step, (
            state.global_step, now
        )  # fmt: skip


def _of_first_rank(number: int) -> int:
    distributed = torch.distributed
    if not (distributed.is_available() and distributed.is_initialized()):
        return number
    numbers = [number]
    distributed.broadcast_object_list(numbers, src=0)
    return int(numbers[0])
