"""TorchTitan's checkpoint manager, with autockpt behind it.

    from autockpt.integrations.torchtitan import AutockptCheckpointManager

    config.checkpoint = AutockptCheckpointManager.Config(enable=True)

No line of the trainer changes.  `load` restores, and `save` ends an iteration.
`maybe_wait_for_staging` stands in front of the optimizer's step.  `close` makes the last checkpoint
durable.  The interval of the config is unused: the plan decides.  TorchTitan's own checkpoints are
read where autockpt has none.  The model behind the last step is written as before.
"""

import copy
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torchtitan.components.checkpointer import CheckpointManager

import autockpt

_OF_TITAN: Any = CheckpointManager
_APART = ("model", "optimizer", "dataloader", "lr_scheduler")
"""Names in the manager's states that are attached by themselves."""


class AutockptCheckpointManager(_OF_TITAN):  # type: ignore[misc]
    """Restores and checkpoints a trainer of TorchTitan."""

    @dataclass(kw_only=True, slots=True)
    class Config(_OF_TITAN.Config):  # type: ignore[misc]
        """As that of TorchTitan's own manager."""

        run_dir: str | None = None
        """Directory of the run; `autockpt run` brings its own."""

    def __init__(
        self,
        config: Any,
        *,
        dataloader: Any,
        model_parts: list[torch.nn.Module],
        optimizers: Any,
        lr_schedulers: Any,
        states: dict[str, Any],
        sd_adapter: Any,
        base_folder: str = "",
    ) -> None:
        super().__init__(
            config, dataloader=dataloader, model_parts=model_parts, optimizers=optimizers,
            lr_schedulers=lr_schedulers, states=states, sd_adapter=sd_adapter,
            base_folder=base_folder,
        )  # fmt: skip
        self.session: Any = None
        """The session that `autockpt.attach` returned; None before `load` and once it was
        closed."""
        self._run_dir = config.run_dir
        self._model_parts, self._optimizers = model_parts, list(optimizers)
        self._owes = False
        """A step was made, and a validation may still follow it."""

    # ------------------------------------------------------------------ the five points

    def _load(self, step: int = -1) -> bool:
        self._held = {
            name: _AsOfSave(one) for name, one in self.states.items() if name not in _APART
        }
        loader = self.states["dataloader"]
        objects = {"scheduler": self.states["lr_scheduler"], **self._held}
        if loader is not None:
            objects["dataloader"] = _Loader(loader)
        self.session = autockpt.attach(
            model=_one("model", self._model_parts), optimizer=_one("optimizer", self._optimizers),
            run_dir=self._run_dir, restore="tensors",
            **objects,
        )  # fmt: skip
        is_restored = self.session.restored is not None
        found = is_restored or bool(super()._load(step))
        self.session.own_boundary()
        if is_restored and isinstance(loader, torch.utils.data.DataLoader):
            _call_behind_iterator(loader, self.session.finish_restore)
        else:
            self.session.finish_restore()
        self._defer()
        return found

    def _save(self, curr_step: int, last_step: bool = False) -> bool:
        if self.load_only or self.session is None:
            return False
        self._finish_iteration()
        for state in self._held.values():
            state.note()
        self._owes = True
        if last_step or not self._has_deferred:
            self._finish_iteration()
        return bool(super()._save(curr_step, last_step)) if last_step else True

    def _maybe_wait_for_staging(self) -> None:
        if self.session is not None:
            self.session.wait_for_staging()

    def _wait_for_saving(self) -> None:
        """Never called: `save_future` stays None."""

    def _close(self) -> None:
        session, self.session = getattr(self, "session", None), None
        if session is not None:
            if self._owes and sys.exc_info()[1] is None:
                self._owes = False
                session.step()
            session.close()
        super()._close()

    # ------------------------------------------------------------------ parts

    def _finish_iteration(self) -> None:
        if self._owes and self.session is not None:
            self._owes = False
            self.session.step()

    def _defer(self) -> None:
        """Iterations end in front of the next `train_step`: a validation behind `save` draws."""
        trainer = self.states.get("train_state")
        train_step = getattr(trainer, "train_step", None)
        self._has_deferred = callable(train_step)
        if not self._has_deferred:
            return

        def stepped(*arguments: Any, **named: Any) -> Any:
            self._finish_iteration()
            assert train_step is not None
            return train_step(*arguments, **named)

        trainer.train_step = stepped


class _AsOfSave:
    """A state of the trainer as it was at `save`: the trainer counts on before the boundary."""

    def __init__(self, owner: Any) -> None:
        self._owner = owner
        self._state: Any = None

    def note(self) -> None:
        """As of now."""
        self._state = copy.deepcopy(self._owner.state_dict())

    def state_dict(self) -> Any:
        """As of the last `note`."""
        return self._owner.state_dict() if self._state is None else self._state

    def load_state_dict(self, state: Any) -> None:
        """Into the trainer."""
        self._owner.load_state_dict(state)


def _one(name: str, values: list[Any]) -> Any:
    """The only one by itself, several by their names."""
    if len(values) == 1:
        return values[0]
    return {f"{name}{number}": value for number, value in enumerate(values)}


class _Loader:
    """A loader's state once it is iterated: asked before, it makes an iterator, which draws."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def state_dict(self) -> dict[str, Any]:
        """As of now; empty while there is no iterator."""
        if getattr(self._loader, "_iterator", self) is None:
            return {}
        state: dict[str, Any] = self._loader.state_dict()
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Into the loader."""
        if state:
            self._loader.load_state_dict(state)


def _call_behind_iterator(loader: Any, call: Callable[[], None]) -> None:
    """`call()` once the loader has made an iterator, before that fetches anything.

    Making it draws a seed, which the first start has drawn already.
    """
    make = loader._get_iterator

    def made() -> Any:
        del loader._get_iterator
        iterator = make()
        call()
        return iterator

    loader._get_iterator = made
