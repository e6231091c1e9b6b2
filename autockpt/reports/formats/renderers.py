"""Every format a report can be written in, by name; modules load when their format is asked for."""

import difflib
from collections.abc import Callable
from dataclasses import dataclass

from autockpt.reports.data import RunData
from autockpt.reports.model import ReportModel, build
from autockpt.reports.redact import redact
from autockpt.values.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Renderer:
    """A format: its use, its file name, and its function."""

    name: str
    purpose: str
    file_name: str
    """Name in the run directory."""
    render: Callable[[RunData, ReportModel], str]


def _html(data: RunData, model: ReportModel) -> str:
    from autockpt.reports.html import html

    return html.render(model)


def _text(data: RunData, model: ReportModel) -> str:
    from autockpt.reports.formats import text

    return text.render(model)


def _json(data: RunData, model: ReportModel) -> str:
    from autockpt.reports.formats import json_out

    return json_out.render(model)


def _prometheus(data: RunData, model: ReportModel) -> str:
    from autockpt.reports.formats import prometheus

    return prometheus.render(model)


def _csv(data: RunData, model: ReportModel) -> str:
    """Telemetry itself, not the report; pandas loads here."""
    from autockpt.reports.formats import frames

    return frames.to_csv(data.events)


RENDERERS = {
    renderer.name: renderer
    for renderer in (
        Renderer(name="html", purpose="one offline page", file_name="report.html", render=_html),
        Renderer(name="text", purpose="the terminal", file_name="report.txt", render=_text),
        Renderer(name="json", purpose="programs", file_name="report.json", render=_json),
        Renderer(name="csv", purpose="every event, for a spreadsheet", file_name="telemetry.csv",
                 render=_csv),
        Renderer(name="prometheus", purpose="node_exporter's textfile collector",
                 file_name="autockpt.prom", render=_prometheus),
    )
}  # fmt: skip


def renderer(name: str) -> Renderer:
    """The renderer of a format.  Raises ConfigError listing the known ones."""
    if name not in RENDERERS:
        close = difflib.get_close_matches(name, RENDERERS, n=1)
        hint = f"; did you mean {close[0]}?" if close else ""
        raise ConfigError(f"unknown report format {name!r}; known: {', '.join(RENDERERS)}{hint}")
    return RENDERERS[name]


def report(data: RunData, *, format_: str = "html", redacted: bool = False) -> str:
    """A report of `data` as text in one format; `redacted` hides paths and hosts first."""
    chosen = renderer(format_)
    shown = redact(data) if redacted else data
    return chosen.render(shown, build(shown))
