"""A profile of a job whose checkpoints go to an object store: the store is what was measured."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from autockpt.run_directory import RunDirectory
from tests.jobs.kill.zygote import environment
from tests.jobs.store.test_run import SCRIPT, URL
from tests.unit.executors.storage.remote.test_remote import endpoint, s3

__all__ = ["endpoint", "s3"]


@pytest.mark.slow
def test_the_plan_of_a_run_follows_from_the_measured_store(s3: None, tmp_path: Path) -> None:
    """`autockpt profile`, then a run with that profile: rates of both directions, no disk."""
    url = URL.format("profiled")

    def cli(*words: str) -> str:
        done = subprocess.run(
            [sys.executable, "-m", "autockpt", *words], cwd=tmp_path, capture_output=True,
            env={**environment(), "TEST_PACE_S": "0.02"}, text=True, timeout=400, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return done.stdout

    place = ("--set", f"disk.path={url}")
    cli("profile", "--out", "p", *place, "--", str(SCRIPT), "--steps", "100000", "--width", "512")
    profile = RunDirectory(tmp_path / "p").read_profile()
    assert profile is not None
    assert profile.fingerprint.storage == "s3://bucket"
    assert {(m.operation, m.direct) for m in profile.storage} == {("write", False), ("read", False)}
    assert all(m.alpha_s >= 0 and m.bytes_per_s.n >= 2 for m in profile.storage)
    cli("run", "--profile", "p", *place, "--", str(SCRIPT), "--steps", "60", "--width", "512")
    (run,) = [path for path in (tmp_path / "runs").iterdir() if path.name.startswith("s3-")]
    (write,) = [m for m in profile.storage if m.operation == "write"]
    said = json.loads(cli("explain", str(run), "--json"))
    (staging,) = [c for c in said["decision"]["choices"] if c["name"] == "staging"]
    assert "store s3://bucket was measured: it takes a page in" in staging["reason"]
    expected = write.alpha_s + profile.state.total_bytes / write.bytes_per_s.mean
    assert staging["numbers"]["write_s"] == pytest.approx(expected)
    assert "ckpt-t0001-step-00000060" in cli("ls", url)
