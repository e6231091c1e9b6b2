"""A Grafana dashboard, Prometheus alert rules and their runbook, from one table of alerts."""

import json
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Alert:
    """One rule, and the advice to the person whom it wakes."""

    name: str
    expression: str
    """PromQL."""
    lasts: str
    """How long the expression holds before the alert fires, as Prometheus writes durations."""
    severity: str
    summary: str
    advice: tuple[str, ...]
    """Steps, in order."""


ALERTS = (
    Alert(
        name="AutockptUnprotected",
        expression="autockpt_protected == 0",
        lasts="5m",
        severity="critical",
        summary="The training {{ $labels.run }} has no checkpoint that could be restored.",
        advice=(
            "Run `autockpt watch RUN`. Its line `protected` gives the reason.",
            "If the script never called `autockpt.attach`, `autockpt run` prints the lines to add.",
            "If a tier is degraded, follow its error: room on the disk, permissions, memory.",
        ),
    ),
    Alert(
        name="AutockptStorageFailing",
        expression="autockpt_storage_failing == 1",
        lasts="2m",
        severity="critical",
        summary="Checkpoints of {{ $labels.run }} do not reach the disk.",
        advice=(
            "Run `autockpt watch RUN`, and read the error of the disk.",
            "Free room or repair the mount. autockpt tries every save that is due again.",
            "Do not stop the job before a checkpoint is durable: memory holds the newest one.",
        ),
    ),
    Alert(
        name="AutockptManyStepsAtRisk",
        expression=(
            'autockpt_at_risk_steps > on (run) 10 * (autockpt_interval_steps{tier="disk"} > 0)'
        ),
        lasts="10m",
        severity="warning",
        summary="{{ $labels.run }} would lose {{ $value }} steps now, ten times its interval.",
        advice=(
            "Compare `saved` with `trained` in `autockpt watch RUN`.",
            "Run `autockpt report RUN` and read the skipped and discarded checkpoints.",
        ),
    ),
    Alert(
        name="AutockptSilent",
        expression="time() - autockpt_status_timestamp_seconds > 120 and autockpt_running == 1",
        lasts="5m",
        severity="warning",
        summary="The keeper of {{ $labels.run }} has not written its status for two minutes.",
        advice=(
            "Look whether the job runs. A run that ended in a crash leaves `running` behind.",
            "Start it again with the same command: it resumes the newest checkpoint.",
        ),
    ),
)  # fmt: skip

PANELS = (
    ("Protected", "autockpt_protected", "stat"),
    ("Steps at risk", "autockpt_at_risk_steps", "timeseries"),
    ("Trained and durable", "autockpt_last_step", "timeseries"),
    ("Goodput", "autockpt_goodput_ratio", "stat"),
    ("Stall of a checkpoint", "autockpt_stall_seconds", "timeseries"),
    ("Time to durable", "autockpt_durable_seconds", "timeseries"),
    ("Checkpoints by outcome", "autockpt_checkpoints_total", "timeseries"),
    ("Restarts", "autockpt_restarts", "stat"),
)
"""(title, metric, kind of panel)."""


def files() -> dict[str, str]:
    """Return the files of the mixin by name."""
    return {"dashboard.json": dashboard(), "alerts.yaml": alerts(), "runbook.md": runbook()}


def alerts() -> str:
    """Return the rules for `rule_files` of Prometheus."""
    lines = ["groups:", "  - name: autockpt", "    rules:"]
    for alert in ALERTS:
        lines += [
            f"      - alert: {alert.name}",
            f"        expr: {json.dumps(alert.expression)}",
            f"        for: {alert.lasts}",
            f"        labels: {{severity: {alert.severity}}}",
            "        annotations:",
            f"          summary: {json.dumps(alert.summary)}",
            f"          runbook_url: {json.dumps(f'runbook.md#{alert.name.lower()}')}",
        ]
    return "\n".join(lines) + "\n"


def runbook() -> str:
    """Return a heading for each alert, with steps."""
    lines = ["# Runbook of autockpt's alerts"]
    for alert in ALERTS:
        lines += ["", f"## {alert.name}", "", f"Fires when `{alert.expression}`.", ""]
        lines += [f"{number}. {text}" for number, text in enumerate(alert.advice, start=1)]
    return "\n".join(lines) + "\n"


def dashboard() -> str:
    """Return a dashboard for Grafana's import; the data source is chosen there."""
    panels = [_panel(number, *panel) for number, panel in enumerate(PANELS)]
    body: dict[str, Any] = {
        "title": "autockpt", "uid": "autockpt", "schemaVersion": 39, "editable": True,
        "time": {"from": "now-6h", "to": "now"}, "refresh": "30s",
        "templating": {"list": [
            {"name": "datasource", "type": "datasource", "query": "prometheus"},
            {"name": "run", "type": "query", "includeAll": True, "multi": True,
             "datasource": {"type": "prometheus", "uid": "${datasource}"},
             "query": "label_values(autockpt_protected, run)"},
        ]},
        "panels": panels,
    }  # fmt: skip
    return json.dumps(body, indent=2) + "\n"


def _panel(number: int, title: str, metric: str, kind: str) -> dict[str, Any]:
    column, row = number % 2, number // 2
    expressions = [metric]
    if metric == "autockpt_last_step":
        expressions.append("autockpt_durable_step")
    return {
        "id": number + 1, "title": title, "type": kind,
        "datasource": {"type": "prometheus", "uid": "${datasource}"},
        "gridPos": {"x": 12 * column, "y": 8 * row, "w": 12, "h": 8},
        "targets": [
            {"refId": chr(65 + index), "expr": f'{expression}{{run=~"$run"}}'}
            for index, expression in enumerate(expressions)
        ],
    }  # fmt: skip
