"""What the session of one rank knows, and how it tells: the base of everything in this folder."""

import contextlib
import os
import sys
import threading
import time
from typing import Any

from autockpt.executors.keeper.client.client import KeeperClient
from autockpt.executors.keeper.client.device_transfers import Exchanges
from autockpt.executors.keeper.client.saves import SaveHandle
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
from autockpt.executors.network.device_path import emulated_links
from autockpt.executors.snapshot.snapshotter import Snapshotter
from autockpt.executors.state.data_position import DataPosition
from autockpt.executors.state.live_state import LiveState
from autockpt.executors.state.rebuilding import Rebuilding
from autockpt.executors.storage.event_log import TelemetryWriter
from autockpt.launch.termination import is_interactive
from autockpt.session.boundaries.gradient_accumulation import accumulation
from autockpt.session.boundaries.iteration_clock import IterationClock
from autockpt.session.boundaries.optimizer_rounds import Rounds
from autockpt.session.job import Job
from autockpt.session.position import SCRIPT, is_script
from autockpt.session.traffic import TrafficMarks
from autockpt.session.tuning.autotuner import AutoTuner
from autockpt.session.tuning.plan_switch import PlanSwitch
from autockpt.session.windows import IdleWindows
from autockpt.values import telemetry as t
from autockpt.values.plan import CheckpointPlan


class RankState:
    """State and voice of a session."""

    def __init__(self, job: Job, state: LiveState, data: Any) -> None:
        self._job = job
        self._state = state
        self._placed = is_script(data) or os.environ.get("AUTOCKPT_DATA") == SCRIPT
        """Loop and data will be where the checkpoint is, or that they will not has been said."""
        self._data = None if data is None or is_script(data) else DataPosition(data)
        state.dry_encode({} if self._data is None else {"data": self._data.require_state()})
        self._mesh = state.mesh()
        self._rebuilding: Rebuilding | None = None
        """Until the script has built what the checkpoint has."""
        self._known_nan: list[str] = []
        """As `LiveState.known_nan`, in order."""
        self._plan: CheckpointPlan = job.plan
        self._telemetry = TelemetryWriter(job.telemetry_path)
        self._step = 0
        self._start_step = 0
        self._wanted = -1
        """Boundary from which on a checkpoint is due that the script asked for."""
        self._total: int | None = None
        """The last step, where it is known: it is always made durable."""
        self._term = 0
        self._snapshotter: Snapshotter | None = None
        self._flight: SaveHandle | None = None
        """The save between its boundary and its fence."""
        self._saving = False
        """A save for disk was under way in this iteration, also where it has ended by now."""
        self._asking = threading.Lock()
        self._slots_seen = 0
        self._closed = False
        self._begins_launch = job.shared and not job.restart_count
        """`autockpt run` has started it, and this is its first try."""
        self._owns_boundary = False
        self._owed = False
        """A loop of ours ended before the boundary of its last iteration."""
        self._stepped = False
        """An optimizer has stepped since the last boundary."""
        self._rounds = Rounds(state.attached_optimizers)
        self._accumulation = accumulation(state, world_size=job.world_size)
        self._open = 0
        """Iterations since the last boundary that a checkpoint may be of."""
        self._taken = 0
        """Batches that `batches` has handed out since the last boundary."""
        self._framework: str | None = None
        """Whose loop called attach; None: the script's."""
        self._asked_step = False
        """The script has read `step_count`."""
        self._place_ahead: bool | None = None
        """The script goes on to ask where to go on; None: not looked for."""
        self._lead = self._lead_resumed = 0
        """Iterations that no loop of ours has counted, but `attach` alone: in this process, and up
        to the checkpoint that it began with."""
        self._waits_for_loop: bool | None = None
        """The script goes on to a loop of ours, which counts from its beginning; None: unknown."""
        self._uncounted = 0
        """Iterations, as `attach` alone counts them, while the loop was waited for."""
        self._attempt = 0
        """Of the checkpoints: 1 in a loop before which iterations were counted, and maybe saved."""
        self._supersedes = False
        """The newest checkpoint may be of before the loop: one of the loop is due at once."""
        self._forward_seen = False
        """A model was called in training since the last boundary, or by what ended with that."""
        self._blind = False
        """Calls of a compiled model are not seen."""
        self._drawn_mark: list[Any] | None = None
        """Of the random state when a loop of ours went on from the last boundary."""
        self._before_next: tuple[Any, Any] | None = None
        """(random state, position of the data) behind the optimizer's step, if the boundary comes
        with the next forward: its batch is drawn by then."""
        self._clock = IterationClock()
        self._is_safe = False
        """Something of this run was durable when it began."""
        self._early_s = 0.0
        """Before then no checkpoint goes to disk only because nothing is there, CLOCK_MONOTONIC."""
        self._early_tries = 0
        self._fence_stall_s = 0.0
        self._windows = IdleWindows(job.rank, job.profile, self._say)
        self._asked_slots: tuple[int, int] | None = None
        """Bytes of an image and number of slots that were asked for last."""
        self._asked_again = 0
        """Times that slots for which there was no room were asked for again."""
        self._stream_after_s = 0.0
        """No image streams before, CLOCK_MONOTONIC: storage stood still."""
        self._stood_still_count = 0
        self._warned: set[str] = set()
        self._is_watched = not is_interactive()
        """Nobody is stuck where a person thinks."""
        self._standby_told = False
        """What this process imports is written down for the next one."""
        self._mind: AutoTuner | None = None
        self._link = KeeperClient(
            job.run_directory,
            job.node,
            checkpoints=job.checkpoints,
            attach=job.attach_event(),
            launcher_pid=job.launcher_pid,
            launched=job.shared,
            control_host=job.control_host,
            on_lost=lambda reason: self._degraded("keeper", reason),
        )
        self._exchanges = Exchanges(
            job.rank, host=job.control_host, links=emulated_links(),
            slots=lambda: self._link.slots, send=self._link.send,
            degraded=lambda reason: self._degraded("path of copies", reason),
        )  # fmt: skip
        self._link.on_receive = self._exchanges.receive
        self._traffic = TrafficMarks(self._link.board.view, state.models.values())
        self._switch = PlanSwitch(job.rank, self._link.send, self._link.wait_until)
        self._link.plan_held = lambda: self._switch.held

    def _mark_step(self, *, first: bool = False) -> None:
        cells = self._link.board.view[:64].cast("Q")
        now = time.monotonic_ns()
        if first:
            cells[CELL_STARTED_NS], cells[CELL_STARTED_STEP] = now, self._step
        cells[CELL_STEP] = self._step
        cells[CELL_STEP_NS] = now
        self._beat("begins" if first else "trains")

    def _beat(self, doing: Doing) -> None:
        """A sign of progress on the shared page."""
        cells = self._link.board.view[: 8 * (CELL_DOING + 1)].cast("Q")
        cells[CELL_BEAT_NS] = time.monotonic_ns()
        cells[CELL_DOING] = DOINGS.index(doing if self._is_watched else "over")
        cells[CELL_BEATS] += 1

    def _count_unseen(self) -> None:
        """The loop that was waited for does not come, so its iterations were those."""
        self._waits_for_loop = False
        self._step, self._lead = self._step + self._uncounted, self._lead + self._uncounted
        self._uncounted = 0

    def _follow_traffic(self) -> None:
        """Marks traffic for the keeper, if the plan in force wants that."""
        refusal = self._traffic.follow(self._plan)
        if refusal and refusal not in self._warned:
            self._warned.add(refusal)
            self._say(f"redundancy.schedule: windows: {refusal}")

    def _report_block(self, *, force: bool = False) -> None:
        block = self._clock.block(force=force)
        if block is not None:
            count, total_s, stall_s, quiet_s, busy_s = block
            self._emit(
                t.IterationsTimed(
                    at_s=time.monotonic(), rank=self._job.rank, step=self._step, count=count,
                    total_s=total_s, checkpoint_s=stall_s, quiet_s=quiet_s, busy_s=busy_s,
                )
            )  # fmt: skip

    def _skip(self, step: int, reason: str) -> None:
        self._emit(
            t.SaveSkipped(at_s=time.monotonic(), rank=self._job.rank, step=step, reason=reason)
        )
        if self._link.slots_refused:
            self._degraded("memory tier", self._link.slots_refused)

    def _degraded(self, what: str, reason: str) -> None:
        self._emit(t.Degraded(at_s=time.monotonic(), rank=self._job.rank, what=what, reason=reason))
        if what not in self._warned:
            self._warned.add(what)
            self._say(f"degraded: {what}: {reason} (training goes on)", always=True)

    def _emit(self, event: t.Event) -> None:
        with contextlib.suppress(Exception):
            self._telemetry.emit(event)

    def _say(self, text: str, *, always: bool = False) -> None:
        if self._job.rank == 0 or always:
            print(f"autockpt: {text}", file=sys.stderr, flush=True)
