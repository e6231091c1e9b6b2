"""The session that `autockpt.attach` returns while a profile is taken: iterates, saves nothing."""

import contextlib
from collections.abc import Iterator
from typing import Any

from autockpt.executors.state.data.data_position import DataPosition
from autockpt.executors.state.data.epoch_loader import EpochLoader
from autockpt.profiles.probes.iteration import PhaseTimer
from autockpt.values.errors import AutockptError


class PassThroughSession:
    """The interface of a session, without protection; it always starts at step 0.

    Raises ConfigError, as a session does, for data without a known position.
    """

    def __init__(self, data: Any, timer: PhaseTimer | None) -> None:
        self._data = None if data is None else DataPosition(data)
        self._timer = timer
        self._step = 0
        self._total: int | None = None

    @property
    def step_count(self) -> int:
        """Iterations trained so far."""
        return self._step

    @property
    def epoch(self) -> int:
        """The pass over the attached data that is under way."""
        return 0 if self._data is None else self._data.epoch

    def progress(self) -> dict[str, Any]:
        """Return the progress that a session would save."""
        data = None if self._data is None else self._data.state()
        return {"step": self._step, "data": data}

    def steps_left(self) -> int | None:
        """Iterations that the loop still has, None when it did not say."""
        return None if self._total is None else max(0, self._total - self._step)

    def batches(self, total: int, *, until: int | None = None) -> Iterator[tuple[int, Any]]:
        """(step, batch) for `total` steps, over as many epochs as they take."""
        if self._data is None:
            raise AutockptError("ckpt.batches() needs attach(data=...); or use ckpt.steps(total)")
        for step in self.steps(total, until=until):
            with self._timer.waiting() if self._timer else contextlib.nullcontext():
                batch = self._data.next()
            yield step, batch

    def steps(self, total: int, *, until: int | None = None) -> Iterator[int]:
        """The steps up to `total`, or to `until`."""
        self._total = total
        for step in range(self._step, total if until is None else min(total, until)):
            yield step
            self._step = step + 1

    def report_loss(self, loss: Any) -> None:
        """Nothing is rolled back while a profile is taken."""

    def own_boundary(self, total: int | None = None, *, ends_at_once: bool = False) -> None:
        """The profile finds iterations by itself."""
        self._total = total

    @property
    def restored(self) -> None:
        """Nothing is restored."""
        return None

    @property
    def due(self) -> bool:
        """No checkpoint is."""
        return False

    def finish_restore(self) -> None:
        """Nothing is restored."""

    def loader(
        self, dataloader: Any, *, ahead: int = 0, name: str = "data", replace: bool = False
    ) -> EpochLoader:
        """The loader, from its first epoch on."""
        return EpochLoader(dataloader, ahead=ahead, begin=lambda: None)

    def step(self) -> int:
        """Marks the end of an iteration; the profile takes it from the optimizer."""
        self._step += 1
        return self._step

    def save(self) -> None:
        """Nothing is saved."""

    def report(self, **values: Any) -> None:
        """Nothing is kept."""

    def request_stop(self, reason: str = "") -> None:
        """The profile ends by itself."""

    @property
    def stopped(self) -> bool:
        """False: there are no requests for a stop."""
        return False

    @property
    def ready(self) -> bool:
        """No slots are waited for."""
        return True

    @property
    def fence_stall_s(self) -> float:
        """Nothing is waited for at fences."""
        return 0.0

    @property
    def keeper_pid(self) -> int | None:
        """There is no keeper."""
        return None

    def wait_durable(self, timeout_s: float) -> float:
        """There is no checkpoint to wait for."""
        return 0.0

    def wait_for_staging(self) -> None:
        """Nothing is in flight that a mutation could tear."""

    fence = wait_for_staging

    def close(self, *, final_checkpoint: bool = True) -> None:
        """Nothing to close."""
