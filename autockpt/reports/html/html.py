"""The report as one offline page."""

import json

from autockpt.reports.analysis.what_if import WhatIfCurve
from autockpt.reports.html.charts import u_curve
from autockpt.reports.html.escape import Html, join, json_script
from autockpt.reports.html.limits import LEVELS, PAGE_BYTES, bounded
from autockpt.reports.html.page import page
from autockpt.reports.html.sections import (
    advice,
    events,
    machine,
    risk,
    search,
    time,
    what_if,
    windows,
)
from autockpt.reports.model import ATTACH_LINES, ReportModel
from autockpt.values.record import to_json


def render(model: ReportModel) -> str:
    """The page of a profile or a run; under 500 KB, complete without network and script.

    A profile opens with predictions, a run with its history.
    """
    text = ""
    for level in LEVELS:
        text = _page(bounded(model, level))
        if len(text.encode()) <= PAGE_BYTES:
            break
    return text


def _page(model: ReportModel) -> str:
    predicted = (what_if.section(model),)
    happened = (time.section(model), events.promises(model), events.timeline(model))
    found = (
        *(predicted + happened if model.kind == "profile" else happened + predicted),
        windows.section(model),
        machine.storage(model),
        machine.memory_section(model),
        search.section(model),
        risk.section(model),
        advice.findings(model),
        advice.policy(model),
        advice.method(model),
    )
    return page(
        "report.html",
        model=model,
        attach_lines="\n".join(ATTACH_LINES),
        sections=[section for section in found if section is not None],
        data=_data(model),
    )


def _data(model: ReportModel) -> Html:
    blocks = [json_script(to_json(model), element_id="report-data")]
    if model.what_if is not None:
        blocks.append(json_script(_sliders(model.what_if), element_id="what-if-data"))
    return join(*blocks)


def _sliders(curve: WhatIfCurve) -> str:
    return json.dumps(
        {"point": curve.point, "tiers": curve.tiers, "geometry": u_curve.geometry(curve)}
    )
