"""A fit under protection: its loops, loaders and signals.

An iteration ends when the loop of batches goes on to the next one.  Validation, schedulers, loggers
and the end of an epoch are over by then.  A resumed fit must not restart as Lightning's do: they
skip a validation, count a batch that trains nothing, or leave out a scheduler.  Instead the loops
get their counters back and go on as if nothing had happened.
"""

import signal
import warnings
from collections.abc import Callable
from typing import Any

import autockpt
from autockpt.executors.state.rng import rng_state, set_rng_state
from autockpt.integrations.lightning.fit_state import FitState
from autockpt.integrations.lightning.ranks import tell_ranks


class ProtectedFit:
    """One call of `Trainer.fit`."""

    def __init__(self, trainer: Any, callback: Any, attach: dict[str, Any]) -> None:
        self._trainer, self._attach = trainer, attach
        self._state = FitState(trainer, callback)
        self._loaders: list[Any] = []
        """Loaders of the training, in their order."""
        self._are_former = False
        """They are of a setup of data before the coming one."""
        self._seen = 0
        """Batches that the last boundary had."""
        self._rng: Any = None
        """The random state of the checkpoint, until the training goes on."""
        self._undo: list[Callable[[], None]] = []
        self._handlers: dict[int, Any] = {}
        self.session: Any = None

    # ------------------------------------------------------------------ begin

    def begin(self) -> None:
        """Restores what there is to restore.  Raises ConfigError for what cannot be saved."""
        trainer = self._trainer
        tell_ranks(trainer)
        self.session = autockpt.attach(
            model=trainer.strategy.model,
            optimizer=_numbered("optimizer", trainer.optimizers),
            restore="tensors",
            extra=self._state.counters,
            lightning=self._state,
            **_numbered("scheduler", [c.scheduler for c in trainer.lr_scheduler_configs]),
            **self._attach,
        )
        watched = (signal.SIGTERM, signal.SIGUSR1)
        self._handlers = {number: signal.getsignal(number) for number in watched}
        if not hasattr(self.session, "fence"):
            return  # a profile is taken: nothing is saved
        self.session.own_boundary(ends_at_once=True)
        if self.session.restored is not None:
            self._resume()
        self._seen = self._batches_trained()
        self._wrap()

    def _resume(self) -> None:
        """The state of the checkpoint is in force; a file that the script names is not."""
        trainer, connector = self._trainer, self._trainer._checkpoint_connector
        self.session.finish_restore()
        self._rng = rng_state()
        self._state.resume()
        self.session.finish_restore()  # once more: groups that a callback has built get their state
        if trainer.ckpt_path:
            print(
                f"autockpt: goes on from its own checkpoint of step {self.session.step_count}, "
                f"not from ckpt_path={trainer.ckpt_path}; Autockpt(fresh=True) begins with that"
            )
        self._replace(connector, "_restore_modules_and_callbacks", lambda *_, **__: None)
        self._replace(connector, "restore_training_state", lambda *_, **__: None)

    def _wrap(self) -> None:
        loop = self._trainer.fit_loop.epoch_loop
        self._replace(self._trainer.fit_loop, "setup_data", self._setup_data)
        self._replace(self._trainer.strategy, "process_dataloader", self._loader)
        self._replace(loop, "advance", self._advance)
        self._replace(loop, "reset", self._reset)
        self._replace(loop, "on_run_start", self._on_run_start)

    def _replace(self, owner: Any, name: str, by: Callable[..., Any]) -> None:
        """Until the fit is over; `by` finds what was there as `owner.<name>` of its class."""
        owner.__dict__[name] = by
        self._undo.append(lambda: owner.__dict__.pop(name, None))

    def _loader(self, loader: Any) -> Any:
        """Return the iterable for Lightning in place of a loader of the training."""
        trainer = self._trainer
        loader = type(trainer.strategy).process_dataloader(trainer.strategy, loader)
        if trainer.sanity_checking or trainer.validating or not trainer.training:
            return loader
        if self._are_former:
            self._loaders, self._are_former = [], False
        name = f"train{len(self._loaders)}"
        ahead = int(_length(loader) is None)  # then Lightning asks for one more to see the end
        placed = self.session.loader(loader, ahead=ahead, name=name, replace=True)
        self._loaders.append(placed)
        return placed

    def _setup_data(self) -> None:
        """Of the training; Lightning may do it again every few epochs."""
        self._are_former = True
        type(self._trainer.fit_loop).setup_data(self._trainer.fit_loop)

    # ------------------------------------------------------------------ the loops

    def start(self) -> None:
        """In front of the first epoch, or of its rest."""
        self._state.start()
        for number, handler in self._handlers.items():
            if getattr(handler, "__module__", "").startswith("autockpt."):
                # Lightning would leave in the middle; ours makes a checkpoint first.
                signal.signal(number, handler)
        if self._rng is not None and not self._state.within_epoch:
            self._restart_no_loop()
            self._go_on()

    def _go_on(self) -> None:
        """Everything is built: from here on random numbers belong to the training."""
        self._state.put_results_back()
        set_rng_state(self._rng)
        self._rng = None

    def _reset(self) -> None:
        loop = self._trainer.fit_loop.epoch_loop
        with warnings.catch_warnings():  # our loaders resume, by another interface than it asks for
            warnings.filterwarnings("ignore", message="You're resuming from a checkpoint that end")
            type(loop).reset(loop)

    def _on_run_start(self, fetcher: Any) -> None:
        loops = self._trainer.fit_loop
        if self._rng is not None:
            self._number_rest()
        type(loops.epoch_loop).on_run_start(loops.epoch_loop, fetcher)
        if self._rng is not None:
            # Not as a restart: that would take validation, or a whole batch, for done.
            self._restart_no_loop()
            self._go_on()

    def _restart_no_loop(self) -> None:
        """The loops go on.  With `max_steps` FitLoop's own setter makes a restart of it again."""
        fit = self._trainer.fit_loop
        fit._restarting = fit.epoch_loop.restarting = False

    def _number_rest(self) -> None:
        """Where its batches are other ones than before, an epoch is counted from its end.

        Lightning steps and validates at the batch that its count says is the last.
        """
        others = [one for one in self._loaders if one.place.is_renumbered]
        if not others:
            return
        fit = self._trainer.fit_loop
        ends_first = fit._combined_loader._mode == "min_size"
        place = (min if ends_first else max)(others, key=lambda one: _length(one) or 0).place
        for count in ("ready", "started", "processed", "completed"):
            setattr(fit.epoch_loop.batch_progress.current, count, place.number)
        for one in others:
            if one.place.left == 0:  # a larger batch is not filled any more
                one.end_epoch()

    def _advance(self, fetcher: Any) -> None:
        loop = self._trainer.fit_loop.epoch_loop
        self.boundary()
        type(loop).advance(loop, fetcher)

    def _batches_trained(self) -> int:
        return int(self._trainer.fit_loop.epoch_loop.batch_progress.total.completed)

    def boundary(self) -> None:
        """An iteration may have ended.  Raises StopIteration where the training is to stop."""
        loop = self._trainer.fit_loop.epoch_loop
        automatic = self._trainer.lightning_module.automatic_optimization
        if self._seen == self._batches_trained() or (automatic and loop._should_accumulate()):
            return
        self._seen = self._batches_trained()
        self.session.step()
        if self.session.stopped:
            self._trainer.should_stop = True
            self._trainer.fit_loop.min_epochs = self._trainer.fit_loop.epoch_loop.min_steps = None
            raise StopIteration

    # ------------------------------------------------------------------ end

    def finish(self) -> None:
        """The training is over: the last checkpoint is made durable."""
        self._state.within_epoch = self._state.is_cut = self._is_cut()
        for loader in [] if self._state.is_cut else self._loaders:
            loader.end_epoch()
        if hasattr(self.session, "fence") and not self.session.stopped:
            try:
                self.boundary()
            except StopIteration:
                return
        self.session.close()

    def _is_cut(self) -> bool:
        """`max_steps` has ended an epoch in its middle; a later start may have more of them."""
        trainer = self._trainer
        batches = trainer.fit_loop.epoch_loop.batch_progress
        is_over = batches.is_last_batch or batches.current.ready >= trainer.num_training_batches
        return -1 < trainer.fit_loop.max_steps <= trainer.global_step and not is_over

    def fail(self) -> None:
        """Called while the exception is handled."""
        if self.session is not None:
            self.session.close()
        self._rng = None
        self.release()

    def release(self) -> None:
        """Lightning's own methods again; a fit that had nothing left to train ends here."""
        for undo in reversed(self._undo):
            undo()
        self._undo.clear()
        if self._rng is not None:
            self._state.end_cut()
            set_rng_state(self._rng)
            self._rng = None
        if self.session is not None:
            self.session.close()


def _numbered(name: str, things: list[Any]) -> dict[str, Any]:
    """By name: name, name1, name2, ..."""
    return {f"{name}{number or ''}": thing for number, thing in enumerate(things)}


def _length(loader: Any) -> int | None:
    """Batches of an epoch; None where the loader does not know."""
    try:
        return len(loader)
    except (TypeError, NotImplementedError):
        return None
