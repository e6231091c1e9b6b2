"""Goes back to the last good checkpoint by `failures.rollback`: the launcher restarts the rank.

The record is durable before the rank ends, so that the next process knows which data to leave out.
Where the record cannot be written, or no launcher restarts the rank, the training goes on.
"""

import os
from collections.abc import Callable
from typing import Any, Literal

from autockpt.policies.interval.rollback import MOST, LossWatch, batches_to_drop, rollbacks_beyond
from autockpt.run_directory import RunDirectory
from autockpt.values.errors import AutockptError, RollbackError
from autockpt.values.failure import RollbackRecord


class Rollback:
    """The spikes that one rank knows of.  `suspect` comes on the listening thread."""

    def __init__(
        self,
        wish: Literal["off", "repeat", "skip"] | None,
        run: RunDirectory,
        *,
        restarted: bool,
        say: Callable[[str], None],
    ) -> None:
        self._wish = None if wish == "off" else wish
        self._run, self._say = run, say
        self._restarted = restarted
        """A launcher starts the rank again."""
        self._losses = LossWatch()
        self._why = ""
        self._repeats = False
        """Replicas disagree: the data is not to blame, and is taken again."""
        self._began_step = 0
        self._dropped = 0
        self._good_step: int | None = None
        """The step of a checkpoint that is good, as far as is known."""

    def began(self, step: int, *, drops: bool) -> int:
        """The rank begins at `step`; batches that it has to leave out, 0 where it `drops` none."""
        self._began_step = step
        if step:
            self._good_step = step
        if self._wish == "skip":
            wanted = batches_to_drop(self._run.rollbacks(), step)
            self._dropped = wanted if drops else 0
            if wanted and not drops:
                self._say(
                    f"rollback: {wanted} batches would be left out, and the script takes its data "
                    "by itself; use ckpt.batches(total)"
                )
        return self._dropped

    def committed(self, step: int) -> None:
        """A checkpoint is safe; the oldest of this process is good if any is."""
        if self._good_step is None:
            self._good_step = step

    def suspect(self, reason: str) -> None:
        """A newer state than the good one holds NaN."""
        if self._wish is not None and self._good_step is None:
            self._wish = None
            self._say(f"{reason}; there is no good checkpoint to go back to")
        elif self._wish is not None:
            self._why = self._why or reason

    def disagree(self, reason: str) -> None:
        """Replicas of a newer state than the good one disagree, and the policy wants to go back."""
        if self._good_step is None:
            self._say(f"{reason}; there is no good checkpoint to go back to")
        elif not self._why:
            self._repeats, self._why = True, reason

    def report_loss(self, loss: Any) -> None:
        """The loss of the iteration at hand, a number or a tensor of one."""
        if self._wish is not None and self._good_step is not None:
            value = loss.detach() if hasattr(loss, "detach") else loss
            self._why = self._why or self._losses.observe(float(value))

    @property
    def is_asked(self) -> bool:
        """There was a spike, or replicas disagree."""
        return bool(self._why) or self._repeats

    def require(self, step: int) -> None:
        """Raises RollbackError where the training is to go back, at the boundary of `step`."""
        why, self._why = self._why, ""
        repeats, self._repeats = self._repeats, False
        if not why or (self._wish is None and not repeats):
            return
        by, skips = f"failures.rollback: {self._wish}", self._wish == "skip"
        if repeats:
            by, skips = "failures.replicas: restore", False
        if not self._restarted:
            self._say(f"{why}; no launcher would start the script again, so the training goes on")
            return
        if rollbacks_beyond(self._run.rollbacks(), self._began_step) >= MOST:
            self._say(f"{why}; it has gone back {MOST} times already, so the training goes on")
            return
        record = RollbackRecord(
            step=step, began_step=self._began_step, dropped=self._dropped, skips=skips, reason=why
        )
        try:
            self._run.append_rollback(record)
        except (AutockptError, OSError) as error:
            self._say(f"{why}; the rollback cannot be recorded ({error}): the training goes on")
            return
        data = "leaves out the data since then" if skips else "takes the same data again"
        raise RollbackError(
            f"step {step}: {why}; the training goes back to its last good checkpoint and {data} "
            f"({by})"
        )


def is_restarted() -> bool:
    """Whether a launcher would start this rank again after an error."""
    return "AUTOCKPT_LAUNCHER_PID" in os.environ or "TORCHELASTIC_RUN_ID" in os.environ
