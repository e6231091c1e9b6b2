"""The end of a session: it closes its parts, after a last checkpoint where there can be one."""

import atexit
import logging
import sys
import time
from collections.abc import Callable
from typing import Protocol

from autockpt.executors.keeper import wire
from autockpt.executors.linux.signal_errors import is_from_handler
from autockpt.executors.snapshot.optimizer_hooks import OptimizerHooks
from autockpt.launch.termination import exit_now, is_interactive
from autockpt.session.attaches import Attached, of_this_process
from autockpt.session.base import RankState
from autockpt.session.boundaries.forward_hooks import Forwards
from autockpt.session.boundaries.iterations import Iterations
from autockpt.session.endings.last_checkpoint import LastCheckpoint
from autockpt.session.saving import Saver
from autockpt.session.tuning.plan_follower import PlanFollower
from autockpt.values import script_errors
from autockpt.values import telemetry as t
from autockpt.values.errors import ConfigError

ALONE_S = 60.0
"""At exit the last checkpoint waits so long for other ranks to begin it too.  They may come later,
but this may as well be the only one that ends, and then all wait for it to be gone."""


class LoopEnd(Protocol):
    """The loop, as its end sees it."""

    def require_place(self) -> None:
        """Raises SystemExit where the script has trained on, and not from where it was."""

    def finish_iteration(self, *, is_over: bool = False) -> None:
        """An iteration that a loop of ours left open ends now; `is_over`: no loop follows."""

    def note_last(self) -> None:
        """The training thread is where it ends."""

    def note_end(self) -> None:
        """It is over."""


class Closing:
    """Ends the session of one rank."""

    loop: LoopEnd

    def __init__(
        self,
        rank: RankState,
        iterations: Iterations,
        saver: Saver,
        last: LastCheckpoint,
        plans: PlanFollower,
        await_seal: Callable[[], None],
    ) -> None:
        """`await_seal` returns when a failing rank may end."""
        self._rank, self._job, self._client = rank, rank.job, rank.client
        self._await_seal = await_seal
        self._iterations, self._saver, self._last, self._plans = iterations, saver, last, plans
        self.hooks: OptimizerHooks | None = None
        self.forwards: Forwards | None = None
        self._handled = _at_hand()
        """An exception that was handled when the training began: a second try, for one."""
        self._superseded = ""
        """Directory of the run that took the place of this one, while this one was open."""
        job, live = rank.job, rank.live
        self._attached = Attached(
            directory=job.run_directory,
            launch_id=job.incarnation.launch_id,
            named=job.name is not None,
            objects=[*live.models.values(), *live.optimizers.values()],
            reached_step=lambda: rank.step,
            supersede=self._supersede,
            fail=self.fail,
            disown=self._disown,
        )

    def begin(self) -> None:
        """The session is in force: it ends with the script, and is one among others."""
        atexit.register(self._at_exit)
        of_this_process.began(self._attached, self._job.name, shared=self._job.shared)

    def close_failed(self) -> None:
        """Attach has failed: else the client would go on as a trainer that never trains."""
        self._client.close()
        self._rank.telemetry.close()

    def close(self, *, final_checkpoint: bool = True) -> None:
        """As `Session.close`."""
        if self._rank.is_closed:
            return
        error = self._exception()
        if error is None:
            self.loop.require_place()
            self.finish(final_checkpoint=final_checkpoint, reason="finished")
            return
        self.fail(error, final_checkpoint=final_checkpoint and self._job.world_size == 1)

    def fail(self, error: BaseException, *, final_checkpoint: bool = False) -> None:
        """The training ends by this exception; the keeper keeps what is in memory."""
        if self._rank.is_closed:
            return
        self._report_failed(error)
        self._await_seal()
        self.finish(final_checkpoint=final_checkpoint, reason="error")

    def _exception(self) -> BaseException | None:
        """What ends the training, if something does; not what was handled when it began."""
        error = _at_hand()
        if error is self._handled or isinstance(error, StopIteration | GeneratorExit):
            return None
        return None if isinstance(error, SystemExit) and not error.code else error

    def finish(self, *, final_checkpoint: bool, reason: str) -> None:
        """With a last checkpoint, if there can be one."""
        self._rank.live.module_state.end()
        if reason == "finished":
            self.loop.finish_iteration(is_over=True)
        self.loop.note_last()
        if self._rank.is_closed:
            return
        self._rank.beat("saves")
        if reason == "finished" and final_checkpoint and self._rank.step:
            self._say_of_late_load()
        try:
            self._saver.fence()
            if final_checkpoint and self._iterations.is_whole():
                if not self._last.has_last_step():
                    self._last.make()
            elif final_checkpoint and self._rank.plan.tier("disk").interval_steps:
                self._last.keep_newest()
        except Exception as error:
            if is_from_handler(error):
                self.end("error")
                raise
            self._rank.report_degraded("final checkpoint", repr(error))
        if reason == "finished" and (lacks := self._saver.lacks()):
            self._rank.say(lacks, always=True)
        self.end(reason, self._last.undurable_note() if reason == "finished" else "")

    def _say_of_late_load(self) -> None:
        """Nothing was trained since: the best weights of a run, say, which its end tests."""
        if self._rank.loaded_behind == self._rank.step:
            self._rank.say(
                "load_state_dict of an attached object was called behind the last iteration. The "
                f"last checkpoint (step {self._rank.step}) has the loaded state, from which a "
                "training with more steps goes on. To keep the trained state, call ckpt.close() "
                "before it, or load into a copy of the object"
            )

    def _supersede(self, by: str) -> None:
        """Ends it, its last checkpoint included, in favour of a run in the directory `by`."""
        self._superseded = by
        self.finish(final_checkpoint=True, reason="finished")

    def _disown(self) -> None:
        """In a forked child: the parent trains on, and shared memory stays as it is."""
        self._rank.is_closed, self._saver.flight = True, None
        for hooks in (self.hooks, self.forwards):
            if hooks is not None:
                hooks.remove()
        self._plans.disown()
        self._saver.traffic.disown()
        self._client.disown()
        self._rank.telemetry.disown()

    def require_in_force(self) -> None:
        """Raises ConfigError where a loop goes on whose run another attach has ended."""
        if self._superseded:
            raise ConfigError(
                f"the run in {self._job.run_directory} ended at step {self._rank.step}, when a "
                f"later attach began one in {self._superseded}; its loop cannot go on. To train "
                "both at once give each attach(run_dir=...). Or attach all models and optimizers "
                'in one call: attach(model={"a": a, "b": b}, optimizer={"a": one, "b": two})'
            )

    def end(self, reason: str, note: str = "") -> None:
        """`note`: what status.json says beside the reason, where no launcher of ours writes it."""
        if self._rank.is_closed:
            return
        self._rank.is_closed = True
        self._rank.report_iterations(force=True)
        self._rank.emit(
            t.RunEnded(
                at_s=time.monotonic(), rank=self._job.rank, step=self._rank.step, reason=reason
            )
        )
        self._client.send(
            wire.TrainerLeaving(rank=self._job.rank, step=self._rank.step, reason=reason, note=note)
        )
        self._plans.close()
        if self.hooks is not None:
            self.hooks.remove()
        if self.forwards is not None:
            self.forwards.remove()
        self._saver.windows.close()
        self._saver.traffic.close()
        self._client.close()
        if self._rank.snapshotter is not None:
            self._rank.snapshotter.close()
        self._close_log()
        # Else the model would live as long as the process.
        atexit.unregister(self._at_exit)
        of_this_process.ended(self._attached, failed=reason != "finished")
        self.loop.note_end()

    def _close_log(self) -> None:
        self._rank.telemetry.close()
        if gap := self._rank.telemetry.gap:
            self._rank.say(gap)

    def _at_exit(self) -> None:
        """The script ended without closing: a crash stays a crash, an end is an end."""
        if self._rank.is_closed:
            return
        error = getattr(sys, "last_value", None)
        if error is not None:
            self._report_failed(error)
            self._await_seal()
            self._close_log()
            return
        if self._job.world_size > 1:
            self._last.patience_s = ALONE_S
        try:
            self.loop.require_place()
        except SystemExit as ending:
            _leave(ending)
        self.finish(final_checkpoint=True, reason="finished")

    def _report_failed(self, error: BaseException) -> None:
        """The script's exception ends this rank: a failure, not an end."""
        origin, text = script_errors.origin_of(error), script_errors.text_of(error)
        self._rank.emit(
            t.TrainerFailed(
                at_s=time.monotonic(), rank=self._job.rank, step=self._rank.step, error=text,
                origin=origin,
            )
        )  # fmt: skip
        if origin != "machine":
            self._client.send(wire.TrainerFailing(rank=self._job.rank, error=text))


def _leave(ending: SystemExit) -> None:
    """End with this exit code; what Python raises while it exits does not change its own."""
    logging.shutdown()
    exit_now(int(ending.code or 0))


def _at_hand() -> BaseException | None:
    """The exception that is handled now, or that ended the script; at a prompt those before do not
    count."""
    handled = sys.exc_info()[1]
    if handled is not None or is_interactive():
        return handled
    return getattr(sys, "last_value", None)
