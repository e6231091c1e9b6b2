"""The iteration under way: its optimizer steps, forwards and batches, and whether it counts."""

import sys
from typing import Any

from autockpt.session.base import RankState
from autockpt.session.boundaries.gradient_accumulation import accumulation
from autockpt.session.boundaries.loop_ahead import NAMED_LOOPS, is_loop_ahead
from autockpt.session.boundaries.optimizer_rounds import Rounds
from autockpt.session.place.training_position import TrainingPosition

LEAD_STEPS = 200
"""Iterations that a loop of ours is waited for, uncounted and without a checkpoint."""


class Iterations:
    """The steps, forwards and batches since the last boundary."""

    def __init__(self, rank: RankState, position: TrainingPosition, loop: object) -> None:
        """`loop`: the session, as the script's code names it."""
        self._rank, self._position, self._loop = rank, position, loop
        self.rounds = Rounds(rank.live.attached_optimizers)
        self.accumulation = accumulation(rank.live, world_size=rank.job.world_size)
        self.is_owed = False
        """A loop of ours ended before the boundary of its last iteration."""
        self.has_stepped = False
        """An optimizer has stepped since the last boundary."""
        self.has_forward = False
        """A model was called in training since the last boundary, or by what ended with that."""
        self.is_within = False
        """A model was called in training since an optimizer's step."""
        self.fetched: set[str] = set()
        """Loaders of ours that were asked for a batch since the last boundary or evaluation."""
        self.has_fetched = False
        """A loader of ours was asked for a batch since an optimizer's step, on any thread."""
        self._feeding: set[str] = set()
        """Of them those by which the training's forwards are fed."""
        self.forwards = 0
        """Calls of a model in training, in this process."""
        self.is_blind = False
        """Calls of a compiled model are not seen."""
        self.taken = 0
        """Batches that `batches` has handed out since the last boundary."""
        self.drawn_mark: list[Any] | None = None
        """A mark of the random state when a loop of ours went on from the last boundary."""
        self.before_next: tuple[Any, Any] | None = None
        """(random state, position of the data) behind the optimizer's step, if the boundary comes
        with the next forward: its batch is drawn by then."""
        self.uncounted = 0
        """Iterations, as `attach` alone counts them, while the loop was waited for."""
        self._waits_for_loop: bool | None = None
        """The script goes on to a loop of ours, which counts from its beginning; None: unknown."""

    @property
    def has_trained(self) -> bool:
        """An optimizer has stepped since this process went on from its checkpoint."""
        begun = self._rank.step != self._rank.start_step
        return begun or self.has_stepped or bool(self.uncounted)

    def begin(self) -> None:
        """A boundary: nothing of the next iteration has happened."""
        self.has_stepped, self.taken = False, 0
        self.fetched.clear()
        self.has_forward, self.drawn_mark = False, None
        self.rounds.begin()

    def forget_lead(self) -> None:
        """Forget the iterations before a loop of ours: they belong to none of its own."""
        self.has_stepped = self.has_forward = False

    def is_round_over(self) -> bool:
        """Every optimizer has stepped, and no loop of ours says where the iteration ends."""
        return self.has_stepped and self.rounds.complete and not self._rank.owns_boundary

    def is_between(self, loader: str) -> bool:
        """The round is over, and this loader begins the next iteration, as it has begun others.

        One for evaluations does not.
        """
        return self.is_round_over() and not self.is_within and loader in self._feeding

    def note_forward(self) -> None:
        """A model is called in training."""
        if not self.is_within:
            self._feeding = (self._feeding & self.fetched) or set(self.fetched)
        self.has_forward = self.is_within = True
        self.forwards += 1

    def note_step(self) -> None:
        """An optimizer stepped.  Where calls are not seen, the batches since tell what feeds it."""
        if self.is_blind and self.fetched:
            self._feeding = (self._feeding & self.fetched) or set(self.fetched)
        self.has_stepped = True
        self.is_within = self.has_fetched = False

    def forget_fetches(self) -> None:
        """A model is evaluated: batches of loaders that have not fed the training were for that."""
        if not self.is_within:
            self.fetched &= self._feeding

    def skip(self) -> None:
        """Skip the ended stretch, which is no iteration: the loop is still waited for."""
        self.uncounted += 1
        self.has_stepped = False
        self.rounds.begin()

    def count_unseen(self) -> None:
        """The loop that was waited for does not come, so its iterations were those."""
        self._waits_for_loop = False
        self._rank.step += self.uncounted
        self._rank.lead += self.uncounted
        self.uncounted = 0

    def waited_in_vain(self) -> int:
        """Iterations that did not count because a loop of ours was to follow, where none came."""
        if self._rank.owns_boundary or not self._waits_for_loop:
            return 0
        return self.uncounted + self.is_round_over()

    def is_whole(self) -> bool:
        """Whether the state is that of the step count.

        Without a loop of ours, which would have said so, the last step ends with the script.
        """
        if self.has_forward and self.is_round_over():
            self.count_unseen()
            self._rank.lead += 1
            self._rank.step, self.has_stepped, self.has_forward = self._rank.step + 1, False, False
            self._rank.mark_step()
        begun = self.has_forward or (self.is_blind and self.drawn_mark is not None)
        if self.has_stepped or begun or self.drawn_mark not in (None, self._position.random_mark()):
            return False
        if not self.taken or self._position.data is None:
            return True
        return self.taken == 1 and self._position.data.give_back()

    def is_before_loop(self) -> bool:
        """A step now is no iteration: the script goes on to a loop of ours."""
        if self._waits_for_loop is None:
            self._waits_for_loop = is_loop_ahead(self._loop, sys._getframe(1))
        if self._waits_for_loop and self.uncounted >= LEAD_STEPS:
            self._rank.report_degraded(
                "loop",
                f"{LEAD_STEPS} iterations came before ckpt.batches(), ckpt.steps() or ckpt.step(), "
                "so from now on they are counted and saved as with attach alone. Call attach "
                "behind them if they are not the training's",
            )
            self.count_unseen()
        return bool(self._waits_for_loop)

    def is_before_named_loop(self) -> bool:
        """The script goes on to `batches` or `steps`, which say where the training begins."""
        return is_loop_ahead(self._loop, sys._getframe(1), NAMED_LOOPS)

    def begin_loop(self) -> None:
        """A loop of ours begins.  The iterations before it that were counted are none of its."""
        self._rank.owns_boundary, self._waits_for_loop = True, False
        rank = self._rank
        if rank.lead_resumed:
            rank.report_degraded(
                "loop",
                f"{rank.lead_resumed} of the {rank.start_step} iterations of the checkpoint that "
                "was resumed were counted with attach alone. If they came before the loop, begin "
                "anew, and call attach behind them",
            )
        if rank.lead:
            rank.say(
                f"the loop begins at step {rank.start_step}: {rank.lead} iterations before it "
                "were counted, and may have been saved, as with attach alone. Call attach behind "
                "them"
            )
            rank.report_iterations(force=True)
            rank.attempt += 1
            rank.step = rank.start_step
            rank.supersedes = True
            rank.mark_step(first=True)
        rank.lead = rank.lead_resumed = self.uncounted = 0

    def warn_of_lead(self) -> None:
        """Asked where a loop of ours begins that names its steps."""
        if self._rank.start_step and (self.has_stepped or self.uncounted or self._rank.lead):
            self._rank.report_degraded(
                "loop",
                "optimizers stepped between attach and the loop, on the state of step "
                f"{self._rank.start_step} that was resumed. So the training differs from one "
                "without a restart. Let them step before attach, or only where ckpt.step_count "
                "is 0",
            )

    def warn_of_uneven(self) -> None:
        """Said once where optimizers do not take turns."""
        uneven = self.rounds.uneven
        if uneven is not None and "iterations" not in self._rank.warned:
            again, behind = uneven
            self._rank.report_degraded(
                "iterations",
                f"{again} has stepped again before {behind} did, so what an iteration is cannot "
                "be known. step_count counts rounds in which every optimizer has stepped, which "
                "may not be the script's. Use ckpt.steps(total), or call ckpt.step() at the end "
                "of each iteration",
            )

    def is_whole_iteration(self, step: int) -> bool:
        """Asked at a boundary that is due and had no step of an optimizer."""
        if not self.accumulation.is_whole(self._rank.plan.snapshot_interval_steps):
            return False
        if self.accumulation.gave_up:
            self._rank.report_degraded(
                "gradients",
                f"no optimizer has stepped up to step {step}: if one will with the gradients that "
                "are there, they are missing in the checkpoints",
            )
        return True
