"""The boundaries of iterations: found, and what happens at each of them.

At every iteration boundary the plan changes, the snapshot that is due begins, and the next slot is
asked for.  At the optimizer's step the fence waits for the rest of the copy.
"""

import os
import time
from typing import Any

import torch

from autockpt.executors.linux.signal_errors import is_from_handler
from autockpt.executors.snapshot.optimizer_hooks import OptimizerHooks
from autockpt.launch import environment
from autockpt.launch.in_process.order import of_this_process as unwinding
from autockpt.launch.standby import imports
from autockpt.session.base import RankState
from autockpt.session.boundaries.forward_hooks import Forwards
from autockpt.session.boundaries.iterations import Iterations
from autockpt.session.boundaries.last_boundary import BoundaryHolder
from autockpt.session.endings.closing import Closing
from autockpt.session.endings.stopping import Stopper
from autockpt.session.place.place_check import PlaceCheck
from autockpt.session.place.replay_check import ReplayCheck
from autockpt.session.place.restart_notices import RestartNotices
from autockpt.session.place.training_position import TrainingPosition
from autockpt.session.room import refusal
from autockpt.session.saving import Saver
from autockpt.session.tuning.plan_follower import PlanFollower
from autockpt.values import telemetry as t
from autockpt.values.errors import ConfigError

AHEAD_ROUNDS = (1, 3, 6)
"""Rounds at which fetched batches are compared with forwards."""
UNSEEN_ROUNDS = 3
"""Steps without a call of a model, until the user reads of it."""
IMPORTED_STEPS = 2
"""Iterations until what a training imports late is there."""


class Boundaries:
    """Ends iterations, and calls the parts of a session in their order."""

    def __init__(
        self,
        rank: RankState,
        iterations: Iterations,
        position: TrainingPosition,
        place: PlaceCheck,
        saver: Saver,
        plans: PlanFollower,
        stopper: Stopper,
        closing: Closing,
        holder: BoundaryHolder,
        replay: ReplayCheck,
    ) -> None:
        self._rank, self._job, self._client = rank, rank.job, rank.client
        self._iterations, self._position, self._place = iterations, position, place
        self._saver, self._plans, self._stopper, self._closing = saver, plans, stopper, closing
        self._holder, self._replay = holder, replay
        self._notices = RestartNotices(rank, position, place)
        self._has_written_imports = False
        self._unseen_rounds = 0
        """Steps of optimizers since no call of a model was seen."""
        self._is_behind_step = False
        """No loader of ours was asked for a batch since the newest boundary."""

    def watch(self) -> None:
        """Optimizers and models are hooked from now on."""
        live = self._rank.live
        attached, every = live.attached_optimizers, live.optimizers
        inner = {every[name]: every[outer] for name, outer in live.outer.items()}
        hooks = self._closing.hooks = OptimizerHooks(
            list(attached.values()), self._before_step, self._after_optimizer, inner,
            other=self._notices.note_other_optimizer,
        )  # fmt: skip
        for module in live.models.values():
            hooks.guard_module(module)
        self._rounds = 0
        """That `attach` alone has counted, up to the last of `AHEAD_ROUNDS`."""
        self._first_fetched: dict[str, tuple[int, int]] = {}
        """By loader (epoch, batches) when it was first asked."""
        self._ahead: dict[str, list[int]] = {}
        """By loader the batches that no forward had had yet, by round of `AHEAD_ROUNDS`."""
        self._watch_forwards()

    def note_last(self) -> None:
        """As of `LoopEnd`."""
        self._stopper.note_last()

    def note_end(self) -> None:
        """As of `LoopEnd`."""
        self._stopper.note_end()

    def _watch_forwards(self) -> None:
        """Without batches/steps/step an iteration has ended when every optimizer has stepped.

        Its boundary is where a loader of ours fetches the next batch, else the next training
        forward.
        """

        def before(module: torch.nn.Module) -> None:
            if not self._rank.is_closed:
                self._rank.beat("trains" if module.training else "evaluates")
            if not module.training or self._rank.is_closed:
                self._iterations.forget_fetches()
                return
            if not (self._position.has_begun or self._iterations.is_before_named_loop()):
                self._position.look_for_generators(begins=True, trains=True)
            if self._rank.rebuilding is not None:
                self._rank.rebuilding.look()
            if not self._place.is_placed:
                self._place.require()
            if self._position.loaders and not torch.is_grad_enabled():
                self._iterations.forget_fetches()
                return  # an evaluation without model.eval(): the loader ends the iteration
            if self._iterations.is_round_over():
                if self._position.loaders and not self._iterations.has_fetched:
                    self._warn_of_carried_batch()
                fetched = set(self._iterations.fetched)
                self._end_round(self._iterations.before_next)
                self._iterations.fetched |= fetched  # for the iteration that begins here
            self._unseen_rounds = 0
            self._iterations.note_forward()

        def fetches(loader: str) -> None:
            if loader not in self._first_fetched and loader in self._position.loaders:
                place = self._position.loaders[loader].place
                self._first_fetched[loader] = (place.epoch, place.index)
            self._iterations.has_fetched = True
            self._warn_of_left_epoch(loader)
            if self._rank.is_closed or not self._position.is_own_thread:
                return  # a thread that fetches ahead knows nothing of the training
            if self._iterations.is_between(loader):
                self._end_round(None, is_between=True)
            self._iterations.fetched.add(loader)

        self._position.watch_fetch = fetches
        if self._rank.live.optimizers:
            needed = lambda: not self._rank.owns_boundary  # noqa: E731
            self._closing.forwards = Forwards(before, self._require_seen, needed)
            for module in self._rank.live.models.values():
                self._closing.forwards.watch(module)

    def _end_round(self, before: tuple[Any, Any] | None, *, is_between: bool = False) -> None:
        if self._iterations.is_before_loop():
            self._iterations.skip()
            return
        if self._rounds < AHEAD_ROUNDS[-1]:
            self._look_for_batches_ahead()
        self._rank.lead += 1
        self.run(self._rank.step + 1, before=before, is_between=is_between)

    def _warn_of_left_epoch(self, name: str) -> None:
        """The script left an epoch behind a boundary: a checkpoint of it is within that epoch."""
        is_behind, self._is_behind_step = self._is_behind_step, False
        loader = self._position.loaders.get(name)
        if loader is None or not loader.left_after:
            return
        count, loader.__dict__["left_after"] = loader.left_after, 0
        if is_behind and self._rank.owns_boundary and not self._place.framework:
            self._rank.report_degraded(
                "loop",
                f"the loop left an epoch behind ckpt.step() after {count} batches. A restart from "
                "the checkpoint of that step goes on in the epoch, and may train more of it. Leave "
                f"it in front of the work: `if number == {count}: break` at the top of "
                "`for number, batch in enumerate(loader, loader.first_batch)`",
            )

    def _look_for_batches_ahead(self) -> None:
        """Several rounds tell a script that fetches ahead from one that takes several a round."""
        self._rounds += 1
        if self._rounds not in AHEAD_ROUNDS or self._iterations.is_blind:
            return
        for name, loader in self._position.loaders.items():
            epoch, first = self._first_fetched.get(name, (-1, 0))
            more = loader.place.index - first - self._iterations.forwards
            counted = self._ahead.setdefault(name, [])
            counted.append(more if loader.place.epoch == epoch else 0)
            is_steady = counted[-1] < self._rounds * max(1, counted[0])
            if self._rounds == AHEAD_ROUNDS[-1] and min(counted) > loader.ahead and is_steady:
                self._rank.report_degraded(
                    "carried values",
                    f"the script had fetched {counted[-1]} more batches of ckpt.loader than it had "
                    "trained, so a restart leaves them out. Fetch a batch at the beginning of its "
                    f"iteration, or say so: ckpt.loader(..., ahead={counted[-1]}). Workers of a "
                    "DataLoader fetch ahead by themselves, and need no word",
                )

    def _require_seen(self) -> None:
        self._iterations.is_blind = True
        if not (self._rank.owns_boundary or self._position.loaders):
            self._rank.report_degraded(
                "iterations",
                "the model is within a graph that torch.compile may not break, so its calls, and "
                "with them iterations, are not seen. Attach the module that torch.compile returns, "
                "use model.compile() or ckpt.steps(total), or call ckpt.step() at their end",
            )

    def warn_of_untrained(self) -> None:
        """The first iteration of a loop of ours ends, and may have done nothing yet."""
        live = self._rank.live
        parameters = (p for model in live.models.values() for p in model.parameters())
        if self._iterations.has_stepped or not live.optimizers or not self._iterations.taken:
            return
        if all(each.grad is None for each in parameters):
            self._rank.report_degraded(
                "carried values",
                "the script asked ckpt.batches for the next batch before it had trained with the "
                "one that it had. A restart leaves that one out. Fetch a batch at the beginning "
                "of its iteration; workers of a DataLoader fetch ahead by themselves",
            )

    def _warn_of_carried_batch(self) -> None:
        if self._rank.job.rank == 0 and "carried values" not in self._rank.warned:
            self._rank.report_degraded(
                "carried values",
                "an iteration begins without a batch of ckpt.loader. The script has that batch "
                "already: fetched ahead, used for several steps, or kept by itertools.cycle. A "
                "restart goes on with the loader's next batch. Fetch a batch at "
                "the beginning of each iteration, or call ckpt.step() once for each batch",
            )

    def _note_unseen(self) -> None:
        """Optimizers stepped, and no call of a model was seen: the script may call its methods."""
        if self._iterations.is_blind or self._closing.forwards is None:
            return
        self._unseen_rounds += 1
        if self._unseen_rounds == 1:
            models = self._rank.live.models.values()
            self._closing.forwards.watch_part(part for model in models for part in model.modules())
        elif self._unseen_rounds == UNSEEN_ROUNDS:
            self._rank.report_degraded(
                "iterations",
                "optimizers step, and no call of an attached model in training mode is seen, so "
                "iterations are not counted and no checkpoint is made. Use ckpt.steps(total), or "
                "call ckpt.step() at the end of each iteration",
            )

    def _before_step(self, optimizer: torch.optim.Optimizer | None) -> None:
        """Raises ConfigError for a step on a structure whose state is still awaited."""
        if optimizer is not None and self._rank.rebuilding is not None:
            self._rank.rebuilding.require()
        if optimizer is None and self._iterations.has_trained:
            self._notices.note_late_load(self._rank.step + self._iterations.is_owed)
        elif optimizer is None:
            self._notices.note_load()
        self._saver.fence(optimizer)
        self._holder.release()

    def _after_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        name = self._rank.live.stepped(optimizer)
        self._rank.optimizer_steps += 1
        if not self._rank.owns_boundary:
            self._rank.live.module_state.note()
        if not self._rank.is_closed:
            self._rank.beat("trains")
        self._saver.windows.boundary()
        self._saver.traffic.boundary()
        self._iterations.note_step()
        if not self._rank.owns_boundary and not self._rank.is_closed:
            self._iterations.rounds.stepped(name)
            if self._iterations.is_before_loop():
                return
            self._iterations.warn_of_uneven()
            if self._iterations.rounds.complete and not self._iterations.has_forward:
                self._note_unseen()
            wanted = self._stopper.is_stopping or self._saver.is_due(self._rank.step + 1)
            wanted = wanted or self._holder.is_wanted()
            due = self._iterations.rounds.complete and wanted
            self._iterations.before_next = self._position.copy() if due else None

    def run(
        self, step: int, before: tuple[Any, Any] | None = None, *, is_between: bool = False
    ) -> None:
        """The iteration that makes `step` steps has ended.

        `is_between`: nothing of the next one has happened, though no loop of ours says so.
        """
        self._iterations.is_owed = False
        self._is_behind_step = True
        if self._rank.is_closed:
            self._closing.require_in_force()
            self._rank.step = step  # the loop goes on
            return
        unwinding.require_none()
        if not self._place.is_placed:
            self._place.require(begun=True)
        if self._has_nothing_open(step):
            self._plans.apply_due(step)
            if self._saver.is_calm(step):
                self._pass_quietly(step)
                return
        self._holder.release()
        began = self._saver.begin_boundary()
        self._position.look_for_generators(begins=True, trains=True)
        self._note_flags()
        first = self._rank.start_step + 1
        is_first = step == first and self._rank.attempt == self._rank.first_attempt
        if is_first:
            self._rank.emit(t.FirstIterationEnded(at_s=began, rank=self._job.rank, step=step))
        self._notices.look(is_first=is_first)
        if step == self._rank.start_step + IMPORTED_STEPS and not self._has_written_imports:
            self._write_imports()
        whole = self._iterations.has_stepped or not self._rank.live.optimizers
        self._iterations.accumulation.iterated(stepped=whole)
        self._rank.step = step
        self._iterations.begin()
        self._rank.mark_step()
        self._rank.rollback.require(step)
        self._rank.beat("saves")
        self._saver.report_trial(began)
        self._replay.boundary(step)
        try:
            if self._saver.flight is not None:
                self._saver.fence()  # the iteration had no optimizer step (a skipped one)
            self._plans.apply_due(step)
            due, stops = self._saver.is_due(step), self._stopper.stops_at(step)
            whole = whole or ((due or stops) and self._iterations.is_whole_iteration(step))
            here = self._rank.owns_boundary or is_between or before is not None
            if stops and whole and here:
                self._stopper.make_last(before)
            elif not due:
                self._saver.skip_undue(step)
            elif not whole:
                self._saver.put_off(step)
            elif self._saver.waits_for_epoch(step):
                pass
            elif here:
                disk, generation = self._saver.is_disk_free(step), self._rank.generation(step)
                if self._saver.begin(generation, disk=disk, before=before):
                    self._replay.saved(generation)
            else:
                self._rank.report_skip(step, "it became due when the next iteration had begun")
                self._saver.keep_wish(step)
            self._rank.open = 0 if whole else self._rank.open + 1
            if not (whole and here and not stops and self._hold(step, before)):
                self._saver.ask_ahead(step + 1)
        except Exception as error:
            self._saver.flight = None
            if is_from_handler(error):
                self._saver.end_boundary()
                raise
            self._rank.report_degraded("snapshot", f"{type(error).__name__}: {error}")
        self._saver.end_boundary()
        self._rank.beat("trains")
        self._rank.clock.stalled(time.monotonic() - began)
        self._rank.report_iterations()
        if self._client.fenced or self._stopper.is_leaving:
            self._stopper.leave()
        self._require_slots()

    def _has_nothing_open(self, step: int) -> bool:
        """Apart from plans and saves, `run` has nothing to do at this boundary: as at most of them.

        Each part that may have work there has its line here, or in `Saver.is_calm`.
        """
        rank, link, stopper = self._rank, self._client, self._stopper
        return (
            step > rank.start_step + IMPORTED_STEPS
            and self._position.has_begun
            and (self._iterations.has_stepped or not rank.live.optimizers)
            and not (link.fenced or stopper.is_stopping or stopper.is_leaving)
            and not (rank.rollback.is_asked or self._holder.is_wanted())
            and self._replay.is_idle
            and not self._plans.switch.has_work
        )

    def _note_flags(self) -> None:
        """Of modules and parameters; 0.05 ms for 100 of them, whose memory is not in any cache."""
        if not self._rank.ends_at_once:
            self._rank.live.module_state.note()

    def _pass_quietly(self, step: int) -> None:
        """Count the iteration."""
        rank, iterations = self._rank, self._iterations
        began = self._saver.begin_boundary()
        self._note_flags()
        iterations.accumulation.iterated(stepped=True)
        rank.step = step
        iterations.begin()
        rank.mark_step()
        self._saver.boundary_s = None
        rank.clock.stalled(time.monotonic() - began)
        rank.report_iterations()

    def _hold(self, step: int, before: tuple[Any, Any] | None) -> bool:
        """Whether the state of this boundary is held.

        The next slot is asked for behind it: a keeper that was asked for a later one grants none
        for an earlier boundary.
        """
        if not self._holder.is_wanted():
            return False
        generation = self._rank.generation(step)
        return self._holder.hold(generation, before, lambda: self._saver.ask_ahead(step + 1))

    def _write_imports(self) -> None:
        """Writes down for the next incarnation what this one has imported."""
        self._has_written_imports = True
        if environment.LAUNCHER_PID not in os.environ or self._job.number > 1:
            return
        try:
            imports.write(self._job.run_directory, self._job.rank)
        except OSError as error:
            self._rank.report_degraded("standby", f"the next restart is a cold one: {error}")

    def require_place(self) -> None:
        """The script ends.  Raises SystemExit where it trained on, and not from where it was."""
        trained = self._iterations.waited_in_vain()
        if trained and not self._place.is_placed:
            self._place.require(begun=True, trained=trained)

    def finish_iteration(self, *, is_over: bool = False) -> None:
        """Code behind a loop that ends early belongs to its last iteration: that ends now.

        `is_over`: no further loop begins.
        """
        self._position.is_over = is_over
        if self._iterations.is_owed:
            self.run(self._rank.step + 1)

    def _require_slots(self) -> None:
        """As where a launch begins, when the first iteration has shown how large the state is."""
        link = self._client
        if self._rank.begins_launch and link.slots_refused and not link.slots_changed:
            self._closing.end("error")
            raise ConfigError(refusal(link.slots_refused))
