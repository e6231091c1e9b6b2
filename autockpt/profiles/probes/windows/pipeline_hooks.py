"""Begins and ends of torch pipeline chunks and of collectives, reported to a listener.

The stage's own methods are wrapped, once for all of the process, because every schedule runs its
chunks through them.  It may have an action runtime (interleaved, looped, zero-bubble, V) or be a
loop (GPipe, 1F1B).  The receives are waited for between chunks, so that a chunk begins when its
input is there.  Collectives are the ones that Python calls (FSDP2, the script itself); DDP's are
seen through its communication hook (`probes/windows/collectives.py`).
"""

import functools
import sys
import weakref
from collections.abc import Callable
from typing import Any, Protocol

STAGES = "torch.distributed.pipelining.stage"
SCHEDULES = "torch.distributed.pipelining.schedules"


class ChunkListener(Protocol):
    """Hears of every chunk, on the training thread; must return within microseconds."""

    def began(self, what: str) -> None:
        """A chunk begins: its input is there (0F3: stage 0, forward, micro-batch 3)."""

    def ended(self, what: str) -> None:
        """It ended; a receive may be waited for next."""


class StageHooks:
    """Tells `listener` of chunks while attached; one at a time in a process."""

    def __init__(self, listener: ChunkListener) -> None:
        self._listener = listener
        self._originals: list[tuple[Any, str, Callable[..., Any]]] = []
        self._schedule: Callable[[], Any] = lambda: None

    @property
    def schedule(self) -> Any:
        """The torch schedule whose step ran last, None as long as none did."""
        return self._schedule()

    def attach(self) -> bool:
        """Wraps the methods if torch's pipelining is loaded; cheap to ask again."""
        stages, schedules = sys.modules.get(STAGES), sys.modules.get(SCHEDULES)
        if stages is None or schedules is None or self._originals:
            return bool(self._originals)
        base: Any = stages._PipelineStageBase
        self._wrap(base, "forward_one_chunk", lambda args, kwargs: "F")
        self._wrap(base, "backward_one_chunk", _backward_kind)
        self._wrap(base, "backward_weight_one_chunk", lambda args, kwargs: "W")
        self._note_steps(schedules.PipelineScheduleSingle)
        self._note_steps(schedules.PipelineScheduleMulti)
        return True

    def detach(self) -> None:
        """Puts the methods back; twice is fine."""
        while self._originals:
            owner, name, original = self._originals.pop()
            setattr(owner, name, original)

    def _wrap(self, owner: Any, name: str, kind: Callable[[Any, Any], str]) -> None:
        original, listener = getattr(owner, name), self._listener

        @functools.wraps(original)
        def chunk(stage: Any, number: int, *args: Any, **kwargs: Any) -> Any:
            what = f"{stage.stage_index}{kind(args, kwargs)}{number}"
            listener.began(what)
            try:
                return original(stage, number, *args, **kwargs)
            finally:
                listener.ended(what)

        self._replace(owner, name, chunk)

    def _note_steps(self, owner: Any) -> None:
        original = owner.step

        @functools.wraps(original)
        def step(schedule: Any, *args: Any, **kwargs: Any) -> Any:
            self._schedule = weakref.ref(schedule)
            return original(schedule, *args, **kwargs)

        self._replace(owner, "step", step)

    def _replace(self, owner: Any, name: str, wrapped: Callable[..., Any]) -> None:
        self._originals.append((owner, name, getattr(owner, name)))
        setattr(owner, name, wrapped)


def _backward_kind(args: Any, kwargs: Any) -> str:
    """backward_one_chunk(number, loss, full_backward, last_backward): split or not."""
    full = kwargs.get("full_backward", args[1] if len(args) > 1 else True)
    return "B" if full else "I"
