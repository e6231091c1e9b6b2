"""What a training script holds: attach(), the loop, and the wires between the rooms.

    ckpt = autockpt.attach(model=model, optimizer=optimizer, scheduler=scheduler, data=loader)
    for step, batch in ckpt.batches(total):
        ...

At every iteration boundary the session applies plan changes, starts the snapshot that is due and
asks for the next slot; at the optimizer's step the fence waits for what is not copied yet.
Whatever fails in here is said once, shows in the report, and never ends the training.
"""

import atexit
import contextlib
import os
import sys
import time
import warnings
from collections.abc import Iterator
from typing import Any

import torch

from autockpt.executors.keeper import wire
from autockpt.executors.keeper.hangs.stack_dumps import answer_with_stacks
from autockpt.executors.keeper.launch import keeper_status
from autockpt.executors.keeper.slots import (
    CELL_COPIED,
    CELL_MARK,
)
from autockpt.executors.linux import memcpy_threshold
from autockpt.executors.protocol import messages as p
from autockpt.executors.restore.prefault import PrefaultedMemory
from autockpt.executors.restore.resume import Resumed, resume
from autockpt.executors.snapshot.optimizer_hooks import OptimizerHooks
from autockpt.executors.snapshot.replica_shares import Place
from autockpt.executors.snapshot.snapshotter import Snapshotter
from autockpt.executors.state.live_state import LiveState
from autockpt.executors.state.rebuilding import Rebuilding
from autockpt.executors.state.rng import rng_mark
from autockpt.executors.storage.directory import lossy_notice
from autockpt.launch import environment, startup_timing
from autockpt.launch.standby import imports
from autockpt.session import position
from autockpt.session.attaches import of_this_process
from autockpt.session.boundaries.forward_hooks import Forwards
from autockpt.session.framework_loop import Extra, FrameworkLoop
from autockpt.session.job import Job
from autockpt.session.loop_ahead import is_loop_ahead
from autockpt.session.position import framework_of
from autockpt.session.room import lack_of_memory, refusal
from autockpt.session.tuning.autotuner import AutoTuner
from autockpt.values import telemetry as t
from autockpt.values.errors import AutockptError, ConfigError
from autockpt.values.exit_codes import WOULD_TRAIN_WRONGLY
from autockpt.values.plan import CheckpointPlan
from autockpt.values.record import to_data

IMPORTED_STEPS = 2
"""Iterations until what a training imports late is there."""
LEAD_STEPS = 200
"""Iterations that a loop of ours is waited for, uncounted and without a checkpoint."""
ASKS_PLACE = frozenset({"batches", "steps", "step_count"})
"""What a script uses of a session that goes on where its state is."""


def attached() -> bool:
    """True when this process has called attach()."""
    return of_this_process.any


class Session(FrameworkLoop):
    """The checkpointing of one rank, from attach to the end of the loop."""

    def __init__(
        self,
        job: Job,
        state: LiveState,
        data: Any,
        *,
        extra: Extra | None = None,
        deferred: bool = False,
    ) -> None:
        super().__init__(job, state, data, extra=extra, deferred=deferred)
        try:
            self._begin()
        except BaseException:
            # Else the link would go on as a trainer that never trains, and start keepers for it.
            self._link.close()
            self._telemetry.close()
            self._watch.close()
            raise

    # ------------------------------------------------------------------ the public face

    @property
    def step_count(self) -> int:
        """Iterations trained so far; where a loop of one's own starts.

        With `attach` alone one has ended when every optimizer has stepped.
        """
        self._asked_step = True
        return self._step

    def batches(self, total: int, *, until: int | None = None) -> Iterator[tuple[int, Any]]:
        """(step, batch) for the steps not yet trained; resumes the loader at the right batch.

        `until`: the loop ends before that step, for what a script does once an epoch; that is a
        part of the loop's last iteration, and the next loop goes on from there.

        `data` must have been attached.  After the last step a final checkpoint is made durable.
        Whoever leaves the loop early calls `step()` before it: else the iteration does not count.
        A loop that is entered again goes on with the batch that comes next.
        """
        if self._data is None:
            raise AutockptError("ckpt.batches() needs attach(data=...); or use ckpt.steps(total)")
        self._placed = True
        for step in self._left(total, until):
            batch = self._take()
            self._let_build()
            yield step, batch

    def _left(self, total: int, until: int | None) -> Iterator[int]:
        """The steps of a loop of ours, each with its boundary behind it."""
        self._owns(total)
        while self._step < total and (until is None or self._step < until) and not self._stopped:
            step = self._step
            self._let_build()
            yield step
            if self._step != step:
                continue
            if until is not None and step + 1 == until < total:
                self._owed = True
                return
            self._boundary(step + 1)
        if self._step >= total:
            self._close(final_checkpoint=True, reason="finished")

    def _let_build(self) -> None:
        """What the script has built until now is filled; what it builds from here on may draw."""
        if self._rebuilding is not None and not self._rebuilding.look():
            self._rebuilding.begin()

    def _pay(self) -> None:
        """What comes behind a loop that ends early belongs to its last iteration: that ends now."""
        if self._owed:
            self._boundary(self._step + 1)

    def _close(self, *, final_checkpoint: bool, reason: str) -> None:
        if reason == "finished":
            self._pay()
        super()._close(final_checkpoint=final_checkpoint, reason=reason)

    def _take(self) -> Any:
        """The next batch; a loop that is entered again goes on in the epoch that it had left."""
        assert self._data is not None
        self._drawn_mark = rng_mark()
        batch = self._data.next()
        self._taken += 1
        return batch

    def _owns(self, total: int) -> None:
        """The loop is ours and its end is known."""
        self._require_in_force()
        self._pay()
        if not self._owns_boundary:
            self._require_unchanged()
            self._begin_loop()
            # What came before the loop belongs to none of its iterations.
            self._stepped = self._forward_seen = False
        if self._closed and self._step < total:
            self._say(
                f"the session has ended at step {self._step}, so this loop makes no checkpoint; "
                "give the first loop the steps of all of them, or leave it with ckpt.step(); break"
            )
        self._total = total
        if self._mind is not None:
            self._mind.total = total
        if 0 < total <= self._step == self._start_step:
            self._tell_over(total)

    def _tell_over(self, total: int) -> None:
        """Of the script's second start, which may have been meant as another training."""
        self._say(
            f"{os.path.relpath(self._job.run_directory)} holds a run that is already at step "
            f"{self._step} of {total}, so nothing is trained; {self._ways_out()}"
        )

    @staticmethod
    def _ways_out() -> str:
        """How another run is begun than the one that is there."""
        if "AUTOCKPT_RUN_DIR" in os.environ:
            return "--run-dir DIR for another, --fresh to begin anew"
        return "attach(run_dir=...) for another, attach(fresh=True) to begin anew"

    def steps(self, total: int, *, until: int | None = None) -> Iterator[int]:
        """The steps not yet trained, for a loop that makes its own batches; as `batches`."""
        for step in self._left(total, until):
            self._drawn_mark = rng_mark()
            yield step

    def own_boundary(self, total: int | None = None) -> None:
        """From now on `step()` alone ends iterations, the first one too.

        For adapters: steps of optimizers and training forwards between two calls of `step()` belong
        to one iteration, whatever they are.  `total`: the last step, which is made durable.
        """
        if total is not None:
            self._owns(total)
            return
        self._require_in_force()
        if not self._owns_boundary:
            self._begin_loop()
            self._stepped = self._forward_seen = False

    def step(self) -> int:
        """Marks the end of an iteration in a loop of one's own; the new step count.

        The first call ends the first iteration: what optimizers have stepped before it is none.
        """
        if not self._owns_boundary:
            self._begin_loop()
        self._boundary(self._step + 1)
        return self._step

    def save(self) -> None:
        """Asks for a durable checkpoint at the coming boundary, beside the planned ones.

        Where gradients are accumulated it is that behind the optimizer's step.  Call it on all
        ranks before the same boundary.
        """
        # Behind the step that makes it due already, data and random state may have gone on.
        begun = self._stepped and self._rounds.complete and not self._owns_boundary
        late = begun and self._before_next is None
        self._wanted = self._step + (2 if late else 1)

    @property
    def ready(self) -> bool:
        """True when the slots are there: a checkpoint can begin at the next boundary."""
        return bool(self._link.slots)

    @property
    def fence_stall_s(self) -> float:
        """Seconds the training has waited at fences so far."""
        return self._fence_stall_s

    @property
    def keeper_pid(self) -> int | None:
        """Process of this node's keeper, None while there is none."""
        status = keeper_status(self._job.run_directory, self._job.node)
        return None if status is None else status.pid

    def wait_durable(self, timeout_s: float) -> float:
        """Waits until the newest durable checkpoint that was begun is on disk; when it was.

        CLOCK_MONOTONIC seconds; 0 when there was none, it failed, or time ran out.
        """
        self._fence()
        saves, save = self._link.saves, self._link.saves.newest_on_disk
        if save is None:
            return 0.0
        self._link.wait_over(save.generation, timeout_s)
        return saves.durable_s if saves.is_durable(save.generation) else 0.0

    def wait_for_staging(self) -> None:
        """Wait until the snapshot has left the live state.

        Call it before code that changes the state by itself, outside an optimizer's step.
        """
        self._fence()

    def fence(self) -> None:
        """`wait_for_staging` by its former name, for one version."""
        warnings.warn(
            "ckpt.fence() has another name: call ckpt.wait_for_staging()",
            DeprecationWarning,
            stacklevel=2,
        )
        self.wait_for_staging()

    # ------------------------------------------------------------------ begin

    def _begin(self) -> None:
        began = time.monotonic()
        self._link.on_message = self._on_message
        job = self._job
        if job.placed:
            self._say(job.placed)
        ranks = job.nodes.count(job.node)
        ahead = PrefaultedMemory(job.checkpoints, self._state, job.rank, ranks=ranks)
        with contextlib.closing(ahead):
            self._link.open()
            resumed = resume(self._link, self._state, job.checkpoints, ahead)
        self._require_memory()
        self._term = resumed.term
        self._step = self._start_step = resumed.step
        self._framework = framework_of(sys._getframe())
        if self._framework is not None and not self._placed:
            self._require_place()
        self._lead_resumed = int((resumed.progress or {}).get("lead", 0))
        self._is_safe = resumed.durable
        applied = time.monotonic()
        self._take_progress(resumed)
        self._note_nan(resumed)
        if resumed.awaiting is not None:
            self._rebuilding = Rebuilding(resumed.awaiting, self._state, self._rebuilt)
            self._say(
                f"the script changed its structure before step {resumed.step}: "
                f"{self._rebuilding.lacking()}; its state is put back when the script has built "
                "it again, which must be before the first step of an optimizer"
            )
        self._tell_started(resumed, began, resumed.apply_s + time.monotonic() - applied)
        self._snapshotter = Snapshotter(
            self._state, self._link.board.view[8 * CELL_COPIED : 8 * CELL_MARK],
            place=Place(rank=job.rank, nodes=job.nodes) if job.world_size > 1 else None,
        )  # fmt: skip
        attached, every = self._state.attached_optimizers, self._state.optimizers
        inner = {every[name]: every[outer] for name, outer in self._state.outer.items()}
        self._hooks = OptimizerHooks(
            list(attached.values()), self._before_step, self._after_optimizer, inner
        )
        for module in self._state.models.values():
            self._hooks.guard_module(module)
        self._watch_forward()
        self._follow_traffic()
        self._mark_step(first=True)
        self._link.running_as(self._term, self._plan.version, None)
        if self._job.rank == 0:
            self._mind = AutoTuner(
                self._job,
                self._state,
                lambda: self._snapshotter.layout if self._snapshotter else None,
                self._propose,
                self._degraded,
                self._emit,
            )
            self._telemetry.listener = self._mind.observe
            if self._mind.started_with is not None:
                self._tell_plan(self._step, self._mind.started_with.reason)
        with contextlib.suppress(OSError):
            answer_with_stacks(job.run_directory, job.rank)
        self._watch.start()
        atexit.register(self._at_exit)
        of_this_process.began(self._attached, self._job.name, shared=self._job.shared)

    def _require_memory(self) -> None:
        """Raises ConfigError where a launch begins, and not even the least checkpoint has room.

        A restart goes on all the same, and so does a script that nobody launched: both say it.
        """
        job, plan = self._job, self._plan
        if not self._begins_launch or self._link.slots:
            return
        lack = lack_of_memory(
            plan, state_bytes=sum(x.nbytes for x in self._state.lazy_tensors().values()),
            ranks=job.nodes.count(job.node), limit_bytes=job.goal.limits.host_memory_bytes,
        )  # fmt: skip
        if lack:
            raise ConfigError(refusal(lack))

    def _require_slots(self) -> None:
        """The same when the first iteration has shown how large the state is."""
        if self._begins_launch and self._link.slots_refused and not self._link.slots_changed:
            self._end("error")
            raise ConfigError(refusal(self._link.slots_refused))

    def _rebuilt(self) -> None:
        self._rebuilding = None
        self._state.refresh()
        self._say("the structure of the checkpoint is built again, and its state is put back")

    def _before_step(self, optimizer: torch.optim.Optimizer | None) -> None:
        """Raises ConfigError for a step on a structure whose state is still awaited."""
        if optimizer is not None and self._rebuilding is not None:
            self._rebuilding.require()
        self._fence(optimizer)

    def _take_progress(self, resumed: Resumed) -> None:
        for notice in resumed.notices:
            self._say(notice)
        if resumed.progress is None:
            return
        if self._data is not None and resumed.progress.get("data") is not None:
            self._data.load(resumed.progress["data"])
            self._data.prepare()
        self._take_extra(resumed)
        if resumed.rng is not None:  # a checkpoint of another system has none
            self._take_rng(resumed.rng)
        if resumed.lossy:
            self._say(lossy_notice(f"checkpoint {resumed.generation}", resumed.lossy))
            self._emit(
                t.LossyRestored(
                    at_s=time.monotonic(), rank=self._job.rank,
                    generation=str(resumed.generation), step=resumed.step, lost=resumed.lossy,
                )
            )  # fmt: skip

    def _note_nan(self, resumed: Resumed) -> None:
        """What held NaN before the first step: on a restart the checkpoint says it."""
        kept = (resumed.progress or {}).get("nan")
        self._known_nan = self._state.with_nan() if kept is None else [*map(str, kept)]
        self._state.known_nan = frozenset(self._known_nan)
        if self._known_nan and kept is None:
            more = f" and {len(self._known_nan) - 1} more" if len(self._known_nan) > 1 else ""
            self._say(
                f"{self._known_nan[0]}{more} holds NaN before the training; that alone makes no "
                "checkpoint suspect",
                always=True,
            )

    def _tell_started(self, resumed: Resumed, began: float, apply_s: float) -> None:
        attach_at, startup = startup_timing.startup()
        now = time.monotonic()
        self._emit(
            t.RunStarted(
                at_s=now, rank=self._job.rank,
                wall=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
                run_id=self._job.incarnation.launch_id,
                term=self._term, world_size=self._job.world_size, pid=os.getpid(),
                plan_id=self._plan.plan_id, plan_version=self._plan.version,
                state_bytes=sum(x.nbytes for x in self._state.lazy_tensors().values()),
                restart_count=self._job.restart_count,
                launch_s=startup.launch_s, interpreter_s=startup.interpreter_s,
                torch_import_s=startup.torch_import_s, process_group_s=startup.process_group_s,
                script_s=startup.script_s, wait_s=now - attach_at - resumed.read_s - apply_s,
                read_s=resumed.read_s, apply_s=apply_s,
                non_temporal_bytes=memcpy_threshold.given_bytes(os.environ),
            )
        )  # fmt: skip
        decided_s = startup.since_decided_s
        self._link.send(
            wire.TrainerResumed(
                rank=self._job.rank, term=self._term, generation=resumed.generation,
                step=resumed.step, source=resumed.source, bytes=resumed.bytes,
                restore_s=time.monotonic() - began,
                came_s=None if decided_s is None else decided_s + time.monotonic() - attach_at,
            )
        )  # fmt: skip
        if resumed.generation is None and self._job.number > 1:
            self._say(
                f"attach {self._job.number} of this process is a run of its own, in "
                f"{os.path.relpath(self._job.run_directory)}; attach(run_dir=...) names another"
            )
        if resumed.generation is not None:
            said = (
                f"resumed step {resumed.step} from {resumed.source} "
                f"(term {resumed.generation.term}, {time.monotonic() - began:.2f} s)"
            )
            if self._job.unnamed and not self._job.restart_count:
                said += f" in {os.path.relpath(self._job.run_directory)}; {self._ways_out()}"
            self._say(said)

    def _watch_forward(self) -> None:
        """Without batches/steps/step the boundary is the next training forward after a step, of
        each optimizer where there are several."""

        def before(module: torch.nn.Module) -> None:
            if not self._closed:
                self._beat("trains" if module.training else "evaluates")
            if not module.training or self._closed:
                return
            if self._rebuilding is not None:
                self._rebuilding.look()
            if not self._placed:
                self._require_place()
            if self._stepped and self._rounds.complete and not self._owns_boundary:
                if self._is_before_loop():
                    self._uncounted += 1
                    self._stepped = False
                    self._rounds.begin()
                else:
                    self._lead += 1
                    self._boundary(self._step + 1, before=self._before_next)
            self._forward_seen = True

        if self._state.optimizers:
            needed = lambda: not self._owns_boundary  # noqa: E731
            self._forwards = Forwards(before, self._require_seen, needed)
            for module in self._state.models.values():
                self._forwards.watch(module)

    def _require_seen(self) -> None:
        self._blind = True
        if not self._owns_boundary:
            self._degraded(
                "iterations",
                "the model is within a graph that torch.compile may not break, so its calls, and "
                "with them iterations, are not seen; attach what torch.compile returns, use "
                "model.compile() or ckpt.steps(total), or call ckpt.step() at their end",
            )

    # ------------------------------------------------------------------ the boundary

    def _after_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        name = self._state.stepped(optimizer)
        if not self._closed:
            self._beat("trains")
        self._windows.boundary()
        self._traffic.boundary()
        self._stepped = True
        if not self._owns_boundary and not self._closed:
            self._rounds.stepped(name)
            if self._is_before_loop():
                return
            self._require_even()
            wanted = self._is_stopping or self._due(self._step + 1)
            due = self._rounds.complete and wanted
            self._before_next = self._kept() if due else None

    def _boundary(self, step: int, before: tuple[Any, Any] | None = None) -> None:
        """The iteration that makes `step` steps has ended."""
        self._owed = False
        if self._closed:
            self._require_in_force()
            self._step = step  # the loop goes on
            return
        if not self._placed:
            self._require_place(begun=True)
        began = self._boundary_s = self._clock.boundary(self._saving or self._background())
        self._saving = bool(self._link.saves.writing)
        if step == self._start_step + 1 and not self._attempt:
            self._emit(t.FirstIterationEnded(at_s=began, rank=self._job.rank, step=step))
        if step == self._start_step + IMPORTED_STEPS and not self._standby_told:
            self._tell_standby()
        whole = self._stepped or not self._state.optimizers
        self._accumulation.iterated(stepped=whole)
        self._step, self._stepped, self._taken = step, False, 0
        self._forward_seen, self._drawn_mark = False, None
        self._rounds.begin()
        self._mark_step()
        self._beat("saves")
        self._tell_tried(began)
        try:
            if self._flight is not None:
                self._fence()  # the iteration had no optimizer step (a skipped one)
            self._change_plan(step)
            due, stops = self._due(step), self._stops_at(step)
            whole = whole or ((due or stops) and self._is_whole_iteration(step))
            here = self._owns_boundary or before is not None
            if stops and whole and here:
                self._make_last(before)
            elif not due:
                self._not_due(step)
            elif not whole:
                self._put_off(step)
            elif here:
                disk = self._disk_free(step)
                self._snapshot(step, self._generation(step), disk=disk, before=before)
            else:
                self._skip(step, "it became due when the next iteration had begun")
            self._open = 0 if whole else self._open + 1
            asked = self._link.saves.asked
            asks_s = time.monotonic()
            self._ask_ahead(step + 1)
            if self._link.saves.asked is not asked:
                self._asking_s = time.monotonic() - asks_s
        except Exception as error:
            self._flight = None
            self._degraded("snapshot", f"{type(error).__name__}: {error}")
        self._note_stall()
        self._boundary_s = None
        self._beat("trains")
        self._clock.stalled(time.monotonic() - began)
        self._report_block()
        if self._link.fenced or self._leaving:
            self._leave()
        self._require_slots()

    def _tell_standby(self) -> None:
        """Writes down for the next incarnation what this one has imported."""
        self._standby_told = True
        if environment.LAUNCHER_PID not in os.environ or self._job.number > 1:
            return
        try:
            imports.write(self._job.run_directory, self._job.rank)
        except OSError as error:
            self._degraded("standby", f"the next restart is a cold one: {error}")

    # ------------------------------------------------------------------ before a loop of ours

    def _require_place(self, *, begun: bool = False) -> None:
        """Asked until it is known who puts loop and data where the state is.

        `begun`: an iteration counts.  Raises SystemExit where the training would go wrong.
        """
        frame, data = sys._getframe(1), self._data
        framework = self._framework or framework_of(frame)
        if framework is None and self._has_place():
            self._placed = True
            return
        if framework is None and not begun:
            if self._place_ahead is None:
                self._place_ahead = is_loop_ahead(self, frame, ASKS_PLACE)
            if self._place_ahead:
                return
        self._placed, unused = True, data is not None and data.by_index
        if not self._start_step:
            self._degraded("position", position.warning(framework, unused_loader=unused))
            return
        self._say(position.refusal(self._start_step, framework, unused_loader=unused))
        self._end("error")
        raise SystemExit(WOULD_TRAIN_WRONGLY)

    def _has_place(self) -> bool:
        """Loop and data go on where the state is, as far as the script has said until now."""
        if self._data is not None:
            return not self._data.by_index
        if self._loaders:
            return self._asked_step or any(each.asked for each in self._loaders.values())
        others = self._state.others.items()
        return self._total is not None or self._asked_step or position.may_hold_place(others)

    def _is_before_loop(self) -> bool:
        """What steps now is no iteration: the script goes on to a loop of ours."""
        if self._waits_for_loop is None:
            self._waits_for_loop = is_loop_ahead(self, sys._getframe(1))
        if self._waits_for_loop and self._uncounted >= LEAD_STEPS:
            self._degraded(
                "loop",
                f"{LEAD_STEPS} iterations came before ckpt.batches(), ckpt.steps() or ckpt.step(), "
                "so from now on they are counted and saved as with attach alone; call attach "
                "behind them if they are not the training's",
            )
            self._count_unseen()
        return bool(self._waits_for_loop)

    def _begin_loop(self) -> None:
        """A loop of ours begins.  The iterations before it that were counted are none of its."""
        self._owns_boundary, self._waits_for_loop = True, False
        if self._lead_resumed:
            self._degraded(
                "loop",
                f"{self._lead_resumed} of the {self._start_step} iterations of the checkpoint that "
                "was resumed were counted with attach alone; if they came before the loop, begin "
                "anew, and call attach behind them",
            )
        if self._lead:
            self._say(
                f"the loop begins at step {self._start_step}: {self._lead} iterations before it "
                "were counted, and may have been saved, as with attach alone; call attach behind "
                "them"
            )
            self._report_block(force=True)
            self._attempt += 1
            self._step = self._start_step
            self._supersedes = True
            self._mark_step(first=True)
        self._lead = self._lead_resumed = self._uncounted = 0

    def _require_unchanged(self) -> None:
        """Asked where a loop of ours begins that names its steps."""
        if self._start_step and (self._stepped or self._uncounted or self._lead):
            self._degraded(
                "loop",
                "optimizers stepped between attach and the loop, on the state of step "
                f"{self._start_step} that was resumed, so the training differs from one without a "
                "restart; let them step before attach, or only where ckpt.step_count is 0",
            )

    def _require_even(self) -> None:
        uneven = self._rounds.uneven
        if uneven is not None and "iterations" not in self._warned:
            again, behind = uneven
            self._degraded(
                "iterations",
                f"{again} has stepped again before {behind} did, so what an iteration is cannot "
                "be known; step_count counts rounds in which every optimizer has stepped, which "
                "may not be the script's; use ckpt.steps(total), or call ckpt.step() at the end "
                "of each iteration",
            )

    def _is_whole_iteration(self, step: int) -> bool:
        """Asked at a boundary that is due and had no step of an optimizer."""
        if not self._accumulation.is_whole(self._plan.snapshot_interval_steps):
            return False
        if self._accumulation.gave_up:
            self._degraded(
                "gradients",
                f"no optimizer has stepped up to step {step}: if one will with the gradients that "
                "are there, they are missing in the checkpoints",
            )
        return True

    def _put_off(self, step: int) -> None:
        if "accumulation" not in self._warned:
            self._warned.add("accumulation")
            self._say(
                f"no optimizer stepped in the iteration before step {step}, and a checkpoint would "
                "lose its gradients: checkpoints wait for the next optimizer's step"
            )
        self._withdraw_asked(step, "gradients are being accumulated")

    def _not_due(self, step: int) -> None:
        if self._disk_due(step):
            limit = self._plan.staging.in_flight
            self._skip(step, f"{limit} checkpoints are on their way to storage already")
        # Asked for under the plan before this one, or while fewer were on their way; a grant that
        # nobody uses would keep its slot.
        self._withdraw_asked(step, "not due any more")

    def _withdraw_asked(self, step: int, reason: str) -> None:
        asked = self._link.saves.asked
        if asked is not None and asked.generation == self._generation(step):
            self._link.withdraw(asked, reason)

    # ------------------------------------------------------------------ plan changes

    def _propose(self, plan: CheckpointPlan) -> None:
        self._link.send(p.PlanProposed(version=plan.version, payload=to_data(plan)))

    def _on_message(self, message: Any) -> None:
        """On the listening thread."""
        if isinstance(message, wire.SendShard):
            self._exchanges.send(message)
        told = getattr(message, "launcher_tells", False) and environment.LAUNCHER_PID in os.environ
        if isinstance(message, wire.StorageStands) and not told:
            self._say(message.text, always=True)
        if isinstance(message, wire.AbandonExchange):
            self._exchanges.abandon(message)
        if isinstance(message, wire.StateSuspect) and "health" not in self._warned:
            self._warned.add("health")
            self._say(f"degraded: health: {message.reason} (training goes on)", always=True)
        # Behind an optimizer's step it may be too late for the boundary at hand.
        late = getattr(message, "version", 0) >= p.STOP_VERSION and not self._owns_boundary
        applied = self._switch.heard(message, self._step + late)
        self._heard_of_stop(message)
        if applied is not None:
            self._link.running_as(self._term, *applied)
        if isinstance(message, p.AnnounceDropped) and message.reason.startswith(p.REPLICAS_DIFFER):
            self._stop_sharing(message.reason)
        if isinstance(message, p.AnnounceDurable) and self._mind is not None:
            self._mind.committed(message.generation)
        if isinstance(message, p.AnnounceDropped) and self._mind is not None:
            self._mind.dropped(message.generation, message.reason)
        asked = self._link.saves.asked
        newest = None if asked is None else asked.generation
        if isinstance(message, p.AnnounceMemoryCommitted) and message.generation == newest:
            # With a snapshot at every iteration: the next slot is free from now on.
            self._ask_if_due(self._step + 1)

    def _stop_sharing(self, reason: str) -> None:
        """These are no replicas (local SGD, a rank that went astray): each stores its own."""
        if self._snapshotter is not None and self._snapshotter.place is not None:
            self._snapshotter.place = None
            self._degraded(
                "shared state", f"{reason}; every rank stores all of its own from now on"
            )

    def _change_plan(self, step: int) -> None:
        plan = self._switch.due(step)
        if plan is None:
            return
        self._plan = plan
        self._follow_traffic()
        reason = self._mind.reason(self._plan.version) if self._mind else "by rank 0"
        self._tell_plan(step, reason)
        if self._mind is not None:
            self._mind.applied(self._plan)

    def _tell_plan(self, step: int, reason: str) -> None:
        """The plan in force is another one from `step` on."""
        memory = self._plan.tier("memory").interval_steps
        disk = self._plan.tier("disk").interval_steps
        self._emit(
            t.PlanChanged(
                at_s=time.monotonic(), rank=self._job.rank, plan_version=self._plan.version,
                step=step, memory_interval_steps=memory, disk_interval_steps=disk, reason=reason,
            )
        )  # fmt: skip
        self._say(f"plan {self._plan.version} from step {step}: {reason}")
