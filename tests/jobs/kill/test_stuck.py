"""A rank that a signal has stopped, under the real launcher, with two ranks of the example job."""

import os
import signal
from pathlib import Path

import pytest

from tests.jobs.kill.launched import STEPS, Launch, bare_digest


class StuckLaunch(Launch):
    """Ends a rank that is stuck."""

    SETTINGS = (*Launch.SETTINGS, "failures.stuck=restart")


@pytest.mark.slow
@pytest.mark.timeout(280)
def test_a_stopped_rank_is_named_ended_and_the_training_is_exact(tmp_path: Path) -> None:
    """The digest at the end is that of a run that nobody disturbed."""
    launch = StuckLaunch(tmp_path)
    incidents = launch.run_dir / "incidents"
    try:
        launch.wait(lambda: launch.step() >= STEPS // 2, "half of the training")
        os.kill(launch.trainer(0), signal.SIGSTOP)
        launch.wait(lambda: list(incidents.glob("*/incident.json")), "incident")
        digest = launch.finish()
    finally:
        launch.end()
    said = launch.log.read_text()
    assert "rank 0 is stuck at step" in said
    assert "stopped by a signal" in said
    [bundle] = incidents.iterdir()
    assert "_engine_run_backward" in (bundle / "rank-00001.txt").read_text()
    assert digest == bare_digest(tmp_path)
