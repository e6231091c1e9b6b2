"""The callback that protects `Trainer.fit`.

Lightning calls back where it is convenient, which is not where an iteration has ended: validation,
plateau schedulers and counters come behind `on_train_batch_end`.  So the loop of batches is wrapped
(`loop.py`), and the callback only says when.
"""

import sys
from typing import Any

from autockpt.integrations.lightning.loop import ProtectedFit
from autockpt.values.errors import ConfigError


def _lightning() -> Any:
    """`lightning.pytorch`, or `pytorch_lightning` where the script uses that name.

    Raises ConfigError when neither is installed.
    """
    if "pytorch_lightning" in sys.modules and "lightning.pytorch" not in sys.modules:
        return sys.modules["pytorch_lightning"]
    try:
        import lightning.pytorch as found
    except ImportError:
        try:
            import pytorch_lightning as found
        except ImportError as error:
            raise ConfigError(
                "autockpt.integrations.lightning needs Lightning, which is not installed; "
                "run: pip install 'autockpt[lightning]'"
            ) from error
    return found


_CALLBACK: Any = _lightning().callbacks.Callback


class Autockpt(_CALLBACK):  # type: ignore[misc]
    """Restores a fit and checkpoints it: `Trainer(callbacks=[Autockpt()])`.

    `attach` takes what `autockpt.attach` does (`run_dir`, `goal`, `fresh`, `rules`, `axes`, and
    further objects with state by name).  Raises ConfigError, when `fit` begins, for anything that
    cannot be saved safely.
    """

    def __init__(self, **attach: Any) -> None:
        own = sorted({"model", "optimizer", "data"} & attach.keys())
        if own:
            raise ConfigError(
                f"Autockpt({own[0]}=...): the Trainer gives its own {own[0]}; leave it out"
            )
        self._attach = attach
        self._fit: ProtectedFit | None = None

    @property
    def session(self) -> Any:
        """The session of the fit under way (`save`, `request_stop`, `step_count`); None before."""
        return None if self._fit is None else self._fit.session

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Behind all other callbacks: their work belongs to the iteration."""
        trainer.callbacks = [one for one in trainer.callbacks if one is not self] + [self]

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Model and optimizers exist, nothing has been trained: restores."""
        if trainer.fast_dev_run:
            return
        self._fit = ProtectedFit(trainer, self, self._attach)
        self._fit.begin()

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """The loaders exist."""
        if self._fit is not None:
            self._fit.start()

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """The last iteration has ended."""
        if self._fit is not None:
            self._fit.finish()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """The fit fails: keep the checkpoint in memory for the next start."""
        if self._fit is not None:
            self._fit.fail()

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """The fit is over, whichever way."""
        if self._fit is not None and stage == "fit":
            self._fit.release()
            self._fit = None
