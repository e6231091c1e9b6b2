"""Takes back work of the script that a restart repeats on a state that contains it.

Work once an epoch stands behind the loop of that epoch, or in front of it.  A restart that goes
through the loops from the first one on repeats the work behind trained loops: a scheduler steps
twice.  A restart that goes on within an epoch repeats the work in front of it.
"""

import linecache
import types
from typing import Any

from autockpt.executors.linux.signal_errors import is_from_handler
from autockpt.session.base import RankState
from autockpt.session.boundaries.loop_ahead import is_in_loop
from autockpt.session.place.held_state import HeldState
from autockpt.session.place.training_position import TrainingPosition

_ADVICE = "; `for epoch in range(ckpt.epoch, epochs)` leaves that work out"
_BEGINNING = "; `if loader.first_batch == 0:` leaves it out"


class RepeatedWork:
    """The state as it was restored, until the training goes on."""

    def __init__(self, rank: RankState, position: TrainingPosition) -> None:
        self._rank, self._position = rank, position
        self._held: HeldState | None = None
        """From the first loop on that has nothing left."""
        self._held_in_front: HeldState | None = None
        """From the moment on at which the script asked where its loop over epochs begins."""
        self._mark_in_front: list[Any] | None = None
        """Of the random state at that moment; None where that is not the head of the loop."""
        self._again: set[str] = set()
        """Objects that were put back."""
        self._changed: list[str] = []
        """Tensors that were written to again."""
        self._script: dict[str, Any] = {}
        """States of the script's generators."""

    def passed(self) -> None:
        """A loop had nothing left.  The work behind the former one is taken back."""
        rank = self._rank
        self._held_in_front = None
        if not self._is_restarting:
            return
        if self._held is not None:
            self._put_back(self._held, compares=self._position.was_over)
            return
        try:
            self._held, self._script = HeldState(rank.live), self._position.script_states()
            self._position.put_over_back(self._script)
        except Exception as error:
            if is_from_handler(error):
                raise
            rank.say(f"work behind loops that are trained is not taken back: {error!r:.200}")

    @property
    def _is_restarting(self) -> bool:
        """The training has resumed a state, and not gone on yet."""
        rank = self._rank
        return 0 < rank.start_step == rank.step and rank.rebuilding is None

    def epoch_asked(self, frame: types.FrameType) -> None:
        """The script asks for the epoch.  Work from here to its first batch may be repeated.

        Not so an answer within the loop over epochs: the work has begun.
        """
        within = self._is_restarting and self._position.is_within_epoch
        if not within or self._held is not None or is_in_loop(frame):
            return
        try:
            self._held_in_front = HeldState(self._rank.live, sums=False)
            at_head = _is_head_of_loop(frame)
            self._mark_in_front = self._position.random_mark() if at_head else None
        except Exception as error:
            if is_from_handler(error):
                raise
            self._rank.say(f"work in front of the epoch is not taken back: {error!r:.200}")

    def epoch_goes_on(self) -> None:
        """The rest of an epoch begins."""
        held = self._held_in_front
        if held is None:
            return
        said, self._again = bool(self._again), set()
        self._put_back(held, compares=False)
        rank = self._rank
        if self._again and not said:
            these = ", ".join(sorted(self._again))
            rank.say(
                "the work in front of an epoch that a restart goes on with ran again; "
                f"{these}: put back to step {rank.start_step}"
                f"{_BEGINNING if self._position.loaders else ''}"
            )
        mark, self._mark_in_front = self._mark_in_front, None
        if mark not in (None, self._position.random_mark()):
            rank.say(
                "random numbers were drawn in front of an epoch that a restart goes on with. If "
                "they made its data, the rest of it has other data than its beginning. Draw such "
                "numbers from a generator seeded with the epoch, or keep them in an attached "
                "autockpt.TrainState"
            )

    def forget(self) -> None:
        """The training goes on."""
        self._held_in_front = None

    def begins(self) -> None:
        """A loop has an iteration left.

        A checkpoint of a loop's end lacks the work behind that loop, which is left as it is.
        """
        self.epoch_goes_on()
        held, self._held = self._held, None
        if held is None:
            return
        if not self._position.was_over:
            self._put_back(held, compares=True)
        advice, changed = _ADVICE if self._position.are_passes else "", self._changed
        if changed:
            more = f" and {len(changed) - 1} more" if len(changed) > 1 else ""
            self._rank.report_degraded(
                "loop",
                f"{changed[0]}{more} was changed between attach and the loop, by work behind loops "
                f"that are trained already. So the training differs from one without a restart"
                f"{advice}",
            )
        elif self._again:
            these = ", ".join(sorted(self._again))
            self._rank.say(
                f"the work behind loops that are trained already ran again; {these}: put back to "
                f"step {self._rank.start_step}{advice}"
            )

    def _put_back(self, held: HeldState, *, compares: bool) -> None:
        """`compares`: the tensors as well, which reads all of them."""
        try:
            if compares and not self._changed:
                self._changed = held.changed_tensors(self._rank.live)
            self._again |= held.put_back(self._rank.live)
            self._position.put_over_back(self._script)
        except Exception as error:
            if is_from_handler(error):
                raise
            self._rank.report_degraded(
                "loop",
                "work behind loops that are trained already could not be taken back: "
                f"{error!r:.200}",
            )


def _is_head_of_loop(frame: types.FrameType) -> bool:
    """The line is that of a `for`, as in `for epoch in range(loader.epoch, epochs)`.

    Elsewhere the script may set more up behind it, which draws and belongs to no epoch.
    """
    line = linecache.getline(frame.f_code.co_filename, frame.f_lineno, frame.f_globals)
    return line.lstrip().startswith("for ")
