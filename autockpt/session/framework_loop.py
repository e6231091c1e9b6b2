"""What an adapter needs of a session: the loop, its counters and its loaders are a framework's.

    ckpt = autockpt.attach(model=..., optimizer=..., extra=counters, restore="tensors")
    if ckpt.restored: ...                   # step and extra: the framework begins there
    loader = ckpt.loader(loader)            # one pass is one epoch
    ckpt.own_boundary(total)
    ckpt.finish_restore()                   # random state, where the framework is ready
    ...; ckpt.step()                        # at the end of each iteration

docs/adapters.md says which moment is the right one.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from autockpt.executors.restore.resume import Resumed
from autockpt.executors.state.epoch_loader import EpochLoader
from autockpt.executors.state.live_state import LiveState
from autockpt.executors.state.rng import set_rng_state
from autockpt.session.job import Job
from autockpt.session.stopping import Stopping
from autockpt.values.errors import ConfigError

Extra = Callable[[], Mapping[str, Any]]
"""Counters of the framework as of now, as JSON can hold them."""
ONLY = "data"
"""Name of the loader where there is one; its place is stored as that of attach(data=...)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Restored:
    """What the training went on from."""

    step: int
    """Iterations trained."""
    source: str
    """memory, peer, parity or disk."""
    extra: Mapping[str, Any] = field(default_factory=dict)
    """What `attach(extra=...)` gave at that step; empty where it gave nothing."""


class FrameworkLoop(Stopping):
    """A session whose loop, loaders and counters belong to a framework."""

    def __init__(
        self, job: Job, state: LiveState, data: Any, *, extra: Extra | None, deferred: bool
    ) -> None:
        super().__init__(job, state, data)
        self._extra = extra
        self._deferred = deferred
        """`finish_restore` puts the random state back, not `attach`."""
        self._placed = self._placed or deferred
        self._loaders: dict[str, EpochLoader] = {}
        self._saved_places: dict[str, Any] = {}
        """Of loaders that were not made yet, by name."""
        self._saved_rng: Any = None
        self._restored: Restored | None = None

    # ------------------------------------------------------------------ the public face

    @property
    def restored(self) -> Restored | None:
        """What `attach` found; None: the training begins at step 0."""
        return self._restored

    @property
    def due(self) -> bool:
        """A checkpoint begins at the coming boundary, if its slot is there."""
        return not self._closed and (self._is_stopping or self._due(self._step + 1))

    def finish_restore(self) -> None:
        """Puts the random state of the checkpoint back.  A second call does nothing.

        With `attach(restore="tensors")` alone; call it where the bare framework stands between two
        iterations.  Else the first batch of a resumed `loader` does it.
        """
        rng, self._saved_rng = self._saved_rng, None
        if rng is not None:
            set_rng_state(rng)

    def loader(
        self, dataloader: Any, *, ahead: int = 0, name: str = ONLY, replace: bool = False
    ) -> EpochLoader:
        """The loader, iterated by a loop of one's own: one pass is one epoch.

        After a restart its first pass is the rest of the epoch under way, in the order of then;
        `loader.epoch` is that epoch's number.  A checkpoint made behind an epoch's last batch goes
        on with the next one where the loop had asked for one batch more, as a `for` does; else
        the first pass gives no batch.  `ahead`: batches that a framework fetches before it trains
        the one that it has.  `name`: of each loader, where there are several.  `replace`: it takes
        the place of one of that name, which is iterated no more.

        Raises ConfigError for a loader that cannot be resumed at a batch.
        """
        if self._data is not None:
            raise ConfigError(
                "ckpt.loader(): attach(data=...) has a loader already; leave `data` out of attach"
            )
        if name in self._loaders and not replace:
            raise ConfigError(f"ckpt.loader(name={name!r}): there is one of that name already")
        loader = EpochLoader(dataloader, ahead=ahead, begin=self.finish_restore)
        saved = self._saved_places.pop(name, None)
        if saved is not None:
            loader.load(saved)
        self._loaders[name] = loader
        return loader

    # ------------------------------------------------------------------ state

    def _position(self) -> dict[str, Any] | None:
        if not self._loaders:
            return super()._position()
        places = {name: loader.state() for name, loader in self._loaders.items()}
        return places[ONLY] if list(places) == [ONLY] else {"loaders": places}

    def _progress(self) -> dict[str, Any]:
        progress = super()._progress()
        if self._extra is not None:
            progress["extra"] = json.dumps(dict(self._extra()))
        return progress

    def _take_extra(self, resumed: Resumed) -> None:
        progress = resumed.progress or {}
        if resumed.generation is not None:
            extra = json.loads(progress.get("extra") or "{}")
            self._restored = Restored(step=resumed.step, source=resumed.source, extra=extra)
        if self._data is None and progress.get("data") is not None:
            place = progress["data"]
            self._saved_places = dict(place.get("loaders", {ONLY: place}))

    def _take_rng(self, rng: Any) -> None:
        if self._deferred:
            self._saved_rng = rng
        else:
            set_rng_state(rng)
