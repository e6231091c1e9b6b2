"""Ignite's Engine, protected.

    ckpt = autockpt.integrations.ignite.attach(trainer, model=model, optimizer=optimizer)
    trainer.run(ckpt.loader(loader), max_epochs=3)

An iteration has ended when the engine asks for the next batch: handlers of its end, and of an
epoch's end, have run by then.  The engine counts on from there; handlers of `EPOCH_STARTED` run
again for the rest of an epoch, as they do when Ignite itself resumes.
"""

from collections.abc import Mapping
from typing import Any

import autockpt
from autockpt.integrations.adapters import OverSession
from autockpt.values.errors import ConfigError


def attach(engine: Any, **attach: Any) -> "ProtectedEngine":
    """Restores the engine and all that is named, and checkpoints it from now on.

    Call it once all handlers with state exist, in front of `engine.run`.  `attach` takes what
    `autockpt.attach` does.  Raises ConfigError for what cannot be saved.
    """
    if not hasattr(engine, "add_event_handler"):
        raise ConfigError(
            f"autockpt.integrations.ignite.attach: got a {type(engine).__qualname__}; expected the "
            "ignite.engine.Engine of the training"
        )
    return ProtectedEngine(engine, attach)


class ProtectedEngine(OverSession):
    """The session of an engine's run."""

    def __init__(self, engine: Any, attach: Mapping[str, Any]) -> None:
        from ignite.engine import Events

        self._engine = engine
        self._counters = _Counters(engine)
        self.session: Any = autockpt.attach(engine=self._counters, restore="tensors", **attach)
        """The session that `autockpt.attach` returned."""
        self.session.own_boundary()
        self._seen = engine.state.iteration
        self._over = self._counters.is_over()
        engine.add_event_handler(Events.STARTED, self._begin)
        engine.add_event_handler(Events.GET_BATCH_STARTED, self._boundary)
        engine.add_event_handler(Events.COMPLETED, self._finish)
        self._failure = Events.EXCEPTION_RAISED
        engine.add_event_handler(self._failure, self._fail)

    def loader(self, loader: Any, *, name: str = "data") -> Any:
        """Return the iterable for `engine.run` in place of the loader of the training.

        Raises ConfigError for one that cannot be resumed at a batch.
        """
        return self.session.loader(loader, name=name)

    def _begin(self) -> None:
        """Ignite begins anew with a state that is at its end: nothing is left to train."""
        if self._over and self._counters.is_anew:
            self._counters.put_back()
            self._engine.terminate()
        self._counters.fit_to_loader()
        self._seen = self._engine.state.iteration

    def _boundary(self) -> None:
        if self._engine.state.iteration == self._seen:
            self.session.finish_restore()
            return
        self._seen = self._engine.state.iteration
        self.session.step()
        if self.session.stopped:
            self._engine.terminate()

    def _finish(self) -> None:
        self.session.finish_restore()
        if self._engine.state.iteration != self._seen and not self.session.stopped:
            self._seen = self._engine.state.iteration
            self.session.step()
        self.session.close()

    def _fail(self, engine: Any, error: BaseException) -> None:
        """The keeper keeps what is in memory for the next start.

        Ignite raises an error only where nothing handles it.  A handler of the script's decides
        whether the engine goes on; the iteration that failed is no boundary.
        """
        self._seen = engine.state.iteration
        if len(engine._event_handlers[self._failure]) > 1:
            return
        self.session.close()
        raise error


class _Counters:
    """Iteration, epochs and the script's entries in `state_dict_user_keys`."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self._loaded: dict[str, Any] = {}

    def state_dict(self) -> dict[str, Any]:
        """As of now."""
        state = self._engine.state
        names = ("iteration", "epoch", "epoch_length", "max_epochs", "max_iters")
        user = {name: getattr(state, name) for name in self._engine.state_dict_user_keys}
        return {
            **{name: getattr(state, name, None) for name in names},
            "user": user, "batches": _length(state.dataloader),
        }  # fmt: skip

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Into the engine."""
        self._loaded = state
        self.put_back()

    def put_back(self) -> None:
        """Put the loaded counters back.

        The engine counts epochs from the iteration, as Ignite does.
        """
        engine, loaded = self._engine, self._loaded
        for name in ("iteration", "epoch_length", "max_epochs", "max_iters"):
            setattr(engine.state, name, loaded[name])
        length = loaded["epoch_length"]
        engine.state.epoch = loaded["iteration"] // length if length else 0
        for name, value in loaded["user"].items():
            setattr(engine.state, name, value)

    def fit_to_loader(self) -> None:
        """Where the loader has another number of batches, an epoch has as many iterations.

        Ignite asks for the length in a first run alone.  The rest of an epoch is counted from its
        end, and all iterations are as many as if the loader had been this one.
        """
        state, loader, loaded = self._engine.state, self._engine.state.dataloader, self._loaded
        was, now = loaded.get("batches"), _length(loader)
        if not hasattr(loader, "place") or state.max_epochs is None or was in (None, now):
            return
        if now is None or was != state.epoch_length:
            return
        place = loader.place
        within = place.number if place.is_within else 0
        state.epoch_length, state.iteration = now, state.iteration // was * now + within
        self._loaded = {**loaded, "batches": now}
        print(
            f"autockpt: an epoch had {was} iterations and has {now}; the engine goes on at "
            f"iteration {state.iteration}",
            flush=True,
        )

    @property
    def is_anew(self) -> bool:
        """Ignite has begun again, as it does with a state that is at its end."""
        return bool(self._engine.state.iteration < self._loaded["iteration"])

    def is_over(self) -> bool:
        """The checkpoint is of the end of a run."""
        return bool(self._loaded) and bool(self._engine._is_done(self._engine.state))


def _length(loader: Any) -> int | None:
    """Batches of an epoch; None where the loader does not know."""
    try:
        return len(loader)
    except (TypeError, NotImplementedError):
        return None
