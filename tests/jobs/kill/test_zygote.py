"""A process that forks trainers for hours meets every pid again."""

import os
from pathlib import Path

import pytest

from tests.jobs.kill.zygote import Zygote

LAST_PID = Path("/proc/sys/kernel/ns_last_pid")


@pytest.mark.skipif(not os.access(LAST_PID, os.W_OK), reason="needs root, to choose a pid")
def test_a_pid_that_comes_again_has_a_status_of_its_own(zygote: Zygote, tmp_path: Path) -> None:
    """The one before was killed; this one ends by itself."""
    nothing = {"steps": 1, "seed": 1}
    former = zygote.start(nothing, "", tmp_path, attach=False)
    os.kill(former, 9)
    assert zygote.status(former, wait_s=60) is not None
    for _ in range(20):  # others may take the pid first
        LAST_PID.write_text(str(former - 1))
        pid = zygote.start(nothing, "", tmp_path, attach=False)
        assert zygote.status(pid, wait_s=60) == 0
        if pid == former:
            return
    pytest.skip("the pid was always somebody else's")
