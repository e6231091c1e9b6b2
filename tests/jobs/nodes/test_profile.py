"""A profile of several nodes: the link between them is the line's, not the loopback's."""

import subprocess
import sys
from pathlib import Path

import pytest

from autockpt.run_directory import RunDirectory
from tests.jobs.nodes.conftest import launched
from tests.jobs.nodes.nodes_job import ROOT

BITS_PER_S = 400_000_000
SCRIPT = ("examples/gpt/train.py", "--size", "tiny", "--steps", "400", "--threads", "1",
          "--text-bytes", "200000")  # fmt: skip


@pytest.mark.root
@pytest.mark.slow
@pytest.mark.timeout(280)
def test_the_link_to_a_peer_is_measured_between_nodes(tmp_path: Path) -> None:
    """Within 20 % of the line's rate, with its slow-down; the policy takes it as measured."""
    with launched(2, BITS_PER_S, tmp_path, settings=(), script=SCRIPT, mode="profile") as job:
        job.finish(within_s=240.0)
        profile = RunDirectory(job.files.path).read_profile()
    assert profile is not None
    link = profile.link("host_to_peer")
    assert link is not None
    assert link.between_nodes, profile.warnings
    # Headers, and the burst that the bucket lets through.
    assert 0.8 < 8 * link.bytes_per_s / BITS_PER_S < 1.2
    assert "peer_host" in {measure.work for measure in profile.interference}, profile.warnings
    decided = subprocess.run(
        [sys.executable, "-m", "autockpt", "plan", "--profile", str(job.files.path), "--set",
         "redundancy.scheme=replicas"], cwd=ROOT, capture_output=True, text=True, check=True,
        timeout=60,
    )  # fmt: skip
    assert "no link to another node was measured" not in decided.stdout + decided.stderr
