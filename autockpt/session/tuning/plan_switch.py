"""A change of the plan in two phases, so that all ranks apply it before the same step.

A stop is agreed on in the same way: the boundary at which all ranks make the last checkpoint.

The listening thread prepares a plan and answers with the step the loop stands at.  The loop
promises not to pass that step by more than a margin before the second phase.  A boundary that
reaches the margin waits, bounded: a change of the plan may cost a moment and never the training.
"""

import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from autockpt.executors.protocol import messages as p
from autockpt.values.plan import CheckpointPlan
from autockpt.values.record import from_data

HOLD_S = 10.0
"""How long a boundary waits for the second phase before it goes on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Pending:
    version: int
    plan: CheckpointPlan | None
    """None: a stop."""
    apply_step: int | None = None


class PlanSwitch:
    """Between the listening thread (`take`) and the training thread (`due`)."""

    def __init__(
        self,
        rank: int,
        send: Callable[[Any], object],
        wait_until: Callable[[Callable[[], bool], float], bool],
    ) -> None:
        self._rank = rank
        self._send = send
        self._wait_until = wait_until
        self._lock = threading.Lock()
        self._pending: _Pending | None = None
        self._hold_after: int | None = None
        self._at = 0
        """Newest boundary that was reached."""

    @property
    def has_work(self) -> bool:
        """A change of the plan, or a stop, is under way."""
        return self._pending is not None or self._hold_after is not None

    @property
    def stop_step(self) -> int | None:
        """The boundary at which all ranks stop, once that is decided."""
        pending = self._pending
        return None if pending is None or pending.plan is not None else pending.apply_step

    @property
    def undecided_version(self) -> int:
        """Version that is prepared and undecided, 0 if none: a new keeper has to settle it."""
        pending = self._pending
        return pending.version if pending is not None and pending.apply_step is None else 0

    def take(self, message: Any, step: int) -> tuple[int, int, CheckpointPlan | None] | None:
        """A message of the keeper while the loop stands at `step`.

        Once it is decided: (version, step, plan); None for a plan that was prepared before.
        """
        match message:
            case p.PreparePlan():
                self._prepare(message, step)
            case p.ApplyPlan():
                plan = self._decide(message, step)
                if message.version < p.STOP_VERSION:
                    return message.version, message.apply_step, plan
            case p.AbortPlan():
                self._abort(message.version)
        return None

    def plan_from(self, step: int) -> CheckpointPlan | None:
        """The plan that applies from the boundary of `step` on, if one does; may hold the loop."""
        with self._lock:
            self._at, hold = step, self._hold_after
        if hold is not None and step >= hold:
            self._wait_until(lambda: self._hold_after is None, HOLD_S)
            self._hold_after = None
        pending = self._pending
        if pending is None or pending.apply_step is None or step < pending.apply_step:
            return None
        if pending.plan is None:
            return None  # it stands until the ranks have stopped
        with self._lock:
            self._pending = None
        return pending.plan

    def _prepare(self, message: p.PreparePlan, step: int) -> None:
        plan = None
        if message.version < p.STOP_VERSION:
            plan = from_data(CheckpointPlan, message.payload, where="plan change")
        with self._lock:
            step = max(step, self._at)  # a boundary may have been reached meanwhile
            self._pending = _Pending(version=message.version, plan=plan)
            self._hold_after = step + message.margin_steps
        self._send(p.PlanPrepared(rank=self._rank, version=message.version, step=step))

    def _decide(self, message: p.ApplyPlan, step: int) -> CheckpointPlan | None:
        plan = None
        with self._lock:
            pending = self._pending
            if pending is not None and pending.version == message.version:
                plan = pending.plan
                self._pending = replace(pending, apply_step=message.apply_step)
                if step >= message.apply_step and self._hold_after is None:
                    late = p.PlanLate(rank=self._rank, version=message.version, step=step)
                    self._send(late)
            self._hold_after = None
        return plan

    def _abort(self, version: int) -> None:
        with self._lock:
            if self._pending is not None and self._pending.version == version:
                self._pending = None
            self._hold_after = None
