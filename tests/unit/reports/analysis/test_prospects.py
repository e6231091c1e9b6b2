"""Risk and search: what is said of them follows from the values, and the declared rate counts."""

import re
from dataclasses import replace

import pytest

from autockpt.reports.analysis.risk import Luck, sensitivity
from autockpt.reports.analysis.what_if import waste
from autockpt.reports.formats import text
from autockpt.reports.html.charts import luck, search
from autockpt.reports.html.html import render
from autockpt.reports.model import build
from autockpt.values.errors import ConfigError
from autockpt.values.profile import GpuCounters
from tests.unit.reports.examples import a_risk, a_search, a_what_if, profile_data, run_data


def test_the_band_is_of_the_worlds() -> None:
    """Of 1 to 100 the 5th and the 95th; the sentence says both and how often the plan wins."""
    many = Luck(name="plan", promised=0.5, lost=tuple(i / 100 for i in range(100, 0, -1)))
    assert (many.quantile(0.05), many.quantile(0.5), many.quantile(0.95)) == (0.05, 0.5, 0.95)
    other = Luck(name="habit", promised=0.5, lost=(0.305,) * 100)
    said = replace(a_risk(), ways=(many, other)).sentence()
    assert "In 90 % of 100 simulated stretches of 30 d between 5 % and 95 %" in said
    assert "50 % in the median; less than by habit in 30 % of them." in said


def test_worlds_without_figures_are_refused() -> None:
    """No band comes from nothing."""
    with pytest.raises(ConfigError, match="finite samples"):
        Luck(name="plan", promised=0.5, lost=())


def test_other_failure_rates_cost_more_than_their_best_plan() -> None:
    """More failures lose more; the best intervals are never worse, and at 1 the plan stands."""
    rows = sensitivity(a_what_if())
    assert [times for times, _, _ in rows] == sorted(times for times, _, _ in rows)
    mine = [row[1] for row in rows]
    assert mine == sorted(mine)
    assert all(best <= plan for _, plan, best in rows)
    assert {r[0]: r[1] for r in rows}[1.0] == waste(a_what_if().point)
    assert rows[-1][1] - rows[-1][2] > rows[2][1] - rows[2][2]


def test_violins_show_band_median_and_promise() -> None:
    """Each way once, widest where most worlds are; a promise outside the axis is left out."""
    drawn = luck.draw(a_risk())
    assert drawn.count('class="violin"') == drawn.count('class="whisker"') == 2
    assert drawn.count('class="best"') == 2
    far = replace(a_risk().ways[0], promised=0.9)
    assert luck.draw(replace(a_risk(), ways=(far,))).count('class="best"') == 0
    nothing = replace(a_risk().ways[0], lost=(0.0, 0.0, 0.1))
    assert "NaN" not in luck.draw(replace(a_risk(), ways=(nothing,)))


def test_every_write_has_a_mark_and_failures_are_crosses() -> None:
    """Stages differ in shape; the staircase never rises."""
    drawn = search.draw(a_search())
    assert drawn.count('class="write final"') == 2
    assert drawn.count('class="write failed"') == 1
    assert "failed, disk full" in drawn
    stairs = re.search(r'd="M([^"]*)" class="best-so-far"', drawn)
    assert stairs is not None
    heights = [float(point.split()[1]) for point in stairs.group(1).split("L")]
    assert heights == sorted(heights), "down on the page is faster"
    failed = tuple(replace(w, seconds=None, failure="full") for w in a_search().writes)
    assert "No write succeeded" in search.draw(replace(a_search(), writes=failed))


def test_page_and_terminal_tell_of_both() -> None:
    """Verdict, knobs, ways left out, band."""
    model = build(profile_data())
    page = render(model)
    for words in ("instead of 2 writers", "What mattered", "56 of 112 ways were not tried",
                  "If the failure rate is another one", "disk full"):  # fmt: skip
        assert words in page
    said = text.render(model)
    assert "Search\n  4 writers x 8 MiB direct none" in said
    assert "Risk\n  In 90 % of 60 simulated stretches" in said


def test_expected_failures_are_those_of_the_declared_rate() -> None:
    """The policy says one in 10 minutes where the profile thinks of days: 6.6 in 66 minutes."""
    data = run_data()
    assert data.what_if is not None
    point = {**data.what_if.point, "mtbf_s": 600.0}
    declared = replace(data, what_if=replace(data.what_if, point=point, mtbf_assumed=False))
    notes = {promise.name: promise.note for promise in build(declared).promises}
    assert "since the plan applies, 6.6 failures were due and 2 happened" in notes["waste"]
    bare = replace(data, what_if=None)
    notes = {promise.name: promise.note for promise in build(bare).promises}
    assert data.profile is not None
    due = data.profile.failures.interruptions_per_s * 3963
    assert f"{due:.2g} failures were due" in notes["waste"]
    page = render(build(declared))
    assert "declared by the policy" in page
    point["mtbf_s"] = 1.0 / data.profile.failures.interruptions_per_s
    same = replace(data, what_if=replace(data.what_if, point=point))
    assert "declared by the policy" not in render(build(same))


def test_a_declared_rate_is_no_assumption() -> None:
    """The finding names what is still assumed, and the rate is not among it."""
    data = profile_data()
    assert data.what_if is not None
    known = replace(data, what_if=replace(data.what_if, mtbf_assumed=False))
    evidence = {f.id: f.evidence for f in build(known).findings}
    assert "one interruption in" not in evidence["assumed"]
    evidence = {f.id: f.evidence for f in build(data).findings}
    assert "one interruption in 12 h" in evidence["assumed"]


def test_a_gpu_that_is_held_back_or_fails_is_found() -> None:
    """One hot, one without spare rows; what NVML does not tell is a dash."""
    data = profile_data()
    assert data.profile is not None
    quiet = GpuCounters(name="H200", pcie_generation=5, pcie_width=16, ecc_uncorrected=0,
                        temperature_c=60, xid_events=0)  # fmt: skip
    hot = replace(quiet, slowed_by=("heat (hardware)",), sm_clock_hz=1.2e9, sm_clock_most_hz=1.98e9)
    dying = replace(quiet, rows_remapped=8, remapping_failed=True)

    def found(*gpus: GpuCounters) -> tuple[str, str]:
        model = build(replace(data, profile=replace(data.profile, gpus=gpus)))
        page = render(model)
        return next(f.severity for f in model.findings if f.id == "gpus"), page

    assert found(quiet)[0] == "low"
    severity, page = found(quiet, hot)
    assert severity == "medium"
    assert "1.20 of 1.98 GHz" in page
    severity, page = found(hot, dying)
    assert severity == "high"
    assert "8 rows, no spare left" in page
    assert "gpus" not in {f.id for f in build(data).findings}
