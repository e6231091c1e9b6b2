"""One formula in Python, in the browser and in the policies."""

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autockpt.reports.analysis import what_if
from autockpt.reports.html.html import render
from autockpt.reports.html.page import script
from autockpt.reports.model import build
from autockpt.values.errors import ConfigError
from autockpt.values.units import format_duration, format_fraction
from tests.unit.reports.examples import POINT, profile_data

COSTS = st.fixed_dictionaries(
    {
        "stall_s": st.floats(0, 10),
        "slowdown_s": st.floats(0, 10),
        "latency_s": st.one_of(st.just(0.0), st.floats(1e-3, 100)),
        "restart_s": st.floats(0, 1000),
        "restore_s": st.floats(0, 1000),
        "failures_per_s": st.floats(1e-9, 1e-3),
    }
)
POINTS = [
    POINT,
    {**POINT, "memory_interval_s": 0.5, "mtbf_s": 600.0},
    {**POINT, "process_share": 0.0, "disk_slowdown": 0.3},
    {**POINT, "process_share": 1.0, "restart_s": 3600.0},
]


@given(COSTS, st.none() | COSTS, st.floats(0.1, 1e4), st.integers(1, 50))
def test_the_formula_is_the_waste_of_the_policies(
    disk: dict[str, float], memory: dict[str, float] | None, period_s: float, ratio: int
) -> None:
    """The page's formula and the function that decides agree to rounding, whatever the tiers."""
    policy = pytest.importorskip("autockpt.policies.cost_model.waste")
    tiers = {
        "memory": policy.TierCost(**memory) if memory else None,
        "disk": policy.TierCost(**disk),
        "memory_period_s": period_s,
        "disk_period_s": period_s * ratio,
    }
    decided = policy.waste(**tiers).total

    curve = what_if.what_if(**tiers, waste=decided, mtbf_assumed=True)

    assert what_if.waste(curve.point) == pytest.approx(decided, rel=1e-9, abs=1e-12)
    assert sum(what_if.terms(curve.point).values()) == pytest.approx(decided, rel=1e-9, abs=1e-12)


def test_the_browser_computes_what_python_computes(tmp_path: Path) -> None:
    """waste, its terms and the optimum, to the last few bits, at several points."""
    node = shutil.which("node")
    if node is None:
        pytest.skip("node is not installed")
    source = (
        f"{what_if.javascript()}\n"
        f"const points = {json.dumps(POINTS)};\n"
        "console.log(JSON.stringify(points.map(p => [waste(p), terms(p), optimum.memory(p), "
        "optimum.disk(p)])));"
    )
    seen = json.loads(_node(node, source, tmp_path))

    for point, (waste, terms, memory_s, disk_s) in zip(POINTS, seen, strict=True):
        assert waste == pytest.approx(what_if.waste(point), rel=1e-14)
        assert terms == pytest.approx(what_if.terms(point), rel=1e-14)
        assert memory_s == pytest.approx(what_if.optimum_s("memory", point), rel=1e-14)
        assert disk_s == pytest.approx(what_if.optimum_s("disk", point), rel=1e-14)


def test_the_browser_prints_figures_as_python_does(tmp_path: Path) -> None:
    """A slider moved there and back shows the text that was there before."""
    node = shutil.which("node")
    if node is None:
        pytest.skip("node is not installed")
    code = script()
    start, end = code.index("const three"), code.index("const byId")
    values = [2.5e-7, 0.00042, 0.0035, 0.412, 29.7, 119.6, 148.82, 5400.0, 43200.0, 90000.0, 4e5]
    fractions = [0.0, 0.000135, 0.00389, 0.02, 0.4, 0.9961, 1.0]
    source = (
        f"{code[start:end]}\nconsole.log(JSON.stringify([{json.dumps(values)}.map(duration), "
        f"{json.dumps(fractions)}.map(fraction)]));"
    )

    durations, shares = json.loads(_node(node, source, tmp_path))

    assert durations == [format_duration(value) for value in values]
    assert shares == [format_fraction(value) for value in fractions]


def test_the_page_script_runs_in_a_browser_without_error(tmp_path: Path) -> None:
    """Loaded from a file under its own content security policy, the script switches the page on."""
    dom = _browse(render(build(profile_data())), tmp_path)

    assert '<html lang="en" class="js">' in dom
    assert 'aria-valuetext="29.7 s"' in dom


def test_a_moved_slider_redraws_text_terms_and_curve(tmp_path: Path) -> None:
    """The page, a slider at its upper end: what it says is what Python computes there."""
    text = render(build(profile_data()))
    move = (
        "<script>const i = document.querySelector('input[data-name=mtbf_s]'); i.value = 0;"
        "i.dispatchEvent(new Event('input'));</script></body>"
    )
    unlocked = re.sub(r'<meta http-equiv="Content-Security-Policy"[^>]*>', "", text)
    before = re.search(r'<path d="([^"]+)" class="curve disk"', text)

    dom = _browse(unlocked.replace("</body>", move), tmp_path)

    point = {**POINT, "mtbf_s": POINT["mtbf_s"] / 100}
    shown = format_fraction(what_if.waste(point))
    best = format_duration(what_if.optimum_s("disk", point))
    assert f"Lost time {shown}, goodput " in dom
    assert f"disk every {best}." in dom
    lost = format_fraction(what_if.terms(point)["lost"])
    assert f'<b id="term-lost">{lost}</b>' in dom
    assert before is not None
    assert before.group(1) not in dom


def test_the_sliders_of_scale_move_what_follows_them(tmp_path: Path) -> None:
    """32 times the nodes on a storage 16 times as slow, beside a direct slider at its end."""
    text = render(build(profile_data()))
    moves = {"nodes": 1000, "storage": 0, "restart_s": 1000}
    script = "".join(
        f"{{const i = document.querySelector('input[data-name={name}]'); i.value = {value};"
        "i.dispatchEvent(new Event('input'));}"
        for name, value in moves.items()
    )
    unlocked = re.sub(r'<meta http-equiv="Content-Security-Policy"[^>]*>', "", text)

    dom = _browse(unlocked.replace("</body>", f"<script>{script}</script></body>"), tmp_path)

    point = {**POINT, "restart_s": POINT["restart_s"] * 20}
    moved = what_if.scaled(point, {"nodes": 32.0, "storage": 1 / 16})
    assert moved["mtbf_s"] == pytest.approx(POINT["mtbf_s"] / 32)
    assert moved["disk_latency_s"] == pytest.approx(POINT["disk_latency_s"] * 16)
    assert f"Lost time {format_fraction(what_if.waste(moved))}, goodput " in dom
    assert 'aria-valuetext="32 x"' in dom
    assert 'aria-valuetext="0.0625 x"' in dom


def test_every_scale_moves_parameters_of_the_formula() -> None:
    """And back again, whatever the order."""
    for scale, powers in what_if.SCALES.items():
        assert set(powers) <= set(what_if.PARAMETERS)
        there = what_if.scaled(POINT, {scale: 3.0})
        assert there != POINT
        assert what_if.scaled(there, {scale: 1 / 3}) == pytest.approx(POINT)


def test_the_injected_script_of_the_test_above_is_what_the_policy_stops(tmp_path: Path) -> None:
    """With the page's own policy the same script does not run."""
    text = render(build(profile_data()))
    attack = "<script>document.title = 'owned'</script></body>"

    assert "owned</title>" not in _browse(text.replace("</body>", attack), tmp_path)


def test_the_optimum_is_where_the_waste_is_least() -> None:
    """Moving the interval either way from the optimum loses more."""
    for tier in ("memory", "disk"):
        best_s = what_if.optimum_s(tier, POINT)
        least = what_if.waste({**POINT, f"{tier}_interval_s": best_s})
        for factor in (0.7, 1.4):
            moved = {**POINT, f"{tier}_interval_s": best_s * factor}
            assert what_if.waste(moved) > least


def test_verdict_and_what_if_tell_the_same_number() -> None:
    """The headline's lost time is that of the sliders at rest."""
    model = build(profile_data())

    assert model.what_if is not None
    shown = format_fraction(what_if.waste(model.what_if.point))
    assert model.verdict.headline.endswith(f"to {shown}.")
    assert f"Lost time {shown}," in render(model)


def test_a_formula_that_is_not_arithmetic_is_refused() -> None:
    """The evaluator knows numbers, names, + - * / and three functions."""
    for text in ("__import__('os')", "unknown + 1", "1 ** 9", "max(x=1)", "'a' * 9"):
        with pytest.raises(ConfigError, match="not arithmetic"):
            what_if.evaluate(text, {})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"mtbf_s": 0.0}, "mtbf_s must be > 0"),
        ({"disk_stall_s": float("inf")}, "expected finite"),
        ({"surprise": 1.0}, "unknown"),
    ],
)
def test_an_impossible_point_is_refused(change: dict[str, float], message: str) -> None:
    """A what-if must be something that can be drawn."""
    with pytest.raises(ConfigError, match=message):
        what_if.WhatIfCurve(point={**POINT, **change}, waste=0.1)


def _browse(text: str, folder: Path) -> str:
    """The document of a page after its scripts ran, from a real browser."""
    browser = shutil.which("chromium") or shutil.which("chromium-browser")
    if browser is None:
        pytest.skip("chromium is not installed")
    page = folder / "report.html"
    page.write_text(text, encoding="utf-8")
    command = [browser, "--headless", "--no-sandbox", "--disable-gpu", "--dump-dom",
               f"--user-data-dir={folder}/browser", page.as_uri()]  # fmt: skip
    result = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    if "</html>" not in result.stdout:
        pytest.skip("chromium does not start here")
    return result.stdout


def _node(node: str, source: str, folder: Path) -> str:
    file = folder / "check.js"
    file.write_text(source, encoding="utf-8")
    result = subprocess.run([node, str(file)], capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stderr
    return result.stdout
