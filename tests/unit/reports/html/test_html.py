"""The page: whole, offline, small, readable, and deaf to whatever users write into it."""

import base64
import dataclasses
import hashlib
import json
import re
from collections.abc import Callable
from html.parser import HTMLParser
from importlib import resources
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autockpt.reports.analysis.what_if import WhatIfCurve
from autockpt.reports.data import RunData
from autockpt.reports.formats.json_out import read
from autockpt.reports.html.charts import iterations
from autockpt.reports.html.escape import VOID, Html, escape, json_script, tag
from autockpt.reports.html.html import render
from autockpt.reports.html.template import asset, macro
from autockpt.reports.model import build
from autockpt.values.profile import Distribution
from autockpt.values.telemetry import Degraded, Event, SnapshotDiscarded
from tests.unit.reports.examples import profile_data, run_data, unprotected_data

EXAMPLES = {"profile": profile_data, "run": run_data, "unprotected": unprotected_data}
PAYLOADS = (
    "</script><script>alert(1)</script>",
    '"><img src=x onerror=alert(1)>',
    "<!--<script>",
    "'-alert(1)-' & \u2028\u2029 </title></style></textarea>",
    "\x1b[31m\u202egnp.exe\x00\ud800",
)


class Reader(HTMLParser):
    """Collects elements and ids; fails on a closing tag that closes nothing."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: dict[str, str] = {}

    def handle_starttag(self, name: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((name, dict(attrs)))
        if name not in VOID:
            self.open.append(name)

    def handle_endtag(self, name: str) -> None:
        assert self.open[-1:] == [name], f"</{name}> closes {self.open[-3:]}"
        self.open.pop()

    def handle_data(self, data: str) -> None:
        if self.open:
            self.texts[self.open[-1]] = self.texts.get(self.open[-1], "") + data

    def count(self, name: str) -> int:
        return sum(1 for element, _ in self.elements if element == name)


def parse(text: str) -> Reader:
    reader = Reader()
    reader.feed(text)
    reader.close()
    assert reader.open == []
    return reader


@pytest.mark.parametrize("name", EXAMPLES)
def test_the_page_is_whole(name: str) -> None:
    """Balanced, one h1, landmarks, skip link, language, unique ids, every link inside the page."""
    reader = parse(render(build(EXAMPLES[name]())))

    assert reader.count("h1") == reader.count("main") == reader.count("header") == 1
    assert reader.count("nav") == reader.count("footer") == 1
    assert ("html", {"lang": "en"}) in reader.elements
    ids = [attributes["id"] for _, attributes in reader.elements if "id" in attributes]
    assert len(ids) == len(set(ids))
    links = [attributes["href"] for element, attributes in reader.elements if element == "a"]
    assert "#main" in links
    assert {str(link).removeprefix("#") for link in links} <= set(ids)


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("profile", ["what-if", "time", "storage", "memory", "search", "risk", "findings",
                     "policy", "method"]),
        ("run", ["time", "promises", "timeline", "what-if", "storage", "memory", "risk",
                 "findings", "policy", "method"]),
        ("unprotected", ["time", "timeline", "findings", "method"]),
    ],
)  # fmt: skip
def test_every_section_is_there_in_order(name: str, wanted: list[str]) -> None:
    """The specified sections, verdict first."""
    reader = parse(render(build(EXAMPLES[name]())))

    sections = [attrs.get("id") for element, attrs in reader.elements if element == "section"]
    assert [section for section in sections if section is not None] == ["verdict", *wanted]


@pytest.mark.parametrize("name", EXAMPLES)
def test_the_page_asks_no_network_for_anything(name: str) -> None:
    """No address, no source, no import; the policy would stop one."""
    text = render(build(EXAMPLES[name]()))
    reader = parse(text)

    assert not re.search(r"(https?:)?//[a-z]", re.sub(r"//# .*", "", text))
    assert "@import" not in text
    assert "url(" not in text.replace("url(#u-clip)", "")
    assert not any("src" in attributes for _, attributes in reader.elements)
    assert reader.count("link") == 0


def test_the_policy_names_the_one_script_by_its_hash() -> None:
    """Injected script has another hash and does not run."""
    text = render(build(run_data()))
    reader = parse(text)
    (policy,) = [a["content"] for e, a in reader.elements
                 if a.get("http-equiv") == "Content-Security-Policy"]  # fmt: skip
    code = text.rsplit("<script>", 1)[1].split("</script>", 1)[0]

    digest = base64.b64encode(hashlib.sha256(code.encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}'" in str(policy)
    assert "default-src 'none'" in str(policy)


@pytest.mark.parametrize("ranks", [1, 64, 65, 512])
def test_the_page_stays_small_for_many_ranks(ranks: int) -> None:
    """Under 500 KB, because rows are grouped and spans merged."""
    assert len(render(build(run_data(ranks=ranks, total=2880))).encode()) < 500_000


def test_the_page_stays_small_for_long_samples_and_texts() -> None:
    """A million characters of policy and samples do not end up in the page."""
    data = run_data(total=720)
    assert data.profile is not None
    profile = dataclasses.replace(data.profile, samples={"iteration_s": (0.41234567,) * 100_000})
    endless = "why " * 5_000
    events = (
        *data.events,
        *(Degraded(at_s=5100.0 + i, rank=0, what="x", reason=f"{i} {endless}") for i in range(99)),
    )
    huge = dataclasses.replace(
        data, profile=profile, plan_yaml="x: y\n" * 100_000, events=events, title=endless
    )

    text = render(build(huge))

    assert len(text.encode()) < 500_000
    assert "... (cut)" in text
    parse(text)


def test_the_embedded_json_is_the_report() -> None:
    """A page can be read back into the model it shows."""
    model = build(profile_data())
    text = render(model)

    block = re.search(r'id="report-data">(.*?)</script>', text, re.S)
    assert block is not None
    assert read(block.group(1)) == model


def test_an_unprotected_run_says_so_with_the_cure() -> None:
    """The banner and both lines to add."""
    text = render(build(unprotected_data()))

    assert "UNPROTECTED" in text
    assert "ckpt = autockpt.attach(model=model, optimizer=optimizer, data=loader)" in text
    assert "for step, batch in ckpt.batches(total_steps):" in text
    assert "UNPROTECTED" not in render(build(run_data()))


@given(
    st.lists(st.floats(0.0, 1e3), max_size=40),
    st.lists(st.floats(0.0, 1e3), min_size=4, max_size=4).map(sorted),
)
def test_the_axis_of_iteration_times_begins_at_no_negative_time(
    samples: list[float], quantiles: list[float]
) -> None:
    """Nor is any label of it negative, whatever the samples are."""
    p10, p50, p90, p95 = quantiles
    distribution = Distribution(
        p10=p10, p50=p50, p90=p90, p95=p95, mean=p50, n=max(1, len(samples))
    )
    drawn = str(iterations.draw(distribution, samples))
    assert not re.search(r">(?:p\d+ )?-\d", drawn)


@pytest.mark.parametrize("data", [profile_data, run_data, unprotected_data])
def test_no_share_of_a_whole_is_above_it(data: Callable[[], RunData]) -> None:
    """Goodput, lost time and their parts; and nothing is written as 1.05e+03 %."""
    text = re.sub(r"<(style|script)\b.*?</\1>", "", render(build(data())), flags=re.S)
    shares = re.findall(r"([\d.,e+]+) %", re.sub(r"<[^>]*>", "", text))
    assert shares
    assert not [share for share in shares if "e" in share]
    assert max(float(share.replace(",", "")) for share in shares) <= 100.0


def test_a_profile_of_a_run_s_first_iterations_counts_blocks() -> None:
    """Its samples are means of blocks."""
    data = profile_data()
    assert data.profile is not None
    samples = {"iteration_s": (0.3, 0.31), "busy_iteration_s": (0.33,)}
    in_place = dataclasses.replace(data.profile, samples=samples)
    text = render(build(dataclasses.replace(data, profile=in_place)))
    n = in_place.iteration_s.n
    assert f"in the median of {n} blocks of a second or more" in text
    assert f"{n} iterations" not in text
    assert f"in the median of {n} iterations" in render(build(data))


def test_an_empty_report_is_still_a_page() -> None:
    """Nothing on disk: no crash, and the next step in the verdict."""
    text = render(build(RunData(title="")))

    parse(text)
    assert "Run autockpt profile" in text


@pytest.mark.parametrize("payload", PAYLOADS)
def test_what_users_write_stays_text(payload: str) -> None:
    """The payload in every string of every record adds no element and no script."""
    clean = run_data(total=720)
    extra: tuple[Event, ...] = (
        Degraded(at_s=5100.0, rank=0, what="codec", reason="gone"),
        SnapshotDiscarded(at_s=5101.0, rank=0, generation="g", step=1, reason="moved"),
    )
    clean = dataclasses.replace(clean, events=clean.events + extra, policy_diff="-a\n+b\n")
    dirty = _poison(clean, payload)

    before, after = parse(render(build(clean))), parse(render(build(dirty)))

    assert after.count("script") == before.count("script")
    assert after.count("style") == before.count("style") == 1
    assert after.count("img") == 0
    assert not any(name.startswith("on") for _, attrs in after.elements for name in attrs)
    code = [attrs for element, attrs in after.elements if element == "script"]
    assert [attrs.get("type") for attrs in code].count(None) == 1
    data = re.search(r'id="report-data">(.*?)</script>', render(build(dirty)), re.S)
    assert data is not None
    assert not set(data.group(1)) & set("<>&\u2028\u2029")
    assert json.loads(data.group(1))["schema_version"] == 1
    render(build(dirty)).encode()


def test_tag_escapes_children_and_attributes() -> None:
    """Only Html passes; everything else becomes text."""
    assert tag("p", "<b>", title='"x"') == '<p title="&quot;x&quot;">&lt;b&gt;</p>'
    assert tag("p", Html("<b></b>")) == "<p><b></b></p>"
    assert tag("input", disabled=True, value=None) == "<input disabled>"
    assert escape("\x1b[2J\u202e") == "\ufffd[2J\ufffd"
    assert "</script" not in json_script('"</script>"', element_id="x")[:-9]


def _poison(value: Any, payload: str) -> Any:
    """`value` with the payload appended to every text that is free to be anything."""
    if isinstance(value, str):
        return value + payload
    if isinstance(value, WhatIfCurve):
        return value
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fixed = {"tier", "schedule", "persist", "path", "operation", "name", "source", "wall",
                 "tensor_class", "kind", "what", "codec", "work", "link", "reason"}  # fmt: skip
        kinds = {f.name: str(f.type) for f in dataclasses.fields(value)}
        free = {
            f.name: _poison(getattr(value, f.name), payload)
            for f in dataclasses.fields(value)
            if not (f.name in fixed and "Literal" in kinds[f.name])
            and not (f.name == "source" and isinstance(value, Event))
        }
        return dataclasses.replace(value, **free)
    if isinstance(value, dict):
        return {key + payload: _poison(item, payload) for key, item in value.items()}
    if isinstance(value, tuple):
        return tuple(_poison(item, payload) for item in value)
    return value


def test_what_encoders_are_worth_beside_the_training_is_said() -> None:
    """Below the table of codecs."""
    text = render(build(profile_data()))
    assert "Beside the training 2 encoders get done what 0.82 do with a core each" in text


@pytest.mark.parametrize("name", ["page.css", "page.js", "page.html", "macros.html", "report.html"])
def test_assets_are_files_of_the_package(name: str) -> None:
    """A wheel has them, as it has every file of the package."""
    folder = resources.files("autockpt.reports.html") / "templates"
    assert folder.joinpath(name).read_text(encoding="utf-8") == asset(name)


def test_a_template_escapes_as_tag_does() -> None:
    """Markup stays, text is shown, control characters are replaced, None is empty."""
    cells = (tag("b", "1 < 2"), '<i x="y">', "a\x1bb", 2.50, None)
    table = macro("table")(("", *"abcd"), [cells], caption="<script>", numbers=(3,))
    assert '<th scope="row"><b>1 &lt; 2</b></th>' in table
    shown = escape('<i x="y">')
    assert f'<td data-head="a">{shown}</td>' in table
    assert '<td data-head="b">a\ufffdb</td>' in table
    assert '<td class="n" data-head="c">2.5</td>' in table
    assert "<td></td>" in table
    assert "<caption>&lt;script&gt;</caption>" in table
