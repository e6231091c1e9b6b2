"""Refuses a resume whose loop and data would not be where the state is."""

import os
import sys
from typing import Any

from autockpt.session.base import RankState
from autockpt.session.boundaries.loop_ahead import is_loop_ahead
from autockpt.session.endings.closing import Closing
from autockpt.session.place.position import (
    SCRIPT,
    framework_of,
    is_script,
    may_hold_place,
    refusal,
    warning,
)
from autockpt.session.place.training_position import TrainingPosition
from autockpt.values.exit_codes import WOULD_TRAIN_WRONGLY

ASKS_PLACE = frozenset({"batches", "steps", "step_count"})
"""Names of a session that a script uses where it goes on with the restored state."""


class PlaceCheck:
    """Finds out who puts loop and data where the state is."""

    def __init__(
        self,
        rank: RankState,
        position: TrainingPosition,
        closing: Closing,
        loop: object,
        data: Any,
        *,
        deferred: bool,
    ) -> None:
        """`loop`: the session, as the script's code names it; `deferred`: an adapter does it."""
        self._rank, self._position, self._closing, self._loop = rank, position, closing, loop
        by_script = is_script(data) or os.environ.get("AUTOCKPT_DATA") == SCRIPT
        self.is_by_script, self.is_deferred = by_script or deferred, deferred
        self.is_placed = self.is_by_script
        """Loop and data will be where the checkpoint is, or the user was warned."""
        self.framework: str | None = None
        """Whose loop called attach; None: the script's."""
        self.has_seen_restored = False
        """The script has asked whether a checkpoint was restored."""
        self.has_asked = False
        """The script has read `step_count` before it trained, and not only to show it."""
        self._is_ahead: bool | None = None
        """The script goes on to ask where to go on; None: not looked for."""

    def require(self, *, begun: bool = False, trained: int = 0) -> None:
        """Asked until it is known who puts loop and data where the state is.

        `begun`: an iteration counts.  `trained`: so many did not, and the script ends.  Raises
        SystemExit where the training would go wrong.
        """
        frame, data = sys._getframe(1), self._position.data
        framework = self.framework or framework_of(frame)
        if framework is None and self.has_place():
            self.is_placed = True
            return
        if framework is None and not begun:
            if self._is_ahead is None:
                self._is_ahead = is_loop_ahead(self._loop, frame, ASKS_PLACE)
            if self._is_ahead:
                return
        self.is_placed, unused = True, data is not None and data.by_index
        if not self._rank.start_step:
            self._rank.report_degraded("position", warning(framework, unused_loader=unused))
            return
        step = self._rank.start_step
        self._rank.say(refusal(step, framework, unused_loader=unused, trained=trained))
        self._closing.end("error")
        raise SystemExit(WOULD_TRAIN_WRONGLY)

    def has_place(self) -> bool:
        """Loop and data go on where the state is, as far as the script has said until now."""
        if self._position.data is not None:
            return not self._position.data.by_index
        if self._position.loaders:
            return self.has_asked or any(each.asked for each in self._position.loaders.values())
        others = self._rank.live.others.items()
        return self._rank.total is not None or self.has_asked or may_hold_place(others)
