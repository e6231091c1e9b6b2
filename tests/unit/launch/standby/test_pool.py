"""When the launcher parks a process for the next incarnation."""

import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Literal

import pytest

from autockpt.console import Console
from autockpt.launch.standby import imports, pool
from autockpt.run_directory import RunDirectory


@pytest.mark.parametrize(("wish", "after_s", "parked"), [
    (None, 3600.0, False), (None, 0.0, True), ("on", 3600.0, True), ("off", 0.0, False),
])  # fmt: skip
def test_a_short_job_parks_nothing(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    wish: Literal["on", "off"] | None,
    after_s: float,
    parked: bool,
) -> None:
    """The pause counts from the moment at which the imports are known; `on` does not wait."""
    monkeypatch.setattr(pool, "AFTER_S", after_s)
    started: list[Any] = []
    real = subprocess.Popen

    def popen(*words: Any, **settings: Any) -> Any:
        started.append(words)
        return real([sys.executable, "-c", ""], start_new_session=True)

    standbys = pool.StandbyPool(RunDirectory.create(tmp_path / "r"), wish, Console(verbosity=-1))
    command = ("-u", "-m", "autockpt.cli.script_runner", "s.py")
    standbys._rank(
        lambda **settings: settings, local_rank_id=0, entrypoint=sys.executable, args=command,
        env={"RANK": "0"}, stdout=None, stderr=None,
    )  # fmt: skip
    standbys.tick()
    assert not started
    imports.script_begins()
    imports.write(str(standbys._run.path), 0)
    monkeypatch.setattr(pool.subprocess, "Popen", popen)
    standbys.tick()
    time.sleep(0.01)
    standbys.tick()
    assert bool(started) is parked
    standbys.close()
