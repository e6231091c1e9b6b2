"""The mixin asks for metrics that exist, and each alert has its runbook."""

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from autockpt.cli.app import run
from autockpt.reports.formats.mixin import ALERTS, PANELS, alerts, dashboard, runbook
from docs.generate import metric_names

KNOWN = {name for name, _, _ in metric_names()}


def test_rules_and_panels_ask_for_metrics_that_exist() -> None:
    """A renamed metric would leave an alert silent."""
    asked = {name for alert in ALERTS for name in re.findall(r"autockpt_\w+", alert.expression)}
    asked |= set(re.findall(r'"expr": "(autockpt_\w+)', dashboard()))
    assert {metric for _, metric, _ in PANELS} <= asked
    assert asked <= KNOWN


def test_each_alert_leads_to_a_heading_of_the_runbook() -> None:
    """The link's anchor is the heading's."""
    anchors = {heading.lower() for heading in re.findall(r"^## (\w+)$", runbook(), re.M)}
    rules = yaml.safe_load(alerts())["groups"][0]["rules"]
    assert [rule["alert"] for rule in rules] == [alert.name for alert in ALERTS]
    for rule in rules:
        assert rule["annotations"]["runbook_url"].partition("#")[2] in anchors


def test_the_command_writes_three_files(tmp_path: Path) -> None:
    """The dashboard is JSON with a panel for each line of the table."""
    assert run(["metrics", "--mixin", str(tmp_path / "m")]) == 0
    assert len(json.loads((tmp_path / "m" / "dashboard.json").read_text())["panels"]) == len(PANELS)
    assert {path.name for path in (tmp_path / "m").iterdir()} == {
        "alerts.yaml", "dashboard.json", "runbook.md",
    }  # fmt: skip


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed")
def test_promtool_accepts_the_rules(tmp_path: Path) -> None:
    """Without a complaint."""
    (tmp_path / "alerts.yaml").write_text(alerts())
    argv = ["promtool", "check", "rules", str(tmp_path / "alerts.yaml")]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
