"""DeepSpeed's engine, protected.

    engine, _, _, scheduler = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    ckpt = autockpt.integrations.deepspeed.protect(engine)
    loader = ckpt.loader(loader)
    for epoch in range(loader.epoch, epochs):
        for batch in loader:
            engine.backward(engine(batch))
            engine.step()
    ckpt.close()

An iteration is one with a step of the optimizer, or with one that DeepSpeed skipped for an
overflow.  The micro-batches before the step belong to it.  It ends when the loop asks a loader of
`ckpt.loader` for the next batch: an evaluation behind `engine.step()` is over by then.  Without
such a loader it ends with `engine.step()` itself.
"""

import atexit
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import torch

import autockpt
from autockpt.executors.sharding.adapters.deepspeed import is_zero
from autockpt.integrations.adapters import OverLoader, OverSession
from autockpt.values.errors import ConfigError

COUNTERS = ("global_steps", "global_samples", "micro_steps", "skipped_steps")
"""Attributes of the engine that count."""
_PLAIN = (bool, int, float, str, type(None))


def protect(engine: Any, **attach: Any) -> "ProtectedEngine":
    """Restores the engine if there is a checkpoint, and checkpoints it from now on.

    Call it behind `deepspeed.initialize`, before the loop.  `attach` takes what `autockpt.attach`
    does beside model and optimizer: `run_dir`, `goal`, `fresh`, further objects by name.  Raises
    ConfigError for an engine whose state cannot be saved.
    """
    _require_protectable(engine)
    return ProtectedEngine(engine, attach)


class ProtectedEngine(OverSession):
    """The session of an engine."""

    def __init__(self, engine: Any, attach: dict[str, Any]) -> None:
        self._engine = engine
        self._loaders = 0
        self._owes = False
        """The iteration has had its step, and the script may still evaluate or log."""
        self._is_placed = False
        """The script has asked where its loop goes on."""
        objects = {name: one for name, one in _parts(engine) if one is not None}
        self.session = autockpt.attach(
            model=engine.module, optimizer=engine.optimizer, extra=self._extra, restore="tensors",
            **{**objects, **attach},
        )  # fmt: skip
        restored = self.session.restored
        if restored is not None:
            self._load(restored.step, restored.extra)
        self.session.own_boundary()
        self._first = engine.module.register_forward_pre_hook(self._begin)
        self._step = engine.step
        engine.step = self._stepped
        atexit.register(self._at_exit)

    # ------------------------------------------------------------------ the public face

    @property
    def step_count(self) -> int:
        """Iterations trained, restored ones included; where a loop of the script's own begins."""
        self._is_placed = True
        return int(self.session.step_count)

    def loader(self, loader: Any) -> "EngineLoader":
        """A loader of the training that knows its place; one pass is one epoch.

        `loader`: a DataLoader, or the engine's own `training_dataloader`.  Call it for each loader
        of the training, in the same order at every start.  Raises ConfigError for one that cannot
        be resumed at a batch.
        """
        name, self._loaders = f"loader{self._loaders}", self._loaders + 1
        inner, timer = _inner(loader)
        self._is_placed = True
        return EngineLoader(self, self.session.loader(inner, name=name), timer)

    def finish_iteration(self) -> None:
        """The iteration whose step was made ends here, if it has not ended yet."""
        if self._owes:
            self._owes = False
            self.session.step()

    def close(self) -> None:
        """The end: the last checkpoint is made durable, and the engine is as it was."""
        if sys.exc_info()[1] is None:
            self.finish_iteration()
        atexit.unregister(self._at_exit)
        self._first.remove()
        self._engine.step = self._step
        self.session.close()

    # ------------------------------------------------------------------ parts

    def _begin(self, *_: Any) -> None:
        """In front of the first forward: the random state is put back, if no loader has done it."""
        self._first.remove()
        if self.session.restored is not None and not self._is_placed:
            raise ConfigError(
                f"autockpt.integrations.deepspeed: the state was resumed at step "
                f"{self.session.step_count}, and nothing puts the loop there. Iterate "
                "ckpt.loader(loader) from its epoch on, or begin the loop at ckpt.step_count"
            )
        self.session.finish_restore()

    def _stepped(self, *arguments: Any, **named: Any) -> Any:
        """In the place of `engine.step`."""
        self.finish_iteration()
        ends = bool(self._engine.is_gradient_accumulation_boundary())
        result = self._step(*arguments, **named)
        self._owes = ends
        if not self._loaders:
            self.finish_iteration()
        return result

    def _at_exit(self) -> None:
        if getattr(sys, "last_value", None) is None:
            self.close()

    def _extra(self) -> dict[str, Any]:
        engine = self._engine
        return {
            "counters": {name: getattr(engine, name) for name in COUNTERS},
            "accumulation": engine.gradient_accumulation_steps(),
            "loss_scaler": _plain(getattr(engine.optimizer, "loss_scaler", None)),
        }

    def _load(self, step: int, extra: Mapping[str, Any]) -> None:
        """Counters.  A checkpoint of another system has none: they follow from its step."""
        engine = self._engine
        counters = extra.get("counters") or {
            "global_steps": step, "global_samples": step * engine.train_batch_size(),
            "skipped_steps": 0,
        }  # fmt: skip
        accumulation = engine.gradient_accumulation_steps()
        if extra.get("accumulation") != accumulation:  # the phase is that of a boundary in any case
            counters = {**counters, "micro_steps": counters["global_steps"] * accumulation}
        for name in COUNTERS:
            setattr(engine, name, counters[name])
        scaler = getattr(engine.optimizer, "loss_scaler", None)
        for name, value in (extra.get("loss_scaler") or {}).items():
            if hasattr(scaler, name):
                setattr(scaler, name, value)


class EngineLoader(OverLoader):
    """A loader whose next batch is the beginning of an iteration."""

    def __init__(self, engine: ProtectedEngine, placed: Any, timer: Any) -> None:
        super().__init__(placed)
        self._protected, self._timer = engine, timer

    def __iter__(self) -> Iterator[Any]:
        """The rest of the epoch of the checkpoint, else a whole one; none once it was stopped."""
        protected = self._protected
        self._placed.end_left_epoch()
        protected.finish_iteration()
        batches = iter(self._placed)
        while not protected.stopped:
            if self._timer is not None:
                self._timer.start()
            try:
                batch = next(batches)
            except StopIteration:
                return
            yield batch
            protected.finish_iteration()


def _require_protectable(engine: Any) -> None:
    kind = type(engine).__qualname__
    here = "autockpt.integrations.deepspeed.protect"
    if not all(hasattr(engine, name) for name in (*COUNTERS, "module", "backward")):
        raise ConfigError(f"{here}: got a {kind}; expected the engine of deepspeed.initialize")
    if hasattr(engine, "train_batch"):
        raise ConfigError(f"{here}: a {kind} divides the model by stages, which is not supported")
    optimizer = engine.optimizer
    if not is_zero(optimizer) and not isinstance(optimizer, torch.optim.Optimizer):
        raise ConfigError(
            f"{here}: the state of a {type(optimizer).__qualname__} is not known; expected ZeRO 1 "
            "to 3, or stage 0 in fp32. Set zero_optimization.stage to 1"
        )


def _parts(engine: Any) -> list[tuple[str, Any]]:
    """Return the parts of the engine with a state of their own, by their names in checkpoints."""
    return [
        (name, one if hasattr(one, "load_state_dict") else None)
        for name, one in (
            ("scheduler", engine.lr_scheduler),
            ("grad_scaler", getattr(engine, "torch_autocast_z0_gradscaler", None)),
            ("random_ltd", getattr(engine, "random_ltd_scheduler", None)),
        )
    ]


def _plain(scaler: Any) -> dict[str, Any]:
    """Numbers and names of a loss scaler: its scale, and what makes it grow and shrink."""
    return {k: v for k, v in vars(scaler).items() if type(v) in _PLAIN} if scaler else {}


def _inner(loader: Any) -> tuple[Any, Any]:
    """(DataLoader, throughput timer) of a DeepSpeedDataLoader; any other loader as it is."""
    if type(loader).__name__ != "DeepSpeedDataLoader":
        return loader, None
    if loader.curriculum_learning_enabled or loader.post_process_func is not None:
        raise ConfigError(
            "autockpt.integrations.deepspeed: the loader of curriculum learning cannot be resumed "
            "at a batch; give ckpt.loader a DataLoader"
        )
    return loader._create_dataloader(), loader.tput_timer
