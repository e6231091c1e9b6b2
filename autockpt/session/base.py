"""The knowledge of their rank that the parts of a session share, and their reports."""

import contextlib
import sys
import time

from autockpt.executors.keeper.client.client import KeeperClient
from autockpt.executors.keeper.hangs.pace import DOINGS, Doing
from autockpt.executors.keeper.slots import (
    CELL_BEAT_NS,
    CELL_BEATS,
    CELL_DOING,
    CELL_STARTED_NS,
    CELL_STARTED_STEP,
    CELL_STEP,
    CELL_STEP_NS,
)
from autockpt.executors.linux.signal_errors import is_from_handler
from autockpt.executors.snapshot.snapshotter import Snapshotter
from autockpt.executors.state.live_state import LiveState
from autockpt.executors.state.rebuilding import Rebuilding
from autockpt.executors.storage.event_log import TelemetryWriter
from autockpt.launch.termination import is_interactive
from autockpt.run_directory import RunDirectory
from autockpt.session.boundaries.iteration_clock import IterationClock
from autockpt.session.job import Job
from autockpt.session.tuning.rollback import Rollback, is_restarted
from autockpt.values import telemetry as t
from autockpt.values.generation import Generation
from autockpt.values.plan import CheckpointPlan

FIRST_REMINDER_S, LONGEST_REMINDER_S = 60.0, 3600.0
"""Pauses before autockpt says again that a part is degraded: at first, and at most."""


class RankState:
    """The state of one rank's session; used by all of its parts."""

    def __init__(self, job: Job, live: LiveState) -> None:
        self.job = job
        self.live = live
        """The attached objects."""
        self.plan: CheckpointPlan = job.plan
        """The plan in force."""
        self.telemetry = TelemetryWriter(job.telemetry_path)
        self.client = KeeperClient(
            job.run_directory,
            job.node,
            checkpoints=job.checkpoints,
            attach=job.attach_event(),
            launcher_pid=job.launcher_pid,
            launched=job.shared,
            awaits=job.launcher_awaits,
            control_host=job.control_host,
        )
        self.snapshotter: Snapshotter | None = None
        """None: the restore is not over."""
        self.rebuilding: Rebuilding | None = None
        """Until the script has built what the checkpoint has."""
        self.clock = IterationClock()
        self.rollback = Rollback(
            job.goal.restart.rollback,
            RunDirectory(job.run_directory),
            restarted=is_restarted(),
            say=lambda text: self.say(text, always=True),
        )
        self.term = 0
        self.step = 0
        self.start_step = 0
        """The step at which this process began."""
        self.optimizer_steps = 0
        """Steps of attached optimizers in this process."""
        self.total: int | None = None
        """The last step, where it is known: it is always made durable."""
        self.open = 0
        """Iterations since the last boundary that a checkpoint may be of."""
        self.lead = self.lead_resumed = 0
        """Iterations that no loop of ours has counted, but `attach` alone: in this process, and up
        to the checkpoint that it began with."""
        self.attempt = self.first_attempt = 0
        """Of the checkpoints: one more in a loop before which iterations were counted, and maybe
        saved; and of the first ones."""
        self.supersedes = False
        """The newest checkpoint may be of before the loop: one of the loop is due at once."""
        self.ends_at_once = False
        """The session is closed where its last boundary ends."""
        self.owns_boundary = False
        """A loop of ours, or `step()`, says where iterations end."""
        self.is_safe = False
        """A checkpoint of this run was durable when it began."""
        self.loaded_behind: int | None = None
        """State was loaded into an attached object behind this step, before its checkpoint."""
        self.is_closed = False
        self.begins_launch = job.shared and not job.restart_count
        """`autockpt run` has started it, and this is its first try."""
        self.warned: set[str] = set()
        """Warnings that were given; each is given once."""
        self._reminders: dict[str, tuple[float, float]] = {}
        """By degraded part: time of the next reminder, CLOCK_MONOTONIC, and the pause behind it."""
        self._is_watched = not is_interactive()
        """The keeper looks for a hang.  It does not while a person thinks at a prompt."""

    def mark_step(self, *, first: bool = False) -> None:
        cells = self.client.board.view[: 8 * (CELL_DOING + 1)].cast("Q")
        now_ns = time.monotonic_ns()
        if first:
            cells[CELL_STARTED_NS], cells[CELL_STARTED_STEP] = now_ns, self.step
        cells[CELL_STEP] = self.step
        cells[CELL_STEP_NS] = now_ns
        self._beat(cells, now_ns, "begins" if first else "trains")

    def beat(self, doing: Doing) -> None:
        """A sign of progress on the shared page."""
        cells = self.client.board.view[: 8 * (CELL_DOING + 1)].cast("Q")
        self._beat(cells, time.monotonic_ns(), doing)

    def _beat(self, cells: memoryview, now_ns: int, doing: Doing) -> None:
        cells[CELL_BEAT_NS] = now_ns
        cells[CELL_DOING] = DOINGS.index(doing if self._is_watched else "over")
        cells[CELL_BEATS] += 1

    def report_iterations(self, *, force: bool = False) -> None:
        block = self.clock.block(force=force)
        if block is not None:
            count, total_s, stall_s, quiet_s, busy_s = block
            self.emit(
                t.IterationsTimed(
                    at_s=time.monotonic(), rank=self.job.rank, step=self.step, count=count,
                    total_s=total_s, checkpoint_s=stall_s, quiet_s=quiet_s, busy_s=busy_s,
                )
            )  # fmt: skip

    def report_skip(self, step: int, reason: str) -> None:
        self.emit(
            t.SaveSkipped(at_s=time.monotonic(), rank=self.job.rank, step=step, reason=reason)
        )
        if self.client.slots_refused:
            self.report_degraded("memory tier", self.client.slots_refused)

    def report_degraded(self, what: str, reason: str) -> None:
        self.emit(t.Degraded(at_s=time.monotonic(), rank=self.job.rank, what=what, reason=reason))
        again_s, pause_s = self._reminders.get(what, (0.0, FIRST_REMINDER_S))
        if what not in self.warned or time.monotonic() >= again_s:
            self.warned.add(what)
            later_s = time.monotonic() + pause_s
            self._reminders[what] = later_s, min(2.0 * pause_s, LONGEST_REMINDER_S)
            self.say(f"degraded: {what}: {reason} (training goes on)", always=True)

    def emit(self, event: t.Event) -> None:
        with contextlib.suppress(Exception):
            self.telemetry.emit(event)

    def say(self, text: str, *, always: bool = False) -> None:
        if self.job.rank == 0 or always:
            try:
                print(f"autockpt: {text}", file=sys.stderr, flush=True)
            except Exception as error:  # nobody reads any more: the training goes on
                if is_from_handler(error):
                    raise

    def generation(self, step: int, attempt: int = 0) -> Generation:
        """Named alike on all ranks without talking; `attempt` is of the last step only."""
        return Generation(term=self.term, step=step, attempt=self.attempt + attempt)
