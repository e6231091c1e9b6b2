"""Whether an iteration that is trained again draws the random numbers that it drew before.

A process that dies behind a checkpoint has often trained the next iteration already.  It left a
digest of its random state behind that iteration.  The process that resumes the checkpoint compares
its own: equal digests show that nothing was drawn between the restored state and the loop.
"""

import hashlib
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from autockpt.executors.linux.signal_errors import is_from_handler
from autockpt.executors.storage.event_log import events_in, file_bytes, newest_bytes
from autockpt.session.base import RankState
from autockpt.values import telemetry as t
from autockpt.values.generation import Generation

MARK_PAUSE_S = 0.02
"""A mark takes up to 0.1 ms.  Checkpoints that follow one another faster have none."""
SEARCHED_BYTES = 16 * 2**20
"""So much of the telemetry's end is searched for the mark of the process before."""
DIGEST_BYTES = 16
MARKED = b'"RandomMarked"'
DIFFERS = (
    "the first iteration behind the restart (step {step}) left another random state than the same "
    "iteration before it. Where the training draws random numbers, this resume is not bit for bit. "
    "Usual causes: numbers drawn between attach and the loop, a batch fetched ahead, another batch "
    "size, numbers that depend on the time. Call attach behind the first, fetch each batch within "
    "its iteration, and keep the batch size"
)
NO_MARK = "no earlier process left a mark of this iteration"
NO_DRAW = "the iteration draws no random numbers"


class ReplayCheck:
    """Leaves the marks of one rank, and compares the first one behind a resume."""

    def __init__(self, rank: RankState) -> None:
        self._rank = rank
        self._saved: Generation | None = None
        """Whose next iteration gets a mark."""
        self._is_resumed = False
        """The training went on from it."""
        self._restored = ""
        """Of the restored state, before the first iteration."""
        self._marked_s = 0.0
        self._mine = ""
        """Of the first iteration, until it is compared."""
        self._former: str | None = None
        """Of the same iteration in the process before; "": it left none.  None: not known yet."""

    def resumed(self, generation: Generation | None) -> None:
        """The training goes on from there; the mark of the process before is looked for."""
        if generation is None:
            return
        self._saved, self._is_resumed = generation, True
        self._restored = self._digest()
        path = Path(self._rank.job.telemetry_path)
        written = file_bytes(path)  # by the processes before

        def look() -> None:
            world = self._rank.job.world_size
            self._former = former_mark(path, generation, world, written=written)

        threading.Thread(target=look, name="autockpt-replay", daemon=True).start()

    @property
    def is_idle(self) -> bool:
        """A boundary has no mark to leave, and none to compare."""
        return self._saved is None and not self._mine

    def saved(self, generation: Generation) -> None:
        """A checkpoint of this boundary began."""
        self._saved = generation

    def boundary(self, step: int) -> None:
        """An iteration ended.  Raises nothing."""
        if self._saved is not None and step > self._saved.step:
            saved, self._saved = self._saved, None
            if step == saved.step + 1:
                self._mark(saved, step)
        if self._mine and self._former is not None:
            self._compare(step)

    def _mark(self, saved: Generation, step: int) -> None:
        is_first, self._is_resumed = self._is_resumed, False
        now = time.monotonic()
        if not is_first and now < self._marked_s + MARK_PAUSE_S:
            return
        self._marked_s, digest, job = now, self._digest(), self._rank.job
        if not digest:
            return
        self._rank.emit(
            t.RandomMarked(
                at_s=now, rank=job.rank, generation=str(saved), step=step,
                world_size=job.world_size, digest=digest,
            )
        )  # fmt: skip
        if is_first:
            self._mine = digest

    def _digest(self) -> str:
        """Of the random state; of several GPUs the current one's.  "": it cannot be read."""
        try:
            state = dict(self._rank.live.random_state())
            if "cuda" in state:
                state["cuda"] = state["cuda"][torch.cuda.current_device()]
            return state_digest(state)
        except Exception as error:
            if is_from_handler(error):
                raise
            return ""

    def _compare(self, step: int) -> None:
        mine, self._mine = self._mine, ""
        rank, start, now = self._rank.job.rank, self._rank.start_step, time.monotonic()
        why_not = NO_MARK if not self._former else NO_DRAW if self._former == self._restored else ""
        equal = None if why_not else self._former == mine
        self._rank.emit(
            t.ReplayChecked(at_s=now, rank=rank, step=start + 1, equal=equal, reason=why_not)
        )
        if equal is not False:
            return
        reason = DIFFERS.format(step=start + 1)
        if rank == 0:
            self._rank.report_degraded("replay", reason)
        else:  # one line is enough for all ranks
            self._rank.emit(t.Degraded(at_s=now, rank=rank, what="replay", reason=reason))


def former_mark(path: Path, generation: Generation, world_size: int, *, written: int) -> str:
    """The first mark behind a checkpoint in the telemetry of a rank; "": there is none.

    The first one is of the process that made the checkpoint.  `written`: bytes of the file before
    this process.
    """
    text = newest_bytes(path, SEARCHED_BYTES, end=written)
    for event in events_in(b"\n".join(line for line in text.splitlines() if MARKED in line)):
        of_it = event.get("event") == "RandomMarked" and event.get("generation") == str(generation)
        if of_it and event.get("world_size") == world_size:
            return str(event.get("digest", ""))
    return ""


def state_digest(state: Any) -> str:
    """Of nested dicts and lists of arrays, tensors and numbers: equal for equal values."""
    digest = hashlib.blake2b(digest_size=DIGEST_BYTES)
    _feed(digest, state)
    return digest.hexdigest()


def _feed(digest: "hashlib.blake2b", value: Any) -> None:
    if isinstance(value, torch.Tensor):
        value = value.detach().cpu().contiguous().numpy()
    if isinstance(value, np.ndarray):
        digest.update(f"{value.dtype.str}{value.shape}".encode())
        digest.update(np.ascontiguousarray(value).data)
    elif isinstance(value, Mapping):
        for key in sorted(value, key=str):
            digest.update(f"{key}=".encode())
            _feed(digest, value[key])
        digest.update(b"}")
    elif isinstance(value, list | tuple):
        for one in value:
            _feed(digest, one)
        digest.update(b"]")
    elif isinstance(value, str | bytes | int | float | np.generic | None):
        digest.update(f"{value!r},".encode())
    else:
        digest.update(type(value).__qualname__.encode())
