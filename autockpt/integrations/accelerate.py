"""Loops of Hugging Face Accelerate under autockpt.

    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    ckpt = autockpt.integrations.accelerate.attach(accelerator)
    for epoch in range(ckpt.epoch, epochs):
        for batch in loader:
            with accelerator.accumulate(model):
                ...
            ckpt.step()
    ckpt.close()

All that was prepared, was registered for checkpointing or counts inside of the accelerator is found
there.  The prepared loaders stay in use, with their work for devices, ranks and accumulation; the
DataLoader inside each is one that knows its place.  An iteration is one with a step of the
optimizer: micro-batches before it belong to it.  Code of a script behind its inner loop belongs to
the last iteration of the epoch.
"""

import atexit
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import torch

import autockpt
from autockpt.integrations.adapters import OverSession, reading_of, require_counters
from autockpt.values.errors import ConfigError


def attach(accelerator: Any, *, run_dir: str | None = None, **others: Any) -> "AcceleratedLoop":
    """Protects what `accelerator.prepare` gave; restores it if there is a checkpoint.

    `run_dir`, `goal`, `fresh` and further objects as of `autockpt.attach`.  Call it behind all
    calls of `prepare`.  Raises ConfigError where no model was prepared, or a loader cannot be
    resumed at a batch.
    """
    if not accelerator._models:
        raise ConfigError(
            "attach(accelerator): no model was prepared; call it behind accelerator.prepare(...)"
        )
    return AcceleratedLoop(accelerator, run_dir, others)


class AcceleratedLoop(OverSession):
    """The session of an accelerator's loop."""

    def __init__(self, accelerator: Any, run_dir: str | None, others: dict[str, Any]) -> None:
        self._accelerator = accelerator
        self._loaders = list(accelerator._dataloaders)
        self._owed: Any = None
        """The loader whose epoch has ended, with the boundary of its last iteration."""
        self._batches = [0] * len(self._loaders)
        """Micro-batches trained in the epoch of each loader."""
        self._resumed = [(0, 0)] * len(self._loaders)
        """These, and batches read for them, where a checkpoint has the epoch of each loader."""
        self._goes_on = [False] * len(self._loaders)
        """The next pass over each loader is the rest of an epoch."""
        self._under_way = list(self._goes_on)
        self._epochs = [0] * len(self._loaders)
        """Passes over each loader that have ended; the script may leave one early."""
        custom = accelerator._custom_objects
        optimizers = [one for one in custom if isinstance(one, torch.optim.Optimizer)]
        objects = {
            **_named("scheduler", [getattr(s, "scheduler", s) for s in accelerator._schedulers]),
            **_named(
                "custom", [one for one in custom if not isinstance(one, torch.optim.Optimizer)]
            ),
            **others,
        }
        self.session = autockpt.attach(
            model=_one("model", accelerator._models),
            optimizer=_one("optimizer", [*accelerator._optimizers, *optimizers]),
            scaler=getattr(accelerator, "scaler", None),
            run_dir=run_dir, extra=self._extra, restore="tensors", **objects,
        )  # fmt: skip
        restored = self.session.restored
        if restored is not None:
            self._load(restored.extra)
        self._places = [self._protect(n, loader) for n, loader in enumerate(self._loaders)]
        self.session.own_boundary()
        if not self._loaders:
            self.session.finish_restore()
        atexit.register(self._at_exit)

    # ------------------------------------------------------------------ the public face

    @property
    def epoch(self) -> int:
        """The epoch that the first prepared loader goes on with, or begins."""
        if not self._places:
            raise ConfigError("ckpt.epoch: no loader was prepared; use ckpt.step_count")
        return self._epochs[0] + (self._owed is self._loaders[0])

    @property
    def first_batch(self) -> int:
        """The number of the micro-batch that the next pass over that loader begins with.

        For a loop that counts: `enumerate(loader, ckpt.first_batch)`.  With another batch size or
        number of processes than before, the rest of an epoch is numbered from its end.
        """
        return self._batches[0] if self._places and self._goes_on[0] else 0

    @property
    def step_count(self) -> int:
        """Iterations with a step of the optimizer that were trained, restored ones included."""
        return int(self.session.step_count)

    def step(self) -> int:
        """Marks the end of a micro-batch, behind `accumulate`; the number of iterations.

        Where gradients are still being accumulated it is no boundary.
        """
        loader = self._accelerator.gradient_state.active_dataloader
        number = self._number(loader)
        if number is not None:
            self._batches[number] += 1
            self._tell_trained(number, self._places[number])
        if not self._accelerator.sync_gradients:
            return self.step_count
        if number is not None and loader.end_of_dataloader:
            self._owed = loader
        else:
            self.session.step()
        return self.step_count

    def batches(self, total: int, *, loader: int = 0) -> Iterator[tuple[int, Any]]:
        """(iterations so far, micro-batch) over prepared loader number `loader`, until `total`.

        Iterations are those with a step of the optimizer; `step()` is called here.
        """
        self.session.own_boundary(total)
        while self.step_count < total and not self.stopped:
            for batch in self._loaders[loader]:
                yield self.step_count, batch
                self.step()
                if self.step_count >= total or self.stopped:
                    break
            self._pay()
        self.close()

    def close(self) -> None:
        """The end: the last checkpoint is made durable."""
        if sys.exc_info()[1] is None:
            self._pay()
            self.session.finish_restore()  # nothing was left to train
        atexit.unregister(self._at_exit)
        self.session.close()

    # ------------------------------------------------------------------ parts

    def _pay(self) -> None:
        """The last iteration of an epoch ends where its loader begins another, or the script."""
        if self._owed is not None:
            number, self._owed = self._number(self._owed), None
            assert number is not None
            self._end_pass(number)
            self.session.step()

    def _end_pass(self, number: int) -> None:
        self._epochs[number] += 1
        self._batches[number], self._under_way[number] = 0, False
        self._resumed[number] = (0, 0)

    def _at_exit(self) -> None:
        if getattr(sys, "last_value", None) is None:
            self.close()

    def _number(self, loader: Any) -> int | None:
        return next((n for n, known in enumerate(self._loaders) if known is loader), None)

    def _protect(self, number: int, loader: Any) -> Any:
        inner = getattr(loader, "base_dataloader", None)
        if inner is None:
            raise ConfigError(
                f"attach(accelerator): a {type(loader).__qualname__} has no DataLoader inside that "
                "could be resumed at a batch"
            )
        each, ahead = reading_of(loader, self._accelerator)
        place = self.session.loader(inner, ahead=ahead, name=f"loader{number}")
        loader.base_dataloader = place
        begin, goes_on = loader.begin, place.resumes

        def begun() -> None:
            nonlocal goes_on
            if not ahead and not goes_on:
                place.end_epoch()  # it made an iterator, which drew, and never asked for a batch
            goes_on = False
            if self._owed is loader:
                self._pay()
            if self._under_way[number] and not self._goes_on[number]:
                self._end_pass(number)  # the script has left it early
            self._goes_on[number], self._under_way[number] = False, True
            self.session.finish_restore()
            begin()

        loader.begin = begun
        if self._goes_on[number] and place.place.is_within:
            self._go_on(number, place, each)
        self._tell_trained(number, place)
        return place

    def _go_on(self, number: int, loader: Any, each: int) -> None:
        """Numbers the rest of an epoch from its end; `each`: batches read for a micro-batch."""
        place = loader.place
        if place.left == 0:  # a larger batch is not filled any more
            loader.end_epoch()
            self._goes_on[number] = False
            self._end_pass(number)
            return
        self._batches[number] = place.index // each
        if place.left is not None:
            left = -(-place.left // each)
            self._batches[number] = max(0, -(-len(place.loader) // each) - left)
        self._resumed[number] = self._batches[number], place.index

    def _tell_trained(self, number: int, place: Any) -> None:
        """Only where several batches are read for one: how many are left is not known else."""
        if place.ahead > 1:
            first, read = self._resumed[number]
            place.trained(read + (self._batches[number] - first) * place.ahead)

    def _extra(self) -> dict[str, Any]:
        return {
            "step": self._accelerator.step,
            "accumulation": self._accelerator.gradient_accumulation_steps,
            "iterations": [loader.iteration for loader in self._loaders],
            "batches": list(self._batches),
            "epochs": list(self._epochs),
        }

    def _load(self, extra: Mapping[str, Any]) -> None:
        require_counters("attach(accelerator)", extra, "iterations")
        if len(extra["iterations"]) != len(self._loaders):
            raise ConfigError(
                f"attach(accelerator): {len(self._loaders)} loaders are prepared, and the "
                f"checkpoint was made with {len(extra['iterations'])}; prepare the same ones"
            )
        window = self._accelerator.gradient_accumulation_steps
        # A boundary stands between two windows: with another length of these, at its phase 0.
        is_same = extra.get("accumulation", window) == window
        self._accelerator.step = extra["step"] if is_same else 0
        self._batches = list(extra["batches"])
        self._goes_on = [count > 0 for count in self._batches]
        self._under_way = list(self._goes_on)
        self._epochs = list(extra.get("epochs", extra["iterations"]))
        for loader, iteration in zip(self._loaders, extra["iterations"], strict=True):
            loader.iteration = iteration


def _named(name: str, values: list[Any]) -> dict[str, Any]:
    return {f"{name}{number or ''}": value for number, value in enumerate(values)}


def _one(name: str, values: list[Any]) -> Any:
    """The only one by itself, several by their names."""
    return values[0] if len(values) == 1 else _named(name, values)
