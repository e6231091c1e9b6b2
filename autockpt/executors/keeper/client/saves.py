"""The saves of one rank, on its trainer's side: one handle per checkpoint, one table of its states.

Three threads move a handle, each by an event of `TRANSITIONS`.  The training thread asks for a
save, begins it and gives it up.  The copy thread ends its copy.  The listening thread has the
keeper's news.  An event without a row for the state is late, and changes nothing.
"""

import threading
from collections import deque
from dataclasses import dataclass
from typing import Literal

from autockpt.values.generation import Generation

SaveState = Literal["asked", "granted", "copying", "copied", "withdrawn", "durable", "discarded"]
SaveEvent = Literal[
    "asked", "granted", "refused", "began", "copied", "withdrawn", "revoked", "dropped",
    "keeper lost", "durable", "newer durable",
]  # fmt: skip

STATES: dict[SaveState, str] = {
    "asked": "The trainer asked for a slot, and the keeper has not answered.",
    "granted": "The slot is there, and the boundary has not come.",
    "copying": "The snapshot has begun, and its bytes are on their way into the slot.",
    "copied": "Every byte is in the slot and proven; the keeper knows.",
    "withdrawn": "This rank gave it up, and the keeper has not yet discarded it.",
    "durable": "It is on disk, or a newer checkpoint is.",
    "discarded": "It will not be durable; the handle has the reason.",
}
TRANSITIONS: dict[tuple[SaveState, SaveEvent], SaveState] = {
    ("discarded", "asked"): "asked",
    ("asked", "granted"): "granted",
    ("asked", "refused"): "discarded",
    ("granted", "began"): "copying",
    ("copying", "copied"): "copied",
    ("asked", "withdrawn"): "withdrawn",
    ("granted", "withdrawn"): "withdrawn",
    ("copying", "withdrawn"): "withdrawn",
    ("granted", "revoked"): "discarded",
    ("copying", "dropped"): "discarded",
    ("copied", "dropped"): "discarded",
    ("withdrawn", "dropped"): "discarded",
    ("asked", "keeper lost"): "discarded",
    ("granted", "keeper lost"): "discarded",
    ("copying", "keeper lost"): "discarded",
    ("copied", "keeper lost"): "discarded",
    ("withdrawn", "keeper lost"): "discarded",
    ("copying", "newer durable"): "durable",
    ("copied", "newer durable"): "durable",
    ("asked", "durable"): "durable",
    ("granted", "durable"): "durable",
    ("copying", "durable"): "durable",
    ("copied", "durable"): "durable",
    ("withdrawn", "durable"): "durable",
    ("discarded", "durable"): "durable",
}
"""By (state, event) the state behind it.  Other ranks may have discarded a checkpoint before this
one asks for it, and a new keeper may end what the one before had begun."""

REMEMBERED = 128
"""Handles that are kept; a save that is being written is kept longer."""
TIMED = 64
"""Newest saves whose time until durable is kept."""
UNANSWERED = 8
"""After so many requests for a slot without an answer no more are sent.  A keeper that stands still
reads nothing, and a send to a full socket would block the training."""


@dataclass(slots=True, eq=False)
class SaveHandle:
    """One save of this rank: its state and its figures."""

    generation: Generation
    disk: bool
    """It is to be durable, as the rank asked for it."""
    state: SaveState = "asked"
    slot: int | None = None
    """Where it is copied to, from the grant on."""
    reason: str | None = None
    """Why it will not be durable; None: it may be.  Memory can hold it all the same, so that a save
    that has not begun goes on with a reason."""
    is_wanted_on_disk: bool = False
    """It is being written, as this rank asked or because other ranks had begun to."""
    began_s: float | None = None
    """When its snapshot began, CLOCK_MONOTONIC; None: not in this process."""
    is_settled: bool = False
    """Its end on disk was announced, and is no news any more."""

    @property
    def step(self) -> int:
        """The iteration boundary that it is of."""
        return self.generation.step

    @property
    def is_answered(self) -> bool:
        """The keeper has said whether there is a slot, or that it is discarded already."""
        return self.state != "asked" or self.reason is not None

    @property
    def is_writing(self) -> bool:
        """It was begun, is on its way to storage, and neither durable nor discarded."""
        on_its_way = self.is_wanted_on_disk and self.reason is None
        return on_its_way and self.state in ("copying", "copied")

    def apply(self, event: SaveEvent, reason: str = "") -> None:
        """Moves it by the table; an event that came too late changes nothing."""
        target = TRANSITIONS.get((self.state, event))
        if target == "durable":
            self.reason = None
        elif target == "discarded" or (event == "dropped" and self.state in ("asked", "granted")):
            self.reason = reason
        self.state = target or self.state


class Saves:
    """The handles of one rank by generation, and the newest of each kind.

    Changed from any thread; read without a lock.
    """

    def __init__(self) -> None:
        self.asked: SaveHandle | None = None
        """The newest that was asked for."""
        self.newest: SaveHandle | None = None
        """The newest that was begun."""
        self.newest_on_disk: SaveHandle | None = None
        """The newest that was begun to be durable."""
        self.memory_committed: Generation | None = None
        """The newest that all ranks have sealed in memory."""
        self.durable: Generation | None = None
        """The newest that is on disk."""
        self.durable_s = 0.0
        """When that was announced, CLOCK_MONOTONIC."""
        self.took_s: deque[float] = deque(maxlen=TIMED)
        """From the boundary until durable, of the newest."""
        self.writing: frozenset[Generation] = frozenset()
        """On their way to storage; one that was asked for and not begun is not among them."""
        self._handles: dict[Generation, SaveHandle] = {}
        self._unanswered: set[Generation] = set()
        self._lock = threading.Lock()

    def get(self, generation: Generation) -> SaveHandle | None:
        """Its handle; None where the keeper has not named it, or too long ago."""
        return self._handles.get(generation)

    @property
    def is_silent(self) -> bool:
        """Many requests were sent, and none of them is answered."""
        return len(self._unanswered) >= UNANSWERED

    def is_durable(self, generation: Generation) -> bool:
        """It is on disk, or a newer one is."""
        return self.durable is not None and self.durable >= generation

    def is_discarded(self, generation: Generation) -> bool:
        """It will not be durable."""
        return self.discard_reason(generation) is not None

    def discard_reason(self, generation: Generation) -> str | None:
        """Why it will not be durable; None: it may be."""
        save = self._handles.get(generation)
        return None if save is None else save.reason

    def has_begun(self, generation: Generation) -> bool:
        """Its snapshot began in this process."""
        save = self._handles.get(generation)
        return save is not None and save.began_s is not None

    def is_over(self, generation: Generation) -> bool:
        """It is durable or discarded."""
        return self.is_durable(generation) or self.is_discarded(generation)

    # ------------------------------------------------------------------ this rank

    def ask(self, generation: Generation, *, disk: bool) -> SaveHandle:
        """The request for a slot is about to be sent."""
        with self._lock:
            save = self._of(generation, "asked")
            save.apply("asked")
            save.disk = disk
            self.asked = save
            self._unanswered.add(generation)
        return save

    def forget_request(self, save: SaveHandle) -> None:
        """It could not be sent: no answer is waited for."""
        with self._lock:
            self._unanswered.discard(save.generation)

    def begin(self, save: SaveHandle, *, disk: bool) -> int | None:
        """The snapshot begins in the slot that was granted; None when there is none any more.

        One for disk is discarded when the keeper dies before it is durable.
        """
        with self._lock:
            if save.state != "granted":
                return None
            save.apply("began")
            save.disk = save.disk or disk
            save.is_wanted_on_disk = save.is_wanted_on_disk or save.disk
            self._index(save)
        return save.slot

    def note_began(self, save: SaveHandle) -> None:
        """It has begun indeed: its boundary is copied."""
        self.newest = save
        if save.disk:
            self.newest_on_disk = save

    def change(self, save: SaveHandle, event: Literal["copied", "withdrawn"]) -> None:
        """Apply the end of this rank's copy."""
        with self._lock:
            save.apply(event)
            self._index(save)

    # ------------------------------------------------------------------ heard of the keeper

    def grant(self, generation: Generation, slot: int) -> None:
        """A slot is there."""
        with self._lock:
            save = self._of(generation, "asked")
            save.slot = slot if save.state == "asked" else save.slot
            self._answer(save, "granted")

    def refuse(self, generation: Generation, reason: str) -> None:
        """There is no slot for it."""
        with self._lock:
            self._answer(self._of(generation, "asked"), "refused", reason)

    def revoke(self, generation: Generation, reason: str) -> None:
        """A save with a slot, which has not begun, must not begin."""
        with self._lock:
            save = self._handles.get(generation)
            if save is not None:
                save.apply("revoked", reason)

    def start_writing(self, generation: Generation) -> None:
        """It goes to storage, as this rank asked or because other ranks had begun to."""
        with self._lock:
            if self.is_durable(generation):
                return
            save = self._of(generation, "copied")
            save.is_wanted_on_disk = True
            self._index(save)

    def drop(self, generation: Generation, reason: str) -> SaveHandle | None:
        """It will not be durable; its handle, where it began here and that is news."""
        with self._lock:
            save = self._of(generation, "discarded")
            save.apply("dropped", reason)
            if save.state == "discarded":
                save.reason = reason
            self._index(save)
            return self._settled(save)

    def report_durable(self, generation: Generation, now_s: float) -> SaveHandle | None:
        """It is on disk; its handle, where it began here and that is news.

        Commits may overtake each other.
        """
        with self._lock:
            if self.durable is None or generation > self.durable:
                self.durable, self.durable_s = generation, now_s
            for older in [g for g in self.writing if g < generation]:
                self._handles[older].apply("newer durable")
                self._index(self._handles[older])
            save = self._handles.get(generation)
            if save is None:
                return None
            save.apply("durable")
            self._index(save)
            save = self._settled(save)
            if save is not None and save.began_s is not None:
                self.took_s.append(now_s - save.began_s)
            return save

    def report_keeper_lost(self, reason: str) -> None:
        """Its grants are lost with it, and every save that it was writing."""
        with self._lock:
            for save in self._handles.values():
                if save.is_wanted_on_disk or save.state in ("asked", "granted"):
                    save.apply("keeper lost", reason)
            self.writing = frozenset()
            self._unanswered.clear()

    # ------------------------------------------------------------------ with the lock

    def _of(self, generation: Generation, state: SaveState) -> SaveHandle:
        """Its handle; a new one, where this rank has none, in `state`."""
        save = self._handles.get(generation)
        if save is None:
            save = self._handles[generation] = SaveHandle(generation, disk=False, state=state)
            if len(self._handles) > 2 * REMEMBERED:
                for each in list(self._handles.values())[:-REMEMBERED]:
                    if not each.is_writing:
                        del self._handles[each.generation]
        return save

    def _answer(self, save: SaveHandle, event: SaveEvent, reason: str = "") -> None:
        """Answers come in the order of requests, so older ones get none any more."""
        save.apply(event, reason)
        self._unanswered = {each for each in self._unanswered if each > save.generation}

    def _settled(self, save: SaveHandle) -> SaveHandle | None:
        """The handle, once, of a save whose snapshot began here."""
        if save.began_s is None or save.is_settled:
            return None
        save.is_settled = True
        return save

    def _index(self, save: SaveHandle) -> None:
        """Keeps ready what is read at every boundary."""
        if save.is_writing != (save.generation in self.writing):
            self.writing ^= {save.generation}
