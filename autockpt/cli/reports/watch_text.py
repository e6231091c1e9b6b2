"""The live view of a run as lines: trained, saved, protected, at risk, decisions, restarts.

Pure: values in, lines out.  No line is wider than the terminal.
"""

import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from autockpt.reports.analysis.degradation import lacking
from autockpt.values.failure import FailureRecord
from autockpt.values.generation import Generation, Line
from autockpt.values.status import RunStatus
from autockpt.values.table import columns
from autockpt.values.telemetry import (
    Degraded,
    Event,
    IterationsTimed,
    MemoryCommitted,
    PlanChanged,
    RunStarted,
    shows_durable,
)
from autockpt.values.units import format_duration

STALE_S = 60.0
"""A keeper replaces status.json every ten seconds: an older one says that the keeper is gone."""
LABEL_WIDTH = 8
RECENT = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveView:
    """Everything that the view shows of one moment."""

    title: str
    status: RunStatus | None
    """None: the keeper has not written one."""
    status_age_s: float
    """Since status.json was written, seconds."""
    events: Sequence[Event]
    """The newest events of all ranks, oldest first."""
    failures: Sequence[FailureRecord]
    line: Line = field(default_factory=lambda: Line(term=None))
    """The line of history of the newest start."""

    @property
    def has_ended(self) -> bool:
        """Whether nothing will change any more."""
        if self.status is None:
            return False
        return self.status.state != "running" or self.status_age_s > STALE_S


def lines(view: LiveView, width: int) -> list[str]:
    """Return the view for a terminal of `width` columns."""
    shown = [f"{view.title}  {_state(view)}"]
    facts = ((label.ljust(LABEL_WIDTH), text) for label, text in _facts(view))
    shown += columns(facts, width=width)
    recent = list(_recent(view))
    if recent:
        shown += ["", "recent"]
        for text in recent[-RECENT:]:
            shown += textwrap.wrap(text, width, initial_indent="  ", subsequent_indent="    ")
    return [line[:width] for line in shown]


def _state(view: LiveView) -> str:
    if view.status is None:
        return "starting"
    if view.status.state == "running" and view.status_age_s > STALE_S:
        return f"no word for {format_duration(view.status_age_s)}"
    return view.status.state


def _facts(view: LiveView) -> Iterator[tuple[str, str]]:
    step, iteration_s = _trained(view)
    durable, memory = _saved(view)
    if step is not None:
        each = f", {format_duration(iteration_s)} each" if iteration_s else ""
        yield "trained", f"step {step}{each}"
    places = [
        f"{place} step {saved}" for place, saved in (("disk", durable), ("memory", memory))
        if saved is not None
    ]  # fmt: skip
    yield "saved", ", ".join(places) or "nothing yet"
    yield "protected", _protected(view)
    newest = max((saved for saved in (durable, memory) if saved is not None), default=None)
    if step is not None:
        yield "at risk", _risk(step, newest, iteration_s)
    restarts = max(len(view.failures), view.status.restarts if view.status else 0)
    yield "restarts", str(restarts)


def _trained(view: LiveView) -> tuple[int | None, float]:
    """Return (newest step, mean seconds of the recent iterations; 0.0: not known)."""
    starts = [at for at, event in enumerate(view.events) if isinstance(event, RunStarted)]
    since = view.events[starts[-1] :] if starts else view.events
    blocks = [event for event in since if isinstance(event, IterationsTimed) and event.count]
    steps = [blocks[-1].step] if blocks else []
    count = sum(block.count for block in blocks)
    if view.status is not None and view.status.last_step is not None:
        steps.append(view.status.last_step)
    return max(steps, default=None), sum(b.total_s for b in blocks) / count if count else 0.0


def _saved(view: LiveView) -> tuple[int | None, int | None]:
    """Return the newest steps on disk and in memory."""
    durable = [
        event.step for event in view.events
        if shows_durable(event) and view.line.names(event.generation)
    ]  # fmt: skip
    memory = [
        event.step for event in view.events
        if isinstance(event, MemoryCommitted) and view.line.names(event.generation)
    ]  # fmt: skip
    if not durable and view.status is not None and view.status.last_durable:
        durable = [Generation.from_text(view.status.last_durable).step]
    return durable[-1] if durable else None, memory[-1] if memory else None


def _protected(view: LiveView) -> str:
    status = view.status
    if status is None:
        return "not yet"
    missing = [f"{tier.tier}: {tier.because}" for tier in status.degraded]
    if lacks := lacking(view.events) or status.lacking:
        missing.append(lacks)
    if status.unprotected_because:
        missing.append(f"other nodes: {status.unprotected_because}")
    answer = "yes" if status.protected else "NO"
    return "; ".join([answer, *missing])


def _risk(step: int, newest: int | None, iteration_s: float) -> str:
    if newest is None:
        return f"all {step} steps"
    steps = max(0, step - newest)
    lasted = f", {format_duration(steps * iteration_s)} of training" if iteration_s else ""
    return f"{steps} steps{lasted}"


def _recent(view: LiveView) -> Iterator[str]:
    """Yield decisions and trouble, oldest first, then the restarts."""
    for event in view.events:
        if isinstance(event, PlanChanged):
            yield f"plan {event.plan_version} from step {event.step}: {event.reason}"
        elif isinstance(event, Degraded):
            yield f"degraded, {event.what}: {event.reason}"
    for failure in view.failures[-2:]:
        source = f", back from {failure.source}" if failure.source else ""
        yield f"restart: {failure.what} lost at step {failure.step}{source}"
