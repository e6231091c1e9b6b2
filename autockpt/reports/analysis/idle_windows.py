"""Idle windows and the chunks that moved in them: one iteration of each rank, sums over the run.

A run shows the newest iteration that was reported with its times; a profile shows its measured
windows.  Where schedules of copying took turns, the cost of each stands beside its
prediction.
"""

import math
import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace

from autockpt.reports.analysis.timeline import ROWS, Row, Timeline
from autockpt.values.plan import Decision
from autockpt.values.profile import Bubble, Profile
from autockpt.values.telemetry import Event, IdleWindowsUsed, IterationsTimed, SettingMeasured

DRAWN = 16
"""Ranks in the chart: each has some hundred spans, and neighbours look alike."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankUse:
    """The windows of one rank, and their use."""

    rank: int
    windows: int
    """Of an iteration."""
    idle_s: float
    longest_s: float
    snapshots: int
    """That moved under windows; 0 in a profile."""
    window_share: float | None
    """Fraction of the bytes that moved in windows, None without a snapshot."""
    fence_share: float | None
    """That the training waited for."""
    chunk_bytes: int
    why_not: str
    """Why the newest snapshot did without windows, or a profile's were refused."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """A schedule of copying that took turns with others."""

    schedule: str
    expected_s: float | None
    """Training time of a snapshot as the decision had it; None: it had none."""
    observed_s: float
    error_s: float | None
    """Standard error of the mean; None for a single try."""
    tries: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Windows:
    """The section's data."""

    ranks: tuple[RankUse, ...]
    iteration: Timeline
    step: int
    """Whose iteration is drawn; 0: that of the profile."""
    schedule: str
    compared: tuple[Compared, ...] = ()
    """Of rank 0, over the whole run."""


def windows(
    events: Sequence[Event], profile: Profile | None, decision: Decision | None
) -> Windows | None:
    """Return the windows to show, None if the run and the profile have none."""
    found = _found(events, profile)
    return None if found is None else replace(found, compared=_compared(events, decision))


def _found(events: Sequence[Event], profile: Profile | None) -> Windows | None:
    used = [event for event in events if isinstance(event, IdleWindowsUsed)]
    bubbles = [b for b in profile.bubbles if b.what == "device"] if profile else []
    schedule = next((trace.schedule for trace in profile.traces), "") if profile else ""
    if used:
        return _of_run(used, schedule)
    if profile is None or not bubbles:
        return None
    return _of_profile(bubbles, profile.iteration_s.p50, schedule)


def _compared(events: Sequence[Event], decision: Decision | None) -> tuple[Compared, ...]:
    """Costs beyond the run's quiet iterations; without any, beyond the cheapest schedule."""
    tried = [
        e for e in events
        if isinstance(e, SettingMeasured) and e.decision == "schedule" and e.rank == 0
    ]  # fmt: skip
    if not tried:
        return ()
    blocks = [
        e.quiet_s for e in events if isinstance(e, IterationsTimed) and e.rank == 0 and e.quiet_s
    ]
    quiet_s = statistics.median(blocks) if blocks else min(t.total_s / t.iterations for t in tried)
    choice = None if decision is None else decision.choice("staging")
    expected = {} if choice is None else choice.numbers
    found = []
    for schedule in dict.fromkeys(event.setting for event in tried):
        own = [t.total_s - t.iterations * quiet_s for t in tried if t.setting == schedule]
        error_s = statistics.stdev(own) / math.sqrt(len(own)) if len(own) > 1 else None
        found.append(
            Compared(
                schedule=schedule, expected_s=expected.get(f"{schedule}_cost_s"),
                observed_s=statistics.fmean(own), error_s=error_s, tries=len(own),
            )
        )  # fmt: skip
    return tuple(found)


def _of_run(used: Sequence[IdleWindowsUsed], schedule: str) -> Windows:
    by_rank: dict[int, list[IdleWindowsUsed]] = defaultdict(list)
    for event in used:
        by_rank[event.rank].append(event)
    drawn = {rank: e for rank, events in by_rank.items() if (e := _drawn(events)) is not None}
    rows = [
        Row(
            label=f"rank {rank}",
            spans={
                "window": _whole(event.windows_s),
                "moved": _whole(event.moved_s),
                "beside": _whole(event.beside_s),
            },
        )
        for rank, event in sorted(drawn.items())
    ]
    return Windows(
        ranks=tuple(_rank_use(r, by_rank[r], drawn.get(r)) for r in sorted(by_rank)[:ROWS]),
        iteration=_iteration(rows),
        step=max((event.step for event in drawn.values()), default=0),
        schedule=schedule,
    )


def _drawn(events: Sequence[IdleWindowsUsed]) -> IdleWindowsUsed | None:
    return next((event for event in reversed(events) if event.windows_s), None)


def _rank_use(
    rank: int, events: Sequence[IdleWindowsUsed], drawn: IdleWindowsUsed | None
) -> RankUse:
    lengths = _lengths(_whole(drawn.windows_s)) if drawn else []
    inside = sum(event.window_bytes for event in events)
    fence = sum(event.fence_bytes for event in events)
    total = inside + fence + sum(event.overlap_bytes for event in events)
    newest = events[-1]
    return RankUse(
        rank=rank, windows=len(lengths), idle_s=sum(lengths), longest_s=max(lengths, default=0.0),
        snapshots=len(events),
        window_share=inside / total if total else None,
        fence_share=fence / total if total else None,
        chunk_bytes=newest.chunk_bytes, why_not=newest.reason or newest.refused,
    )  # fmt: skip


def _of_profile(bubbles: Sequence[Bubble], iteration_s: float, schedule: str) -> Windows:
    by_rank: dict[int, list[Bubble]] = defaultdict(list)
    for bubble in bubbles:
        by_rank[bubble.rank].append(bubble)
    rows, ranks = [], []
    for rank, own in sorted(by_rank.items()):
        ends = [(b.offset_s.p50, b.offset_s.p50 + b.length_s.p50) for b in own]
        rows.append(Row(label=f"rank {rank}", spans={"window": tuple(t for e in ends for t in e)}))
        lengths = [b.length_s.p10 for b in own]
        ranks.append(
            RankUse(
                rank=rank, windows=len(own), idle_s=sum(lengths), longest_s=max(lengths),
                snapshots=0, window_share=None, fence_share=None, chunk_bytes=0, why_not="",
            )
        )  # fmt: skip
    return Windows(
        ranks=tuple(ranks[:ROWS]),
        iteration=_iteration(rows, iteration_s),
        step=0,
        schedule=schedule,
    )


def _iteration(rows: Sequence[Row], least_s: float = 0.0) -> Timeline:
    """The rows that fit a chart, on one scale."""
    shown = tuple(rows[:DRAWN])
    moments = [moment for row in shown for spans in row.spans.values() for moment in spans]
    return Timeline(
        end_s=max([least_s, *moments], default=least_s), rows=shown, marks=(), ranks=len(rows),
        ranks_per_row=1, resolution_s=0.0, every=1, marks_left_out=0,
    )  # fmt: skip


def _whole(text: str) -> tuple[float, ...]:
    """Begins and ends; () where the text is not such, as in a torn line."""
    try:
        moments = [float(word) for word in text.split()]
    except ValueError:
        return ()
    pairs = zip(moments[::2], moments[1::2], strict=False)
    found = [(a, b) for a, b in pairs if 0 <= a <= b < math.inf]
    return tuple(moment for pair in found for moment in pair)


def _lengths(flat: Sequence[float]) -> list[float]:
    return [end - begin for begin, end in zip(flat[::2], flat[1::2], strict=True)]
