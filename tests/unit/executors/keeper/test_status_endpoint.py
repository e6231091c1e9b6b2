"""Prometheus text from the keeper: off by default, on the loopback, never in the training's way."""

import urllib.request

import pytest

from autockpt.executors.keeper.standing.status_file import StatusEndpoint, exposition
from autockpt.values.status import RunStatus

STATUS = RunStatus(
    state="running", exit_code=None, restarts=2, last_step=7, last_durable=None, protected=False,
    report=None,
)  # fmt: skip


def said() -> tuple[list[str], StatusEndpoint]:
    """An endpoint on a free port, and what it logs."""
    log: list[str] = []
    return log, StatusEndpoint("train", "0", log.append)


def test_it_is_off_by_default() -> None:
    """No port, no socket, no word."""
    log: list[str] = []
    endpoint = StatusEndpoint("train", "", log.append)
    endpoint.show(STATUS)
    endpoint.close()
    assert endpoint.port is None
    assert log == []


def test_it_serves_the_newest_status_on_the_loopback() -> None:
    """And nothing before there is one."""
    log, endpoint = said()
    try:
        url = f"http://127.0.0.1:{endpoint.port}/metrics"
        assert urllib.request.urlopen(url, timeout=60).read() == b""
        endpoint.show(STATUS)
        text = urllib.request.urlopen(url, timeout=60).read().decode()
        assert 'autockpt_restarts{run="train"} 2' in text
        assert "autockpt_durable_step" not in text
        assert 'autockpt_at_risk_steps{run="train"} 7' in text
    finally:
        endpoint.close()
    assert log == []


@pytest.mark.parametrize("port", ["nine", "70000", "-1"])
def test_a_port_that_cannot_be_served_is_logged(port: str) -> None:
    """The keeper goes on without the endpoint."""
    log: list[str] = []
    endpoint = StatusEndpoint("train", port, log.append)
    assert endpoint.port is None
    assert f"AUTOCKPT_METRICS_PORT={port}" in log[0]


def test_a_taken_port_is_logged() -> None:
    """Two keepers on one machine: the second one serves nothing."""
    _, first = said()
    log: list[str] = []
    try:
        second = StatusEndpoint("train", str(first.port), log.append)
        assert second.port is None
        assert "no metrics are served" in log[0]
    finally:
        first.close()


def test_names_of_runs_are_escaped() -> None:
    """A quote in a directory's name does not end the label."""
    assert 'run="a\\"b\\\\c"' in exposition(STATUS, 'a"b\\c')
