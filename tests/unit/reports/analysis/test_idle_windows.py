"""The section on idle windows: a chart of one iteration, a table beside it, and why not more."""

import statistics
from dataclasses import replace

from autockpt.reports.analysis.idle_windows import DRAWN, Windows
from autockpt.reports.formats import text
from autockpt.reports.html import html
from autockpt.reports.model import ReportModel, build
from autockpt.values.record import from_json, to_json
from autockpt.values.telemetry import Event, IdleWindowsUsed, IterationsTimed, SettingMeasured
from tests.support.profiles import example_windows
from tests.unit.reports.examples import profile_data, run_data

WHY = "windows take 0 of 720 bytes (longest 0.10 ms)"


def used(rank: int, step: int, *, drawn: bool = True, **changed: object) -> IdleWindowsUsed:
    """A snapshot of 100 bytes, 90 of which moved in two windows."""
    event = IdleWindowsUsed(
        at_s=float(step), rank=rank, generation=f"step {step} (term 1)", step=step, window_bytes=90,
        overlap_bytes=8, fence_bytes=2, chunk_bytes=2**20, held_s=0.1,
        windows_s="0.0 0.2 0.5 0.6" if drawn else "", moved_s="0.01 0.1" if drawn else "",
        beside_s="0.3 0.31" if drawn else "",
    )  # fmt: skip
    return replace(event, **changed)  # type: ignore[arg-type]


def model_of(*events: Event) -> ReportModel:
    """A run with these events at its end."""
    data = run_data()
    return build(replace(data, events=(*data.events, *events)))


def windows_of(model: ReportModel) -> Windows:
    """The section's data."""
    assert model.windows is not None
    return model.windows


def test_the_newest_told_iteration_is_drawn_and_all_snapshots_are_counted() -> None:
    """Two ranks, two snapshots each, the second without times."""
    model = model_of(used(0, 1), used(1, 1), used(0, 2, drawn=False), used(1, 2, drawn=False))
    shown = windows_of(model)
    assert shown.step == 1
    assert [row.label for row in shown.iteration.rows] == ["rank 0", "rank 1"]
    assert shown.ranks[0].snapshots == 2
    assert shown.ranks[0].window_share == 0.9
    assert shown.ranks[0].fence_share == 0.02
    assert round(shown.ranks[0].idle_s, 9) == 0.3
    page = html.render(model)
    assert 'class="g-window"' in page
    assert "chunk moved beside compute" in page
    assert "Windows of an iteration by rank" in page
    assert "rank 1" in text.render(model)
    assert from_json(ReportModel, to_json(model)) == model


def test_a_fall_back_says_why_in_page_and_terminal() -> None:
    """A zero-bubble schedule: no chart, and the reason beside each rank."""
    event = used(0, 1, drawn=False, window_bytes=0, overlap_bytes=100, fence_bytes=0, reason=WHY)
    model = model_of(event)
    assert windows_of(model).iteration.rows == ()
    assert WHY in html.render(model)
    assert "longest 0.10 ms" in text.render(model)


def test_refused_windows_are_named() -> None:
    """The profile was of another schedule."""
    model = model_of(used(0, 1, refused="windows of schedule feed do not fit"))
    assert windows_of(model).ranks[0].why_not == "windows of schedule feed do not fit"


def test_a_profile_shows_its_windows_and_a_job_without_has_no_section() -> None:
    """Nothing was looked for, nothing is said."""
    data = profile_data()
    assert data.profile is not None
    fields = example_windows(lengths_s=(0.1, 0.3))
    shown = windows_of(build(replace(data, profile=replace(data.profile, **fields))))
    assert shown.step == 0
    assert shown.schedule == "1F1B"
    assert shown.ranks[0].windows == 2
    assert build(data).windows is None
    assert 'id="windows"' not in html.render(build(data))


def test_a_thousand_ranks_stay_on_one_page() -> None:
    """The chart draws some of them."""
    long = " ".join(f"{i}.25" for i in range(400))
    model = model_of(*[used(r, 1, windows_s=long, moved_s=long) for r in range(1000)])
    assert len(windows_of(model).iteration.rows) == DRAWN
    assert len(html.render(model).encode()) < 500_000


def tried(schedule: str, step: int, total_s: float, rank: int = 0) -> SettingMeasured:
    """A snapshot of a comparison."""
    return SettingMeasured(
        at_s=float(step), rank=rank, generation=f"step {step} (term 1)", step=step,
        decision="schedule", setting=schedule,
        iterations=1, total_s=total_s,
    )  # fmt: skip


def test_schedules_that_took_turns_are_shown_with_what_was_expected() -> None:
    """Rank 0 of the run; its own quiet iterations are the base, the decision's numbers the word."""
    data = run_data()
    assert data.decision is not None
    staging = data.decision.choice("staging")
    assert staging is not None
    numbers = {**staging.numbers, "windows_cost_s": 0.011}
    choices = tuple(
        replace(choice, numbers=numbers) if choice.name == "staging" else choice
        for choice in data.decision.choices
    )
    quiet_s = statistics.median(
        e.quiet_s
        for e in data.events
        if isinstance(e, IterationsTimed) and e.rank == 0 and e.quiet_s
    )
    events = (
        used(0, 1), tried("windows", 1, quiet_s + 0.3), tried("lazy", 2, quiet_s + 0.1),
        tried("windows", 3, quiet_s + 0.5), tried("windows", 4, 99.0, rank=1),
    )  # fmt: skip
    decision = replace(data.decision, choices=choices)
    model = build(replace(data, decision=decision, events=(*data.events, *events)))
    windows, lazy = windows_of(model).compared
    assert (windows.schedule, windows.tries, windows.expected_s) == ("windows", 2, 0.011)
    assert round(windows.observed_s, 6) == 0.4
    assert (lazy.tries, lazy.error_s) == (1, None)
    assert "Training time of a snapshot, stall included, by schedule" in html.render(model)
    assert "expected 11 ms" in text.render(model)
    assert from_json(ReportModel, to_json(model)) == model
