"""How the checkpoints of a run stand, as its keeper knows it: newest ones, errors, status.json."""

import os
import re
import time
from collections.abc import Callable, Collection
from typing import Literal

from autockpt.executors.keeper import wire
from autockpt.executors.keeper.event_recorder import EventRecorder
from autockpt.executors.keeper.slots import CELL_STEP, MemoryTable
from autockpt.executors.keeper.standing.status_file import METRICS_PORT, StatusEndpoint, StatusFile
from autockpt.executors.keeper.standing.storage_standing import Standing
from autockpt.executors.keeper.trainers.trainers import Trainer, Trainers
from autockpt.values.generation import Generation
from autockpt.values.status import RunStatus

STATUS_S = 10.0
"""Between two writes of status.json, where nothing is new."""


def is_protected(state: str, *, durable: Generation | None, in_memory: bool, resumed: bool) -> bool:
    """Whether a failure now would leave a checkpoint of this run.

    `resumed`: the checkpoint that the trainers began from is still on storage.
    """
    if durable is not None or (resumed and state == "running"):
        return True
    return in_memory and state != "finished"


class RunStanding:
    """Takes what the protocol announces, warns people, and writes status.json."""

    def __init__(
        self,
        run_directory: str,
        *,
        trainers: Trainers,
        memory: MemoryTable,
        journal: EventRecorder,
        log: Callable[[str], None],
    ) -> None:
        self._trainers = trainers
        self._memory = memory
        self._journal = journal
        self._log = log
        self.memory_committed = ""
        self.durable: Generation | None = None
        self.protected: Generation | None = None
        self._unprotected = ""
        """Why copies on other nodes are missing; empty: they are not."""
        self._ended: Trainer | None = None
        """The one that was there last."""
        self._troubles: dict[Generation, str] = {}
        """The storage's errors for generations on their way there."""
        self._storage = Standing()
        self._file = StatusFile(run_directory)
        self._endpoint = StatusEndpoint(
            os.path.basename(run_directory), os.environ.get(METRICS_PORT, ""), log
        )
        self._next_s = 0.0
        self._held = False
        """The newest status has seen a checkpoint."""

    def note_end(self, trainer: Trainer) -> None:
        """A trainer is gone, or replaced."""
        self._ended, self._next_s = trainer, 0.0

    def note_trouble(self, generation: Generation, reason: str) -> None:
        """The storage failed for a generation, which may still become durable."""
        self._troubles[generation] = reason

    def note_dropped(self, generation: Generation, trouble: str) -> None:
        """A generation will not be durable; `trouble`: a further error, "" for none."""
        if trouble := self._troubles.pop(generation, trouble):
            self.note_failure(trouble)

    def note_durable(self, generation: Generation) -> None:
        """A generation is committed on storage."""
        self.durable = generation
        self._troubles = {g: why for g, why in self._troubles.items() if g > generation}
        self._say(self._storage.committed(str(generation)))

    def leave_behind(self, is_left: Callable[[Generation], bool]) -> None:
        """Forget checkpoints of an earlier start that this one does not continue (`fresh`)."""
        if self.durable is not None and is_left(self.durable):
            self.durable = None
        if self.memory_committed and is_left(Generation.from_text(self.memory_committed)):
            self.memory_committed = ""

    def note_failure(self, reason: str) -> None:
        """No checkpoint reaches the storage now."""
        wall = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        self._say(self._storage.failed(time.monotonic(), wall, reason))

    def note_protected(
        self, generation: Generation | None, reason: str, *, nbytes: int = 0, moving_s: float = 0.0
    ) -> None:
        """Survives the loss of a node; None: copies are missing, until the next round of them.

        `nbytes`: that came here for it, and were on their way for `moving_s`.
        """
        before = self._unprotected
        self.protected = generation
        self._unprotected = reason if generation is None else ""
        if generation is not None:
            self._journal.protected(generation, nbytes, moving_s)
        elif _without_figures(reason) != _without_figures(before):
            self._log(f"copies on other nodes are missing: {reason}")
            self._journal.protection_lost(reason)

    def remind(self, now_s: float) -> None:
        """Warns again, at growing pauses, while no checkpoint reaches the storage."""
        self._say(self._storage.still(now_s))

    def write(
        self,
        now_s: float,
        catalogue: Collection[Generation],
        *,
        began_from: Generation | None,
        last: bool = False,
    ) -> None:
        """How it stands, and how it ended where no launcher of ours says so.

        `catalogue`: committed generations that this start goes on from, or has made; `began_from`:
        the one that the trainers resumed; `last`: the keeper leaves.
        """
        holds = bool(self.memory_committed or self.durable)
        if now_s < self._next_s and not last and holds == self._held:
            return
        self._held = holds
        self._next_s = now_s + STATUS_S
        ended, live = self._ended, self._trainers.live
        state: Literal["running", "finished", "failed", "interrupted"] = "running"
        if not live:
            if ended is None or ended.launched:
                return
            state = _ENDS.get(ended.leaving, "failed")
        steps = [self._memory.of(rank).cell(CELL_STEP) for rank in live]
        durable = self.durable or max(catalogue, default=None)
        status = RunStatus(
            state=state, exit_code=None, restarts=0,
            last_step=max(steps, default=ended.step if ended else None),
            last_durable=durable.name if durable else None,
            last_protected=self.protected.name if self.protected else None,
            unprotected_because=self._unprotected, degraded=self._storage.degraded,
            protected=is_protected(
                state, durable=self.durable, in_memory=bool(self.memory_committed),
                resumed=began_from in catalogue,
            ), report=None, reason="" if not ended or steps else ended.note,
        )  # fmt: skip
        self._file.write(status)
        self._endpoint.show(status)

    def close(self) -> None:
        """Ends the writer and the endpoint."""
        self._file.close()
        self._endpoint.close()

    def _say(self, text: str) -> None:
        """To a person, through one trainer of this node; and to status.json."""
        if not text:
            return
        self._log(text)
        if self._storage.degraded:
            self._journal.degraded("checkpoint", text)
        for rank in sorted(self._trainers.live)[:1]:
            self._trainers.send_to(rank, wire.StorageStands(rank=rank, text=text))
        self._next_s = 0.0


_ENDS: dict[str, Literal["finished", "interrupted"]] = {
    "finished": "finished", "signal": "interrupted",
}  # fmt: skip
"""By the last word of a trainer; without one it died."""


def _without_figures(reason: str) -> str:
    """Remove figures, so that two rounds that fail for the same reason give one message."""
    return re.sub(r"[\d.]+", "#", reason)
