"""The last checkpoint of a training that ends."""

import time
from typing import Any

from autockpt.session.base import RankState
from autockpt.session.boundaries.iterations import Iterations
from autockpt.session.saving import FINAL_WAIT_S, Saver
from autockpt.session.slots import SlotRequests
from autockpt.values.generation import Generation
from autockpt.values.telemetry import NO_SLOT, PASSED

RECONNECT_WAIT_S = 30.0
"""The last checkpoint waits so long for a keeper that is being started."""
SLOT_WAIT_S, GRANT_WAIT_S = 60.0, 5.0
"""So long it asks for a slot, which an older one may still need; so long for one answer."""
FINAL_FAILURES = 5
"""Times that the last checkpoint is begun and dropped; a full disk needs none.  Where another rank
has no slot yet, or is some attempts ahead, this one asks on, as that rank does."""


UNDURABLE = "nothing that it trained is durable"


class LastCheckpoint:
    """Makes the end durable."""

    def __init__(
        self, rank: RankState, iterations: Iterations, saver: Saver, slots: SlotRequests
    ) -> None:
        self._rank, self._iterations, self._saver, self._slots = rank, iterations, saver, slots
        self._job, self._client = rank.job, rank.client
        self.patience_s = FINAL_WAIT_S
        """For other ranks at the end."""
        self.wait_s = FINAL_WAIT_S
        """For storage at the end."""

    def undurable_note(self) -> str:
        """Said of a training to its end of which no checkpoint is durable, "" of another.

        `autockpt run` says it itself, and has an exit code for it; a script's own stays as it is.
        """
        wanted = (
            self._rank.plan.tier("disk").interval_steps and self._rank.step > self._rank.start_step
        )
        if not wanted or self._client.saves.durable is not None:
            return ""
        if self._job.rank == 0 and not self._job.shared:
            self._rank.say(
                f"{UNDURABLE}, of {self._rank.step} steps; look at the disk", always=True
            )
        return UNDURABLE

    def has_last_step(self) -> bool:
        """Within an accumulation of gradients: the boundary behind the last step is durable."""
        newest = self._rank.generation(self._rank.step - self._rank.open)
        begun = self._client.saves.newest_on_disk
        if not self._rank.open or begun is None or begun.generation != newest:
            return False
        return self._is_joined(newest) and self._saver.wait_durable(newest, FINAL_WAIT_S)

    def keep_newest(self) -> None:
        """Within an iteration, whose changes no step counts: the newest checkpoint is the last."""
        self._rank.report_degraded(
            "last iteration",
            f"the loop was left within the iteration after step {self._rank.step}, so no "
            "checkpoint has it; if it is complete, call ckpt.step() before leaving",
        )
        newest, on_disk = self._client.saves.newest, self._client.saves.newest_on_disk
        # One for memory alone the keepers make durable when they see us leave.
        if newest is not None and self._is_joined(newest.generation) and newest is on_disk:
            self._saver.wait_durable(newest.generation, FINAL_WAIT_S)

    def _is_joined(self, generation: Generation) -> bool:
        """False when not all ranks have sealed it in time; one that was dropped is past that."""
        saves = self._client.saves

        def known() -> bool:
            committed = saves.memory_committed
            return (committed is not None and committed >= generation) or saves.is_over(generation)

        return self._client.wait_until(known, self.patience_s)

    def make(self, *, before: tuple[Any, Any] | None = None, always: bool = False) -> None:
        """A durable checkpoint of the last step, unless there is one.

        `always`: also where the plan writes none.  `before`: as of `Saver.begin`.
        """
        planned = self._rank.plan.tier("disk").interval_steps or always
        if self._rank.step == self._rank.start_step or not planned:
            return
        if self._rank.open and self._iterations.accumulation.has_rest():
            self._rank.report_degraded(
                "gradients",
                f"no optimizer stepped behind step {self._rank.step - self._rank.open}; the "
                "gradients since then are missing in the last checkpoint",
            )
        link = self._client
        if not link.slots and self._is_heard():
            self._slots.ask(at_once=True)
            link.wait_until(lambda: bool(link.slots or link.slots_refused), self.wait_s)
        if not link.slots:
            self._rank.report_degraded(
                "final checkpoint", link.slots_refused or "no slots were given in time"
            )
            return
        generation = self._rank.generation(self._rank.step)
        saves, asked = link.saves, link.saves.asked
        begun = generation in saves.writing or saves.is_durable(generation)
        is_free = not begun and self._is_name_free(generation)
        attempt = 0 if begun or is_free else 1
        if not begun and asked is not None and asked.step > self._rank.step:
            link.withdraw(asked, "the training ended before it")
        failures, reason = 0, f"no slot became free in {SLOT_WAIT_S:.0f} s"
        deadline = time.monotonic() + min(SLOT_WAIT_S, self.wait_s)
        while failures < FINAL_FAILURES and (left := deadline - time.monotonic()) > 0:
            if attempt or is_free:
                if not self._is_heard():
                    reason = "there is no keeper"
                    break
                generation = self._rank.generation(self._rank.step, attempt)
                patience_s = min(left, GRANT_WAIT_S)
                if not self._saver.begin(
                    generation, disk=True, before=before, patience_s=patience_s
                ):
                    attempt += 1
                    time.sleep(0.05)
                    continue
                self._saver.fence()
            if not self._is_joined(generation):
                reason = f"other ranks have not begun it within {self.patience_s:.0f} s"
                break
            if self._saver.wait_durable(generation, self.wait_s):
                return
            attempt += 1
            reason = saves.discard_reason(generation) or reason
            if reason.endswith(NO_SLOT) or PASSED in reason:
                time.sleep(0.05)
                continue
            failures += 1
            deadline = time.monotonic() + SLOT_WAIT_S
        self._rank.report_degraded(
            "final checkpoint", f"{reason}; the last durable checkpoint is older"
        )

    def _is_name_free(self, generation: Generation) -> bool:
        """Neither it nor a later one was asked for.  Several ranks may not know that alike."""
        saves = self._client.saves
        asked = saves.asked is not None and saves.asked.generation >= generation
        return self._job.world_size == 1 and not asked and saves.get(generation) is None

    def _is_heard(self) -> bool:
        """False when no keeper could be started."""
        return self._client.wait_until(lambda: self._client.connected, RECONNECT_WAIT_S)
