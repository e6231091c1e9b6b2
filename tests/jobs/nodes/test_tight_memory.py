"""A node without room for the shards of others: said, tried again, and never in the way."""

import contextlib
import os
import re
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from autockpt.values.redundancy import Redundancy
from tests.conftest import keeper_pids
from tests.jobs.nodes.conftest import MakeJob

GROUPS = Path("/sys/fs/cgroup/memory")
WIDTH = 1280
"""Of a model whose image is 39 MB."""
LIMIT_BYTES = 32 * 2**20
"""Less than one image, and more than a keeper needs for itself."""
STILL_S = 1.0


@contextmanager
def memory_group(pid: int) -> Iterator[Path]:
    """A control group of this process with a limit.  Raises OSError where there are none."""
    group = GROUPS / f"autockpt-test-{os.getpid()}"
    group.mkdir()
    try:
        (group / "memory.limit_in_bytes").write_text(str(LIMIT_BYTES))
        (group / "cgroup.procs").write_text(str(pid))
        yield group
    finally:
        with contextlib.suppress(OSError):  # it may have ended
            (GROUPS / "cgroup.procs").write_text(str(pid))
        group.rmdir()


def own_slots(pid: int) -> int:
    """Slots of its own rank that a keeper has."""
    links = []
    with contextlib.suppress(OSError):
        links = [os.readlink(link) for link in Path(f"/proc/{pid}/fd").iterdir()]
    return len({found[0] for link in links if (found := re.search(r"autockpt-r\d+-s\d+", link))})


def huge_bytes(pid: int) -> int:
    """Of the slots that a keeper has, in huge pages.

    It gathers them in the background, and what is gathered counts for the group that it is in.
    """
    total, ours = 0, False
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
            if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
                ours = "/memfd:autockpt-r" in line
            elif ours and line.startswith(("ShmemPmdMapped:", "FilePmdMapped:")):
                total += int(line.split()[1]) * 1024
    return total


class Still:
    """Whether a number has not changed for a while."""

    def __init__(self, look: Callable[[], int]) -> None:
        self._look, self._seen, self._since_s = look, -1, 0.0

    def __call__(self) -> bool:
        """Looks once more."""
        now = self._look()
        if now != self._seen:
            self._seen, self._since_s = now, time.monotonic()
        return time.monotonic() - self._since_s > STILL_S


@pytest.mark.root
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_node_too_full_for_replicas_trains_and_saves_on_and_is_protected_once_there_is_room(
    new_job: MakeJob,
) -> None:
    """Its keeper is in a group with a limit from the moment it has the slots of its own rank."""
    job = new_job(2, Redundancy(scheme="replicas", copies=2), steps=60, width=WIDTH)
    job.start(2)
    job.wait(lambda: [own_slots(pid) for pid in keeper_pids(job.run_dir, 1)] == [3], "slots")
    (pid,) = keeper_pids(job.run_dir, 1)
    job.wait(Still(lambda: huge_bytes(pid)), "its slots in huge pages")
    with ExitStack() as stack:
        try:
            limited = stack.enter_context(memory_group(pid))
        except OSError as error:
            pytest.skip(f"no memory control groups here: {error}")
        job.limit.set(30)
        job.wait(lambda: bool(job.events("ReplicationLost", [1])), "a reason")
        job.wait(lambda: job.newest("CheckpointDurable") >= 20, "durable ones all the same")
        assert not job.events("GenerationReplicated"), job.tale()
        (lost, *others) = job.events("ReplicationLost", [1])
        assert "copy of rank 0" in lost["reason"]
        assert limited.name in lost["reason"], lost
        assert not others, "once, and not after every checkpoint"
        (limited / "memory.limit_in_bytes").write_text("-1")
        job.limit.set(60)
        job.wait(lambda: job.newest("GenerationReplicated") > 30, "protection")
    assert job.finish() == job.undisturbed(), job.tale()
