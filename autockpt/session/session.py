"""The Session that a training script gets: attach(), the loop, and its parts in one place.

    ckpt = autockpt.attach(model=model, optimizer=optimizer, scheduler=scheduler, data=loader)
    for step, batch in ckpt.batches(total):
        ...

Each part is a class of its own with the parts that it uses (docs/decisions/0026).  A failure in
here is reported once, shows in the report, and never ends the training.
"""

import contextlib
import math
import os
import sys
import time
import warnings
from collections.abc import Iterator
from typing import Any

from autockpt.console.progress import Progress
from autockpt.executors.keeper import wire
from autockpt.executors.keeper.hangs.stack_dumps import answer_with_stacks
from autockpt.executors.keeper.launch import keeper_status
from autockpt.executors.keeper.slots import CELL_COPIED, CELL_MARK
from autockpt.executors.linux import late_threads, memcpy_threshold
from autockpt.executors.restore.prefault import PrefaultedMemory
from autockpt.executors.restore.resume import Resumed, resume
from autockpt.executors.snapshot.replica_shares import Place
from autockpt.executors.snapshot.snapshotter import Snapshotter
from autockpt.executors.state.data.epoch_loader import EpochLoader
from autockpt.executors.state.live_state import LiveState
from autockpt.executors.state.rebuilding import Rebuilding
from autockpt.job_directory import shown
from autockpt.launch import environment, startup_timing
from autockpt.launch.in_process.order import of_this_process as unwinding
from autockpt.session.attaches import of_this_process
from autockpt.session.base import RankState
from autockpt.session.boundaries.boundary import Boundaries
from autockpt.session.boundaries.iterations import Iterations
from autockpt.session.boundaries.last_boundary import BoundaryHolder
from autockpt.session.boundaries.loop_ahead import NAMED_LOOPS, is_in_loop, is_loop_ahead
from autockpt.session.endings.closing import Closing
from autockpt.session.endings.last_checkpoint import LastCheckpoint
from autockpt.session.endings.stopping import Stopper
from autockpt.session.job import Job
from autockpt.session.keeper_news import KeeperNews
from autockpt.session.place.initial_weights import InitialWeights
from autockpt.session.place.place_check import PlaceCheck
from autockpt.session.place.position import framework_of
from autockpt.session.place.repeated_work import RepeatedWork
from autockpt.session.place.replay_check import ReplayCheck
from autockpt.session.place.script.frames import is_only_shown, is_within_loop
from autockpt.session.place.training_position import ONLY, Extra, Restored, TrainingPosition
from autockpt.session.room import lack_of_memory, refusal
from autockpt.session.saving import Saver
from autockpt.session.slots import SlotRequests
from autockpt.session.tuning.plan_follower import PlanFollower
from autockpt.values import telemetry as t
from autockpt.values.errors import AutockptError, ConfigError
from autockpt.values.generation import SCRATCH


def attached() -> bool:
    """True when this process has called attach()."""
    return of_this_process.any


class Session:
    """The checkpointing of one rank, from attach to the end of the loop."""

    def __init__(
        self,
        job: Job,
        state: LiveState,
        data: Any,
        *,
        extra: Extra | None = None,
        deferred: bool = False,
        weights: InitialWeights | None = None,
    ) -> None:
        """`weights`: a training that begins takes them."""
        self._weights = weights
        rank = self._rank = RankState(job, state)
        self._job, self._client = job, rank.client
        position = self._position = TrainingPosition(rank, data, extra=extra, deferred=deferred)
        iterations = self._iterations = Iterations(rank, position, self)
        slots = self._slots = SlotRequests(rank, position)
        saver = self._saver = Saver(rank, iterations, position, slots)
        last = self._last = LastCheckpoint(rank, iterations, saver, slots)
        plans = self._plans = PlanFollower(rank, saver)
        holder = self._holder = BoundaryHolder(rank, position, saver)
        closing = self._closing = Closing(rank, iterations, saver, last, plans, holder.await_seal)
        self._place = PlaceCheck(rank, position, closing, self, data, deferred=deferred)
        stopper = self._stopper = Stopper(rank, saver, last, closing, plans.switch)
        replay = self._replay = ReplayCheck(rank)
        self._repeated = RepeatedWork(rank, position)
        position.asks_epoch, position.goes_on = (
            self._repeated.epoch_asked, self._repeated.epoch_goes_on
        )  # fmt: skip
        position.begins = self._repeated.forget
        self._is_in_loop = False
        """The script runs the body of `batches` or `steps`."""
        self._boundaries = closing.loop = Boundaries(
            rank, iterations, position, self._place, saver, plans, stopper, closing, holder, replay
        )
        rank.client.listener = KeeperNews(rank, saver, plans, stopper, holder)
        try:
            self._begin()
        except BaseException:
            closing.close_failed()
            stopper.close()
            raise

    # ------------------------------------------------------------------ the loop

    @property
    def restored(self) -> Restored | None:
        """The checkpoint that `attach` restored; None: the training begins at step 0."""
        self._place.has_seen_restored = True
        return self._position.restored

    @property
    def due(self) -> bool:
        """A checkpoint begins at the coming boundary, if its slot is there."""
        due = self._stopper.is_stopping or self._saver.is_due(self._rank.step + 1)
        return due and not self._rank.is_closed

    @property
    def step_count(self) -> int:
        """Iterations trained so far; where a loop of one's own starts.

        With `attach` alone one has ended when every optimizer has stepped.
        """
        if not (self._place.has_asked or self._iterations.has_trained):
            self._place.has_asked = not is_only_shown(sys._getframe(1))
        if not self._position.has_begun and not is_loop_ahead(self, sys._getframe(1), NAMED_LOOPS):
            # the loop may begin with the count; one that reads it again may have drawn
            if self._position.may_put_back:
                frame = sys._getframe(1)
                if not (is_within_loop(frame) or is_only_shown(frame)):
                    self._position.put_random_back()
            self._position.look_for_generators(begins=False, again=is_in_loop(sys._getframe(1)))
        return self._rank.step

    @property
    def epoch(self) -> int:
        """The pass over the attached data that is under way; where a loop over epochs begins.

        Raises AutockptError without `attach(data=...)`, where that was iterated by the script
        alone, and with several of `loader`: each of those has its own `epoch`.
        """
        self._place.has_asked = True
        self._repeated.epoch_asked(sys._getframe(1))
        return self._position.epoch

    def batches(self, total: int, *, until: int | None = None) -> Iterator[tuple[int, Any]]:
        """(step, batch) for the steps not yet trained; resumes the loader at the right batch.

        `until`: the loop ends before that step, for work that a script does once an epoch.  That
        work is a part of the loop's last iteration, and the next loop goes on from there.

        `data` must have been attached.  After the last step a final checkpoint is made durable.  A
        script that leaves the loop early calls `step()` before it: else the iteration does not
        count.  A loop that is entered again goes on with the batch that comes next.
        """
        if self._position.data is None:
            raise AutockptError("ckpt.batches() needs attach(data=...); or use ckpt.steps(total)")
        self._place.is_placed = True
        for step in self._steps_left(total, until):
            batch = self._take()
            self._let_build()
            yield step, batch

    def _steps_left(self, total: int, until: int | None) -> Iterator[int]:
        """The steps of a loop of ours, each with its boundary behind it."""
        _require_count("total", total)
        if until is not None:
            _require_count("until", until)
        self._begin_loop(total)
        rank, end = self._rank, total if until is None else min(total, until)
        if rank.step >= end:
            self._repeated.passed()
        if until is not None or rank.step >= total:
            self._position.begin_loop((total if until is None else until) - rank.step)
        while rank.step < end and not self._stopper.has_stopped:
            step = rank.step
            self._repeated.begins()
            if not self._position.has_begun:
                self._begin_training()
            self._let_build()
            self._is_in_loop = True
            try:
                yield step
            finally:  # the script may leave the loop here
                self._is_in_loop = False
            if rank.step != step:
                continue
            if until is not None and step + 1 == until < total:
                self._iterations.is_owed = True
                return
            if step == rank.start_step:
                self._boundaries.warn_of_untrained()
            self._boundaries.run(step + 1)
        if self._rank.step >= total:
            self._closing.finish(final_checkpoint=True, reason="finished")

    def _begin_training(self) -> None:
        """The first iteration of this process: loops before it had nothing left to train."""
        self._position.put_random_back()
        self._position.look_for_generators(begins=True)

    def _let_build(self) -> None:
        """Fill the script's new parts; parts that it builds from here on may draw."""
        if self._rank.rebuilding is not None and not self._rank.rebuilding.look():
            self._rank.rebuilding.begin()

    def _take(self) -> Any:
        """The next batch; a loop that is entered again goes on in the epoch that it had left."""
        assert self._position.data is not None
        self._iterations.drawn_mark = self._position.random_mark()
        batch = self._position.data.next()
        self._iterations.taken += 1
        return batch

    def _begin_loop(self, total: int) -> None:
        """The loop is ours and its end is known."""
        self._closing.require_in_force()
        if self._position.was_over:
            self._position.look_for_generators(begins=True)
        self._boundaries.finish_iteration()
        if not self._rank.owns_boundary:
            self._iterations.warn_of_lead()
            self._iterations.begin_loop()
            self._iterations.forget_lead()
        if self._rank.is_closed and self._rank.step < total:
            self._rank.say(
                f"the session has ended at step {self._rank.step}, so this loop makes no "
                "checkpoint. Give the first loop the steps of all of them, or leave it with "
                "ckpt.step(); break"
            )
        self._rank.total = total
        if self._plans.tuner is not None:
            self._plans.tuner.total = total
        if 0 < total <= self._rank.step == self._rank.start_step:
            self._warn_already_finished(total)

    def _warn_already_finished(self, total: int) -> None:
        """Of the script's second start, which may have been meant as another training."""
        self._rank.say(
            f"{shown(self._job.run_directory)} holds a run that is already at step "
            f"{self._rank.step} of {total}, so nothing is trained; {ways_out()}"
        )

    def steps(self, total: int, *, until: int | None = None) -> Iterator[int]:
        """The steps not yet trained, for a loop that makes its own batches; as `batches`."""
        for step in self._steps_left(total, until):
            self._iterations.drawn_mark = self._position.random_mark()
            yield step

    def own_boundary(self, total: int | None = None, *, ends_at_once: bool = False) -> None:
        """From now on `step()` alone ends iterations, the first one too.

        For adapters: all steps of optimizers and training forwards between two calls of `step()`
        belong to one iteration.  `total`: the last step, which is made durable.  `ends_at_once`:
        `close` follows the last boundary, and no code of the script stands between.  Flags of
        modules are then read at the end, and not at each boundary.
        """
        self._rank.ends_at_once = ends_at_once
        if total is not None:
            self._begin_loop(total)
            self._position.look_for_generators(begins=True)
            return
        self._closing.require_in_force()
        if not self._rank.owns_boundary:
            self._iterations.begin_loop()
            self._iterations.forget_lead()

    def step(self) -> int:
        """Marks the end of an iteration in a loop of one's own; the new step count.

        The first call ends the first iteration: what optimizers have stepped before it is none.
        """
        if not self._rank.owns_boundary:
            self._iterations.begin_loop()
        self._position.is_over = self._is_in_loop
        try:
            self._boundaries.run(self._rank.step + 1)
        finally:
            self._position.is_over = False
        return self._rank.step

    def save(self) -> None:
        """Asks for a durable checkpoint at the coming boundary, beside the planned ones.

        Where gradients are accumulated it is that behind the optimizer's step.  Call it on all
        ranks before the same boundary.
        """
        # Behind the step that makes it due already, data and random state may have gone on.
        # A loader of ours ends the iteration before that.
        late = self._iterations.is_round_over() and self._iterations.before_next is None
        late = late and not self._position.loaders
        self._saver.wanted_step = self._rank.step + (2 if late else 1)

    def report_loss(self, loss: Any) -> None:
        """The loss of the iteration at hand, for `failures.rollback`: a number, or a tensor of one.

        Where the policy asks for it, the next boundary raises RollbackError after a spike.  A
        tensor on a device is waited for.
        """
        self._rank.rollback.report_loss(loss)

    def report(self, **values: Any) -> None:
        """Values of the state at hand, for `keep.best`: `ckpt.report(loss=0.31, accuracy=0.92)`.

        They belong to the next checkpoint for disk; `save()` asks for one at the coming boundary.
        Of several ranks the lowest that reports counts.  NaN and infinity leave none.  A tensor
        on a device is waited for.  Raises ConfigError for a value that is no number.
        """
        for name, value in values.items():
            try:
                number = float(value.detach() if hasattr(value, "detach") else value)
            except (TypeError, ValueError, RuntimeError) as error:
                raise ConfigError(
                    f"ckpt.report({name}=...): expected a number, or a tensor of one, got "
                    f"{value!r:.80}"
                ) from error
            self._saver.metrics.pop(name, None)
            if math.isfinite(number):
                self._saver.metrics[name] = number

    @property
    def ready(self) -> bool:
        """True when the slots are there: a checkpoint can begin at the next boundary."""
        return bool(self._client.slots)

    @property
    def fence_stall_s(self) -> float:
        """Seconds the training has waited at fences so far."""
        return self._saver.fence_stall_s

    @property
    def keeper_pid(self) -> int | None:
        """Process of this node's keeper, None while there is none."""
        status = keeper_status(self._job.run_directory, self._job.node)
        return None if status is None else status.pid

    def wait_durable(self, timeout_s: float) -> float:
        """Waits until the newest durable checkpoint that was begun is on disk; when it was.

        CLOCK_MONOTONIC seconds; 0 when there was none, it failed, or time ran out.
        """
        self._saver.fence()
        saves, save = self._client.saves, self._client.saves.newest_on_disk
        if save is None:
            return 0.0
        self._client.wait_over(save.generation, timeout_s)
        return saves.durable_s if saves.is_durable(save.generation) else 0.0

    def wait_for_staging(self) -> None:
        """Wait until the snapshot has left the live state.

        Call it before code that changes the state by itself, outside an optimizer's step.
        """
        self._saver.fence()
        self._holder.release()

    def fence(self) -> None:
        """`wait_for_staging` by its former name, for one version."""
        warnings.warn(
            "ckpt.fence() has another name: call ckpt.wait_for_staging()",
            DeprecationWarning,
            stacklevel=2,
        )
        self.wait_for_staging()

    # ------------------------------------------------------------------ a framework's loop

    def finish_restore(self) -> None:
        """Puts the random state of the checkpoint back.  A second call does nothing.

        With `attach(restore="tensors")` alone; call it where the bare framework stands between two
        iterations.  Else the first batch of a resumed `loader` does it.
        """
        self._position.finish_restore()
        self._let_build()

    def loader(
        self, dataloader: Any, *, ahead: int = 0, name: str = ONLY, replace: bool = False
    ) -> EpochLoader:
        """The loader, iterated by a loop of one's own: one pass that trains is one epoch.

        After a restart its first pass is the rest of the epoch under way, in the order of then;
        `loader.epoch` is that epoch's number.  A checkpoint may be made behind an epoch's last
        batch.  If the loop had asked for one batch more, as a `for` does, the first pass is the
        next epoch; else it gives no batch.  `ahead`: batches that a framework fetches before it
        trains the one that it has.  `name`: of each loader, where there are several.  `replace`: it
        takes the place of one of that name, which is iterated no more, at its epoch.

        Raises ConfigError for a loader that cannot be resumed at a batch.
        """
        return self._position.loader(dataloader, ahead=ahead, name=name, replace=replace)

    # ------------------------------------------------------------------ the end

    def request_stop(self, reason: str = "the script asked for a stop") -> None:
        """Ends the training at the coming boundary, with a durable checkpoint, on all ranks.

        `reason`: its name in logs and reports.

        Callable from any thread and from a signal handler of the script, on one rank or on all.
        `batches` and `steps` end there, and `stopped` is True; a loop of one's own looks at it.
        """
        self._stopper.request_stop(reason)

    @property
    def stopped(self) -> bool:
        """True when the training has ended before its last step, because that was asked for."""
        return self._stopper.has_stopped

    def close(self, *, final_checkpoint: bool = True) -> None:
        """Ends the protection: fences, makes a last checkpoint durable, lets the keeper go.

        Called while an exception is handled it is a failure: the keeper keeps what is in memory
        for the next start.  One rank of several then makes no last checkpoint, because the others
        may never join it.
        """
        self._closing.close(final_checkpoint=final_checkpoint)

    # ------------------------------------------------------------------ begin

    def _begin(self) -> None:
        began = time.monotonic()
        job = self._job
        if job.placed:
            self._rank.say(job.placed)
        ranks = job.nodes.count(job.node)
        ahead = PrefaultedMemory(job.checkpoints, self._rank.live, job.rank, ranks=ranks)
        progress = Progress("restore", enabled=job.rank == 0, beside_script=True)
        # Keepers do not know a rank that has died before it has attached.
        freed = unwinding.ends(self._client.give_up_restore)
        with contextlib.closing(ahead), progress, freed:
            self._client.open()
            resumed = resume(
                self._client, self._rank.live, job.checkpoints, ahead, progress.at,
                read_once=self._rank.plan.read_once,
            )  # fmt: skip
        self._require_memory()
        if resumed.generation is None and self._weights is not None:
            for notice in self._weights.apply(self._rank.live):
                self._rank.say(notice)
        self._rank.term = resumed.term
        self._rank.attempt = self._rank.first_attempt = resumed.attempt
        self._rank.step = self._rank.start_step = resumed.step
        self._place.framework = framework_of(sys._getframe())
        if self._place.framework is not None and not self._place.is_placed:
            self._place.require()
        self._rank.lead_resumed = int((resumed.progress or {}).get("lead", 0))
        self._rank.is_safe = resumed.durable
        applied = time.monotonic()
        self._position.take_progress(resumed)
        self._replay.resumed(None if resumed.rng is None else resumed.generation)
        self._leave_out()
        self._position.note_nan(resumed)
        if resumed.awaiting is not None:
            self._rank.rebuilding = Rebuilding(
                resumed.awaiting, self._rank.live, self._note_rebuilt
            )
            self._rank.say(
                f"the script changed its structure before step {resumed.step}: "
                f"{self._rank.rebuilding.lacking()}. Its state is put back when the script has "
                "built it again, which must be before the first step of an optimizer"
            )
        self._report_started(resumed, began, resumed.apply_s + time.monotonic() - applied)
        self._rank.snapshotter = Snapshotter(
            self._rank.live, self._client.board.view[8 * CELL_COPIED : 8 * CELL_MARK],
            place=self._rank_place(),
        )  # fmt: skip
        self._rank.snapshotter.compares_replicas = job.goal.restart.replicas in ("mark", "restore")
        self._boundaries.watch()
        self._rank.mark_step(first=True)
        self._client.running_as(
            self._rank.term, self._rank.plan.version, None, attempt=self._rank.attempt
        )
        self._plans.begin()
        with contextlib.suppress(OSError):
            answer_with_stacks(job.run_directory, job.rank)
        late_threads.reserve()
        self._stopper.start()
        self._closing.begin()
        is_placed = self._place.is_placed or self._place.has_place()  # else it asks first
        if is_placed and not is_loop_ahead(self, sys._getframe(1), NAMED_LOOPS, in_attach=True):
            self._position.look_for_generators(begins=False)

    def _rank_place(self) -> Place | None:
        """This rank among the ranks with which it may share; None: it is alone.

        For the whole start: a change of the plan that not all ranks apply at one boundary would
        leave a hole in the checkpoint.
        """
        job = self._job
        if job.world_size == 1:
            return None
        return Place(rank=job.rank, nodes=job.nodes, among=self._rank.plan.staging.shares)

    def _leave_out(self) -> None:
        """After a rollback: the data up to the spike is drawn, and not trained on."""
        data = self._position.data
        batches = self._rank.rollback.began(self._rank.step, drops=data is not None)
        if data is None or not batches:
            return
        for _ in range(batches):
            data.next()
        self._rank.say(f"rollback: {batches} batches are left out, those up to the spike")

    def _require_memory(self) -> None:
        """Raises ConfigError where a launch begins, and not even the least checkpoint has room.

        A restart goes on all the same, and so does a script without a launcher: both log it.
        """
        job, plan = self._job, self._rank.plan
        if not self._rank.begins_launch or self._client.slots:
            return
        lack = lack_of_memory(
            plan, state_bytes=sum(x.nbytes for x in self._rank.live.lazy_tensors().values()),
            ranks=job.nodes.count(job.node), limit_bytes=job.goal.limits.host_memory_bytes,
        )  # fmt: skip
        if lack:
            raise ConfigError(refusal(lack))

    def _report_started(self, resumed: Resumed, began: float, apply_s: float) -> None:
        attach_at, startup = startup_timing.startup()
        now = time.monotonic()
        discards = self._job.fresh or self._job.resume_from is not None
        self._rank.emit(
            t.RunStarted(
                at_s=now, rank=self._job.rank,
                wall=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
                run_id=self._job.incarnation.launch_id,
                term=self._rank.term, world_size=self._job.world_size, pid=os.getpid(),
                plan_id=self._rank.plan.plan_id, plan_version=self._rank.plan.version,
                state_bytes=sum(x.nbytes for x in self._rank.live.lazy_tensors().values()),
                restart_count=self._job.restart_count,
                launch_s=startup.launch_s, interpreter_s=startup.interpreter_s,
                torch_import_s=startup.torch_import_s, process_group_s=startup.process_group_s,
                script_s=startup.script_s, wait_s=now - attach_at - resumed.read_s - apply_s,
                read_s=resumed.read_s, apply_s=apply_s,
                non_temporal_bytes=memcpy_threshold.given_bytes(os.environ),
                process=startup_timing.process(),
                new_process_reason=os.environ.get(environment.NEW_PROCESS, ""),
                resumed=str(resumed.generation or SCRATCH),
                discards=discards,
            )
        )  # fmt: skip
        if self._job.rank == 0 and self._job.place is not None:
            self._job.place.renew()
        begins = not self._job.restart_count
        before_s = startup.since_born_s if begins else startup.since_decided_s
        self._client.send(
            wire.TrainerResumed(
                rank=self._job.rank, term=self._rank.term, generation=resumed.generation,
                step=resumed.step, source=resumed.source, bytes=resumed.bytes,
                restore_s=time.monotonic() - began,
                came_s=None if before_s is None else before_s + time.monotonic() - attach_at,
                begins_launch=begins, discards=discards,
            )
        )  # fmt: skip
        if resumed.generation is None and self._job.number > 1:
            self._rank.say(
                f"attach {self._job.number} of this process is a run of its own, in "
                f"{shown(self._job.run_directory)}; attach(run_dir=...) names another"
            )
        if resumed.generation is not None:
            said = (
                f"resumed step {resumed.step} from {resumed.source} "
                f"(term {resumed.generation.term}, {time.monotonic() - began:.2f} s)"
            )
            if self._job.unnamed and not self._job.restart_count:
                said += f" in {shown(self._job.run_directory)}; {ways_out()}"
            self._rank.say(said)

    def _note_rebuilt(self) -> None:
        self._rank.rebuilding = None
        self._rank.live.refresh()
        self._rank.say("the structure of the checkpoint is built again, and its state is put back")


def _require_count(name: str, value: Any) -> None:
    """Raise ConfigError for something else than a number of iterations."""
    try:
        is_count = bool(value >= 0)
    except TypeError:
        is_count = False
    if not is_count:
        raise ConfigError(
            f"{name} of ckpt.batches() or ckpt.steps(): expected a number of iterations, "
            f"0 or more, got {value!r}"
        )


def ways_out() -> str:
    """How another run is begun than the one that is there."""
    if "AUTOCKPT_RUN_DIR" in os.environ:
        return "--run-dir DIR for another, --fresh to begin anew"
    return "attach(run_dir=...) for another, attach(fresh=True) to begin anew"
