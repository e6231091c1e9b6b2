"""The end of a run, and the training lost with it.

A report of a run that did not finish opens with it.

The launcher's status says it where there is one; else the last words of the trainers do.  Lost is
the training that is in no durable checkpoint: the memory of a node outlives its trainers by minutes
only.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from autockpt.values.generation import Line
from autockpt.values.telemetry import (
    Event,
    FailureObserved,
    IterationsTimed,
    RemoteCopied,
    RunEnded,
    RunStarted,
    TrainerFailed,
    shows_durable,
)
from autockpt.values.units import format_duration

State = Literal["finished", "failed", "interrupted"]
_STATES: dict[str, State] = {
    "finished": "finished", "failed": "failed", "interrupted": "interrupted",
}  # fmt: skip
_QUOTED_CHARS = 100
"""Of an exception, by which it is found in what the launcher said."""
ERROR_CHARS = 400
"""Of an exception, in the head of a report."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunEnding:
    """The end of a run."""

    state: State
    error: str
    """The exception that ended it, type and message; "": none is known."""
    reason: str
    """The launcher's reason; "": autockpt did not launch the run."""
    exit_code: int | None
    """None: not known."""
    restarts: int
    step: int
    """Newest step that was trained."""
    durable_step: int | None
    """Of the newest durable checkpoint, on disk or else in the object store; None: none is."""
    lost_steps: int
    """Trained at the end, and in no durable checkpoint."""
    lost_s: float
    """Their time, by the mean iteration of the run."""

    @property
    def headline(self) -> str:
        """One sentence: how it ended, where, and the exception."""
        how = {"finished": "Finished", "failed": "Failed", "interrupted": "Interrupted"}[self.state]
        where = f" at step {self.step}" if self.step else " before the first step was reported"
        why = self.error or self.reason
        return f"{how}{where}{f': {why[:ERROR_CHARS]}' if why else ''}".rstrip(".") + "."

    @property
    def loss(self) -> str:
        """Return one sentence: the lost training, and the step of the next start."""
        if not self.step:
            return "Nothing had been trained."
        took = f" ({format_duration(self.lost_s)} of training)" if self.lost_s > 0 else ""
        if self.durable_step is None:
            return f"No checkpoint is durable: all {self.step} steps are lost{took}."
        if not self.lost_steps:
            saved = f"the checkpoint of step {self.durable_step} is durable"
            return f"Nothing was lost at the end: {saved}."
        return (
            f"{_counted(self.lost_steps)} lost{took}: the newest durable checkpoint is of step "
            f"{self.durable_step}."
        )

    @property
    def circumstances(self) -> str:
        """Return exit code, restarts and the launcher's reason without the exception, or ""."""
        parts = [] if self.exit_code is None else [f"exit code {self.exit_code}"]
        if self.restarts:
            parts.append(f"{self.restarts} restart{'s' * (self.restarts > 1)}")
        if self.error and self.reason:
            parts.append(_without_error(self.reason, self.error))
        text = "; ".join(parts)
        return f"{text[:1].upper()}{text[1:]}." if text else ""


def ending(events: Sequence[Event], status: Mapping[str, Any]) -> RunEnding | None:
    """Return the end of the run in aligned `events`; None while it goes on or is not known."""
    state = _STATES.get(str(status.get("state", "")), _last_words(events))
    if state is None:
        return None
    step, durable = newest_step(events), _durable_step(events)
    at_risk = step - (durable or 0)
    lost_steps = 0 if state == "finished" else max(0, at_risk)
    exit_code = status.get("exit_code")
    return RunEnding(
        state=state,
        error="" if state == "finished" else _error(events) or str(status.get("error", "")),
        reason=str(status.get("reason", "")),
        exit_code=exit_code if isinstance(exit_code, int) else None,
        restarts=_whole(status.get("restarts")),
        step=step,
        durable_step=durable,
        lost_steps=lost_steps,
        lost_s=lost_steps * _iteration_s(events),
    )


def _last_words(events: Sequence[Event]) -> State | None:
    """Return the last state by trainers and keepers, for a run without a launcher's status."""
    last: State | None = None
    for event in events:
        if isinstance(event, RunStarted):
            last = None
        elif isinstance(event, TrainerFailed | FailureObserved):
            last = "failed"
        elif isinstance(event, RunEnded) and last != "failed":
            last = {"finished": "finished", "signal": "interrupted"}.get(event.reason, "failed")  # type: ignore[assignment]
    return last


def _error(events: Sequence[Event]) -> str:
    """The first exception since the last start that is no echo of another rank's end."""
    failed: list[TrainerFailed] = []
    for event in events:
        if isinstance(event, RunStarted) and event.rank == 0:
            failed = []
        elif isinstance(event, TrainerFailed):
            failed.append(event)
    own = [event for event in failed if event.origin != "machine"]
    return (own or failed)[0].error if failed else ""


def newest_step(events: Sequence[Event]) -> int:
    """Of the last stretch of training: an earlier one may have been longer, and was lost then."""
    step = 0
    for event in events:
        if isinstance(event, RunStarted):
            resumed = Line.of([(event.term, event.resumed)]).resumed_step
            step = step if resumed is None else resumed
        elif isinstance(event, IterationsTimed) or (isinstance(event, RunEnded) and event.step):
            step = event.step
        elif isinstance(event, TrainerFailed | FailureObserved):
            step = max(step, event.step)
    return step


def _durable_step(events: Sequence[Event]) -> int | None:
    """On the line of the newest start: others were left behind."""
    starts = (one for one in reversed(events) if isinstance(one, RunStarted))
    line = Line.of((one.term, one.resumed) for one in starts)
    durable = [
        event.step for event in events
        if shows_durable(event) and event.step >= 0 and line.names(event.generation)
    ]  # fmt: skip
    copied = [
        event.step for event in events
        if isinstance(event, RemoteCopied) and line.names(event.generation)
    ]  # fmt: skip
    return next((steps[-1] for steps in (durable, copied) if steps), None)


def _iteration_s(events: Sequence[Event]) -> float:
    blocks = [e for e in events if isinstance(e, IterationsTimed)]
    count = sum(block.count for block in blocks)
    return sum(block.total_s for block in blocks) / count if count > 0 else 0.0


def _counted(steps: int) -> str:
    return "1 step is" if steps == 1 else f"{steps} steps are"


def _without_error(reason: str, error: str) -> str:
    """Return the launcher's reason without the exception that the headline has."""
    begin = reason.find(f" ({error.splitlines()[0][:_QUOTED_CHARS]}")
    end = reason.find("): ", begin)
    return reason if begin < 0 or end < 0 else reason[:begin] + reason[end + 1 :]


def _whole(value: Any) -> int:
    return value if isinstance(value, int) else 0
