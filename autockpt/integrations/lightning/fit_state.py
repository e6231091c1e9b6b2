"""The state of a fit beside model, optimizers and schedulers.

That is the counters of all loops, the place in each loader, callbacks, data module and precision
plugin.  It includes the logged values (sums of the epoch under way, and torchmetrics that hold
them).  A scheduler, or early stopping, may follow them.
"""

from collections.abc import Mapping
from typing import Any

import torch

from autockpt.integrations.adapters import require_counters
from autockpt.session.place.script.changed_attributes import ChangedAttributes


class FitState:
    """Attached as `lightning`; takes a state back when `resume` is called."""

    def __init__(self, trainer: Any, callback: Any) -> None:
        self._trainer, self._callback = trainer, callback
        self._loaded: dict[str, Any] | None = None
        self._schedulers: list[Any] = []
        """Of callbacks that say their state."""
        self._plain = ChangedAttributes({})
        self.within_epoch = True
        """The boundary is within the loop of batches; False: an epoch has ended."""
        self.is_cut = False
        """The boundary is behind an epoch that `max_steps` has ended in its middle."""

    # ------------------------------------------------------------------ out

    def counters(self) -> dict[str, Any]:
        """For `autockpt.peek`."""
        trainer = self._trainer
        return {"epoch": trainer.current_epoch, "global_step": trainer.global_step}

    def state_dict(self) -> dict[str, Any]:
        """As of a boundary."""
        trainer, connector = self._trainer, self._trainer._logger_connector
        loops = trainer.fit_loop.state_dict()
        loops["state_dict"].pop("combined_loader", None)
        if self.is_cut:  # it goes on where a later start has more steps
            for counts in loops["epoch_progress"].values():
                counts["processed"] -= 1
                counts["completed"] -= 1
        return {
            "within_epoch": self.within_epoch,
            "is_cut": self.is_cut,
            "should_stop": bool(trainer.should_stop),
            "loops": loops,
            "reloaded": [
                trainer.fit_loop._last_train_dl_reload_epoch,
                trainer.fit_loop.epoch_loop.val_loop._last_val_dl_reload_epoch,
            ],
            "callbacks": {one.state_key: one.state_dict() for one in self._others()},
            "attributes": self._plain.state(),
            "precision": trainer.precision_plugin.state_dict(),
            "hooks": self._hooked(),
            "datamodule": trainer.datamodule.state_dict() if trainer.datamodule else {},
            "results": _results_of(trainer.fit_loop.epoch_loop._results),
            "metrics": {n: _metric_state(m) for n, m in self._metrics() if m._update_count},
            "logged": {
                "first": connector._first_loop_iter,
                "fx": connector._current_fx,
                "callback": dict(connector._callback_metrics),
                "logged": dict(connector._logged_metrics),
                "bar": dict(connector._progress_bar_metrics),
            },
        }

    def _others(self) -> list[Any]:
        return [one for one in self._trainer.callbacks if one is not self._callback]

    def _metrics(self) -> list[tuple[str, Any]]:
        """Metrics of torchmetrics that the module has, by name."""
        from torchmetrics import Metric

        module = self._trainer.lightning_module
        return [(name, one) for name, one in module.named_modules() if isinstance(one, Metric)]

    def _hooked(self) -> dict[str, Any]:
        """Return the changes by `on_save_checkpoint` of module, data module and callbacks."""
        owners = self._owners("on_save_checkpoint")
        if not owners:
            return {}
        given = self._checkpoint()
        checkpoint = dict(given)
        for owner, arguments in owners:
            owner.on_save_checkpoint(*arguments, checkpoint)
        return {k: v for k, v in checkpoint.items() if k not in given or v is not given[k]}

    def _checkpoint(self) -> dict[str, Any]:
        """As Lightning gives it to hooks, as far as they may look at it."""
        trainer = self._trainer
        return {
            "epoch": trainer.current_epoch,
            "global_step": trainer.global_step,
            "pytorch-lightning_version": "",
            "state_dict": trainer.lightning_module.state_dict(),
            "loops": {"fit_loop": trainer.fit_loop.state_dict()},
            "callbacks": {},
        }

    def _owners(self, hook: str) -> list[tuple[Any, tuple[Any, ...]]]:
        """(who overrides a hook, the arguments in front of the checkpoint)."""
        trainer = self._trainer
        module = trainer.lightning_module
        found = [(one, (trainer, module)) for one in self._others() if _overrides(one, hook)]
        both = [one for one in (module, trainer.datamodule) if one is not None]
        return [*found, *((one, ()) for one in both if _overrides(one, hook))]

    # ------------------------------------------------------------------ back

    def start(self) -> None:
        """All objects are built, and nothing is trained: what changes from here on is kept."""
        trainer = self._trainer
        callbacks = {
            one.state_key: one for one in self._others() if not _overrides(one, "state_dict")
        }
        both = {"module": trainer.lightning_module, "datamodule": trainer.datamodule}
        owners = {
            name: one for name, one in (callbacks | both).items()
            if one is not None and not _overrides(one, "on_save_checkpoint")
        }  # fmt: skip
        self._plain = ChangedAttributes(owners)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Kept until `resume`."""
        self._loaded = state

    def resume(self) -> None:
        """Puts back all but what the setup of loaders and loops would overwrite."""
        trainer, state = self._trainer, self._loaded or {}
        require_counters("Autockpt()", state, "loops")
        trainer.fit_loop.load_state_dict(state["loops"])
        self.within_epoch, self.is_cut = state["within_epoch"], state.get("is_cut", False)
        trainer.should_stop = state["should_stop"]
        for one in self._others():
            if state["callbacks"].get(one.state_key):
                one.load_state_dict(state["callbacks"][one.state_key])
                if getattr(one, "_restarting", False):  # it builds groups of parameters here
                    one.on_fit_start(trainer, trainer.lightning_module)
        if state["precision"]:
            trainer.precision_plugin.load_state_dict(state["precision"])
        if trainer.datamodule and state["datamodule"]:
            trainer.datamodule.load_state_dict(state["datamodule"])
        if state["hooks"] or self._owners("on_load_checkpoint"):
            checkpoint = {**self._checkpoint(), **state["hooks"]}
            for owner, arguments in self._owners("on_load_checkpoint"):
                owner.on_load_checkpoint(*arguments, checkpoint)
        metrics = dict(self._metrics())
        for name, saved in state["metrics"].items():
            if name in metrics:
                _put_metric(metrics[name], saved)

    def put_results_back(self) -> None:
        """Put the logged values back, once nothing resets them any more."""
        trainer, connector = self._trainer, self._trainer._logger_connector
        state = self._loaded or {}
        loops, logged = trainer.fit_loop, state["logged"]
        loops._last_train_dl_reload_epoch = state["reloaded"][0]
        loops.epoch_loop.val_loop._last_val_dl_reload_epoch = state["reloaded"][1]
        connector._first_loop_iter, connector._current_fx = logged["first"], logged["fx"]
        connector._callback_metrics = dict(logged["callback"])
        connector._logged_metrics = dict(logged["logged"])
        connector._progress_bar_metrics = dict(logged["bar"])
        _await_results(loops.epoch_loop._results, dict(state["results"]))
        for one in self._others():  # it is asked at the begin of an epoch, which is over
            if hasattr(one, "get_accumulate_grad_batches"):
                trainer.accumulate_grad_batches = one.get_accumulate_grad_batches(
                    trainer.current_epoch
                )
        for one in self._others():
            if isinstance(getattr(one, "_scheduler_state", None), Mapping):
                _begin_averaging(one, trainer)
                self._schedulers.append(one._swa_scheduler)
        self._plain.load(state.get("attributes", {}))
        self._loaded, self.within_epoch, self.is_cut = None, True, False

    def end_cut(self) -> None:
        """Nothing was left to train: the epoch counts as Lightning had counted it."""
        if self.is_cut:
            progress = self._trainer.fit_loop.epoch_progress
            for counts in (progress.total, progress.current):
                counts.processed += 1
                counts.completed += 1


def _begin_averaging(callback: Any, trainer: Any) -> None:
    """StochasticWeightAveraging takes the scheduler over when an epoch begins, which has begun.

    It averages nothing here.  A new scheduler sets learning rates, so the rates of the checkpoint
    are put back.
    """
    (optimizer,) = trainer.optimizers
    groups = [dict(group) for group in optimizer.param_groups]
    epoch, ends, averaged = (
        trainer.current_epoch, callback._max_epochs, callback._latest_update_epoch
    )  # fmt: skip
    callback._max_epochs, callback._latest_update_epoch = max(ends, epoch + 1), epoch
    callback.on_train_epoch_start(trainer, trainer.lightning_module)
    callback._max_epochs, callback._latest_update_epoch = ends, averaged
    if epoch == ends:  # one more, for the statistics of norms
        callback.on_train_epoch_start(trainer, trainer.lightning_module)
    for group, saved in zip(optimizer.param_groups, groups, strict=True):
        group.update(saved)


def _overrides(owner: Any, hook: str) -> bool:
    """Not as Lightning's base classes have it, which do nothing."""
    method = getattr(type(owner), hook, None)
    bases = ("Callback", "LightningModule", "LightningDataModule", "CheckpointHooks", "DataHooks")
    return method is not None and method.__qualname__.split(".")[0] not in bases


# ---------------------------------------------------------------------- what was logged


def _metric_state(metric: Any) -> dict[str, Any]:
    values: dict[str, Any] = {name: getattr(metric, name) for name in metric._defaults}
    return {"values": values, "updates": metric._update_count}


def _put_metric(metric: Any, saved: Mapping[str, Any]) -> None:
    for name, value in saved["values"].items():
        setattr(metric, name, _on(metric.device, value))
    metric._update_count, metric._computed = saved["updates"], None


def _on(device: Any, value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.to(device)
    return [_on(device, one) for one in value] if isinstance(value, list) else value


def _results_of(results: Mapping[str, Any]) -> dict[str, Any]:
    """Of what `self.log` sums up over the epoch, by key; torchmetrics have their own state."""
    return {
        key: {**_metric_state(one), "newest": one._forward_cache, "reset": one.has_reset}
        for key, one in results.items()
        if one.is_tensor
    }


def _await_results(results: Any, saved: dict[str, Any]) -> None:
    """Each sum gets its value back when it is logged for the first time."""
    kind = type(results)

    class Resumed(kind):  # type: ignore[misc,valid-type]
        """Until the epoch ends."""

        def __setitem__(self, key: str, one: Any) -> None:
            super().__setitem__(key, one)
            if key in saved and one.is_tensor:
                kept = saved.pop(key)
                _put_metric(one, kept)
                one._forward_cache, one.has_reset = kept["newest"], kept["reset"]

        def reset(self, metrics: bool | None = None, fx: str | None = None) -> None:
            super().reset(metrics, fx)
            if fx is None:
                saved.clear()
                self.__class__ = kind

    if saved:
        results.__class__ = Resumed
