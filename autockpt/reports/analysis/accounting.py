"""Where did the wall time go?  Telemetry -> seconds by purpose, adding up exactly.

    wall = productive + stall + slow-down + lost + down + other

One rank is the witness (the lowest that trained).  In synchronous training all ranks advance
together, and all wait for the slowest.  `other` is the time without an event: start-up before the
first iteration, the block under way when a trainer died, evaluation outside the loop.  It is
computed as the difference, so the identity holds by construction.  A negative `other` means that
the telemetry contradicts itself, and the report says so.

Category names follow Google's ml-goodput-measurement.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median

from autockpt.values.failure import FailureRecord
from autockpt.values.generation import SCRATCH
from autockpt.values.telemetry import (
    Event,
    FailureObserved,
    IterationsTimed,
    Restored,
    RunEnded,
    RunStarted,
    SnapshotSealed,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Restore:
    """One interruption and how the job came back."""

    at_s: float
    """When training could go on, seconds since the run began."""
    failed_at_s: float | None
    """When the failure was observed; None: the run resumed an earlier one."""
    what: str
    """trainer, keeper, node, "" when nothing was observed."""
    source: str
    """memory, peer (another node's memory), disk; "" when the job started from scratch."""
    generation: str
    step: int
    lost_steps: int
    lost_s: float
    down_s: float
    restore_s: float
    """Part of `down_s` that moved bytes back."""
    deaths: int = 1
    """Times that a rank died until it was back."""
    new_launch: bool = False
    """The next launch came back; `down_s` leaves out the time until it began."""
    replay: str = ""
    """Whether the first iteration drew the random numbers of before; "": no event says it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Accounting:
    """Seconds of wall time by purpose; `wall_s` is their sum."""

    wall_s: float
    """First to last event of the trainers, without pauses and iterations left on purpose."""
    productive_s: float
    """Iterations that count, at the speed of an undisturbed one."""
    stall_s: float
    """Training blocked by checkpoints."""
    slowdown_s: float
    """Iterations made longer by background copies and writes."""
    lost_s: float
    """Iterations that were lost: trained again after a failure, or gone with the end."""
    detect_s: float
    restart_s: float
    restore_s: float
    other_s: float
    """Start-up and everything else no event explains."""
    paused_s: float
    """Between an end and the next launch; not part of `wall_s`."""
    steps: int
    """Iterations of the witness, repeated ones included, those left on purpose not."""
    left_s: float = 0.0
    """Iterations that a later start left on purpose (`--resume-from`), with the stalls of their
    checkpoints.  Neither lost nor productive, and not part of `wall_s`."""

    @property
    def down_s(self) -> float:
        """Failure to resumed: detect, restart, restore."""
        return self.detect_s + self.restart_s + self.restore_s

    @property
    def goodput(self) -> float:
        """Productive share of wall time, 0..1."""
        return self.productive_s / self.wall_s if self.wall_s > 0 else 0.0

    @property
    def accounted_s(self) -> float:
        """Wall time without `other`: what checkpoints and failures can change."""
        return self.wall_s - self.other_s

    @property
    def waste(self) -> float:
        """Share of `accounted_s` lost to checkpoints and failures; comparable with a promise."""
        wasted = self.stall_s + self.slowdown_s + self.lost_s + self.down_s
        return wasted / self.accounted_s if self.accounted_s > 0 else 0.0

    @property
    def checkpoint_waste(self) -> float:
        """The part of `waste` paid without any failure."""
        return (self.stall_s + self.slowdown_s) / self.accounted_s if self.accounted_s > 0 else 0.0

    def parts(self) -> dict[str, float]:
        """The summands of `wall_s` by name, in the order they are shown."""
        return {
            "productive": self.productive_s,
            "stall": self.stall_s,
            "slowdown": self.slowdown_s,
            "lost": self.lost_s,
            "down": self.down_s,
            "other": self.other_s,
        }


@dataclass(slots=True)
class _Interruption:
    """A failure, until training goes on."""

    failed: FailureObserved | None = None
    deaths: Counter[int] = field(default_factory=Counter)
    """Deaths by rank; -1: the rank is not known."""
    new_launch: bool = False
    not_started_s: float = 0.0
    """From the failure until the next launch began."""
    started_s: float | None = None
    discards: bool = False
    """The start leaves former iterations on purpose: none of them is lost."""
    restored: list[Restored] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Trained:
    """Iterations of one block, or of the part of it that still counts."""

    step: int
    """Behind the last of them."""
    count: int
    total_s: float
    stall_s: float
    excess_s: float
    """Above the same iterations undisturbed."""

    def part(self, step: int, count: int) -> "_Trained":
        """`count` of them, of which the last ends with `step`."""
        share = count / self.count
        return _Trained(step=step, count=count, total_s=self.total_s * share,
                        stall_s=self.stall_s * share, excess_s=self.excess_s * share)  # fmt: skip


@dataclass(slots=True)
class _Ledger:
    """Running sums of the witness."""

    iteration_s: float
    usual_s: float | None
    """An undisturbed iteration; None: not known."""
    mark_s: float
    """Everything of the witness up to here is accounted for."""
    step: int = 0
    trained_s: float = 0.0
    stall_s: float = 0.0
    unsettled_stall_s: float = 0.0
    """Stalls sealed since the last block; a block's own figure replaces them."""
    lost_s: float = 0.0
    down_s: float = 0.0
    restore_s: float = 0.0
    detect_s: float | None = None
    """None: no way back told it apart."""
    steps: int = 0
    excess_s: float = 0.0
    left_s: float = 0.0
    line: list[_Trained] = field(default_factory=list)
    """Iterations that led to `step`, oldest first."""
    not_started_s: float = 0.0
    """Between a failure and the next launch."""
    run_id: str = ""
    """Of the newest launch."""
    restores: list[Restore] = field(default_factory=list)

    def book(self, trained: _Trained) -> None:
        """Add iterations that ended."""
        self.line.append(trained)
        self.trained_s += trained.total_s
        self.stall_s += trained.stall_s
        self.excess_s += trained.excess_s
        self.unsettled_stall_s = 0.0
        self.steps += trained.count

    def go_back(self, step: int, *, on_purpose: bool) -> None:
        """Training goes on behind `step`; iterations left `on_purpose` count no more."""
        self.step = step
        while self.line and self.line[-1].step > step:
            last = self.line.pop()
            kept = max(0, last.count - (last.step - step))
            if kept:
                self.line.append(last.part(step, kept))
            if on_purpose:
                left = last.part(last.step, last.count - kept) if kept else last
                self.trained_s -= left.total_s
                self.stall_s -= left.stall_s
                self.excess_s -= left.excess_s
                self.left_s += left.total_s + left.stall_s
                self.steps -= left.count


def account(
    events: Sequence[Event],
    failures: Sequence[FailureRecord] = (),
    *,
    iteration_s: float | None = None,
    unkept_s: float = 0.0,
    run_id: str = "",
) -> tuple[Accounting, tuple[Restore, ...]]:
    """The accounting of aligned `events` and the restores in it.

    `iteration_s` is the profile's quiet iteration, used where the run never had one.  `unkept_s`
    was trained at the end and is in no durable checkpoint, so it is lost as well.
    `run_id` is of the launch in which `events` begin; "": they tell it themselves.
    """
    witness = witness_of(events)
    stream = [e for e in events if e.rank == witness or isinstance(e, FailureObserved | Restored)]
    start_s, end_s = span(events)
    blocks = [e for e in stream if isinstance(e, IterationsTimed)]
    quiet = [block.quiet_s for block in blocks if block.quiet_s > 0]
    ledger = _Ledger(
        iteration_s=_mean_iteration_s(blocks, iteration_s),
        usual_s=median(quiet) if quiet else iteration_s,
        mark_s=start_s,
        run_id=run_id,
    )
    _walk(stream, ledger, start_s)
    paused_s = _paused_s(events) + ledger.not_started_s
    wall_s = max(0.0, end_s - start_s - paused_s - ledger.left_s)
    slowdown_s = max(0.0, min(ledger.excess_s, ledger.trained_s))
    lost_s = max(0.0, min(ledger.lost_s + unkept_s, ledger.trained_s - slowdown_s))
    productive_s = ledger.trained_s - slowdown_s - lost_s
    detect_s, restart_s, restore_s = _split_down(ledger, failures)
    down_s = detect_s + restart_s + restore_s
    return Accounting(
        wall_s=wall_s,
        productive_s=productive_s,
        stall_s=ledger.stall_s,
        slowdown_s=slowdown_s,
        lost_s=lost_s,
        detect_s=detect_s,
        restart_s=restart_s,
        restore_s=restore_s,
        other_s=wall_s - (productive_s + ledger.stall_s + slowdown_s + lost_s + down_s),
        paused_s=paused_s,
        steps=ledger.steps,
        left_s=ledger.left_s,
    ), tuple(ledger.restores)


def span(events: Sequence[Event]) -> tuple[float, float]:
    """First and last moment of the trainers; the keeper's work after the end is not wall time."""
    mine = [e for e in events if e.rank >= 0 or isinstance(e, FailureObserved)]
    if not mine:
        return 0.0, 0.0
    witness = witness_of(events)
    start_s = min(e.at_s for e in mine)
    for event in mine:
        if isinstance(event, IterationsTimed) and event.rank == witness:
            start_s = min(start_s, event.at_s - event.total_s - event.checkpoint_s)
            break
    return start_s, max(e.at_s for e in mine)


def since_begun_anew(events: Sequence[Event]) -> Sequence[Event]:
    """Aligned `events` from the newest start on that left a whole training on purpose."""
    begun: dict[tuple[str, int], int] = {}
    for index, event in enumerate(events):
        if isinstance(event, RunStarted) and event.discards and event.resumed == SCRATCH:
            begun.setdefault((event.run_id, event.term), index)
    return events[max(begun.values(), default=0) :]


def witness_of(events: Sequence[Event]) -> int | None:
    """The lowest rank that trained, or else the lowest rank seen."""
    trained = [e.rank for e in events if isinstance(e, IterationsTimed) and e.rank >= 0]
    return min(trained or [e.rank for e in events if e.rank >= 0], default=None)


def _mean_iteration_s(blocks: Sequence[IterationsTimed], profiled_s: float | None) -> float:
    count = sum(block.count for block in blocks)
    return sum(block.total_s for block in blocks) / count if count > 0 else profiled_s or 0.0


def _walk(stream: Sequence[Event], ledger: _Ledger, start_s: float) -> None:
    """Follow the witness; an interruption is settled when training goes on, or at the end."""
    pending = _Interruption()
    for event in stream:
        if isinstance(event, FailureObserved):
            if pending.started_s is not None:
                # It had begun, or come back, and was lost before a block of iterations ended.
                _settle(pending, ledger, start_s)
                pending = _Interruption()
            if pending.failed is None or is_found_later(pending.failed):
                pending.failed = event
            pending.deaths[FOUND_LATER if is_found_later(event) else event.failed_rank] += 1
        elif isinstance(event, Restored):
            pending.restored.append(event)
        elif isinstance(event, RunStarted):
            if ledger.run_id not in ("", event.run_id):
                pending.new_launch = True
                if pending.failed is not None:
                    began_s = event.at_s - startup_s(event)
                    pending.not_started_s += max(0.0, began_s - pending.failed.at_s)
            pending.started_s, ledger.run_id = event.at_s, event.run_id
            pending.discards = pending.discards or event.discards
        elif isinstance(event, SnapshotSealed):
            ledger.unsettled_stall_s += event.boundary_stall_s + event.fence_stall_s
        elif isinstance(event, RunEnded):
            ledger.step = max(ledger.step, event.step)
        elif isinstance(event, IterationsTimed):
            _settle(pending, ledger, start_s, first_step=event.step - event.count)
            pending = _Interruption()
            ledger.book(_trained(event, ledger.usual_s))
            ledger.step, ledger.mark_s = event.step, event.at_s
    _settle(pending, ledger, start_s)


def _settle(
    pending: _Interruption, ledger: _Ledger, start_s: float, *, first_step: int | None = None
) -> None:
    """Book an interruption: the block cut short, the work lost, the time down.

    `first_step` is where training went on, if it did.  A start behind the last trained step has
    lost work even without an observed failure.  The run had to leave, and no newer checkpoint was
    durable.  A start that leaves it on purpose has lost nothing.
    """
    failed, restored = pending.failed, pending.restored
    if failed is not None:
        _book_cut_block(failed, ledger)
    resumed_s = max((e.at_s for e in restored), default=pending.started_s)
    worst = max(restored, key=lambda e: e.lost_s, default=None)
    at_step = first_step if worst is None else worst.step
    behind = 0 if at_step is None else max(0, ledger.step - at_step)
    if pending.discards and failed is None and not restored:
        ledger.mark_s = max(ledger.mark_s, resumed_s or 0.0)
        ledger.go_back(0, on_purpose=True)
        return
    if resumed_s is None or (failed is None and not restored and not behind):
        return
    room_s = max(0.0, resumed_s - ledger.mark_s)
    not_started_s = min(pending.not_started_s, room_s)
    down_s = max((e.down_s for e in restored), default=0.0)
    if down_s <= 0 and failed is not None:
        down_s = resumed_s - failed.at_s
    down_s = max(0.0, min(down_s, room_s) - not_started_s)
    unlost_s = max(0.0, ledger.trained_s - ledger.lost_s)
    lost_steps = max((e.lost_steps for e in restored), default=ledger.step)
    lost_s = unlost_s if worst is None else worst.lost_s
    if worst is not None and not 0.0 < lost_s <= unlost_s * ROUNDING:  # a pace of few iterations
        lost_s = lost_steps * ledger.iteration_s
    lost_s = min(lost_s, unlost_s)
    if behind > lost_steps:
        lost_steps, lost_s = behind, max(lost_s, min(behind * ledger.iteration_s, unlost_s))
    if pending.discards:
        lost_steps, lost_s = 0, 0.0
    restore_s = min(down_s, max((e.restore_s for e in restored), default=0.0))
    ledger.lost_s += lost_s
    ledger.down_s += down_s
    ledger.not_started_s += not_started_s
    ledger.restore_s += restore_s
    told_s = [e.detect_s for e in restored if e.detect_s is not None]
    if told_s:
        ledger.detect_s = (ledger.detect_s or 0.0) + min(down_s - restore_s, max(told_s))
    ledger.mark_s = max(ledger.mark_s, resumed_s)
    ledger.restores.append(
        Restore(
            at_s=resumed_s - start_s,
            failed_at_s=None if failed is None else failed.at_s - start_s,
            what="" if failed is None else failed.what,
            source=_sources(restored),
            generation="" if worst is None else worst.generation,
            step=0 if worst is None else worst.step,
            lost_steps=lost_steps,
            lost_s=lost_s,
            down_s=down_s,
            restore_s=restore_s,
            deaths=_deaths(pending.deaths),
            new_launch=pending.new_launch,
        )
    )
    ledger.go_back(0 if worst is None else worst.step, on_purpose=pending.discards)


ROUNDING = 1.0 + 1e-6
FOUND_LATER = -2
"""Stands for the rank of an end that the next keeper found."""


def is_found_later(event: FailureObserved) -> bool:
    """Told by a keeper that began after the end; others may have seen the same end."""
    return event.failed_rank < 0 and "keeper" in event.what


def _deaths(by_rank: Counter[int]) -> int:
    """Ranks that die together are one death, and so is an end that was found later again."""
    seen = max((count for rank, count in by_rank.items() if rank >= 0), default=0)
    found = max(seen, min(1, by_rank[FOUND_LATER]))
    return max(1, found + by_rank[-1])


def _book_cut_block(failed: FailureObserved, ledger: _Ledger) -> None:
    """Iterations that ended after the last block but before the failure were trained too."""
    gap_s = max(0.0, failed.at_s - ledger.mark_s)
    steps = max(0, failed.step - ledger.step)
    trained_s = min(steps * ledger.iteration_s, gap_s)
    stall_s = min(ledger.unsettled_stall_s, gap_s - trained_s)
    count = steps if trained_s > 0 else 0
    ledger.book(
        _Trained(step=failed.step, count=count, total_s=trained_s, stall_s=stall_s, excess_s=0.0)
    )
    ledger.step = max(ledger.step, failed.step)
    ledger.mark_s += trained_s + stall_s


def _sources(restored: Sequence[Restored]) -> str:
    """The farthest that one of the ranks needed: all others waited for it."""
    found = {event.source for event in restored}
    return next((far for far in ("disk", "parity", "peer") if far in found), ", ".join(found))


def _trained(block: IterationsTimed, usual_s: float | None) -> _Trained:
    """A block, with its time above undisturbed iterations; noise of both signs cancels later."""
    baseline_s = block.quiet_s if block.quiet_s > 0 else usual_s
    excess_s = 0.0
    if block.busy_s > 0 and baseline_s:
        excess_s = block.total_s - block.count * baseline_s
    return _Trained(step=block.step, count=block.count, total_s=block.total_s,
                    stall_s=block.checkpoint_s, excess_s=excess_s)  # fmt: skip


def _split_down(ledger: _Ledger, failures: Sequence[FailureRecord]) -> tuple[float, float, float]:
    """Return the down time as (detect, restart, restore); time not separated is restart."""
    rest_s = ledger.down_s - ledger.restore_s
    if ledger.detect_s is not None:
        return ledger.detect_s, rest_s - ledger.detect_s, ledger.restore_s
    detect_s = min(rest_s, sum(record.detect_s or 0.0 for record in failures))
    return detect_s, rest_s - detect_s, ledger.restore_s


def _paused_s(events: Sequence[Event]) -> float:
    """Time between a clean end (finished, or told to leave) and the next start."""
    paused_s = 0.0
    ended_s: float | None = None
    for event in events:
        if isinstance(event, RunEnded) and event.reason in ("finished", "signal"):
            ended_s = event.at_s
        elif isinstance(event, FailureObserved):
            ended_s = None
        elif isinstance(event, RunStarted) and ended_s is not None:
            paused_s += event.at_s - ended_s
            ended_s = None
    return paused_s


def startup_s(event: RunStarted) -> float:
    """From the launcher's decision to `event`, as far as it is known."""
    parts = (
        event.launch_s, event.interpreter_s, event.torch_import_s, event.process_group_s,
        event.script_s, event.wait_s, event.read_s, event.apply_s,
    )  # fmt: skip
    return sum(part for part in parts if part is not None and part > 0)
