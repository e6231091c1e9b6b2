"""The page in a real browser: print, narrow and dark, without a request; names and contrast.

Without chromium these tests are skipped.  Contrast and headings need none.
"""

import html
import itertools
import json
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from autockpt.reports.data import RunData
from autockpt.reports.html.html import render
from autockpt.reports.html.template import asset
from autockpt.reports.model import build
from tests.unit.reports.examples import profile_data, run_data, unprotected_data

BROWSER = shutil.which("chromium")
needs_browser = pytest.mark.skipif(BROWSER is None, reason="no chromium on this machine")
DEADLINE_S = 240
MOST_PAGES = 6
CONTRAST = 4.5
"""WCAG 2.1, level AA, for text of normal size."""
PAGES: dict[str, Callable[[], RunData]] = {
    "profile": profile_data, "run": run_data, "unprotected": unprotected_data,
}  # fmt: skip

LOOK = """
(() => {
  const all = q => [...document.querySelectorAll(q)], seen = e => e.getClientRects().length > 0;
  const shown = all("tbody tr").filter(seen);
  const inside = e => [...e.children].reduce((h, c) => h + c.getBoundingClientRect().height, 0);
  return {
    width: innerWidth,
    overflow: document.documentElement.scrollWidth - innerWidth,
    rows: shown.length,
    empty: shown.filter(r => r.getBoundingClientRect().height > inside(r) + 24).length,
    hidden: shown.flatMap(r => [...r.children]).filter(
      c => seen(c) && c.getBoundingClientRect().left > innerWidth).length,
    requests: performance.getEntriesByType("resource").length,
    unnamed: all("button,input,select,a").filter(e => seen(e) && !(
      e.textContent.trim() || e.getAttribute("aria-label") || e.closest("label"))).length,
    images: all("svg[role=img]").filter(e => !e.querySelector("title")).length,
    paper: getComputedStyle(document.body).backgroundColor,
    ink: getComputedStyle(document.body).color,
  };
})()
"""


def browse(tmp_path: Path, *options: str) -> str:
    """Return the standard output of one look with the browser."""
    assert BROWSER is not None
    command = [
        BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
        "--no-first-run", f"--user-data-dir={tmp_path / 'browser'}", *options,
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=True)
    return done.stdout


def look(tmp_path: Path, name: str, *options: str, framed: int | None = None) -> dict[str, Any]:
    """Measure a page in the browser, once all of it is there.  Its policy is taken off for that.

    `framed`: within a frame of that many pixels, as chromium's own windows are wider than a phone.
    """
    text = re.sub(r"<meta http-equiv=.*?>", "", render(build(PAGES[name]())))
    script = (
        "<script>addEventListener('load', () => {"
        f"top.document.documentElement.dataset.found = JSON.stringify({LOOK})}})</script>"
    )
    page = tmp_path / "page.html"
    text = text.replace("</body>", f"{script}</body>")
    if framed is not None:
        text = f'<iframe width={framed} height=4000 srcdoc="{html.escape(text)}"></iframe>'
    page.write_text(text)
    dumped = browse(tmp_path, "--dump-dom", *options, page.as_uri())
    found = re.search(r'data-found="(.*?)"', dumped)
    assert found is not None
    result: dict[str, Any] = json.loads(html.unescape(found[1]))
    return result


@needs_browser
def test_a_profile_prints_on_few_pages(tmp_path: Path) -> None:
    """Folded blocks and the plan's file are not printed."""
    page, printed = tmp_path / "page.html", tmp_path / "page.pdf"
    page.write_text(render(build(profile_data())))
    browse(tmp_path, "--no-pdf-header-footer", f"--print-to-pdf={printed}", page.as_uri())
    pages = len(re.findall(rb"/Type\s*/Page\b", printed.read_bytes()))
    assert 1 <= pages <= MOST_PAGES


@needs_browser
@pytest.mark.slow
@pytest.mark.parametrize("name", PAGES)
def test_a_narrow_page_hides_nothing_and_has_no_empty_rows(tmp_path: Path, name: str) -> None:
    """As wide as a phone: no row is taller than its cells, which all lie on it."""
    found = look(tmp_path, name, "--window-size=640,4000", framed=400)
    assert found["width"] == 400
    assert found["overflow"] <= 0
    assert (found["empty"], found["hidden"]) == (0, 0)


@needs_browser
@pytest.mark.slow
@pytest.mark.parametrize("name", PAGES)
def test_a_page_asks_for_nothing_and_names_its_controls(tmp_path: Path, name: str) -> None:
    """No request; each button, input and link has a name, each chart a title."""
    found = look(tmp_path, name, "--window-size=1100,4000")
    assert (found["requests"], found["unnamed"], found["images"]) == (0, 0, 0)


@pytest.mark.parametrize("name", PAGES)
def test_a_page_names_no_other_file(name: str) -> None:
    """Whatever it loads stands in it, as `data:` or under an id."""
    named = r"""(?:\bsrc=|\burl\(|@import |<link )(?!["']?(?:data:|#))"""
    assert re.findall(named, render(build(PAGES[name]()))) == []


@needs_browser
@pytest.mark.slow
def test_a_page_is_dark_where_the_reader_wants_it(tmp_path: Path) -> None:
    """Paper and ink change places."""
    light = look(tmp_path, "run")
    dark = look(tmp_path, "run", "--blink-settings=preferredColorScheme=0")
    assert _luminance(*_rgb(light["paper"])) > _luminance(*_rgb(light["ink"]))
    assert _luminance(*_rgb(dark["paper"])) < _luminance(*_rgb(dark["ink"]))


@pytest.mark.parametrize("scheme", [0, 1], ids=["light", "dark"])
@pytest.mark.parametrize("name", ["ink", "soft", "accent", "good", "warn", "bad"])
def test_text_has_contrast_on_paper_and_panel(name: str, scheme: int) -> None:
    """Computed from the style sheet's own colours."""
    style = re.sub(r"\s+", "", asset("page.css"))
    colours = {
        key: (light, dark)
        for key, light, dark in re.findall(r"--([\w-]+):light-dark\((#\w+),(#\w+)\)", style)
    }
    text = _luminance(*_hex(colours[name][scheme]))
    for ground in ("paper", "panel"):
        other = _luminance(*_hex(colours[ground][scheme]))
        ratio = (max(text, other) + 0.05) / (min(text, other) + 0.05)
        assert ratio >= CONTRAST, (name, ground, ratio)


@pytest.mark.parametrize("name", PAGES)
def test_headings_go_down_one_level_at_a_time(name: str) -> None:
    """A reader of headings misses no level."""
    levels = [int(level) for level in re.findall(r"<h([1-6])[ >]", render(build(PAGES[name]())))]
    assert levels[0] == 1
    assert all(after <= before + 1 for before, after in itertools.pairwise(levels))


def _hex(colour: str) -> tuple[float, float, float]:
    digits = colour.removeprefix("#")
    digits = "".join(c * 2 for c in digits) if len(digits) == 3 else digits
    red, green, blue = (int(digits[i : i + 2], 16) / 255 for i in (0, 2, 4))
    return red, green, blue


def _rgb(colour: str) -> tuple[float, float, float]:
    red, green, blue = (int(part) / 255 for part in re.findall(r"\d+", colour)[:3])
    return red, green, blue


def _luminance(red: float, green: float, blue: float) -> float:
    """Relative luminance by WCAG 2.1, 0 to 1."""
    linear = [
        c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4 for c in (red, green, blue)
    ]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
