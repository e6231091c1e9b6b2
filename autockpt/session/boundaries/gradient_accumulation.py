"""Choose boundaries for checkpoints when gradients are accumulated over several iterations.

A checkpoint holds no gradients, so it has to be of a boundary behind an optimizer's step.  Ranks
must decide alike and do not talk: they count iterations and steps, which are the same on all of
them.  A rank's own gradients decide only where the count gives no answer.  That is before the first
step of a process, and when a step does not come for much longer than the last one took.
"""

from collections.abc import Callable

from autockpt.executors.sharding.adapters.fsdp2_gathered import gathering_units
from autockpt.executors.sharding.adapters.zero_optimizer import ZeroView
from autockpt.executors.state.live_state import LiveState

SLACK = 2
"""A step that does not come may have been skipped (GradScaler does): the next one is waited for."""
PATIENCE = 1000
"""Iterations for which gradients are waited for that no optimizer has ever stepped with."""


class Accumulation:
    """Counts what lies between two steps of the optimizers."""

    def __init__(self, alive: Callable[[], bool], *, opaque: bool) -> None:
        """`alive`: this rank has gradients, of the last step perhaps; `opaque`: others, or its
        wrapper, may have some that it does not see."""
        self.alive = alive
        self._opaque = opaque
        self._since = 0
        """Iterations since the last step."""
        self._seen = False
        self.window = 1
        """Iterations that the last step took."""
        self.gave_up = False
        """Checkpoints are made although gradients may be alive."""

    def iterated(self, *, stepped: bool) -> None:
        """An iteration ended, with a step of an optimizer or without."""
        if not stepped:
            self._since += 1
            return
        self.window, self._since, self._seen = self._since + 1, 0, True
        self.gave_up = False

    def has_rest(self) -> bool:
        """Gradients were accumulated for a step that has not come.

        Where the step was due, it was skipped: GradScaler does so, and their use is over.
        """
        return self.alive() and not (self._seen and self._since % self.window == 0)

    def is_whole(self, interval_steps: int) -> bool:
        """No gradients are on their way to a step; `interval_steps` between two checkpoints."""
        if not self._since:
            return True
        if self._seen and self._since < SLACK * self.window:
            return False
        alive, early = self.alive(), self._since < max(PATIENCE, SLACK * interval_steps)
        if (alive and self._seen) or ((alive or self._opaque) and early):
            return False
        self.gave_up = alive
        return True


def accumulation(state: LiveState, *, world_size: int) -> Accumulation:
    """That of a job's attached parameters."""

    def alive() -> bool:
        return any(parameter.grad is not None for parameter in state.whole_parameters().values())

    hidden = any(isinstance(each, ZeroView) for each in state.optimizers.values()) or any(
        gathering_units(module) for module in state.models.values()
    )
    frozen = not any(parameter.requires_grad for parameter in state.whole_parameters().values())
    return Accumulation(alive, opaque=hidden or (frozen and world_size > 1))
