"""How a session ends: the last checkpoint, and letting go."""

import atexit
import sys
import time
from typing import Any

from autockpt.executors.keeper import wire
from autockpt.executors.snapshot.optimizer_hooks import OptimizerHooks
from autockpt.executors.state.live_state import LiveState
from autockpt.executors.state.rng import rng_mark
from autockpt.launch.termination import is_interactive
from autockpt.session.attaches import Attached, of_this_process
from autockpt.session.boundaries.forward_hooks import Forwards
from autockpt.session.job import ATTACHES, Job
from autockpt.session.saving import FINAL_WAIT_S, Saving
from autockpt.values import script_errors
from autockpt.values import telemetry as t
from autockpt.values.errors import ConfigError
from autockpt.values.generation import Generation

RECONNECT_WAIT_S = 30.0
"""The last checkpoint waits so long for a keeper that is being started."""
SLOT_WAIT_S, GRANT_WAIT_S = 60.0, 5.0
"""So long it asks for a slot, which an older one may still need; so long for one answer."""
ALONE_S = 60.0
"""At exit the last checkpoint waits so long for other ranks to begin it too.  They may come later,
but this may as well be the only one that ends, and then all wait for it to be gone."""
FINAL_FAILURES = 5
"""Times that the last checkpoint is begun and dropped: ranks may need some to find each other, a
full disk needs none."""


UNDURABLE = "nothing that it trained is durable"


class Ending(Saving):
    """Makes the end durable and lets go."""

    def __init__(self, job: Job, state: LiveState, data: Any) -> None:
        super().__init__(job, state, data)
        self._hooks: OptimizerHooks | None = None
        self._forwards: Forwards | None = None
        self._patience_s = FINAL_WAIT_S
        """For other ranks at the end."""
        self._wait_s = FINAL_WAIT_S
        """For storage at the end."""
        self._handled = _at_hand()
        """An exception that was handled when the training began: a second try, for one."""
        self._superseded = ""
        """Directory of the run that took the place of this one, while this one was open."""
        self._attached = Attached(
            directory=job.run_directory,
            launch_id=job.incarnation.launch_id,
            named=job.name is not None,
            objects=[*state.models.values(), *state.optimizers.values()],
            reached_step=lambda: self._step,
            supersede=self._supersede,
            disown=self._disown,
        )

    def close(self, *, final_checkpoint: bool = True) -> None:
        """Ends the protection: fences, makes a last checkpoint durable, lets the keeper go.

        Called while an exception is handled it is a failure: the keeper keeps what is in memory
        for the next start.  One rank of several then makes no last checkpoint, because the others
        may never join it.
        """
        if self._closed:
            return
        error = self._exception()
        if error is None:
            self._close(final_checkpoint=final_checkpoint, reason="finished")
            return
        self._tell_failed(error)
        alone = self._job.world_size == 1
        self._close(final_checkpoint=final_checkpoint and alone, reason="error")

    def _exception(self) -> BaseException | None:
        """What ends the training, if something does; not what was handled when it began."""
        error = _at_hand()
        if error is self._handled or isinstance(error, StopIteration | GeneratorExit):
            return None
        return None if isinstance(error, SystemExit) and not error.code else error

    def _close(self, *, final_checkpoint: bool, reason: str) -> None:
        if self._closed:
            return
        self._beat("saves")
        try:
            self._fence()
            if final_checkpoint and self._is_whole():
                if not self._has_last_step():
                    self._final_checkpoint()
            elif final_checkpoint and self._plan.tier("disk").interval_steps:
                self._keep_newest()
        except Exception as error:
            self._degraded("final checkpoint", repr(error))
        self._end(reason, self._undurable() if reason == "finished" else "")

    def _undurable(self) -> str:
        """Said of a training to its end of which no checkpoint is durable, "" of another.

        `autockpt run` says it itself, and has an exit code for it; a script's own stays as it is.
        """
        wanted = self._plan.tier("disk").interval_steps and self._step > self._start_step
        if not wanted or self._link.saves.durable is not None:
            return ""
        if self._job.rank == 0 and not self._job.shared:
            self._say(f"{UNDURABLE}, of {self._step} steps; look at the disk", always=True)
        return UNDURABLE

    # ------------------------------------------------------------------ among others

    def _supersede(self, by: str) -> None:
        """Ends it, its last checkpoint included, in favour of a run in the directory `by`."""
        self._superseded = by
        self._close(final_checkpoint=True, reason="finished")

    def _disown(self) -> None:
        """In a forked child: the parent trains on, and what is shared with it stays as it is."""
        self._closed, self._flight = True, None
        for hooks in (self._hooks, self._forwards):
            if hooks is not None:
                hooks.remove()
        if self._mind is not None:
            self._mind.disown()
        self._traffic.disown()
        self._link.disown()
        self._telemetry.disown()

    def _require_in_force(self) -> None:
        """Raises ConfigError where a loop goes on whose run another attach has ended."""
        if self._superseded:
            raise ConfigError(
                f"the run in {self._job.run_directory} ended at step {self._step}, when a later "
                f"attach began one in {self._superseded}; its loop cannot go on. To train both at "
                "once give each attach(run_dir=...), or attach all models and optimizers in one "
                'call: attach(model={"a": a, "b": b}, optimizer={"a": one, "b": two})'
            )

    # ------------------------------------------------------------------ the last checkpoint

    def _is_whole(self) -> bool:
        """Whether the state is that of the step count.

        Without a loop of ours, which would have said so, the last step ends with the script.
        """
        ended = self._stepped and self._rounds.complete
        if ended and self._forward_seen and not self._owns_boundary:
            self._count_unseen()
            self._lead += 1
            self._step, self._stepped, self._forward_seen = self._step + 1, False, False
            self._mark_step()
        begun = self._forward_seen or (self._blind and self._drawn_mark is not None)
        if self._stepped or begun or self._drawn_mark not in (None, rng_mark()):
            return False
        if not self._taken or self._data is None:
            return True
        return self._taken == 1 and self._data.give_back()

    def _has_last_step(self) -> bool:
        """Within an accumulation of gradients: the boundary behind the last step is durable."""
        newest, begun = self._generation(self._step - self._open), self._link.saves.newest_on_disk
        if not self._open or begun is None or begun.generation != newest:
            return False
        return self._is_joined(newest) and self._wait_durable(newest, FINAL_WAIT_S)

    def _keep_newest(self) -> None:
        """Within an iteration, whose changes no step counts: the newest checkpoint is the last."""
        self._degraded(
            "final checkpoint",
            f"the loop was left within the iteration after step {self._step}, so none was made; "
            "to keep an iteration that is complete call ckpt.step() before leaving",
        )
        newest, on_disk = self._link.saves.newest, self._link.saves.newest_on_disk
        # One for memory alone the keepers make durable when they see us leave.
        if newest is not None and self._is_joined(newest.generation) and newest is on_disk:
            self._wait_durable(newest.generation, FINAL_WAIT_S)

    def _is_joined(self, generation: Generation) -> bool:
        """False when not all ranks have sealed it in time; one that was dropped is past that."""
        saves = self._link.saves

        def known() -> bool:
            committed = saves.memory_committed
            return (committed is not None and committed >= generation) or saves.is_over(generation)

        return self._link.wait_until(known, self._patience_s)

    def _final_checkpoint(
        self, *, before: tuple[Any, Any] | None = None, always: bool = False
    ) -> None:
        """A durable checkpoint of the last step, unless there is one.

        `always`: also where the plan writes none.  `before`: as of `_snapshot`.
        """
        planned = self._plan.tier("disk").interval_steps or always
        if self._step == self._start_step or not planned:
            return
        if self._open and self._accumulation.alive():
            self._degraded(
                "gradients",
                f"no optimizer stepped in the last {self._open} iterations; their gradients are "
                "missing in the last checkpoint",
            )
        link = self._link
        if not link.slots and self._is_heard():
            self._ask_slots(at_once=True)
            link.wait_until(lambda: bool(link.slots or link.slots_refused), self._wait_s)
        if not link.slots:
            self._degraded("final checkpoint", link.slots_refused or "no slots were given in time")
            return
        generation = self._generation(self._step)
        saves, asked = link.saves, link.saves.asked
        attempt = 0 if generation in saves.writing or saves.is_durable(generation) else 1
        if attempt and asked is not None and asked.step > self._step:
            link.withdraw(asked, "the training ended before it")
        failures, reason = 0, f"no slot became free in {SLOT_WAIT_S:.0f} s"
        deadline = time.monotonic() + min(SLOT_WAIT_S, self._wait_s)
        while failures < FINAL_FAILURES and (left := deadline - time.monotonic()) > 0:
            if attempt:
                if not self._is_heard():
                    reason = "there is no keeper"
                    break
                generation = self._generation(self._step, attempt)
                patience_s = min(left, GRANT_WAIT_S)
                if not self._snapshot(
                    self._step, generation, disk=True, before=before, patience_s=patience_s
                ):
                    attempt += 1
                    time.sleep(0.05)
                    continue
                self._fence()
            if not self._is_joined(generation):
                reason = f"other ranks have not begun it within {self._patience_s:.0f} s"
                break
            if self._wait_durable(generation, self._wait_s):
                return
            attempt, failures = attempt + 1, failures + 1
            deadline = time.monotonic() + SLOT_WAIT_S
            reason = saves.discard_reason(generation) or reason
        self._degraded("final checkpoint", f"{reason}; the last durable checkpoint is older")

    def _is_heard(self) -> bool:
        """False when no keeper could be started."""
        return self._link.wait_until(lambda: self._link.connected, RECONNECT_WAIT_S)

    def _is_followed(self) -> bool:
        """Another rank of this very start has attached to the run again, as this one will."""
        own, said = self._job.incarnation, self._link.fenced
        launch, _, number = said.removeprefix("replaced by ").rpartition("#")
        if launch != own.launch_id or not number.isdigit() or len(set(self._job.nodes)) > 1:
            return False
        return int(number) // ATTACHES == own.restart_round // ATTACHES

    def _end(self, reason: str, note: str = "") -> None:
        """`note`: what status.json says beside the reason, where no launcher of ours writes it."""
        if self._closed:
            return
        self._closed = True
        self._report_block(force=True)
        self._emit(
            t.RunEnded(at_s=time.monotonic(), rank=self._job.rank, step=self._step, reason=reason)
        )
        self._link.send(
            wire.TrainerLeaving(rank=self._job.rank, step=self._step, reason=reason, note=note)
        )
        if self._mind is not None:
            self._mind.close()
        if self._hooks is not None:
            self._hooks.remove()
        if self._forwards is not None:
            self._forwards.remove()
        self._windows.close()
        self._traffic.close()
        self._link.close()
        if self._snapshotter is not None:
            self._snapshotter.close()
        self._telemetry.close()
        # Else the model would live as long as the process.
        atexit.unregister(self._at_exit)
        of_this_process.ended(self._attached)

    def _at_exit(self) -> None:
        """The script ended without closing: a crash stays a crash, an end is an end."""
        if self._closed:
            return
        error = getattr(sys, "last_value", None)
        if error is not None:
            self._tell_failed(error)
            self._telemetry.close()
            return
        if self._job.world_size > 1:
            self._patience_s = ALONE_S
        self._close(final_checkpoint=True, reason="finished")

    def _tell_failed(self, error: BaseException) -> None:
        """The script's exception ends this rank: a failure, not an end."""
        origin, text = script_errors.origin_of(error), script_errors.text_of(error)
        self._emit(
            t.TrainerFailed(
                at_s=time.monotonic(), rank=self._job.rank, step=self._step, error=text,
                origin=origin,
            )
        )  # fmt: skip
        if origin != "machine":
            self._link.send(wire.TrainerFailing(rank=self._job.rank, error=text))


def _at_hand() -> BaseException | None:
    """The exception that is handled now, or that ended the script; at a prompt those before do not
    count."""
    handled = sys.exc_info()[1]
    if handled is not None or is_interactive():
        return handled
    return getattr(sys, "last_value", None)
